"""local_map in a compiled step gives the results and gradients of one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

import spmd
from spmd import LocalTensorMode, local_map
from spmd.comm import all_reduce
from spmd.sim import run_ranks
from tests.expand.side_by_side import agree
from tests.tensor.eager.test_local_map import CASES, WITH_MESH, MegatronReduce, tensors
from tests.tensor.single import S0, S1, SUM, R

MESH = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_device(name):
    """Arguments with any placements are moved to the in_placements."""
    single, blocks, shapes, ins, outs = CASES[name]
    others = [[R, S0], [R, R]][: len(shapes)]
    agree(local_map(blocks, outs, tuple(ins)), tensors(shapes), ins, others, single=single)


@pytest.mark.parametrize("name", WITH_MESH)
def test_with_collectives_and_ranks_that_differ(name):
    single, blocks, shapes, ins, outs = WITH_MESH[name]
    mapped = local_map(blocks, outs, tuple(ins))
    agree(lambda *x: mapped(MESH, *x), tensors(shapes), ins, single=single)


def test_gradients_that_the_user_places():
    """As eagerly: a function with its own gradients, and placements for them."""
    mapped = local_map(
        lambda x, w: MegatronReduce.apply(x @ w, MESH), [S0, R], ([S0, S1], [R, S0]),
        in_grad_placements=([S0, S1], [SUM, S0]),
    )  # fmt: skip
    agree(mapped, tensors([(4, 6), (6, 4)]), [[S0, S1], [R, S0]], single=torch.matmul)


def test_empty_blocks():
    """Five rows on four ranks, one of which has none."""
    mapped = local_map(torch.matmul, [S0], ([S0], [R]))
    agree(mapped, tensors([(5, 2), (2, 3)]), [[S0], [R]], mesh_shape=(4,), single=torch.matmul)


def test_trees_and_plain_values():
    """Nested arguments, tensors and others. Results that are no tensors or need no gradient are returned unchanged."""

    @local_map(out_placements=([S0, R], None, [S0, R]), in_placements=([S0, R], None))
    def tree(given, *, times):
        x = given["x"]
        return {"a": x * times * given["n"], "b": "text", "c": [x.argmax(1)]}

    def step(x):
        out = tree({"x": x, "n": 3}, times=2.0)
        assert out["b"] == "text" and not out["c"][0].requires_grad
        return out["a"], out["c"][0] * 1.0

    agree(step, tensors([(4, 6)]), [[S0, R]])


def last_adds_all(x):
    """The blocks of all ranks, added up; only the last one reads them."""
    total = all_reduce(x, "sum", (MESH, "tp"))
    return total if MESH.get_local_rank("tp") == 1 else 2 * x


def test_a_rank_sends_what_others_wait_for():
    """Though its own results do not need it."""
    mapped = local_map(last_adds_all, [R, S0], ([R, S0],))
    x = torch.arange(4.0)
    with LocalTensorMode(4):
        out = spmd.compile(lambda x: mapped(x) * 1, MESH)(x)
        assert torch.equal(out.full_tensor().reconcile(), torch.tensor([0.0, 2.0, 2.0, 4.0]))


class Layer(torch.nn.Module):
    """A tensor-parallel MLP written by hand, on blocks."""

    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.randn(shape) / 4) for shape in ((6, 8), (8, 6)))
        self.norm = torch.nn.LayerNorm(6)

    def forward(self, x):
        def blocks(x, up, down):
            y = torch.relu(x @ up) @ down
            return all_reduce(y, "sum", (MESH, "tp"))

        mapped = local_map(blocks, [S0, R], ([S0, R], [R, S1], [R, S0]))
        return self.norm(x + (mapped(x, self.up, self.down) if self.parallel else torch.relu(x @ self.up) @ self.down))

    parallel = True


def train_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(model(x)).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def trained(model: Layer, x: torch.Tensor, step) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [step(model, optimizer, x) for _ in range(3)]
    return [t.detach() for t in (*losses, *model.parameters())]


PLACED = {"params": {"up": {"tp": S1}, "down": {"tp": S0}}, "inputs": {"x": {"dp": S0}}}


def test_a_hand_written_layer_trains_as_on_one_device():
    """Uneven rows, called twice in a step. The ranks are threads, and each makes the same program."""
    torch.manual_seed(0)
    model, x = Layer(), torch.randn(5, 6)
    theirs = [copy.deepcopy(model) for _ in range(4)]
    model.parallel = False
    want = trained(model, x, train_step)

    def rank(r):
        step = spmd.compile(train_step, MESH, **PLACED)
        return [t.full_tensor() for t in trained(theirs[r], x, step)], str(step.program)

    found = run_ranks(rank, 4)
    for got, program in found:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert program == found[0][1]


def test_a_program_says_what_is_called():
    """One line for the function and one for its gradient; it needs no process group."""
    torch.manual_seed(0)
    model = Layer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = spmd.compile(train_step, MESH, **PLACED).program_for(model, optimizer, torch.randn(4, 6))
    lines = [line.strip() for line in str(program).splitlines() if "[blocks]" in line]
    assert [line.split(" = ")[1].split("(")[0] for line in lines] == [
        "local_map[blocks]", "local_map[blocks]", "gradients_of_local_map[blocks]", "gradients_of_local_map[blocks]",
    ]  # fmt: skip
    assert lines[0].endswith("# f32[4@dp, 6]")
    assert lines[2].endswith("# f32[4@dp, 6] +sum@tp, f32[6, 8@tp] +sum@dp, f32[8@tp, 6] +sum@dp")


# ---- mistakes ---------------------------------------------------------------------------------


def writes(x):
    return x.mul_(2) + 1


def in_place(x):
    y = x.clone()
    dist.all_reduce(y)
    return y


def by_rank(x):
    return torch.ones(1 + spmd.mesh.current_rank(), 6)


MISTAKES = {
    "no placements": (dict(in_placements=None), "give in_placements"),
    "too few": (dict(in_placements=()), "0 entries for 1 positional"),
    "none for a tensor": (dict(in_placements=(None,)), r"in_placements for it are None"),
    "too many results": (dict(out_placements=([S0, R], [S0, R])), "gives 1 results, counted flat, for 2"),
    "placements for a number": (dict(func=lambda x: 3), "result 0 is 3, which takes None"),
    "blocks of no tensor": (dict(func=lambda x: x.repeat(1, len(x))), "not those of one tensor"),
    "sizes by rank": (dict(func=by_rank), r"the rank at \(.*\) gives"),
    "another mesh": (dict(device_mesh=spmd.DeviceMesh("cpu", [0, 1, 2, 3])), "use one mesh"),
    "a draw": (dict(func=lambda x: torch.dropout(x, 0.5, True)), "draws random numbers"),
    "in place": (dict(func=in_place), "use the collectives of spmd.comm"),
    "a write": (dict(func=writes), "writes into its argument"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    options, message = MISTAKES[name]
    mapped = local_map(**(dict(func=torch.exp, out_placements=[S0, R], in_placements=([S0, R],)) | options))
    rows = 3 if name == "blocks of no tensor" else 4
    with LocalTensorMode(4), pytest.raises((ValueError, NotImplementedError, RuntimeError), match=message):
        spmd.compile(lambda x: mapped(x), MESH)(torch.ones(rows, 6))
