"""Errors are raised before anything is changed, by all ranks, and they say what would work."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import Partial, Replicate, Shard
from spmd.sim import run_ranks
from tests.expand.side_by_side import INPUTS, NET, Case, Net, copied, rows, same, tensors, train_step, values

X, Y = rows(6)[0]


def mesh_of(*shape):
    return spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


# ---- when it is compiled ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({"params": {"up.*": {"pp": Shard(0)}}}, ValueError, r"'up.\*': .*pp.*axes.*dp.*tp"),
        ({"inputs": {"x": {"tq": Shard(0)}}}, ValueError, r"'x': .*tq.*dp.*tp"),
        (
            {"params": {"up.*": [Shard(0)]}},
            ValueError,
            r"'up.\*': \[Shard\(0\)\] gives no placements.*list of 2 placements",
        ),
        ({"params": {"up.*": Shard(0)}}, ValueError, r"gives no placements on a mesh with axes dp, tp"),
        (
            {"params": {"up.*": {"tp": Partial()}}},
            ValueError,
            r"params 'up.\*': Partial\(\) is no placement for an input",
        ),
        ({"inputs": {"x": {"tp": 0}}}, ValueError, r"inputs 'x': 0 is no placement for an input; use Shard"),
        ({"params": [("up.*", {"tp": Shard(0)})]}, TypeError, "params is a list; give a dict from name pattern"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_placings_are_checked_when_compiling(given, error, message):
    """Mistakes that can be found without tensors are found at once. No process group is needed."""
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    with pytest.raises(error, match=message):
        spmd.compile(train_step, mesh, **given)


def test_only_functions_are_compiled():
    with pytest.raises(TypeError, match=r"not callable; give the function to run"):
        spmd.compile(None, spmd.DeviceMesh("cpu", [0]))
    with pytest.raises(TypeError, match=r"<built-in .*linear> does not say .*; write a function that calls it"):
        spmd.compile(torch.nn.functional.linear, spmd.DeviceMesh("cpu", [0]))


def test_there_is_no_program_before_the_first_call():
    step = spmd.compile(train_step, spmd.DeviceMesh("cpu", [0]))
    assert step.programs == []
    with pytest.raises(RuntimeError, match="made at the first call"):
        _ = step.program


# ---- at the first call ------------------------------------------------------------------------


def unchanged(pair, before, objects) -> None:
    """Assert that tensors and values are the same, and that the optimiser has no state."""
    assert [id(t) for t in pair[0].parameters()] == objects
    assert [id(t) for group in pair[1].param_groups for t in group["params"]] == objects
    same(tensors(*pair), before, "state")


def first_call_fails(step, error, message, given=None, pair=None, args=None, **patterns) -> None:
    """Assert that the first call raises on both ranks and changes neither the model nor the optimiser."""
    pair = pair or Case().begin()

    def rank(r):
        mine = copied(pair)
        before, objects = tensors(*mine), [id(p) for p in mine[0].parameters()]
        numbers = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in mine[1].param_groups])
        compiled = spmd.compile(step, mesh_of(2, 1), **{"params": NET, "inputs": INPUTS, **patterns})
        with pytest.raises(error, match=message):
            compiled(*mine, *(args(mine) if args else (X, Y)))
        unchanged(mine, before, objects)
        assert [{k: v for k, v in g.items() if k != "params"} for g in mine[1].param_groups] == numbers
        assert compiled.programs == []

    run_ranks(rank, 2)


@pytest.mark.parametrize(
    "patterns, message",
    [
        (
            {"params": {"*.ups.weight": [Shard(0), Replicate()]}},
            r"params '\*.ups.weight' matches nothing. Near: .*up.weight",
        ),
        ({"params": {"zzz": [Shard(0), Replicate()]}}, r"matches nothing. There are: model.up.weight"),
        ({"inputs": {"tokens": {"dp": Shard(0)}}}, r"inputs 'tokens' matches nothing. There are: x, y"),
        ({"inputs": {"optimizer": {"dp": Shard(0)}}}, r"inputs 'optimizer' matches nothing"),
        ({"params": {"up.bias": {"tp": Shard(1)}}}, r"model.up.bias: Shard\(1\) on tp: the tensor has 1 dims.*-1 to 0"),
        ({"inputs": {"x": {"dp": Shard(2)}}}, r"x: Shard\(2\) on dp: the tensor has 2 dims; allowed dims are -2 to 1"),
        ({"params": {"*": {"dp": Shard(0, unit=3)}}}, r"model.up.weight: .*8 does not divide into units of 3"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_patterns_are_checked_before_anything_is_placed(patterns, message):
    first_call_fails(train_step, ValueError, message, **patterns)


outside = torch.ones(3)


def uses_a_tensor_from_outside(model, optimizer, x, y):
    return train_step(model, optimizer, x, y) * outside.sum()


def writes_into_its_input(model, optimizer, x, y):
    x.mul_(2)
    return train_step(model, optimizer, x, y)


def changes_the_learning_rate(model, optimizer, x, y):
    loss = train_step(model, optimizer, x, y)
    optimizer.param_groups[0]["lr"] = 0.5 ** len(x)
    return loss


def registers_a_buffer(model, optimizer, x, y):
    model.register_buffer("mean", x.mean(0))
    return train_step(model, optimizer, x, y)


def grows_a_weight(model, optimizer, x, y):
    model.down.bias = nn.Parameter(torch.cat([model.down.bias.detach()] * 2))
    return x.sum()


def draws_from_its_own(model, optimizer, x, y):
    return train_step(model, optimizer, x.clone().uniform_(generator=torch.Generator()), y)


def draws_by_values(model, optimizer, x, y):
    return train_step(model, optimizer, torch.poisson(x.abs()), y)


def computes_again(model, optimizer, x, y):
    x = x * model.down.bias.sum()
    return train_step(model, optimizer, checkpoint(F.dropout, x, use_reentrant=False, preserve_rng_state=False), y)


def branches_on_the_loss(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    if loss > 1:
        loss.backward()
    return loss


def sizes_from_values(model, optimizer, x, y):
    return x[y > 0].median()


def fails_by_itself(model, optimizer, x, y):
    train_step(model, optimizer, x, y)
    raise LookupError("no such thing")


def of_wrong_shapes(model, optimizer, x, y):
    return model(x @ x)


@pytest.mark.parametrize(
    "step, error, message",
    [
        (
            uses_a_tensor_from_outside,
            RuntimeError,
            r"uses_a_tensor_from_outside uses a tensor that is not among its arg",
        ),
        (writes_into_its_input, RuntimeError, r"writes into its argument x; let it return the new value instead"),
        (changes_the_learning_rate, RuntimeError, r"sets optimizer.param_groups.0.lr itself.*between steps"),
        (
            draws_from_its_own,
            NotImplementedError,
            r"(?s)uniform.*: draws from a generator of its own.*test_errors.py:\d+, in draws_from",
        ),
        (draws_by_values, NotImplementedError, r"(?s)poisson.*: draws in its kernel.*test_errors.py:\d+, in draws_by"),
        (computes_again, NotImplementedError, r"(?s)bernoulli.*: draws in a backward pass.*checkpointing"),
        (
            branches_on_the_loss,
            RuntimeError,
            r"(?s)decides by a value.*torch.where.*test_errors.py:\d+, in branches_on_the",
        ),
        (
            sizes_from_values,
            NotImplementedError,
            r"(?s)aten.index.Tensor: the size of its result.*test_errors.py:\d+, in sizes_",
        ),
        (fails_by_itself, LookupError, "no such thing"),
        (of_wrong_shapes, RuntimeError, r"."),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_steps_that_cannot_be_compiled(step, error, message):
    """The error names the user's line if there is one."""
    first_call_fails(step, error, message)


