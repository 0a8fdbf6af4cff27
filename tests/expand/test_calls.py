"""A capture in which whole calls of a model are written again is the one in which each is traced, node by node."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from spmd.expand.stamp import calls
from tests.expand.test_blocks import Block, Stack, captured, trained
from tests.expand.test_stamp import outputs


def captures(step, given) -> int:
    """How many calls are written again, after the capture was seen to be that in which each is traced."""
    with mock.patch.object(calls, "is_in_loop", lambda outermost: False):
        want = captured(step, **given())
    again, real = [], calls._Call.again
    with mock.patch.object(calls._Call, "again", lambda self, x: again.append(real(self, x)) or again[-1]):
        found = captured(step, **given())
    assert str(found.graph) == str(want.graph)
    assert found.outputs == want.outputs and list(map(str, found.inputs)) == list(map(str, want.inputs))
    assert list(map(said, found.graph.nodes)) == list(map(said, want.graph.nodes))
    return sum(x is not None for x in again)


def said(node) -> tuple:
    """All that is known of a node: the metadata of its value, its phase, lines, module and sites."""
    sites = [sorted(name for site in node.meta.get(key, ()) for name in site.names) for key in ("sites", "gradient of")]
    return (*map(str, map(node.meta.get, ("val", "phase", "origin", "new value of"))), *sites)


def given(kind=Block, steps=0, change=lambda model: None, step=None, model=Stack):
    """What makes the arguments of a step, after so many steps before."""

    def make() -> dict:
        torch.manual_seed(0)
        found = trained(model(kind))
        found["x"] = torch.ones(8, 3)
        change(found["model"])
        for _ in range(steps):
            step(**found)
        return found

    return make


def accumulates(model, optimizer, x):
    optimizer.zero_grad()
    total = 0
    for part in x.unflatten(0, (4, -1)):
        loss = model(part).square().sum() / 4
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def keeps_zeros(model, optimizer, x):
    """Gradients are zeros at first, and so is each first sum."""
    optimizer.zero_grad(set_to_none=False)
    for part in x.unflatten(0, (4, -1)):
        model(part).square().sum().backward()
    optimizer.step()


def keeps_gradients(model, optimizer, x):
    """What the call before has left is added to."""
    for part in x.unflatten(0, (4, -1)):
        model(part).square().sum().backward()
    optimizer.step()


def in_a_comprehension(model, optimizer, x):
    optimizer.zero_grad()
    losses = [model(part).square().sum() for part in x.unflatten(0, (4, -1))]
    torch.stack(losses).sum().backward()
    optimizer.step()


def steps_each_time(model, optimizer, x):
    """The parameters are others each time, and gradients never there before."""
    for part in x.unflatten(0, (4, -1)):
        optimizer.zero_grad()
        model(part).square().sum().backward()
        optimizer.step()


def evaluates(model, optimizer, x):
    with torch.no_grad():
        return [model(part) for part in x.unflatten(0, (4, -1))]


def clips_between(model, optimizer, x):
    """The gradients that are there are computed anew each time."""
    optimizer.zero_grad()
    for part in x.unflatten(0, (4, -1)):
        model(part).square().sum().backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
    optimizer.step()


def freeze(model):
    for p in (model.emb.weight, model.blocks[1].layer.bias):
        p.requires_grad_(False)


def tie(model):
    model.emb.bias = model.blocks[0].layer.bias
    model.blocks[3].layer.weight = model.blocks[2].layer.weight


class Deep(Stack):
    def __init__(self, kind):
        super().__init__(kind, layers=6)


class Drops(Block):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class Several(Stack):
    """Gives a value twice, once from its middle, and one with no gradient."""

    def forward(self, x):
        x = self.emb(x)
        inner = self.blocks[0](x)
        x = inner * 1.0
        for block in self.blocks[1:]:
            x = block(x)
        return {"out": self.head(x), "all": x.detach() + 1, "name": "several"}


def of_several(model, optimizer, x):
    optimizer.zero_grad()
    seen = []
    for part in x.unflatten(0, (4, -1)):
        found = model(part)
        assert found["name"] == "several"
        found["out"].square().sum().backward()
        seen.append(found["all"])
    optimizer.step()
    return seen


AGAIN = {
    "accumulation": (accumulates, given(), 1),
    "gradients of the call before": (accumulates, given(steps=1, step=accumulates), 1),
    "dropout": (accumulates, given(Drops), 1),
    "frozen parameters": (accumulates, given(change=freeze), 1),
    "tied parameters": (accumulates, given(change=tie, model=Deep), 1),
    "zeros": (keeps_zeros, given(steps=1, step=keeps_zeros), 1),
    "no gradients to be set to zero": (keeps_zeros, given(), 1),
    "gradients that stay": (keeps_gradients, given(steps=1, step=keeps_gradients), 1),
    "a step each time": (steps_each_time, given(), 1),
    "no gradients": (evaluates, given(), 1),
    "gradients are changed between": (clips_between, given(), 1),
    "several results": (of_several, given(model=Several), 1),
}


@pytest.mark.parametrize("name", AGAIN)
def test_calls_are_written_again(name):
    """All but the first three: in the first one the number of features is a symbol, until it meets a weight."""
    step, make, want = AGAIN[name]
    assert captures(step, make) == want


# ---- what is traced -----------------------------------------------------------------------------


def by_hand(model, optimizer, x):
    """The lines are others each time."""
    model(x).square().sum().backward()
    model(x * 2).square().sum().backward()
    model(x * 3).square().sum().backward()


def regularises(model, optimizer, x):
    """Parameters get gradients from elsewhere in the same pass."""
    for part in x.unflatten(0, (4, -1)):
        (model(part).square().sum() + sum(p.square().sum() for p in model.parameters())).backward()


def regularises_last(model, optimizer, x):
    """Only where a call was written again."""
    for i, part in enumerate(x.unflatten(0, (4, -1))):
        loss = model(part).square().sum()
        if i == 3:
            loss = loss + sum(p.square().sum() for p in model.parameters())
        loss.backward()


def sets_factor(model, optimizer, x):
    for i, part in enumerate(x.unflatten(0, (4, -1))):
        model.factor = 1.0 + (i == 2)
        model(part).square().sum().backward()
    model.factor = 1.0


class Factor(Stack):
    def __init__(self, kind):
        super().__init__(kind)
        self.factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


class Keeps(Stack):
    """A value that leaves it on another way."""

    def forward(self, x):
        x = super().forward(x)
        self.last = x.square()
        return x


def reads_last(model, optimizer, x):
    seen = []
    for part in x.unflatten(0, (4, -1)):
        model(part).sum().square().backward()
        seen.append(model.last.detach())
    model.last = None
    return seen


class Counts(Stack):
    def __init__(self, kind):
        super().__init__(kind)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x) * self.count


def hooks_a_weight(model, optimizer, x):
    """Behind the last call, which was written again; the gradient that the hook sees is kept."""
    seen = []
    for i, part in enumerate(x.unflatten(0, (4, -1))):
        y = model(part)
        if i == 3:
            model.head.weight.register_hook(seen.append)
        y.square().sum().backward()
    return seen


def hooks_results(model, optimizer, x):
    for part in x.unflatten(0, (4, -1)):
        y = model(part)
        y.register_hook(lambda g: g * 2)
        y.square().sum().backward()


def hooks_results_in_c(model, optimizer, x):
    for part in x.unflatten(0, (4, -1)):
        y = model(part)
        y.register_hook(torch.neg)
        y.square().sum().backward()


def hooks_results_at_last(model, optimizer, x):
    for i, part in enumerate(x.unflatten(0, (4, -1))):
        y = model(part)
        if i == 3:
            y.register_hook(lambda g: g * 2)
        y.square().sum().backward()


def hooks_nodes(model, optimizer, x):
    """What autograd has made of each call, before it goes back through it."""
    for part in x.unflatten(0, (4, -1)):
        y = model(part)
        y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
        y.square().sum().backward()


def clears_now_and_then(model, optimizer, x):
    for i, part in enumerate(x.unflatten(0, (4, -1))):
        loss = model(part).square().sum()
        if i % 2 == 0:
            optimizer.zero_grad()
        loss.backward()
    optimizer.step()


def asks_for_some(model, optimizer, x):
    """Gradients that the engine gives back, and adds to none."""
    found = []
    for i, part in enumerate(x.unflatten(0, (4, -1))):
        loss = model(part).square().sum()
        if i < 2:
            loss.backward()
        else:
            found += torch.autograd.grad(loss, [model.head.weight])
    return found


def with_gradients(model, optimizer, x):
    w = model.emb.weight.sum()
    for part in x.unflatten(0, (4, -1)):
        model(part * w).square().sum().backward(retain_graph=True)


def hook_a_weight(model):
    model.head.weight.register_hook(lambda g: g * 2)


def hook_behind_sums(model):
    def halve(p):
        p.grad.mul_(0.5)

    model.head.bias.register_post_accumulate_grad_hook(halve)


TRACED = {
    "by hand": (by_hand, given(), 0),
    "gradients from elsewhere": (regularises, given(), 0),
    "an attribute that is set": (sets_factor, given(model=Factor), None),
    "a value that is kept": (reads_last, given(model=Keeps), 0),
    "a buffer that is written": (accumulates, given(model=Counts), 0),
    "arguments with gradients": (with_gradients, given(), 0),
    "a hook on a weight": (accumulates, given(change=hook_a_weight), None),
    "hooks of results": (hooks_results, given(), 0),
    "hooks of results that are no code": (hooks_results_in_c, given(), 0),
    "hooks of nodes": (hooks_nodes, given(), 0),
    "a hook of the last result": (hooks_results_at_last, given(), 1),
    "a hook behind sums": (accumulates, given(change=hook_behind_sums), None),
}


@pytest.mark.parametrize("name", TRACED)
def test_other_calls_are_traced(name):
    """Or written again where that is right: the capture is the same."""
    step, make, want = TRACED[name]
    found = captures(step, make)
    assert want is None or found == want


OTHER = {
    "a sum of losses": in_a_comprehension,
    "gradients from elsewhere at last": regularises_last,
    "a hook of a weight at last": hooks_a_weight,
    "cleared now and then": clears_now_and_then,
    "some gradients": asks_for_some,
}


@pytest.mark.parametrize("name", OTHER)
def test_what_comes_later_is_right(name):
    """What differs behind a call that was written again: the outputs are computed alike, be it in another order."""
    step, make = OTHER[name], given()
    with mock.patch.object(calls, "is_in_loop", lambda outermost: False):
        want = captured(step, **make())
    found = captured(step, **make())
    one, other = outputs(found), outputs(want)
    del one["nodes"], other["nodes"]
    assert one == other


def test_several_models_in_turn():
    """Each is a kind of its own; the second one is given as many features from the first call on."""

    def step(one, other, x):
        for part in x.unflatten(0, (4, -1)):
            one(part).square().sum().backward()
            other(part).sum().square().backward()

    def make():
        return {"one": Stack(), "other": Stack(layers=3), "x": torch.ones(8, 3)}

    assert captures(step, make) == 3
