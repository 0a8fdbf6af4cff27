"""check: right functions agree, and a seeded fault is reported with op, line, moves and size of the difference."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spmd import DTensor, Partial, Replicate, Shard, implicit_replication, init_device_mesh
from spmd.debug import Gap, check
from spmd.debug.compare import overwrite
from spmd.sim import LocalTensor
from spmd.tensor import lower as lowering
from spmd.tensor.cache import forget_decisions
from spmd.tensor.redistribute.collective_moves import AllGather, AllReduce
from spmd.tensor.redistribute.moves import Slice
from spmd.tensor.rules.book import book
from spmd.tensor.rules.families import pointwise
from spmd.tensor.rules.rule import laws
from spmd.tensor.spec import spec_of

MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        for i, p in enumerate(self.parameters()):
            p.data = numbers(*p.shape, seed=i)

    def forward(self, x, target=None):
        y = self.down(F.gelu(self.up(x)))
        return y if target is None else F.mse_loss(y, target)


MEGATRON = {"*up.*": {"tp": S0}, "*down.weight": {"tp": S1}}


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written(x):
    y = x * 2
    y[:, 1:].add_(1)
    y.mul_(x)
    return {"y": y, "norm": y.norm(), "top": y.max().item()}


def view_of_written(x):
    rows = x[1:]
    x.add_(1)
    return rows


def train(model, optimiser, x, target):
    for _ in range(2):
        loss = model(x, target)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return loss


QKV = [numbers(4, 4, 6, 8, seed=i) for i in range(3)]
MODEL = MLP()

# (function, arguments, mesh, placements)
RIGHT = {
    "mlp with a mean loss, 5 rows": (
        MLP(), [numbers(5, 8), numbers(5, 4)], MESH, {"x": {"dp": S0}, "target": {"dp": S0}, **MEGATRON}
    ),
    "mlp, 1 row on 4": (MLP(), [numbers(1, 8), numbers(1, 4)], LINE, [S0]),
    "attention": (attention, QKV, MESH, [S0, S1]),
    "layer norm": (
        lambda x, w, b: F.layer_norm(x, (8,), w, b), [numbers(5, 8), numbers(8), numbers(8)], MESH,
        [[S0, S1], None, None],
    ),
    "softmax over a shard": (lambda x: torch.softmax(x, -1), [numbers(5, 7)], MESH, [S0, S1]),
    "embedding": (F.embedding, [torch.arange(15).reshape(5, 3) % 10, numbers(10, 8)], MESH, [[S0, R], [R, S0]]),
    "cross entropy": (
        F.cross_entropy, [numbers(5, 10), torch.arange(5)], MESH, [{"dp": S0}, {"dp": S0}]
    ),
    "no rows": (lambda x, w: (x @ w).sum(), [numbers(0, 8), numbers(8, 4)], MESH, {"w": [S0, S1]}),
    "NaN": (lambda x: x / x.sum(0), [torch.zeros(3, 4)], MESH, [S0, S1]),
    "writes, views and numbers": (written, [numbers(6, 5)], MESH, [S0, R]),
    "a view that had to be copied, after its base was written": (
        view_of_written, [numbers(5, 4)], MESH, [S0, R]
    ),
    "lists and dicts": (
        lambda batch, scale: [batch["x"] * scale, *batch["more"]],
        [{"x": numbers(5, 8), "more": [numbers(5)]}, 2.0], MESH, {"batch.*": {"tp": S0}},
    ),
    "doubles in a complex plane": (torch.fft.fft, [numbers(4, 6, dtype=torch.float64)], MESH, [S0, R]),
}  # fmt: skip


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_functions_are_alike(name, backward):
    """Right results are not reported, with uneven and empty shards and NaN."""
    fn, args, mesh, placements = RIGHT[name]
    backward = backward and "writ" not in name
    found = check(fn, *args, mesh=mesh, placements=placements, backward=backward)
    assert found.ok, str(found)
    assert found.ops > len(args)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["sgd", "adamw"])
def test_a_train_step_is_alike(make):
    """A model and an optimiser of its parameters may be arguments. The originals are not changed."""
    model = MLP()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    placements = {"x": {"dp": S0}, "target": {"dp": S0}, **MEGATRON}
    found = check(train, model, make(model.parameters(), 0.1), numbers(5, 8), numbers(5, 4), mesh=MESH,
                  placements=placements)  # fmt: skip
    assert found.ok, str(found)
    assert {event.kind for event in found.sent.events} >= {"all_reduce"}
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


# ---- seeded faults ----------------------------------------------------------------------------


@pytest.fixture
def fault(monkeypatch):
    """Lets a test break spmd. Afterwards all decisions made meanwhile are forgotten."""
    forget_decisions()
    yield monkeypatch
    monkeypatch.undo()
    forget_decisions()


def activated(x, w):
    h = x @ w
    y = torch.relu(h)
    return y * 2


def weighted(x, y):
    p = torch.cumsum(x, -1)
    return p * y


def reversed_and_weighted(x, y):
    p = x.flip(-1)
    return p * y


def turned(x):
    y = x.t()
    return y + 1


def of(fn, text):
    """`test_check.py:12`: the line of a function that has the text."""
    lines, first = inspect.getsourcelines(fn)
    return f"test_check.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def relu_takes_a_sum(fault):
    fault.setitem(book, "relu", lambda call: pointwise(call, laws("sum: p -> p")))


def sums_are_taken_as_done(fault):
    fault.setattr(lowering, "_result_spec", without_partial(lowering._result_spec))


def without_partial(result):
    def wrong(*args):
        spec = result(*args)
        return spec.with_layout(spec.dims, spec.units)

    return wrong


def reduce_left_out(fault):
    fault.setattr(AllReduce, "start", lambda self, x, at: x)


def gather_in_reverse(fault):
    right = AllGather.finish
    fault.setattr(AllGather, "finish", lambda self, y, at: right(self, y, at).flip(0))


def slice_off_by_one(fault):
    right = Slice.start
    fault.setattr(Slice, "start", lambda self, x, at: right(self, x.roll(1, 0), at))


def flip_by_blocks(fault):
    """The gradient of cumsum uses flip, and no op before it does."""
    fault.setitem(book, "flip", pointwise)


def shards_are_taken_as_whole(fault):
    right = lowering._result_spec
    fault.setattr(lowering, "_result_spec", lambda *args: right(*args).with_layout())


def collective_without_such_an_op(fault):
    fault.setattr(AllReduce, "start", lambda self, x, at: at.transport.all_reduce(x, "most", at.group(self.axes)))


def rule_that_fails(fault):
    fault.setitem(book, "relu", lambda call: 1 / 0)


XW = ([numbers(5, 8), numbers(8, 6)], {"x": {"tp": S1}, "w": {"tp": S0}})
XY = ([numbers(6), numbers(6, seed=1)], {"x": {"tp": S0}, "y": {"tp": S0}})
X = ([numbers(6, 4)], {"x": {"tp": S1}})

# (fault, function, (arguments, placements), kind of difference, op, line, words of the report)
FAULTS = {
    "a sum passes through relu": (
        relu_takes_a_sum, activated, XW, "value", "aten.relu.default", of(activated, "relu"),
        ["in      f32[5, 6] +sum@tp", "out     f32[5, 6] +sum@tp", "moves   none"],
    ),
    "a sum is taken as done": (
        sums_are_taken_as_done, activated, XW, "value", "aten.mm.default", of(activated, "x @ w"),
        ["in      f32[5, 8@tp]\n          f32[8@tp, 6]", "out     f32[5, 6]", "ranks 0, 1, 2, 3"],
    ),
    "a reduce is left out": (
        reduce_left_out, activated, XW, "value", "aten.relu.default", of(activated, "relu"), ["all_reduce(tp)"]
    ),
    "a gather in reverse": (
        gather_in_reverse, reversed_and_weighted, XY, "value", "aten.flip.default", of(reversed_and_weighted, "flip"),
        ["all_gather(tp, 0)"],
    ),
    "a slice off by one": (slice_off_by_one, turned, X, "value", "distribute_tensor of x", "", []),
    "a wrong gradient": (
        flip_by_blocks, weighted, XY, "value", "aten.flip.default",
        f"the backward of {of(weighted, 'cumsum')}", ["f32[6@tp]"],
    ),
    "a spec that lies": (
        shards_are_taken_as_whole, turned, X, "shape", "aten.t.default", of(turned, ".t()"),
        ["rank 0 holds a block of [2, 6], but"],
    ),
    "a collective that fails": (
        collective_without_such_an_op, activated, XW, "error", "aten.relu.default", of(activated, "relu"),
        ["ValueError", "op 'most' is none of", "all_reduce(tp)"],
    ),
    "a rule that fails": (
        rule_that_fails, activated, XW, "error", "aten.relu.default", of(activated, "relu"), ["ZeroDivisionError"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_named(name, fault):
    """The first op whose result is wrong is named, not the op that reads it, with its line, specs and moves."""
    break_it, fn, (args, placements), kind, op, where, words = FAULTS[name]
    assert check(fn, *args, mesh=MESH, placements=placements, backward=True).ok
    forget_decisions()
    break_it(fault)
    found = check(fn, *args, mesh=MESH, placements=placements, backward=True)
    assert not found.ok
    assert (found.first.kind, found.first.op, found.first.where) == (kind, op, where), str(found)
    assert not [word for word in words if word not in str(found)], str(found)


def test_the_report_of_a_value(fault):
    """The report is short and has all that is needed to find the fault."""
    reduce_left_out(fault)
    x, w = torch.ones(1, 4), torch.eye(4)
    x[0, 3] = 5.0
    line = of(activated, "relu")
    found = check(activated, x, w, mesh=MESH, placements={"x": {"tp": S1}, "w": {"tp": S0}})
    assert str(found) == f"""\
