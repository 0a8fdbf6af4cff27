"""The modules and optimisers that a step uses and is not given as arguments.

    def step(x, y):                        model, optimizer: globals, or variables of the function around
        loss = model(x, y)
        loss.backward(); optimizer.step()

    spmd.compile(trainer.step, mesh)       trainer.model, trainer.optimizer: attributes that the code of step names

They belong to the state of the step as if they were arguments, under the names that the code has for them. They are
looked up at each call, because a variable may get another value. Functions of the user that the step names are read
too, and so is the code that its modules and classes run. What code finds in other ways, such as `getattr` with a
computed name, is not seen here; a trace that meets it raises.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import inspect
import io
import operator
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spmd import _torch
from spmd.expand.bytecode import Import, imports_in, instructions
from spmd.expand.guards import CONTAINERS, GUARDED_APART
from spmd.expand.hooks import hooks_of
from spmd.expand.modules import modules_of, parameters_of
from spmd.expand.objects import HOLDERS, holds_state
from spmd.expand.reads import Reads
from spmd.expand.sources.kinds import ATTRIBUTES, LEAVES, kinds_of
from spmd.expand.sources.layout import Container, is_set
from spmd.expand.user_code import at_user_line, current_frames

Held = dict[str, nn.Module | Optimizer]

Given = Mapping[str, Any]
"""The leaves of the arguments of a step, by path."""

NONE_GIVEN: Given = types.MappingProxyType({})


def find_closed_over(fn: Callable, given: Given = NONE_GIVEN, reads: Reads | None = None) -> Search:
    """The modules and optimisers that fn uses without being given them, by name (`found`), and the functions it names.

    Hooks on the parameters of these modules, and of those given, are functions that it calls. So are methods of objects
    that it is given, as of a trainer that holds a model. reads: where to note what was looked at.

    Raises TypeError for an iterator, a GradScaler, and for a parameter that is held by itself or in a list: a trace
    runs on other tensors, which the list would not have.
    """
    search = search_of(fn, given, reads)
    for module in [x for x in (*given.values(), *search.found.values()) if isinstance(x, nn.Module)]:
        for hook in hooks_of(parameters_of(module)):
            search.function(hook)
    for hook in (hook for table in _torch.hooks_of_all().values() for hook in table.values() if callable(hook)):
        search.function(hook)
    return search


def search_of(fn: Callable, given: Given = NONE_GIVEN, reads: Reads | None = None) -> Search:
    """What fn names, and what that names in turn, with the code of modules, optimisers and objects of the user: those
    given, and those found."""
    search = Search(package_of(getattr(fn, "__module__", None)), reads or Reads())
    search.function(fn)
    for each in _torch.replaced_functions().values():
        search.value(getattr(each, "__name__", ""), each, _NO_NAMES)
    others = {path: x for path, x in given.items() if not isinstance(x, HOLDERS)}
    search.holding = {path: x for path, x in others.items() if _has_attributes(x) and holds_state(x)}
    held = [("", "", x) for path, x in others.items() if path not in search.holding]
    looked_at: dict[int, Any] = {}
    looked_through = -1
    while looked_through < len(search.functions) + len(looked_at):  # what is held may bring functions that name more
        looked_through = len(search.functions) + len(looked_at)
        named = {x for fn in search.functions for x in names_in(fn.__code__).attributes}
        search.attributes_named = frozenset(named | search.got)
        for path, x in [*search.holding.items(), *search.objects.items()]:  # code may pass an object on
            search.value(path, x, Names((), tuple(sorted(search.attributes_named))))
        for x in [*given.values(), *search.found.values()]:
            if isinstance(x, HOLDERS) and id(x) not in looked_at:
                looked_at[id(x)] = x
                if isinstance(x, nn.Module):
                    held += search.module(x)
                else:
                    held += search.optimizer(x)
        for of, name, x in held:
            search.held(of, name, x, search.attributes_named)
    return search


GETTERS = operator.attrgetter, operator.methodcaller


def _names_got(x: Any) -> list[str]:
    """The names of the attributes that an object gets."""
    texts = [each for each in x.__reduce__()[1] if isinstance(each, str)]
    return [part for text in texts for part in text.split(".")]


class Names(NamedTuple):
    """The names in the code of a function and of the functions inside it: of globals, and of attributes."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]


