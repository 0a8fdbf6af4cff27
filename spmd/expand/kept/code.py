"""The code that a step runs, and the values that it reads beside its arguments, as entries of a key.

    code of train               a digest of the file: the step, the classes of its modules, and all files of the user
                                that these import
    code of transformers        the version of an installed package
    value train.SCALE           a global, a closed-over variable or an attribute that code of the user names; plain
                                attributes of its classes

A capture runs code and reads values, and the program is right for no others. Which code it runs is known without
running it: files of the user are read with everything that they import, whether or not it plays a role. A changed
comment counts as a change; so does code that was imported before its file was edited. Left out: code that is found in
other ways, such as plugins by name.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

import spmd.expand.kept as here
from spmd.expand.closed_over import is_installed, names_in, package_of
from spmd.expand.guards import MANY, digest_of_items
from spmd.expand.hooks import hooks_of, hooks_of_module
from spmd.expand.kept.described import code_text, described, digest, qualified, shortened
from spmd.expand.kept.notation import MAIN, CannotKeep, module_name
from spmd.expand.python_state import is_set

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)


def code_entries(fn: Callable, objects: Iterable[Any], code: Iterable[Any] = ()) -> dict[str, str]:
    """The entries for a step and for the modules, optimisers and other objects that it is given. code: functions and
    classes that are known to run, such as those of objects among the arguments."""
    objects = list(objects)
    roots = [fn, *_classes(objects), *_hooks(m for x in objects if isinstance(x, nn.Module) for m in x.modules())]
    return dict(sorted((*_files([*roots, *code]), *_Values().of(fn, roots).items())))


@functools.lru_cache(maxsize=1)
def version_of_spmd() -> str:
    """The version of spmd with a digest of its sources: programs of other sources may be other programs."""
    root = str(Path(here.__file__).parents[2])
    there = (os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names)
    files = sorted(path for path in there if path.endswith(".py"))
    return f"sources {digest(*(part for f in files for part in (f[len(root) :], _bytes_of(f))))}"


def _bytes_of(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


def _classes(objects: Iterable[Any]) -> list[type]:
    """The classes of objects and of the modules in modules, each once, with those that they inherit from."""
    found: dict[type, None] = {}
    for x in objects:
        for each in x.modules() if isinstance(x, nn.Module) else (x,):
            found |= dict.fromkeys(type(each).__mro__)
    return [kind for kind in found if kind is not object]


def _hooks(modules: Iterable[nn.Module]) -> list[Any]:
    """The hooks of modules and of their parameters, each once."""
    found = [hook for m in modules for hook in (*hooks_of_module(m), *hooks_of(m.parameters(recurse=False)))]
    return list({id(hook): hook for hook in found}.values())


# ---- files ------------------------------------------------------------------------------------


def _files(roots: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """An entry for each file of the user, and for each installed package, whose code the roots are."""
    open_ = sorted({name for root in roots if (name := _module_of(root))})
    seen = set(open_)
    while open_:
        name = open_.pop()
        if is_installed(package_of(name)):
            if (version := _version(package_of(name))) is not None:
                yield f"code of {package_of(name)}", version
            continue
        path = _path_of(name)
        if path is None:
            continue
        text, imported = _read(path, os.stat(path).st_mtime_ns, name)
        yield f"code of {module_name(name)}", digest(text, *_loaded(name))
        new = [n for n in imported if n not in seen]
        seen.update(new)
        open_ += new


def _loaded(name: str) -> Iterator[str]:
    """What the functions of a Python module do that was imported: its file may have been edited since."""
    for x in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
        if isinstance(x, (types.FunctionType, type)) and x.__module__ == name:
            yield from (code_text(fn.__code__) for fn in (_functions(x) if isinstance(x, type) else (x,)))


def _functions(kind: type) -> Iterator[types.FunctionType]:
    """The functions in a class, those of properties and the like among them."""
    for x in list(vars(kind).values()):
        for fn in (x, getattr(x, "__func__", None), *(getattr(x, name, None) for name in ("fget", "fset", "func"))):
            if isinstance(fn, types.FunctionType):
                yield fn


def _module_of(x: Any) -> str | None:
    """The Python module of a function, a bound method, a partial or an object that is called."""
    while isinstance(x, functools.partial):
        x = x.func
    return getattr(x, "__module__", None) or getattr(type(x), "__module__", None)


def _path_of(name: str) -> str | None:
    """The source file of a Python module; None for one without. Nothing is imported."""
    path = getattr(sys.modules[name], "__file__", None) if name in sys.modules else _path_before_import(name)
    return path if path and path.endswith(".py") and os.path.isfile(path) else None


def _path_before_import(name: str) -> str | None:
    """Where a module is that was not imported yet, such as one that a function imports."""
    parts, folders, spec = name.split("."), None, None
    for i in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: i + 1]), folders)
        if spec is None or (i + 1 < len(parts) and spec.submodule_search_locations is None):
            return None
        folders = spec.submodule_search_locations
    return spec.origin if spec is not None else None


@functools.lru_cache(maxsize=4096)
def _read(path: str, changed: int, name: str) -> tuple[str, tuple[str, ...]]:
    """A digest of a file, and the names of what it imports. changed: when it was written, for the cache."""
    source = Path(path).read_bytes()
    module = sys.modules.get(name)
    package = getattr(module, "__package__", None) or name.rpartition(".")[0]
    try:
        imported = sorted(set(_imports(ast.parse(source), package)))
    except SyntaxError:
        imported = []
    return digest(source), tuple(imported)


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            at = "." * node.level + (node.module or "")
            try:
                of = importlib.util.resolve_name(at, package) if node.level else at
            except ImportError:
                continue
            yield of
            yield from (f"{of}.{alias.name}" for alias in node.names)  # it may be a module, too


@functools.lru_cache(maxsize=256)
def _version(package: str) -> str | None:
    """The version of an installed package; None for torch, spmd and Python's own, which have other entries or none."""
    if package in ("", "torch", "spmd") or package in sys.stdlib_module_names:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


