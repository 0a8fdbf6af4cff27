"""What a step changes in Python while it runs: in modules and in objects among its arguments; what it asks of torch."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import Replicate, Shard
from spmd.sim import run_ranks
from tests.expand.side_by_side import Case
from tests.steps import train_step

X = torch.arange(24.0).reshape(4, 6) / 7


def whole(x):
    return x.full_tensor() if isinstance(x, spmd.DTensor) else x


def line(n=2):
    return spmd.init_device_mesh("cpu", (n,), mesh_dim_names=("dp",))


def trained(model, run, steps=3):
    """The losses of some steps on x, and the parameters after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [whole(run(model, optimizer, X)) for _ in range(steps)]
    return [*losses, *(whole(p.detach()) for p in model.parameters())]


class NotesFirst(nn.Module):
    """Notes things once, in its first forward, which has other numbers: a flag, a hook, an entry, a config."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.ready, self.seen, self.config = False, {}, Config(1.0)

    def forward(self, x):
        y = self.layer(x)
        if not self.ready:
            self.ready = True
            self.seen["shape"] = tuple(x.shape)
            self.seen["inside"] = [{"rows": x.shape[0] * 2}, (x.shape, "name")]
            self.config.rate = 0.5
            self.layer.register_forward_hook(lambda module, args, out: out * 3)
            return y * 7
        return y * self.config.rate


NOTED = "{'shape': (4, 6), 'inside': [{'rows': 8}, (torch.Size([4, 6]), 'name')]}"
"""As text: a symbol is equal to its number."""


@dataclass
class Config:
    rate: float


class TurnsOff(NotesFirst):
    """Leaves training mode in its forward, as some evaluation code does."""

    def forward(self, x):
        self.eval()
        return super().forward(x)


@pytest.mark.parametrize("kind", [NotesFirst, TurnsOff])
def test_what_a_model_does_once_is_done_once(kind):
    """The first step has the numbers of a first step on one device, the others those of the others."""
    fresh = kind()  # made once: ranks are threads, and would seed one generator while others draw from it
    want = trained(copy.deepcopy(fresh), train_step)

    def rank(r):
        model = copy.deepcopy(fresh)
        step = spmd.compile(train_step, line(), inputs={"x": {"dp": Shard(0)}})
        for got, expected in zip(trained(model, step), want, strict=True):
            torch.testing.assert_close(got, expected)
        assert model.ready and repr(model.seen) == NOTED and model.config.rate == 0.5
        assert len(model.layer._forward_hooks) == 1

    run_ranks(rank, 2)


def test_on_gloo(gloo4):
    gloo4.run(_drill)


def _drill(rank: int) -> None:
    """A model that notes something first, checkpoints its layers, and gets its batch as an object."""
    want = trained(Rechecked(NotesFirst()), train_step)
    step = spmd.compile(_step_on_batch, line(4), inputs={"batch.*": {"dp": Shard(0)}})
    model = Rechecked(NotesFirst())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = Batch({"x": X.clone()})
    got = [whole(step(model, optimizer, batch)) for _ in range(3)] + [whole(p.detach()) for p in model.parameters()]
    for mine, expected in zip(got, want, strict=True):
        torch.testing.assert_close(mine, expected)


def _step_on_batch(model, optimizer, batch):
    return train_step(model, optimizer, batch["x"])


class Rechecked(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.layer = inner, nn.Linear(6, 6)
        torch.manual_seed(1)
        self.layer.reset_parameters()

    def forward(self, x):
        return checkpoint(self.layer, self.inner(x).unsqueeze(1), use_reentrant=False)


class KeepsALoss(NotesFirst):
    """Keeps a number of its first forward, which only the run knows."""

    def forward(self, x):
        if not self.ready:
            self.ready, self.first = True, x.sum().item()
        return self.layer(x)


class GrowsEachTime(NotesFirst):
    def forward(self, x):
        self.seen[len(self.seen)] = 1
        return self.layer(x)


class KeepsATensor(NotesFirst):
    """Beside a parameter, which has a place of its own."""

    def forward(self, x):
        self.seen["x"] = (self.layer.weight, x * 2)
        return self.layer(x)


class KeepsEach(NotesFirst):
    def forward(self, x):
        self.seen[len(self.seen)] = x * 2
        return self.layer(x)


NOT_TAKEN = [
    (KeepsATensor, r"(?s)keeps a tensor in model\.seen, .*test_python_state.py:\d+, in forward"),
    (KeepsALoss, "keeps .* in a module, a number that is known only when the program runs"),
]  # fmt: skip


@pytest.mark.parametrize("kind, why", NOT_TAKEN)
def test_what_no_program_can_keep_is_refused(kind, why):
    """The error comes at the first call, and the module is as it was, its containers included."""
    model = kind()
    step = spmd.compile(lambda model, x: model(x), line(1))
    with pytest.raises(RuntimeError, match=why):
        step(model, X)
    assert model.seen == {} and not model.ready and type(model.layer.weight) is nn.Parameter


@pytest.mark.parametrize("kind", [GrowsEachTime, KeepsEach])
def test_what_changes_every_time_does(kind):
    """Each call is captured: no program would make another change than the one that it was made for."""
    model, single = kind(), kind()
    step = spmd.compile(lambda model, x: model(x), line(1))
    for i in range(4):
        torch.testing.assert_close(whole(step(model, X)), single(X))
        torch.testing.assert_close([*map(whole, model.seen.values())], [*single.seen.values()])
        assert list(model.seen) == list(range(i + 1))


# ---- tensors that are computed from parameters ------------------------------------------------


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.eye(4))

    def forward(self, weight):
        return weight * self.mask


def masked(layer: nn.Linear) -> nn.Linear:
    nn.utils.parametrize.register_parametrization(layer, "weight", Masked())
    return layer


@pytest.mark.parametrize("change", [parametrizations.weight_norm, parametrizations.spectral_norm, masked])
def test_parametrizations_train_as_on_one_device(change):
    Case(model=lambda: nn.Sequential(change(nn.Linear(4, 4)), nn.Linear(4, 3)), params={}).check((2, 2))


# ---- objects ----------------------------------------------------------------------------------


class Batch(UserDict):
    """As a tokenizer's: a dict by its methods, an object by its class."""


