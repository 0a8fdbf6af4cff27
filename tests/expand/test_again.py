"""A call that is made again looks at what it depends on, and not more; whatever has changed is noticed."""

import copy
import functools
import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import nn, optim

import spmd
from spmd import Shard
from spmd.expand import reads
from spmd.expand.compile import CompiledStep

X, Y = torch.linspace(-1, 1, 32).view(8, 4), torch.linspace(0, 1, 16).view(8, 2)


SCALE, RATE = 1.0, 1.0


class Config:
    def __init__(self):
        self.scales = [SCALE, {"last": 2.0}]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(4, 2), nn.BatchNorm1d(2)
        self.act, self.config, self.rate = torch.tanh, Config(), RATE

    def forward(self, x):
        return self.act(self.norm(self.up(x))) * self.config.scales[0] * self.rate * self.config.scales[1]["last"]


def train(model, optimizer, x, y, weight=1.0):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean() * weight
    loss.backward()
    optimizer.step()
    return loss.detach()


def keeps_gradients(model, optimizer, x, y, weight=1.0):
    loss = ((model(x) - y) ** 2).mean() * weight
    loss.backward()
    return loss.detach()


def begin():
    torch.manual_seed(0)
    model = Net().double()
    groups = [{"params": model.up.parameters()}, {"params": model.norm.parameters()}]
    return model, optim.AdamW(groups, lr=0.1, amsgrad=False)


def line() -> spmd.DeviceMesh:
    return spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


INPUTS = {"[xy]": {"dp": Shard(0)}}
BATCH = X.double(), Y.double()


@functools.cache
def step_of(fn) -> CompiledStep:
    """One for all tests: models of equal guards share a program."""
    return spmd.compile(fn, line(), inputs=INPUTS)


class Side:
    """A model and its optimiser, trained by a step; and the same on one device."""

    def __init__(self, fn=train):
        self.fn, self.step = fn, step_of(fn)
        self.ours, self.alone = begin(), begin()
        for _ in range(3):
            self.call()
        self.long = 0

    def call(self, *args):
        """A call of both, which have to agree. Counts the calls that were made the long way."""
        args, real = args or BATCH, CompiledStep._run_anew
        with mock.patch.object(CompiledStep, "_run_anew", autospec=True, side_effect=real) as anew:
            got = self.step(*self.ours, *args)
        self.long = getattr(self, "long", 0) + anew.call_count
        want = self.fn(*self.alone, *args)
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=0)
        for p, q in zip(self.ours[0].parameters(), self.alone[0].parameters(), strict=True):
            torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=1e-12, atol=1e-14)
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-14)

    def is_known(self) -> bool:
        """Whether the call would be made at once."""
        return self.step._repeats[0].ready((*self.ours, *BATCH), {}) is not None


# ---- what is noticed --------------------------------------------------------------------------


def another_weight(model, optimizer):
    """The same numbers in another parameter, which the optimiser does not know."""
    model.up.weight = nn.Parameter(torch.full((2, 4), 0.5, dtype=torch.float64))


def another_layer(model, optimizer):
    model.up = nn.Linear(4, 2).double()


def replaced_state(model, optimizer):
    state = optimizer.state[model.up.bias]
    state["exp_avg"] = torch.full_like(state["exp_avg"], 0.125)


def exchanged_state(model, optimizer):
    """The attributes of two tensors, as `torch.utils.swap_tensors` exchanges them."""
    one, two = optimizer.state[model.up.weight]["exp_avg"], optimizer.state[model.up.bias]["exp_avg"]
    one.__dict__, two.__dict__ = two.__dict__, one.__dict__


def no_state(model, optimizer):
    optimizer.state.clear()


def other_groups(model, optimizer):
    groups = optimizer.param_groups
    groups[0]["params"].append(groups[1]["params"].pop())
    groups[0]["lr"] = 0.01


def loaded(model, optimizer):
    model.load_state_dict({k: v.detach().clone() * 0.5 for k, v in model.state_dict().items()})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def renamed(model, optimizer):
    """The same value under another name."""
    del model.rate
    model.other = model.rate = 2.0


def other_class(model, optimizer):
    class Doubled(Net):
        def forward(self, x):
            return super().forward(x) * 2

    model.__class__ = Doubled


def other_attributes(model, optimizer):
    model.__dict__ = {**model.__dict__, "rate": 3.0}


def hook_on_weight(model, optimizer):
    model.up.weight.register_hook(lambda g: g * 2)


