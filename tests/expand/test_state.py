"""The state of a step: its tensors by names that mean the same on all ranks."""

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn, optim

import spmd
from spmd.expand.state import Slot, State, named_leaves
from tests.expand.side_by_side import Case, same, tensors, train_step


class Tied(nn.Module):
    """A weight and a buffer with two names each, a buffer that is not saved, and empty entries."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(2))
        self.second.register_buffer("center", self.mean)
        self.register_buffer("cache", torch.ones(()), persistent=False)
        self.register_buffer("none", None)


def pair():
    """A tied model after a step of SGD with momentum."""
    model = Tied()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=torch.tensor(0.5), weight_decay=0.2)
    model.second(model.first(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(model, optimizer) -> State:
    return State.of({"model": model, "optimizer": optimizer})


def test_each_tensor_has_one_slot():
    """Tied tensors have their first name. Gradients and optimiser state go by their parameter."""
    state = state_of(*pair())
    found = [f"{slot.kind:<10}{slot}" for slot in state.tensors()]
    assert_expected_inline("\n".join(found), """\
parameter model.first.weight
parameter model.second.bias
buffer    model.mean
buffer    model.cache
grad      model.first.weight.grad
grad      model.second.bias.grad
optimizer optimizer.momentum_buffer[model.first.weight]
optimizer optimizer.momentum_buffer[model.second.bias]
hyper     optimizer.param_groups.0.momentum""")
    assert state.parameter_names()["model.first.weight"] == [
        "model.first.weight", "model.second.weight", "optimizer.param_groups.0.params.0"
    ]  # fmt: skip
    assert list(state.numbers()) == [f"optimizer.param_groups.0.{k}" for k in ("lr", "weight_decay")]


def test_the_order_depends_on_names_alone():
    """The order does not depend on the order in which an optimiser got its parameters, or on loading."""
    model, optimizer = pair()
    want = list(state_of(model, optimizer).tensors())
    items = list(optimizer.state.items())
    optimizer.state.clear()
    optimizer.state.update(reversed(items))
    assert list(state_of(model, optimizer).tensors()) == want


def test_parameters_that_only_an_optimiser_knows():
    """Such parameters are named by the optimiser."""
    loose = nn.Parameter(torch.ones(3))
    model = nn.Linear(2, 2, bias=False)
    optimizer = optim.SGD([*model.parameters(), loose], lr=0.1)
    state = state_of(model, optimizer)
    assert list(state.parameters()) == ["model.weight", "optimizer.param_groups.0.params.1"]


def test_modules_within_modules_are_one():
    """The same parameter, reached by two arguments, is one slot."""
    model = Tied()
    state = State.of({"part": model.first, "all": {"model": model}})
    assert list(state.parameters()) == ["part.weight", "all.model.second.bias"]


def test_reading_makes_no_entries():
    """An optimiser's state is a defaultdict: reading must not add entries."""
    model, optimizer = Case().begin()
    state_of(model, optimizer).tensors()
    assert not optimizer.state


# ---- putting others in place ------------------------------------------------------------------


def others(state: State) -> dict[Slot, torch.Tensor]:
    """New tensors for all slots, one more than what is there."""
    new = {slot: t.detach() + 1 for slot, t in state.tensors().items()}
    return {
        slot: nn.Parameter(t, requires_grad=state.tensors()[slot].requires_grad) if slot.kind == "parameter" else t
        for slot, t in new.items()
    }


def test_installed_tensors_are_found_where_they_belong():
    """Under all names, as gradients, in groups, and as keys of optimiser state. Tied tensors stay tied."""
    model, optimizer = pair()
    state = state_of(model, optimizer)
    new = others(state)
    state.install(new)
    assert all(state.tensors()[slot] is t for slot, t in new.items())
    weight = new[Slot("parameter", "model.first.weight")]
    assert model.first.weight is model.second.weight is optimizer.param_groups[0]["params"][0] is weight
    assert model.mean is model.second.center is new[Slot("buffer", "model.mean")]
    assert set(optimizer.state) == set(optimizer.param_groups[0]["params"])
    kept = Slot("optimizer", "model.first.weight", "optimizer", "momentum_buffer")
    assert optimizer.state[weight]["momentum_buffer"] is new[kept]
    assert optimizer.param_groups[0]["momentum"] is new[Slot("hyper", "optimizer.param_groups.0.momentum")]
    assert weight.grad is new[Slot("grad", "model.first.weight")]


