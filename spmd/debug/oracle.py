"""The oracle: test the rows of a rule by running the op itself on simulated ranks.

    mm, row S(0) r -> S(0):   split x by rows, run mm on each part, join the results by rows: is it mm(x, w)?

A sample is an op with real arguments. For a row, the operands are split by the row's placements, the op runs on the
parts of every rank, and the results are joined by the row's placements. They must equal the op's results on the global
operands in value, shape and dtype. Rows on several axes are split one axis after the other, so the same code tests
whether rows compose.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.comm.chunk import blocks, lengths
from spmd.mesh import DeviceMesh
from spmd.tensor.call import Call, TensorMeta
from spmd.tensor.placement import Partial, Placement, Shard
from spmd.tensor.rules.book import rule_of
from spmd.tensor.rules.products import KERNELS
from spmd.tensor.rules.rule import Row, Rule, rows
from spmd.tensor.spec import Spec

UNWRITTEN = {"empty_like", "new_empty", "new_empty_strided"}
"""Ops whose result has no value to compare."""

MESH = DeviceMesh("cpu", [0])
"""Rules depend only on shapes and dtypes, so any mesh will do."""


@dataclass
class Sample:
    """An op and its arguments."""

    op: _torch.OpOverload
    args: tuple
    kwargs: dict[str, Any]

    def __str__(self):
        def short(x):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)

        arguments = [*map(short, self.args), *(f"{k}={short(v)}" for k, v in self.kwargs.items())]
        return f"{self.op}({', '.join(arguments)})"


@dataclass
class Failure:
    sample: Sample
    rows: Sequence[Row]
    ns: tuple[int, ...]
    why: str

    def __str__(self):
        return f"{self.sample} on {self.ns} ranks, {'; '.join(map(str, self.rows))}: {self.why}"


class Tally:
    """The counts of right rows and of rows that cannot be tested, and the wrong rows."""

    def __init__(self):
        self.right, self.skipped, self.wrong = 0, 0, []
        self.ops: set[str] = set()

    def __str__(self):
        return f"{self.right} rows right, {self.skipped} skipped, {len(self.wrong)} wrong, of {len(self.ops)} ops"

    def report(self, limit: int = 20) -> str:
        return "\n".join([str(self), *map(str, self.wrong[:limit])])


# ---- one sample -------------------------------------------------------------------------------


def call_of(sample: Sample, results: Sequence) -> Call:
    """The call of a sample, all operands replicated."""

    def spec(x):
        return Spec.of(MESH, x.shape, x.dtype, stride=x.stride()) if isinstance(x, torch.Tensor) else x

    outs = tuple(TensorMeta.of(t) if isinstance(t, torch.Tensor) else None for t in results)
    return Call(sample.op, pytree.tree_map(spec, sample.args), pytree.tree_map(spec, sample.kwargs), outs)


class Case:
    """A sample with its rule and its right results, ready to test rows."""

    def __init__(self, sample: Sample):
        self.sample = sample
        self.want = run(sample.op, *_cloned(sample))
        self.call = call_of(sample, self.want)
        self.rule: Rule | None = rule_of(self.call)
        self.tolerance = max(TOLERANCE.get(t.dtype, 0) for t in (*self.call.tensors, *filter(None, self.call.outs)))
        self.ins = [x for x in _operands(sample.op, sample.args, sample.kwargs) if isinstance(x, torch.Tensor)]

    def check_each_row(self, ns: Sequence[int], tally: Tally) -> None:
        """Test every row on one axis, of each of these sizes."""
        for n, row in itertools.product(ns, rows(self.rule)):
            self.check([row], (n,), tally)

    def check_pairs(self, n_pairs: int, rng: random.Random, tally: Tally) -> None:
        """Test random pairs of rows on a 2 x 2 mesh."""
        pairs = list(itertools.product(rows(self.rule), repeat=2))
        for pair in rng.sample(pairs, min(n_pairs, len(pairs))):
            self.check(pair, (2, 2), tally)

    def check(self, chosen: Sequence[Row], ns: tuple[int, ...], tally: Tally) -> None:
        """Test one row for each axis."""
        why = self._error_of(chosen, ns)
        tally.ops.add(self.call.name)
        if why is None:
            tally.right += 1
        elif why is SKIP:
            tally.skipped += 1
        else:
            tally.wrong.append(Failure(self.sample, chosen, ns, why))

    def _error_of(self, chosen: Sequence[Row], ns: tuple[int, ...]) -> str | None:
        ins = [[row.ins[i] for row in chosen] for i in range(len(self.ins))]
        outs = [[row.outs[j] for row in chosen] for j in range(len(self.want))]
        if not all(map(commute, ins + outs)) or self._leaves_a_rank_empty(chosen, ns):
            return SKIP
        parts = [split(x, p, ns) for x, p in zip(self.ins, ins, strict=True)]
        got = {}
        for at in itertools.product(*map(range, ns)):
            local = iter([p[at] for p in parts])
            try:
                got[at] = self._run_on(local, outs, ns, at)
            except Exception as e:
                return f"rank {at} raises {type(e).__name__}: {str(e).splitlines()[0]}"
        return self._compare(got, outs, ns)

    def same(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return self.call.name in UNWRITTEN or close(a, b, self.tolerance)

    def _leaves_a_rank_empty(self, chosen: Sequence[Row], ns) -> bool:
        """Whether a factor that must not be empty would be empty on some rank that has a result."""
        return any(
            not all(lengths(x.shape[d], f.units, _axes(chosen, ns, f.name)))
            for dims, x in zip(self.rule.ins, self.ins, strict=True)
            for d, f in enumerate(dims)
            if f is not None
            and f.name in self.rule.nonempty
            and not self.rule.is_free(f.name)
            and _axes(chosen, ns, f.name)
        )

    def _run_on(self, local, outs: Sequence[Sequence[Placement]], ns, at) -> list:
        """The results of one rank. Where they are empty, an op that refuses empty blocks is not called."""
        results = zip(self.call.outs, outs, strict=True)
        shapes = [None if x is None else local_shape(x.shape, p, ns, at) for x, p in results]
        if any(map(self.rule.is_free, self.rule.nonempty)) and not any(s is not None and prod(s) for s in shapes):
            return [x if x is None else x.new_empty(s) for x, s in zip(self.want, shapes, strict=True)]
        return run(self.sample.op, *self._local_arguments(local, outs[self.rule.sized], ns, at))

    def _local_arguments(self, local, out: Sequence[Placement], ns, at):
        """The arguments of one rank: its parts, and the local size if the size of a result is an argument."""
        op = self.sample.op
        args, kwargs = pytree.tree_map(
            lambda x: next(local) if isinstance(x, torch.Tensor) else x, in_order(self.sample)
        )
        if self.rule.sizes is not None:
            shape = list(local_shape(self.want[self.rule.sized].shape, out, ns, at))
            names = [a.name for a in _torch.arguments(op)]
            if self.rule.sizes in kwargs:
                kwargs[self.rule.sizes] = shape
            else:
                i = names.index(self.rule.sizes)
                args = (*args[:i], shape, *args[i + 1 :])
        return args, kwargs

    def _compare(self, got, outs, ns) -> str | None:
        for j, want in enumerate(self.want):
            if not isinstance(want, torch.Tensor):
                continue
            value = join({at: r[j] for at, r in got.items()}, outs[j], ns, self.same)
            if isinstance(value, str):
                return f"result {j}: {value}"
            if value.dtype != want.dtype or value.shape != want.shape:
                return f"result {j} is {value.dtype}{list(value.shape)}, not {want.dtype}{list(want.shape)}"
            if not self.same(value, want):
                return f"result {j} is {_brief(value)}, not {_brief(want)}"
        return None


SKIP = "skip"


def _axes(chosen, ns, name) -> tuple[int, ...]:
    return tuple(n for n, row in zip(ns, chosen, strict=True) if row.factor == name)


def _brief(x: torch.Tensor) -> str:
    return str(x.flatten()[:6].tolist())


def commute(placements: Sequence[Placement]) -> bool:
    """Whether these placements of one tensor commute: one kind of Partial, or sums and averages together."""
    kinds = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(kinds) < 2 or kinds == {"sum", "avg"}


def run(op, args, kwargs) -> list:
    """The results of the op, flattened; None where it returns none."""
    return pytree.tree_leaves(KERNELS.get(op, op)(*args, **kwargs), is_leaf=lambda x: x is None)


def _cloned(sample: Sample):
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, (sample.args, sample.kwargs))


def _operands(op, args, kwargs) -> list:
    """The leaves of the arguments in the order of the schema, as in `Call.tensors`."""
    arguments = dict(zip((a.name for a in _torch.arguments(op)), args, strict=False)) | kwargs
    return pytree.tree_leaves([arguments[a.name] for a in _torch.arguments(op) if a.name in arguments])


def in_order(sample: Sample):
    """The arguments with keywords in the order of the schema."""
    names = [a.name for a in _torch.arguments(sample.op)]
    return tuple(sample.args), dict(sorted(sample.kwargs.items(), key=lambda item: names.index(item[0])))


# ---- splitting --------------------------------------------------------------------------------


def split(x: torch.Tensor, placements: Sequence[Placement], ns: tuple[int, ...]) -> dict[tuple, torch.Tensor]:
    """The block of x at each coordinate, by these placements: one axis after the other."""
    if not ns:
        return {(): x}
    parts = [x.clone() for _ in range(ns[0])]
    if isinstance(placements[0], Shard):
        parts = _shards(x, placements[0], ns[0])
    if isinstance(placements[0], Partial):
        parts = SPLIT[placements[0].reduce_op](x, ns[0])
    inner = [split(part, placements[1:], ns[1:]) for part in parts]
    return {(i, *at): t for i, found in enumerate(inner) for at, t in found.items()}


def _shards(x: torch.Tensor, p: Shard, n: int) -> list[torch.Tensor]:
    """The n shards of x; if it is packed, those of each of its blocks, one behind the other."""
    d = p.dim % x.ndim
    every = blocks(x.shape[d] // p.blocks, p.unit, (n,))
    return [_apart(x, d, p.blocks).narrow(d + 1, *at).flatten(d, d + 1).clone() for at in every]


def _apart(x: torch.Tensor, d: int, n: int) -> torch.Tensor:
    """The tensor with dim d split into n blocks."""
    return x.unflatten(d, (n, x.shape[d] // n))


def local_shape(shape, placements, ns, at) -> list[int]:
    shape = list(shape)
    for p, n, i in zip(placements, ns, at, strict=True):
        if isinstance(p, Shard):
            shape[p.dim] = lengths(shape[p.dim], p.units, (n,))[i]
    return shape


def noise(x: torch.Tensor) -> torch.Tensor:
    """Small random numbers with the shape and dtype of x. None is zero, and all have few digits: sums are exact."""
    if x.dtype == torch.bool:
        return torch.rand(x.shape) < 0.5
    if not x.is_floating_point() and not x.is_complex():
        return torch.randint(1, 4, x.shape).to(x.dtype)
    real = torch.randint(16, 80, x.shape) / 64 * (2 * (torch.rand(x.shape) < 0.5) - 1)
    return real.to(x.dtype)


def _sum(x, n):
    rest = [noise(x) for _ in range(n - 1)]
    return _shuffled([x - sum(rest), *rest])


def _avg(x, n):
    rest = [noise(x) for _ in range(n - 1)]
    return _shuffled([x - sum(rest), *(x + r for r in rest)])


def _product(x, n):
    signs = [(2 * (torch.rand(x.shape) < 0.5) - 1).to(x.dtype) * 1 for _ in range(n - 1)]
    first = x.clone()
    for s in signs:
        first = first * s
    return _shuffled([first, *signs])


def _extreme(worse):
    """Splits a tensor so that each element is right on one rank and the same or worse on the others."""

    def split(x, n):
        holder = torch.randint(0, n, x.shape)
        return [torch.where(holder == i, x, worse(x, noise(x))) for i in range(n)]

    return split


def _shuffled(parts: list) -> list:
    i = int(torch.randint(0, len(parts), ()))
    return parts[i:] + parts[:i]


SPLIT = {
    "sum": _sum, "avg": _avg, "product": _product,
    "max": _extreme(torch.minimum), "min": _extreme(torch.maximum),
}  # fmt: skip


# ---- joining ----------------------------------------------------------------------------------


def join(parts: dict[tuple, torch.Tensor], placements, ns, same) -> torch.Tensor | str:
    """The tensor that these parts make up, or an error in words."""
    if not ns:
        return parts[()]
    found = []
    for i in range(ns[0]):
        inner = join({at[1:]: t for at, t in parts.items() if at[0] == i}, placements[1:], ns[1:], same)
        if isinstance(inner, str):
            return inner
        found.append(inner)
    p = placements[0]
    if isinstance(p, Partial):
        return REDUCE[p.reduce_op](torch.stack(found)) if len({t.shape for t in found}) == 1 else "shapes differ"
    if isinstance(p, Shard):
        here = [t.shape[p.dim] for t in found]
        want = lengths(sum(here), p.units, ns[:1])
        if here != want:
            return f"blocks of {here}, not {want}"
        return torch.cat([_apart(t, p.dim, p.blocks) for t in found], p.dim + 1).flatten(p.dim, p.dim + 1)
    equal = all(t.shape == found[0].shape and same(t, found[0]) for t in found)
    return found[0] if equal else "replicated, but ranks differ"


def _as_bool(reduce):
    return lambda s: reduce(s.to(torch.uint8)).bool() if s.dtype == torch.bool else reduce(s)


REDUCE = {
    "sum": lambda s: s.sum(0, dtype=s.dtype), "product": lambda s: s.prod(0, dtype=s.dtype),
    "avg": lambda s: s.sum(0) / len(s),  # integers become floats here, and the wrong dtype is reported
    "max": _as_bool(lambda s: s.amax(0)), "min": _as_bool(lambda s: s.amin(0)),
}  # fmt: skip

TOLERANCE = {
    torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 2e-4, torch.complex64: 2e-4,
    torch.float16: 2e-2, torch.bfloat16: 1e-1,
}  # fmt: skip


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Whether integers are equal and floats close, relative to the largest of them. NaN equals NaN."""
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    finite = b[torch.isfinite(b)].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


# ---- many samples ----------------------------------------------------------------------------


def sweep(samples: Iterable[Sample]) -> Tally:
    """Test every row of every sample's rule on 2 and 3 ranks, and one pair of rows on a 2 x 2 mesh."""
    tally, rng = Tally(), random.Random(0)
    for case in map(Case, samples):
        if case.rule is not None:
            case.check_each_row((2, 3), tally)
            case.check_pairs(1, rng, tally)
    return tally