def with_generator(model, optimizer, x, y, numbers):
    return train_step(model, optimizer, x, y) * next(numbers)


def test_arguments_of_other_types():
    """The error for a generator says to keep it outside; too few arguments raise Python's own error."""
    first_call_fails(
        with_generator, TypeError, r"argument numbers is a generator.*outside the step",
        args=lambda pair: (X, Y, (i for i in range(3))),
    )  # fmt: skip
    first_call_fails(train_step, TypeError, "missing a required argument: 'y'", args=lambda pair: (X,))
    first_call_fails(
        train_step, ValueError, r"argument x requires a gradient.*pass x.detach\(\)",
        args=lambda pair: (X.clone().requires_grad_(), Y),
    )  # fmt: skip


def test_writes_into_expanded_tensors():
    """Functionalisation would lose them."""

    def step(x):
        y = x.clone()
        y.expand(2, *y.shape).masked_fill_(y > 0, torch.tensor(7.0))
        return y

    def rank(r):
        with pytest.raises(NotImplementedError, match=r"masked_fill_.Tensor: writes into an expanded tensor of shape"):
            spmd.compile(step, mesh_of(2))(X)

    run_ranks(rank, 2)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("b", self.a.detach()[2])


def test_tensors_that_share_memory():
    """On one device a write into one changes the other; on the mesh it would not."""

    def step(model, x):
        return (model.a @ x).sum()

    def rank(r):
        with pytest.raises(ValueError, match=r"model.a and model.b share memory; tie them by registering one tensor"):
            spmd.compile(step, mesh_of(2))(Shared(), torch.ones(4))

    run_ranks(rank, 2)


