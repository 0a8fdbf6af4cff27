"""Values that the user pins, by the module, by the line and in the code: there, right, and with errors that advise."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import Partial, Replicate, Shard
from spmd.expand.constraints import PINNED
from tests.expand.side_by_side import seeded

INPUTS = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
OPEN = None


class Pair(nn.Module):
    """Gives two tensors."""

    def forward(self, x):
        return x.sin(), {"cos": x.cos()}


class Kinds(nn.Module):
    """Modules of many kinds: one that gives what it gets, one in place, one called twice, one computed again."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.up, self.act, self.down = nn.Linear(6, 10), nn.ReLU(inplace=True), nn.Linear(10, 6, bias=False)
        self.same, self.pair = nn.Identity(), Pair()

    def forward(self, x):
        h = self.norm(self.words(x))
        h = h + self.down(self.act(self.up(h)))
        sin, rest = self.pair(self.same(h))
        h = sin + checkpoint(self.down, self.act(self.up(rest["cos"])), use_reentrant=False)
        h = F.softmax(h.view(-1, 2, 3), -1).flatten(1)
        return h @ self.words.weight.T


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(mesh, build=Kinds, **said) -> tuple[list[torch.Tensor], spmd.CompiledStep | None]:
    """Losses and parameters of two steps in float64."""
    model = seeded(build).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(0, 7, (5, 4), generator=g) for _ in range(2)) for _ in range(2)]
    step = None if mesh is None else spmd.compile(train_step, mesh, inputs=INPUTS, **said)
    losses = [(step or train_step)(model, optimizer, *batch) for batch in batches]
    return [whole(x) for x in (*losses, *model.parameters())], step


def program_of(mesh, **said) -> spmd.Program:
    """The program of one step. Nothing runs."""
    model = Kinds()
    words = torch.zeros(5, 4, dtype=torch.long)
    step = spmd.compile(train_step, mesh, inputs=INPUTS, **said)
    return step.program_for(model, torch.optim.SGD(model.parameters(), 0.1), words, words)


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.detach().full_tensor().reconcile() if isinstance(x, spmd.DTensor) else x.detach()


@pytest.fixture(scope="module")
def one_device() -> list[torch.Tensor]:
    return trained(None)[0]


BATCH, BOTH = {"dp": Shard(0)}, {"dp": Shard(0), "tp": Shard(-1)}
OPEN_DP = {"dp": OPEN, "tp": Shard(2)}
HERE = "test_pins.py"
LINES, FIRST = inspect.getsourcelines(Kinds)
SOFTMAX = next(i for i, line in enumerate(LINES, FIRST) if "F.softmax" in line)

