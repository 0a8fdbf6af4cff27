"""Walks over the modules within a module, as lists. A capture makes dozens of them.

torch's walks are generators, one within another for each level: each module takes as many steps as it lies deep. Those
here call one function for each module, and give what torch's give: where a class has a walk of its own, they are that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

Named = list[tuple[str, nn.Module]]

OF_ALL_MODULES = frozenset(vars(nn.Module()))
"""The attributes that torch gives each module."""

_WALKS = ("modules", "named_modules", "parameters", "named_parameters", "buffers", "named_buffers", "_named_members")
"""The methods of torch's that a class may have in its own way."""


def named_modules(root: nn.Module) -> Named:
    """The module and all within it, with paths: each once, where it is met first.

    >>> inner = nn.Linear(2, 2)
    >>> [path for path, _ in named_modules(nn.Sequential(inner, inner))]
    ['', '0']
    """
    found: Named = []
    if _note(root, "", found, set()):
        return found
    return list(root.named_modules())


def _note(module: nn.Module, path: str, found: Named, seen: set[int] | None) -> bool:
    """Add a module and all within it; False where one has a walk of its own."""
    if seen is not None:
        if id(module) in seen:
            return True
        seen.add(id(module))
    kind = type(module)
    if kind not in _plain and not _is_plain(kind):
        return False
    found.append((path, module))
    for name, child in module._modules.items():
        if child is not None and not _note(child, f"{path}.{name}" if path else name, found, seen):
            return False
    return True


_plain: dict[type, None] = {}
"""Classes that walk as torch does. Bounded: those that were met first."""

MOST_CLASSES = 4096


def _is_plain(kind: type) -> bool:
    if any(getattr(kind, name) is not getattr(nn.Module, name) for name in _WALKS):
        return False
    if len(_plain) < MOST_CLASSES:
        _plain[kind] = None
    return True


def named_within(roots: Mapping[str, nn.Module]) -> Named:
    """The modules of several roots, and all within them, with paths that begin with the names of the roots."""
    return [(f"{name}.{path}".rstrip("."), m) for name, root in roots.items() for path, m in named_modules(root)]


def modules_of(root: nn.Module) -> list[nn.Module]:
    """The module and all within it, each once, in the order of `named_modules`."""
    return [m for _, m in named_modules(root)]


def named_parameters(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All parameters with all their paths."""
    found: Named = []
    if not _note(root, "", found, None):
        return list(root.named_parameters(remove_duplicate=False))
    return [(_path(path, k), p) for path, m in found for k, p in m._parameters.items() if p is not None]


def parameters_of(root: nn.Module) -> list[nn.Parameter]:
    """All parameters, each once."""
    return list({id(p): p for _, p in named_parameters(root)}.values())


def buffers_of(root: nn.Module) -> list[torch.Tensor]:
    """All buffers, each once."""
    return list({id(b): b for _, b in named_buffers(root)}.values())


def named_buffers(root: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """All buffers with all their paths."""
    found: Named = []
    if not _note(root, "", found, None):
        return list(root.named_buffers(remove_duplicate=False))
    return [(_path(path, k), b) for path, m in found for k, b in m._buffers.items() if b is not None]


def names_of_one(roots: Mapping[str, nn.Module]) -> tuple[tuple[str, ...], ...]:
    """All paths of each module, parameter and buffer that has several: which one is tied to which.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    >>> model[2].weight = model[0].weight
    >>> names_of_one({"model": model})
    (('model.0.weight', 'model.2.weight'),)
    """
    found: dict[int, list[str]] = {}
    for name, root in roots.items():
        for path, x in _all_within(root):
            found.setdefault(id(x), []).append(f"{name}.{path}" if path else name)
    return tuple([tuple(paths) for paths in found.values() if len(paths) > 1])


def _all_within(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules, parameters and buffers of a module, each under all its paths."""
    found: Named = []
    if not _note(root, "", found, None):
        yield from root.named_modules(remove_duplicate=False)
        yield from root.named_parameters(remove_duplicate=False)
        yield from root.named_buffers(remove_duplicate=False)
        return
    for path, m in found:
        yield path, m
        for name, x in (*m._parameters.items(), *m._buffers.items()):
            if x is not None:
                yield _path(path, name), x


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