@pytest.mark.parametrize("place", [[Replicate()], [Shard(0)]], ids=str)
@pytest.mark.parametrize("view", [lambda a: a.view(4, 2), lambda a: a[1:]], ids=["cut alike", "cut across"])
def test_dtensors_that_share_memory(place, view):
    """The program would have each by itself. So too where a later call brings such a model."""

    def step(model):
        model.a.add_(1)
        return model.b * 1

    def holding(a, b):
        model = nn.Module()
        model.register_buffer("a", a)
        model.register_buffer("b", b)
        return model

    with spmd.LocalTensorMode(2):
        a, apart = (spmd.distribute_tensor(torch.arange(8.0), mesh_of(2), place) for _ in range(2))
        compiled = spmd.compile(step, mesh_of(2))
        compiled(holding(a, view(apart)))
        with pytest.raises(ValueError, match=r"model.a and model.b share memory"):
            compiled(holding(a, view(a)))
        with pytest.raises(ValueError, match=r"model.a and model.b share memory"):
            spmd.compile(step, mesh_of(2))(holding(a, view(a)))


def test_a_model_on_another_mesh():
    """One mesh for a model and its step."""
    pair = Case().begin()

    def rank(r):
        mine = copied(pair)
        spmd.compile(train_step, mesh_of(2))(*mine, X, Y)
        before = tensors(*mine)
        with pytest.raises(ValueError, match=r"model.up.weight is on .*'dp',.* but the step is compiled for .*'tp'"):
            spmd.compile(train_step, mesh_of(1, 2))(*mine, X, Y)
        same(tensors(*mine), before, "state")

    run_ranks(rank, 2)


def test_after_an_error_the_right_step_works():
    """An error leaves nothing half done: the same model then trains as on one device."""
    case = Case(batches=rows(6))
    want, _ = case.on_one_device()
    pair = case.begin()

    def rank(r):
        mine = copied(pair)
        compiled = spmd.compile(train_step, mesh_of(2, 1), params=NET, inputs=INPUTS)
        with pytest.raises(IndexError):
            compiled(*mine, X[0], Y)
        with pytest.raises(NotImplementedError):
            spmd.compile(draws_by_values, mesh_of(2, 1))(*mine, X, Y)
        same([values(compiled(*mine, *batch)) for batch in case.batches], want, "returned")

    run_ranks(rank, 2)


