"""Random steps that assign, swap, share, view and write tensors and containers, beside one device.

    difference(Aliases.of(seed))      what differs, as text; empty if nothing does

A step is a few lines of Python on a module with tensors, buffers, lists, dicts, tuples, deques and objects in its
attributes, an object around the step, and a list among its arguments. It is called several times; the user does
something between, and holds on to what was there and to what was returned. Compared are values, which of all names are
one object, and which tensors show one memory: by a last write into each tensor. A step prints as Python.
"""

from __future__ import annotations

import random
import re
import types
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import spmd
from spmd import LocalTensorMode, Replicate, Shard
from tests.tensor.single import every_rank


class Pair(NamedTuple):
    first: Any
    second: Any


class Box:
    def __init__(self, t, both):
        self.t, self.l = t, both


def row(value: float) -> torch.Tensor:
    return torch.arange(4, dtype=torch.float64) / 8 + value


class Net(nn.Module):
    def __init__(self, share: bool):
        super().__init__()
        self.up = nn.Linear(4, 4).double()
        self.a, self.b = row(1), row(2)
        self.s = torch.stack([row(i / 4) for i in range(4)])
        self.m, self.n = torch.stack([row(i) for i in range(4)]), torch.stack([row(i / 2) for i in range(4)])
        self.k, self.l = [row(3), row(4)], [row(5), row(6)]
        self.d = {"x": row(7), "y": [row(8), row(9)]}
        self.e = {"x": row(7.5), "y": [row(8.5), row(9.5)]}
        self.nested = [[row(10), row(11)], [row(12), row(13)]]
        self.pair, self.named = (row(14), [row(15), row(16)]), Pair(row(17), [row(18), row(19)])
        self.q, self.box = deque([row(20), row(21)]), Box(row(22), [row(23), row(24)])
        self.o = OrderedDict(x=row(36), y=[row(37), row(38)])
        self.register_buffer("buf", row(25))
        self.register_buffer("table", torch.stack([row(26 + i) for i in range(4)]))
        if share:
            self.b, self.l, self.e["y"], self.box.l = self.a, self.k, self.k, self.nested[0]


# ---- what is drawn ----------------------------------------------------------------------------

PLACES = {
    "vector": (
        "model.a", "model.b", "model.k[0]", "model.l[1]", 'model.d["x"]', 'model.e["x"]', 'model.d["y"][0]',
        "model.nested[1][0]", "model.q[0]", "model.box.t", "held.t", "held.l[1]", "given[1]",
    ),
    "matrix": ("model.m", "model.n"),
    "batch": ("model.s",),
    "list": (
        "model.k", "model.l", 'model.d["y"]', 'model.e["y"]', "model.nested[0]", "model.nested[1]", "model.box.l",
        "held.l", "given",
    ),
    "dict": ("model.d", "model.e"),
    "nested": ("model.nested",),
    "pair": ("model.pair",),
    "named": ("model.named",),
    "deque": ("model.q",),
    "object": ("model.box",),
    "ordered": ("model.o",),
}  # fmt: skip
"""Where a step may find and put something, by what it is."""

READ = {
    "vector": (*PLACES["vector"], "model.pair[0]", "model.named.first"),
    "list": (*PLACES["list"], "model.pair[1]", "model.named.second"),
}


@dataclass(frozen=True)
class Aliases:
    """lines: of the step. result: what it returns. between: what the user does between the calls. share: whether
    attributes share some of what they hold from the beginning. gives_own: whether the list that is given is an
    attribute's. batches: the sizes of the calls' batches. mode: one of `MODES`."""

    lines: tuple[str, ...]
    result: str
    between: tuple[tuple[str, ...], ...]
    share: bool
    gives_own: bool
    batches: tuple[int, ...]
    mode: str

    @classmethod
    def of(cls, seed: int) -> Aliases:
        draw = _Draw(random.Random(seed))
        lines = tuple(draw.statement() for _ in range(draw.random.choice((1, 2, 2, 3, 3, 4))))
        result = draw.result()
        calls = draw.random.choice((3, 4))
        between = tuple(tuple(draw.by_user() for _ in range(draw.random.choice((0, 1, 1)))) for _ in range(calls))
        batches = (4,) * calls if draw.random.random() < 0.7 else tuple(draw.random.choices((2, 4, 6), k=calls))
        share, gives_own = draw.random.random() < 0.5, draw.random.random() < 0.2
        return cls(lines, result, between, share, gives_own, batches, draw.random.choice(MODES))

    def __str__(self) -> str:
        body = "\n".join(f"    {line}" for line in (*HEAD, *self.lines, f"return {self.result}"))
        rest = f"# between: {self.between}, {self.share=}, {self.gives_own=}, {self.batches=}, {self.mode=}"
        return f"def step(model, x, given):\n{body}\n{rest}\n"


