"""The gradient of a table is made in the shards that it is kept in, where all tokens are there."""

import itertools

import pytest
import torch
from torch import nn

import spmd
from spmd import LocalTensorMode, Replicate, Shard
from spmd.expand.lowered import lowered, made_rows
from spmd.tensor.call import Call, TensorMeta
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.rules.rule import Row
from spmd.tensor.spec import parse_spec
from tests.expand.side_by_side import train_step

R, S0 = Replicate(), Shard(0)
BACKWARD = torch.ops.aten.embedding_dense_backward.default
MESH = spmd.DeviceMesh("cpu", torch.arange(8).view(2, 4).tolist(), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("words", [8, 7, 2])  # even, uneven and empty blocks
@pytest.mark.parametrize("padding, by_count", [(-1, False), (1, False), (-1, True), (0, True)])
def test_a_rank_makes_its_rows_of_the_gradient(words, padding, by_count):
    torch.manual_seed(0)
    grad, tokens = torch.randn(4, 3, 6, dtype=torch.float64), torch.randint(0, words, (4, 3))
    whole = BACKWARD(grad, tokens, words, padding, by_count)
    specs = parse_spec("f64[4, 3, 6]", MESH), parse_spec("i64[4, 3]", MESH)
    call = Call(BACKWARD, (*specs, words, padding, by_count), {}, (TensorMeta.of(whole),))
    found = lowered(call, (Row((R, R), (R,)), *made_rows(call)))
    assert str(found.outs[0]) == f"f64[{words}@tp, 6]"
    for at in itertools.product(range(2), range(4)):
        start, length = found.outs[0].block(0, at)
        (rows,) = found.local(at, [grad, tokens])
        torch.testing.assert_close(rows, whole[start : start + length], rtol=0, atol=0)


@pytest.mark.parametrize(
    "operands, place, made",
    [
        (("f64[4@dp, 3, 6]", "i64[4@dp, 3]"), "f64[8@tp, 6]", "f64[8@tp, 6] +sum@dp"),
        (("f64[4, 3, 6@dp]", "i64[4, 3]"), "f64[8@tp, 6]", "f64[8@tp, 6@dp]"),
        (("f64[4, 3, 6]", "i64[4, 3]"), "f64[8@dp,tp, 6]", "f64[8@dp,tp, 6]"),
        (("f64[4@tp, 3, 6]", "i64[4@tp, 3]"), "f64[8@tp, 6]", "f64[8, 6] +sum@tp"),  # tp has other tokens
        (("f64[4@dp, 3, 6]", "i64[4@dp, 3]"), "f64[8, 6@tp]", "f64[8, 6] +sum@dp"),
    ],
)
def test_it_is_made_where_it_goes_on_axes_that_have_all_tokens(operands, place, made):
    specs = [parse_spec(text, MESH) for text in operands]
    call = Call(BACKWARD, (*specs, 8, -1, False), {}, (TensorMeta((8, 6), (6, 1), torch.float64),))
    found = lowered(call, place=parse_spec(place, MESH))
    assert str(found.outs[0]) == made
    assert not any(p.steps for p in found.plans)


class Words(nn.Module):
    """A table, and a product with it or with another one."""

    def __init__(self, words: int, tied: bool):
        super().__init__()
        self.table, self.head = nn.Embedding(words, 4, padding_idx=3), nn.Linear(4, words, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.table(x))


def trained(tied: bool, mesh=None, choose: str = "op"):
    """Losses, parameters and gradients after two steps, and the compiled step."""
    torch.manual_seed(0)
    model, step = Words(7, tied).double(), train_step
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    if mesh is not None:
        inputs = {k: {"dp": S0} for k in "xy"}
        step = spmd.compile(step, mesh, params={"table.weight": {"tp": S0}}, inputs=inputs, choose=choose)
    tokens = [torch.randint(0, 7, (2, 2, 3), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    found = [step(model, optimizer, *each).detach() for each in tokens]
    found += [x.detach() for p in model.parameters() for x in (p, p.grad)]
    return [x.full_tensor().reconcile() if isinstance(x, spmd.DTensor) else x for x in found], step


@pytest.mark.parametrize("tied, choose", [(False, "op"), (True, "program")])
def test_a_table_by_rows_is_trained_as_on_one_device(tied, choose):
    want, _ = trained(tied)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        got, step = trained(tied, mesh, choose)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    steps = [n.target for n in step.program.graph.nodes if isinstance(n.target, Step)]
    assert choose == "program" or {s.move.kind for s in steps if s.sends} == {"all_reduce"}