def test_a_later_error_leaves_the_state_too():
    """A batch that the model cannot take, between two that it can."""
    case = Case(batches=rows(6, n=2))
    want, _ = case.on_one_device()
    pair = case.begin()

    def rank(r):
        mine = copied(pair)
        compiled = spmd.compile(train_step, mesh_of(2, 1), params=NET, inputs=INPUTS)
        first = values(compiled(*mine, *case.batches[0]))
        with pytest.raises(RuntimeError):
            compiled(*mine, torch.ones(6, 5), Y)
        same([first, values(compiled(*mine, *case.batches[1]))], want, "returned")

    run_ranks(rank, 2)


# ---- ranks that part --------------------------------------------------------------------------


def on_each_rank(step_of, args_of=lambda r: (), params_of=lambda r: None) -> list[str]:
    """The errors of two ranks that each compile a step of their own. Asserts that the model is unchanged."""
    pair = Case(Net, lambda p: optim.SGD(p, lr=0.1)).begin()

    def rank(r):
        mine = copied(pair)
        before, objects = tensors(*mine), [id(p) for p in mine[0].parameters()]
        compiled = spmd.compile(step_of(r), mesh_of(2), params=params_of(r))
        try:
            compiled(*mine, *(args_of(r) or (X, Y)))
        except Exception as error:
            unchanged(mine, before, objects)
            return f"{type(error).__name__}: {error}"

    return run_ranks(rank, 2)


def test_ranks_with_different_programs_all_raise():
    """The error shows the difference and says where to look for the cause."""

    def step_of(r):
        def step(model, optimizer, x, y):
            out = model(x)
            return out.exp().sum() if r else out.sum()

        return step

    first, second = on_each_rank(step_of)
    assert first == second
    assert_expected_inline(
        first,
        """\
RanksDiffer: the program of step differs between rank 0 and rank 1. All ranks must run the same code on the same sizes; look for rank-dependent branches, random order, or different versions.
--- rank 0
+++ rank 1
@@ -20,3 +20,4 @@
     add_1 = aten.add.Tensor(mm_1, arg0_6)                                 # f32[6, 3]
-    sum_1 = aten.sum(add_1)                                               # f32[]
+    exp = aten.exp(add_1)                                                 # f32[6, 3]
+    sum_1 = aten.sum(exp)                                                 # f32[]
     return (""",  # noqa: E501
    )


def test_ranks_that_bake_other_constants_all_raise():
    """A tensor made from the rank is part of the program."""

    def step_of(r):
        def step(model, optimizer, x, y):
            return (model(x) * torch.tensor([1.0, 2.0, float(r)])).sum()

        return step

    first, second = on_each_rank(step_of)
    assert first == second and "differs between rank 0 and rank 1" in first


def test_one_rank_that_fails_fails_all():
    """A failure in the step, before it, or in its patterns is reported to all ranks, and none waits for ever."""

    def step_of(r):
        def step(model, optimizer, x, y):
            if r == 1:
                raise LookupError("only here")
            return model(x).sum()

        return step

    def plain(model, optimizer, x, y):
        return model(x).sum()

    want = "RuntimeError: the program of step: rank 1 failed: LookupError: only here"
    assert on_each_rank(step_of) == [want, "LookupError: only here"]
    for difference in (
        {"args_of": lambda r: (X, Y) if r == 0 else (X, object())},
        {"args_of": lambda r: (X, Y) if r == 0 else (X,)},
        {"params_of": lambda r: {"up.weight" if r == 0 else "up.wait": [Shard(0)]}},
    ):
        first, second = on_each_rank(lambda r: plain, **difference)
        assert first.startswith("RuntimeError: the call of plain: rank 1 failed") and not second.startswith("Runtime")
        assert second.split(": ", 1)[1][:40] in first


