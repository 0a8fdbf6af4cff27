"""A function of one rank's blocks, with the placements of its arguments and of its results.

    f(x_block, w_block) -> y_block        x: [Shard(0)], w: [Replicate()]  ->  y: [Shard(0)]

`local_map` calls such a function eagerly (`spmd.tensor.eager.local_map`). A compiled step makes one node of the call
(`spmd.expand.local_map`). Both read the same value, and both check the same things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from spmd._torch import pytree
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor.placement import REPLICATE, Partial, Placement
from spmd.tensor.spec import Spec, check_placements, spec_of

Placements = Sequence[Placement]
"""The placements of one tensor. Where an argument or a result is no tensor, None stands in their place."""


class BlockFunction:
    """A function of blocks, with the placements of its arguments, its results and its gradients.

    outs: the placements of each result; None for a result that is no tensor.
    ins, grads: the placements of each positional argument, and of its gradient. None where the user gave none.
    mesh: the mesh of the results; None for the mesh of the arguments.
    redistributes: whether an argument with other placements is redistributed. If not, it is an error.
    """

    def __init__(self, func, outs, ins, grads, mesh: DeviceMesh | None, redistributes: bool):
        self.func, self.outs, self.ins, self.grads = func, outs, ins, grads
        self.mesh, self.redistributes = mesh, redistributes

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.func, "__name__", type(self.func).__name__)

    def __repr__(self):
        return f"local_map({getattr(self.func, '__name__', self.func)}, out_placements={self.outs})"

    def check_lengths(self, n: int, kind: str) -> None:
        """Raise if there are not as many placements as positional arguments (n). kind: which arguments need them."""
        for name, placements in self._given_placements():
            if len(placements) != n:
                raise ValueError(
                    f"{self}: {name} has {len(placements)} entries for {n} positional arguments, counted flat; give "
                    f"one for each, None for what is no {kind}"
                )

    def meshes_counted(self, args: tuple) -> tuple[int, ...]:
        """The places of meshes among the flat arguments, if the placements have entries for them; else empty."""
        given = self._given_placements()
        if not given or not any(isinstance(x, DeviceMesh) for x in args):
            return ()
        leaves = pytree.tree_leaves(args, is_leaf=lambda x: isinstance(x, DeviceMesh))
        meshes = tuple(i for i, x in enumerate(leaves) if isinstance(x, DeviceMesh))
        return meshes if all(len(placements) == len(leaves) for _, placements in given) else ()

    def entries_but(self, meshes: tuple[int, ...], entries: tuple | None) -> tuple | None:
        """The entries of arguments without those of meshes, which must be None."""
        if entries is None:
            return None
        for i in meshes:
            if entries[i] is not None:
                raise ValueError(f"{self}: argument {i} is a mesh, but placements {entries[i]} are given for it")
        return tuple(entry for i, entry in enumerate(entries) if i not in meshes)

    def _given_placements(self) -> list[tuple[str, tuple]]:
        """The placements of arguments that the user gave, with the names of the parameters."""
        both = (("in_placements", self.ins), ("in_grad_placements", self.grads))
        return [(name, placements) for name, placements in both if placements is not None]

    def gradient_placements(self, i: int, spec: Spec) -> Placements:
        """The placements of the gradient that comes back to argument i, which has this spec."""
        if self.grads is None:
            return [self._gradient_placement(i, p) for p in spec.placements]
        if self.grads[i] is None:
            raise ValueError(f"{self}: argument {i} is {spec} and wants a gradient; in_grad_placements has None")
        return self.grads[i]

    def _gradient_placement(self, i: int, p: Placement) -> Placement:
        """The placement of the gradient of argument i, which has placement p.

        Gradients are those of the sum over all ranks. So the gradient of a replicated argument is a Partial.
        """
        if not isinstance(p, Partial):
            return Partial() if p == REPLICATE else p
        if p.reduce_op not in ("sum", "avg"):
            raise NotImplementedError(
                f"{self}: argument {i} is {p} and wants a gradient, which goes to the rank that has the {p.reduce_op}; "
                "redistribute it before the call"
            )
        return REPLICATE if p.reduce_op == "sum" else Partial()

    def check_results(self, out: list) -> None:
        """Raise unless the flat results fit out_placements: as many, and tensors exactly where these are not None."""
        if len(out) != len(self.outs):
            raise ValueError(f"{self}: gives {len(out)} results, counted flat, for {len(self.outs)} out_placements")
        for j, (x, placements) in enumerate(zip(out, self.outs, strict=True)):
            if isinstance(x, torch.Tensor) == (placements is None):
                what = "a tensor, which needs placements" if placements is None else f"{x!r}, which takes None"
                raise ValueError(f"{self}: result {j} is {what} in out_placements")


class OpenBlockFunction(BlockFunction):
    """A function of blocks that is open on some axes: how its tensors lie there follows from its operands.

    settled: the function for operands of these specs. Its results have the global shapes that those by `outs` have.
    """

    def __init__(self, func, outs, ins, grads, settled: Callable[[Sequence[Spec]], BlockFunction]):
        super().__init__(func, outs, ins, grads, None, True)
        self.settled = settled


Tracer = Callable[[BlockFunction, tuple, dict[str, Any]], Any]
_tracer: ContextVar[Tracer | None] = ContextVar("spmd_block_function_tracer", default=None)


@contextmanager
def traced_by(tracer: Tracer | None) -> Iterator[None]:
    """Inside the block, a call with global tensors goes to `tracer`, which records it for all ranks."""
    token = _tracer.set(tracer)
    try:
        yield
    finally:
        _tracer.reset(token)


def current_tracer() -> Tracer | None:
    """The tracer that records calls with global tensors here (`traced_by`); None outside of a capture."""
    return _tracer.get()


# ---- one tensor from the blocks of all ranks --------------------------------------------------

BlockMetadata = tuple[tuple[int, ...], torch.dtype, bool]
"""Shape, dtype, and whether the block requires a gradient."""


def specs_of_blocks(
    who: str, every: list[list[BlockMetadata]], placed: list[Placements], mesh: DeviceMesh
) -> tuple[Spec, ...]:
    """The spec of each tensor, from the metadata of its blocks on all ranks.

    every: for each rank, in the order of the mesh, the metadata of its blocks (`metadata_of`). placed: the placements
    of each tensor.
    """
    return tuple(_spec_of_blocks(who, j, p, mesh, [blocks[j] for blocks in every]) for j, p in enumerate(placed))


@per_rank
def metadata_of(blocks: list[torch.Tensor]) -> list[BlockMetadata]:
    """The metadata of this rank's blocks."""
    return [(tuple(x.shape), x.dtype, x.requires_grad) for x in blocks]


