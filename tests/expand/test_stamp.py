"""A stamped capture is the capture without stamps: the same outputs of the same inputs by the same ops."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import fx, nn, optim

from spmd.expand.captured import Captured
from spmd.expand.stamp import optimizers
from spmd.expand.stamp.parts import Coupled, differing, parts_of, stamp
from tests.expand.test_capture import captured


def outputs(found: Captured) -> dict[str, str]:
    """Each output as a text that two captures share if they compute it in the same way, whatever their order."""
    text: dict[fx.Node, int] = {}
    names = iter(found.inputs)

    def of(n: fx.Node) -> int:
        if n.op == "placeholder":
            return hash(("input", str(next(names))))
        if n.op == "get_attr":
            return hash(("constant", repr(found.constants[n.target].tolist())))
        args = repr(fx.map_arg((n.args, n.kwargs), lambda m: f"#{text[m]}"))
        return hash((str(n.target), args, n.meta.get("phase"), n.meta.get("new value of")))

    for n in found.graph.nodes:
        if n.op != "output":
            text[n] = of(n)
    values = found.graph.output_node().args[0]
    live = {str(to): text[n] for to, n in zip(found.outputs, values, strict=True)}
    return live | {"nodes": len(found.graph.nodes)}


@contextlib.contextmanager
def plain():
    """Inside, nothing is stamped."""
    with mock.patch("spmd.expand.stamp.attempts.updates_stamped", contextlib.nullcontext):
        yield


class Vectors(nn.Module):
    """Four vectors, so that two of them are stamped."""

    def __init__(self):
        super().__init__()
        self.vectors = nn.ParameterList(torch.arange(3.0) + i for i in range(4))

    def forward(self, x):
        for v in self.vectors:
            x = torch.tanh(x * v)
        return x


def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    return loss


def stamps(step, **given) -> int:
    """How many parts are stamped in a capture, after it was seen to be equal to the one without stamps."""
    with plain():
        want = captured(step, **given)
    with mock.patch.object(optimizers, "stamp", side_effect=stamp) as stamped:
        found = captured(step, **given)
    assert outputs(found) == outputs(want)
    return stamped.call_count


def trained(optimizer_of, steps=0, step=train) -> dict:
    """A model and its optimiser after so many steps, and an argument."""
    model = Vectors()
    given = {"model": model, "optimizer": optimizer_of(list(model.parameters())), "x": torch.ones(3)}
    for _ in range(steps):
        step(**given)
    return given


# ---- updates ----------------------------------------------------------------------------------

OPTIMIZERS = {
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "foreach": lambda p: optim.Adadelta(p, foreach=True),
    "fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "rate is a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.1)),
}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_each_parameter(name, steps):
    """The first step, which makes the state, and the next one: of four parameters of a kind, two are stamped."""
    if name == "foreach" or steps or name == "momentum":
        assert stamps(train, **trained(OPTIMIZERS[name], steps)) == 2


def test_what_tells_parameters_apart_is_seen():
    """Kinds of one or two are traced: groups, flags, missing gradients, and state that only some have."""

    def groups(p):
        return optim.SGD([{"params": p[:3], "weight_decay": 0.1}, {"params": p[3:]}], lr=0.1)

    assert stamps(train, **trained(groups)) == 1
    frozen = trained(optim.Adagrad)
    frozen["model"].vectors[1].requires_grad_(False)
    assert stamps(train, **frozen) == 1
    loaded = trained(optim.AdamW, steps=1)
    del loaded["optimizer"].state[loaded["model"].vectors[0]]
    assert stamps(train, **loaded) == 1
    half = trained(optim.SGD)
    half["model"].vectors[2] = nn.Parameter(half["model"].vectors[2].detach().half())
    half["optimizer"] = optim.SGD(half["model"].parameters())
    assert stamps(train, **half) == 1


def as_of_torch(step) -> type:
    """An optimiser with this step that passes for one of torch."""
    step.__module__ = "torch.optim.other"
    return type("Other", (optim.SGD,), {"step": step, "__module__": step.__module__})


class Lengths(nn.Module):
    """Four vectors of one length, and three of another."""

    def __init__(self):
        super().__init__()
        self.one = nn.ParameterList(torch.arange(3.0) + i for i in range(4))
        self.other = nn.ParameterList(torch.arange(5.0) + i for i in range(3))

    def forward(self, x):
        for v in self.one:
            x = torch.tanh(x * v)
        for v in self.other:
            x = torch.tanh(x.sum() * v)
        return x


def of_lengths(optimizer_of) -> dict:
    model = Lengths()
    return {"model": model, "optimizer": optimizer_of(list(model.parameters())), "x": torch.ones(3)}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_kinds_that_differ_in_lengths_are_traced_once_each(name):
    """Two of the first kind show that parameters are apart: two and two of the rest are stamped."""
    assert stamps(train, **of_lengths(OPTIMIZERS[name])) == 4


def test_an_update_that_depends_on_lengths_is_traced_for_two_of_each_kind():
    """The capture begins again."""

    def by_length(self, closure=None):
        for p in self.param_groups[0]["params"]:
            with torch.no_grad():
                p.sub_(p.grad, alpha=1 / len(p))

    assert stamps(train, **of_lengths(as_of_torch(by_length))) == 3


def test_new_values_are_seen_afterwards():
    """Code behind the step, such as an average of parameters, reads what was stamped; so does another optimiser."""

    def step(model, optimizer, other, x):
        train(model, optimizer, x)
        mean = [p.detach() * 0.5 for p in model.parameters()]
        other.step()
        return mean, model(x)

    given = trained(optim.AdamW, steps=1)
    assert stamps(step, other=optim.SGD(given["model"].parameters(), lr=0.1), **given) == 4


class OfTheUser(optim.SGD):
    """Knows one of its parameters."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][-1].mul_(0.5)


