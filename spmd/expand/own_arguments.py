"""Arguments of which each rank gives its own block: `spmd.PerRank`.

    inputs={"x": PerRank(Shard(0))}     ranks give 4, 4, 4 and 2 rows of 16     ->  x is a DTensor f32[14@dp, 16]

Before each call the ranks compare the shapes of what they give, in one small exchange; only where these differ, they
send them. The step then takes DTensors in the place of the blocks, which are not copied where they are those of a spec
(`spmd.tensor.redistribute.own_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from spmd.comm.agree import FAILED, Statement, differing, digest, raise_if_one_failed, raise_if_other_things
from spmd.expand.attributes import give_attributes
from spmd.expand.objects import opened
from spmd.expand.state import named_leaves
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor.annotations.patterns import Patterns, Placed, in_mesh_order, placements_for
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import REPLICATE, PerRank, Placement
from spmd.tensor.redistribute.own_blocks import own_blocks
from spmd.tensor.spec import spec_of_value

OwnAxes = Mapping[str, tuple[bool, ...]]
"""For each pattern of inputs, whether the ranks have blocks of their own along each axis. Empty if none has."""

Given = Mapping[int, DTensor]
"""What takes the place of a block that a rank gives, by the identity of the block."""

NOTHING_OWN: Given = {}


class Own(NamedTuple):
    """A block that this rank gives. placements: along the axes on which the ranks have blocks of their own."""

    x: torch.Tensor
    placements: tuple[Placement, ...]


Stated = tuple[str, str, tuple[int, ...]]
"""What a rank says of a block: its path, dtype and shape."""


# ---- what the user says -----------------------------------------------------------------------


def without_own(mesh: DeviceMesh, inputs: Patterns) -> Patterns:
    """The placements of what the blocks make.

    >>> from spmd import DeviceMesh, PerRank, Shard
    >>> mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "tp"))
    >>> without_own(mesh, {"x": {"dp": PerRank(Shard(0)), "tp": Shard(1)}, "y": PerRank(Shard(0))})
    {'x': {'dp': Shard(0), 'tp': Shard(1)}, 'y': [Shard(0), Shard(0)]}
    """
    if not isinstance(inputs, Mapping):
        return inputs
    return {name: _with_each(_said(mesh, p), lambda p: getattr(p, "placement", p)) for name, p in inputs.items()}


def own_axes(mesh: DeviceMesh, inputs: Patterns) -> OwnAxes:
    """Along which axes the ranks have blocks of their own."""
    found = {name: in_mesh_order(mesh, _said(mesh, p), name) for name, p in inputs.items()}
    axes = {name: tuple([isinstance(p, PerRank) for p in placements]) for name, placements in found.items()}
    return axes if any(map(any, axes.values())) else {}


def _said(mesh: DeviceMesh, placements: Any) -> Any:
    return [placements] * mesh.ndim if isinstance(placements, PerRank) else placements


def _with_each(placements: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(placements, Mapping):
        return {axis: change(p) for axis, p in placements.items()}
    return [change(p) for p in placements] if isinstance(placements, (list, tuple)) else placements


# ---- what a call gives ------------------------------------------------------------------------


def own_of_call(arguments: Mapping[str, Any], inputs: Placed, axes: OwnAxes) -> dict[str, Own]:
    """The blocks among the arguments of a call, by path. ValueError, or TypeError, for what is no block."""
    tensors = {path: x for path, x in named_leaves(opened(dict(arguments))) if isinstance(x, torch.Tensor)}
    found = {path: _own(x, inputs, axes, path) for path, x in tensors.items()}
    own = {path: each for path, each in found.items() if each is not None}
    blocks = {id(each.x): path for path, each in own.items()}
    for path, x in tensors.items():
        if id(x) in blocks and (path not in own or own[path].placements != own[blocks[id(x)]].placements):
            raise ValueError(
                f"{path} and {blocks[id(x)]} are one tensor, and inputs place them in two ways; say the same of both"
            )
    return own


def _own(x: torch.Tensor, inputs: Placed, axes: OwnAxes, path: str) -> Own | None:
    is_own = placements_for(axes, [path])
    if is_own is None or not any(is_own):
        return None
    if spec_of_value(x) is not None:
        raise TypeError(
            f"argument {path} is a DTensor, and inputs say PerRank: give the plain tensor that this rank has"
        )
    if x.requires_grad:
        raise ValueError(
            f"argument {path} requires a gradient, which a compiled step would not leave in it: pass {path}.detach()"
        )
    placements = zip(placements_for(inputs, [path]), is_own, strict=True)
    return Own(x, tuple([p if own else REPLICATE for p, own in placements]))


def as_equal_blocks(own: Mapping[str, Own], mesh: DeviceMesh) -> Given:
    """What the blocks make if all ranks give blocks of the same shapes. Nothing is sent."""
    return {id(x): _made(path, x, mesh, placements, (tuple(x.shape),)) for path, (x, placements) in own.items()}


def exchanged(find: Callable[[], Mapping[str, Own]], mesh: DeviceMesh, what: str) -> Given:
    """What the ranks' blocks make. find: gives those of this rank. An error of one rank is raised on all.

    what: what the ranks are doing, for errors.
    """
    try:
        own, error = find(), None
    except Exception as raised:
        own, error = {}, raised
    shapes = _shapes(own, mesh, what, error)
    return {id(x): _made(path, x, mesh, placements, shapes[path]) for path, (x, placements) in own.items()}


def _made(path: str, x: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shapes: tuple) -> DTensor:
    try:
        blocks = own_blocks(mesh, placements, shapes, x.dtype)
    except (ValueError, TypeError) as error:
        raise type(error)(f"argument {path}, of which each rank gives its own block: {error}") from None
    with torch.inference_mode(False):
        made = DTensor(blocks.block(x), blocks.spec)
    give_attributes(made, x)
    return made


def _shapes(own: Mapping[str, Own], mesh: DeviceMesh, what: str, error: Exception | None) -> dict[str, tuple]:
    """The shapes of the blocks by path: of all ranks, or the one of all."""
    mine = _stated(list(own), [each.x for each in own.values()])
    if mesh.size() == 1 and error is None:
        return {path: (shape,) for path, _, shape in mine}
    failure = "" if error is None else f"{type(error).__name__}: {error}"
    key = FAILED if error is not None else _key(mine)
    every = differing(key, lambda: Statement(what, what, (mine,), failure), mesh)
    if every is None:
        return {path: (shape,) for path, _, shape in mine}
    if error is not None:
        raise error
    raise_if_one_failed(every, mesh)
    raise_if_other_things(every, mesh)
    stated = [each.lines[0] for each in every]
    for rank, one in zip(mesh.ranks, stated, strict=True):
        _check_kinds(mesh.ranks[0], stated[0], rank, one, what)
    return {path: tuple([each[i][2] for each in stated]) for i, (path, *_) in enumerate(stated[0])}


@per_rank
def _stated(paths: Collection[str], blocks: Collection[torch.Tensor]) -> list[Stated]:
    return [(path, str(x.dtype), tuple(x.shape)) for path, x in zip(paths, blocks, strict=True)]


@per_rank
def _key(stated: list[Stated]) -> bytes:
    return digest("blocks", repr(stated))


def _check_kinds(first: int, stated: list[Stated], rank: int, others: list[Stated], what: str) -> None:
    one, other = ([f"{path} ({dtype})" for path, dtype, _ in each] for each in (stated, others))
    if one != other:
        raise RuntimeError(
            f"{what}: rank {first} gives blocks of {', '.join(one)}, but rank {rank} of {', '.join(other)}; give all "
            "ranks the same arguments, of the same dtypes"
        )


def check_not_written(own: Given, leaves: Mapping[str, Any], written: Collection[Any]) -> None:
    """Refuse a step that writes into a block of a rank: where it was moved, the rank's own would stay as it is."""
    blocks = {id(x) for x in own.values()}
    if path := next((str(where) for where in written if id(leaves.get(str(where))) in blocks), ""):
        raise ValueError(
            f"the step writes into the argument {path}, of which each rank gives its own block: write into a copy, "
            f"{path} = {path}.clone()"
        )