class Cache:
    """As a model's cache: objects in a list in an object, which a forward extends in place."""

    def __init__(self):
        self.layers, self.kind = [], Layer

    def update(self, x):
        self.layers.append(Layer(x * 2))
        return sum(layer.keys for layer in self.layers)


class Layer:
    def __init__(self, keys):
        self.keys, self.seen = keys, 1


@dataclass
class Output:
    logits: torch.Tensor
    cache: Cache
    name: str = "out"


def decode(cache, batch):
    """Extends the cache in place, and returns it in its output; leaves a note in the batch."""
    y = cache.update(batch["x"])
    batch["seen"] = True
    return Output(y, cache)


def test_objects_are_arguments_and_results():
    """They come out as objects of their classes; those that the step changes are changed, and stay the same objects."""
    want_cache, want_batch = Cache(), Batch({"x": X})
    want = [decode(want_cache, want_batch).logits for _ in range(3)]

    def rank(r):
        step = spmd.compile(decode, line(), inputs={"batch.*": {"dp": Shard(0)}})
        cache, batch = Cache(), Batch({"x": X})
        first = None
        for i, expected in enumerate(want):
            out = step(cache, batch)
            torch.testing.assert_close(whole(out.logits), expected)
            assert type(out) is Output and out.name == "out" and type(out.cache) is Cache and batch["seen"] is True
            assert [type(x) for x in cache.layers] == [Layer] * (i + 1) and cache.kind is Layer
            first = first or cache.layers[0]
            assert cache.layers[0] is first
        for mine, theirs in zip(cache.layers, want_cache.layers, strict=True):
            torch.testing.assert_close(whole(mine.keys), theirs.keys)

    run_ranks(rank, 2)


class Row(OrderedDict):
    """A dict of a class that torch's trees do not know."""


class Rows(list):
    note = None


def regroup(row, rows):
    rows.append(row["x"] + sum(rows))
    row["y"], rows.note = rows[-1] * 2, "grown"
    return Row(total=row["y"].sum(), rows=Rows(rows[:1]))


def test_dicts_and_lists_of_classes_of_their_own():
    """What they contain is traced, not kept from the trace; and they are changed in place."""
    want_row, want_rows = Row(x=X), Rows([X * 3])
    want = [regroup(want_row, want_rows) for _ in range(3)]

    def rank(r):
        step = spmd.compile(regroup, line(), inputs={"row.x": {"dp": Shard(0)}})
        row, rows = Row(x=X), Rows([X * 3])
        for expected in want:
            out = step(row, rows)
            assert type(out) is Row and list(out) == ["total", "rows"] and type(out["rows"]) is Rows
            torch.testing.assert_close(whole(out["total"]), expected["total"])
            torch.testing.assert_close(whole(out["rows"][0]), expected["rows"][0])
        assert rows.note == "grown" and list(row) == ["x", "y"]
        for mine, theirs in zip([*rows, row["y"]], [*want_rows, want_row["y"]], strict=True):
            torch.testing.assert_close(whole(mine), theirs)

    run_ranks(rank, 2)


def test_a_pattern_may_name_an_argument_that_is_not_given():
    """An optional tensor that is None has no placement; a name that no argument has is a mistake."""
    inputs = {"x": {"dp": Shard(0)}, "mask": {"dp": Shard(0)}}
    step = spmd.compile(lambda x, mask=None: x.sum() if mask is None else (x * mask).sum(), line(1), inputs=inputs)
    torch.testing.assert_close(whole(step(X)), X.sum())
    torch.testing.assert_close(whole(step(X, None)), X.sum())
    torch.testing.assert_close(whole(step(X, X)), X.square().sum())
    with pytest.raises(ValueError, match="inputs 'masks' matches nothing"):
        spmd.compile(lambda x, mask=None: x, line(1), inputs={"masks": [Replicate()]})(X)