def hook_after(model, optimizer):
    model.up.weight.register_post_accumulate_grad_hook(lambda p: None)


def pre_hook_of_step(model, optimizer):
    optimizer.register_step_pre_hook(halve)


def halve(optimizer, args, kwargs):
    for p in optimizer.param_groups[0]["params"]:
        p.grad = p.grad * 0.5


NOTICED = {
    "a flag of a module": lambda m, o: m.eval(),
    "a flag of a module inside": lambda m, o: m.norm.eval(),
    "a number of a module": lambda m, o: setattr(m, "rate", 0.5),
    "a function of a module": lambda m, o: setattr(m, "act", torch.sigmoid),
    "a number of a layer": lambda m, o: setattr(m.norm, "eps", 0.125),
    "a list in an object": lambda m, o: m.config.scales.__setitem__(0, 3.0),
    "a dict in a list": lambda m, o: m.config.scales[1].update(last=0.5),
    "an object": lambda m, o: setattr(m, "config", Config()),
    "another name": renamed,
    "another class": other_class,
    "other attributes": other_attributes,
    "a hook of a module": lambda m, o: m.register_forward_hook(lambda m, x, out: out * 2),
    "a hook before": lambda m, o: m.up.register_forward_pre_hook(lambda m, x: (x[0] + 1,)),
    "a hook of a gradient": hook_on_weight,
    "a hook behind a gradient": hook_after,
    "a hook of an optimiser": pre_hook_of_step,
    "frozen": lambda m, o: m.up.weight.requires_grad_(False),
    "another parameter": another_weight,
    "another layer": another_layer,
    "other state": replaced_state,
    "exchanged state": exchanged_state,
    "no state": no_state,
    "a flag of a group": lambda m, o: o.param_groups[1].update(amsgrad=False, maximize=True),
    "other betas": lambda m, o: o.param_groups[0].update(betas=(0.5, 0.75)),
    "other groups": other_groups,
    "a loaded checkpoint": loaded,
}


@pytest.mark.parametrize("name", NOTICED)
def test_what_has_changed_is_noticed(name):
    """Such a call is made the long way; what that gives is tested elsewhere (`test_guards.py`)."""
    side = Side()
    assert side.is_known()
    NOTICED[name](*side.ours)
    assert not side.is_known()


def test_what_is_set_and_taken_back_is_looked_through():
    """At each call, as by `model.eval()` for a look at a validation set: the calls are made at once, and a change that
    stays is noticed."""
    side = Side()
    for _ in range(3):
        for model, optimizer in (side.ours, side.alone):
            model.eval()
            model.rate, model.config.scales[0] = 5.0, 5.0
            optimizer.param_groups[0]["maximize"] = True
            model.train()
            model.rate, model.config.scales[0] = RATE, SCALE
            optimizer.param_groups[0]["maximize"] = False
            Net.seen = object()
            del Net.seen
        side.call()
        assert side.is_known()
    assert side.long == 0
    for change in (lambda m, o: m.norm.eval(), lambda m, o: setattr(m, "rate", 0.5), other_class):
        change(*side.ours)
        assert not side.is_known()
        side = Side()


def test_what_was_once_written_is_looked_through_for_some_calls(monkeypatch):
    monkeypatch.setattr(reads, "CALLS_UNTIL_SETTLED", 5)
    side, seen = Side(), []
    read = side.step._repeats[0]._read
    for i in range(8):
        if i == 2:
            side.ours[0].eval().train()
        assert side.is_known()
        seen.append(len(read._busy) > 0)
    assert seen == [False, False, True, True, True, True, False, False]
    side.ours[0].norm.eval()
    assert not side.is_known()


