"""Which modules of a model repeat: equal in all that their code can see of them.

    model.blocks.0 ... model.blocks.11      one structure: twelve modules

The structure of a module is its guard - type, attributes, flags - with the metadata of its parameters and buffers, and
the structures of the modules in it, by name. Which of its tensors are one is part of it. No name of the module itself
plays a role.

Modules may differ in attributes that are plain values, such as the number of a layer: a `Structure` has their names.
Whether these play a role is seen when a call is traced (`unread`). If they do, what is equal inside may still repeat.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from spmd import _torch
from spmd.expand.guards import guard_key, module_guard
from spmd.expand.modules import modules_of, parameters_of
from spmd.expand.sources.layout import COMPARED_BY_VALUE

FEWEST = 3
"""Of so many equal modules, two are traced and the others are stamped."""

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Structure:
    """What several modules share. differing: the names of plain attributes that differ, in them or inside."""

    modules: tuple[nn.Module, ...]
    differing: frozenset[str]

    def alike(self, module: nn.Module, names: Iterable[str]) -> int:
        """How many of the modules have the values of this one under some names."""
        wanted = values_of(module, names)
        return sum(values_of(m, names) == wanted for m in self.modules)


def values_of(module: nn.Module, names: Iterable[str]) -> Hashable:
    """What a module and those in it have under some names."""
    names = sorted(names)
    return tuple(
        (i, name, guard_key(vars(m)[name]))
        for i, m in enumerate(modules_of(module) if names else ()) for name in names if name in vars(m)
    )  # fmt: skip


def repeated(roots: Iterable[nn.Module]) -> dict[int, Structure]:
    """The modules that repeat, by identity, with the structure that they share: the outermost ones that have modules
    in them, a parameter, and nothing that code outside of them sees or does. Inside of those that differ in plain
    attributes, there may be others that do not."""
    roots = list(roots)
    guards = {id(m): module_guard(m) for root in roots for m in modules_of(root)}
    tensors = _Tensors(roots)
    exactly, but_for_values = (_repeated(roots, _Structures(guards, tensors, exact)) for exact in (True, False))
    return exactly | but_for_values


Guards = dict[int, tuple]
"""Of each module its guard, by identity."""


def has_hooks(module: nn.Module) -> bool:
    """Whether code of the user's may hook into calls of a module, or of those in it."""
    return any(getattr(m, name, None) for m in modules_of(module) for name in _HOOKS)


def _repeated(roots: list[nn.Module], found: _Structures) -> dict[int, Structure]:
    groups: dict[Hashable, list[nn.Module]] = {}
    for root in roots:
        for m in modules_of(root):
            if (key := found.of(m)) is not None and any(True for _ in m.children()) and found.tensors.are_apart(m):
                groups.setdefault(key, []).append(m)
    chosen: dict[int, Structure] = {}
    inside: set[int] = set()
    for several in sorted(groups.values(), key=lambda group: -found.sizes[id(group[0])]):
        several = list({id(m): m for m in several if id(m) not in inside}.values())
        if len(several) >= FEWEST:
            structure = Structure(tuple(several), frozenset() if found.is_exact else _differing(several, found.guards))
            chosen |= {id(m): structure for m in several}
            inside |= {id(x) for m in several for x in modules_of(m)}
    return chosen


def _differing(modules: Sequence[nn.Module], guards: Guards) -> frozenset[str]:
    """The names of attributes in which modules differ, or modules inside of them."""
    together = ([guards[id(m)][1] for m in several] for several in zip(*map(modules_of, modules), strict=True))
    return frozenset(
        name for first, *others in together for other in others if other != first
        for name, key in first if (name, key) not in other
    )  # fmt: skip


def guard_now(module: nn.Module, without: Collection[str] = ()) -> Hashable:
    """The guard of a module as it is now: code outside may have set its attributes, flags and hooks in the step."""
    kind, attributes = module_guard(module)
    return kind, tuple((name, key) for name, key in attributes if name != "forward" and name not in without)