check: op 2 differs, aten.relu.default at {line}
  in      f32[1, 4] +sum@tp
  out     f32[1, 4]
  moves   f32[1, 4] +sum@tp -> f32[1, 4]
            all_reduce(tp)               f32[1, 4]           16 B       7.8 us
            16 bytes a rank of at least 16, 7.8 us, 32 bytes of memory
  found   max abs 5, max rel 1 at [0, 3] on rank 0: 5 on one device, 0 distributed; 2 of 4 elements there, on ranks \
0, 1, 2, 3"""
    gap = found.first.gap
    assert isinstance(gap, Gap) and (gap.at, gap.rank, gap.want, gap.got) == ((0, 3), 0, 5.0, 0.0)


def test_one_rank_alone(fault):
    """Only the ranks with wrong elements are named, with the global index."""
    right = Slice.start

    def wrong(self, x, at):
        return right(self, x, at) + (at.coordinate == (1, 0))

    fault.setattr(Slice, "start", wrong)
    found = check(turned, numbers(6, 4), mesh=MESH, placements={"x": {"dp": S0}})
    assert found.first.gap.ranks == (2,) and found.first.gap.at[0] >= 3
    assert found.first.gap.max_abs == pytest.approx(1, abs=1e-5) and "on rank 2" in str(found)


# ---- what is no wrong value -------------------------------------------------------------------


def parted(x):
    if isinstance(x, DTensor):
        return x + 1
    return x * 2


def stops(x):
    return x * 2 if isinstance(x, DTensor) else (x * 2).exp()


def goes_on(x):
    return (x * 2).exp() if isinstance(x, DTensor) else x * 2


PARTINGS = {
    "another op": (parted, ["one device: aten.mul.Tensor at", "ranks:      aten.add.Tensor at"]),
    "an op less": (stops, ["one device: aten.exp.default at", "ranks:      have ended"]),
    "an op more": (goes_on, ["one device: has ended", "ranks:      aten.exp.default at"]),
}


@pytest.mark.parametrize("name", PARTINGS)
def test_runs_that_part_are_shown_side_by_side(name):
    """If a function calls other ops on DTensors, the report says so, with both lines."""
    fn, words = PARTINGS[name]
    found = check(fn, numbers(4, 4), mesh=MESH, placements=[S0, R])
    assert found.first.kind == "parted"
    assert not [word for word in words if word not in str(found)], str(found)


def test_python_that_fails_between_ops_is_an_error_at_its_line():
    """An error in the function itself on DTensors is reported like a failing op."""

    def uses_numpy(x):
        return x.numpy()

    found = check(uses_numpy, numbers(4), mesh=LINE, placements=[S0])
    assert (found.first.kind, found.first.where) == ("error", of(uses_numpy, "numpy()"))
    assert "full_tensor().numpy()" in str(found)


def test_an_error_of_the_function_is_raised():
    """An error on one device is raised."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        check(lambda x: x @ x, numbers(4, 3), mesh=MESH)


