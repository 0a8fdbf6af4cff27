"""How long gathered parameters live: in the program, and by `reshard_after_forward`."""

import functools

import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from spmd import FullyShard, Program, Shard
from spmd.expand.passes.keep_gathered import gathered_bytes, keep_gathered
from spmd.expand.passes.passes import Buckets
from tests.expand.places.trained import check, plain_step, train_step

WIDTH, LAYERS = 16, 4


class Deep(nn.Module):
    """Equal layers of two products each, and a norm, behind one wide product."""

    def __init__(self, wide: int = 1):
        super().__init__()
        self.enter = nn.Linear(WIDTH * wide, WIDTH, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


@functools.cache
def program(reshard: bool | str, wide: int = 1) -> Program:
    model, batch = Deep(wide), (torch.zeros(4, WIDTH * wide), torch.zeros(4, WIDTH))
    mesh = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    over = {"dp": Shard(0)}
    said = FullyShard("dp", 3, reshard)
    sums = "numbers_late", Buckets(25.0, 1.0, ("all_reduce",))  # `gathered_bytes` knows no buckets of gathers
    compiled = spmd.compile(step, mesh, inputs={"x": over, "y": over}, fully_shard=said, passes=sums)
    return compiled.program_for(model, optim.SGD(model.parameters(), 0.1), *batch)


def gathers(found: Program) -> int:
    return sum(c.kind == "all_gather" for c in found.collectives)


LAYER = 4 * sum(p.numel() for p in Deep().layers[0].parameters())


def test_at_most_two_layers_are_gathered_at_once():
    """Whatever the number of layers; and nothing is gathered when the update begins."""
    alive = gathered_bytes(program(True))
    assert 0 < max(alive) <= 2 * LAYER
    assert alive[-1] == 0


def test_false_keeps_what_was_gathered():
    """One gather for each parameter, and those that the backward reads are alive at the end of the forward."""
    kept, freed = program(False), program(True)
    assert gathers(kept) == len(list(Deep().parameters())) < gathers(freed)
    assert max(gathered_bytes(kept)) > LAYERS * 2 * 4 * WIDTH * WIDTH


def test_cost_keeps_what_costs_nothing():
    """The wide product needs as much as eight others: so much of the last layers is kept, in no more memory."""
    kept, freed = program("cost", wide=8), program(True, wide=8)
    assert gathers(kept) <= gathers(freed) - 7
    assert max(gathered_bytes(kept)) == max(gathered_bytes(freed))


def test_the_given_program_is_not_changed():
    """A pass gives another program."""
    given = program(True)
    text = str(given)
    keep_gathered(given)
    assert str(given) == text


def test_kept_parameters_train_as_on_one_device():
    """Micro-batches, tied and frozen parameters, with gathers kept by cost, and all kept."""
    check({"dp": 2}, lambda p: optim.SGD(p, 0.1), train_step, 1, fully_shard=FullyShard("dp", 3, "cost"))
    check({"dp": 3}, lambda p: optim.SGD(p, 0.1), plain_step, 2, fully_shard=FullyShard("dp", 3, False))


def test_the_norms_of_all_gradients_travel_together():
    """Clipping sends one small all-reduce, with a number for each gradient."""
    numbers = [c for c in program(True).collectives if c.kind == "all_reduce" and c.tensors > 1]
    (sent,) = numbers
    assert len(list(Deep().parameters())) <= sent.tensors == sent.nbytes // 4