class Skips(torch.nn.Module):
    """A step that raises at each second call, after it has changed its state."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []
        self.register_buffer("sum", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.sum += x.sum()
        self.last = x * 2
        if self.calls % 2 == 0:
            raise ValueError("not this one")
        return x * self.calls


def test_a_step_that_raises_is_taken_back_as_a_whole():
    """As docs/train.md says: who calls it again is where he was."""
    model = Skips()
    step = spmd.compile(lambda model, x: model(x), spmd.DeviceMesh("cpu", [0]))
    torch.testing.assert_close(step(model, X).full_tensor(), X)
    last = model.last
    for _ in range(3):
        with pytest.raises(ValueError, match="not this one"):
            step(model, X)
        assert model.calls == 1 and model.last is last
        torch.testing.assert_close(model.sum.full_tensor(), X.sum())
    model.calls = 2
    torch.testing.assert_close(step(model, X).full_tensor(), X * 3)


def test_ranks_with_other_shapes_all_raise():
    """Global sizes must be equal; a batch is given whole to every rank."""

    def plain(model, optimizer, x, y):
        return model(x).sum()

    first, second = on_each_rank(lambda r: plain, args_of=lambda r: (X[: 6 - r], Y))
    assert first == second
    assert "x differs between ranks: rank 0 has float32 [6, 4]" in first and "but rank 1 float32 [5, 4]" in first


def test_ranks_that_stamp_otherwise_capture_plainly():
    """A profiler keeps one rank from stamping calls of equal modules: then all ranks capture each call, and go on."""
    case = Case(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4))))
    want, _ = case.on_one_device()
    pair = case.begin()

    def rank(r):
        def step(model, optimizer, x, y):
            return train_step(model, optimizer, x, y)

        mine, compiled = copied(pair), spmd.compile(step, mesh_of(2, 1), inputs=INPUTS)
        sys.setprofile(None if r else lambda *args: None)
        try:
            found = [values(compiled(*mine, *batch)) for batch in case.batches]
        finally:
            sys.setprofile(None)
        same(found, want, "returned")
        return str(compiled.program), compiled._stamp_blocks

    first, second = run_ranks(rank, 2)
    assert first == second and not first[1]


# ---- memory -----------------------------------------------------------------------------------


def doubled(model, x):
    with torch.no_grad():
        model.weight.mul_(2)
    return model.weight.sum() + x


VIEWS = {
    "a row": lambda w: w.detach()[1],
    "the parameter": lambda w: w.detach(),
    "a transpose": lambda w: w.detach().t(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_an_argument_that_is_a_view_of_what_the_step_writes(name):
    """The program would read it as it was before: an error at the first call and at later ones, and nothing is done."""
    model = nn.Linear(4, 4, bias=False)
    with spmd.LocalTensorMode(2):
        step = spmd.compile(doubled, mesh_of(2), params={"weight": {"dp": Shard(0)}})
        for _ in range(2):
            before = copy.deepcopy(model.weight)
            with pytest.raises(ValueError, match=r"argument x shares memory with model.weight.*pass x.clone\(\)"):
                step(model, VIEWS[name](model.weight))
            assert torch.equal(*[getattr(w, "_local_tensor", w) for w in (before, model.weight)])
            step(model, VIEWS[name](model.weight).clone())


def test_a_view_of_what_the_step_only_reads_is_allowed():
    model = nn.Linear(4, 4, bias=False)
    want = model.weight.detach().sum() + model.weight.detach()[1]
    with spmd.LocalTensorMode(2):
        step = spmd.compile(lambda model, x: model.weight.sum() + x, mesh_of(2), params={"weight": {"dp": Shard(0)}})
        for _ in range(2):
            out = step(model, model.weight.detach()[1])
            torch.testing.assert_close(out.full_tensor().reconcile(), want)
