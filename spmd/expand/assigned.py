"""Tensors that a step puts where a program does not: where, by whom, and what to do.

    def forward(self, x):
        self.seen.append((self.weight, x))      beside a parameter: would be a traced tensor after the capture

What programs do set is in `module_attributes`.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from spmd.expand.hooks import hooks_of_module
from spmd.expand.outside import line_naming
from spmd.expand.python_state import PythonState


def assigned_tensor(
    modules: Mapping[str, nn.Module], python: PythonState, but: Collection[tuple[int, str]]
) -> str:  # fmt: skip
    """What is wrong with the first of these modules that has a new tensor in an attribute; empty if none has.

    modules: by path. python: the state of the modules before the step. but: the attributes that hold nothing but
    tensors and plain values, by the identity of the module and by name.
    """
    for path, module in modules.items():
        if name := python.attribute_with_new_tensor(module, but):
            line = line_naming(functions_of(module), {name})
            return f"the step keeps a tensor in {path}.{name}, which its program would not{_ADVICE}{line}"
    return ""


_ADVICE = (
    ". An attribute may be a tensor, or hold tensors and plain values in lists, dicts, tuples or objects, and nothing "
    "else; use a local variable, or let the step return what is new"
)


def functions_of(owner: Any) -> Iterator[types.FunctionType]:
    """The functions that may have set an attribute of a module, an optimiser or an object: its methods, and its hooks.
    """
    for base in itertools.takewhile(lambda base: base not in (nn.Module, Optimizer, object), type(owner).__mro__):
        methods = (x for name, x in vars(base).items() if name != "__init__")
        yield from (x for x in methods if isinstance(x, types.FunctionType))
    for hook in hooks_of_module(owner) if isinstance(owner, nn.Module) else ():
        function = getattr(hook, "__func__", hook)
        yield from [function] if isinstance(function, types.FunctionType) else ()
