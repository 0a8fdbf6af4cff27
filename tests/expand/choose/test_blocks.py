"""Values that the graph cuts into blocks may be packed, also where nobody says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import LocalTensorMode, MeshTopoInfo, Shard
from spmd.expand.choose.choice import Packing
from spmd.expand.choose.choosers import Choosers
from tests.expand.places.random_trainings import NEAR
from tests.expand.places.trained import whole
from tests.expand.side_by_side import seeded

WIDTH, HEADS = 16, 4
ALONG_TP = {"fused.*": {"tp": Shard(0)}, "out.weight": {"tp": Shard(1)}}
BATCH = {"x": {"dp": Shard(0)}}


def through_view(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As vision transformers do: three, heads and features of a head become dims, and the first is taken apart."""
    return y.view(*y.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)


def through_select(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As `nn.MultiheadAttention` does."""
    y = y.unflatten(-1, (3, WIDTH)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return y[0], y[1], y[2]


WAYS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "split": lambda y: y.split(WIDTH, -1),
    "chunk": lambda y: y.chunk(3, -1),
    "slices": lambda y: (y[..., :WIDTH], y[..., WIDTH : 2 * WIDTH], y[..., 2 * WIDTH :]),
    "unbind": lambda y: y.view(*y.shape[:2], 3, WIDTH).unbind(2),
    "view": through_view,
    "select": through_select,
}
"""How q, k and v are taken from one tensor."""


class Attention(nn.Module):
    """With one weight for q, k and v."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.fused, self.out = way, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = WAYS[self.way](self.fused(x))
        if parts[0].ndim == 3:
            parts = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts]
        y = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(-2))


def train_step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained(model: nn.Module, step: Callable) -> dict[str, torch.Tensor]:
    """The losses of two steps and the parameters after them, whole."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    g = torch.Generator().manual_seed(1)
    given = [torch.randn(2, 6, WIDTH, generator=g, dtype=torch.float64) for _ in range(2)]
    losses = {f"loss {i}": whole(step(model, optimizer, x)) for i, x in enumerate(given)}
    return losses | {name: whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "way, said",
    [*[(way, {"params": ALONG_TP}) for way in WAYS], ("split", {"params": {"*": None}, "stored": ALONG_TP})],
)
def test_what_is_cut_is_packed_and_trains_as_on_one_device(way, said):
    """A plain shard of the fused weight: q, k and v are computed in shards, without a gather of their product."""
    want = trained(seeded(lambda: Attention(way)).double(), train_step)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, machine=NEAR))
        step = spmd.compile(train_step, mesh, choose="program", bucket_mb=None, inputs=BATCH, **said)
        got = trained(seeded(lambda: Attention(way)).double(), step)
    assert step.program.certificate.gap < 0.01
    assert any(spec.is_packed for spec in specs_of(step.program))
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


def specs_of(program: spmd.Program) -> list:
    """The specs of all tensors of a program."""
    found = [node.meta.get("spec") for node in program.graph.nodes]
    every = [spec for each in found for spec in (each if isinstance(each, tuple) else (each,))]
    return [spec for spec in every if spec is not None and hasattr(spec, "is_packed")]


# ---- what is found ----------------------------------------------------------------------------


def packings(fn: Callable, *shapes: tuple[int, ...]) -> list[Packing]:
    """The packed dims of the choice for a function of tensors, on two ranks."""
    found: list[Packing] = []
    real = Choosers.find_options

    def watched(self, choosers):
        found.extend(self.packings)
        real(self, choosers)

    mesh = spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choosers, "find_options", watched)
        spmd.compile(fn, mesh, choose="program").program_for(*map(torch.randn, shapes))
    return found


def heads(x, w):
    return (x @ w).unflatten(-1, (HEADS, -1)).transpose(0, 1).softmax(-1)


def turned(x, w):
    """As by a rotary embedding: halves of a dim that no weight has."""
    one, two = (x @ w).unflatten(-1, (HEADS, -1)).chunk(2, -1)
    return torch.cat([-two, one], -1)


FUSED = (6, 8), (8, 16)


@pytest.mark.parametrize(
    "fn, shapes, found",
    [
        (lambda x, w: (x @ w).split(8, -1), FUSED, [Packing(16, 2)]),
        (lambda x, w: (x @ w).split([8, 4, 4], -1), FUSED, [Packing(16, 4)]),  # grouped queries
        (lambda x, w: ((x @ w)[:, :8], (x @ w)[:, 8:12]), FUSED, [Packing(16, 4)]),
        (lambda x, w: (x @ w)[:, 1:5], FUSED, []),  # no whole blocks: nothing of it is shared out
        (lambda x, w: (x @ w)[:, :15], FUSED, []),  # blocks of one index
        (lambda x, a, b: x @ torch.cat([a, b], 1), ((6, 8), (8, 4), (8, 8)), []),  # no given tensor has 12 columns
        (heads, FUSED, []),
        (turned, FUSED, []),
    ],
)
def test_blocks_are_found_by_structure(fn, shapes, found):
    """Where a dim that a given tensor has is cut into blocks; heads and halves of a head are no blocks of a weight."""
    assert packings(fn, *shapes) == found


def test_an_expanded_row_is_not_taken_apart():
    """An `expand` is a view, and has more elements than what it is a view of: it cuts no dim into blocks."""

    def step(x):
        t = torch.linspace(0.5, 2.0, 6).expand(x.shape[0], 6)
        return torch.cat([t[:, 1:] - t[:, :-1], x[:, :1]], -1) * x

    x = torch.linspace(-1.0, 1.0, 48).reshape(8, 6)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        got = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}}, choose="program")(x)
        assert torch.equal(got.full_tensor().reconcile(), step(x))
