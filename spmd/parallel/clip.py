"""Clip gradients by the norm of all of them: blocks are read where they are, and a few numbers are sent.

    norm = clip_grad_norm_(model.parameters(), 1.0)

The norm of a gradient that is sharded is made of the norms of its blocks. Gradients that the same axes shard have one
reduction, of one number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

import torch

from spmd import _torch
from spmd.comm import transport, wait
from spmd.comm.functional import all_reduce
from spmd.mesh import DeviceMesh, per_rank
from spmd.mesh.rank import rank_simulator
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.eager.view_copies import note_write
from spmd.tensor.spec import Spec

LONG = 2**16  # elements; in float32 the norm of so many is 2e-7 off, of 2**22 it is 1e-5
LONG_PRODUCT = 2**18  # the product of so many with themselves is 2e-7 off: it has a sum for each lane of the processor

Shared = tuple[DeviceMesh, tuple[int, ...]] | None
"""Over which axes of which mesh blocks make up a gradient; None for a gradient that each rank has all of."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their norm together is at most `max_norm`. Returns the norm that they had.

    Names, arguments and meaning are those of `torch.nn.utils.clip_grad_norm_`. Parameters may be DTensors on several
    meshes, and plain tensors. norm_type: the p of the norm; `inf` for the largest element. error_if_nonfinite: raise
    RuntimeError where the norm is infinite or no number. The result is a plain tensor of no dims, equal on all ranks of
    the meshes. One small all-reduce is sent for each set of axes that shards gradients.

    >>> x = torch.zeros(3, requires_grad=True)
    >>> x.grad = torch.tensor([3.0, 0.0, 4.0])
    >>> clip_grad_norm_([x], 1.0), x.grad
    (tensor(5.), tensor([0.6000, 0.0000, 0.8000]))
    """
    found = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    blocks, distributed = _blocks(found)
    total = _total_norm(blocks, float(norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to scale them all the same"
        )
    if not _is_below(total, max_norm):
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        if not _is_one(factor):
            _scale(blocks, factor, distributed)
    return total


Blocks = dict[tuple[Shared, torch.dtype, torch.device], list[torch.Tensor]]
"""Blocks by the axes that make up their tensors, by dtype and device, in the order in which they came."""


def _blocks(parameters: Iterable[torch.Tensor]) -> tuple[Blocks, list[DTensor]]:
    """What the gradients have on this rank, without sums that are owed; and those that are DTensors."""
    found: Blocks = {}
    by_spec: dict[Spec | tuple, list[torch.Tensor]] = {}  # whose lists are those of `found`
    distributed = []
    for p in parameters:
        if (g := p.grad) is None:
            continue
        if isinstance(g, DTensor):
            if g._spec.partial:
                p.grad = g = g.redistribute(placements=p.placements)
            distributed.append(g)
            key, spec, block = g._spec, g._spec, wait(g._local_tensor)
        else:
            key, spec, block = (g.dtype, g.device), None, g
        if (blocks := by_spec.get(key)) is None:
            blocks = by_spec[key] = found.setdefault((_shared(spec), block.dtype, block.device), [])
        blocks.append(block)
    if rank_simulator() is None:  # of simulated ranks, some have empty blocks, and others as many as they may join
        found = {key: neighbours(blocks) for key, blocks in found.items()}
    return found, distributed


def _total_norm(blocks: Blocks, p: float) -> torch.Tensor:
    over: dict[tuple, list[torch.Tensor]] = {}
    for (shared, dtype, device), some in blocks.items():
        over.setdefault((shared, device), []).append(_power(some, p, dtype, device))
    parts = [_over_ranks(_together(powers, p), shared, p) for (shared, _), powers in over.items()]
    if not parts:
        return torch.tensor(0.0)
    total = _together([part.to(parts[0].device) for part in parts], p)
    return total if p in (inf, 0) else total ** (1 / p)


def _together(powers: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """The power of the norm of all that these are powers of the norms of."""
    if len(powers) == 1:
        return powers[0]
    stacked = torch.stack([power.to(powers[0].dtype) for power in powers])
    return stacked.amax() if p == inf else stacked.sum()


def _shared(spec: Spec | None) -> Shared:
    if spec is None or not any(spec.dims):
        return None  # each rank has all of it
    return spec.mesh, tuple(sorted(axis for axes in spec.dims for axis in axes))


@per_rank
def _power(blocks: Sequence[torch.Tensor], p: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The norm of these blocks, to the power of p, so that those of several ranks can be added."""
    dtype = _summed_in(dtype)
    joined = neighbours(blocks)
    if p == 2 and all(map(_is_multiplied, joined)):
        return _squares(joined, dtype, device)
    if not (some := [piece for x in joined for piece in _pieces(x)]):
        return torch.zeros((), dtype=dtype, device=device)
    found = torch.ops.aten._foreach_norm.Scalar(some, p)
    norms = torch.stack([x if x.dtype is dtype else x.to(dtype) for x in found])
    return norms.amax() if p == inf else norms.sum() if p == 0 else norms.pow(p).sum()