HEAD = ("y = model.up(x).detach()", "h = y.mean(0)", "held.t, held.l")
MODES = ("plain", "plain", "plain", "inference", "loaded")


class _Draw:
    def __init__(self, draw: random.Random) -> None:
        self.random = draw

    def place(self, kind: str) -> str:
        return self.random.choice(PLACES[kind])

    def value(self, kind: str, depth: int = 2) -> str:
        """An expression of a kind."""
        there = READ.get(kind, PLACES[kind])
        if not depth or self.random.random() < 0.4:
            return self.random.choice(there)
        found = getattr(self, kind)(depth - 1)
        return f"({found})" if kind in ("vector", "matrix", "batch") and " " in found else found

    def vector(self, depth: int) -> str:
        v, m = self.value("vector", depth), self.value("matrix", depth)
        return self.random.choice((
            f"h * {self.random.choice((2, 0.5, 3))}", f"{v} + h", f"{v} * 0.5", f"{v}.detach()", f"{m}[{self.n}]",
            f"{m}[:, {self.n}]", f"{m}.t()[{self.n}]", f"{m}.diagonal()", f"{m}.chunk(2)[{self.n % 2}][1]",
            f"{m}.view(-1)[4:8]", f"{v}[:]", f"{v}.view(2, 2).view(-1)", f"{v}.flip(0)", f"{m}.unbind(1)[{self.n}]",
            "y[0]", "y[:, :][-1]", "y.view(-1)[:4]", "y[1:][0]", "y.chunk(2)[1][0]", "model.s[0]", "y.t()[:, 1]",
            "model.table[1]", "model.buf * 2", "model.buf.detach()", "model.up.weight.detach()[0]",
        ))  # fmt: skip

    def matrix(self, depth: int) -> str:
        m, v = self.value("matrix", depth), self.value("vector", depth)
        return self.random.choice((
            f"{m}.t()", f"{m}[:]", f"{m} * 0.5", f"{m}.detach()", f"h.outer({v})", f"torch.stack([{v}, h, h, h])",
            f"{m}.view(2, 2, 4).view(4, 4)", f"{m}.view(16).view(4, 4)", "model.table * 2", "model.table.t()",
        ))  # fmt: skip

    def batch(self, depth: int) -> str:
        return self.random.choice((
            "y", "y * 2", "y[:]", "y.t().t()", "y.view(-1).view(-1, 4)", "model.s[:]", "y.detach()",
        ))  # fmt: skip

    def list(self, depth: int) -> str:
        one, other, inner = self.value("vector", depth), self.value("vector", depth), self.value("list", depth)
        return self.random.choice((f"[{one}, {other}]", f"list({inner})", f"{inner}[::-1]", f"[{one}, {inner}[0]]"))

    def dict(self, depth: int) -> str:
        new = f'{{"x": {self.value("vector", depth)}, "y": {self.value("list", depth)}}}'
        return self.random.choice((new, new, f"dict({self.place('dict')})"))

    def nested(self, depth: int) -> str:
        inner = self.value("list", depth)
        return self.random.choice((
            f"[{inner}, {self.value('list', depth)}]", f"[{inner}, {inner}]", f"[{self.place('list')}] * 2",
            "list(model.nested)",
        ))  # fmt: skip

    def pair(self, depth: int) -> str:
        return f"({self.value('vector', depth)}, {self.value('list', depth)})"

    def named(self, depth: int) -> str:
        return f"Pair({self.value('vector', depth)}, {self.value('list', depth)})"

    def deque(self, depth: int) -> str:
        return f"deque([{self.value('vector', depth)}, {self.value('vector', depth)}])"

    def object(self, depth: int) -> str:
        return f"Box({self.value('vector', depth)}, {self.value('list', depth)})"

    def ordered(self, depth: int) -> str:
        return f"OrderedDict(x={self.value('vector', depth)}, y={self.value('list', depth)})"

    @property
    def n(self) -> int:
        return self.random.randrange(4)

    def kind(self) -> str:
        return self.random.choices(list(PLACES), (6, 2, 1, 5, 2, 2, 1, 1, 1, 1, 1))[0]

    def statement(self) -> str:
        kind = self.kind()
        at, other = self.place(kind), self.place(kind)
        value, v, of = self.value(kind), self.value("vector", 1), self.place("list")
        return self.random.choice((
            f"{at} = {value}", f"{at} = {value}", f"{at}, {other} = {other}, {at}", f"{at} = {other} = {value}",
            self.write(), self.write(), self.write(), f"{of}[{self.n % 2}] = {v}", f"{of}.reverse()",
            f"{of}[:] = [{v}, {v}]", f"{of}.append({of}.pop(0))", "model.q.rotate(1)",
            "model.o.move_to_end('x')", f"model.d.update(x={v})",
            f"model.box.t = {v}", f"held.t = {v}",
            f"old = {of}; {of} = {self.value('list')}; old[0] = {v}",
        ))  # fmt: skip

    def write(self) -> str:
        v, m = (self.random.choice(READ.get(kind, PLACES[kind])) for kind in ("vector", "matrix"))
        new = self.value("vector", 1)
        return self.random.choice((
            f"{v}.mul_(0.5)", f"{v}.add_(h)", f"{v}[1:] = h[1:]", f"{v}.copy_({new})", f"{m}[1].mul_(2)",
            f"{m}.t()[0] = h", f"{m}.mul_(0.5)", "y.mul_(0.5)", "y[0].add_(1)", "model.s[0].mul_(2)",
            "model.buf.mul_(0.5)", "model.table[2].add_(h)",
            "model.buf = model.buf * 0.5",
        ))  # fmt: skip

    def result(self) -> str:
        parts = [self.value(kind, 1) for kind in (self.kind() for _ in range(self.random.choice((1, 2, 2, 3))))]
        parts = [part for part in parts if not _STATE.intersection(re.findall(r"\w+", part))]
        return self.random.choice((
            f"({''.join(f'{part}, ' for part in parts)})", f"[{', '.join(parts)}]",
            f"{{{', '.join(f'{i}: {part}' for i, part in enumerate(parts))}}}",
        ))  # fmt: skip

    def by_user(self) -> str:
        kind = self.kind()
        at, other = self.place(kind), self.place(kind)
        vector, of = self.random.choice(PLACES["vector"][:-1]), self.place("list")
        return self.random.choice((
            f"{at} = {other}", f"{at}, {other} = {other}, {at}", f"{vector}.mul_(0.75)", f"{of}.reverse()",
            f"{of} = list({of})", f"{of}[0] = {of}[1]", "model.m.add_(1)", "handles[-1] if handles else None",
            "[x.sub_(0.25) for x in tensors_in(handles)[-2:]]", f"{vector} = {vector}.clone()",
        )).replace("given", "model.k")  # fmt: skip