def test_what_is_not_given_is_dropped():
    """Gradients and optimiser state that the new state does not have are dropped."""
    model, optimizer = pair()
    state = state_of(model, optimizer)
    state.install({slot: t for slot, t in others(state).items() if slot.kind not in ("grad", "optimizer")})
    assert all(p.grad is None for p in model.parameters())
    assert not any("momentum_buffer" in kept for kept in optimizer.state.values())


@pytest.mark.parametrize("fails", [False, True])
def test_a_swap_is_undone(fails):
    """Tensors, options, and additions or removals inside the block, also if it raises."""
    model, optimizer = pair()
    state = state_of(model, optimizer)
    before, objects = tensors(model, optimizer), list(state.tensors().values())
    saved = copy.deepcopy(optimizer.state_dict())
    try:
        with state.swap(others(state), {"optimizer.param_groups.0.lr": 7.0}):
            assert optimizer.param_groups[0]["lr"] == 7.0
            assert not torch.equal(tensors(model, optimizer)["model.mean"], before["model.mean"])
            model.register_buffer("more", torch.ones(1))
            model.note, model.training = "inside", False
            model.zero_grad()
            optimizer.state.clear()
            if fails:
                raise LookupError
    except LookupError:
        assert fails
    assert all(a is b for a, b in zip(state.tensors().values(), objects, strict=True))
    same(tensors(model, optimizer), before, "state", rtol=0, atol=0)
    same(optimizer.state_dict(), saved, "optimizer", rtol=0, atol=0)
    assert model.training and not hasattr(model, "note") and not hasattr(model, "more")


# ---- what a trace takes for granted -----------------------------------------------------------


def change_nothing(model, optimizer):
    train_step(model, optimizer, torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    optimizer.param_groups[0]["lr"] = 0.5


def evaluate(model, optimizer):
    model.norm.eval()


def freeze(model, optimizer):
    model.up.bias.requires_grad_(False)


def set_flag(model, optimizer):
    optimizer.param_groups[0]["maximize"] = True


def set_attribute(model, optimizer):
    model.norm.eps = 0.1


def keep_a_count(model, optimizer):
    optimizer.state[model.up.bias]["calls"] = 3


@pytest.mark.parametrize(
    "change, path",
    [
        (change_nothing, None),
        (evaluate, "model.norm"),
        (freeze, "model.up.bias.requires_grad"),
        (set_flag, "optimizer.param_groups.0.maximize"),
        (set_attribute, "model.norm"),
        (keep_a_count, "optimizer.state.1.calls"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_constants_name_what_has_changed(change, path):
    """Floats and tensors are not constants."""
    model, optimizer = Case().begin()
    before = state_of(model, optimizer).constants()
    change(model, optimizer)
    after = state_of(model, optimizer).constants()
    assert [k for k in {**before, **after} if before.get(k) != after.get(k)] == ([path] if path else [])


# ---- names ------------------------------------------------------------------------------------


def test_leaves_have_dotted_paths():
    """Of dicts, lists, tuples and named tuples, in order."""
    slot = Slot("buffer", "x")
    found = named_leaves({"a": (1, [2]), "b": {"c": slot, "d.e": 3, 4: 5}})
    assert found == [
        ("a.0", 1), ("a.1.0", 2), ("b.c.kind", "buffer"), ("b.c.path", "x"), ("b.c.owner", ""), ("b.c.key", ""),
        ("b.'d.e'", 3), ("b.4", 5),
    ]  # fmt: skip


def test_other_arguments_are_refused():
    with pytest.raises(TypeError, match=r"argument data.1 is a generator: a compiled step takes modules, optim"):
        State.of({"data": [1, (i for i in range(3))]})


def test_groups_may_have_one_rate_in_a_tensor():
    """As torch gives it to them; whoever changes it between calls changes it for all."""

    def trained(prepare):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
        rate = torch.tensor(0.1, dtype=torch.float64)
        groups = [{"params": part.parameters(), "betas": (0.8, 0.9)} for part in model]
        optimizer = torch.optim.Adam(groups, lr=rate, foreach=False)

        def train(model, optimizer, x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = prepare(train)
        for call in range(4):
            step(model, optimizer, torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3))
            if call == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            for group in optimizer.param_groups[:1]:
                group["lr"].mul_(0.5)
        return [p.full_tensor() if isinstance(p, spmd.DTensor) else p for p in (*model.parameters(), group["lr"])]

    want = trained(lambda step: step)
    with spmd.LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        got = trained(lambda step: spmd.compile(step, mesh, inputs={"x": {"dp": spmd.Shard(0)}}))
        torch.testing.assert_close([x.detach().reconcile() for x in got], [x.detach() for x in want])
