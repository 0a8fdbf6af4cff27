"""Draws docs/picture.svg: a training step, compiled for a 2 x 2 mesh, as spmd made it.

    python scripts/picture.py

Nothing in the picture is drawn by hand: the step is compiled and run on four simulated ranks, and what is shown are
the blocks that they hold and the program that they ran.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import Shard

TARGET = Path(__file__).parents[1] / "docs" / "picture.svg"

# ---- the program ------------------------------------------------------------------------------

PARAMS = {"up.weight": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
INPUTS = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


@dataclass(frozen=True)
class Held:
    """A matrix of the step: its name, its spec, and which ranks hold which block of it."""

    name: str
    spec: str
    blocks: dict[tuple[int, int, int, int], list[int]]  # first and last row, first and last column: ranks


@dataclass(frozen=True)
class Row:
    """A line of the program: the part of the step it belongs to, the op, its spec; of a collective axis and bytes."""

    part: str
    op: str
    spec: str
    axis: str = ""
    nbytes: int = 0


def compiled() -> tuple[spmd.DeviceMesh, list[Held], list[Row]]:
    """The step, run once on four simulated ranks: its mesh, its tensors, and the lines of its program."""
    with spmd.LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = MLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = spmd.compile(train_step, mesh, params=PARAMS, inputs=INPUTS, bucket_mb=None)
        step(model, optimizer, torch.ones(8, 16), torch.ones(8, 16))
        tensors = [(name, spec) for name, spec in step.program.inputs if spec is not None]
        return mesh, [held(name, spec) for name, spec in tensors], list(rows(step.program))


def held(name: str, spec) -> Held:
    """Which ranks hold which block: asked of a tensor of this spec that holds its own indices."""
    width = spec.shape[1]
    indices = torch.arange(spec.shape[0] * width).view(spec.shape)
    blocks: dict[tuple[int, int, int, int], list[int]] = {}
    for rank, block in spmd.distribute_tensor(indices, spec.mesh, spec.placements).to_local().local.items():
        (top, left), (bottom, right) = (divmod(int(block[at]), width) for at in ((0, 0), (-1, -1)))
        blocks.setdefault((top, bottom, left, right), []).append(rank)
    return Held(name, str(spec), blocks)


LEFT_OUT = {"t", "ones_like", "div.Scalar"}
"""Ops of no account: transposed views, and arithmetic of tensors of one number."""


def rows(program: spmd.Program) -> Iterator[Row]:
    """The lines of a program that matter, in its order."""
    sent = {one.name: one for one in program.collectives}
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    gradients = [node.name for node in nodes].index("mse_loss_backward")
    for number, node in enumerate(nodes):
        op, spec = str(node.target).removeprefix("aten.").removesuffix(".default"), str(node.meta.get("spec") or "")
        if node.name in sent:
            one = sent[node.name]
            yield Row("", one.kind, spec, one.axis, one.nbytes)
        elif spec and op not in LEFT_OUT:
            part = "forward" if number < gradients else "update" if op.startswith("add") else "backward"
            yield Row(part, op.partition(".")[0], spec)


# ---- the drawing ------------------------------------------------------------------------------

COLORS = {"dp": "#0550ae", "tp": "#a04100"}
TINTS = {"dp": "#ddf4ff", "tp": "#fff1e5"}
INK, SOFT, LINE, PAPER = "#1f2328", "#59636e", "#8c959f", "#ffffff"
SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
WIDTH, STEP, TOP = 960, 26, 92
SCALE = 4.4  # of an element of a tensor


def draw() -> str:
    """The whole picture, as the text of an SVG file. It has a paper of its own, for dark pages too."""
    mesh, tensors, lines = compiled()
    height = TOP + STEP * len(lines) + 50
    parts = [
        *heading(32, "the mesh"), *drawn_mesh(mesh, 92, 76),
        *heading(32, "what each rank holds", 236), *drawn_tensors(tensors, 32, 268),
        *heading(440, "the program, the same on every rank"), *drawn_program(lines, 440, TOP),
    ]  # fmt: skip
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="{SANS}">',
            "<title>A training step, compiled for a mesh of two by two ranks</title>",
            f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="12" fill="{PAPER}" stroke="{LINE}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def heading(x: int, words: str, y: int = 40) -> Iterator[str]:
    yield text(x, y, words, size=16, weight=600)


def text(x: float, y: float, words: str, *, size: int = 14, fill: str = INK, anchor: str = "start",
         font: str = "", weight: int = 400) -> str:  # fmt: skip
    """Words; those of a spec have the axes in their colours."""
    face = f' font-family="{font}"' if font else ""
    inner = re.sub(
        r"@(\w+)", lambda m: f'<tspan fill="{COLORS[m[1]]}" font-weight="600">@{m[1]}</tspan>', escape(words)
    )
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
        f'font-weight="{weight}"{face}>{inner}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = LINE, radius: int = 0) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )


def drawn_mesh(mesh: spmd.DeviceMesh, x: int, y: int) -> Iterator[str]:
    """Ranks as boxes, the first axis downwards, the second to the right."""
    width, height, gap = 92, 44, 16
    down, right = mesh.axis_names
    for (row, column), rank in zip(mesh.coordinates(), mesh.ranks, strict=True):
        left, top = x + column * (width + gap), y + row * (height + gap)
        yield box(left, top, width, height, "#f6f8fa", radius=6)
        yield text(left + width / 2, top + height / 2 + 5, f"rank {rank}", anchor="middle")
    end_x, end_y = x + 2 * width + gap, y + 2 * height + gap
    yield arrow(x - 16, y, x - 16, end_y, COLORS[down])
    yield text(x - 26, (y + end_y) / 2 + 5, down, fill=COLORS[down], anchor="end", weight=600)
    yield arrow(x, end_y + 16, end_x, end_y + 16, COLORS[right])
    yield text(end_x + 10, end_y + 21, right, fill=COLORS[right], weight=600)


def arrow(x: float, y: float, to_x: float, to_y: float, color: str) -> str:
    """A line to the right or downwards, with a head at its end."""
    head = f"M{to_x - 6:g} {to_y - 5:g}l6 5l-6 5" if y == to_y else f"M{to_x - 5:g} {to_y - 6:g}l5 6l5 -6"
    return f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}{head}" fill="none" stroke="{color}" stroke-width="2"/>'


def drawn_tensors(tensors: Sequence[Held], x: int, y: int) -> Iterator[str]:
    """Two in a line, each to scale, cut into its blocks."""
    for i, tensor in enumerate(tensors):
        yield from drawn_tensor(tensor, x + 192 * (i % 2), y + (i // 2) * 200)


def drawn_tensor(tensor: Held, x: float, y: float) -> Iterator[str]:
    axis = re.search(r"@(\w+)", tensor.spec)
    yield text(x, y, tensor.name, weight=600)
    yield text(x, y + 19, tensor.spec, size=13, font=MONO)
    for (top, bottom, left, right), ranks in tensor.blocks.items():
        at_x, at_y = x + left * SCALE, y + 30 + top * SCALE
        wide, high = (right - left + 1) * SCALE, (bottom - top + 1) * SCALE
        yield box(at_x, at_y, wide, high, TINTS[axis[1]] if axis else "#f6f8fa")
        names = f"ranks {', '.join(map(str, ranks))}"
        yield text(at_x + wide / 2, at_y + high / 2 + 4, names, size=11, anchor="middle")


def drawn_program(lines: Sequence[Row], x: int, y: int) -> Iterator[str]:
    """One line an op, its spec beside it; what is sent stands in the colour of its axis."""
    yield text(x + 84, y - 18, "op", size=12, fill=SOFT)
    yield text(x + 270, y - 18, "its result", size=12, fill=SOFT)
    shown = ""
    for i, line in enumerate(lines):
        middle = y + STEP * i + 5
        if line.part and line.part != shown:
            shown = line.part
            yield text(x, middle + 5, shown, size=13, fill=SOFT)
        yield from drawn_line(line, x + 76, middle)


def drawn_line(line: Row, x: int, y: float) -> Iterator[str]:
    if line.axis:
        yield box(x, y - 11, 408, 22, TINTS[line.axis], COLORS[line.axis], radius=6)
        words = f"{line.op} over {line.axis}"
        yield text(x + 8, y + 5, words, size=13, fill=COLORS[line.axis], font=MONO, weight=600)
        yield text(x + 400, y + 5, f"{line.nbytes:,} B", size=12, fill=COLORS[line.axis], anchor="end")
    else:
        yield text(x + 8, y + 5, line.op, size=13, font=MONO)
    yield text(x + 194, y + 5, line.spec, size=13, font=MONO)


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(TARGET.parents[1])}")
