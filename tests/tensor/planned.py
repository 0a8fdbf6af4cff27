"""Runs plans for all ranks in one thread, and counts the bytes that each rank receives, at the transport.

    blocks = carried_out(plan(src, dst), cut_up(x, src), count := Counter())
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from math import prod

import torch

from spmd.comm import C10dTransport
from spmd.mesh import DeviceMesh, as_rank
from spmd.sim.collectives import Collective, call_error, mismatch, run_collective
from spmd.tensor.redistribute.boxes import intervals
from spmd.tensor.redistribute.plan import Plan, Step
from spmd.tensor.spec import Spec

Blocks = dict[tuple[int, ...], torch.Tensor]


def layouts(mesh: DeviceMesh, ndim: int, partial: bool, ordered: bool = False) -> Iterator[tuple]:
    """All layouts of a tensor on the mesh, as (dims, partial): each axis shards a dim, replicates, or owes a sum."""
    choices = [*range(ndim), "r", *(["p"] if partial else [])]
    for fates in itertools.product(choices, repeat=mesh.ndim):
        kept = [(axis, "sum") for axis, fate in enumerate(fates) if fate == "p"]
        sharding = [[axis for axis, fate in enumerate(fates) if fate == dim] for dim in range(ndim)]
        orders = ([tuple(axes)] if ordered else itertools.permutations(axes) for axes in sharding)
        yield from ((dims, kept) for dims in itertools.product(*orders))


def specs(mesh: DeviceMesh, shape, partial: bool, dtype=torch.float64, ordered: bool = False) -> list[Spec]:
    every = layouts(mesh, len(shape), partial, ordered)
    return [Spec.of(mesh, shape, dtype, dims=dims, partial=kept) for dims, kept in every]


def block_of(x: torch.Tensor, spec: Spec, coordinate) -> torch.Tensor:
    """A rank's block of the global x. Of a sum, the rank with coordinate 0 has x minus the terms of the others."""
    for dim, side in enumerate(spec.box(coordinate)):
        x = torch.cat([x.narrow(dim, start, stop - start) for start, stop in intervals(side)], dim)
    for axis, _ in spec.partial:
        n, i = spec.mesh.shape[axis], coordinate[axis]
        x = x * (2 - n) if i == 0 else x.clone()
    return x.clone()


def cut_up(x: torch.Tensor, spec: Spec) -> Blocks:
    return {at: block_of(x, spec, at) for at in spec.mesh.coordinates()}


def wrong_blocks(blocks: Blocks, x: torch.Tensor, spec: Spec) -> list[tuple[int, ...]]:
    """The ranks whose blocks are not those of x by the spec. Sums are reduced first."""
    axes = [a for a, _ in spec.partial]
    bare, wrong = spec.with_layout(spec.dims, spec.units), []
    for at in spec.mesh.coordinates():
        others = itertools.product(*(range(n) if a in axes else (at[a],) for a, n in enumerate(spec.mesh.shape)))
        whole = sum(blocks[o] for o in others) if axes else blocks[at]
        if whole.dtype != x.dtype or not torch.equal(whole, block_of(x, bare, at)):
            wrong.append(at)
    return wrong


def carried_out(plan: Plan, blocks: Blocks, received: Counter | None = None) -> Blocks:
    """The blocks of all ranks after the plan; `received` counts the bytes that each gets from others."""
    for step in plan.steps:
        blocks = _stepped(step, blocks, Counter() if received is None else received)
    return blocks


def _stepped(step: Step, blocks: Blocks, received: Counter) -> Blocks:
    posts = {at: _Posts(step.before.mesh, at) for at in blocks}
    tokens = {at: step.start(x, at, posts[at]) for at, x in blocks.items()}
    for post in posts.values():
        if post.call is not None and post.result is None:
            group = [posts[step.before.mesh.coordinate_of(rank)] for rank in post.group_ranks]
            _meet(group, received)
    return {at: step.finish(y, at, posts[at]) for at, y in tokens.items()}


def _meet(group: list[_Posts], received: Counter) -> None:
    calls, ranks = [p.call for p in group], group[0].group_ranks
    assert None not in calls and all(p.group_ranks == ranks for p in group), "a real job would hang"
    assert mismatch(calls, ranks) is None and call_error(calls[0], len(ranks)) is None
    for i, (p, y) in enumerate(zip(group, run_collective(calls, [p.x for p in group]), strict=True)):
        p.result = y
        received[p.at] += bytes_received(p.call.kind, p.x, p.call.args, i, len(ranks))


def bytes_received(kind: str, x: torch.Tensor, args: tuple, place: int, n: int) -> int:
    """The bytes that a rank gets from others in a collective that sends no byte without need."""
    if kind == "all_to_all_single":
        out = args[0]
        return (sum(out) - out[place]) * x.element_size() * prod(x.shape[1:])
    nbytes = x.numel() * x.element_size()
    return {
        "all_gather_into_tensor": (n - 1) * nbytes, "reduce_scatter_tensor": nbytes // n * (n - 1),
        "all_reduce": 2 * nbytes * (n - 1) // n,
    }[kind]  # fmt: skip


class _Posts:
    """One rank's transport. It records the one collective of a move."""

    def __init__(self, mesh: DeviceMesh, at: tuple[int, ...]):
        self.mesh, self.at, self.call, self.result = mesh, at, None, None

    def group(self, mesh, axes):
        return mesh.ranks_along(axes, self.at)

    def _post(self, kind, x, group, *args):
        assert self.call is None and x.is_contiguous()
        self.call, self.x, self.group_ranks = Collective.with_tensor(kind, x, *args), x, group
        return x.new_empty(0)

    def exchanges_terms(self, device_type):
        return False

    def all_reduce(self, x, op, group):
        return self._post("all_reduce", x, group, op)

    def all_gather_into_tensor(self, x, n, group):
        return self._post("all_gather_into_tensor", x, group, n)

    def reduce_scatter_tensor(self, x, op, n, group):
        return self._post("reduce_scatter_tensor", x, group, op, n)

    def all_to_all_single(self, x, out_splits, in_splits, group):
        return self._post("all_to_all_single", x, group, tuple(out_splits), tuple(in_splits))

    def wait_tensor(self, y):
        return self.result


class Counting(C10dTransport):
    """torch.distributed's collectives, with the bytes that this rank gets from others."""

    def __init__(self, rank: int):
        self.rank, self.received, self.groups = rank, 0, {}

    def group(self, mesh, axes):
        name = super().group(mesh, axes)
        with as_rank(self.rank):
            ranks = mesh.ranks_along(axes, mesh.get_coordinate())
        self.groups[name] = ranks.index(self.rank), len(ranks)
        return name

    def _counted(self, kind, x, args, group):
        self.received += bytes_received(kind, x, args, *self.groups[group])
        return getattr(C10dTransport, kind)(x, *args, group)

    def all_reduce(self, x, op, group):
        return self._counted("all_reduce", x, (op,), group)

    def all_gather_into_tensor(self, x, n, group):
        return self._counted("all_gather_into_tensor", x, (n,), group)

    def reduce_scatter_tensor(self, x, op, n, group):
        return self._counted("reduce_scatter_tensor", x, (op, n), group)

    def all_to_all_single(self, x, out_splits, in_splits, group):
        return self._counted("all_to_all_single", x, (out_splits, in_splits), group)
