"""Random layers of experts on simulated ranks beside one device: results and gradients.

    python benchmarks/experts.py                 200 cases, each as DTensors, of own tokens and compiled
    python benchmarks/experts.py 3 17            these seeds alone

A case draws a mesh (4, 2 x 2, 2 x 2 x 2) and its axis of experts, 1 to 9 experts, the best 1 to 3 of each token, no to
24 tokens, a capacity or none, float64 or bf16, and a router: even, one that gives all to few experts, so that others
and whole ranks get none, and one that leaves entries out. Compiled steps get tokens that any axes share out.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from layer_kinds import Experts, _kept

import spmd
from spmd import DTensor, LocalTensor, LocalTensorMode, Shard, distribute_tensor, init_device_mesh
from spmd.comm import all_reduce, wait
from spmd.mesh import current_rank, per_rank
from spmd.parallel import ExpertParallel, parallelize_module

WIDTH = 4
ROUTERS = "even", "few", "left out", "twice"
WAYS = "DTensors", "own tokens", "compiled"


@dataclass(frozen=True)
class Case:
    seed: int
    shape: tuple[int, ...]
    axis: int
    experts: int
    k: int
    tokens: int
    factor: float | None
    dtype: torch.dtype
    router: str
    sharing: tuple[int, ...]

    @classmethod
    def drawn(cls, seed: int) -> Case:
        draw = random.Random(seed)
        shape = draw.choice([(4,), (2, 2), (2, 2, 2)])
        experts = draw.randint(1, 9)
        return cls(
            seed, shape, draw.randrange(len(shape)), experts, draw.randint(1, min(3, experts)),
            draw.choice([1, 2, 3, 5, 8, 13, 16, 24]), draw.choice([None, None, None, 0.5, 1.0, 2.0]),
            draw.choice([torch.float64, torch.float64, torch.bfloat16]), draw.choice(ROUTERS),
            tuple(a for a in range(len(shape)) if draw.random() < 0.6),
        )  # fmt: skip

    @property
    def names(self) -> tuple[str, ...]:
        return tuple("ep" if a == self.axis else f"a{a}" for a in range(len(self.shape)))

    @property
    def ranks(self) -> int:
        return self.shape[self.axis]

    def net(self) -> Experts:
        made = torch.Generator().manual_seed(self.seed)
        net = Experts(self.experts, WIDTH)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=made) * 0.5)
        return net.to(self.dtype)

    def given(self) -> tuple[torch.Tensor, ...]:
        """Tokens, experts, how much these count, numbers for the loss."""
        made = torch.Generator().manual_seed(self.seed + 1)
        x, loss = (torch.randn(self.tokens, WIDTH, generator=made).to(self.dtype) for _ in range(2))
        logits = torch.randn(self.tokens, self.experts, generator=made)
        if self.router == "few":
            logits = logits - 100 * (torch.arange(self.experts) >= self.k)
        index = logits.topk(self.k, -1).indices
        if self.router == "left out":
            index = index.masked_fill(torch.rand(index.shape, generator=made) < 0.3, self.experts)
        if self.router == "twice":
            index = index[:, :1].expand(-1, self.k).contiguous()
        return x, index, torch.rand(index.shape, generator=made).to(self.dtype), loss


def step(net, x, index, weights, loss):
    x = x.detach().requires_grad_()
    weights = weights.detach().requires_grad_()
    out = net(x, index, weights)
    (out * loss).sum().backward()
    return out, x.grad, weights.grad


def alone(case: Case, groups: int) -> dict[str, torch.Tensor]:
    net, (x, index, weights, loss) = case.net(), case.given()
    kept = _kept(index, torch.ones_like(weights), case.experts, case.factor, groups)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    out = net(x, index, weights * kept) + 0 * x + 0 * weights.sum()
    (out * loss).sum().backward()
    return named(net, out, x.grad, weights.grad)


def named(net, *found) -> dict[str, torch.Tensor]:
    said = dict(zip(("out", "x.grad", "weights.grad"), found, strict=True))
    said |= {f"{name}.grad": torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}
    return {name: torch.zeros(()) if x is None else x for name, x in said.items()}


def run(case: Case, way: str) -> list[dict[str, torch.Tensor]]:
    """What each rank has, whole."""
    with LocalTensorMode(prod(case.shape)) as mode:
        mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=case.names)
        style = ExpertParallel(
            capacity_factor=case.factor, average_gradients=False, padded=case.factor is not None or case.seed % 3 == 0
        )
        net = parallelize_module(case.net(), mesh["ep"], style)
        found = named(net, *RUNS[way](case, mesh, net))
        whole = {name: gathered(x) for name, x in found.items()}
        if way == "own tokens":
            whole = of_all_tokens(case, mesh, whole)
        return [{name: _on(x, rank) for name, x in whole.items()} for rank in mode.ranks]


def gathered(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def _on(x, rank: int) -> torch.Tensor:
    return (x.local[rank] if isinstance(x, LocalTensor) else x).detach()


def as_dtensors(case: Case, mesh, net):
    given = [distribute_tensor(t, mesh["ep"], [Shard(0)], src_data_rank=None) for t in case.given()]
    return step(net, *given)


@per_rank
def own(x: torch.Tensor, ranks: int) -> torch.Tensor:
    return x.tensor_split(ranks)[current_rank()].clone()


def of_own_tokens(case: Case, mesh, net):
    return step(net, *(own(x, mesh.size()) for x in case.given()))


def of_all_tokens(case: Case, mesh, found):
    """Of parts of the tokens the whole, and of gradients of experts the sum over the other axes."""
    for name, x in found.items():
        if name in ("out", "x.grad", "weights.grad"):
            found[name] = torch.cat([x.local[rank] for rank in sorted(x.local)])
        else:
            for axis in set(mesh.axis_names) - {"ep"}:
                x = wait(all_reduce(x, "sum", (mesh, axis)))
            found[name] = x
    return found


def as_compiled(case: Case, mesh, net):
    placed = {mesh.axis_name(a): Shard(0) for a in case.sharing}
    made = spmd.compile(step, mesh, inputs=dict.fromkeys(("x", "index", "weights", "loss"), placed))
    return made(net, *case.given())


RUNS = {"DTensors": as_dtensors, "own tokens": of_own_tokens, "compiled": as_compiled}


def apart(got: dict, want: dict) -> tuple[float, str]:
    """How far the results are apart, by their largest number, and where."""
    return max(((a.double() - b.double()).abs().max().item() / max(b.double().abs().max().item(), 1.0)
                if a.numel() else 0.0, name) for name, b in want.items() for a in [got[name]])  # fmt: skip


def fault(case: Case, way: str) -> str:
    if way == "own tokens" and case.factor is not None:
        return ""  # a group there is the tokens of a rank, as many on each
    want = alone(case, case.ranks)
    try:
        every = run(case, way)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    limit = 1e-10 if case.dtype is torch.float64 else 4e-2
    for rank, got in enumerate(every):
        for name, b in want.items():
            if got[name].shape != b.shape:
                return f"rank {rank}: {name} is {list(got[name].shape)}, not {list(b.shape)}"
        far, where = apart(got, want)
        if not far <= limit:
            return f"rank {rank}: {where} is {far:.1e} apart"
    return ""


if __name__ == "__main__":
    seeds = list(map(int, sys.argv[1:])) or range(200)
    counted: Counter[str] = Counter()
    for case in map(Case.drawn, seeds):
        for way in WAYS:
            wrong = fault(case, way)
            counted[f"{way}: {'wrong' if wrong else 'right'}"] += 1
            if wrong:
                print(f"{case}\n    {way}: {wrong}", flush=True)
    print(dict(sorted(counted.items())))
    sys.exit(any("wrong" in each for each in counted))
