"""The bytes that single ops send: which moves are chosen where an operand is sharded on a dim that the op needs whole.

    python benchmarks/sent.py               # a few seconds

Each case is an op on DTensors on simulated ranks. The table has the bytes that the busiest rank sends, the number of
collectives, and the share of the work that the busiest rank does: of the largest op of the case, the largest part that
some rank has of the tensor of which it has least. The bar is what the least of the known choices sends. Results are
compared with one device. Exits 1 if a case sends more than its bar, or if one rank does all the work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from _table import table
from torch import Tensor

import spmd
from spmd import Placement, Replicate, Shard
from spmd.tensor.cache import forget_decisions
from spmd.tensor.eager.dispatch import lowerings
from spmd.tensor.spec import Spec

R = Replicate()


@dataclass(frozen=True)
class Case:
    """A function of tensors, their shapes and placements, and the bytes that the least of the choices sends.

    bar: bytes, with `choice` in words. alone: one rank has all of the data from the beginning.
    """

    name: str
    fn: Callable[..., Tensor]
    operands: tuple[tuple[tuple[int, ...], Placement], ...]
    bar: int
    choice: str
    ranks: int = 4
    alone: bool = False


@dataclass(frozen=True)
class Found:
    """What a case did."""

    sent: int
    collectives: int
    share: float


IMAGE = ((1, 8, 16, 64), Shard(3))  # 8,192 bytes a rank
HEADS = ((1, 4, 64, 32), Shard(2))
SIGNAL = ((1, 64, 32), Shard(1))  # 2,048 bytes a rank
KERNEL = ((8, 8, 3, 3), R)


def _to_rows(y: Tensor) -> Tensor:
    """y sharded on dim 0, where it is a DTensor."""
    return y.redistribute(y.device_mesh, [Shard(0)]) if isinstance(y, spmd.DTensor) else y


def _embedding(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids.long() % table.shape[0], table).abs()


def _gradients(x: Tensor, w: Tensor) -> Tensor:
    """The gradient of the weight of a convolution, reduced; that of the image is computed as well."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = F.conv2d(x, w, padding=1)
    _, of_weight = torch.autograd.grad(y, (x, w), y.detach().cos())
    return of_weight.redistribute(w.device_mesh, [R]) if isinstance(w, spmd.DTensor) else of_weight


def _attended(x: Tensor, w: Tensor) -> Tensor:
    """Stands for attention: a function of the q, k and v that one weight gives."""
    q, k, v = F.linear(x, w).chunk(3, -1)
    return q * k + v


def _trained(x: Tensor, w: Tensor) -> Tensor:
    """The gradient of that weight."""
    w = w.detach().requires_grad_()
    return torch.autograd.grad(_attended(x, w), w, torch.zeros_like(x).cos())[0]


