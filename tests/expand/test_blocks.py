"""A capture with stamped blocks is the capture without: the same outputs of the same inputs by the same ops."""

import contextlib
import inspect
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from spmd.expand.capture import capture
from spmd.expand.captured import Captured
from spmd.expand.stamp import blocks
from spmd.expand.state import State
from tests.expand.test_stamp import outputs, train


@contextlib.contextmanager
def plain():
    """Inside, no block is stamped."""
    with mock.patch("spmd.expand.stamp.attempts.repeated", lambda roots: {}):
        yield


def captured(step, **given) -> Captured:
    """The capture of `step(**given)`, with stamps."""
    return capture(step, given, lambda named: step(**named), State.of(given), stamp_blocks=True)


class Block(nn.Module):
    """A layer, a buffer, a residual."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return x + torch.tanh(self.layer(x)) * self.scale


class Stack(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, kind=Block, layers=4):
        super().__init__()
        self.emb = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(kind() for _ in range(layers))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def captures(step, **given) -> tuple[Captured, int]:
    """A capture, which was seen to be equal to the one without stamps, and how many calls are stamped in it."""
    with plain():
        want = captured(step, **given)
    calls = []
    real = blocks._Stamped.forward
    with mock.patch.object(blocks._Stamped, "forward", lambda self: (calls.append(self), real(self))[1]):
        found = captured(step, **given)
    assert outputs(found) == outputs(want)
    assert sorted(map(described, found.graph.nodes)) == sorted(map(described, want.graph.nodes))
    return found, len(calls)


def described(node) -> str:
    return f"{node.target} {node.meta.get('val')} {node.meta.get('phase')}"


def trained(model=None, **given) -> dict:
    model = model or Stack(**given)
    return {"model": model, "optimizer": optim.SGD(model.parameters(), lr=0.1), "x": torch.ones(6, 3)}


def test_blocks_are_those_of_each_module():
    """Of four blocks, two are stamped: forward, backward and origins."""
    found, calls = captures(train, **trained())
    assert calls == 2
    with plain():
        want = captured(train, **trained())
    assert origins(found) == origins(want)


def origins(found: Captured) -> list[str]:
    """Where the nodes come from, in any order: modules, lines, and the sites that they are."""
    keys = "origin", "sites", "gradient of"
    said = [(n.target, *map(n.meta.get, keys)) for n in found.graph.nodes if n.op == "call_function"]
    return sorted(
        f"{target} {origin} {[sorted(name for s in x or () for name in s.names) for x in sites]}"
        for target, origin, *sites in said
    )


class Dropping(Block):
    """Draws random numbers; gives what it is given, too."""

    def forward(self, x, mask=None, times=1.0):
        return F.dropout(super().forward(x) * mask, 0.5) * times, mask


class Masked(Stack):
    """Arguments that all calls share, results that are arguments."""

    def forward(self, x):
        x = self.emb(x)
        mask = (x > 0).to(x.dtype)
        for block in self.blocks:
            x, mask = block(x, mask=mask, times=2.0)
        return self.head(x)


class Again(Stack):
    """One block many times, as in ALBERT, of which there are others."""

    def forward(self, x):
        x = self.emb(x)
        for i in (0, 1, 0, 0, 2, 2, 1):
            x = self.blocks[i](x)
        return self.head(x)


class Begun(Stack):
    """Blocks that begin with parameters, of which two get one gradient, and one is itself what the first is given."""

    def __init__(self, layers=4):
        super().__init__(layers=layers)
        self.one, self.other, self.alone = (nn.Parameter(torch.ones(6, 4)) for _ in range(3))

    def forward(self, x):
        for begin in (self.emb(x), self.alone, self.one + self.other):
            for block in self.blocks:
                begin = block(begin)
            yield self.head(begin)


def writes_gradients(model, optimizer, x):
    """Into each by its own factor: the gradient of one parameter is no other one's."""
    optimizer.zero_grad()
    for result in model(x):
        result.square().sum().backward()
    for i, p in enumerate(model.parameters()):
        p.grad.mul_(i + 2)
    optimizer.step()


