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
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.eager.view_copies import note_write
from spmd.tensor.spec import Spec, spec_of_value

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
    gradients = [_reduced(p) for p in found if p.grad is not None]
    total = _total_norm(gradients, float(norm_type))
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to scale them all the same"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    _scale(gradients, factor)
    return total


def _reduced(p: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter, without sums that are owed."""
    g = p.grad
    if isinstance(g, DTensor) and g._spec.partial:
        p.grad = g = g.redistribute(placements=p.placements)
    return g


def _total_norm(gradients: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    by_spec: dict[Spec | None, list[torch.Tensor]] = {}
    for g in gradients:
        by_spec.setdefault(spec_of_value(g), []).append(_block(g))
    alike: dict[Shared, list[torch.Tensor]] = {}
    for spec, blocks in by_spec.items():
        alike.setdefault(_shared(spec), []).extend(blocks)
    parts = [_over_ranks(_power(blocks, p), over, p) for over, blocks in alike.items()]
    if not parts:
        return torch.tensor(0.0)
    if len(parts) > 1:
        together = torch.stack([part.to(parts[0].dtype) for part in parts])
        parts = [together.amax() if p == inf else together.sum()]
    return parts[0] if p in (inf, 0) else parts[0] ** (1 / p)


def _shared(spec: Spec | None) -> Shared:
    if spec is None or not any(spec.dims):
        return None  # each rank has all of it
    return spec.mesh, tuple(sorted(axis for axes in spec.dims for axis in axes))


def _block(g: torch.Tensor) -> torch.Tensor:
    return wait(g._local_tensor) if isinstance(g, DTensor) else g


@per_rank
def _power(blocks: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """The norm of these blocks, to the power of p, so that those of several ranks can be added."""
    some, dtype = neighbours(blocks), _summed_in(blocks[0].dtype)
    if not some:
        return blocks[0].new_zeros((), dtype=dtype)
    found = torch.ops.aten._foreach_norm.Scalar(some, p)
    norms = torch.stack([x if x.dtype is dtype else x.to(dtype) for x in found])
    return norms.amax() if p == inf else norms.sum() if p == 0 else norms.pow(p).sum()


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype.to_real()


def _over_ranks(part: torch.Tensor, over: Shared, p: float) -> torch.Tensor:
    if over is None:
        return part
    carrier, group = transport(), transport().group(*over)
    if p == inf:
        return wait(all_reduce(part, "max", group))  # which keeps a NaN; that of gloo would not
    return carrier.wait_tensor(carrier.all_reduce_(part, "sum", group))


def _scale(gradients: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    alike: dict[tuple, list[torch.Tensor]] = {}
    for g in gradients:
        alike.setdefault((g.dtype, g.device), []).append(_block(g))
    for (dtype, device), blocks in alike.items():
        _multiply(blocks, factor.to(device, dtype))
    distributed = [g for g in gradients if isinstance(g, DTensor)]
    if distributed:
        torch.autograd.graph.increment_version(distributed)
    for g in distributed:
        note_write(g)


@per_rank
def _multiply(blocks: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    for x in neighbours(blocks):
        x.mul_(factor)


def neighbours(blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same elements in fewer tensors: blocks that follow one another in one memory become one, as in a bucket.

    >>> flat = torch.arange(6.0)
    >>> neighbours([flat[:2], flat[2:5].view(3, 1), flat[:1]])
    [tensor([0., 1., 2., 3., 4.]), tensor([0.])]
    """
    runs: list[tuple[torch.Tensor, int]] = []
    memory, end = None, -1
    for x in blocks:
        n = x.numel()
        if not n:
            continue
        own, start = (_torch.memory_of(x), x.storage_offset()) if x.is_contiguous() else (None, 0)
        if own is not None and own == memory and start == end:
            runs[-1] = runs[-1][0], runs[-1][1] + n
        else:
            runs.append((x, n))
        memory, end = own, start + n
    return [x if n == x.numel() else x.as_strided((n,), (1,)) for x, n in runs]
