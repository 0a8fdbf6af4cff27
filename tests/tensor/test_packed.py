"""Ops on packed tensors give what one device gives: those that keep the blocks, and those that have to move them."""

import pytest
import torch
import torch.nn.functional as F

from spmd import Shard, distribute_tensor, init_device_mesh
from spmd.sim import LocalTensorMode
from spmd.tensor.redistribute.plan import steps_made
from tests.tensor.single import R, agree_at_once

B3 = Shard(0, blocks=3)

# x: three blocks of k rows, and four columns. i: places of rows and columns.
KEPT = """
-x
x + x.flip(1)
x * 2.5
torch.where(x > 0, x, x.flip(1))
x.clamp(-0.5, 0.5)
F.gelu(x)
F.dropout(x, 0.5) * 0
x.sum(0)
x.sum()
x.mean()
x.sum(1)
x.amax(0)
x.norm()
x.var(0)
x.softmax(1)
x.cumsum(1)
x.sort(1)[0]
F.layer_norm(x, x.shape[1:])
F.pad(x, (1, 2))
x @ x.new_ones(4, 3)
x.t() * 1
x.t() @ x
x.unsqueeze(0).expand(2, -1, -1) * 1
torch.stack([x, x])
x.flatten() * 1
x.unflatten(0, (3, -1)) * 1
(x.unflatten(0, (3, -1)) * 2).flatten(0, 1)
[t * 2 for t in x.unflatten(0, (3, -1)).unbind(0)]
x[:k] * 1
x[k:] * 1
x[-k:] * 1
[t * j for j, t in enumerate(x.split(k))]
[t * j for j, t in enumerate(x.chunk(3))]
[t * 2 for t in x.split([k, 2 * k])]
[t * 2 for t in x.tensor_split(3)]
F.silu(x[:k]) * x.chunk(3)[2]
torch.cat(x.chunk(3)[::-1])
torch.cat([x, x])
torch.cat([x.chunk(3)[1], x])
(x * 1).slice_scatter(x[:k], 0, k, 2 * k)
"""

MOVED = """
x @ x.t()
x.cumsum(0)
x.logcumsumexp(0)
x.flip(0)
x.roll(1, 0)
x.softmax(0)
x.log_softmax(0)
x.max(0)
x.argmax(0)
x.topk(2, 0)
x.sort(0)[0]
x.median(0)[0]
x.tril()
x.triu(1)
x.trace()
x.diagonal() * 1
torch.diag_embed(x)
x[1:-1] * 1
x[::2] * 1
x[2] * 1
x[: k + 1] * 1
[t * 2 for t in x.split(k + 1)]
x.unflatten(0, (-1, 3)) * 1
x[i]
x.index_select(0, i)
x.gather(0, i.view(2, 2))
x.scatter(0, i.view(2, 2), 7.0)
(x * 1).index_fill_(0, i[:1], 3.0)
(x * 1).slice_scatter(x.new_ones(1, 4), 0, 1, 2)
F.embedding(i, x)
F.nll_loss(x.t(), i)
F.cross_entropy(x.t(), i)
F.pad(x, (0, 0, 1, 2))
x.repeat(2, 1)
torch.cdist(x, x)
F.pdist(x)
torch.cat([x, x[:1]])
F.conv1d(x.t().unsqueeze(0), x.new_ones(1, 4, 3))
"""


def lines(table):
    return [line for line in table.splitlines() if line]


def run(line, x, i):
    return eval(line, {"torch": torch, "F": F, "x": x, "i": i, "k": len(x) // 3})


CASES = [(15, [B3], (4,)), (6, [B3], (4,)), (24, [B3, B3], (2, 2))]


@pytest.mark.parametrize("line", lines(KEPT + MOVED))
def test_an_op_gives_what_one_device_gives(line):
    """Values and gradients; shards are even, uneven and empty, and those of two axes."""
    for rows, placed, mesh_shape in CASES:
        x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows), requires_grad=True)
        i = torch.tensor([1, 0, 3, 2])
        agree_at_once(lambda x, i: run(line, x, i), [x, i], [placed, [R] * len(placed)], mesh_shape=mesh_shape)


def test_ops_that_keep_the_blocks_send_nothing_but_sums():
    """Forward and backward."""
    mesh, moved = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), {}
    with LocalTensorMode(4):
        for line in lines(KEPT):
            x = distribute_tensor(torch.randn(24, 4), mesh, [B3]).requires_grad_()
            with steps_made() as steps:
                out = run(line, x, None)
                sum((t * t).sum() for t in (out if isinstance(out, (list, tuple)) else [out])).backward()
            kinds = {step.kind for step in steps if step.sends} - {"all_reduce"}
            if kinds:
                moved[line] = kinds
    assert moved == {}
