"""Dispatch modes, and whether the ops of this thread are traced."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import torch
from torch._subclasses import fake_tensor, functional_tensor
from torch.fx import _symbolic_trace
from torch.nn.modules import module
from torch.utils import _python_dispatch

from spmd._torch.versions import Unwritten, dict_behind, version_of

# A mode that sees every op below autograd.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# Inside, ops are not seen by the modes around.
no_modes = _python_dispatch._disable_current_modes

# Inside, functions of torch are not seen by the modes around, nor by subclasses.
no_function_modes = torch._C.DisableTorchFunction

# Inside, an op on a subclass runs on the tensor that torch has for it: of a wrapper without data, its shape alone.
no_dispatch = torch._C._DisableTorchDispatch

# Inside, ops that torch has in Python, too, run so: its code in C++ makes numbers of sizes that are symbols.
dispatched_in_python = torch._C._EnablePythonDispatcher

_FAKE, _PROXY, _FUNCTIONAL = (getattr(torch._C._TorchDispatchModeKey, k) for k in ("FAKE", "PROXY", "FUNCTIONAL"))


def left_out_by_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that Dynamo calls, and does not look into. Where nothing is compiled it is not loaded."""
    left_out = torch._disable_dynamo(fn)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (left_out if "torch._dynamo" in sys.modules else fn)(*args, **kwargs)

    return run


def is_tracing(x: torch.Tensor) -> bool:
    """Whether ops on x are traced: by Dynamo, AOTAutograd or make_fx, on fake or meta tensors."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return is_fake(x) or in_trace()


def is_fake(x: torch.Tensor) -> bool:
    """Whether x has no data, or stands for a tensor in a trace."""
    return x.is_meta or isinstance(x, (fake_tensor.FakeTensor, functional_tensor.FunctionalTensor))


def in_trace() -> bool:
    """Whether ops of this thread are traced, or run on fake tensors."""
    mode = torch._C._get_dispatch_mode
    return mode(_FAKE) is not None or mode(_PROXY) is not None or mode(_FUNCTIONAL) is not None


def in_symbolic_trace() -> bool:
    """Whether a torch.fx.Tracer runs this code in this thread: symbolic_trace, and the unpickling of a GraphModule."""
    if not _symbolic_trace._is_fx_tracing_flag:  # of all threads
        return False
    frame = sys._getframe()
    while frame is not None and frame.f_code is not torch.fx.Tracer.trace.__code__:
        frame = frame.f_back
    return frame is not None


def modes_around() -> tuple[int, ...]:
    """The modes of torch functions that are on, by identity, and how many of dispatch. Those that say that they only
    listen (`only_listens`) do not count."""
    return *map(id, function_modes()), torch._C._len_torch_dispatch_stack()


def untraced() -> contextlib.AbstractContextManager:
    """Inside, ops run on the data and no trace records them."""
    return _python_dispatch._disable_current_modes() if is_any_mode_on() else contextlib.nullcontext()


@contextlib.contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Inside, `torch.inference_mode` turns gradients off, and no more: a view of what was made outside of it cannot be
    functionalised. One thread at a time may be inside; the others find it as it is, and so does who is in that mode."""
    kind, thread = torch.inference_mode, threading.get_ident()
    enter = kind.__enter__

    def begin(self: torch.inference_mode) -> None:
        if threading.get_ident() != thread or torch.is_inference_mode_enabled():
            return enter(self)
        self._inference_mode_context = torch.set_grad_enabled(not self.mode)  # to be left as torch leaves its own
        return None

    kind.__enter__ = begin
    try:
        yield
    finally:
        kind.__enter__ = enter


def is_any_mode_on() -> bool:
    """Whether ops go through a dispatch mode: of a trace, or a user's."""
    return bool(torch._C._len_torch_dispatch_stack())


def flags_around() -> tuple:
    """What is set for this process that ops, or calls of modules, do differently: flags, threads, hooks on all modules.
    """
    hooks = [id(hook) for name in _HOOKS for hook in getattr(module, name, {}).values()]
    return *flags(), *hooks


def flags() -> list[Any]:
    """What is set around a call that ops do differently, in the order of `FLAGS`: by a block, or for this process."""
    return [ask() for ask in _ASK]  # at each call of a compiled step: what is asked once a step takes 1 us to ask