@functools.lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> Names:
    globals_, attributes = set(), set()
    for name, value, _ in instructions(code):
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            globals_.add(value)
        elif name in ("LOAD_ATTR", "STORE_ATTR"):
            attributes.add(value)
    texts = {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
    attributes |= texts if not REFLECTING.isdisjoint(globals_ | attributes) else set()
    globals_ |= texts if not _OF_VARIABLES.isdisjoint(globals_ | attributes) else set()
    for text in code.co_consts if not _RUNNING.isdisjoint(globals_) else ():
        globals_.update(names_in(inner).globals if (inner := _code_of_text(text)) is not None else ())
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            globals_.update(names_in(inner).globals)
            attributes.update(names_in(inner).attributes)
    return Names(tuple(sorted(globals_)), tuple(sorted(attributes)))  # the same order on all ranks


def _code_of_text(text: Any) -> types.CodeType | None:
    """The code of a constant that `eval` or `exec` may run."""
    try:
        return compile(text, "<text>", "exec") if isinstance(text, str) else None
    except (SyntaxError, ValueError):
        return None


_RUNNING = frozenset({"eval", "exec"})
_OF_VARIABLES = frozenset({"globals", "vars", "locals", "f_globals", "f_locals"})
REFLECTING = _OF_VARIABLES | {"getattr", "hasattr", "attrgetter", "methodcaller", "__dict__", "__getattribute__"}
"""What finds variables or attributes by their names as text."""


class Search:
    """What was found, and where the search was. home: the package of the step, which is the user's.

    boxes: the containers that were found, and the attributes of objects of the user, by name. objects: these, by name.
    holding: the objects among the arguments that hold modules or optimisers, by path. libraries: objects of classes
    whose code is not looked through, by name. attributes_named: the names of
    attributes in all code that was found. functions: the user's. owners: of those that are methods, the object, or the
    class. classes: those of the user whose attributes code may read, with the names that it has for them. cached:
    functions of the user with a cache. contexts: context variables, by name. generators: those of Python's or numpy's
    random numbers, by name. loose: modules in containers that others hold. got:
    the names of attributes in objects that get them.
    """

    def __init__(self, home: str, reads: Reads) -> None:
        self.home, self.reads = home, reads
        self.found: Held = {}
        self.boxes: list[tuple[str, Container]] = []
        self.objects: dict[str, Any] = {}
        self.holding: dict[str, Any] = {}
        self.libraries: dict[str, Any] = {}
        self.attributes_named: frozenset[str] = frozenset()
        self._in_module = False
        self.functions: list[types.FunctionType] = []
        self.owners: list[tuple[types.FunctionType, Any]] = []
        self.classes: dict[type, set[str]] = {}
        self.cached: list[Callable] = []
        self.contexts: list[tuple[str, contextvars.ContextVar]] = []
        self.generators: list[tuple[str, Any]] = []
        self.loose: dict[int, nn.Module] = {}
        self.got: set[str] = set()
        self.seen: set[tuple] = set()

    def function(self, fn: Any) -> None:
        """Look through a function that the user wrote, and what is bound to it."""
        if isinstance(fn, functools.partial):
            self.reads.box(fn.keywords)
            self.items("partial", {i: v for i, v in enumerate(fn.args)} | fn.keywords, _NO_NAMES)
            self.function(fn.func)
        elif isinstance(fn, types.MethodType):
            self.method(fn.__func__, fn.__self__, "self")
        elif isinstance(fn, types.FunctionType):
            self.functions.append(fn)
            self.reads.function(fn)
            names = names_in(fn.__code__)
            variables = {name: fn.__globals__[name] for name in names.globals if name in fn.__globals__}
            for name in names.globals:
                self.reads.item(fn.__globals__, name)
            for cell in fn.__closure__ or ():
                self.reads.cell(cell)
            cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
            variables |= {name: cell.cell_contents for name, cell in cells if is_set(cell)}
            variables |= self.imported(fn) | _kept_by(fn)
            others = {name: fn.__builtins__.get(name) for name in names.globals if name not in fn.__globals__}
            variables |= {name: x for name, x in others.items() if isinstance(x, types.FunctionType)}
            got = {part for x in variables.values() if isinstance(x, GETTERS) for part in _names_got(x)}
            self.got |= got
            names = names._replace(attributes=tuple(sorted(got.union(names.attributes)))) if got else names
            for name, value in variables.items():
                self.value(name, value, names)
        elif isinstance(fn, nn.Module):
            self.found["self"] = fn
        else:
            self.method(type(fn).__call__, fn, "self")

    def imported(self, fn: types.FunctionType) -> dict[str, Any]:
        """What a function imports when it runs, by the name that it gives it: what is the user's, or torch's."""
        found = {}
        for variable, each in imports_in(fn.__code__).items():
            there = self.module_named(full := absolute(fn, each))
            value = there if there is None or not each.name else vars(there).get(each.name)
            if there is not None and each.name:
                self.reads.item(vars(there), each.name)
                value = value if value is not None else self.module_named(f"{full}.{each.name}")
            if value is not None:
                found[variable] = value
        return found

    def module_named(self, name: str) -> types.ModuleType | None:
        """A Python module of the user, or one of torch, that code imports. It is imported now if it was not yet, so
        that what the step reads is known before and after its first run."""
        if name not in sys.modules and _may_be_imported(name) and package_of(name) not in OURS:
            with contextlib.suppress(Exception):  # the step raises it, if it gets there
                importlib.import_module(name)
        self.reads.item(sys.modules, name)
        is_known = package_of(name) in OURS or not self.is_foreign(name)
        return sys.modules.get(name) if is_known else None

    def method(self, fn: Any, owner: Any, name: str) -> None:
        """Look through a method, those that it wraps, and the attributes of its object that they name."""
        if isinstance(inner := getattr(fn, "__wrapped__", None), types.FunctionType):
            self.method(inner, owner, name)
        if isinstance(fn, types.FunctionType) and (id(owner), fn.__code__) not in self.seen:
            self.seen.add((id(owner), fn.__code__))
            self.owners.append((fn, owner))
            self.value(name, owner, names_in(fn.__code__))
            if isinstance(owner, nn.Module):
                outside, self._in_module = self._in_module, True
                self.attributes(name, owner, names_in(fn.__code__))
                self._in_module = outside
            self.function(fn)

    def module(self, module: nn.Module) -> list[tuple[str, str, Any]]:
        """Look through the `forward` that a module runs, and what that names. Given back is by class and name what
        modules hold that may have code: hooks, functions, objects of the user. The values have guards of their own."""
        modules = modules_of(module)
        for kind in dict.fromkeys(map(type, modules)):
            self.code_of(kind, "forward")
        return [
            (type(m).__name__, name, x)
            for m in modules
            for name, x in vars(m).items()
            if type(x) not in _WITHOUT_CODE and name not in GUARDED_APART and not (isinstance(x, dict) and not x)
        ]

    def optimizer(self, optimizer: Optimizer) -> list[tuple[str, str, Any]]:
        """Look through the code of an optimiser of the user. Given back is what it holds, as by `module`."""
        self.code_of(type(optimizer), "step")
        return [
            (type(optimizer).__name__, name, x)
            for name, x in vars(optimizer).items()
            if type(x) not in _WITHOUT_CODE and name not in _OF_OPTIMIZERS
        ]

    def held(self, of: str, name: str, x: Any, attributes: frozenset[str]) -> None:
        """Look through the code of what an object of a class holds under a name. An iterator that code names is
        refused, and so is a file if code names what reads it."""
        if name in attributes and (_is_iterator(x) or (isinstance(x, io.IOBase) and attributes & _READING)):
            raise refused(f"{of}.{name}", x)
        if name in attributes and is_generator(x) and not any(x is other for _, other in self.generators):
            self.generators.append((name, x))
        self.code(x, attributes)

    def code(self, x: Any, attributes: frozenset[str]) -> None:
        """Look through the code of a function, of a class of the user or of an object of one, that something holds
        whose values have guards of their own. attributes: what code names of it, and of what it holds."""
        if type(x) in _WITHOUT_CODE or (id(x), attributes) in self.seen:
            return
        if isinstance(x, CONTAINERS):
            for each in (x.values() if isinstance(x, dict) else x):
                if type(each) not in _WITHOUT_CODE:
                    self.code(each, attributes)
        elif isinstance(x, nn.Module):
            self.seen.add((id(x), attributes))
            self.loose[id(x)] = x
            for each in self.module(x):
                self.held(*each, attributes)
        elif isinstance(x, types.MethodType):
            self.code_of(type(x.__self__), x.__name__)
            self.code(x.__self__, attributes)
        elif isinstance(x, functools.partial):
            self.code(x.func, attributes)
        elif isinstance(x, weakref.ref):
            self.code(x(), attributes)
        elif isinstance(x, (types.FunctionType, _CACHED)):
            self.value(x.__name__, x, _NO_NAMES)
        elif isinstance(x, type):
            self.kind(x, Names((), tuple(sorted(attributes))))
        elif self.is_object(x) and not isinstance(x, (types.ModuleType, *STATE)):
            self.seen.add((id(x), attributes))
            self.code(type(x), attributes)
            self.code_of(type(x), "__call__")
            for name in sorted(attributes & vars(x).keys()):
                self.held(type(x).__name__, name, vars(x)[name], attributes)

    def code_of(self, kind: type, name: str) -> None:
        """Look through a method of a class, those that it hides, and those that it names, where the user wrote them."""
        for base in kind.__mro__:
            fn = attribute = vars(base).get(name)
            while (fn := _function_of(fn)) is not None:
                if not self.is_foreign(fn.__module__) and (kind, fn.__code__) not in self.seen:
                    self.seen.add((kind, fn.__code__))
                    self.cached += [attribute] if isinstance(attribute, _CACHED) else []
                    self.owners.append((fn, kind))
                    self.function(fn)
                    self.kind(kind, names_in(fn.__code__))
                fn = getattr(fn, "__wrapped__", None)

    def made(self, kind: type, names: Names) -> None:
        """Look through a class that code names, and so may make objects of."""
        self.kind(kind, names)
        if not self.is_foreign(kind.__module__):
            for name in MAKING:
                self.code_of(kind, name)

    def kind(self, kind: type, names: Names) -> None:
        """Look through the methods and classes in a class of the user that code names, and what Python calls unnamed,
        and note what it names."""
        if self.is_foreign(kind.__module__) or (kind, names.attributes) in self.seen:
            return
        self.seen.add((kind, names.attributes))
        self.classes.setdefault(kind, set()).update(names.attributes)
        called = FUNCTION_METHODS if issubclass(kind, torch.autograd.Function) else ()
        for attribute in (*names.attributes, *called, *_called_unnamed(kind, self.is_foreign)):
            self.code_of(kind, attribute)
            inner = inspect.getattr_static(kind, attribute, None)
            if isinstance(inner, type) or (_has_attributes(inner) and not isinstance(inner, _OF_METHODS)):
                self.value(f"{kind.__qualname__}.{attribute}", inner, names)
        self.kind(type(kind), names)

    def note_kinds(self, kinds: Collection[type]) -> None:
        """Note what these classes are, with those that they inherit from, but for numbers of the user's that no code
        names: those of a class may change."""
        of_kinds = dict.fromkeys(type(kind) for kind in kinds)
        for base in dict.fromkeys(base for kind in (*kinds, *of_kinds) for base in kind.__mro__):
            if base not in (object, type):
                is_users = not self.is_foreign(base.__module__)
                self.reads.kind(base, [k for k, x in vars(base).items() if is_users and type(x) in _NUMBERS])

    def methods_and_functions(self) -> list[tuple[types.FunctionType, Any]]:
        """The user's functions, each with the object that it is a method of, or None."""
        owned = {id(fn) for fn, _ in self.owners}
        return [*self.owners, *((fn, None) for fn in self.functions if id(fn) not in owned)]

    def value(self, name: str, value: Any, names: Names) -> None:
        """Take a module or an optimiser; look through containers, functions and objects of the user."""
        if (id(value), names) in self.seen:
            return
        self.seen.add((id(value), names))
        if isinstance(value, type):
            self.made(value, names)
        elif isinstance(value, (_torch.OpOverload, _torch.OpOverloadPacket)):
            if _torch.is_traced_python(value):
                raise refused(name, value)
        elif isinstance(value, _CACHED):
            self.cached.append(value)
            self.value(name, value.__wrapped__, names)
        elif isinstance(value, contextvars.ContextVar):
            self.contexts.append((name, value))
        elif isinstance(value, (nn.Module, Optimizer)):
            if not any(value is other for other in self.found.values()):
                self.found[name if name not in self.found else f"{name}_{len(self.found)}"] = value
        elif isinstance(value, nn.Parameter) or _is_iterator(value) or _is_scaler(value):
            raise refused(name, value)
        elif is_generator(value):
            self.generators.append((name, value))
        elif isinstance(value, set | deque):
            self.boxes.append((name, value))
        elif isinstance(value, (list, tuple, dict)):
            if not isinstance(value, tuple):
                self.boxes.append((name, value))
                self.reads.box(value)
            self.items(name, value if isinstance(value, dict) else dict(enumerate(value)), names)
        elif isinstance(value, functools.partial):
            self.items(name, {i: x for i, x in enumerate((value.func, *value.args))} | value.keywords, names)
        elif isinstance(value, types.MethodType):
            self.value(name, value.__self__, names)
            if isinstance(value.__func__, types.FunctionType) and not self.is_foreign(value.__func__.__module__):
                self.method(value.__func__, value.__self__, name)
        elif isinstance(value, types.FunctionType):
            if not self.is_foreign(value.__module__):
                self.function(value)
        elif self.is_object(value):
            if not isinstance(value, types.ModuleType):
                self.boxes.append((name, vars(value)))
                self.object(name, value)
                self.kind(type(value), names)
            self.attributes(name, value, names)
        elif _has_attributes(value):
            self.library(name, value)
        elif not self.is_foreign(type(value).__module__):  # it has slots alone
            self.kind(type(value), names)
        elif hasattr(value, "__dict__") and not isinstance(value, types.ModuleType):
            # A library may call the user's code.
            for each in [x for x in vars(value).values() if type(x) not in _WITHOUT_CODE]:
                self.code(each, frozenset(names.attributes))

    def object(self, name: str, x: Any) -> None:
        """Note an object of the user, unless a module has it, which is looked at as a whole. Where another one has the
        name, it gets a number."""
        if not self._in_module and all(x is not other for other in self.objects.values()):
            several = sum(name == other or other.startswith(f"{name} (") for other in self.objects)
            self.objects[f"{name} ({several + 1})" if several else name] = x

    def library(self, name: str, x: Any) -> None:
        """Note an object of a class whose code is not looked through, and take what it holds that has code or state of
        the user: modules, optimisers and functions."""
        if self._in_module or any(x is other for other in self.libraries.values()):
            return
        self.libraries[name if name not in self.libraries else f"{name} ({len(self.libraries) + 1})"] = x
        seen, left = {id(x)}, [(name, x)]
        while left:
            path, held = left.pop()
            for kind in kinds_of(type(held)):
                for (_, step), value in kind.inside(kind.contents(held)):
                    if id(value) not in seen and type(value) not in LEAVES and not isinstance(value, type):
                        seen.add(id(value))
                        at = path if step is None else f"{path}.{step}"
                        if isinstance(value, (nn.Module, Optimizer, types.FunctionType)):
                            self.value(at, value, _NO_NAMES)
                        else:
                            left.append((at, value))

    def items(self, name: str, items: dict, names: Names) -> None:
        for key, value in items.items():
            if type(value) not in _WITHOUT_CODE:
                self.value(f"{name}.{key}", value, names)

    def attributes(self, name: str, owner: Any, names: Names) -> None:
        """Look through the attributes and methods of an object, or of a module of Python, that the code names."""
        self.reads.place(owner)
        for attribute in sorted(names.attributes):
            self.reads.item(vars(owner), attribute)
            if attribute in vars(owner):
                self.value(f"{name}.{attribute}", vars(owner)[attribute], names)
            elif not isinstance(owner, types.ModuleType):
                for base in type(owner).__mro__:
                    found = vars(base).get(attribute)
                    for fn in (_function_of(found), getattr(found, "fset", None)):
                        if isinstance(fn, types.FunctionType) and not self.is_foreign(fn.__module__):
                            self.method(fn, owner, name)

    def is_object(self, value: Any) -> bool:
        """Whether it is an object of a class of the user, a namespace, or a module of Python that the user wrote."""
        if isinstance(value, types.SimpleNamespace):
            return True
        of = value.__name__ if isinstance(value, types.ModuleType) else type(value).__module__
        return hasattr(value, "__dict__") and not self.is_foreign(of)

    def is_foreign(self, module: Any) -> bool:
        """Whether the code of a module is no user's: it knows none of the user's models."""
        if not isinstance(module, (str, types.GetSetDescriptorType)):  # as of a function that `exec` has made
            return False
        package = package_of(module)
        return package in OURS or (package != self.home and is_installed(package))


_NO_NAMES = Names((), ())

FUNCTION_METHODS = "forward", "setup_context", "backward", "vjp", "jvp", "vmap"
"""What torch calls of an `autograd.Function`, whose user names `apply` alone."""


MAKING = "__new__", "__init__", "__post_init__"
"""What makes objects of a class. It is looked through where code of the step names the class."""


def _called_unnamed(kind: type, is_foreign: Callable[[str], bool]) -> list[str]:
    """The methods of a user's class that Python calls where code does not name them, as operators and `with` do."""
    own = dict.fromkeys(name for base in kind.__mro__ if not is_foreign(base.__module__) for name in vars(base))
    return [name for name in own if name[:2] == name[-2:] == "__" and name not in (*MAKING, *_SHOWING)]


_SHOWING = (
    "__repr__", "__str__", "__reduce__", "__reduce_ex__", "__getstate__", "__init_subclass__", "__class_getitem__",
)  # fmt: skip
"""Methods that show or keep an object, or make a class: no number comes of them."""


def _function_of(attribute: Any) -> types.FunctionType | None:
    """The function of an attribute of a class that has code: a method, a property, or a cached one of these."""
    for name in ("fget", "func", "__func__", "__wrapped__"):
        if isinstance(attribute, (property, functools.cached_property, staticmethod, classmethod, _CACHED)):
            attribute = getattr(attribute, name, attribute)
    return attribute if isinstance(attribute, types.FunctionType) else None


_NUMBERS = bool, int, float
_OF_OPTIMIZERS = {"defaults", "param_groups", "state"} | _torch.NOTED_IN_OPTIMIZERS
_CACHED = functools._lru_cache_wrapper
_WITHOUT_CODE = {bool, int, float, str, type(None), types.BuiltinFunctionType}
_READING = {"read", "readline", "readlines"}
STATE = torch.Tensor, nn.Module, Optimizer


def _is_iterator(value: Any) -> bool:
    """Whether it is an iterator of Python's own, such as a generator or a count."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def _is_scaler(value: Any) -> bool:
    return isinstance(value, GradScaler) and value.is_enabled()


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers of Python or of numpy."""
    numbers = sys.modules.get("numpy.random")
    return isinstance(value, (random.Random, *((numbers.Generator, numbers.RandomState) if numbers else ())))


_OF_METHODS = types.FunctionType, staticmethod, classmethod, property, functools.cached_property, nn.Parameter


def _kept_by(fn: types.FunctionType) -> dict[str, Any]:
    """The objects that a function keeps: what its arguments are by default, and its attributes."""
    names, values = fn.__code__.co_varnames[: fn.__code__.co_argcount], fn.__defaults__ or ()
    found = dict(zip(names[len(names) - len(values) :], values, strict=True)) | (fn.__kwdefaults__ or {})
    found |= {f"{fn.__name__}.{name}": x for name, x in vars(fn).items() if name != "__wrapped__"}
    return {name: x for name, x in found.items() if _has_attributes(x)}


def _has_attributes(value: Any) -> bool:
    """Whether it is an object that is its attributes, whosever class it is of."""
    return ATTRIBUTES in kinds_of(type(value)) and not isinstance(value, (*HOLDERS, types.FunctionType))


def package_of(module: Any) -> str:
    """The package of a module, "" for what is no name: some classes of C have a descriptor as their `__module__`."""
    return module.partition(".")[0] if isinstance(module, str) else ""


OURS = "", "torch", "spmd"
"""Packages that are never the user's, also where the step is a module of torch's."""


def is_installed(package: str) -> bool:
    """Whether a package is torch, spmd, Python's own, or one that was installed, and no user's."""
    if package in OURS or package in sys.stdlib_module_names:
        return True
    return _is_of_site(getattr(sys.modules.get(package), "__file__", None) or "")  # it may be imported later


@functools.lru_cache(maxsize=1024)
def _is_of_site(file: str) -> bool:
    return file.startswith(tuple(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")))


def absolute(fn: types.FunctionType, what: Import) -> str:
    """The full name of the Python module that a function imports, or of which it imports something."""
    package = fn.__globals__.get("__package__") or package_of(fn.__module__)
    return importlib.util.resolve_name("." * what.level + what.module, package) if what.level else what.module


@functools.lru_cache(maxsize=1024)
def _may_be_imported(name: str) -> bool:
    """Whether a Python module that is not imported yet is there, and the user's."""
    package = package_of(name)
    if is_installed(package):
        return False
    try:
        spec = PathFinder.find_spec(package)
    except (ImportError, ValueError):
        return False
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return bool(places) and not any(map(_is_of_site, places))


def refused(name: str, value: Any) -> TypeError:
    if isinstance(value, GradScaler):
        return TypeError(
            f"the step uses {name}, a {type(value).__name__}, whose scale changes in each step; pass it as an argument"
        )
    if isinstance(value, (_torch.OpOverload, _torch.OpOverloadPacket)):
        return TypeError(
            f"the step uses {name}, the op {value} that is made of others in Python, whose code a step does not see; "
            "call the function that it is made of, or make it a torch.library.custom_op"
        )
    if isinstance(value, (Iterator, io.IOBase)):
        return TypeError(
            f"the step uses {name}, a {type(value).__name__}, of which the capture would take a value once; take the "
            "next value outside of the step, and pass it as an argument"
        )
    return TypeError(
        f"the step uses {name}, a parameter outside of its module, which a compiled step would not see as the one that "
        "it trains; reach it through the module, as in model.parameters()"
    )


REFUSED = {
    LBFGS: "which computes the loss as often as its values ask for; take its step outside of compiled code",
    SparseAdam: "whose gradients are sparse, with sizes that only the run knows; take Adam, and dense embeddings",
}
"""Optimisers that no program can hold, with the reason."""


def _is_of_trace(optimizer: Optimizer) -> bool:
    return all(isinstance(p, _torch.FunctionalTensor) for group in optimizer.param_groups for p in group["params"])


@contextlib.contextmanager
def only_optimizers(known: Held, what: str) -> Iterator[None]:
    """Inside, in this thread, a step of another optimiser is an error: its parameters are not those of the trace.

    So is a step of one that no program can hold. One that the step itself has made trains tensors of the trace.
    """
    thread = threading.get_ident()

    def check(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if threading.get_ident() != thread:
            return
        if (why := REFUSED.get(type(optimizer))) is not None:
            name = type(optimizer).__name__
            raise NotImplementedError(f"{what} uses {name}, {why}{at_user_line(current_frames())}")
        if not any(optimizer is other for other in known.values()) and not _is_of_trace(optimizer):
            raise RuntimeError(
                f"{what} calls the step of an optimiser ({type(optimizer).__name__}) that is not among its arguments, "
                "and that its code does not name as a variable or an attribute; pass it as an argument"
            )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()