# ---- values -----------------------------------------------------------------------------------


class _Values:
    """The plain values that code of the user names. Code is looked through once, with all functions that it names."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.seen: set[tuple] = set()

    def of(self, fn: Callable, roots: Iterable[Any]) -> dict[str, str]:
        """The values that the step, the methods of classes and hooks read, and those of classes."""
        self.value("step", fn, ())
        for root in roots:
            self.value("hook", root, ())
        return self.found

    def methods(self, kind: type) -> None:
        """Look through the code of a class of the user, and note its plain values."""
        if not _is_of_user(kind) or (kind,) in self.seen:
            return
        self.seen.add((kind,))
        for name, x in list(vars(kind).items()):
            if not name.startswith("__") and not isinstance(x, types.FunctionType):
                self.value(f"{qualified(kind)}.{name}", x, ())
        for fn in _functions(kind):
            self.function(fn)

    def function(self, fn: types.FunctionType) -> None:
        """Look through a function of the user: what it names, what is bound to it, and the file where it has none."""
        if not _is_of_user(fn) or (fn,) in self.seen:
            return
        self.seen.add((fn,))
        names, where = names_in(fn.__code__), qualified(fn)
        if frames := FRAMES.intersection(names.globals + names.attributes):
            raise CannotKeep(f"{where} uses {min(frames)}, and so may read any variable")
        if _path_of(fn.__module__ or "") is None:  # typed in, or made by exec
            self.found[f"code of {where}"] = code_text(fn.__code__)
        given = {name: fn.__globals__[name] for name in names.globals if name in fn.__globals__}
        for name, x in given.items():
            self.value(f"{module_name(fn.__module__)}.{name}", x, names.attributes)
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        bound = {name: cell.cell_contents for name, cell in cells if is_set(cell)}
        bound |= fn.__kwdefaults__ or {}
        bound |= {f"default {i}": x for i, x in enumerate(fn.__defaults__ or ())}
        for name, x in bound.items():
            self.value(f"{where}.{name}", x, names.attributes)

    def value(self, path: str, x: Any, names: tuple[str, ...]) -> None:
        """Note a plain value; look through functions, and through what the names of attributes reach."""
        if isinstance(x, PLAIN):
            self.found[f"value {path}"] = shortened(described(x))
            return
        if isinstance(x, np.ndarray) and not x.dtype.hasobject:
            self.found[f"value {path}"] = described(x)
            return
        is_long = isinstance(x, (list, tuple, dict)) and len(x) > MANY
        if is_long and (told := digest_of_items(x)) is not None:
            self.found[f"value {path}"] = f"{len(x)} items {told}"
            return
        if (id(x), names) in self.seen or isinstance(x, (torch.Tensor, nn.Module, Optimizer)):
            return
        self.seen.add((id(x), names))
        if isinstance(x, (list, tuple, dict, set, frozenset)):
            for key, y in _items(x):
                self.value(f"{path}.{key}", y, names)
        elif isinstance(x, functools.partial):
            for name, y in {"function": x.func, "args": x.args, "keywords": x.keywords}.items():
                self.value(f"{path}.{name}", y, names)
        elif isinstance(x, functools._lru_cache_wrapper):
            self.value(path, x.__wrapped__, names)
        elif isinstance(x, types.MethodType):
            self.function(x.__func__)
            self.value(path, x.__self__, names_in(x.__func__.__code__).attributes if _has_code(x.__func__) else names)
        elif isinstance(x, types.FunctionType):
            self.function(x)
            self.value(path, getattr(x, "__wrapped__", None), names)
        elif isinstance(x, type):
            self.methods(x)
        elif _is_of_user(x):
            self.attributes(path, x, names)

    def attributes(self, path: str, x: Any, names: tuple[str, ...]) -> None:
        """Look through the attributes of an object, or of a Python module of the user, that the code names."""
        if not isinstance(x, types.ModuleType):
            self.methods(type(x))
        own = getattr(x, "__dict__", {})
        for name in names:
            if name in own:
                self.value(f"{path}.{name}", own[name], names)


def _has_code(x: Any) -> bool:
    return isinstance(x, types.FunctionType)


def _items(x: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a container; of a set its plain values, in an order that does not depend on the process."""
    if isinstance(x, dict):
        return x.items()
    return enumerate(x if isinstance(x, (list, tuple)) else sorted((y for y in x if isinstance(y, PLAIN)), key=repr))


def _is_of_user(x: Any) -> bool:
    """Whether a function, a class, an object or a Python module is the user's, and no installed package's."""
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None) or type(x).__module__
    is_made_by_exec = isinstance(x, types.FunctionType) and x.__module__ is None
    return is_made_by_exec or name == MAIN or not is_installed(package_of(name))


FRAMES = frozenset({"_getframe", "currentframe", "f_globals", "f_locals", "f_builtins", "f_back", "_current_frames"})
"""What gives code the variables of other code."""


__all__ = ["CannotKeep", "code_entries", "version_of_spmd"]
