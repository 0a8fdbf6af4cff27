"""The operands of an eager call: found in its arguments, put on one mesh, and made DTensors.

    torch.cat([x, y], dim=1)    tensors_of((([x, y]), 1), {})  ->  [x, y]
    x + torch.tensor(2.0)       all_distributed                ->  x and a replicated DTensor of 2.0
    x * norm                    on_one_mesh                    ->  norm, one number of another mesh, on the mesh of x

A plain tensor becomes a replicated DTensor where that is safe or was asked for (`plain_tensors`). A tensor of one
element may have another mesh than the others: it costs little to replicate.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from spmd import _torch
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor.eager import plain_tensors
from spmd.tensor.eager.view_copies import block
from spmd.tensor.modes import explicit
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.spec import Spec, replicated


class EagerCall(NamedTuple):
    """One call on DTensors.

    args, kwargs: as the op takes them, every tensor a DTensor. given: the tensors of the user, in order. operands: the
    same tensors as DTensors on one mesh. dtensor: the DTensor class.
    """

    op: _torch.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    given: list[torch.Tensor]
    operands: list
    dtensor: type

    def blocks(self) -> list[torch.Tensor]:
        """This rank's block of each operand, up to date."""
        return [block(x) for x in self.operands]


# ---- tensors among the arguments --------------------------------------------------------------


def tensors_of(args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call in the order of its schema, lists flattened."""
    found: list[torch.Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += [y for y in x if isinstance(y, torch.Tensor)]
    return found


def with_tensors(args: tuple, kwargs: dict[str, Any], new: Sequence) -> tuple[tuple, dict[str, Any]]:
    """The arguments, with `new` in the places of the tensors that `tensors_of` finds."""
    rest = iter(new)
    return tuple([_put(x, rest) for x in args]), {name: _put(x, rest) for name, x in kwargs.items()}


def _put(x: Any, rest: Iterator) -> Any:
    """One argument, whose tensors are the next of `rest`.

    A function that is made in the call and calls itself would hold them until the garbage collector comes.
    """
    if isinstance(x, torch.Tensor):
        return next(rest)
    return [_put(y, rest) for y in x] if isinstance(x, (list, tuple)) else x


def first_uses(operands: list) -> tuple[int, ...]:
    """For each operand the first place that has the same tensor; empty when all are different."""
    if len(operands) == 1:
        return ()
    ids = [id(x) for x in operands]
    return () if len(set(ids)) == len(ids) else tuple(map(ids.index, ids))


def named_plans(call: EagerCall, plans: Sequence[Plan]) -> list[tuple[str, Plan]]:
    """The plans of the first operands, each with the name that the schema of the op gives the operand."""
    given = dict(zip((a.name for a in _torch.arguments(call.op)), call.args, strict=False)) | call.kwargs
    names = [
        f"{name}[{i}]" if isinstance(x, (list, tuple)) else name
        for name, x in given.items()
        for i, y in enumerate(x if isinstance(x, (list, tuple)) else [x])
        if isinstance(y, torch.Tensor)
    ]
    return list(zip(names, plans, strict=False))


# ---- plain tensors ----------------------------------------------------------------------------


def all_distributed(op, given: list[torch.Tensor], dtensor: type) -> list:
    """The tensors of a call, with plain ones as replicated DTensors on the mesh of the others."""
    mesh = next(x for x in given if isinstance(x, dtensor))._spec.mesh
    return [x if isinstance(x, dtensor) else _as_replicated(op, x, mesh, dtensor) for x in given]


def _as_replicated(op, x: torch.Tensor, mesh: DeviceMesh, dtensor: type):
    """A plain tensor as a replicated DTensor. RuntimeError where that is not safe and was not asked for."""
    if _torch.is_zero_without_memory(x):
        x = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
    else:
        plain_tensors.check(op, x, mesh)
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: a plain tensor of shape {list(x.shape)} that requires a gradient met a DTensor, and its gradient "
            "would not come back as a plain tensor. Make it a DTensor first, with distribute_tensor or from_local."
        )
    return dtensor(x, replicated_spec(mesh, tuple(x.shape), _common_stride(x), x.dtype))


def _common_stride(x: torch.Tensor) -> tuple[int, ...]:
    """The strides of x, and for a dim of size 1 that of a contiguous tensor: there the ranks' strides may differ."""
    stride = list(x.stride())
    for d in reversed(range(x.ndim)):
        if x.shape[d] == 1:
            stride[d] = stride[d + 1] * x.shape[d + 1] if d + 1 < x.ndim else 1
    return tuple(stride)


@functools.lru_cache(maxsize=1024)
def replicated_spec(mesh: DeviceMesh, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Spec:
    """The spec of a replicated tensor with this metadata."""
    return Spec.of(mesh, shape, dtype, stride=stride)


# ---- several meshes ---------------------------------------------------------------------------


def on_one_mesh(op, operands: list, dtensor: type) -> list:
    """The operands on one mesh: that of the operands with more than one element. Numbers are replicated on it.

    So the norm of all gradients, and the loss that is logged, may be of parameters of several meshes.
    """
    large = [x for x in operands if x.numel() > 1 or (x is operands[0] and _torch.written(op))] or operands
    mesh = large[0]._spec.mesh
    for x in operands:
        if x._spec.mesh != mesh and (x.numel() > 1 or not _may_change_mesh(op, x)):
            raise ValueError(
                f"{op}: operands are on two meshes, {mesh!r} and {x._spec.mesh!r}. Build both on one mesh, or take one "
                "of them off its mesh with full_tensor() and distribute_tensor it on the other."
            )
    moved = iter(_numbers_on(mesh, op, [x for x in operands if x._spec.mesh != mesh], dtensor))
    return [x if x._spec.mesh == mesh else next(moved) for x in operands]


def _may_change_mesh(op, x) -> bool:
    """Whether x is only read, and no gradient has to return to the mesh of x."""
    wants_gradient = x.requires_grad and torch.is_grad_enabled()
    return not wants_gradient and (not _torch.written(op) or _torch.writes_first(op))


def _numbers_on(mesh: DeviceMesh, op, numbers: list, dtensor: type) -> list:
    """Tensors of one element, replicated on this mesh. If only some of its ranks have one, all ranks compare it."""
    plans = [plan(x._spec, replicated(x._spec)) for x in numbers]
    for p in plans:
        explicit.check(op, [("x", p)])
    blocks = [p.run(block(x)) for p, x in zip(plans, numbers, strict=True)]
    known = [_covers(x._spec.mesh, mesh) for x in numbers]
    unknown = [x for x, is_known in zip(blocks, known, strict=True) if not is_known]
    if unknown and not plain_tensors.are_same_everywhere(unknown, mesh):
        specs = ", ".join(f"{x._spec} on {x._spec.mesh!r}" for x, k in zip(numbers, known, strict=True) if not k)
        raise ValueError(f"{op}: {specs} is not the same number on all ranks of {mesh!r}")
    return [
        dtensor(local, replicated_spec(mesh, tuple(x.shape), _common_stride(local), x.dtype))
        for x, local in zip(numbers, blocks, strict=True)
    ]


@per_rank
def _covers(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    return set(mesh.ranks) >= set(other.ranks)