def test_plain_tensors_meet_dtensors_as_on_real_ranks():
    """Plain tensors may meet DTensors only if the user says that they are equal on all ranks."""

    def shifted(x):
        return x + torch.ones(4)

    refused = check(shifted, numbers(3, 4), mesh=MESH, placements=[S0, R])
    assert refused.first.kind == "error" and "implicit_replication" in str(refused)
    with implicit_replication():
        assert check(shifted, numbers(3, 4), mesh=MESH, placements=[S0, R]).ok


def test_tolerance_is_the_callers_where_given(fault):
    """A difference of 1e-4 is reported by default, and not if the user's tolerance allows it."""
    right = AllReduce.finish
    fault.setattr(AllReduce, "finish", lambda self, y, at: right(self, y, at) * 1.0001)
    args, placements = XW
    assert not check(activated, *args, mesh=MESH, placements=placements).ok
    assert check(activated, *args, mesh=MESH, placements=placements, rtol=1e-3, atol=1e-3).ok


def test_a_limit_leaves_later_ops_uncompared(fault):
    """Only the first results are kept. The return values are compared all the same."""
    reduce_left_out(fault)
    args, placements = XW
    found = check(activated, *args, mesh=MESH, placements=placements, limit=1)
    assert found.first.op == "the result"


WRONG_PLACEMENTS = {
    "no such name": ({"y": [S0, R]}, "placements: pattern 'y' matches nothing"),
    "too few": ([[S0, R]], "1 entries for 2 arguments"),
    "no such axis": ({"x": {"pp": S0}}, "pp"),
    "no such dim": ({"x": [Shard(2), R]}, "x: "),
    "a partial": ({"x": [Partial(), R]}, "is no placement for an input"),
}


@pytest.mark.parametrize("name", WRONG_PLACEMENTS)
def test_wrong_placements_are_refused(name):
    """Wrong placements raise before anything runs, and the error names the tensor."""
    placements, message = WRONG_PLACEMENTS[name]
    with pytest.raises(ValueError, match=message):
        check(lambda x, w: x @ w, numbers(4, 4), numbers(4, 4), mesh=MESH, placements=placements)


def test_drawn_numbers_are_taken_over():
    """The ranks continue with the random numbers of one device."""
    want = numbers(5, 3)
    with_rows = [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(1, 3), torch.zeros(0, 3)]
    x = DTensor(LocalTensor(dict(enumerate(with_rows))), spec_of(LINE, [S0], (5, 3)))
    overwrite(want, x)
    assert torch.equal(torch.cat(with_rows), want)
