"""Between the passes of a fully sharded model its modules have the parameters that train: what is written there counts,
or is an error.
"""

from __future__ import annotations

import pytest
import torch
import ways
from torch import nn

from spmd import DTensor, LocalTensorMode
from tests.parallel.test_fully_shard import (
    BATCHES,
    MESHES,
    SAID,
    equal,
    loss_of,
    mesh_of,
    model,
    numbers,
    on_two,
    part_on,
    seen,
    shard_all,
)

pytestmark = pytest.mark.usefixtures(numbers.__name__)


@torch.no_grad()
def in_place(net):
    for module in (net.head, net.frozen, net.blocks[0].up):
        module.weight.mul_(2)


def new_parameters(net):
    net.frozen.weight = nn.Parameter(net.frozen.weight.detach() * 2)
    net.blocks[0].up.weight = nn.Parameter(net.blocks[0].up.weight.detach() * 2)


def of_data(net):
    for module in (net.head, net.frozen, net.blocks[0].up):
        module.weight.data.mul_(2)
        module.weight.data = module.weight.data + 1


def initialized(net):
    for module in (net.head, net.frozen, net.blocks[0].up):
        nn.init.constant_(module.weight, 0.25)


def others_are_trained(net):
    net.head.weight.requires_grad_(False)
    net.frozen.requires_grad_(True)


WRITES = {
    "nothing": lambda net: None, "in place": in_place, "data": of_data, "init": initialized, "new": new_parameters,
    "frozen": others_are_trained, "zeros": lambda net: net.zero_grad(),
    "clipped": lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, foreach=False),
    "parameters": lambda net: [torch.no_grad()(p.mul_)(2) for p in net.parameters()],
    "data of parameters": lambda net: [p.data.mul_(2) for p in net.parameters()],
}  # fmt: skip
LOOKS = {
    "no_grad": lambda net: torch.no_grad()(net)(BATCHES[0]),
    "inference": lambda net: torch.inference_mode()(net)(BATCHES[0]),
    "no backward": lambda net: net(BATCHES[0]),
}  # fmt: skip


KEPT = {  # what keeps whole parameters behind a forward, and what is refused then: writes into them, or behind them
    ("no backward", "as it comes"): ("in place", "init", "data", "frozen", "new", "data of parameters"),
    ("no_grad", "kept"): ("data", "data of parameters"),
}
RIGHT = [("gloo", "no_grad", "as it comes", ("in place", "data", "zeros"))] + [
    ("simulated", look, said, (write,)) for look, said, writes in (
        ("no_grad", "as it comes", WRITES), ("inference", "as it comes", ("nothing", "in place", "data")),
        ("no_grad", "freed", ("in place", "data")), ("no_grad", "offloaded", ("in place", "data")),
        *[(*kept, [write for write in WRITES if write not in refused]) for kept, refused in KEPT.items()],
    ) for write in writes
]  # fmt: skip


def written_in_between(net, look, write, part=lambda ids: ids) -> dict:
    """A pass, a forward that only looks, a change of the model, and a pass."""
    loss_of(net, part(BATCHES[0])).backward()
    LOOKS[look](net)
    WRITES[write](net)
    loss_of(net, part(BATCHES[1])).backward()
    return seen(net)


def written_in_ways(look, said, writes):
    over = mesh_of({"dp": 4})
    nets = [shard_all(model("uneven"), over, **SAID[said]) for _ in writes]
    return [written_in_between(net, look, write, part_on(over)) for net, write in zip(nets, writes, strict=True)]


@pytest.mark.parametrize("way, look, said, writes", RIGHT)
def test_between_passes_modules_have_the_parameters_that_train(way, look, said, writes, request):
    """Whatever is written there, after whatever forward, is what is computed with."""
    gloo4 = request.getfixturevalue("gloo4") if way == "gloo" else None
    want = [written_in_between(model("uneven"), look, write) for write in writes]
    for rank in ways.run(way, gloo4, written_in_ways, look, said, writes):
        for got, found, write in zip(rank, want, writes, strict=True):
            assert set(got) == set(found), write
            assert all(torch.allclose(got[name], x, rtol=1e-10, atol=1e-12) for name, x in found.items()), write