_STATE = {"buf", "table", "up"}
"""What is returned of these is a copy."""


# ---- a session --------------------------------------------------------------------------------

ATTRIBUTES = ("a", "b", "m", "n", "k", "l", "d", "e", "nested", "pair", "named", "q", "box", "o", "buf", "table", "s")


ROWS = torch.linspace(-1, 2, 24, dtype=torch.float64).reshape(6, 4)


class Session:
    """What a user has: the model, an object around the step, a list that is given, and all that was returned."""

    def __init__(self, aliases: Aliases) -> None:
        torch.manual_seed(0)
        self.model = Net(aliases.share)
        self.held, self.given = types.SimpleNamespace(t=row(30), l=[row(31), row(32)]), [row(33), row(34)]
        if aliases.gives_own:
            self.given = self.model.l
        self.handles: list[Any] = []
        self.names = {
            "__name__": __name__, "torch": torch, "Pair": Pair, "deque": deque, "OrderedDict": OrderedDict,
            "Box": Box, "held": self.held,
            "model": self.model, "handles": self.handles, "tensors_in": tensors_in, "given": self.given,
        }  # fmt: skip
        text = str(aliases)
        exec(compile(text, "<aliases>", "exec"), self.names)
        self.step = self.names["step"]

    def call(self, step: Any, i: int, n: int) -> None:
        self.handles += [step(self.model, ROWS[:n] + i, self.given)]

    def place_given(self, mesh: Any) -> None:
        """Let the tensors that are given be DTensors, of which a step returns no copies."""
        for i, x in enumerate(self.given):
            self.given[i] = spmd.distribute_tensor(x, mesh, [Replicate(), Replicate()])

    def hold(self) -> None:
        self.handles += [self.model.k, self.model.d, self.model.d["y"], self.model.a, self.model.m, self.model.buf]

    def named(self) -> list[tuple[str, Any]]:
        """All that can be reached, by each of its names."""
        roots = {f"model.{name}": getattr(self.model, name) for name in ATTRIBUTES}
        roots |= {"held.t": self.held.t, "held.l": self.held.l, "given": self.given}
        roots |= {f"handles[{i}]": x for i, x in enumerate(self.handles)}
        return [each for name, x in roots.items() for each in _reached(name, x)]