def _is_multiplied(x: torch.Tensor) -> bool:
    """Whether its squares are added up faster as a product with itself: by BLAS, on the CPU."""
    return x.dtype in (torch.float32, torch.float64) and x.device.type == "cpu" and x.is_contiguous()


def _squares(blocks: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    found = [torch.dot(piece, piece) for x in blocks for piece in x.view(-1).split(LONG_PRODUCT)]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=dtype, device=device)


def _pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """The same elements in tensors that are not long: torch adds up squares one by one, and a long sum loses digits."""
    return x.view(-1).split(LONG) if x.numel() > LONG and x.is_contiguous() else (x,)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype.to_real()


def _over_ranks(part: torch.Tensor, over: Shared, p: float) -> torch.Tensor:
    if over is None:
        return part
    carrier, group = transport(), transport().group(*over)
    if p == inf:
        return wait(all_reduce(part, "max", group))  # which keeps a NaN; that of gloo would not
    return carrier.wait_tensor(carrier.all_reduce_(part, "sum", group))


def _is_below(total: torch.Tensor, max_norm: float) -> bool:
    """Whether a norm that can be read at no cost is so far below that no rounding makes a factor of it."""
    return _is_read_at_once(total) and total.item() * 1.001 + 1e-6 < max_norm


def _is_one(factor: torch.Tensor) -> bool:
    """Whether nothing is to be scaled, where that can be read at no cost."""
    return _is_read_at_once(factor) and factor.item() == 1.0


def _is_read_at_once(x: torch.Tensor) -> bool:
    return type(x) is torch.Tensor and x.device.type == "cpu" and not _torch.is_tracing(x)


def _scale(blocks: Blocks, factor: torch.Tensor, distributed: Sequence[DTensor]) -> None:
    for (_, dtype, device), some in blocks.items():
        _multiply(some, factor.to(device, dtype))
    if distributed:
        torch.autograd.graph.increment_version(distributed)
    for g in distributed:
        note_write(g)


@per_rank
def _multiply(blocks: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for x in neighbours(blocks):
        x.mul_(factor)


def neighbours(blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same elements in fewer tensors: blocks of one dtype that follow one another in one memory become one.

    >>> flat = torch.arange(6.0)
    >>> neighbours([flat[:2], flat[2:5].view(3, 1), flat[:1]])
    [tensor([0., 1., 2., 3., 4.]), tensor([0.])]
    """
    found: list[torch.Tensor] = []
    run: list[torch.Tensor] = []
    end, width = None, blocks[0].itemsize if blocks else 0
    for x in blocks:
        n = x.numel()
        if not n:
            continue
        start = x.data_ptr() if type(x) is torch.Tensor and x.is_contiguous() else None
        if run and (start is None or start != end):
            found += _joined(run, end)
            run = []
        run.append(x)
        end = None if start is None else start + n * width
    return found + _joined(run, end)


def _joined(run: list[torch.Tensor], end: int | None) -> list[torch.Tensor]:
    """Blocks of one dtype that lie side by side and end at an address, as one, if the memory of the first has all."""
    if len(run) < 2:
        return run
    first, memory = run[0], run[0].untyped_storage()
    if end > memory.data_ptr() + memory.nbytes():
        return run  # memories of their own, which happen to touch
    return [first.as_strided(((end - first.data_ptr()) // first.itemsize,), (1,))]