_FLAGS = (
    "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only", "_get_cudnn_sdp_enabled",
    "_get_deterministic_fill_uninitialized_memory", "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled", "_get_math_sdp_allow_fp16_bf16_reduction", "_get_cudnn_enabled", "_get_cudnn_benchmark",
    "_get_cudnn_deterministic", "_get_cudnn_allow_tf32", "_get_mkldnn_enabled", "_get_nnpack_enabled",
    "_get_cublas_allow_tf32", "_get_float32_matmul_precision",
)  # fmt: skip
_MODES: dict[str, Callable[[], Any]] = {
    "gradients": torch.is_grad_enabled, "inference mode": torch.is_inference_mode_enabled,
    "autocast on cpu": functools.partial(torch.is_autocast_enabled, "cpu"),
    "autocast on cuda": functools.partial(torch.is_autocast_enabled, "cuda"),
    "dtype of autocast on cpu": functools.partial(torch.get_autocast_dtype, "cpu"),
    "dtype of autocast on cuda": functools.partial(torch.get_autocast_dtype, "cuda"),
    "default dtype": torch.get_default_dtype,
}  # fmt: skip
_OF_PROCESS = {
    name.removeprefix("_get_").replace("_", " "): getattr(torch._C, name) for name in _FLAGS if hasattr(torch._C, name)
}
_OTHERS = {
    "fast path of attention": functools.partial(vars(torch.backends.mha).get, "_is_fastpath_enabled"),
    "number of threads": torch.get_num_threads,
}
_ASK_BY_NAME = _MODES | _OF_PROCESS | _OTHERS
FLAGS, _ASK = tuple(_ASK_BY_NAME), list(_ASK_BY_NAME.values())
_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks",
    "_global_buffer_registration_hooks", "_global_parameter_registration_hooks", "_global_module_registration_hooks",
)  # fmt: skip


def function_modes() -> list[Any]:
    """The modes of torch functions that are on, but for those that only listen (`only_listens`)."""
    if not (count := torch._C._len_torch_function_stack()):
        return []
    modes = map(torch._C._get_function_stack_at, range(count))
    return [mode for mode in modes if not getattr(mode, "only_listens", False)]


def hooks_of_all() -> dict[str, dict]:
    """The hooks that users have put on all modules and on the steps of all optimisers, by the tables of torch's that
    have any, and how these are called."""
    if not any(_OF_HOOKS):
        return {}
    known = {i for table in _TABLES.values() for i, x in table.items() if _is_users_hook(x)}
    theirs = {name: {i: x for i, x in table.items() if i in known} for name, table in _TABLES.items()}
    return {name: table for name, table in theirs.items() if table}


def _is_users_hook(x: Any) -> bool:
    return callable(x) and not getattr(x, "__module__", "").startswith("spmd.")


_TABLES = {
    name: table
    for of in (vars(module), vars(sys.modules[torch.optim.Optimizer.__module__]))
    for name, table in of.items()
    if name.startswith("_global_") and isinstance(table, dict)
}
"""Hooks by number. Where a table says how they are called, it may have numbers of hooks that are no more."""
_OF_HOOKS = tuple([table for name, table in _TABLES.items() if name.endswith("_hooks")])


def replaced_functions() -> dict[str, Any]:
    """The functions of torch.nn.functional and the methods of tensors that somebody has replaced since spmd was
    imported, by name."""
    return _replaced.found()


class _Replaced:
    """Functions of torch's, as they were. They are looked through again where somebody has written among them."""

    def __init__(self, places: dict[str, Any]) -> None:
        self._places = {name: dict_behind(place) for name, place in places.items()}
        self._known = {name: dict(own) for name, own in self._places.items()}
        self._look()

    def _look(self) -> None:
        self._unwritten = Unwritten(self._places.values())
        now = {of: {name: _behind(x) for name, x in own.items() if callable(x)} for of, own in self._places.items()}
        self._found = {
            f"{of}.{name}": x for of, own in now.items() for name, x in own.items()
            if self._known[of].get(name) is not x
        }  # fmt: skip

    def versions(self) -> list[Callable[[], int]]:
        """What tells whether somebody has written among them."""
        return [functools.partial(version_of, place) for place in self._places.values()]

    def known(self, of: type) -> dict[str, Any]:
        """What was there before, by name."""
        return self._known[f"torch.{of.__name__}"]

    def found(self) -> dict[str, Any]:
        if not self._unwritten.are_so():
            self._look()
        return self._found


def _once(new: Callable, old: Callable) -> Callable:
    thread = threading.get_ident()

    @functools.wraps(new)
    def run(*args: Any, **kwargs: Any) -> Any:
        by_mode = threading.get_ident() == thread and _is_of_mode(sys._getframe(1))
        return (old if by_mode else new)(*args, **kwargs)

    return run


_ONCE = next(x for x in _once.__code__.co_consts if isinstance(x, types.CodeType))


