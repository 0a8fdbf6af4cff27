"""A recipe: an embedding whose table is sharded by its rows, without gathering it.

    embedding(f32[V@tp, d], i64[t@dp])  ->  f32[t@dp, d] +sum@tp

Each token's row is on one rank of tp; that rank gives the row and the others give zeros, so their sum is the row.
What a rank has to know besides its block is where it begins.

Left out: compiled programs, which gather the table; the gradient, which is a Partial of the whole table.
"""

from __future__ import annotations

import torch

from spmd.mesh import per_rank
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.spec import Spec

aten = torch.ops.aten


def is_by_rows(call) -> bool:
    """Whether the table of an embedding is sharded by its rows, and whole otherwise or sharded by columns too."""
    if call.op is not aten.embedding.default:
        return False
    table = call["weight"]
    return bool(table.dims[0]) and not table.partial


def out_specs(table: Spec, tokens: Spec) -> tuple[Spec, Spec]:
    """Where the tokens have to be - whole along the axes of the table - and where the result then is."""
    taken = {a for axes in table.dims for a in axes}
    dims = tuple(tuple(a for a in axes if a not in taken) for axes in tokens.dims)
    moved = tokens.moved_to(dims, tokens.units)
    out = Spec.of(
        table.mesh, (*tokens.shape, table.shape[1]), table.dtype, dims=(*moved.dims, table.dims[1]),
        units=(*moved.units, table.units[1]), partial=[(a, "sum") for a in table.dims[0]],
    )  # fmt: skip
    return moved, out


class ByRows:
    """Run it eagerly."""

    def plans(self, call) -> list[Plan]:
        table, tokens = (x._spec for x in call.operands)
        return [plan(table, table), plan(tokens, out_specs(table, tokens)[0])]

    def run(self, call):
        table, tokens = call.operands
        moved, out = out_specs(table._spec, tokens._spec)
        indices = plan(tokens._spec, moved).run(tokens._local_tensor)
        return call.dtensor(_rows(table._local_tensor, indices, table._spec), out)


@per_rank
def _rows(block: torch.Tensor, indices: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's rows of the tokens that it has, and zeros for the others."""
    known = (indices >= 0) & (indices < spec.shape[0])
    aten._assert_async.msg(known.all(), "embedding: index out of range in self")
    start, length = spec.block(0, spec.mesh.get_coordinate())
    if not length:
        return block.new_zeros(*indices.shape, block.shape[1])
    own = indices - start
    elsewhere = (own < 0) | (own >= length)
    return aten.embedding.default(block, own.clamp(0, length - 1)).masked_fill(elsewhere.unsqueeze(-1), 0)
