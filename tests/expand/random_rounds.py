"""Random steps with a loop over micro-batches, beside one device.

    differences(Rounds.of(seed))         what differs, as text; empty if nothing does

A step is written as text: what it carries from round to round, how it cuts the batch, scales the loss, clips, and where
it clears gradients. With it go a small model, an optimiser, a plan, and the sizes of the batches of three calls. All
that a user can see is compared after each call. A step prints as Python.
"""

from __future__ import annotations

import linecache
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import FullyShard, LocalTensor, LocalTensorMode, MixedPrecision, Shard
from spmd._torch import pytree
from spmd.expand.loops import roll
from spmd.expand.loops.loop import Loop
from tests.expand.places.random_trainings import Layer
from tests.expand.side_by_side import seeded

WIDTH, HIDDEN, WORDS, TIME = 4, 8, 7, 3
KINDS = ("linear", "mlp", "mlp", "norm", "attention", "gate", "tied", "frozen", "unused", "scale", "buffer", "twice",
         "dropout", "table", "batch norm")  # fmt: skip

OVER = {"dp": Shard(0)}
TENSOR_PARALLEL = {"layers.*.up.*": {"tp": Shard(0)}, "layers.*.down.weight": {"tp": Shard(1)}}
PLANS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "dp 4": ({"dp": 4}, {}),
    "tp 4": ({"tp": 4}, {}),
    "2x2": ({"dp": 2, "tp": 2}, {}),
    "zero 3": ({"dp": 4}, {"fully_shard": "dp"}),
    "zero 3 tp": ({"dp": 2, "tp": 2}, {"fully_shard": "dp"}),
    "zero 3, kept": ({"dp": 4}, {"fully_shard": FullyShard("dp", reshard_after_forward=False)}),
    "zero 2": ({"dp": 4}, {"fully_shard": FullyShard("dp", level=2)}),
    "zero 1 tp": ({"dp": 2, "tp": 2}, {"fully_shard": FullyShard("dp", level=1)}),
    "hybrid": ({"rep": 2, "dp": 2}, {"fully_shard": "dp"}),
    "reduced in float64": ({"dp": 4}, {"mixed_precision": MixedPrecision(torch.float64, torch.float64)}),
}

OPTIMIZERS: dict[str, Callable] = {
    "sgd": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, 1e-2, eps=1e-3, foreach=False),
    "foreach": lambda p: optim.AdamW(p, 1e-2, eps=1e-3, foreach=True),
    "fused": lambda p: optim.AdamW(p, 1e-2, eps=1e-3, fused=True),
    "plain": lambda p: optim.SGD(p, 0.1),
}


class BatchNorm(nn.BatchNorm1d):
    """Of each column of [batch, time, columns]."""

    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


OWN_LAYERS = {"dropout": lambda: nn.Dropout(0.3), "batch norm": BatchNorm}


@contextmanager
def quiet(model: nn.Module, is_on: bool) -> Iterator[None]:
    """As `no_sync`: a flag of the model, and nothing that is computed."""
    model.is_quiet = is_on
    try:
        yield
    finally:
        model.is_quiet = False


class Net(nn.Module):
    """Words in, words out, by layers of these kinds. again: those that are computed again in the backward pass."""

    def __init__(self, kinds: tuple[str, ...], again: tuple[bool, ...], ties_head: bool):
        super().__init__()
        self.words, self.again, self.layers = nn.Embedding(WORDS, WIDTH), again, nn.ModuleList()
        for kind in kinds:
            earlier = [m.own.weight for m in self.layers if hasattr(m, "own") and m.own.weight.requires_grad]
            own = OWN_LAYERS.get(kind)
            self.layers.append(own() if own else Layer(kind, WIDTH, HIDDEN, (earlier or [None])[-1]))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if ties_head:
            self.head.weight = self.words.weight
        self.rounds, self.is_last, self.is_quiet, self.last = 0, False, False, None
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x, state=None):
        x = self.words(x)
        x = x if state is None else x + state
        for layer, is_again in zip(self.layers, self.again, strict=True):
            x = checkpoint(layer, x, use_reentrant=False) if is_again else layer(x)
        return self.head(x)


