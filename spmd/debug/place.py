"""The tensors of a call by name - its arguments, and the parameters of modules - with the placements of each.

    check(step, model, batch, mesh=mesh, placements={"batch.*": [Shard(0), Replicate()],
                                                     "model.*.weight": {"tp": Shard(0)}})
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmd import _torch
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.patterns import check_patterns, in_mesh_order, placed_spec, placements_for, require_matches
from spmd.tensor.placement import REPLICATE, Placement

pytree = _torch.pytree


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """A tensor of a call. argument: the argument that has it; None for a tensor of the function itself."""

    name: str
    tensor: torch.Tensor
    argument: int | str | None
    in_module: bool


def tensors_of(fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> list[NamedTensor]:
    """All tensors of a call, each once: first those of the function if it is a module, then those of the arguments."""
    names = _names(fn, len(args))
    found = list(_tensors("", getattr(fn, "__self__", fn), None))
    for at, value in [*enumerate(args), *kwargs.items()]:
        found += _tensors(names[at] if isinstance(at, int) else at, value, at)
    return list({id(x.tensor): x for x in reversed(found)}.values())[::-1]


def _names(fn: Callable, n: int) -> list[str]:
    """The names of the first n arguments; `arg0` and so on where the signature is not known."""
    try:
        known = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):  # a function of torch itself
        known = ()
    known_names = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [known_names[i] if i < len(known_names) else f"arg{i}" for i in range(n)]


def _tensors(name: str, value: Any, argument: int | str | None) -> Iterator[NamedTensor]:
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        full_name = ".".join(filter(None, [name, *map(_key_text, path)]))
        if isinstance(leaf, torch.nn.Module):
            for table in (leaf.named_parameters(), leaf.named_buffers()):
                for inner, x in table:
                    yield NamedTensor(f"{full_name}.{inner}" if full_name else inner, x, argument, True)
        elif isinstance(leaf, torch.Tensor):
            yield NamedTensor(full_name, leaf, argument, False)


def _key_text(key: Any) -> str:
    """One step of a path: `0` of a list, `tokens` of a dict."""
    return str(next((getattr(key, at) for at in ("key", "idx", "name") if hasattr(key, at)), key))


def placements_of(placements: Any, tensors: Sequence[NamedTensor], n_args: int, mesh: DeviceMesh) -> list[tuple]:
    """For each tensor, a placement for each axis; see `spmd.debug.check`. ValueError for placements that do not fit."""
    if _is_by_argument(placements):
        if len(placements) != n_args:
            raise ValueError(f"placements: {len(placements)} entries for {n_args} arguments; give one for each")
        by_argument = [_by_name(entry, [x for x in tensors if x.argument == i], mesh)
                       for i, entry in enumerate(placements)]  # fmt: skip
        found = {name: p for entry in by_argument for name, p in entry.items()}
    else:
        found = _by_name(placements, tensors, mesh)
    placed = [found.get(x.name) or (REPLICATE,) * mesh.ndim for x in tensors]
    for x, where in zip(tensors, placed, strict=True):
        placed_spec(mesh, where, x.tensor, x.name)
    return placed


def _is_by_argument(placements: Any) -> bool:
    return isinstance(placements, (list, tuple)) and not _is_for_one_tensor(placements)


def _is_for_one_tensor(x: Any) -> bool:
    """Whether x is the placements of one tensor, and not a list by argument or a dict of patterns."""
    values = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else [x]
    return bool(values) and all(isinstance(p, Placement) for p in values)


def _by_name(placements: Any, tensors: Sequence[NamedTensor], mesh: DeviceMesh) -> dict[str, tuple]:
    """The placements of tensors by name, from placements for all of them or from a dict of patterns."""
    if placements is None:
        return {}
    if _is_for_one_tensor(placements):
        return {x.name: in_mesh_order(mesh, placements, x.name) for x in tensors if not x.in_module}
    patterns = check_patterns(mesh, placements, "placements")
    names = [x.name for x in tensors]
    require_matches(patterns, names, "placements: pattern")
    return {name: placed for name in names if (placed := placements_for(patterns, [name])) is not None}