def test_gradients_may_be_cleared_between_a_forward_and_its_backward():
    want = model("uneven")
    loss_of(want, BATCHES[1]).backward()
    with LocalTensorMode(4):
        over = mesh_of(MESHES["line"])
        net = shard_all(model("uneven"), over)
        loss_of(net, part_on(over)(BATCHES[0])).backward()
        loss = loss_of(net, part_on(over)(BATCHES[1]))
        assert not isinstance(net.head.weight, DTensor)  # for losses that compute with it
        assert all(isinstance(p, DTensor) for p in net.parameters())
        net.zero_grad()
        loss.backward()
        equal(seen(net), seen(want))


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return super().forward(x)


@torch.no_grad()
def written_whole():
    net = on_two(nn.Linear(2, 2))
    net.unshard()
    net.weight.mul_(2)
    net.reshard()


def written_before_the_backward():
    net = on_two(nn.Linear(2, 2), reshard_after_forward=True)
    loss = net(torch.ones(1, 2)).sum()
    in_place_of(net)
    loss.backward()


@torch.no_grad()
def in_place_of(net):
    net.weight.mul_(2)


def untied():
    net = on_two(model())
    net.head.weight = nn.Parameter(net.head.weight.detach() * 2)
    net(BATCHES[0])


def called_with(net: nn.Module, weight) -> None:
    torch.func.functional_call(net, {"weight": weight(net.weight)}, torch.ones(1, 2))


def asked_for(net):
    torch.autograd.grad(net(torch.ones(1, 2)).sum(), list(net.parameters()), allow_unused=True)


def grown(change):
    net = shard_all(model(), mesh_of({"dp": 2}))
    net(BATCHES[0])
    change(net)
    net(BATCHES[0])


LOST = {
    "grad": (lambda: asked_for(on_two(nn.Linear(2, 2))), "autograd.grad.*backward"),
    "in a forward": (lambda: on_two(Clamped(2, 2))(torch.ones(1, 2)), "weight.*were written into"),
    "whole": (written_whole, "written into.*reshard()"),
    "before the backward": (written_before_the_backward, "between its forward and its backward"),
    "untied": (untied, "words.weight and head.weight are one parameter"),
    "gone": (lambda: torch.nn.utils.parametrizations.weight_norm(on_two(nn.Linear(2, 2)))(torch.ones(1, 2)),
             "weight.*before fully_shard"),
    "other layer": (lambda: grown(lambda net: setattr(net, "frozen", nn.Linear(8, 8))), "frozen.weight.*came later"),
    "beside": (lambda: grown(lambda net: net.frozen.register_parameter("scale", nn.Parameter(torch.ones(1)))),
               "frozen.scale.*came later"),
    "other": (lambda: called_with(on_two(nn.Linear(2, 2)), lambda p: torch.ones(2, 2)), "functional_call"),
    "other shards": (lambda: called_with(on_two(nn.Linear(2, 2)), lambda p: p * 2), "functional_call"),
}  # fmt: skip


@pytest.mark.parametrize("look, said, write", [(*kept, write) for kept, refused in KEPT.items() for write in refused])
def test_writes_that_would_be_lost_are_errors(look, said, write):
    with LocalTensorMode(2), pytest.raises(RuntimeError, match=r"reshard\(\)|leaf|was a parameter"):
        written_in_between(shard_all(model(), mesh_of({"dp": 2}), **SAID[said]), look, write)


@pytest.mark.parametrize("what", LOST)
def test_what_would_be_lost_is_an_error(what):
    make, said = LOST[what]
    with LocalTensorMode(2), pytest.raises(RuntimeError, match=said):
        make()