# ---- what steps are made of -------------------------------------------------------------------

CUTS = {
    "chunk": "for i, (a, b) in enumerate(zip(x.chunk(N), y.chunk(N))):",
    "split": "for i, (a, b) in enumerate(zip(x.split(4), y.split(4))):",
    "tensor_split": "for i, (a, b) in enumerate(zip(x.tensor_split(N), y.tensor_split(N))):",
    "index": "for i, a in enumerate(x.unflatten(0, (N, -1))):\n        b = y.unflatten(0, (N, -1))[i]",
    "unbind": "for i, (a, b) in enumerate(zip(x.view(N, -1, TIME).unbind(), y.view(N, -1, TIME).unbind())):",
    "slices": "for i in range(N):\n"
              "        r = slice(i * len(x) // N, (i + 1) * len(x) // N)\n        a, b = x[r], y[r]",
    "strided": "for i in range(N):\n        a, b = x[i::N], y[i::N]",
    "list": "for i, (a, b) in enumerate(zip(x, y)):",
    "shuffled": "for i, r in enumerate(torch.arange(len(x)).flip(0).chunk(N)):\n        a, b = x[r], y[r]",
    "permuted": "for i, r in enumerate(torch.randperm(len(x)).chunk(N)):\n        a, b = x[r], y[r]",
    "nested": "for i, (a, b) in enumerate(\n"
              "        (a, b) for u, v in zip(x.chunk(2), y.chunk(2)) for a, b in zip(u.chunk(N), v.chunk(N))):",
    "while": "i, r = -1, len(x) // N\n    while i < N - 1:\n        i += 1\n"
             "        a, b = x.narrow(0, i * r, r), y[i * r:][:r]",
    "backwards": "for i, (a, b) in reversed(list(enumerate(zip(x.chunk(N), y.chunk(N))))):",
    "again": "for i in range(N):\n        a, b = x, y",
    "masked": "for i in range(N):\n        a, b = x, torch.where(torch.arange(len(y))[:, None] % N == i, y, 0)",
    "dicts": "for i, d in enumerate([{'x': a, 'y': b} for a, b in zip(x.chunk(N), y.chunk(N))]):\n"
             "        a, b = d['x'], d['y']",
}  # fmt: skip
"""Heads of loops. Each gives i, a and b."""

LOSSES = {
    "mean": "loss = F.cross_entropy(out.flatten(0, 1), b.flatten())",
    "sum": "loss = F.cross_entropy(out.flatten(0, 1), b.flatten(), reduction='sum')",
    "squares": "loss = (out - F.one_hot(b, WORDS)).square().mean()",
    "ignored": "loss = F.cross_entropy(out.flatten(0, 1), b.flatten(), ignore_index=0, reduction='sum')",
    "likelihood": "loss = F.nll_loss(out.log_softmax(-1).flatten(0, 1), b.flatten(), weight=classes)",
    "label": "loss = F.cross_entropy(out[:, -1], b[:, -1], label_smoothing=0.1)",
}

SUMMED = ("sum", "ignored")

SCALES = {
    "none": "", "count": "loss = loss / N", "rows": "loss = loss / len(a)", "tensor": "loss = loss * scale",
    "weights": "loss = loss * weights[i]", "words": "loss = loss / (b > 0).sum().clamp(min=1)",
    "numbers": "loss = loss * NUMBERS[i]", "round": "loss = loss / (i + 1)", "ramp": "loss = loss * (0.1 + i / N)",
    "itself": "loss = loss / (1 + loss.detach())", "late": "if i > 1:\n    loss = loss * 0.5",
    "subset": "loss = loss * (len(a) / len(x))",
}  # fmt: skip