OTHER_CALLS = {
    "another model": lambda m, o: ((begin()[0], o, *BATCH), {}),
    "another optimiser": lambda m, o: ((m, begin()[1], *BATCH), {}),
    "another size": lambda m, o: ((m, o, BATCH[0][:4], BATCH[1][:4]), {}),
    "another dtype": lambda m, o: ((m, o, X, Y), {}),
    "a tensor with a history": lambda m, o: ((m, o, BATCH[0].clone().requires_grad_(), BATCH[1]), {}),
    "a name more": lambda m, o: ((m, o, *BATCH), {"weight": 1.0}),
    "a number more": lambda m, o: ((m, o, *BATCH, 1.0), {}),
    "by name": lambda m, o: ((m, o), dict(zip("xy", BATCH, strict=True))),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_other_calls_are_told_apart(name):
    side = Side()
    args, kwargs = OTHER_CALLS[name](*side.ours)
    assert side.is_known() and side.step._repeats[0].ready(args, kwargs) is None


MODES = {
    "no gradients": torch.no_grad, "inference": torch.inference_mode, "deterministic": spmd.deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_the_modes_around_a_call_are_noticed(mode):
    side = Side()
    with MODES[mode]():
        assert not side.is_known()
    assert side.is_known()


# ---- what may change --------------------------------------------------------------------------


def test_what_is_read_at_each_call_may_change():
    """Learning rates, the batch, and values that are written in place."""
    side = Side()
    for i, lr in enumerate((0.5, 0.25, 0.125)):
        for model, optimizer in (side.ours, side.alone):
            optimizer.param_groups[0]["lr"] = lr
            with torch.no_grad():
                model.up.weight.mul_(1.5)
            optimizer.state[model.up.weight]["exp_avg"].zero_()
            model.norm.running_mean.add_(1.0)
        side.call(BATCH[0] * i, BATCH[1])
    assert side.long == 0


def test_other_data_behind_a_parameter_is_read():
    side = Side()
    for model, _ in (side.ours, side.alone):
        model.up.weight.data = model.up.weight.data * 2
    for _ in range(2):
        side.call()


def writes_into_one(data):
    data["x"].add_(1.0)
    return data["y"].sum()


def test_two_arguments_that_have_become_one_are_noticed():
    """Where the step writes into one of them: the write is seen in the other, or, in a view, the long way says that it
    would not be."""
    step = spmd.compile(writes_into_one, line())
    x, y = (spmd.distribute_tensor(X.clone(), line(), [Shard(0)]) for _ in "xy")
    for _ in range(3):
        step({"x": x, "y": y})
    assert step._repeats[0].ready(({"x": x, "y": y},), {}) is not None
    assert step._repeats[0].ready(({"x": x, "y": x},), {}) is None
    before = x.full_tensor().clone()
    torch.testing.assert_close(step({"x": x, "y": x}).full_tensor(), (before + 1).sum())
    torch.testing.assert_close(x.full_tensor(), before + 1)
    with pytest.raises(ValueError, match=r"y shares memory with .*x, which the step writes"):
        step({"x": x, "y": x.detach()})


def test_arguments_that_are_distributed_are_not_made_views_of():
    """A call with them leaves them as they were, so that it can be made again."""
    step = spmd.compile(lambda x: (x * 2).sum(), line())
    x = spmd.distribute_tensor(X, line(), [Shard(0)])
    for _ in range(2):
        step(x)
    assert step._repeats[0].ready((x,), {}) is not None
    torch.testing.assert_close(step(x).full_tensor(), (X * 2).sum())


def test_a_parameter_that_somebody_has_a_view_of():
    """The first call after the view was made takes the long way. A view shows what later steps write."""
    side = Side()
    view = side.ours[0].up.weight.detach()[1]
    for _ in range(3):
        side.call()
    assert side.long <= 1
    torch.testing.assert_close(view.full_tensor(), side.alone[0].up.weight[1].detach())


def test_gradients_that_a_step_adds_to():
    """Whether there are gradients counts where the program reads them."""
    side = Side(keeps_gradients)
    side.call()
    assert side.long == 0
    for model, _ in (side.ours, side.alone):
        model.zero_grad()
    assert not side.is_known()
    for _ in range(2):
        side.call()


def test_groups_that_a_parameter_has_changed():
    """It gets the options of its new group."""
    side = Side()
    for pair in (side.ours, side.alone):
        other_groups(*pair)
    for _ in range(2):
        side.call()


def test_hooks_of_an_optimiser_are_called():
    side = Side()
    for pair in (side.ours, side.alone):
        pre_hook_of_step(*pair)
    for _ in range(2):
        side.call()


def test_several_sizes_and_flags_in_turns():
    """The last few calls are known."""
    side = Side()
    for i in range(6):
        if i == 4:
            side.long = 0
        for model, _ in (side.ours, side.alone):
            model.train(i % 2 == 0)
        side.call()
        side.call(*[x[:4] for x in BATCH])
    assert side.long == 0


def scaled(model, optimizer, scaler, x, y):
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def test_a_step_with_a_scaler_is_made_again():
    """Also where it skips a step and lowers the scale, and where it raises it."""
    step = spmd.compile(scaled, line())
    sides = [(*begin(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)) for _ in "ab"]
    with mock.patch.object(CompiledStep, "_run_anew", autospec=True, side_effect=CompiledStep._run_anew) as anew:
        for i in range(12):
            batch = BATCH[0] * (float("inf") if i == 6 else 1 + i), BATCH[1]
            got, want = step(*sides[0], *batch), scaled(*sides[1], *batch)
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=0, equal_nan=True)
            (model, _, scaler), (alone, _, other) = sides
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=1e-12, atol=1e-14)
            assert scaler.get_scale() == other.get_scale()
            anew.reset_mock() if i < 4 else anew.assert_not_called()
    sides[0][2].set_growth_factor(4.0)  # a number of the scaler's, as a rate
    sides[1][2].set_growth_factor(4.0)
    for _ in range(3):
        step(*sides[0], *BATCH), scaled(*sides[1], *BATCH)
    assert sides[0][2].get_scale() == sides[1][2].get_scale()


