"""Random trainings: small models with all that parameters can be, under random places, beside one device.

    differences(Training.of(seed))        what differs, as text; empty if nothing does

A training is a value that prints as Python code, so that one that fails can be made smaller by hand.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from spmd import FullyShard, LocalTensorMode, MeshTopoInfo, MixedPrecision, Replicate, Shard
from spmd.expand.precision import computed_in
from spmd.mesh import Compute, Link, Machine, Way
from tests.expand.places.trained import seen, whole
from tests.expand.side_by_side import seeded

KINDS = (
    "linear", "mlp", "norm", "conv", "attention", "gate", "tied", "frozen", "unused", "scale", "pinned", "buffer",
    "twice", "table",
)  # fmt: skip
MESHES = ((4,), (1, 4), (4, 1), (2, 2), (2, 2, 2))
AXES = ("dp", "tp", "pp")
DTYPES = {"kept": (torch.float64, torch.float32), "made": (None, torch.float64, torch.float32)}

NEAR = Machine(
    "near", (Way("ring", 0.01, (Link(0.01, 100.0),)),), memory=Link(0.01, 100.0),
    compute=Compute(0.5, (("float64", 0.05),)),
)  # fmt: skip
"""Slow ranks on quick links: a choice for the program spreads the smallest model."""


class Layer(nn.Module):
    """A layer of a kind, on values of [batch, words, width]. turned: a weight to be tied to."""

    def __init__(self, kind: str, width: int, hidden: int, tied: nn.Parameter | None):
        super().__init__()
        self.kind, self.tied = kind, tied is not None and kind == "tied"
        if kind in ("linear", "frozen", "pinned", "twice"):
            self.own = nn.Linear(width, width, bias=kind != "frozen").requires_grad_(kind != "frozen")
        elif kind == "mlp":
            self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        elif kind == "norm":
            self.norm = nn.LayerNorm(width)
        elif kind == "conv":
            self.conv = nn.Conv1d(width, width, 3, padding=1)
        elif kind in ("attention", "gate"):
            self.fused, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        elif kind == "tied":
            self.own = nn.Linear(width, width, bias=False)
            if tied is not None:
                self.own.weight = tied
        elif kind == "unused":
            self.unused, self.never = nn.Parameter(torch.randn(hidden, 3)), nn.Linear(width, hidden)
        elif kind == "scale":
            self.scale, self.shift = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(1, width))
        elif kind == "buffer":
            self.register_buffer("mean", torch.zeros(width))
        elif kind == "table":
            self.table = nn.Parameter(torch.randn(hidden, width))

    def forward(self, x):
        return getattr(self, f"_{self.kind}", self._own)(x)

    def _own(self, x):
        return x + self.own(x)

    def _pinned(self, x):
        return spmd.constrain(self.own(x).tanh(), {"dp": Shard(0)}) + x

    def _twice(self, x):
        return self.own(F.gelu(self.own(x)))

    def _mlp(self, x):
        return x + self.down(F.gelu(self.up(x)))

    def _norm(self, x):
        return self.norm(x)

    def _conv(self, x):
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)

    def _attention(self, x):
        q, k, v = self.fused(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    def _gate(self, x):
        a, b, c = self.fused(x).split(x.shape[-1], -1)
        return self.out(a * torch.sigmoid(b) + c)

    def _unused(self, x):
        return x * 1.5

    def _scale(self, x):
        return x * self.scale + self.shift

    def _buffer(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)))
        return x

    def _table(self, x):
        return x + (x @ self.table.t()).softmax(-1) @ self.table


class Net(nn.Module):
    """Words in, words out. The head may be the table of words, and a tied layer has the weight of another layer."""

    def __init__(self, training: Training):
        super().__init__()
        width, hidden, words = training.width, training.hidden, training.words
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList()
        for kind in training.kinds:
            earlier = [m.own.weight for m in self.layers if hasattr(m, "own") and m.own.weight.requires_grad]
            self.layers.append(Layer(kind, width, hidden, earlier[-1] if earlier else None))
        self.head = nn.Linear(width, words, bias=False)
        if training.ties_head:
            self.head.weight = self.words.weight

    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@dataclass(frozen=True)
class Training:
    """A model, a mesh, and what is said of them. said: to `spmd.compile`."""

    kinds: tuple[str, ...] = ("mlp",)
    width: int = 6
    hidden: int = 10
    words: int = 7
    ties_head: bool = False
    batch: int = 6
    time: int = 4
    mesh: tuple[int, ...] = (4,)
    optimizer: str = "foreach"
    clips: bool = False
    parts: int = 1
    kept: torch.dtype = torch.float64
    near: bool = False
    said: dict = field(default_factory=dict)

    @classmethod
    def of(cls, seed: int) -> Training:
        draw = random.Random(seed)
        mesh = draw.choice(MESHES)
        plain = cls(
            tuple(draw.choices(KINDS, k=draw.randint(1, 4))), draw.choice((1, 4, 5, 6, 7, 8)),
            draw.choice((1, 3, 5, 8, 10)), draw.choice((5, 7, 8)), draw.random() < 0.4, draw.choice((1, 3, 4, 6, 8)),
            draw.choice((1, 3, 4)), mesh, draw.choice(("foreach", "loop", "fused", "sgd")), draw.random() < 0.4,
            draw.choice((1, 1, 2)),
        )  # fmt: skip
        return plain.__class__(**vars(plain) | _drawn_said(draw, plain))

    @property
    def axes(self) -> tuple[str, ...]:
        return AXES[: len(self.mesh)]

    @property
    def precision(self) -> MixedPrecision | None:
        return self.said.get("mixed_precision")

    @property
    def is_exact(self) -> bool:
        """Whether all is computed and reduced in float64."""
        own = (self.precision.param_dtype, self.precision.reduce_dtype) if self.precision else ()
        return self.kept == torch.float64 and torch.float32 not in own


# ---- what is said ----------------------------------------------------------------------------------


def _drawn_said(draw: random.Random, training: Training) -> dict:
    model = seeded(lambda: Net(training))
    named = dict(model.named_parameters())
    said: dict[str, Any] = {"inputs": _inputs(draw, training)}
    own = {}
    if draw.random() < 0.6:
        said["params"] = {k: _placed(draw, training, p) for k, p in named.items() if draw.random() < 0.5}
        said["params"] |= {k: None for k in named if draw.random() < 0.08}
    if draw.random() < 0.3:
        said["stored"] = {k: _placed(draw, training, p) for k, p in named.items() if draw.random() < 0.4}
    if draw.random() < 0.75:
        said["fully_shard"] = _sharding(draw, training, named)
    if draw.random() < 0.35:
        said["placements"] = _pins(draw, training, model)
    if draw.random() < 0.25:
        said["mixed_precision"], own["kept"] = _precision(draw)
        own["optimizer"] = "sgd"
    if draw.random() < 0.4:
        said["choose"], own["near"] = "program", draw.random() < 0.8
    if draw.random() < 0.3:
        said["bucket_mb"] = None
    return own | {"said": {k: v for k, v in said.items() if v}}


def _inputs(draw: random.Random, training: Training) -> dict:
    kinds = [{}, {"dp": Shard(0)}, {"dp": Shard(0)}, {"dp": Shard(0)}, {a: Shard(0) for a in training.axes}]
    if "tp" in training.axes:
        kinds += [{"dp": Shard(0), "tp": Shard(1)}, {"tp": Shard(1)}]
    placed = draw.choice(kinds)
    return {"x": placed, "y": draw.choice((placed, placed, {"dp": Shard(0)}))}


def _placed(draw: random.Random, training: Training, t: torch.Tensor) -> dict:
    """Placements of a tensor: some axes, on some dims."""
    found = {}
    for axis in training.axes:
        if t.ndim and draw.random() < 0.5:
            dim = draw.randrange(t.ndim)
            packed = t.shape[dim] % 3 == 0 and t.shape[dim] > 3 and draw.random() < 0.3
            found[axis] = Shard(dim, blocks=3) if packed else Shard(dim)
    packed = {p.dim: p for p in found.values() if getattr(p, "blocks", 1) != 1}
    return {axis: packed.get(p.dim, p) for axis, p in found.items()}


def _sharding(draw: random.Random, training: Training, named: dict) -> Any:
    def one() -> FullyShard | str:
        axes = tuple(draw.sample(training.axes, draw.choice((1, 1, 1, min(2, len(training.axes))))))
        more = tuple(a for a in training.axes if a not in axes)
        state = (*axes, draw.choice(more)) if more and draw.random() < 0.3 else None
        reshard = draw.choice((True, True, False, "cost"))
        return axes[0] if draw.random() < 0.2 else FullyShard(axes, draw.choice((1, 2, 3, 3)), reshard, state)

    if draw.random() < 0.75:
        return one()
    some = {k: one() for k in named if draw.random() < 0.4}
    return some | {"*": draw.choice((None, one()))}


def _pins(draw: random.Random, training: Training, model: nn.Module) -> dict:
    paths = [n for n, m in model.named_modules() if n and not isinstance(m, nn.ModuleList) and "never" not in n]
    found = {}
    for path in draw.sample(paths, min(len(paths), draw.choice((1, 1, 2)))):
        turned = "conv" in path
        axes = {a: draw.choice((None, Replicate(), Shard(0), Shard(1), Shard(-1))) for a in training.axes}
        key = path if turned or draw.random() < 0.7 or path == "words" else f"{path}.input"
        found[key] = {a: p for a, p in axes.items() if not isinstance(p, Replicate)}
    return found


def _precision(draw: random.Random) -> tuple[MixedPrecision, torch.dtype]:
    kept, made, reduced = draw.choice(DTYPES["kept"]), draw.choice(DTYPES["made"]), draw.choice(DTYPES["made"])
    if reduced is not None and torch.promote_types(made or kept, reduced) != reduced:
        reduced = None
    return MixedPrecision(made, reduced), kept


# ---- trained ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda params: optim.SGD(params, 0.1, momentum=0.9, weight_decay=0.1),
    "foreach": lambda params: optim.AdamW(params, 1e-2, eps=1e-4, weight_decay=0.1, foreach=True),
    "fused": lambda params: optim.AdamW(params, 1e-2, eps=1e-4, fused=True),
    "loop": lambda params: optim.AdamW(params, 1e-2, eps=1e-4, foreach=False),
}
"""The eps of AdamW is large: gradients that are zero but for rounding would be divided by 1e-8."""


def step_of(training: Training) -> Callable:
    """Micro-batches, where there are several, clipping, and an update."""
    parts = min(training.parts, training.batch)

    def train_step(model, optimizer, x, y):
        optimizer.zero_grad()
        total = 0.0
        for own, wanted in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.cross_entropy(model(own).flatten(0, 1), wanted.flatten()) / parts
            loss.backward()
            total = total + loss.detach()
        if training.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return total

    return train_step


def _steps(training: Training, step: Callable, model: nn.Module, n: int) -> dict[str, torch.Tensor]:
    optimizer = OPTIMIZERS[training.optimizer]([p for p in model.parameters() if p.requires_grad])
    g = torch.Generator().manual_seed(1)
    given = [[torch.randint(0, training.words, (training.batch, training.time), generator=g) for _ in range(2)]
             for _ in range(n)]  # fmt: skip
    return seen([whole(step(model, optimizer, *each)) for each in given], model, optimizer)


def alone(training: Training, n: int = 3) -> dict[str, torch.Tensor]:
    """On one device, in the same precision."""
    model = seeded(lambda: Net(training)).to(training.kept)
    with computed_in(training.precision, [model]):
        return _steps(training, step_of(training), model, n)


def compiled(training: Training) -> spmd.CompiledStep:
    """The step on a mesh of simulated ranks."""
    mesh = spmd.init_device_mesh("cpu", training.mesh, mesh_dim_names=training.axes)
    if training.near:
        mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, machine=NEAR))
    return spmd.compile(step_of(training), mesh, **training.said)


def differences(training: Training, n: int = 3) -> list[str]:
    """What differs from one device after n steps: 1e-10 where all is in float64, else 1e-4."""
    want = alone(training, n)
    with LocalTensorMode(prod(training.mesh)):
        model = seeded(lambda: Net(training)).to(training.kept)
        got = _steps(training, compiled(training), model, n)
    return list(_unlike(want, got, 1e-10 if training.is_exact else 1e-4))


def _unlike(want: dict, got: dict, atol: float) -> Iterator[str]:
    if set(want) != set(got):
        yield f"one device has {sorted(set(want) - set(got))} alone, the mesh {sorted(set(got) - set(want))}"
    for name in want.keys() & got.keys():
        a, b = want[name], got[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            yield f"{name}: {b.dtype} {tuple(b.shape)} for {a.dtype} {tuple(a.shape)}"
        elif not torch.allclose(a, b, rtol=0, atol=atol, equal_nan=True):
            yield f"{name}: {float((a - b).abs().max()):.1e} apart"