CARRIED: dict[str, tuple[str, str, str, str]] = {
    "total": ("total = 0.0", "", "total = total + loss.detach()", "total"),
    "added": ("added = torch.zeros((), dtype=torch.float64)", "", "added += loss.detach()", "added"),
    "listed": ("losses = []", "", "losses.append(loss.detach())", "losses"),
    "sums": ("sums, s = [], 0.0", "", "s = s + loss.detach()\nsums.append(s)", "torch.stack(sums)"),
    "most": ("most = torch.full((), -1.0)", "", "most = torch.maximum(most, loss.detach())", "most"),
    "state": ("state = torch.zeros(WIDTH)", "state", "state = out.detach().mean((0, 1))[:WIDTH]", "state"),
    "hits": ("hits = torch.zeros((), dtype=torch.long)", "", "hits = hits + (out.argmax(-1) == b).sum()", "hits"),
    "average": ("average = torch.ones(())", "", "average = 0.9 * average + 0.1 * loss.detach()", "average"),
    "last": ("", "", "", "out.detach(), loss"),
    "rows": ("rows = 0", "", "rows += len(a)", "rows"),
    "counted": ("", "", "model.rounds += 1", "model.rounds"),
    "flag": ("", "", "model.is_last = i == N - 2", "model.is_last"),
    "ema": ("", "", "for p, q in zip(other.parameters(), model.parameters()):\n"
            "    p.data.lerp_(q.detach(), 0.1)", "next(other.parameters()).detach().clone()"),
    "norms": ("norms = []", "",
              "if model.head.weight.grad is not None:\n    norms.append(model.head.weight.grad.norm())", "norms"),
    "older": ("older, newer = torch.zeros(()), torch.ones(())", "",
              "older, newer = newer, older * 0.5 + loss.detach()", "older, newer"),
    "before": ("before = torch.ones(())", "", "before = loss.detach()\nlosses_before = before * 2", "losses_before"),
    "outs": ("outs = []", "", "outs.append(out.detach())", "torch.cat(outs)"),
    "written": ("written = torch.zeros(2 * N + 4, dtype=torch.float64)", "", "written[i] = loss.detach()", "written"),
    "stacked": ("losses = []", "", "losses.append(loss.detach())", "torch.stack(losses).mean(), losses[-1]"),
    "metrics": ("metrics = {'loss': 0.0, 'rows': 0}", "",
                "metrics['loss'] += loss.detach()\nmetrics['rows'] += len(a)", "metrics"),
    "best": ("best, at = torch.full((), 1e9, dtype=torch.float64), torch.zeros((), dtype=torch.long)", "",
             "at = torch.where(loss.detach() < best, i, at)\nbest = torch.minimum(best, loss.detach())", "best, at"),
    "confusion": ("confusion = torch.zeros(WORDS * WORDS, dtype=torch.long)", "",
                  "confusion.index_add_(0, (out.argmax(-1) * WORDS + b).flatten(), torch.ones_like(b).flatten())",
                  "confusion"),
    "seen": ("", "", "model.seen += b.numel()", "model.seen.clone()"),
    "queue": ("queue = torch.zeros(6, WORDS)", "", "queue = torch.cat([queue[1:], out.detach().mean((0, 1))[None]])",
              "queue"),
    "kept": ("kept = []", "", "kept.append(model.head.weight.grad.clone())", "kept[0], kept[-1]"),
    "attribute": ("", "", "model.last = loss.detach()", "model.last"),
    "welford": ("mean, spread = torch.zeros(()), torch.zeros(())", "",
                "delta = loss.detach() - mean\nmean = mean + delta / (i + 1)\n"
                "spread = spread + delta * (loss.detach() - mean)", "mean, spread"),
    "two back": ("hist = [torch.zeros(()), torch.ones(())]", "", "hist.append(hist[-2] * 0.5 + loss.detach())",
                 "hist[-1]"),
    "both": ("pair = None", "", "pair = (loss.detach(), out.detach().amax()) if pair is None else "
             "(pair[0] + loss.detach(), torch.maximum(pair[1], out.detach().amax()))", "pair"),
    "first": ("first = None", "", "first = out.detach() if first is None else first", "first"),
    "table": ("table = torch.zeros(WORDS, WIDTH)", "", "table = table * 0.5 + model.head.weight.detach()", "table"),
}  # fmt: skip
"""By name: a line before the loop, what the model is given besides, lines at the end of a round, what is returned."""

