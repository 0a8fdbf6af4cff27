"""Tensors in plain attributes of modules: read as arguments are, set as results are, kept over calls as buffers are."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import spmd
from spmd import LocalTensorMode, Shard
from spmd.expand import capture as tracing
from spmd.expand.compile import CompiledStep
from spmd.expand.objects import opened
from tests.expand.side_by_side import rows, seeded, train_step
from tests.tensor.single import every_rank

BATCHES = [(x.double(), y) for x, y in rows(6, 4)]
INPUTS = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}


class Net(nn.Module):
    """With one attribute or several that are no buffers. read, write: what becomes of them in a forward."""

    def __init__(self, before=None, forward=None):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()
        vars(self).update(before or {})
        self.between = forward

    def forward(self, x):
        return self.down(F.gelu(self.between(self, self.up(x))))


def with_hook(change):
    def build():
        model = Net(forward=lambda self, h: h)
        change(model.up), change(model.down)
        return model

    return build


def of(before, forward):
    return lambda: Net({name: copy.deepcopy(x) for name, x in before.items()}, forward)


def test_a_list_of_parameters_is_refused_in_words():
    """Also one made on simulated ranks, whose tensors are of a class of their own."""
    with LocalTensorMode(2):
        model = Net({"scales": [nn.Parameter(torch.ones(6).double())]}, lambda self, h: h * self.scales[0])
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step = spmd.compile(lambda model, x: model(x).sum(), mesh)
        with pytest.raises(RuntimeError, match=r"not among its arguments, .* nn\.ParameterList"):
            step(model, BATCHES[0][0])


# ---- what modules do with tensors -------------------------------------------------------------


def reads_a_mask(self, h):
    return h * self.mask


def adds_up(self, h):
    """Two means that are carried over calls, one of them written in place."""
    self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
    self.count += 1
    return h - self.mean / self.count


def keeps_what_it_saw(self, h):
    self.seen = h.detach() * 2
    return h


def keeps_it_in_several_ways(self, h):
    self.parts["h"], self.pair = h.detach(), (h.detach().sum(0), 3)
    return h


def begins_with_none(self, h):
    """As a recurrent layer that keeps its state."""
    if self.state is None:
        self.state = torch.zeros_like(h)
    self.state = (0.5 * self.state + h).detach()
    return h + self.state


def of_a_pair(self, h):
    a, b = self.hidden
    self.hidden = (a + h.detach().mean(0), torch.maximum(b, h.detach().amax(0)))
    return h + a * b


def cached_by_size(self, h):
    if h.shape[1] not in self.cache:
        self.cache[h.shape[1]] = torch.arange(h.shape[1], dtype=h.dtype) / 7
    return h * self.cache[h.shape[1]]


class Statistics:
    """An object of the user's."""

    def __init__(self):
        self.total, self.name = torch.zeros(6, dtype=torch.float64), "total"


def in_an_object(self, h):
    self.statistics.total = self.statistics.total + h.detach().sum(0)
    return h + self.statistics.total


def sets_a_flag_too(self, h):
    """As lazy initialisation does."""
    if not self.ready:
        self.ready, self.scale = True, h.detach().abs().mean(0)
    return h / self.scale


def forgets_at_once(self, h):
    self.saved = h * 2
    h = self.saved + 1
    self.saved = None
    return h


def writes_a_row(self, h):
    """As a queue of keys."""
    self.queue[1] = h.detach().mean(0)
    return h @ self.queue.t() @ self.queue


def doubled(module, args):
    module.twice = module.weight * 2


def hooked(layer):
    """A hook of the user's that computes a tensor, and a forward that reads it."""
    layer.register_forward_pre_hook(doubled)
    layer.forward = lambda x: F.linear(x, layer.twice, layer.bias)


def pruned_twice(layer):
    prune.l1_unstructured(layer, "weight", 0.3)
    prune.random_unstructured(layer, "weight", 0.3)
    prune.random_unstructured(layer, "bias", 1)