def _behind(x: Any) -> Any:
    """What somebody has put there, where `replaced_once` has put something in its place."""
    return x.__wrapped__ if isinstance(x, types.FunctionType) and x.__code__ is _ONCE else x


_replaced = _Replaced({"torch.nn.functional": vars(torch.nn.functional), "torch.Tensor": vars(torch.Tensor)})


@contextlib.contextmanager
def replaced_once() -> Iterator[None]:
    """Inside, a method of tensors that somebody has replaced is called once for a call, in this thread.

    A mode of functions is given a method by its name, and so what has replaced it, which the call of the method behind
    it comes from: each mode would call it again.
    """
    all_ = replaced_functions().items()
    found = {name.removeprefix(_OF_TENSORS): x for name, x in all_ if name.startswith(_OF_TENSORS)}
    before = {name: getattr(torch._C.TensorBase, name, None) for name in found} | _replaced.known(torch.Tensor)
    with contextlib.ExitStack() as undo:
        for name, new in found.items():
            if (old := before.get(name)) is not None:
                undo.callback(setattr, torch.Tensor, name, new)
                setattr(torch.Tensor, name, _once(new, old))
        yield


_OF_TENSORS = "torch.Tensor."


def _is_of_mode(frame: types.FrameType | None) -> bool:
    """Whether a mode of torch's or of spmd's passes a call on, be it in a function of its own."""
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_code.co_name == "__torch_function__":
            return True
        frame = frame.f_back
    return False


_LIBRARIES = tuple(os.path.dirname(sys.modules[name].__file__) + os.sep for name in ("torch", "spmd"))


class Around:
    """Flags, replaced functions, modes of functions and hooks of all around a call, as they were when this was made."""

    def __init__(self) -> None:
        self._known = [ask() for ask in _SWEEP]
        self._is_bare = not (torch._C._len_torch_function_stack() or any(_OF_HOOKS))

    def is_so(self) -> bool:
        """Whether they still are. False also where it takes longer to say: where there are modes or hooks, or somebody
        has written among the functions."""
        return self._is_bare and [ask() for ask in _SWEEP] == self._known


_SWEEP = [*_ASK, torch._C._len_torch_function_stack, functools.partial(any, _OF_HOOKS), *_replaced.versions()]


# ---- Dynamo -----------------------------------------------------------------------------------


def constant_in_dynamo(fn: Callable) -> Callable:
    """Decorates a function whose result Dynamo takes for a constant: torch.compiler's mark without importing Dynamo."""
    fn._dynamo_marked_constant = True
    return fn


def kept_whole_in_dynamo(fn: Callable) -> None:
    """From now on Dynamo, which is tracing, keeps a call of this function as one node and does not look inside."""
    sys.modules["torch._dynamo"].allow_in_graph(fn)
    frozen_are_constants()


def frozen_are_constants() -> None:
    """Call where Dynamo may be tracing: it takes frozen dataclasses, such as placements, for constants.

    It does so by itself since torch 2.12.
    """
    variables = sys.modules.get("torch._dynamo.variables.user_defined") if _REFUSES_FROZEN else None
    if variables is not None and variables.FrozenDataClassVariable.as_python_constant is not _frozen_constant:
        variables.FrozenDataClassVariable.as_python_constant = _frozen_constant


_REFUSES_FROZEN = torch.__version__ < (2, 12)


def _frozen_constant(variable: Any) -> Any:
    """The dataclass that a variable of Dynamo stands for."""
    made = [(each, variable.fields[each.name].as_python_constant()) for each in fields(variable.value) if each.init]
    by_name = {each.name: x for each, x in made if each.kw_only}
    return variable.python_type()(*[x for each, x in made if not each.kw_only], **by_name)


def not_compiled(fn: Callable) -> Callable:
    """Decorates a function that Dynamo leaves alone, if it has not inlined it: it makes tensors in several steps."""
    frames = torch._C._dynamo.eval_frame
    leave = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(fn.__code__, frames._FrameExecStrategy(leave, leave))
    return fn


def add_dynamo_guard(function: Callable[[], Any]) -> None:
    """While Dynamo traces: its compiled code holds as long as this function of a module returns what it returns now."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    tx = getattr(dynamo.tls, "current_tx", None) if dynamo is not None else None
    if tx is not None:
        _add_guard(function, tx)


def _add_guard(function: Callable[[], Any], tx: Any) -> None:
    from torch._dynamo import guards, source  # a second to import, but here that has been done

    called = source.CallFunctionNoArgsSource(
        source.AttrSource(tx.import_source(function.__module__), function.__name__)
    )
    guards.install_guard(called.make_guard(guards.GuardBuilder.EQUALS_MATCH))