# ---- torch ------------------------------------------------------------------------------------


def test_models_see_that_they_are_compiled():
    """So that they leave out checks by value. torch's optimisers do not, and keep their numbers."""

    class Checks(nn.Linear):
        def forward(self, x):
            if not torch.compiler.is_compiling() and bool(x.isnan().any()):
                raise ValueError
            return super().forward(x)

    torch.manual_seed(0)
    model = Checks(6, 6)
    want, got = copy.deepcopy(model), copy.deepcopy(model)
    step = spmd.compile(train_step, line(1))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, betas=(0.7, 0.9)) for m in (want, got)]
    for _ in range(2):
        train_step(want, optimizers[0], X)
        step(got, optimizers[1], X)
    for mine, expected in zip(got.parameters(), want.parameters(), strict=True):
        assert torch.equal(whole(mine), expected)
    assert not torch.compiler.is_compiling()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("through", ["backward", "grad"])
def test_checkpoints_of_products_of_several_dims(use_reentrant, through):
    """What is computed again in the backward pass keeps its products as the forward pass did."""
    if use_reentrant and through == "grad":
        pytest.skip("torch refuses it")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))

    def step(model, x):
        y = checkpoint(model, x.reshape(2, 2, 6).requires_grad_(), use_reentrant=use_reentrant).square().sum()
        if through == "grad":
            return torch.autograd.grad(y, list(model.parameters()))
        y.backward()
        return [p.grad for p in model.parameters()]

    want = [g.clone() for g in step(copy.deepcopy(layers), X.clone())]

    def rank(r):
        compiled = spmd.compile(step, line(), inputs={"x": {"dp": Shard(0)}})
        for mine, expected in zip(compiled(copy.deepcopy(layers), X.clone()), want, strict=True):
            torch.testing.assert_close(whole(mine), expected)

    run_ranks(rank, 2)


LAST = torch.channels_last
POOLS = {
    "pooling to size 1": lambda x: nn.functional.adaptive_avg_pool1d(x.view(4, 2, 3).transpose(1, 2), 1),
    "of images": lambda x: nn.functional.adaptive_avg_pool2d(x.view(4, 1, 2, 3).to(memory_format=LAST), 1),
    "a transpose": lambda x: x.clone().as_strided((6, 4), (1, 6)) * 2,
    "other dims": lambda x: x.clone().as_strided((2, 3, 4), (3, 1, 6)) * 2,
}


@pytest.mark.parametrize("name", POOLS)
def test_strides_that_show_a_tensor_once_are_views(name):
    step = spmd.compile(lambda x: POOLS[name](x), line(1))
    torch.testing.assert_close(whole(step(X)), POOLS[name](X))
    run_ranks(lambda r: torch.testing.assert_close(
        whole(spmd.compile(lambda x: POOLS[name](x), line(), inputs={"x": {"dp": Shard(0)}})(X)), POOLS[name](X)
    ), 2)  # fmt: skip


def test_torch_code_that_decides_by_a_value_is_named_with_its_line():
    """The average of a model asks how many it has seen: the error names the user's line and torch's."""

    def step(average, model, x):
        average.n_averaged.copy_(x.sum())
        average.update_parameters(model)

    model = nn.Linear(6, 6)
    with pytest.raises(RuntimeError, match=r"(?s)decides by a value.*test_python_state.py:\d+.*swa_utils.py:\d+, in "):
        spmd.compile(step, line(1))(torch.optim.swa_utils.AveragedModel(model), model, X)


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam"])
def test_optimisers_that_no_program_can_hold_are_refused_by_name(kind):
    model = nn.Linear(6, 6)
    optimizer = getattr(torch.optim, kind)(model.parameters())

    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step(lambda: loss)

    with pytest.raises(NotImplementedError, match=rf"(?s)step.* {kind}, .*test_python_state.py:\d+, in step"):
        spmd.compile(step, line(1))(model, optimizer, X)
    assert not optimizer.state and type(model.weight) is nn.Parameter


class Made(OrderedDict):
    """Gives a new object for each key, as registries of activations do."""

    def __getitem__(self, key):
        return [super().__getitem__(key)]


REGISTRY = Made(tanh=torch.tanh, relu=torch.relu)


@pytest.mark.parametrize("fails", [False, True])
def test_a_dict_that_makes_what_it_gives_is_left_as_it_is(fails):
    """Also by a capture that ends with an error, which takes back what was changed."""
    REGISTRY.move_to_end("tanh", last=False)
    before = list(OrderedDict.items(REGISTRY))

    def step(x):
        if fails:
            REGISTRY["new"] = x.sin()
        return REGISTRY["tanh"][0](x)

    compiled = spmd.compile(step, line(1))
    if fails:
        with pytest.raises(RuntimeError, match="the step keeps a tensor in REGISTRY"):
            compiled(X)
    else:
        torch.testing.assert_close(whole(compiled(X)), X.tanh())
    assert list(OrderedDict.items(REGISTRY)) == before