def accumulate(model, optimizer, x):
    """Two passes, of which the second one is stamped throughout; a term with all parameters."""
    optimizer.zero_grad()
    for part in (x, x * 2):
        (model(part).square().sum() + sum(p.square().sum() for p in model.parameters())).backward()
    optimizer.step()


def evaluate(model, optimizer, x):
    with torch.no_grad():
        return model(x)


def cast(model, optimizer, x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().sum()
    loss.backward()
    return loss


STAMPED = {
    "dropout and arguments": (Masked, {"kind": Dropping}, train, 2),
    "one block again": (Again, {}, train, 5),
    "accumulation": (Stack, {}, accumulate, 6),
    "gradients of parameters before them": (Begun, {}, writes_gradients, 8),
    "no gradients": (Stack, {}, evaluate, 2),
    "autocast": (Stack, {}, cast, 1),  # the first one is given bfloat16
}


@pytest.mark.parametrize("name", STAMPED)
def test_calls_of_a_kind_are_stamped(name):
    """However often, and whatever is around them."""
    model, given, step, want = STAMPED[name]
    assert captures(step, **trained(model(**given)))[1] == want


def frozen_part():
    model = Stack(layers=6)
    for block in model.blocks[3:]:
        block.layer.bias.requires_grad_(False)
    return model


def test_kinds_are_told_apart():
    """Blocks with a frozen parameter are another kind; so are those of another attribute, or whose input is."""
    assert captures(train, **trained(frozen_part()))[1] == 2
    model = Stack()
    for i, block in enumerate(model.blocks):
        block.number = i
    assert captures(train, **trained(model))[1] == 2  # nobody reads it
    model = Stack()
    model.emb.requires_grad_(False)
    assert captures(train, **trained(model))[1] == 1


class Decides(Block):
    """By the value of a tensor that the trace knows, and by a number."""

    def forward(self, x, depth, module=0):
        return super().forward(x) * (2.0 if depth.item() > 2 or module > 3 else 1.0)


class Depths(Stack):
    def forward(self, x):
        x = self.emb(x)
        for i, block in enumerate(self.blocks):
            x = block(x, torch.tensor(i), module=1)
        return self.head(x)


class Counts(Block):
    """Decides by a count in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        return super().forward(x) * (2.0 if self.count == 0 else 1.0)


def test_values_that_are_known_tell_calls_apart():
    """Python code may decide by them, and the first two calls do not show what the third one would."""
    assert captures(train, **trained(Depths(Decides)))[1] == 0
    assert captures(train, **trained(Stack(Counts)))[1] == 0


def test_code_sees_the_forward_of_a_module():
    """Its signature, from which some models find out what to pass."""

    def step(model, optimizer, x):
        assert list(inspect.signature(model.blocks[0].forward).parameters) == ["x"]
        return train(model, optimizer, x)

    assert captures(step, **trained())[1] == 2


KEPT: list = []


class Leaks(Block):
    """A loss that leaves the module on another way."""

    def forward(self, x):
        x = super().forward(x)
        KEPT.append(x.mean())
        return x


def with_losses(model, optimizer, x):
    loss = model(x).square().sum() + torch.stack(KEPT).sum()
    KEPT.clear()
    loss.backward()
    return loss


class Numbered(Block):
    """Counts its calls in a global, for code behind it."""

    def forward(self, x):
        COUNT[0] += 1
        return super().forward(x)


COUNT = [0]


def counted(model, optimizer, x):
    COUNT[0] = 0
    loss = model(x).square().sum() / COUNT[0]
    loss.backward()
    COUNT[0] = 0
    return loss


class Writes(Block):
    def forward(self, x):
        self.scale.mul_(0.5)
        return super().forward(x)


class WritesIntoArgument(Block):
    def forward(self, x):
        return super().forward(x.add_(1.0))


class Shared(Block):
    """Holds a parameter that it does not own."""

    def forward(self, x):
        return super().forward(x) * self.others[0].sum()


def sharing() -> nn.Module:
    model = Stack(Shared)
    for block in model.blocks:
        block.others = [model.head.weight]
    return model


class Hooked(Block):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: KEPT.append(g.sum()) or KEPT.clear())
        return y


class GivesView(Block):
    def forward(self, x):
        return x.view(x.shape)


class Tied(Stack):
    def __init__(self):
        super().__init__(layers=5)
        self.blocks[0].layer.weight = self.blocks[1].layer.weight


def gradients_twice(model, optimizer, x):
    loss = model(x).square().sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sum(g.square().sum() for g in grads).backward()
    return loss


def cut(model, optimizer, x):
    """The first blocks get no gradient."""
    x = model.emb(x)
    for i, block in enumerate(model.blocks):
        x = block(x).detach() if i == 2 else block(x)
    x.square().sum().backward()
    return x


def summed(model, optimizer, x):
    """The last gradient is one number in all places."""
    x = model.emb(x)
    for block in model.blocks:
        x = block(x)
    x.sum().backward()
    return x


def checkpointed(model, optimizer, x):
    x = model.emb(x)
    for block in model.blocks:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    x.square().sum().backward()
    return x


def computed_again(model, optimizer, x):
    """Checkpoints that run the forward pass without gradients, stamped, and again in the backward pass, traced."""
    x = model.emb(x)
    for block in model.blocks:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
    x.square().sum().backward()
    return x


PLAIN = {
    "a count": (lambda: Stack(Numbered), counted),
    "reentrant checkpoints": (Stack, computed_again),
    "a loss that leaves otherwise": (lambda: Stack(Leaks), with_losses),
    "a buffer is written": (lambda: Stack(Writes), train),
    "an argument is written": (lambda: Stack(WritesIntoArgument), train),
    "a parameter of others": (sharing, train),
    "a hook": (lambda: Stack(Hooked), train),
    "a view of an argument": (lambda: Stack(GivesView), train),
    "gradients of gradients": (Stack, gradients_twice),
    "no gradients for the first": (Stack, cut),
    "an expanded gradient": (Stack, summed),
    "activation checkpoints": (Stack, checkpointed),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_cannot_be_shown_is_traced(name):
    """The capture is right all the same: what was stamped is thrown away."""
    model, step = PLAIN[name]
    found, _ = captures(step, **trained(model()))
    assert len(found.outputs) > 1


def test_tied_blocks_are_traced():
    """Of five, two share a weight."""
    assert captures(train, **trained(Tied()))[1] == 1


class Scaled(Block):
    """A block that code outside sets."""

    factor = 1.0

    def forward(self, x):
        return super().forward(x) * self.factor


def sets_factors(model, x):
    for i, block in enumerate(model.blocks):
        block.factor = 1.0 + (i == 2)
    return model(x).sum()


def sets_modes(model, x):
    model.eval()
    first = model(x)
    model.train()
    return first + model(x)


class Dropped(Block):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


SHARED: dict = {}


class Reading(Block):
    """A block that reads a tensor that it is not given."""

    def forward(self, x):
        return super().forward(x) * SHARED["mask"]


def sets_masks(model, x):
    for part in x.chunk(2):
        SHARED["mask"] = part[:, :1]
        model(part).sum().backward()
        SHARED.clear()


@pytest.mark.parametrize(
    "kind, step", [(Scaled, sets_factors), (Dropped, sets_modes), (Reading, sets_masks)], ids=lambda x: x.__name__
)
def test_what_code_outside_sets_during_the_step_is_seen(kind, step):
    """Attributes and modes when a module is called count, not those when the step begins; so do tensors around it."""
    captures(step, model=Stack(kind), x=torch.rand(6, 3))


PARTS = {
    "unflatten": lambda x: x.unflatten(0, (3, -1)),
    "chunk": lambda x: x.chunk(3),
    "split": lambda x: x.split(x.shape[0] // 3),
    "tensor_split": lambda x: torch.tensor_split(x, 3),
    "slices": lambda x: [x[i * (len(x) // 3) : (i + 1) * (len(x) // 3)] for i in range(3)],
}


@pytest.mark.parametrize("way", PARTS)
def test_micro_batches_are_stamped(way):
    """A loop over parts of the batch in the step: two calls of blocks are traced, those of all parts are stamped."""

    def step(model, x):
        return sum(_backward(model(part).square().sum()) for part in PARTS[way](x))

    given = trained(Stack())
    assert captures(step, model=given["model"], x=torch.ones(6, 3))[1] == 3 * 4 - 2


def _backward(loss):
    loss.backward()
    return loss.detach()