def _reached(name: str, x: Any) -> Iterator[tuple[str, Any]]:
    yield name, x
    inside = vars(x) if isinstance(x, Box) else x
    if isinstance(inside, dict):
        for key, each in inside.items():
            yield from _reached(f"{name}[{key!r}]", each)
    elif isinstance(inside, (list, tuple, deque)):
        for i, each in enumerate(inside):
            yield from _reached(f"{name}[{i}]", each)


def tensors_in(x: Any) -> list[torch.Tensor]:
    return [each for _, each in _reached("", x) if isinstance(each, torch.Tensor)]


REFUSED = (
    "shares memory with", "have common elements", "has a place of its own", "takes the tensors out",
)
"""What a step may not do, in the words of the error."""


@dataclass(frozen=True)
class Seen:
    """difference: what differs from one device first. refused: the error, where the step may not do what it does.
    calls: how many were made."""

    difference: str = ""
    refused: str = ""
    calls: int = 0


def seen(aliases: Aliases, folder: Path) -> Seen:
    """folder: where a step is saved."""
    alone, ours = Session(aliases), Session(aliases)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        ours.place_given(mesh)
        step = spmd.compile(ours.step, mesh, inputs={"x": {"dp": Shard(0)}}, params={"up.weight": {"tp": Shard(0)}})
        with torch.inference_mode() if aliases.mode == "inference" else torch.no_grad():
            return _seen(aliases, alone, ours, step, folder)


def _seen(aliases: Aliases, alone: Session, ours: Session, step: Any, folder: Path) -> Seen:
    both = alone, ours
    for i, (n, between) in enumerate(zip(aliases.batches, aliases.between, strict=True)):
        for session in both:
            session.hold()
        alone.call(alone.step, i, n)
        try:
            ours.call(_loaded(step, folder) if aliases.mode == "loaded" and i else step, i, n)
        except (RuntimeError, ValueError) as error:
            if not any(text in str(error) for text in REFUSED):
                raise
            return Seen(refused=str(error), calls=i)
        if difference := _difference(ours, alone, f"call {i}"):
            return Seen(difference, calls=i)
        for text in between:
            for session in both:
                exec(text, session.names)
        if difference := _difference(ours, alone, f"behind {between} after call {i}"):
            return Seen(difference, calls=i)
    for session in both:
        unique = {id(x): x for _, x in session.named() if isinstance(x, torch.Tensor)}
        for i, x in enumerate(unique.values()):
            x.mul_(0.5).add_(i)
    return Seen(_difference(ours, alone, "writes into all"), calls=len(aliases.batches))


def _loaded(step: Any, folder: Path) -> Any:
    """The step as it was saved, where that serves."""
    step.save(folder / "step.spmd")
    loaded = spmd.load_step(folder / "step.spmd", step.fn, step.mesh)

    def call(*args: Any) -> Any:
        try:
            return loaded(*args)
        except spmd.StaleStep:
            return step(*args)

    return call


def _difference(ours: Session, alone: Session, where: str) -> str:
    got, want = ours.named(), alone.named()
    if [name for name, _ in got] != [name for name, _ in want]:
        return f"{where}: {set(got) ^ set(want)} are there on one side"
    one, other = (_first_names(each) for each in (got, want))
    for (name, x), (_, y) in zip(got, want, strict=True):
        if type(x) is not type(y) and not isinstance(y, torch.Tensor):
            return f"{where}: {name} is a {type(x).__name__} for a {type(y).__name__}"
        if one[name] != other[name]:
            return f"{where}: {name} is {one[name]} for {other[name]}"
        if isinstance(y, torch.Tensor) and not torch.allclose(every_rank(x)[0], y.detach(), rtol=1e-9, atol=1e-9):
            return f"{where}: {name} is {every_rank(x)[0].tolist()} for {y.tolist()}"
    return ""


def _first_names(named: list[tuple[str, Any]]) -> dict[str, str]:
    """The first name of what each name is of."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(x), name) for name, x in named}
