"""Recipes: ops that look up along a dim which is shared out, without gathering it.

    embedding(f32[V@tp, d], i64[t@dp])          ->  f32[t@dp, d] +sum@tp
    gather(f32[t@dp, V@tp], 1, i64[t@dp, 1])    ->  f32[t@dp, 1] +sum@tp
    nll_loss(f32[t@dp, V@tp], i64[t@dp])        ->  f32[] +sum@dp +sum@tp      and its gradient, f32[t@dp, V@tp]

What an index points at is on one rank of tp; that rank gives it and the others give zeros, so their sum is it. What a
rank has to know besides its block is where it begins.

Left out: compiled programs, which gather the table; gradients of tables, which are a Partial of the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmd.mesh import per_rank
from spmd.tensor.call import Call
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.rules.networks import MEAN, NONE, SUM
from spmd.tensor.spec import Spec

aten = torch.ops.aten


@dataclass(frozen=True)
class Recipe:
    """Run eagerly: how operands have to lie, how results then do, and what a rank makes of its blocks.

    local: a function of the blocks, in the order of the operands, of the spec of what is looked up in, and of the
    static arguments.
    """

    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]
    local: Callable
    table: Spec
    statics: tuple

    def plans(self, call: Any) -> list[Plan]:
        return [plan(x._spec, spec) for x, spec in zip(call.operands, self.ins, strict=True)]

    def run(self, call: Any) -> Any:
        blocks = [way.run(x._local_tensor) for way, x in zip(self.plans(call), call.operands, strict=True)]
        found = self.local(blocks, self.table, *self.statics)
        wrapped = tuple(call.dtensor(x, spec) for x, spec in zip(found, self.outs, strict=True))
        return wrapped if len(wrapped) > 1 else wrapped[0]


def recipe_for(call: Call) -> Recipe | None:
    """The recipe of a call that looks up along a dim which is sharded; None where there is no such."""
    found = RECIPES.get(call.op)
    return None if found is None else found(call)


# ---- where things lie -------------------------------------------------------------------------


def _without(spec: Spec, axes: Sequence[int], dims: Sequence[tuple[int, ...]] | None = None) -> Spec:
    """The tensor moved off these axes, its dims sharded as they are or as is said."""
    dims = spec.dims if dims is None else dims
    return spec.moved_to(tuple(tuple(a for a in of if a not in axes) for of in dims), spec.units)


def _summed(axes: Sequence[int]) -> list[tuple[int, str]]:
    return [(a, "sum") for a in axes]


def _whole(spec: Spec) -> Spec:
    return spec.moved_to(((),) * spec.ndim)


def _own(indices: torch.Tensor, spec: Spec, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in this rank's block the indices point, and which of them point elsewhere; an error beyond the tensor."""
    known = (indices >= 0) & (indices < spec.shape[dim])
    aten._assert_async.msg(known.all(), "index out of range in self")
    start, length = spec.block(dim, spec.mesh.get_coordinate())
    own = indices - start
    return own.clamp(0, max(length - 1, 0)), (own < 0) | (own >= length)


# ---- embedding --------------------------------------------------------------------------------


def embedding(call: Call) -> Recipe | None:
    table, tokens = call["weight"], call["indices"]
    if not table.dims[0] or table.partial:
        return None
    moved = _without(tokens, [a for axes in table.dims for a in axes])
    out = Spec.of(
        table.mesh, (*tokens.shape, table.shape[1]), table.dtype, dims=(*moved.dims, table.dims[1]),
        units=(*moved.units, table.units[1]), partial=_summed(table.dims[0]),
    )  # fmt: skip
    return Recipe((table, moved), (out,), _rows, table, ())


@per_rank
def _rows(blocks: list[torch.Tensor], spec: Spec) -> tuple[torch.Tensor]:
    """This rank's rows of the tokens that it has, and zeros for the others."""
    table, tokens = blocks
    own, elsewhere = _own(tokens, spec, 0)
    if not len(table):
        return (table.new_zeros(*tokens.shape, table.shape[1]),)
    return (aten.embedding.default(table, own).masked_fill(elsewhere.unsqueeze(-1), 0),)


# ---- gather -----------------------------------------------------------------------------------