class Batch:
    def __init__(self, x, more, weight, kind):
        self.x, self.more, self.weight, self.kind = x, {"more": more}, weight, kind


def of_object(batch):
    x = batch.x + batch.more["more"] * batch.weight
    return x.sum() * getattr(batch, "factor", 1.0) if batch.kind == "sum" else x.mean()


def test_arguments_that_are_objects():
    """New ones at each call: tensors and numbers may change, and nothing else."""
    step, of = spmd.compile(of_object, line()), lambda i, kind="sum": Batch(X + i, X * i, 0.5 + i, kind)
    for i in range(3):
        torch.testing.assert_close(step(of(i)).full_tensor(), of_object(of(i)))
    known = step._repeats[0]
    assert known.ready((of(5),), {}) is not None
    torch.testing.assert_close(step(of(5)).full_tensor(), of_object(of(5)))
    others = [of(5, "mean"), of(5), of(5), of(5), of(5)]
    others[1].factor = 3.0
    others[2].more["other"] = X
    others[3].x = X[:4]
    others[4].__class__ = type("Other", (Batch,), {})
    for other in others:
        assert known.ready((other,), {}) is None
    for other in others[:2]:
        torch.testing.assert_close(step(other).full_tensor(), of_object(other))


def structured(data, scales, flag):
    return {"sum": data["x"] + data["more"][0] * scales[1], "twice": data["x"] * 2, "flag": flag, "n": scales[0]}


def test_arguments_and_results_in_containers():
    step = spmd.compile(structured, line())
    given = [({"x": X + i, "more": [X * i]}, (i, 0.5 + i), "a") for i in range(4)]
    for args in given:
        got, want = step(*args), structured(*args)
        assert got.keys() == want.keys() and (got["flag"], got["n"]) == (want["flag"], want["n"])
        for name in ("sum", "twice"):
            torch.testing.assert_close(got[name].full_tensor(), want[name])
    assert step._repeats[0].ready(({"x": X, "more": [X * 2]}, (1, 2.0), "a"), {})
    for args in [({"x": X, "more": (X,)}, (1, 2.0), "a"), ({"x": X, "more": [X]}, (1, 2.0), "b"), (X, (1, 2.0), "a")]:
        assert step._repeats[0].ready(args, {}) is None


helpers = {"layer": None}


def of_globals(x):
    return helpers["layer"](x).sum()


def test_what_variables_name_is_noticed():
    """Another layer in a dict that the code names."""
    helpers["layer"] = nn.Linear(4, 1)
    step = spmd.compile(of_globals, line())
    for _ in range(2):
        step(X)
    assert step._repeats[0].ready((X,), {})
    helpers["layer"] = copy.deepcopy(helpers["layer"])
    assert step._repeats[0].ready((X,), {}) is None


def test_no_model_is_kept_alive():
    """A step that has served a model does not hold it, its blocks or its gradients."""
    side, other = Side(), begin()
    for _ in range(3):
        side.step(*other, *BATCH)
    dead = [weakref.ref(x) for x in (*other, other[0].up.weight, other[0].up.weight._local_tensor)]
    del other
    gc.collect()
    assert [each() for each in dead] == [None] * 4


def test_many_calls_need_no_more_memory():
    side = Side()

    def objects_after(calls):
        for _ in range(calls):
            side.step(*side.ours, *BATCH)
        gc.collect()
        return len(gc.get_objects())

    assert objects_after(50) + 20 > objects_after(50)