def _spec_of_blocks(
    who: str, j: int, placements: Placements, mesh: DeviceMesh, blocks: list[BlockMetadata]
) -> Spec:
    """The spec of result j, from the metadata of its block on each rank, in the order of the mesh."""
    shapes, dtypes, wants = zip(*blocks, strict=True)
    if len({len(s) for s in shapes}) > 1 or len(set(dtypes)) > 1 or len(set(wants)) > 1:
        raise ValueError(f"{who}: result {j} differs between ranks: {_listed(mesh, blocks)}")
    placements = check_placements(mesh, placements, len(shapes[0]))
    spec = spec_of(mesh, placements, _global_shape(placements, mesh, shapes), dtypes[0])
    for rank, shape in zip(mesh.ranks, shapes, strict=True):
        want = spec.local_shape(mesh.coordinate_of(rank))
        if want != shape:
            raise ValueError(
                f"{who}: the blocks of result {j} are not those of one tensor with placements {list(placements)}: of "
                f"{spec} rank {rank} has {list(want)}, cut as torch.chunk does; the ranks gave {_listed(mesh, blocks)}"
            )
    return spec


def _global_shape(placements: Sequence[Placement], mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The shape of the global tensor: along a sharded dim the sizes of the consecutive blocks add up."""
    found = list(shapes[0])
    for d in range(len(found)):
        axes = [a for a, p in enumerate(placements) if p.is_shard(d)]
        coordinates = [mesh.coordinate_of(rank) for rank in mesh.ranks]
        found[d] = sum(
            shape[d] for at, shape in zip(coordinates, shapes, strict=True)
            if not any(i for a, i in enumerate(at) if a not in axes)
        )  # fmt: skip
    return found


def _listed(mesh: DeviceMesh, blocks: list[BlockMetadata]) -> str:
    """The blocks of the first ranks, for an error."""
    found = [
        f"{dtype}{list(shape)} on rank {rank}{' with a gradient' if wants else ''}"
        for rank, (shape, dtype, wants) in zip(mesh.ranks, blocks, strict=True)
    ]
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