def with_closure(model, optimizer, x):
    def closure():
        return train_without_step(model, optimizer, x)

    return optimizer.step(closure)


def train_without_step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return loss


def test_code_of_the_user_in_a_step_sees_all_parameters():
    """Subclasses, closures and hooks: traced in full."""
    assert stamps(train, **trained(OfTheUser)) == 0
    assert stamps(with_closure, **trained(optim.SGD)) == 0
    hooked = trained(optim.SGD)
    counts = []
    hooked["optimizer"].register_step_pre_hook(lambda o, *_: counts.append(len(o.param_groups[0]["params"])))
    nothing = contextlib.nullcontext(mock.Mock(writes=[]))
    with mock.patch("spmd.expand.capture.undone", lambda *_: nothing):  # it would empty the list
        assert stamps(train, **hooked) == 0
    assert set(counts) == {4}


def test_gradients_in_one_memory_are_not_stamped():
    """A write into one would be a write into the other."""

    def step(model, optimizer, x):
        flat = torch.ones(12, dtype=x.dtype) * x.sum()
        for p, grad in zip(model.parameters(), flat.split(3), strict=True):
            p.grad = grad
        optimizer.step()

    assert stamps(step, **trained(lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1))) == 0


def test_coupled_updates_are_traced_in_full():
    """What is found out when two parameters were traced: the capture begins again. Here the norm of all gradients."""

    def clipped(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        optim.SGD.step.__wrapped__(self)

    assert stamps(train, **trained(as_of_torch(clipped))) == 0


def test_a_step_that_calls_a_step_is_traced_in_full():
    """Whichever of the two narrows the groups, the other would see it."""

    def twice(self, closure=None):
        optim.SGD.step(self)
        optim.SGD.step(self)

    assert stamps(train, **trained(as_of_torch(twice))) == 0


# ---- parts ------------------------------------------------------------------------------------


def graph_of(text: str) -> dict[str, fx.Node]:
    """The nodes of a graph, by name: lines such as "c = add a b", where what has no line is a placeholder."""
    graph, nodes = fx.Graph(), {}
    for line in text.split("; "):
        name, _, call = line.partition(" = ")
        op, *args = call.split()
        for a in args:
            if a.isalpha() and a not in nodes:
                nodes[a] = graph.placeholder(a)
        given = tuple(nodes[a] if a.isalpha() else float(a) for a in args)
        nodes[name] = graph.create_node("call_function", getattr(torch, op), given, name=name)
    return nodes


@pytest.mark.parametrize(
    "text, why",
    [
        ("c = mul a 2; d = mul b 2", ""),
        ("one = mul r 3; c = mul a one; d = mul b one", ""),  # both read what reads neither
        ("c = mul a 2; d = mul b 3", "mul"),
        ("c = mul a 0; d = mul b -0", "mul"),
        ("c = mul a 2; d = add b 2", "mul"),
        ("c = mul a 2; e = mul b 2; d = neg e", "1 nodes and 2"),
        ("c = mul a 2; d = mul b a", "two parts"),
        ("f = neg a; c = mul b 2; d = mul b 2", "another part"),
    ],
)
def test_parts_are_apart_and_alike(text, why):
    """Of two parameters a and b with the new values c and d."""
    nodes = graph_of(text)
    made = [n for n in nodes.values() if n.op == "call_function"]
    try:
        one, other = parts_of(made, [([nodes["a"]], [nodes["c"]]), ([nodes["b"]], [nodes["d"]])])
        found = differing(one, other, {}.__getitem__)
    except Coupled as error:
        found = str(error)
    assert why in found and bool(why) == bool(found)