def _gated(x: Tensor, w: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


QKV = ((16, 32, 64), R), ((192, 64), Shard(0, blocks=3))

CASES = [
    Case("conv2d, 3x3", lambda x, w: F.conv2d(x, w, padding=1), (IMAGE, KERNEL), 1024, "a column each way"),
    Case("conv2d, 4x4, stride 4", lambda x, w: F.conv2d(x, w, stride=4), (IMAGE, ((8, 8, 4, 4), R)), 0, "nothing"),
    Case("conv2d, 1x1", F.conv2d, (IMAGE, ((8, 8, 1, 1), R)), 0, "nothing"),
    Case("attention", F.scaled_dot_product_attention, (HEADS,) * 3, 18432, "an all-to-all of q, k, v to the heads"),
    Case("sort", lambda x: x.sort(1)[0], (SIGNAL,), 1536, "an all-to-all to dim 2"),
    Case("sort, 2 rows", lambda x: x.sort(1)[0], (((2, 64, 32), Shard(1)),), 3072, "an all-to-all to dim 2"),
    Case("max_pool2d, 3x3", lambda x: F.max_pool2d(x, 3, 1, 1), (IMAGE,), 1024, "a column each way"),
    Case("conv2d, 3x3, backward", _gradients, (IMAGE, KERNEL), 1024 + 1024 + 3456, "as forward, and the weight's sum"),
    Case("conv_transpose2d, 4x4, stride 2", lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
         (IMAGE, ((8, 8, 4, 4), R)), 1024, "a column each way"),
    Case("avg_pool2d, 3x3", lambda x: F.avg_pool2d(x, 3, 1, 1), (IMAGE,), 1024, "a column each way"),
    Case("pad", lambda x: F.pad(x, (1, 3)), (IMAGE,), 1024, "the columns that come to another block"),
    Case("avg_pool2d, 2x2, stride 2", lambda x: F.avg_pool2d(x, 2), (IMAGE,), 0, "nothing"),
    Case("fft", lambda x: torch.fft.fft(x.to(torch.complex64), dim=1).abs(), (SIGNAL,), 3072, "an all-to-all to dim 2"),
    Case("interpolate", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (IMAGE,), 6144,
         "an all-to-all to the channels"),
    Case("unfold", lambda x: x.unfold(1, 4, 2), (SIGNAL,), 1536, "an all-to-all to dim 2"),
    Case("linear, bias, to rows", lambda x, w, b: _to_rows(F.linear(x, w, b)),
         (((64, 32), Shard(1)), ((16, 32), Shard(1)), ((16,), R)), 3072, "a reduce-scatter"),
    Case("linear, to rows", lambda x, w: _to_rows(F.linear(x, w)),
         (((64, 32), Shard(1)), ((16, 32), Shard(1))), 3072, "a reduce-scatter"),
    Case("column-parallel linear", lambda x, w: F.linear(x, w).abs(),
         (((16, 128, 256), Shard(2)), ((1024, 256), Shard(0))), 1048576, "a gather of x", 2),
    Case("embedding", _embedding, (((1024, 64), Shard(0)), ((64, 512), Shard(0))), 65536 * 3, "a gather of the table"),
    Case("fused q, k, v, packed", _attended, QKV, 0, "nothing"),
    Case("fused q, k, v, packed, backward", _trained, QKV, 0, "nothing"),
    Case("fused q, k, v, in one block", _attended, (QKV[0], ((192, 64), Shard(0))), 98304 * 3 // 4, "an all-to-all"),
    Case("gate and up, packed", _gated, (QKV[0], ((128, 64), Shard(0, blocks=2))), 0, "nothing"),
    Case("packed to rows", _to_rows, (QKV[1],), 8192, "what the ranks lack", alone=True),
    Case("view of rows that are shared out", lambda x: x.view(1024, 32).abs(), (((16, 64, 32), Shard(1)),), 0,
         "nothing"),
    Case("cat with nothing", lambda k: torch.cat([torch.tensor([]), k], -2), (HEADS,), 0, "nothing", alone=True),
    Case("select of 1 row", lambda x: x[0], (((1, 64, 32), Shard(0)),), 0, "nothing", alone=True),
    Case("view of 1 row", lambda x: x.view(64, 32), (((1, 64, 32), Shard(0)),), 0, "nothing", alone=True),
    Case("squeeze of 1 row", lambda x: x.squeeze(0), (((1, 64, 32), Shard(0)),), 0, "nothing", alone=True),
    Case("sum of 1 row", lambda x: x.sum(0), (((1, 64, 32), Shard(0)),), 0, "nothing", alone=True),
    Case("amax of 1 row", lambda x: x.amax(0), (((1, 64, 32), Shard(0)),), 0, "nothing", alone=True),
]  # fmt: skip


def run(case: Case) -> Found:
    """Run a case on simulated ranks. RuntimeError where the result is not that of one device."""
    forget_decisions()
    torch.manual_seed(0)
    given = [torch.randint(0, 9, shape).float() for shape, _ in case.operands]
    want = case.fn(*given)
    with spmd.LocalTensorMode(case.ranks) as mode, spmd.implicit_replication():
        mesh = spmd.init_device_mesh("cpu", (case.ranks,), mesh_dim_names=("tp",))
        placed = [spmd.distribute_tensor(x, mesh, [p]) for x, (_, p) in zip(given, case.operands, strict=True)]
        at_first = {rank: mode.report().sent(rank) for rank in range(case.ranks)}, len(_steps(mode))
        out = case.fn(*placed)
        sent = max(mode.report().sent(rank) - at_first[0][rank] for rank in range(case.ranks))
        collectives = len(_steps(mode)) - at_first[1]
        full = out.full_tensor().reconcile()
    if not torch.allclose(full, want, rtol=1e-4, atol=1e-3):
        raise RuntimeError(f"{case.name}: not the result of one device")
    return Found(sent, collectives, _share())


def _steps(mode: spmd.LocalTensorMode) -> set[int]:
    return {event.step for event in mode.report().events}


def _share() -> float:
    """The busiest rank's share of the op that has most elements, of those that were lowered since the last case."""
    found = []
    for handler in lowerings.entries.values():
        lowering = getattr(handler, "lowering", None)
        ins = [p.dst for p in lowering.plans] if lowering else getattr(handler, "ins", ())
        outs = [s for s in (lowering or handler).outs if s is not None] if ins else ()
        every: list[Spec] = [s for s in (*ins, *outs) if s.nbytes]
        if every:
            found.append((max(s.nbytes for s in every), min(s.local_nbytes / s.nbytes for s in every)))
    return max(found)[1] if found else 1.0


def main() -> int:
    rows, over = [], []
    for case in CASES:
        found = run(case)
        bad = found.sent > case.bar or (found.share == 1 and not case.alone)
        over += [case.name] if bad else []
        operands = ", ".join(f"{list(shape)} {p}" for shape, p in case.operands)
        rows.append([
            case.name, operands, case.choice, str(case.ranks), f"{found.sent:,}", f"{case.bar:,}",
            str(found.collectives), f"{found.share:.2f}",
        ])  # fmt: skip
    print(f"{date.today()}, torch {torch.__version__}\n")
    header = ["op", "operands", "the bar is", "ranks", "sent", "bar", "collectives", "share"]
    print(table(header, rows, left=3))
    if over:
        print(f"\nover the bar: {', '.join(over)}", file=sys.stderr)
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
