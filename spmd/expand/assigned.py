"""Tensors that a step assigns to attributes of modules, which a program would not: where, by whom, and what to do.

    def forward(self, x):
        self.scaled = self.weight * 2       would be a traced tensor when the step has been captured

The old `weight_norm`, `spectral_norm` and `prune` of `torch.nn.utils` do so in hooks before each call.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping

from torch import nn

from spmd.expand.hooks import hooks_of_module
from spmd.expand.outside import line_naming
from spmd.expand.python_state import PythonState


def assigned_tensor(modules: Mapping[str, nn.Module], python: PythonState) -> str:
    """What is wrong with the first of these modules that has a new tensor in an attribute; empty if none has.

    modules: by path. python: the state of the modules before the step.
    """
    for path, module in modules.items():
        if name := python.attribute_with_new_tensor(module):
            whose = next((hook for hook in hooks_of_module(module) if _tensor_of(hook) == name), None)
            advice = _OWN if whose is None else _OF_HOOK.format(type(whose).__name__, type(whose).__module__)
            line = line_naming(_functions(module), {name}) if whose is None else ""
            return f"the step keeps a tensor in {path}.{name}, which its program would not{advice}{line}"
    return ""


_OWN = (
    ". Use a local variable or let the step return it; keep what lasts with register_buffer, and write it with copy_; "
    "what is computed from parameters, torch.nn.utils.parametrize computes where it is read"
)
_OF_HOOK = (
    ": the hook {} of {} computes it before each call. Use torch.nn.utils.parametrizations.weight_norm or "
    "spectral_norm; in the place of prune, torch.nn.utils.parametrize.register_parametrization with a module that "
    "multiplies by a mask in a buffer"
)


def _tensor_of(hook: object) -> str | None:
    """The attribute that a hook of torch.nn.utils sets."""
    if not type(hook).__module__.startswith("torch.nn.utils."):
        return None
    return getattr(hook, "_tensor_name", getattr(hook, "name", None))


def _functions(module: nn.Module) -> Iterator[types.FunctionType]:
    """The functions that may have set an attribute of a module: its methods, and its hooks."""
    for base in type(module).__mro__[: type(module).__mro__.index(nn.Module)]:
        methods = (x for name, x in vars(base).items() if name != "__init__")
        yield from (x for x in methods if isinstance(x, types.FunctionType))
    for hook in hooks_of_module(module):
        function = getattr(hook, "__func__", hook)
        yield from [function] if isinstance(function, types.FunctionType) else ()
