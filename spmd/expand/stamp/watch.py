"""Which Python code runs in a call: the user's functions, whoever calls them, and what they ask of the process.

    with Watch() as seen:
        module(x)
    seen.codes      the code of the user's functions that ran, with their globals
    seen.unseen     "time.perf_counter": a function whose result no one could foretell; empty if there was none

Code of torch and spmd is not looked at, and Python's own library only where code of the user calls it.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spmd.expand.collector import collector_off
from spmd.expand.stamp.reach import Code, names_of, package
from spmd.expand.user_code import SPMD_FOLDER

USER, LIBRARY, BETWEEN, ASKS, LATER = range(5)
"""Kinds of code: the user's; torch's and spmd's; Python's own, which counts as the code that calls it; code that gives
what the process, the machine or a generator says; and code that runs other code later."""

_TORCH = str(Path(torch.__file__).parent) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_INSTALLED = tuple(sysconfig.get_paths()[kind] + os.sep for kind in ("purelib", "platlib"))
_ASKING = tuple(
    _TORCH + each
    for each in "random.py cuda/ distributed/ _functorch/ jit/ autograd/__init__.py autograd/graph.py "
    "autograd/function.py autograd/functional.py autograd/forward_ad.py".split()
)
_LATER = (_TORCH + "utils/checkpoint.py",)
"""Code of torch that runs code of the user's again in the backward pass."""

_PACKAGES = {
    "torch", "spmd", "numpy", "sympy", "mpmath", "torchgen", "functorch", "typing_extensions", "networkx", "optree",
    "triton",
}  # fmt: skip
_BENEATH = tuple(folder + each + os.sep for folder in _INSTALLED for each in sorted(_PACKAGES)) + tuple(
    folder + "typing_extensions.py" for folder in _INSTALLED
)
"""Packages that compute, which torch runs beneath ops of the user's."""
_PLAIN_LIBRARY = {
    "_collections_abc", "_weakrefset", "abc", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum",
    "fractions", "functools", "heapq", "inspect", "keyword", "logging", "numbers", "operator", "re", "reprlib",
    "statistics", "string", "textwrap", "types", "typing", "warnings", "weakref", "importlib",
}  # fmt: skip
"""Modules of Python's own library that compute, and ask nothing."""

_ASKING_BUILTINS = {
    "breakpoint", "compile", "eval", "exec", "globals", "input", "locals", "open", "__import__",
}  # fmt: skip
_NAMING_BUILTINS = {"getattr", "hasattr", "setattr", "delattr", "vars", "dir"}
_OF_ENVIRONMENT = {(os.getenv.__code__.co_filename, name) for name in ("getenv", "__getitem__", "encode", "decode")}
_KNOWN_ANSWERS = {torch.jit.is_tracing.__code__, torch.jit.is_scripting.__code__}
"""Code that says the same all through a capture."""

_STATE = {"__getstate__", "__reduce__", "__reduce_ex__"}
"""Names of what copies all attributes of an object."""
_PURE = {
    "math", "cmath", "itertools", "_operator", "_functools", "_collections", "_abc", "_bisect", "_heapq", "_struct",
    "_weakref", "re", "unicodedata", "_warnings", "_sre", "_string", "torch", "numpy", "collections", "spmd", "types",
}  # fmt: skip
_ASKING_OF_TORCH = {"data_ptr", "storage", "untyped_storage", "initial_seed", "seed", "random_"}
_KNOWN_OF_TORCH = {"get_default_dtype", "get_autocast_dtype", "get_num_threads", "get_device"}
"""What is looked at elsewhere."""