INSIDE = {
    "nothing": "", "clip": "nn.utils.clip_grad_norm_(model.parameters(), 0.3)",
    "noise": "out = out + torch.rand_like(out)", "second": "(loss * 0.5).backward(retain_graph=True)",
    "penalty": "loss = loss + sum(g.square().sum() for g in torch.autograd.grad(loss, model.head.weight,"
    " create_graph=True))",
    "update": "optimizer.step()\noptimizer.zero_grad()",
    "schedule": "out = out / (1.0 + 0.1 * i)", "hook": "out.register_hook(lambda g: g * 0.5)",
    "retained": "out.retain_grad()", "norms": "loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())",
    "distilled": "with torch.no_grad():\n    told = other(a)\nloss = loss + F.mse_loss(out, told)",
    "step": "optimizer.step()", "update zeros": "optimizer.step()\noptimizer.zero_grad(set_to_none=False)",
    "clipped update": "nn.utils.clip_grad_norm_(model.parameters(), 0.3)\noptimizer.step()\noptimizer.zero_grad()",
    "update decay": "optimizer.step()\noptimizer.zero_grad()\nfor group in optimizer.param_groups:\n"
    "    group['lr'] *= 0.9",
    "every other": "if i % 2:\n    optimizer.step()\n    optimizer.zero_grad()",
    "halves": "for u, v in zip(a.chunk(2), b.chunk(2)):\n"
    "    F.cross_entropy(model(u).flatten(0, 1), v.flatten()).backward()",
}  # fmt: skip
"""What else a round does."""

PLACES = {
    "noise": 0, "schedule": 0, "hook": 0, "retained": 0, "second": 1, "penalty": 1, "distilled": 1, "halves": 1,
    "norms": 1, "clip": 2,
}  # fmt: skip
UPDATING = ("update", "clipped update", "every other", "update decay", "update zeros")
"""Those that clear gradients in a round."""
"""Where: behind the model, behind the loss, behind the backward pass."""

UPDATES = {
    "plain": "optimizer.step()", "clip": "nn.utils.clip_grad_norm_(model.parameters(), 0.1)\noptimizer.step()",
    "values": "nn.utils.clip_grad_value_(model.parameters(), 0.05)\noptimizer.step()",
    "averaged": "for p in model.parameters():\n    if p.grad is not None:\n        p.grad /= N\noptimizer.step()",
    "ema": "optimizer.step()\nwith torch.no_grad():\n    for p, q in zip(other.parameters(), model.parameters()):\n"
    "        p.mul_(0.9).add_(q, alpha=0.1)",
    "decay": "optimizer.step()\nfor group in optimizer.param_groups:\n    group['lr'] *= 0.9",
    "asked": "if update:\n    optimizer.step()\n    optimizer.zero_grad()",
}  # fmt: skip

HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda model: None,
    "gradient": lambda model: model.head.weight.register_hook(lambda g: g * 0.5),
    "accumulated": lambda model: model.head.weight.register_post_accumulate_grad_hook(_halve),
    "forward": lambda model: model.layers[0].register_forward_hook(lambda module, args, out: out * 0.5),
    "backward": lambda model: model.layers[0].register_full_backward_hook(lambda module, ins, outs: (ins[0] * 0.5,)),
}

WAYS: dict[str, dict[str, Any]] = {
    "as usual": {}, "for the program": {"choose": "program"}, "within": {"memory_budget": 1 << 20},
    "overlap": {"passes": ("overlap",)}, "one by one": {"bucket_mb": None},
}


def _halve(p: nn.Parameter) -> None:
    p.grad.mul_(0.5)