W = torch.arange(6.0, dtype=torch.float64)
KEPT = {
    "a mask": (of({"mask": W > 2}, reads_a_mask), 1),
    "prune": (with_hook(pruned_twice), 1),
    "weight_norm": (with_hook(nn.utils.weight_norm), 1),
    "spectral_norm": (with_hook(nn.utils.spectral_norm), 1),
    "a hook": (with_hook(hooked), 2),
    "means": (of({"mean": W / 9, "count": torch.ones(())}, adds_up), 1),
    "what it saw": (of({"seen": torch.zeros(2)}, keeps_what_it_saw), 2),
    "what it saw, new": (of({}, keeps_what_it_saw), 2),
    "in several ways": (of({"parts": {}, "pair": None}, keeps_it_in_several_ways), 3),
    "none before": (of({"state": None}, begins_with_none), 2),
    "a pair": (of({"hidden": (W, W / 3)}, of_a_pair), 1),
    "by size": (of({"cache": {}}, cached_by_size), 3),
    "in an object": (of({"statistics": Statistics()}, in_an_object), 1),
    "with a flag": (of({"ready": False}, sets_a_flag_too), 3),
    "forgotten at once": (of({"saved": None}, forgets_at_once), 1),
    "a row": (of({"queue": torch.ones(2, 6, dtype=torch.float64)}, writes_a_row), 1),
}
"""Each with the captures that it costs: a second one where Python finds another attribute in the second call, and one
that says whether what a container holds would grow with each call."""


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("build, captures", KEPT.values(), ids=KEPT.keys())
@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_what_modules_keep_is_what_one_device_keeps(build, captures, shape):
    """Losses, parameters and attributes; on one device an attribute may have a history, which ends with a step here."""
    alone, ours = seeded(build), seeded(build)
    of_alone, of_ours = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (alone, ours))
    losses = [train_step(alone, of_alone, x, y) for x, y in BATCHES]
    with LocalTensorMode(4), mock.patch.object(tracing, "_traced", wraps=tracing._traced) as traced:
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        params = {"up.weight*": {"tp": Shard(0)}} if shape[1] > 1 else {}
        step = spmd.compile(train_step, mesh, params=params, inputs=INPUTS, fully_shard="dp")
        for (x, y), want in zip(BATCHES, losses, strict=True):
            torch.testing.assert_close(every_rank(step(ours, of_ours, x, y))[0], want)
        want, mine = held(alone), held(ours)
        assert want.keys() == mine.keys()
        for name, x in want.items():
            torch.testing.assert_close(every_rank(mine[name])[0], x, msg=lambda text, name=name: f"{name}: {text}")
    assert traced.call_count <= captures  # steps of one function on several meshes share theirs


