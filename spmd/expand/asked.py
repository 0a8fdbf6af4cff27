"""What a step asks of the process while it is captured, which a program would freeze.

    time.time(), datetime.now(), os.getpid(), uuid.uuid4(), ...    a value that may be shown, and nothing else (`told`)
    os.environ["RANK"], os.getenv("DEBUG", "")                       a guard: another value makes another capture
    os.path.exists("skip"), os.getcwd(), torch.get_num_threads()     guards, too: they are asked again before each call
    open("weights.npy"), np.load(...), os.listdir("."), os.stat(...)   an error, with the line (`read_outside`)
    random.random(), numpy.random.rand()                           an error, with the line (`outside`)
    input()                                                        an error
    a function with functools.lru_cache                            called without its cache: that outlives the trace
    type(n)                                                        of a symbol: the type of what it stands for

While a step is captured, other functions stand for these in their modules, and in the variables of modules of the user.
They answer code of the user that runs in the thread of the capture, and what it calls of Python's library; all other
code finds what it always finds. Left out: clocks that are reached as attributes of objects, dates where the step itself
imports `datetime`, and the parts of the time of day (`time.localtime`).
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import functools
import gc
import hashlib
import io
import itertools
import os
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd import _torch
from spmd.expand.closed_over import Search, is_installed, package_of
from spmd.expand.outside import DRAWS, RandomNumbers
from spmd.expand.read_outside import PROCESS, READING, reads, reads_code, refused, who_reads
from spmd.expand.sources.kinds import NOTHING
from spmd.expand.sources.reached import Reached
from spmd.expand.told import Told
from spmd.expand.user_code import at_user_line, current_frames

CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
TOLD: dict[types.ModuleType, tuple[str, ...]] = {
    time: (*CLOCKS, *(f"{name}_ns" for name in CLOCKS)), os: ("getpid", "urandom"), uuid: ("uuid1", "uuid4"),
    torch: ("initial_seed",),  # which has the count of draws, too (`spmd.tensor.recipes.stream`)
}  # fmt: skip
"""Functions whose results are of the moment or of the process, by their modules."""

DATES: dict[type, tuple[str, ...]] = {datetime.datetime: ("now", "utcnow", "today"), datetime.date: ("today",)}
"""Classes that tell the time, and how."""

DRAWING = {
    "random": "random uniform randint randrange choice choices shuffle sample gauss normalvariate getrandbits seed",
    "numpy.random": "rand randn random random_sample randint normal standard_normal uniform choice permutation shuffle "
    "seed",
}
"""Functions that draw from the generators of Python and of numpy, or seed them."""


def _all_variables() -> str:
    """What tells all variables of the environment from others, and says none."""
    return hashlib.sha256(repr(sorted(os.environ._data.items())).encode()).hexdigest()


QUESTIONS: dict[str, Callable] = {
    "os.environ.get": os.environ.get, "os.environ.items": _all_variables,
    **{f"os.{name}": getattr(os, name) for name in ("getcwd", "getcwdb")},
    **{f"os.path.{name}": getattr(os.path, name) for name in ("exists", "lexists", "isfile", "isdir", "islink")},
    **{f"torch.{name}": getattr(torch, name) for name in (
        "get_num_threads", "get_num_interop_threads", "is_anomaly_enabled",
    )},
    "sys.getrecursionlimit": sys.getrecursionlimit,
}  # fmt: skip
"""Functions whose results are plain values that seldom change: a step may depend on them, and they are asked again
before each call. Variables of the environment are asked for in other ways, too."""

Question = tuple[str, ...]
"""One of these by name, with its arguments."""

Answers = dict[Question, tuple[Any, str]]
"""What was answered, and the line that asked."""


@dataclass
class Asked:
    """What code of the user asks. environment: with the answers, and the lines. draws: the line of the first draw of
    Python's or numpy's random numbers. error: of the first thing outside that it reads.
    results: what cached functions gave."""

    thread: int
    environment: Answers = field(default_factory=dict)
    draws: str = ""
    results: list[Reached] = field(default_factory=list)
    error: RuntimeError | None = None

    def refuse(self, error: RuntimeError) -> None:
        """Raise an error, also where the step catches it and goes on."""
        self.error = self.error or error
        raise error

    def by_user(self, behind: int = 1) -> bool:
        """Whether code of the user asks, and not for code: what a module asks when it is imported, it would have been
        told before the step as well. behind: how many frames stand between this and who asks."""
        here, frame = threading.get_ident() == self.thread, who_reads(sys._getframe(1 + behind))
        return here and _torch.asked_by_user(frame) and not reads_code(frame)


@contextlib.contextmanager
def asked(search: Search) -> Iterator[Asked]:
    """Inside, what the step asks of the process is noted. search: of the step; its variables are looked through. One
    thread at a time may be inside."""
    found = Asked(threading.get_ident())
    numbers = RandomNumbers.now()
    new = {id(function): (function, stand_in) for function, stand_in in _stand_ins(found, search)}
    kind_of = _torch.TypeOf(found.by_user)
    with contextlib.ExitStack() as undo:
        for kind in search.classes:
            for name in [name for name, x in vars(kind).items() if id(x) in new]:
                undo.callback(setattr, kind, name, vars(kind)[name])
                setattr(kind, name, new[id(vars(kind)[name])][1])
        for variables in _variables(search):
            for name in [name for name, x in variables.items() if id(x) in new]:
                undo.callback(variables.__setitem__, name, variables[name])
                variables[name] = new[id(variables[name])][1]
        for variables in _of_users(search):
            if "type" not in variables:
                undo.callback(variables.pop, "type", None)
                variables["type"] = kind_of
        for cell in _cells(search):
            if id(cell.cell_contents) in new:
                undo.callback(setattr, cell, "cell_contents", cell.cell_contents)
                cell.cell_contents = new[id(cell.cell_contents)][1]
        undo.callback(setattr, os.environ, "_data", os.environ._data)
        os.environ._data = _Environment(os.environ._data, found)
        undo.callback(setattr, PROCESS, "__init__", PROCESS.__init__)
        PROCESS.__init__ = _refusing_process(found, PROCESS.__init__)
        yield found
    if found.error is not None:
        raise found.error
    for each in found.results:
        for change in each.changes():
            raise RuntimeError(
                f"the step changes {change}, which a function with a cache gave and gives to others; let the function "
                "make what is changed anew, or keep it in a module"
            )
    if found.draws and (drawn := numbers.changed()):
        raise RuntimeError(f"{DRAWS.format(drawn)}{found.draws}")


def environment_differs(asked_before: Answers) -> str:
    """The first question that has another answer now than it had, as a sentence; empty for none."""
    for (name, *of), (answer, line) in asked_before.items():
        if (now := QUESTIONS[name](*of)) != answer:
            what = f"os.environ[{of[0]!r}]" if name == "os.environ.get" else f"{name}({', '.join(map(repr, of))})"
            return f"{what} was {answer!r} and is {now!r}, read at {line}"
    return ""


# ---- where functions are found ----------------------------------------------------------------


def _variables(search: Search) -> Iterable[dict[str, Any]]:
    """The variables of the modules whose functions have stand-ins, and of those of the user."""
    asked = os.path, io, torch, torch.random, sys
    modules = [*TOLD, *asked, builtins, *(sys.modules[name] for name in DRAWING if name in sys.modules)]
    found = [*map(vars, modules), *_of_users(search)]
    return {id(each): each for each in found}.values()


def _of_users(search: Search) -> Iterable[dict[str, Any]]:
    """The variables of the modules of users, and of those whose functions a step calls."""
    users = (m for name, m in list(sys.modules.items()) if not is_installed(package_of(name)))
    found = [vars(m) for m in users if isinstance(m, types.ModuleType)] + [fn.__globals__ for fn in search.functions]
    return {id(each): each for each in found}.values()


def _cells(search: Search) -> Iterator[types.CellType]:
    for fn in search.functions:
        for cell in fn.__closure__ or ():
            with contextlib.suppress(ValueError):  # it has no value yet
                cell.cell_contents  # noqa: B018
                yield cell


# ---- what stands for them ---------------------------------------------------------------------


def _stand_ins(found: Asked, search: Search) -> Iterator[tuple[Any, Any]]:
    """The functions and classes, each with what answers in its place."""
    for function in search.cached:
        yield function, _uncached(found, function)
    for module, names in TOLD.items():
        for name in names:
            if (function := getattr(module, name, None)) is not None:
                yield function, _telling(found, function, f"{module.__name__}.{name}()")
    for name, function in QUESTIONS.items():
        if not name.startswith("os.environ"):  # whose dict has a stand-in
            yield function, _answering(found, name, function)
    for module, names in READING.items():
        for name, does in names.items():
            yield getattr(module, name), _refusing(found, does, getattr(module, name))
    dates = types.ModuleType("datetime")  # the module itself stays: others may pickle its classes meanwhile
    vars(dates).update(vars(datetime))
    for kind, names in DATES.items():
        vars(dates)[kind.__name__] = telling = _class(found, kind, names)
        yield kind, telling
    yield datetime, dates
    yield builtins.input, _refusing_input(found, builtins.input)
    for module, names in DRAWING.items():
        for name in names.split() if module in sys.modules else ():
            function = getattr(sys.modules[module], name)
            yield function, _noting(found, function)


def _telling(found: Asked, function: Callable, what: str) -> Callable:
    def tell(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        return Told(value, f"{what} ({_line()})") if found.by_user() else value

    return tell


def _answering(found: Asked, name: str, function: Callable) -> Callable:
    def answer(*args: Any, **kwargs: Any) -> Any:
        value = function(*args, **kwargs)
        if found.by_user():
            of = [os.fspath(x) for x in (*args, *kwargs.values())]  # a TypeError for a number, which names an open file
            found.environment.setdefault((name, *of), (value, _line()))
        return value

    return answer


def _refusing(found: Asked, does: str, function: Callable) -> Callable:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if reads(does, args, kwargs) and found.by_user():
            found.refuse(refused(does, args))
        return function(*args, **kwargs)

    return refuse


def _refusing_process(found: Asked, init: Callable) -> Callable:
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        if found.by_user():
            what = kwargs.get("args", args[0] if args else "")
            found.refuse(refused("runs", (what if isinstance(what, str) else what[0],)))
        return init(self, *args, **kwargs)

    return begin


def _uncached(found: Asked, function: Callable) -> Callable:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not found.by_user():
            return function(*args, **kwargs)
        given = _cached(function, args, kwargs)
        result = function.__wrapped__(*args, **kwargs) if given is NOTHING else given
        found.results.append(Reached([(f"{function.__name__}()", result)], lambda module: True))
        return result

    return call


def _key(args: tuple, kwargs: dict[str, Any], mark: tuple, typed: bool) -> Any:
    """Under which a cache has what was given for these arguments."""
    named = (*mark, *itertools.chain.from_iterable(kwargs.items())) if kwargs else ()
    if typed:
        return (*args, *named, *map(type, args), *map(type, kwargs.values()))
    return args[0] if len(args) == 1 and not kwargs and type(args[0]) in (int, str) else (*args, *named)


def _cached(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a cached function has for these arguments; NOTHING if it would have to be run."""
    held = gc.get_referents(function)  # of a cache of some size: each key, and behind it what was given for it
    mark = tuple([x for x in held if type(x) is object])  # before arguments by name
    key = _key(args, kwargs, mark, function.cache_parameters()["typed"])
    box = next((x for x in held if type(x) is dict and x is not vars(function) and key in x), None)
    if box is None or function.cache_parameters()["maxsize"] is None:
        return NOTHING if box is None else box[key]
    known = next(x for x in box if x == key)
    return next(after for x, after in itertools.pairwise(held) if x is known)