CLEARS = {
    "first": ("optimizer.zero_grad()", ""), "zeros": ("optimizer.zero_grad(set_to_none=False)", ""),
    "last": ("", "optimizer.zero_grad()"), "last zeros": ("", "model.zero_grad(set_to_none=False)"), "never": ("", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Rounds:
    """A step, what it trains, and where. sizes: the rows of the batch of each call."""

    n: int = 4
    kinds: tuple[str, ...] = ("mlp",)
    again: tuple[bool, ...] = (False,)
    ties_head: bool = False
    cut: str = "chunk"
    loss: str = "mean"
    scale: str = "none"
    carried: tuple[str, ...] = ("total",)
    inside: str = "nothing"
    update: str = "plain"
    clear: str = "first"
    autocast: bool = False
    scaled: bool = False
    quiet: bool = False
    hooks: str = "none"
    way: str = "as usual"
    optimizer: str = "sgd"
    plan: str = "dp 4"
    sizes: tuple[int, ...] = field(default=(16, 16, 16))

    @classmethod
    def of(cls, seed: int) -> Rounds:
        draw = random.Random(seed)
        n, kinds = draw.randint(3, 8), tuple(draw.choices(KINDS, k=draw.randint(1, 3)))
        again = tuple(draw.random() < 0.2 for _ in kinds)
        cut, carried = draw.choice(list(CUTS)), tuple(draw.sample(list(CARRIED), draw.choice((1, 1, 2, 2, 3))))
        rows = 4 * n if cut == "split" else n * draw.choice((1, 2, 4, 4, 8))
        rows -= draw.choice((0, 0, 1)) if cut in ("chunk", "split", "tensor_split", "strided") and rows > 2 * n else 0
        sizes = (rows, rows, rows) if draw.random() < 0.7 or cut == "split" else (rows, 2 * rows, rows)
        inside = draw.choice(["nothing"] * 5 + list(INSIDE))
        updates = [name for name in UPDATES if inside not in UPDATING or name != "values"]  # it wants a gradient
        if cut == "split" and draw.random() < 0.5:
            sizes = (rows, rows + 8, rows - 1)
        more = {
            "scaled": draw.random() < 0.15, "quiet": draw.random() < 0.1,
            "hooks": draw.choice(["none"] * 6 + list(HOOKS)), "way": draw.choice(["as usual"] * 6 + list(WAYS)),
        }
        ties, loss = draw.random() < 0.3, draw.choice(list(LOSSES))
        if loss in SUMMED and inside in UPDATING:  # sums that are stepped on in each round grow until rounding shows
            loss = "mean"
        return cls(
            n, kinds, again, ties, cut, loss, draw.choice(list(SCALES)), carried, inside,
            draw.choice(["plain", *updates]), draw.choice(["first", "first", *CLEARS]), draw.random() < 0.1,
            optimizer=draw.choice(list(OPTIMIZERS)), plan=draw.choice([*list(PLANS)[:5], *PLANS]), sizes=sizes, **more,
        )  # fmt: skip

    @property
    def draws(self) -> bool:
        """Whether the step draws random numbers."""
        return "dropout" in self.kinds or self.inside == "noise" or self.cut == "permuted"

    @property
    def text(self) -> str:
        """The step as Python."""
        carried = [CARRIED[name] for name in self.carried]
        more = [each[1] for each in carried if each[1]]
        inside = ["", "", ""]
        inside[PLACES.get(self.inside, 2)] = INSIDE[self.inside]
        first, last = CLEARS[self.clear]
        before = [first, "scale = 1 / (y[0] > 0).sum().clamp(min=1)", "weights = torch.linspace(0.5, 1, 2 * N + 4)",
                  "classes = torch.linspace(0.5, 1, WORDS, dtype=torch.float64)",
                  *[each[0] for each in carried]]  # fmt: skip
        out = f"out = model({', '.join(['a', *more])})"
        out = f"with torch.autocast('cpu', torch.bfloat16):\n    {out}" if self.autocast else out
        backward = "scaler.scale(loss).backward()" if self.scaled else "loss.backward()"
        backward = f"with quiet(model, i < N - 1):\n    {backward}" if self.quiet else backward
        each = [out, inside[0], LOSSES[self.loss], SCALES[self.scale], inside[1], backward, inside[2],
                *[each[2] for each in carried]]  # fmt: skip
        returned = f"return {', '.join(each[3] for each in carried)}"
        head = "def step(model, other, optimizer, scaler, x, y, update):"
        update = UPDATES[self.update]
        if self.scaled and self.inside not in UPDATING:
            update = "scaler.unscale_(optimizer)\n" + update if self.update != "plain" else update
            update = update.replace("optimizer.step()", "scaler.step(optimizer)") + "\nscaler.update()"
        behind = [update, last, returned]
        parts = [head, _indented(before, 4), f"    {CUTS[self.cut]}", _indented(each, 8), _indented(behind, 4)]
        return "\n".join(parts)

    def __str__(self) -> str:
        return f"{self!r}\n\n{self.text}"


def _indented(parts: list[str], by: int) -> str:
    return "\n".join(" " * by + line for part in parts if part for line in part.split("\n"))


# ---- run --------------------------------------------------------------------------------------


def step_of(rounds: Rounds) -> Callable:
    """The step as a function."""
    name = f"<rounds {hash(rounds.text)}>"
    linecache.cache[name] = len(rounds.text), None, rounds.text.splitlines(True), name
    known = {"torch": torch, "F": F, "nn": nn, "WIDTH": WIDTH, "WORDS": WORDS, "TIME": TIME, "N": rounds.n}
    known["quiet"] = quiet
    known["NUMBERS"] = [0.5 + 0.25 * (i % 3) for i in range(2 * rounds.n + 4)]
    exec(compile(rounds.text, name, "exec"), known)
    return known["step"]


def begun(rounds: Rounds) -> tuple[nn.Module, nn.Module, optim.Optimizer, torch.amp.GradScaler]:
    """A model, another one that nobody trains, the optimiser, and a scaler of losses."""
    model, other = (seeded(lambda: Net(rounds.kinds, rounds.again, rounds.ties_head).double()) for _ in range(2))
    HOOKS[rounds.hooks](model)
    optimizer = OPTIMIZERS[rounds.optimizer]([p for p in model.parameters() if p.requires_grad])
    return model, other, optimizer, torch.amp.GradScaler("cpu", 8.0, growth_interval=2, enabled=rounds.scaled)


def batches(rounds: Rounds) -> list[tuple]:
    """x, y, and whether to update, for each call."""
    g = torch.Generator().manual_seed(1)
    found = []
    for i, rows in enumerate(rounds.sizes):
        x, y = (torch.randint(0, WORDS, (rows, TIME), generator=g) for _ in range(2))
        given = (list(t.tensor_split(rounds.n)) for t in (x, y)) if rounds.cut == "list" else (x, y)
        found.append((*given, rounds.update == "asked" and i % 2 == 1))
    return found


def compiled(rounds: Rounds, **more: Any) -> spmd.CompiledStep:
    """The step on the mesh of its plan."""
    axes, said = PLANS[rounds.plan]
    mesh = spmd.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    over = {name: Shard(0) for name in axes if name != "tp"}
    names = ("x.*", "y.*") if rounds.cut == "list" else ("x", "y")
    is_mlp = "tp" in axes and "mlp" in rounds.kinds
    said = {"params": {f"*{k}": v for k, v in TENSOR_PARALLEL.items()} if is_mlp else {}, **said, **WAYS[rounds.way]}
    return spmd.compile(step_of(rounds), mesh, inputs=dict.fromkeys(names, over) if over else {}, **said | more)


def run(rounds: Rounds, step: Callable, again: Callable[[Callable], Callable] | None = None) -> Iterator[dict]:
    """What is seen after each call, by name. again: gives the step of the last call."""
    model, other, optimizer, scaler = begun(rounds)
    given = batches(rounds)
    for i, batch in enumerate(given):
        if again is not None and i == len(given) - 1:
            step = again(step)
        result = step(model, other, optimizer, scaler, *batch)
        seen = {name: whole(x) for name, x in _seen(result, model, other, optimizer)}
        yield seen | {"scale": whole(scaler.get_scale()), "rates": [whole(g["lr"]) for g in optimizer.param_groups]}
        for group in optimizer.param_groups:  # as a scheduler between the steps
            group["lr"] = 0.9 * group["lr"]


def _seen(result: Any, model: nn.Module, other: nn.Module, optimizer: optim.Optimizer) -> Iterator[tuple[str, Any]]:
    yield from ((f"result{pytree.keystr(path)}", x) for path, x in pytree.tree_flatten_with_path(result)[0])
    for title, each in (("", model), ("other ", other)):
        yield from ((f"{title}{name}", t) for name, t in (*each.named_parameters(), *each.named_buffers()))
    yield from ((name, getattr(model, name)) for name in ("rounds", "is_last", "is_quiet", "last"))
    for name, p in model.named_parameters():
        yield f"{name}.grad", p.grad
        yield from ((f"{key}[{name}]", x) for key, x in optimizer.state.get(p, {}).items())


def whole(x: Any) -> Any:
    """The global value, where all ranks have the same."""
    if not isinstance(x, torch.Tensor):
        return x
    x = x.detach().full_tensor() if isinstance(x, spmd.DTensor) else x.detach()
    return (x.reconcile() if isinstance(x, LocalTensor) else x).clone()


def flat() -> Any:
    """A context in which no rounds become a loop."""
    return mock.patch.object(roll, "LEAST", 100)


def alone(rounds: Rounds) -> list[dict[str, Any]]:
    """What one device sees. Only spmd numbers its random numbers."""
    if not rounds.draws:
        return list(run(rounds, step_of(rounds)))
    with LocalTensorMode(1), flat():
        spmd.manual_seed(7)
        return list(run(rounds, spmd.compile(step_of(rounds), spmd.init_device_mesh("cpu", (1,)))))


@dataclass
class Found:
    """differences: from one device, of the first call in which something differs. programs: of all calls."""

    differences: list[str]
    programs: list[spmd.Program]

    @property
    def times(self) -> list[list[int]]:
        """How often each loop runs, by program."""
        return [[n.target.times for n in p.graph.nodes if isinstance(n.target, Loop)] for p in self.programs]


def found(rounds: Rounds, saves: bool = False) -> Found:
    """The step on simulated ranks, beside one device. saves: whether a step that was loaded makes the last call."""
    wanted = alone(rounds)
    axes, _ = PLANS[rounds.plan]
    differing: list[str] = []
    with LocalTensorMode(prod(axes.values())):
        spmd.manual_seed(7)
        step = compiled(rounds)
        for i, (a, b) in enumerate(zip(wanted, run(rounds, step, _again if saves else None), strict=True)):
            if differing := [f"call {i}: {each}" for each in _unlike(a, b)]:
                break
    return Found(differing, list(step.programs))


def differences(rounds: Rounds, saves: bool = False) -> list[str]:
    """What differs from one device: 1e-10 in float64."""
    return found(rounds, saves).differences


def _again(step: spmd.CompiledStep) -> Callable:
    """The step, saved and loaded where it can be kept and is not stale, else as it is."""
    with tempfile.NamedTemporaryFile(suffix=".spmd") as file:
        try:
            step.save(file.name)
        except ValueError:
            return step
        loaded = spmd.load_step(file.name, step.fn, step.mesh)

    def call(*args):
        try:
            return loaded(*args)
        except spmd.StaleStep:
            return step(*args)

    return call


def _unlike(want: dict, got: dict) -> Iterator[str]:
    if set(want) != set(got):
        yield f"one device has {sorted(set(want) - set(got))} alone, the mesh {sorted(set(got) - set(want))}"
    for name in want.keys() & got.keys():
        a, b = want[name], got[name]
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                yield f"{name}: {b!r} for {a!r}"
        elif a.dtype != b.dtype or a.shape != b.shape:
            yield f"{name}: {b.dtype} {tuple(b.shape)} for {a.dtype} {tuple(a.shape)}"
        elif not torch.allclose(a, b, rtol=0, atol=1e-10 * max([1.0, *a.abs().flatten().tolist()]), equal_nan=True):
            yield f"{name}: {float((a - b).abs().max()):.1e} apart"