def held(model):
    """All tensors of a model, by name."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for path, module in model.named_modules():
        for name, x in vars(module).items():
            tree = opened(x) if not name.startswith("_") else ()
            leaves = spmd._torch.pytree.tree_flatten_with_path(tree)[0]
            found |= {f"{path}.{name}{at}": leaf for at, leaf in leaves if isinstance(leaf, torch.Tensor)}
    return {name: x.detach() for name, x in found.items()}


# ---- what is refused --------------------------------------------------------------------------


def takes_it_out(self, h):
    h, self.mask = h * self.mask, None
    return h


WANTS = torch.ones(6, dtype=torch.float64, requires_grad=True)
MASK = torch.ones(6, dtype=torch.float64)
REFUSED = {
    "taken out": ({"mask": MASK}, takes_it_out, r"takes the tensors out of model\.mask; let it set others"),
    "wants a gradient": ({"mask": WANTS}, reads_a_mask, r"reads model\.mask, which requires .* make it an nn\.Param"),
}


@pytest.mark.parametrize("before, forward, why", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused_says_what_to_write(before, forward, why):
    """And the module is as it was."""
    model = seeded(lambda: Net(before, forward))
    with pytest.raises(RuntimeError, match=why):
        spmd.compile(lambda model, x: model(x), LINE)(model, BATCHES[0][0])
    assert all(vars(model)[name] is x for name, x in before.items())
    assert torch.equal(model.mask, MASK) and type(model.up.weight) is nn.Parameter


# ---- between calls ----------------------------------------------------------------------------

LINE = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))


def test_what_a_user_sets_between_calls_is_read():
    """Other values in the tensor, and another tensor, without another program."""
    model = seeded(of({"mask": W > 2}, reads_a_mask))
    alone, step, x = copy.deepcopy(model), spmd.compile(lambda model, x: model(x), LINE), BATCHES[0][0]
    for change in (lambda m: None, lambda m: m.mask.fill_(True), lambda m: setattr(m, "mask", W > 4)):
        for _ in range(2):
            change(alone), change(model)
            torch.testing.assert_close(step(model, x).full_tensor(), alone(x))
    assert len(step.programs) == 1


LONG = {"by size": 3, "with a flag": 3, "what it saw, new": 3, "none before": 3}
"""The calls that find another attribute, or a container that grew, are made the long way, and so is one behind them."""


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("name", KEPT)
def test_calls_that_set_attributes_are_made_again_at_once(name):
    """On simulated ranks, against one device, behind the calls that find out what is set."""
    build, calls = KEPT[name][0], [BATCHES[i % len(BATCHES)] for i in range(8)]
    alone, ours = seeded(build), seeded(build)
    of_alone, of_ours = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (alone, ours))
    real = CompiledStep._run_anew
    with LocalTensorMode(4), mock.patch.object(CompiledStep, "_run_anew", autospec=True, side_effect=real) as anew:
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(train_step, mesh, inputs=INPUTS, fully_shard="dp")
        for x, y in calls:
            want = train_step(alone, of_alone, x, y)
            torch.testing.assert_close(every_rank(step(ours, of_ours, x, y))[0], want)
        want, mine = held(alone), held(ours)
        assert want.keys() == mine.keys()
        for path, x in want.items():
            torch.testing.assert_close(every_rank(mine[path])[0], x, msg=lambda text, path=path: f"{path}: {text}")
    assert anew.call_count <= LONG.get(name, 2) + 1


def in_a_list_with_a_number(self, h):
    self.parts[0], self.parts[1]["b"] = h.detach().sum(0), h.detach().amax(0)
    self.mean = (self.mean + h.detach().mean(0)) * self.parts[2]
    return h * self.parts[0] + self.mean * self.parts[1]["b"]


def with_parts():
    before = {"parts": [W, {"b": W / 2}, 0.5], "mean": W, "apart": Statistics()}
    return of(before, in_a_list_with_a_number)()


CHANGED_BETWEEN = {
    "another tensor": lambda m: setattr(m, "mean", torch.ones(6, dtype=torch.float64)),
    "one that has the specs": lambda m: setattr(m, "mean", m.mean * 2),
    "a write": lambda m: m.mean.zero_(),
    "one of a list": lambda m: m.parts.__setitem__(0, m.mean * 3),
    "one of a dict": lambda m: m.parts[1].update(b=m.mean * 3),
    "a number of the list": lambda m: m.parts.__setitem__(2, 0.25),
    "another list": lambda m: setattr(m, "parts", [m.parts[0], {"b": m.mean - 1}, 0.125]),
    "one tensor for two": lambda m: setattr(m, "mean", m.parts[0]),
    "one tensor, twice in a list": lambda m: m.parts.__setitem__(0, m.parts[1]["b"]),
    "a parameter": lambda m: setattr(m, "mean", m.down.weight.detach()[:, 0].sum() + m.parts[0]),
    "a buffer": lambda m: m.register_buffer("offset", m.__dict__.pop("mean")) or setattr(m, "mean", m.offset),
    "another attribute": lambda m: setattr(m, "more", m.mean * 2),
}


@pytest.mark.parametrize("name", CHANGED_BETWEEN)
def test_what_is_changed_between_calls_made_again_is_noticed(name):
    """As on one device: a program is right for what the attributes hold, however it came there."""
    alone, ours = seeded(with_parts), seeded(with_parts)
    of_alone, of_ours = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (alone, ours))
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(train_step, mesh, inputs=INPUTS)
        for i in range(9):
            if i in (4, 6):
                with torch.no_grad():
                    CHANGED_BETWEEN[name](alone), CHANGED_BETWEEN[name](ours)
            x, y = BATCHES[i % len(BATCHES)]
            want = train_step(alone, of_alone, x, y)
            torch.testing.assert_close(every_rank(step(ours, of_ours, x, y))[0], want)
        for path, x in held(alone).items():
            torch.testing.assert_close(every_rank(held(ours)[path])[0], x, msg=lambda text, path=path: path + text)


def test_a_view_of_a_parameter_between_calls_made_again_is_refused():
    """As in any call: the step writes the parameter, and would not see that in the view."""
    model = seeded(with_parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = spmd.compile(train_step, LINE)
    for _ in range(4):
        step(model, optimizer, *BATCHES[0])
    assert step._repeats[0].ready((model, optimizer, *BATCHES[0]), {}) is not None
    model.mean = model.up.weight.detach()[:, 0]
    with pytest.raises(ValueError, match=r"model\.mean shares memory with model\.up\.weight"):
        step(model, optimizer, *BATCHES[0])


def test_objects_and_lists_that_a_step_sets_stay_the_same_ones():
    """Also in calls that are made again."""
    model, x = seeded(with_parts), BATCHES[0][0]
    step, parts, inner = spmd.compile(lambda model, x: model(x), LINE), model.parts, model.parts[1]
    for _ in range(5):
        step(model, x)
    assert step._repeats and model.parts is parts and parts[1] is inner


@pytest.mark.filterwarnings("ignore:.*is deprecated")
@pytest.mark.parametrize("name", ["a mask", "weight_norm", "means", "a pair", "in an object"])
def test_a_saved_step_sets_them_too(name, tmp_path):
    build, _ = KEPT[name]
    alone, first, ours = (seeded(build) for _ in range(3))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (alone, first, ours)]
    step = spmd.compile(train_step, LINE)
    step(first, optimizers[1], *BATCHES[0])
    step.save(tmp_path / "step.spmd")
    loaded = spmd.load_step(tmp_path / "step.spmd", train_step, LINE)
    torch.testing.assert_close(
        loaded(ours, optimizers[2], *BATCHES[0]).full_tensor(), train_step(alone, optimizers[0], *BATCHES[0])
    )
    want, mine = held(alone), held(ours)
    for path, x in want.items():
        got = mine[path].full_tensor() if isinstance(mine[path], spmd.DTensor) else mine[path]
        torch.testing.assert_close(got, x)