def _line() -> str:
    """The user's line that asks."""
    return at_user_line(current_frames()).partition("\n  which runs ")[0].removeprefix("\n  at ")


def _class(found: Asked, kind: type, names: tuple[str, ...]) -> type:
    """A class whose functions of these names tell; whatever is made of it is of the real one."""
    telling = {name: staticmethod(_telling(found, getattr(kind, name), f"{kind.__name__}.{name}()")) for name in names}
    own = {"__new__": lambda cls, *args, **kwargs: kind(*args, **kwargs)}
    return _Like(kind.__name__, (kind,), telling | own)


class _Like(type):
    """A class of which all objects of its base are objects."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, cls.__base__)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.__base__)


def _refusing_input(found: Asked, function: Callable) -> Callable:
    def refuse(*args: Any) -> str:
        if found.by_user():
            raise RuntimeError(
                "the step asks for input(), which its program would do at the first call alone; ask before the step, "
                f"and pass the answer as an argument{at_user_line(current_frames())}"
            )
        return function(*args)

    return refuse


def _noting(found: Asked, function: Callable) -> Callable:
    def draw(*args: Any, **kwargs: Any) -> Any:
        if not found.draws and found.by_user():
            found.draws = at_user_line(current_frames())
        return function(*args, **kwargs)

    return draw


class _Environment(dict):
    """The variables of the environment, as bytes; notes which ones code of the user reads."""

    def __init__(self, variables: dict, found: Asked) -> None:
        super().__init__(variables)
        self._real, self._found = variables, found

    def __getitem__(self, key: bytes) -> bytes:
        self._note("os.environ.get", os.fsdecode(key))
        return self._real[key]

    def __iter__(self) -> Iterator[bytes]:
        self._note("os.environ.items")
        return iter(self._real)

    def __len__(self) -> int:
        self._note("os.environ.items")
        return len(self._real)

    def items(self) -> Iterable[tuple[bytes, bytes]]:
        self._note("os.environ.items")
        return self._real.items()

    def _note(self, *question: str) -> None:
        """Note what code of the user asks, unless it has asked for all of them."""
        known = self._found.environment
        if ("os.environ.items",) not in known and question not in known and self._found.by_user(2):
            known[question] = QUESTIONS[question[0]](*question[1:]), _line()

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._real[key] = value
        super().__setitem__(key, value)

    def __delitem__(self, key: bytes) -> None:
        del self._real[key]
        super().__delitem__(key)
