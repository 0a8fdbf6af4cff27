"""A compiled step trains as the step does on one device: losses, parameters, buffers, gradients, optimiser state."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from spmd import DTensor, Replicate, Shard
from spmd.sim import run_ranks
from tests.expand.side_by_side import (
    GPT_PLAN,
    INPUTS,
    MESHES,
    NET,
    Case,
    Net,
    copied,
    gpt,
    rows,
    same,
    seeded,
    shared_programs,
    tensors,
    tokens,
    train_step,
    values,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def adamw(params):
    # The gradient of a key's bias is zero but for rounding, which Adam makes a whole step of where eps is small.
    return optim.AdamW(params, lr=1e-2, eps=1e-4)


# ---- a GPT ------------------------------------------------------------------------------------


def sgd(params):
    return optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "shape, batch, tied, make",
    [
        *((shape, 4, shape[0] == 2, adamw if shape == (2, 2) else sgd) for shape in MESHES),
        ((2, 2), 3, False, sgd),  # uneven
        ((4, 1), 7, True, adamw),  # uneven
        ((4, 1), 2, False, sgd),  # two empty shards
        ((4, 1), 6, False, sgd),  # one empty shard, the others even
        ((2, 2), 1, True, sgd),
    ],
)
def test_a_gpt_trains_as_on_one_device(shape, batch, tied, make):
    """On every mesh, and with batches that divide and that do not."""
    Case(lambda: gpt(tied=tied), make, batches=tokens(batch), params=GPT_PLAN).check(shape)


def test_a_gpt_of_odd_sizes_trains():
    """Three heads on two ranks, an odd vocabulary and width: no dim divides."""
    plan = {
        "*.attn.[qkv].weight": {"tp": Shard(0)},
        "*.attn.out.weight": {"tp": Shard(1)},
        "tok_emb.*": [Shard(0), Shard(1)],
    }
    model = lambda: gpt(n_head=3, n_embd=9, vocab=7, bias=False)  # noqa: E731
    Case(model, sgd, batches=tokens(3, vocab=7), params=plan).check((2, 2))


# ---- optimisers -------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "SGD nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam amsgrad": {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1},
    "AdamW maximize": {"lr": 1e-2, "maximize": True},
    "AdamW tensor": {"lr": torch.tensor(1e-2)},
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.1},
    "RMSprop": {"lr": 1e-2, "momentum": 0.5, "centered": True},
    "NAdam": {"lr": 1e-2},
    "Adamax": {"lr": 1e-2},
    "Adadelta": {"lr": 1.0},
    "Rprop": {"lr": 1e-2},
    **{
        f"{name} {way}": {"lr": 1e-2, way: True, **options}
        for way in ("foreach", "fused")
        for name, options in {"AdamW": {}, "Adam": {"amsgrad": True}, "SGD": {"momentum": 0.9}, "Adagrad": {}}.items()
    },
    "NAdam foreach": {"lr": 1e-2, "foreach": True},
    "RMSprop foreach": {"lr": 1e-2, "foreach": True},
}


class Small(nn.Module):
    """One weight that is sharded, one that is not."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 3)

    def forward(self, x):
        return self.down(self.up(x).tanh())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimisers_step_as_on_one_device(name):
    """Also optimisers that work on lists of tensors or in one fused kernel. The batch is uneven."""
    make = getattr(optim, name.split()[0])
    options = OPTIMIZERS[name]
    plan = {"up.weight": {"tp": Shard(0)}, "down.bias": {"dp": Shard(0)}}
    Case(Small, lambda params: make(params, **copy.deepcopy(options)), batches=rows(7), params=plan).check((2, 2))


def test_parameter_groups_keep_their_own_options():
    """Weight decay only for weights, and different learning rates."""

    def build(params):
        params = list(params)
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim == 1], "lr": 0.03, "weight_decay": 0.0},
        ]
        return optim.AdamW(groups, lr=1e-2)

    Case(optimizer=build).check((2, 2))


# ---- steps ------------------------------------------------------------------------------------


