"""Mixed precision: what is kept, computed with and reduced in which dtype."""

from math import prod

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy

import spmd
from spmd import FullyShard, MeshTopoInfo, MixedPrecision
from spmd.expand.precision import computed_in
from spmd.mesh.layout import HostGrid
from tests.expand.places.trained import Odd, on_ranks, plain_step, planned, steps
from tests.expand.places.trained import train_step as odd_step
from tests.expand.side_by_side import INPUTS, NET, Net, seeded, train_step

NARROW = MixedPrecision(torch.float32, torch.float64)


def sgd(params):
    return optim.SGD(params, 0.1, momentum=0.9)


def alone(fn, precision) -> dict[str, torch.Tensor]:
    """The training on one device, in the same precision."""
    model = seeded(Odd).double()
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    with computed_in(precision, [model]):
        return steps(fn, model, optimizer, 2)


@pytest.mark.parametrize(
    "axes, fn, said",
    [
        ({"dp": 2}, odd_step, {"fully_shard": "dp"}),
        ({"dp": 2}, plain_step, {"fully_shard": FullyShard("dp", 1)}),
        ({"dp": 2}, plain_step, {}),
    ],
)
def test_training_in_mixed_precision_is_that_of_one_device(axes, fn, said):
    """Computed in float32, kept and reduced in float64."""
    want, got = alone(fn, NARROW), on_ranks(axes, sgd, fn, 2, mixed_precision=NARROW, **said).seen
    for name, x in want.items():
        assert got[name].dtype == x.dtype, name
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("reduce_dtype, sent", [(None, torch.bfloat16), (torch.float32, torch.float32)])
def test_shards_are_cast_before_they_are_gathered(reduce_dtype, sent):
    """Gathers are of half the bytes, gradients are reduced in the dtype for it, state has the one that is kept."""
    model = seeded(Odd)
    x = torch.zeros(4, 4, dtype=torch.int64)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    said = {"fully_shard": "dp", "mixed_precision": policy, "passes": ()}
    program = planned(plain_step, model, optim.AdamW(model.parameters()), {"dp": 2}, (x, x), **said)
    assert {c.spec.dtype for c in program.collectives if c.kind == "all_gather"} == {torch.bfloat16}
    assert {c.spec.dtype for c in program.collectives if c.kind == "reduce_scatter"} == {sent}
    assert program.places["model.up.weight"].computed.dtype == torch.bfloat16
    state = {spec.dtype for name, spec in program.outputs if spec is not None and "exp_avg" in name}
    assert state == {torch.float32}


@pytest.mark.parametrize("choose", ["op", "program"])
@pytest.mark.parametrize("shape, said", [((4, 1), {}), ((2, 2), {"params": NET}), ((2, 2), {"fully_shard": "dp"})])
def test_large_gradients_are_reduced_in_the_dtype_for_it(shape, said, choose):
    """Though in the dtype in which they are made half the bytes would be sent."""
    mesh = spmd.DeviceMesh("cpu", torch.arange(4).view(shape).tolist(), mesh_dim_names=("dp", "tp"))
    mesh = mesh.with_topology(MeshTopoInfo(HostGrid(shape), "hopper"))
    wide = MixedPrecision(torch.bfloat16, torch.float32)
    step = spmd.compile(train_step, mesh, inputs=INPUTS, passes=(), choose=choose, mixed_precision=wide, **said)
    with torch.device("meta"):
        model = Net(512, 2048, 512)
    batch = torch.empty(16384, 512), torch.empty(16384, dtype=torch.long)
    program = step.program_for(model, optim.SGD(model.parameters(), 0.1), *batch)
    weights = [p.numel() // c for p in (model.up.weight, model.down.weight) for c in (1, 2)]
    owed = [c for c in program.collectives if "sum@" in str(c.spec) and prod(c.spec.local_shape((0, 0))) in weights]
    assert len([c for c in owed if "dp" in c.axis.split(",")]) == 2
    assert {c.spec.dtype for c in owed} == {torch.float32}


class Tied(nn.Module):
    """One table reads and writes words."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(32000, 512), nn.Linear(512, 32000, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.words(x).tanh()).float()


@pytest.mark.parametrize("choose", ["op", "program"])
def test_gradients_of_a_table_are_cast_before_they_are_added_and_reduced(choose):
    """Two bfloat16 gradients of one parameter: their sum is float32, and so is all that is reduced for it."""
    mesh = spmd.DeviceMesh("cpu", range(4), mesh_dim_names=("dp",))
    mesh = mesh.with_topology(MeshTopoInfo(HostGrid((4,)), "hopper"))
    policy = MixedPrecision(torch.bfloat16, torch.float32)
    said = {"inputs": INPUTS, "passes": (), "choose": choose, "fully_shard": "dp", "mixed_precision": policy}
    with torch.device("meta"):
        model, batch = Tied(), (torch.empty(16384, dtype=torch.long), torch.empty(16384, dtype=torch.long))
    program = spmd.compile(train_step, mesh, **said).program_for(model, optim.SGD(model.parameters(), 0.1), *batch)
    owed = [c for c in program.collectives if "+sum@" in str(c.spec) and prod(c.spec.shape) == 32000 * 512]
    assert owed
    assert {c.spec.dtype for c in owed} == {torch.float32}


def test_outputs_and_inputs_are_cast():
    """At the modules that the step calls."""
    layer = nn.Linear(3, 3)
    with computed_in(MixedPrecision(torch.bfloat16, output_dtype=torch.float64), [layer]):
        assert layer(torch.ones(2, 3)).dtype == torch.float64
        assert layer.weight.dtype == torch.bfloat16
        assert {p.dtype for p in layer.parameters()} == {torch.float32}
    assert layer(torch.ones(2, 3)).dtype == torch.float32


def test_a_narrower_reduction_is_refused():
    """It would round terms that nobody asked to round."""
    with pytest.raises(ValueError, match=r"narrower than the torch\.float32"):
        MixedPrecision.of(MixedPrecision(torch.float32, torch.bfloat16))
    with pytest.raises(TypeError, match="MixedPrecisionPolicy"):
        MixedPrecision.of("bf16")