def gather(call: Call) -> Recipe | None:
    x, index = call["self"], call["index"]
    if not x.ndim or x.ndim != index.ndim or x.partial or x.dtype == torch.bool:
        return None
    along = call["dim"] % x.ndim
    others = [d for d in range(x.ndim) if d != along]
    if not x.dims[along] or any(x.dims[d] and x.shape[d] != index.shape[d] for d in others):
        return None
    taken = [a for axes in x.dims for a in axes]
    free = tuple(a for a in index.dims[along] if a not in taken)
    dims = tuple(free if d == along else x.dims[d] for d in range(x.ndim))
    units = tuple((index if d == along else x).units[d] for d in range(x.ndim))
    moved = index.moved_to(dims, units)
    out = Spec.of(x.mesh, index.shape, x.dtype, dims=dims, units=units, partial=_summed(x.dims[along]))
    return Recipe((x, moved), (out,), _gathered, x, (along,))


@per_rank
def _gathered(blocks: list[torch.Tensor], spec: Spec, dim: int) -> tuple[torch.Tensor]:
    x, index = blocks
    own, elsewhere = _own(index, spec, dim)
    if not x.shape[dim]:
        return (x.new_zeros(index.shape),)
    return (x.gather(dim, own).masked_fill(elsewhere, 0),)


# ---- losses -----------------------------------------------------------------------------------


def nll(call: Call) -> Recipe | None:
    """Of each row the rank with its class has the score; the summed weights are sums of the ranks' as well."""
    x, target, weight = call["self"], call["target"], call["weight"]
    if not _has_shared_classes(x) or call["reduction"] == MEAN:
        return None
    rows, classes = x.dims
    target = target.moved_to((rows,), x.units[:1])
    given = () if weight is None else (weight.moved_to((classes,), x.units[1:]),)
    one = Spec.of(x.mesh, (), x.dtype)
    if call["reduction"] == SUM:
        outs = (one.with_layout((), (), _summed(rows + classes)),) * 2
    else:
        each = Spec.of(x.mesh, target.shape, x.dtype, dims=(rows,), units=x.units[:1], partial=_summed(classes))
        outs = (each, one)
    return Recipe((x, target, *given), outs, _losses, x, (call["reduction"], call["ignore_index"]))


def nll_backward(call: Call) -> Recipe | None:
    x, target, weight = call["self"], call["target"], call["weight"]
    if not _has_shared_classes(x):
        return None
    grad, rows = call["grad_output"], x.dims[0]
    grad = grad.moved_to((rows,), x.units[:1]) if grad.ndim else _whole(grad)
    given = () if weight is None else (weight.moved_to((x.dims[1],), x.units[1:]),)
    ins = (grad, x, target.moved_to((rows,), x.units[:1]), *given, _whole(call["total_weight"]))
    out = x.with_tensor(x.shape)
    return Recipe(ins, (out,), _loss_gradients, x, (call["reduction"], call["ignore_index"]))


def _has_shared_classes(x: Spec) -> bool:
    return x.ndim == 2 and bool(x.dims[1]) and not x.partial


def _hit(target: torch.Tensor, x: torch.Tensor, weight, spec: Spec, ignored: int):
    """For each row its class in this block, the weight of that, and whether it counts nothing here.

    So it is where another rank has the class, or none.
    """
    skipped = target == ignored
    own, elsewhere = _own(target.masked_fill(skipped, 0), spec, 1)
    without = elsewhere | skipped
    ones = x.new_ones(target.shape) if weight is None or not len(weight) else weight[own]
    return own, ones.masked_fill(without, 0), without


@per_rank
def _losses(blocks: list[torch.Tensor], spec: Spec, reduction: int, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, target, *rest = blocks
    own, weight, without = _hit(target, x, rest[0] if rest else None, spec, ignored)
    scores = x.gather(1, own.unsqueeze(1)).squeeze(1) if x.shape[1] else torch.zeros_like(weight)
    each = -(scores * weight).masked_fill(without, 0)  # a score of -inf that does not count is no NaN
    return (each, x.new_zeros(())) if reduction == NONE else (each.sum(), weight.sum())


@per_rank
def _loss_gradients(blocks: list[torch.Tensor], spec: Spec, reduction: int, ignored: int) -> tuple[torch.Tensor]:
    grad, x, target, *rest, total = blocks
    own, weight, without = _hit(target, x, rest[0] if rest else None, spec, ignored)
    each = -weight * (grad / total if reduction == MEAN else grad)
    zeros = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if not x.shape[1]:
        return (zeros,)
    return (zeros.scatter_add(1, own.unsqueeze(1), each.masked_fill(without, 0).unsqueeze(1)),)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten.nll_loss_forward.default: nll,
    aten.nll_loss_backward.default: nll_backward,
}
