"""The tensors of a call - arguments, and the parameters of modules - by name, and where each of them lies.

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
from spmd.expand.placing import check_patterns, in_mesh_order, placed_spec, placements_for, require_matches
from spmd.mesh import DeviceMesh
from spmd.tensor.placement import REPLICATE, Placement

pytree = _torch.pytree


@dataclass(frozen=True, eq=False)
class Given:
    """A tensor that a call was given. `argument`: which; None for what belongs to the function itself."""

    name: str
    tensor: torch.Tensor
    argument: int | str | None
    in_module: bool


def tensors_of(fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> list[Given]:
    """All tensors of a call, each once: of the function if it is a module, then of its arguments."""
    names = _names(fn, len(args))
    found = list(_tensors("", getattr(fn, "__self__", fn), None))
    for at, value in [*enumerate(args), *kwargs.items()]:
        found += _tensors(names[at] if isinstance(at, int) else at, value, at)
    return list({id(x.tensor): x for x in reversed(found)}.values())[::-1]


def _names(fn: Callable, n: int) -> list[str]:
    """The names of the first n arguments; `arg0` where the function does not say."""
    try:
        known = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters.values()
    except (TypeError, ValueError):  # a function of torch's own
        known = ()
    said = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [said[i] if i < len(said) else f"arg{i}" for i in range(n)]


def _tensors(name: str, value: Any, argument: int | str | None) -> Iterator[Given]:
    for path, leaf in pytree.tree_flatten_with_path(value)[0]:
        own = ".".join(filter(None, [name, *map(_word, path)]))
        if isinstance(leaf, torch.nn.Module):
            for table in (leaf.named_parameters(), leaf.named_buffers()):
                for inner, x in table:
                    yield Given(f"{own}.{inner}" if own else inner, x, argument, True)
        elif isinstance(leaf, torch.Tensor):
            yield Given(own, leaf, argument, False)


def _word(key: Any) -> str:
    """One step of a path: `0` of a list, `tokens` of a dict."""
    return str(next((getattr(key, at) for at in ("key", "idx", "name") if hasattr(key, at)), key))


def placements_of(placements: Any, tensors: Sequence[Given], n_args: int, mesh: DeviceMesh) -> list[tuple]:
    """For each tensor one placement an axis; see `spmd.debug.check`. ValueError for what does not fit."""
    if _per_argument(placements):
        if len(placements) != n_args:
            raise ValueError(f"placements: {len(placements)} entries for {n_args} arguments; give one for each")
        by_argument = [_resolved(entry, [x for x in tensors if x.argument == i], mesh)
                       for i, entry in enumerate(placements)]  # fmt: skip
        found = {name: p for entry in by_argument for name, p in entry.items()}
    else:
        found = _resolved(placements, tensors, mesh)
    lying = [found.get(x.name) or (REPLICATE,) * mesh.ndim for x in tensors]
    for x, where in zip(tensors, lying, strict=True):
        placed_spec(mesh, where, x.tensor, x.name)
    return lying


def _per_argument(placements: Any) -> bool:
    return isinstance(placements, (list, tuple)) and not _is_placing(placements)


def _is_placing(x: Any) -> bool:
    """Whether x says how one tensor lies."""
    values = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else [x]
    return bool(values) and all(isinstance(p, Placement) for p in values)


def _resolved(placing: Any, tensors: Sequence[Given], mesh: DeviceMesh) -> dict[str, tuple]:
    """By name the placements of tensors of which one placing, or a dict of patterns, is said."""
    if placing is None:
        return {}
    if _is_placing(placing):
        return {x.name: in_mesh_order(mesh, placing, x.name) for x in tensors if not x.in_module}
    patterns = check_patterns(mesh, placing, "placements")
    names = [x.name for x in tensors]
    require_matches(patterns, names, "placements: pattern")
    return {name: placed for name in names if (placed := placements_for(patterns, [name])) is not None}