def _but_for_values(module: nn.Module, guard: tuple) -> Hashable:
    """The guard of a module, with the types of plain attributes in the place of their values."""
    kind, attributes = guard
    plain = {name for name, _ in attributes if name != "training" and type(vars(module)[name]) in PLAIN}
    return kind, tuple((name, type(vars(module)[name]) if name in plain else key) for name, key in attributes)


PLAIN = (bool, int, float, str)
"""Attributes of these types may differ between equal modules, if their code does not read them."""


class _Tensors:
    """The tensors of all modules in some, asked once for each module. owners: of each parameter, the modules that hold
    it, by identity."""

    def __init__(self, roots: Sequence[nn.Module]):
        self.owners: dict[int, set[int]] = {}
        self._of: dict[int, tuple | None] = {}
        self._apart: dict[int, bool] = {}
        for m in {id(m): m for root in roots for m in modules_of(root)}.values():
            for p in m._parameters.values():
                self.owners.setdefault(id(p), set()).add(id(m))

    def of(self, module: nn.Module) -> tuple | None:
        """What a module's own tensors are, and which of all within it are one; None where one of its own has attributes
        that are no plain values."""
        if (key := id(module)) not in self._of:
            own = (*module._parameters.values(), *module._buffers.values())
            described = (*_described(module._parameters), *_described(module._buffers))
            is_plain = all(map(_has_plain_attributes, own))
            has_inner = any(m is not None for m in module._modules.values())
            self._of[key] = (described, _pattern(module) if has_inner else ()) if is_plain else None
        return self._of[key]

    def are_apart(self, module: nn.Module) -> bool:
        """Whether a module has parameters, and they are its own."""
        if (key := id(module)) not in self._apart:
            within, own = {id(m) for m in modules_of(module)}, [id(p) for p in parameters_of(module)]
            self._apart[key] = bool(own) and all(self.owners[p] <= within for p in own)
        return self._apart[key]


class _Structures:
    """The structures of modules. is_exact: whether plain attributes are compared."""

    def __init__(self, guards: Guards, tensors: _Tensors, is_exact: bool):
        self.guards, self.tensors, self.is_exact = guards, tensors, is_exact
        self.sizes: dict[int, int] = {}
        self._of: dict[int, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}

    def of(self, module: nn.Module) -> Hashable:
        """A number for the structure of a module; None where code of the user's may see or do more than its own."""
        key = id(module)
        if key not in self._of:
            found = self._found(module)
            self._of[key] = None if found is None else self._numbers.setdefault(found, len(self._numbers))
        return self._of[key]

    def _found(self, module: nn.Module) -> Hashable:
        inside = [(name, self.of(m)) for name, m in module._modules.items() if m is not None]
        self.sizes[id(module)] = 1 + sum(self.sizes[id(m)] for m in module._modules.values() if m is not None)
        hooked = any(getattr(module, name, None) for name in _HOOKS) or "forward" in vars(module)
        if hooked or type(module._parameters) is not dict or any(number is None for _, number in inside):
            return None
        if (tensors := self.tensors.of(module)) is None:
            return None
        guard = self.guards[id(module)]
        guard = guard if self.is_exact else _but_for_values(module, guard)
        return guard, tensors, tuple(inside)


def _described(tensors: dict[str, Any]) -> Iterator[Hashable]:
    for name, x in tensors.items():
        yield name, x if x is None else (
            type(x) is nn.Parameter, x.dtype, x.device, x.requires_grad, tuple(x.shape), x.stride(),
            guard_key(_torch.user_attributes(x)),
        )  # fmt: skip


def _has_plain_attributes(x: Any) -> bool:
    """Whether what users have set on a tensor is plain values: others, such as tensors, may be a module's own."""
    return x is None or all(isinstance(value, COMPARED_BY_VALUE) for value in _torch.user_attributes(x).values())


def _pattern(module: nn.Module) -> tuple[int, ...]:
    """Which of the tensors of a module and those in it are one."""
    counted: dict[int, int] = {}
    tensors = [x for m in modules_of(module) for x in (*m._parameters.values(), *m._buffers.values())]
    return tuple(counted.setdefault(id(x), len(counted)) for x in tensors)