def accumulating_step(model, optimizer, x, y):
    """Two micro-batches, one update."""
    optimizer.zero_grad()
    losses = [F.cross_entropy(model(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return losses


def backward_only(model, optimizer, x, y):
    """Adds to the gradients and does not clear them."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def clipping_step(model, optimizer, x, y, max_norm=0.1):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return loss, norm


def foreach_clipping_step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"), foreach=True)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    return {"norm": norm, "grads": [p.grad for p in model.parameters()]}


def zeroing_step(model, optimizer, x, y):
    """Gradients are kept and zeroed, not dropped."""
    optimizer.zero_grad(set_to_none=False)
    loss = F.mse_loss(model(x), F.one_hot(y, 3).float())
    loss.backward()
    optimizer.step()
    return loss.item()


def penalty_step(model, optimizer, x, y):
    """A second derivative: the gradient's norm is part of the loss."""
    x = x.detach().requires_grad_()
    out = model(x).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    loss = out / x.shape[0] + slope.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss, slope


def autocast_step(model, optimizer, x, y):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    "step, shape, batch",
    [
        (accumulating_step, (2, 2), 8),
        (accumulating_step, (3, 1), 5),
        (clipping_step, (2, 2), 7),
        (clipping_step, (3, 1), 4),
        (foreach_clipping_step, (2, 2), 8),
        (zeroing_step, (3, 1), 5),
        (penalty_step, (2, 2), 7),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_steps_of_many_kinds(step, shape, batch):
    """Even and uneven, and with an empty shard."""
    Case(step=step, optimizer=sgd, batches=rows(batch)).check(shape)


def test_autocast_in_the_step():
    """Rounds where one device rounds, but sums are split, so the results are close and not equal."""
    Case(step=autocast_step).check((2, 2), rtol=2e-2, atol=2e-3)


def test_gradients_add_up_over_calls():
    """A step that leaves its gradients, called twice, is one step on both batches."""
    case = Case(step=backward_only, batches=rows(6, n=3))
    case.check((2, 2))
    model, optimizer = case.begin()
    for batch in case.batches:
        backward_only(model, optimizer, *batch)
    assert all(p.grad is not None for p in model.parameters())


def test_the_learning_rate_as_an_argument():
    """A float argument may change from call to call without another program."""

    def step(model, optimizer, x, y, lr):
        optimizer.param_groups[0]["lr"] = lr
        return train_step(model, optimizer, x, y)

    def plain(model, x, y, lr, decay: float = 0.9):
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.mul_(decay).sub_(lr * g)
        return loss, lr * 2

    pair = Case().begin()
    batches = [(*batch, lr) for batch, lr in zip(rows(7, n=4), (0.1, 0.0, 1.0, -0.3), strict=True)]
    alone = copy.deepcopy(pair[0])
    want = [values(plain(alone, *batch)) for batch in batches]

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = copy.deepcopy(pair[0])
        compiled = spmd.compile(plain, mesh, params=NET, inputs=INPUTS)
        got = [values(compiled(model, *batch)) for batch in batches]
        same(got, want, "returned")
        same([values(p) for p in model.parameters()], [values(p) for p in alone.parameters()], "parameters")
        assert len(compiled.programs) == 1

    with shared_programs():
        run_ranks(rank, 4)


# ---- what changes between steps ---------------------------------------------------------------


def set_group(**options):
    """Before the i-th step give every parameter group the i-th of these values."""

    def between(i, model, optimizer):
        for group in optimizer.param_groups:
            group.update({k: v[i] for k, v in options.items()})

    return between


@pytest.mark.parametrize(
    "options, programs",
    [
        ({"lr": [1e-2, 2e-2, 5e-3, 1e-3]}, 1),
        ({"lr": [0.0, 1e-2, 1.0, 0.5]}, 1),  # warm-up from nothing
        ({"weight_decay": [0.0, 0.0, 0.1, 0.2]}, 2),  # Adam branches on it
        ({"betas": [(0.9, 0.99), (0.8, 0.99), (0.0, 0.9), (0.9, 1.0)]}, 1),
        ({"eps": [1e-4, 1e-3, 1e-2, 0.0]}, 1),
        ({"maximize": [False, False, True, False]}, 2),  # a flag: another program
    ],
    ids=str,
)
def test_options_may_change_between_steps(options, programs):
    """Changed options take effect. A number makes a new program only if the optimiser branches on it."""
    case = Case(
        lambda: nn.Linear(4, 3),
        lambda params: optim.Adam(params, lr=1e-2),
        batches=rows(5, n=4),
        params={"weight": {"tp": Shard(0)}},
        between=set_group(**options),
    )
    assert case.check((2, 1), probe=lambda step, *_: len(step.programs)) == programs


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=str)
def test_a_scheduler_outside_is_honoured(lr):
    """The scheduler is made before the first step, refers to the optimiser, and sets floats or fills tensors."""
    schedulers = {}

    def between(i, model, optimizer):
        if i == 0:
            schedulers[id(optimizer)] = optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        else:
            schedulers[id(optimizer)].step()

    case = Case(
        optimizer=lambda p: optim.SGD(p, lr=copy.deepcopy(lr), momentum=0.9),
        batches=rows(4, n=5),
        between=between,
        share=False,  # a scheduler warns when an optimiser was never run
    )
    assert case.check((2, 1), probe=lambda step, *_: len(step.programs)) == 2


def test_frozen_parameters_stay():
    """Frozen parameters get no gradient, and the set of frozen ones may change between steps: a program for each
    set, and one for all further steps, in which those that were frozen have made fewer."""

    def freeze(i, model, optimizer):
        model.up.requires_grad_(i != 1)

    assert Case(between=freeze, batches=rows(5, n=5)).check((2, 2), probe=lambda step, *_: len(step.programs)) == 3


def test_parameters_outside_the_optimiser_stay():
    """They get gradients and no update."""
    case = Case(wanted=lambda model: model.down.parameters())
    case.check((2, 2))


class Modes(nn.Module):
    """Its forward depends on the training flag and on a number that the user may set."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout, self.scale = nn.Linear(4, 3), nn.Dropout(0.0), 1.0

    def forward(self, x):
        return self.linear(self.dropout(x)) * (self.scale if self.training else 1.0)


def test_flags_and_numbers_of_modules_select_the_program():
    """train(), eval() and a plain attribute each need another program; a change back needs none."""

    def between(i, model, optimizer):
        model.train(i != 1)
        model.scale = 2.0 if i == 3 else 1.0

    case = Case(Modes, lambda p: optim.SGD(p, lr=0.1), between=between, batches=rows(4, n=5), params={})
    assert case.check((2, 1), probe=lambda step, *_: len(step.programs)) == 3


class Normed(nn.Module):
    """Batch norm: the running statistics are buffers, and the statistics are those of the global batch."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


@pytest.mark.parametrize("shape, batch", [((2, 2), 8), ((4, 1), 7), ((4, 1), 6)])
def test_batch_norm_sees_the_global_batch(shape, batch):
    """Means, variances and running statistics are those of one device; in eval() the running ones are used."""

    def between(i, model, optimizer):
        model.train(i < 2)

    plan = {"up.*": {"tp": Shard(0)}}
    Case(Normed, lambda p: optim.SGD(p, lr=0.1), batches=rows(batch), params=plan, between=between).check(shape)


# ---- the state --------------------------------------------------------------------------------


def test_state_from_before_is_taken_over():
    """A training that began on one device goes on compiled: optimiser state, gradients and all."""
    case = Case(batches=rows(6, n=4))
    begun = case.begin()
    train_step(*begun, *case.batches[0])
    case.begin = lambda: copied(begun)
    assert case.check((2, 2), probe=lambda step, *_: len(step.programs)) == 1


def test_state_dicts_tell_the_truth():
    """After a step they have DTensors with the planned placements and with the values of one device."""
    case = Case(batches=rows(6, n=1))
    model, optimizer = case.begin()
    train_step(model, optimizer, *case.batches[0])

    def probe(step, theirs, their_optimizer):
        state, kept = theirs.state_dict(), their_optimizer.state_dict()
        assert all(isinstance(t, DTensor) for t in state.values())
        assert state["up.weight"].placements == (Replicate(), Shard(0))
        assert kept["state"][0]["exp_avg"].placements == (Replicate(), Shard(0))
        same(values(dict(state)), values(dict(model.state_dict())), "model")
        same(values(kept["state"]), values(optimizer.state_dict()["state"]), "optimizer")
        assert kept["param_groups"] == optimizer.state_dict()["param_groups"]

    case.check((2, 2), probe)


@pytest.mark.parametrize("plain", [True, False])
def test_a_training_resumes(plain):
    """From state dicts of plain tensors or of DTensors, into a model that has run or into a new one."""
    batches = rows(6, n=4)
    alone, alone_optimizer = Case().begin()
    want = [train_step(alone, alone_optimizer, *batch).item() for batch in batches]
    pair = Case().begin()

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, optimizer = copy.deepcopy(pair)
        step = spmd.compile(train_step, mesh, params=NET, inputs=INPUTS)
        first = [step(model, optimizer, *batch).item() for batch in batches[:2]]
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if plain:
            saved = values(dict(saved[0])), values(saved[1])
        for batch in batches[2:]:  # what happens here is undone
            step(model, optimizer, *batch)
        with spmd.implicit_replication():
            model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        again = [step(model, optimizer, *batch).item() for batch in batches[2:]]
        fresh, fresh_optimizer = copy.deepcopy(pair)
        fresh.load_state_dict(values(dict(saved[0])))
        fresh_optimizer.load_state_dict(copy.deepcopy(saved[1]))
        new = spmd.compile(train_step, mesh, params=NET, inputs=INPUTS)
        anew = [new(fresh, fresh_optimizer, *batch).item() for batch in batches[2:]]
        same(first + again, want, "again")
        same(anew, want[2:], "anew")
        same(tensors(fresh, fresh_optimizer), tensors(alone, alone_optimizer), "state")
        assert len(step.programs) == 1

    with shared_programs():
        run_ranks(rank, 4)


def test_a_second_training_begins_anew():
    """One compiled step trains two models in turn: the first program's constants are as they were."""
    batches = rows(4, n=3)
    pair = Case(optimizer=optim.NAdam).begin()
    alone = copy.deepcopy(pair)
    want = [train_step(*alone, *batch).item() for batch in batches]

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        step = spmd.compile(train_step, mesh, inputs=INPUTS)
        for _ in range(2):
            mine = copy.deepcopy(pair)
            same([step(*mine, *batch).item() for batch in batches], want, "returned")
            same(tensors(*mine), tensors(*alone), "state")
        assert len(step.programs) == 1

    with shared_programs():
        run_ranks(rank, 2)


def test_two_models_in_one_step():
    """A moving average follows the model; no gradient, no optimiser."""

    def step(model, average, optimizer, x, y):
        loss = train_step(model, optimizer, x, y)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return loss, F.cross_entropy(average(x), y)

    model, optimizer = Case().begin()
    given = model, seeded(Net), optimizer
    batches = rows(5)
    alone = copy.deepcopy(given)
    want = [values(step(*alone, *batch)) for batch in batches]

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = copy.deepcopy(given)
        compiled = spmd.compile(
            step,
            mesh,
            params={"model.up.*": {"tp": Shard(0)}, "average.*.weight": [Shard(0), Replicate()]},
            inputs=INPUTS,
        )
        same([values(compiled(*mine, *batch)) for batch in batches], want, "returned")
        for ours, theirs in zip(alone[:2], mine[:2], strict=True):
            same([values(p) for p in theirs.parameters()], [values(p) for p in ours.parameters()], "parameters")

    with shared_programs():
        run_ranks(rank, 4)


def test_training_and_evaluation_share_a_model():
    """Two compiled steps, one model. The second keeps the model's placements."""

    def evaluate(model, x, y):
        with torch.no_grad():
            out = model(x)
        return {"loss": F.cross_entropy(out, y), "right": (out.argmax(-1) == y).sum(), "out": out, "n": x.shape[0]}

    pair, batches = Case().begin(), rows(7)
    alone = copy.deepcopy(pair)
    want = [[values(train_step(*alone, *batch)), values(evaluate(alone[0], *batch))] for batch in batches]

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = copy.deepcopy(pair)
        step = spmd.compile(train_step, mesh, params=NET, inputs=INPUTS)
        evaluation = spmd.compile(evaluate, mesh, inputs=INPUTS)
        same([[values(step(*mine, *b)), values(evaluation(mine[0], *b))] for b in batches], want, "returned")
        assert len(evaluation.programs) == len(step.programs) == 1

    with shared_programs():
        run_ranks(rank, 4)


def test_inputs_may_be_dtensors():
    """With their own placements, or with those of the pattern."""
    batches = rows(6)
    case = Case(batches=batches)
    want, _ = case.on_one_device()
    pair = case.begin()

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mine = copy.deepcopy(pair)
        step = spmd.compile(train_step, mesh, params=NET, inputs={"x": {"dp": Shard(0)}})
        given = [
            (
                spmd.distribute_tensor(x, mesh, [Shard(1), Replicate()]),
                spmd.distribute_tensor(y, mesh, [Replicate(), Shard(0)]),
            )
            for x, y in batches
        ]
        same([values(step(*mine, *batch)) for batch in given], want, "returned")

    with shared_programs():
        run_ranks(rank, 4)


# ---- real processes ---------------------------------------------------------------------------


def trained_on_gloo(rank: int, pair, batches: list[tuple]) -> tuple:
    """Runs on a worker: returns the steps' results, and all tensors at the end."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = pair
    step = spmd.compile(train_step, mesh, params=GPT_PLAN, inputs=INPUTS)
    return [step(model, optimizer, *batch).item() for batch in batches], tensors(model, optimizer)


def test_real_processes_train_as_one_device(gloo4):
    """The same program over gloo."""
    case = Case(gpt, adamw, batches=tokens(3, n=4))
    returned, state = case.on_one_device()
    for theirs, their_state in gloo4.run(trained_on_gloo, case.begin(), case.batches, timeout=120):
        same(theirs, [x.item() for x in returned], "returned")
        same(their_state, state, "state")