class Watch:
    """Around a call: notes the code that runs in this thread. names_computed: whether it asks for attributes by names
    that it may have computed. asks_identity: whether it asks which objects it has. copies_state: whether it asks
    objects for a copy of all they hold. reads_environment: whether it reads variables of the environment.

    The garbage collector waits meanwhile: the finalizers that it would run are no code of the call. What a watch within
    another one has seen, that one has seen, too.
    """

    def __init__(self) -> None:
        self.codes: set[Code] = set()
        self.unseen = ""
        self.names_computed = False
        self.asks_identity = False
        self.copies_state = False
        self.reads_environment = False

    def __enter__(self) -> Watch:
        self._before, self._collector = sys.getprofile(), collector_off()
        self._collector.__enter__()
        self._around = Watch.present()
        if self._before is not None and self._around is None:
            self.unseen = "the code under a profiler"
        else:
            sys.setprofile(self._note)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._before is None or self._around is not None:
            sys.setprofile(self._before)
        if self._around is not None:
            self._around.include(self)
        self._collector.__exit__(*error)

    @staticmethod
    def present() -> Watch | None:
        """The watch that is on in this thread."""
        found = getattr(sys.getprofile(), "__self__", None)
        return found if type(found) is Watch else None

    def include(self, other: Watch) -> None:
        """Add what another watch has seen."""
        self.codes |= other.codes
        self.unseen = self.unseen or other.unseen
        for name in ("names_computed", "asks_identity", "copies_state", "reads_environment"):
            setattr(self, name, getattr(self, name) or getattr(other, name))

    def _note(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if event not in ("call", "c_call") or (kind := _KINDS.get(frame.f_code.co_filename)) == LIBRARY:
            return
        if kind is None:
            kind = kind_of(frame)
            if kind == LIBRARY:
                return
        if event == "c_call":
            if kind in (USER, BETWEEN) and _owner(frame) == USER:
                self._builtin(arg, frame)
        elif kind == USER:
            if (code := Code(frame.f_code, frame.f_globals)) not in self.codes and not _is_importing(frame):
                self.codes.add(code)
                self.copies_state = self.copies_state or not names_of(frame.f_code).attributes.isdisjoint(_STATE)
        elif kind == LATER or (kind == ASKS and _owner(frame.f_back) == USER):
            if (frame.f_code.co_filename, frame.f_code.co_name) in _OF_ENVIRONMENT:
                self.reads_environment = True
            elif frame.f_code not in _KNOWN_ANSWERS:
                self._ask(frame.f_code.co_name, frame)

    def _builtin(self, function: Any, frame: types.FrameType) -> None:
        if function.__name__ in _NAMING_BUILTINS and function.__self__ is _BUILTINS:
            self.names_computed = True
        elif function.__name__ in ("id", "hash") and function.__self__ is _BUILTINS:
            self.asks_identity = True
        elif not _is_pure(function):
            self._ask(f"{function.__module__ or ''}.{function.__name__}", frame)

    def _ask(self, name: str, frame: types.FrameType) -> None:
        if not self.unseen and not _is_importing(frame):
            self.unseen = f"what {name} says"


_BUILTINS = sys.modules["builtins"]


class unwatched:
    """Inside, where one of torch's own ops is traced, no code of the user's runs: a watch sleeps, which would look at a
    thousand calls of the trace's own code."""

    __slots__ = ("hook",)

    def __init__(self, op: Any) -> None:
        hook = sys.getprofile()
        sleeps = hook is not None and type(getattr(hook, "__self__", None)) is Watch and op.namespace in _OWN_OPS
        self.hook = hook if sleeps else None

    def __enter__(self) -> None:
        if self.hook is not None:
            sys.setprofile(None)

    def __exit__(self, *error: Any) -> None:
        if self.hook is not None:
            sys.setprofile(self.hook)


_OWN_OPS = {"aten", "prims", "prim", "spmd", "_c10d_functional"}
"""The namespaces of ops of torch's and spmd's own."""


def kind_of(frame: types.FrameType) -> int:
    """Whose code runs in a frame."""
    file = frame.f_code.co_filename
    if file.startswith("<") and not file.startswith("<frozen"):
        return kind_of_made(frame.f_globals)
    if file not in _KINDS:
        _KINDS[file] = kind_of_file(file)
    return _KINDS[file]


_KINDS: dict[str, int] = {}
"""Of the files that were met."""


def kind_of_made(variables: dict[str, Any]) -> int:
    """Whose code it is that has no file, such as what a dataclass makes. variables: its globals."""
    made_by = package(variables.get("__name__"))
    is_library = made_by in _PACKAGES or made_by in sys.stdlib_module_names or made_by.startswith("namedtuple_")
    return LIBRARY if is_library else USER


@functools.lru_cache(maxsize=1 << 16)
def kind_of_file(file: str) -> int:
    if file.startswith((*_ASKING, *_LATER)):
        return ASKS if file.startswith(_ASKING) else LATER
    if file.startswith((_TORCH, SPMD_FOLDER, *_BENEATH)):
        return LIBRARY
    if file.startswith("<frozen "):
        return BETWEEN if file[8:-1].partition(".")[0] in _PLAIN_LIBRARY else ASKS
    if file.startswith(_PYTHON) and not file.startswith(_INSTALLED):
        module = file[len(_PYTHON) :].partition(os.sep)[0].removesuffix(".py")
        return BETWEEN if module in _PLAIN_LIBRARY else ASKS
    return USER


def _owner(frame: types.FrameType | None) -> int:
    """Of a frame, or of the one that called it, through code of Python's own library."""
    while frame is not None and (kind := kind_of(frame)) == BETWEEN:
        frame = frame.f_back
    return LIBRARY if frame is None else kind


def _is_importing(frame: types.FrameType | None) -> bool:
    """Whether code runs because a module is imported, by whoever needs it first."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _is_pure(function: Any) -> bool:
    """Whether a function of C gives what its arguments say, and nothing else."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if owner is None or isinstance(owner, types.ModuleType):
        module = (function.__module__ or getattr(owner, "__name__", "")).partition(".")[0]
        return name not in _ASKING_BUILTINS if module == "builtins" else module in _PURE
    kind = owner if isinstance(owner, type) else type(owner)
    if isinstance(owner, (torch.Generator, random.Random)) or "random" in kind.__module__:
        return False
    base = function.__qualname__.rpartition(".")[0]
    known = kind.__module__.partition(".")[0] in {"builtins", *_PURE}
    return known or any(base == each.__name__ and each.__module__ == "builtins" for each in kind.__mro__)


# ---- autograd ---------------------------------------------------------------------------------


class AutogradSeen(TorchFunctionMode):
    """Inside, notes what code of the user's asks of tensors that is another thing inside of a call: where they come
    from, what gradients they have. So it does with hooks on them."""

    found = ""
    only_listens = True

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in _HOOKS:
            if not getattr(args[1], "__module__", "").startswith("spmd."):
                self.found = self.found or "hooks"
        elif function in _OF_AUTOGRAD and _is_for_user(sys._getframe(1)):
            self.found = self.found or _OF_AUTOGRAD[function]
        elif function in _CHANGING and not sys._getframe(1).f_code.co_filename.startswith(SPMD_FOLDER):
            self.found = self.found or function.__name__
        return function(*args, **(kwargs or {}))


def _is_for_user(frame: types.FrameType) -> bool:
    """Whether code of the user's asked, be it through spmd's."""
    while frame.f_code.co_filename.startswith(SPMD_FOLDER) and frame.f_back is not None:
        frame = frame.f_back
    return kind_of(frame) == USER


_HOOKS = {torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook}

_CHANGING = {torch.Tensor.retain_grad, torch.Tensor.backward, torch.Tensor.requires_grad_, torch.Tensor.detach_}

_OF_AUTOGRAD = {
    getattr(torch.Tensor, name).__get__: name
    for name in ("grad", "grad_fn", "is_leaf", "output_nr", "retains_grad", "_version", "_base")
} | {getattr(torch.Tensor, name).__set__: name for name in ("grad", "data", "requires_grad")}