TABLE = {
    "products": ((2, 2), "op", {"up": BOTH, "down": {"tp": Shard(1)}}),
    "products, more ranks than rows": ((4, 1), "op", {"up": {"dp": Shard(1)}, "down": [Shard(2), Replicate()]}),
    "norm and embedding": ((2, 2), "op", {"norm": BOTH, "words": {"tp": Shard(2), "dp": Shard(1)}}),
    "all of them": ((1, 4), "op", {"*": {"tp": Shard(1)}}),
    "what it gets": ((2, 2), "op", {"up.input": BOTH, "same": OPEN_DP, "act.input": {"dp": Shard(2), "tp": Shard(2)}}),
    "given in another way": ((2, 2), "op", {"norm": {"dp": Shard(0), "tp": Shard(1)}, "up.input": BATCH, "up": BOTH}),
    "several results": ((2, 2), "op", {"pair.output.0": BOTH, "pair.output.*": OPEN_DP, "act": BATCH}),
    "by line": ((2, 2), "op", {f"{HERE}:{SOFTMAX}": {"dp": Shard(0), "tp": Shard(1)}, "up": {}}),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_pinned_step_trains_as_one_device(name, one_device):
    """Losses and parameters; and each pinned value, and its gradient, is where it is pinned."""
    shape, choose, placements = TABLE[name]
    with spmd.LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        found, step = trained(mesh, choose=choose, placements=placements)
    for a, b in zip(found, one_device, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    seen = dict(pinned(step.program))
    for pattern, wanted in placements.items():
        specs = seen[f"placements {pattern!r}"]
        assert len(specs) >= 2, "the value and its gradient"
        assert all(holds(spec, wanted) for spec in specs)


def pinned(program: spmd.Program) -> Iterator[tuple[str, list]]:
    """What the user said, with the specs of the values of which it was said."""
    said = [(n.meta[PINNED], n.meta["spec"]) for n in program.graph.nodes if PINNED in n.meta]
    for key in dict.fromkeys(key for key, _ in said):
        yield key, [spec for other, spec in said if other == key]


def holds(spec, wanted) -> bool:
    """Whether a spec is what was asked for, on the axes that were said and have ranks to part. Units may be longer."""
    if isinstance(wanted, dict):
        wanted = [wanted.get(axis, Replicate()) for axis in ("dp", "tp")]
    said = [(a, p) for a, p in enumerate(wanted) if p is not OPEN and spec.mesh.shape[a] > 1]
    return all(on(spec, a, p) for a, p in said)


def on(spec, axis, p) -> bool:
    own = spec.on(axis)
    return own.is_shard(p.dim % spec.ndim) if isinstance(p, Shard) else own == p


class Layers(nn.Module):
    """Equal layers, of which some are written again, and a module whose name begins as what a module is given."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential() for _ in range(4)))
        for layer in self.layers:
            layer.input_norm, layer.up = nn.LayerNorm(6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return (self.norm(self.layers(x[..., None] * torch.ones(6)))[:, 0:None, :] @ torch.ones(6, 7)).flatten(0, 1)


@pytest.mark.parametrize("said, values", [("*norm", 5), ("*.up", 4), ("norm", 1)])
def test_each_gradient_is_pinned_as_its_value(said, values):
    """Also in layers that are written again, and where the value is read by `x[:]`."""
    mesh, model = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")), Layers()
    step = spmd.compile(train_step, mesh, inputs=INPUTS, placements={said: BATCH})
    words = torch.zeros(5, 4, dtype=torch.long)
    program = step.program_for(model, torch.optim.SGD(model.parameters(), 0.1), words, words)
    ((_, specs),) = pinned(program)
    assert len(specs) == 2 * values


# ---- errors -----------------------------------------------------------------------------------


def error_of(**said) -> str:
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises((ValueError, TypeError)) as caught:
        program_of(mesh, **said)
    return str(caught.value)


def in_lines(text: str) -> str:
    """Each line of a text, broken where it is too long for this file."""
    return "\n".join(textwrap.fill(line, 110, subsequent_indent="  ") for line in text.splitlines())


WRONG = {
    "nothing": {"upp": BATCH},
    "no such line": {f"{HERE}:{SOFTMAX + 1000}": BATCH},
    "input": {"norm.inputs": BATCH},
    "dim": {"up": {"tp": Shard(3)}},
    "dim of a line": {f"{HERE}:{SOFTMAX}": {"tp": Shard(-3)}},
    "axis": {"up": {"pp": Shard(0)}},
    "axis twice": {"up": {"tp": Shard(0), 1: Shard(1)}},
    "owed": {"up": {"tp": Partial()}},
    "no placement": {"up": {"tp": 0}},
    "list": {"up": [Shard(0)]},
}


def test_errors_name_what_is_there():
    """Each wrong pin, one a line."""
    text = "\n".join(f"{name}: {error_of(placements=wrong)}" for name, wrong in WRONG.items())
    assert_expected_inline(in_lines(re.sub(r"py:\d+", "py:N", text)), """\
nothing: placements 'upp' matches nothing. Near: up, up.input.
no such line: placements 'test_pins.py:N' matches nothing. Near: test_pins.py:N, test_pins.py:N,
  test_pins.py:N.
input: placements 'norm.inputs' matches nothing. Near: norm.input, model.norm.input, words.input.
dim: placements 'up', of model.up: Shard(3) on tp: the tensor has 3 dims; allowed dims are -3 to 2; it is
  f32[5, 4, 10]
dim of a line: placements 'test_pins.py:N', of test_pins.py:N: Shard(-3) on tp: the tensor has 2 dims; allowed
  dims are -2 to 1; it is f32[20, 6]
axis: placements 'up': no axis 'pp' in a mesh with axes dp, tp. Did you mean 'tp' or 'dp'?
axis twice: placements 'up': 'tp' and 1 are one axis of the mesh; say it once
owed: placements 'up': Partial() on tp: a sum that is still owed cannot be asked for; use Shard(dim),
  Replicate(), or None to leave the axis open
no placement: placements 'up': the placement on tp is 0; use Shard(dim), Replicate(), or None to leave the
  axis open
list: "placements 'up'": [Shard(0)] gives no placements on a mesh with axes dp, tp; give a dict by axis name,
  such as {'tp': Shard(0)}, or a list of 2 placements""")


def test_a_list_of_pins_is_refused():
    """The error says what to give."""
    assert error_of(placements=["up"]).startswith("placements is a list; give a dict from paths of modules")


# ---- said in the code -------------------------------------------------------------------------


class Said(Kinds):
    """The same, with constraints in the code: under vmap, in what is computed again, of a view, of a weight."""

    def forward(self, x):
        h = spmd.constrain(self.norm(self.words(x)), {"dp": Shard(0), "tp": Shard(1)})
        h = h + self.down(self.act(spmd.constrain(self.up(h), BOTH)))
        sin, rest = self.pair(self.same(h))
        h = sin + checkpoint(self.again, rest["cos"], use_reentrant=False)
        h = F.softmax(spmd.constrain(h.view(-1, 2, 3), [OPEN, Shard(0)]), -1).flatten(1)
        h = torch.func.vmap(lambda row: spmd.constrain(row, {"tp": Shard(0), "dp": OPEN}), 1, 1)(h)
        return h @ spmd.constrain(self.words.weight, {"tp": Shard(0)}).T

    def again(self, x):
        return self.down(spmd.constrain(self.act(self.up(x)), {"tp": Shard(2), "dp": OPEN}))


MORE = [{}, {"choose": "program", "placements": {"down": OPEN_DP}}, {"fully_shard": "dp"}]


@pytest.mark.parametrize("more", MORE, ids=lambda more: ", ".join(more) or "alone")
def test_a_step_with_constraints_trains_as_one_device(more, one_device):
    """They are identities on one device; on the mesh values and gradients lie so."""
    assert all(torch.equal(a, b) for a, b in zip(trained(None, Said)[0], one_device, strict=True))
    with spmd.LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found, step = trained(mesh, Said, **more)
    for a, b in zip(found, one_device, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    said = dict(pinned(step.program))
    assert all(holds(spec, OPEN_DP) for spec in said.get("placements 'down'", ()))
    specs = said["constrain"]
    assert sum(spec.shape == (5, 4, 10) and holds(spec, BOTH) for spec in specs) >= 2
    assert sum(spec.shape == (20, 6) and holds(spec, [OPEN, Shard(0)]) for spec in specs) >= 2, "vmap"
    assert sum(spec.shape == (7, 6) and holds(spec, [Replicate(), Shard(0)]) for spec in specs) >= 2, "the weight"


def test_a_program_shows_what_is_pinned():
    """In the margin of the program."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    text = str(program_of(mesh, placements={"norm": BOTH}))
    assert_expected_inline("\n".join(line.split("#")[1] for line in text.splitlines() if "pinned" in line), """\
 f32[5@dp, 4, 6@tp]   pinned by placements 'norm'
 f32[5@dp, 4, 6@tp]   pinned by placements 'norm'""")
