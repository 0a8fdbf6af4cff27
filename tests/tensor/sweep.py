"""The sweep: every op of torch's op database, on tensors with all kinds of placements, against the op on one device.

    for case in cases(entry): print(case, ask(case, Ours((2, 2))))

A case is an op with arguments and a placement for each tensor among them. It is run forward and backward: results and
gradients must be those of one device. Its verdict is one of

    right         on all ranks: values, shapes, dtypes, numbers
    wrong         another number, without an error
    unsupported   NotImplementedError
    crashed       any other error, where one device has none

`Ours` runs it on spmd's DTensors in LocalTensorMode, `OnThreads` on ranks that are threads, where nothing of the
simulation stands between the op and the rank. `benchmarks/coverage.py` has another class, for torch's DTensor.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from spmd import _torch
from spmd.sim import LocalTensor, LocalTensorMode, run_ranks
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.fallback import fallbacks
from spmd.tensor.placement import Partial, Placement, Replicate, Shard
from spmd.tensor.spec import spec_of
from tests.tensor.oracle import close, split
from tests.tensor.single import mesh_of, weights

R = Replicate()
MESHES = ((4,), (2, 2))
LARGEST = 20_000  # elements of all operands of a case

UNWRITTEN = ("empty", "new_empty")
"""Prefixes of the names of ops whose results have no values to compare."""

NO_DATA_OF_ITS_OWN = ("jiterator", "sparse", "torch.ops", "to_sparse", "_refs")
"""Prefixes of the names of entries that are no ops on strided CPU tensors."""

DTYPES = (torch.float32, torch.int64, torch.complex64)
"""An entry is asked in the first of these that it has."""

AS_WRITTEN = {"__getitem__": operator.getitem}
"""Entries that name a method of torch.Tensor: here the method of the DTensor is called, as users do."""

Placing = tuple[Placement, ...]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a case, and what became of its placements.

    kind: right, wrong, unsupported, crashed or random. shared: some result or gradient is still sharded. kept: some
    result is, gradients aside. Both are None if no operand was sharded, or if nothing has a dim to shard. gathered: the
    ops that ran on replicated tensors; None if no operand was sharded.
    """

    kind: str
    why: str = ""
    shared: bool | None = None
    kept: bool | None = None
    gathered: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class Case:
    """An op of the database with arguments, and placements for each tensor among them.

    tensors: what the placings say the tensors are; a sum of parts is rounded, so this is not what the database gave.
    parts: for each tensor what each coordinate of the mesh holds. variant: "", "_" for in place, "out".
    """

    op: str
    variant: str
    fn: Callable
    arguments: tuple[tuple, dict]
    mesh: tuple[int, ...]
    placings: tuple[Placing, ...]
    tensors: tuple[torch.Tensor, ...]
    parts: tuple[dict[tuple, torch.Tensor], ...]

    def __str__(self):
        def short(x):
            if not isinstance(x, torch.Tensor):
                return repr(x)
            placing = ", ".join(map(str, next(placed)))
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on ({placing})"

        placed = iter(self.placings)
        args, kwargs = tree_map(short, self.arguments)
        given = [*map(str, args), *(f"{name}={x}" for name, x in kwargs.items())]
        return f"{self.op}{self.variant}({'; '.join(given)})"

    def run(self, tensors: Sequence[torch.Tensor], replicated: Callable) -> tuple[list, list]:
        """Results and gradients with these tensors as arguments. `replicated` gives the weights of the results."""
        given = iter(tensors)
        args, kwargs = tree_map(lambda x: next(given) if isinstance(x, torch.Tensor) else x, self.arguments)
        if self.variant == "_":
            args = (args[0].clone(), *args[1:])
        out = self.fn(*args, **kwargs)
        if self.variant == "out":
            target = tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x).detach(), out)
            with torch.no_grad():
                given = self.fn(*tree_map_only(torch.Tensor, torch.Tensor.detach, args), out=target, **kwargs)
            return [*_leaves(target), *_leaves(given)], []
        return _leaves(out), self._gradients(_leaves(out), tensors, replicated)

    def placed(self) -> list[tuple[dict[tuple, torch.Tensor], Placing, torch.Tensor]]:
        """For each tensor copies of its parts, its placements, and the tensor that the parts make."""
        parts = [{at: x.clone() for at, x in of.items()} for of in self.parts]
        return list(zip(parts, self.placings, self.tensors, strict=True))

    def _gradients(self, results: list, tensors: Sequence[torch.Tensor], replicated: Callable) -> list:
        smooth = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        into = [t for t in tensors if t.requires_grad]
        if not smooth or not into:
            return []
        cotangents = [replicated(r.shape, r.dtype) for r in smooth]
        return list(torch.autograd.grad(smooth, into, cotangents, allow_unused=True))


def _leaves(out: Any) -> list:
    return tree_leaves(out, is_leaf=lambda x: x is None)


class Side(Protocol):
    """An implementation of distributed tensors on simulated ranks of one mesh."""

    def run(self, case: Case) -> list[Found]:
        """What each rank finds."""


@dataclass(frozen=True)
class Found:
    """The results and gradients of a case on one rank, as whole tensors, and for each whether it was still sharded.

    n_results: how many of them are results.
    """

    whole: list
    shared: list[bool]
    n_results: int


class InOneThread:
    """A Side for which one thread plays all ranks inside of the block `with self`."""

    def __enter__(self):
        raise NotImplementedError

    def __exit__(self, *exc):
        raise NotImplementedError

    def place(self, parts: dict[tuple, torch.Tensor], placing: Placing, like: torch.Tensor) -> torch.Tensor:
        """The tensor of which each coordinate holds this part."""
        raise NotImplementedError

    def whole(self, x: torch.Tensor) -> dict[int, torch.Tensor]:
        """The whole tensor as each rank has it; {0: x} for a tensor that is one for all."""
        raise NotImplementedError

    def is_shared(self, x: torch.Tensor) -> bool:
        """Whether x is not replicated."""
        raise NotImplementedError

    def run(self, case: Case) -> list[Found]:
        def replicated(shape, dtype):
            with _disable_current_modes():
                w = _weights(shape, dtype)
                parts = split(w, _everywhere(case), case.mesh)
            return self.place(parts, _everywhere(case), w)

        with self:
            results, gradients = case.run([self.place(*given) for given in case.placed()], replicated)
            got = results + gradients
            whole = [self.whole(x) if isinstance(x, torch.Tensor) else {0: x} for x in got]
            shared = [isinstance(x, torch.Tensor) and self.is_shared(x) for x in got]
        ranks = sorted(set().union({0}, *whole))
        return [Found([x.get(rank, x[0]) for x in whole], shared, len(results)) for rank in ranks]


class Ours(InOneThread):
    """spmd's DTensor in LocalTensorMode."""

    def __init__(self, mesh: tuple[int, ...]):
        self.ranks = LocalTensorMode(math.prod(mesh))
        self.mesh = mesh_of(mesh)

    def __enter__(self):
        self.ranks.__enter__()
        return self

    def __exit__(self, *exc):
        self.ranks.__exit__(*exc)

    def place(self, parts, placing, like):
        local = LocalTensor({self.mesh.rank_at(at): x for at, x in parts.items()})
        spec = spec_of(self.mesh, placing, like.shape, like.dtype)
        return DTensor(local, spec, requires_grad=like.requires_grad)

    def whole(self, x):
        full = x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()
        return full.local if isinstance(full, LocalTensor) else {0: full}

    def is_shared(self, x):
        return isinstance(x, DTensor) and not x._spec.is_replicated


class OnThreads:
    """spmd's DTensor on a thread for each rank."""

    def __init__(self, mesh: tuple[int, ...]):
        self.mesh = mesh_of(mesh)

    def run(self, case):
        return run_ranks(lambda rank: self._on_rank(case), self.mesh.size())

    def _on_rank(self, case: Case) -> Found:
        def replicated(shape, dtype):
            w = _weights(shape, dtype)
            return DTensor(w, spec_of(self.mesh, _everywhere(case), w.shape, w.dtype))

        results, gradients = case.run([self._leaf(*given) for given in case.placed()], replicated)
        got = results + gradients
        whole = [x.detach().full_tensor() if isinstance(x, DTensor) else x for x in got]
        return Found(whole, [isinstance(x, DTensor) and not x._spec.is_replicated for x in got], len(results))

    def _leaf(self, parts: dict[tuple, torch.Tensor], placing: Placing, like: torch.Tensor) -> DTensor:
        spec = spec_of(self.mesh, placing, like.shape, like.dtype)
        return DTensor(parts[self.mesh.get_coordinate()], spec, requires_grad=like.requires_grad)


# ---- verdicts ---------------------------------------------------------------------------------


def ask(case: Case, side: Side) -> Verdict | None:
    """The verdict on the case with this implementation; None if the op fails on one device."""
    torch.manual_seed(0)
    try:
        with _Draws() as draws:
            results, gradients = case.run([_copy(t) for t in case.tensors], _weights)
    except Exception:
        return None
    if draws.any:
        return Verdict("random")
    fallbacks.clear()
    try:
        found = side.run(case)
    except NotImplementedError as error:
        return Verdict("unsupported", _brief(error))
    except Exception as error:
        return Verdict("crashed", f"{type(error).__name__}: {_brief(error)}")
    for rank, on_rank in enumerate(found):
        why = _first_difference(case, results + gradients, on_rank.whole)
        if why:
            return Verdict("wrong", f"on rank {rank} {why}")
    if not _has_sharded_operand(case):
        return Verdict("right")
    first, gathered = found[0], tuple(f.op for f in fallbacks())
    return Verdict("right", "", _is_shared(first, len(first.whole)), _is_shared(first, first.n_results), gathered)


def _everywhere(case: Case) -> Placing:
    return tuple(R for _ in case.mesh)


def _weights(shape, dtype) -> torch.Tensor:
    return weights(torch.empty(tuple(shape), dtype=dtype))


def _copy(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


class _Draws(TorchDispatchMode):
    """Records whether an op draws random numbers."""

    any = False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.any |= torch.Tag.nondeterministic_seeded in op.tags
        return _torch.run_with_bits(op, *args, **(kwargs or {}))


def _first_difference(case: Case, want: list, got: list) -> str:
    if len(want) != len(got):
        return f"{len(got)} results, not {len(want)}"
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        why = _difference(case, a, b)
        if why:
            return f"result {i} {why}"
    return ""


def _difference(case: Case, want: Any, got: Any) -> str:
    if not isinstance(want, torch.Tensor):
        return "" if type(want) is type(got) and _equal(want, got) else f"is {got!r}, not {want!r}"
    if got is None:
        return "is None, not a tensor"
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return f"is {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
    if not case.op.startswith(UNWRITTEN) and not _close(got.detach(), want.detach()):
        return f"is {got.flatten()[:6].tolist()}, not {want.flatten()[:6].tolist()}"
    return ""


def _equal(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and (math.isclose(a, b, rel_tol=1e-4) or (a != a and b != b)))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.layout == b.layout and close(a, b, 1e-3 if b.is_floating_point() or b.is_complex() else 0)


def _is_shared(found: Found, n: int) -> bool | None:
    """Whether some of the first n results is still sharded; None if none of them has a dim to shard."""
    results = zip(found.whole[:n], found.shared, strict=False)
    able = [shared for x, shared in results if isinstance(x, torch.Tensor) and any(n > 1 for n in x.shape)]
    return any(able) if able else None


def _has_sharded_operand(case: Case) -> bool:
    placed = zip(case.tensors, case.placings, strict=True)
    return any(p.is_shard() and t.shape[p.dim] > 1 for t, placing in placed for p in placing)


# ---- cases ------------------------------------------------------------------------------------


def entries() -> list:
    """The entries of torch's op database that run on CPU in one of DTYPES."""
    from torch.testing._internal.common_methods_invocations import op_db  # slow to import

    return [e for e in op_db if e.dtypes & set(DTYPES) and not e.name.startswith(NO_DATA_OF_ITS_OWN)]


def name_of(entry) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def cases(entry, per_entry: int = 3, per_sample: int | None = None) -> Iterator[Case]:
    """The cases of an entry: samples spread over those of the database, each with many choices of placements."""
    rng = random.Random(zlib.crc32(name_of(entry).encode()))
    torch.manual_seed(rng.randrange(1 << 30))
    samples = [s for s in itertools.islice(_samples(entry), 60) if 0 < _size(s) <= LARGEST]
    step = max(1, len(samples) // per_entry)
    for number, sample in enumerate(samples[::step][:per_entry]):
        arguments = ((sample.input, *sample.args), dict(sample.kwargs))
        tensors = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
        if any(t.layout is not torch.strided for t in tensors):
            continue
        ways = list(_ways(tensors, rng))
        for mesh, placings in ways if per_sample is None else rng.sample(ways, min(per_sample, len(ways))):
            yield _case(entry, "", AS_WRITTEN.get(entry.name, entry.op), arguments, tensors, mesh, placings)
        for variant, fn in _variants(entry) if number == 0 else ():
            for mesh, placings in rng.sample(ways, min(3 if per_sample is None else 1, len(ways))):
                yield _case(entry, variant, fn, arguments, tensors, mesh, placings)


def _variants(entry) -> Iterator[tuple[str, Callable]]:
    if entry.inplace_variant is not None:
        yield "_", entry.inplace_variant
    if entry.supports_out:
        yield "out", entry.op


def _samples(entry) -> Iterator:
    try:
        dtype = next(dtype for dtype in DTYPES if dtype in entry.dtypes)
        differentiable = entry.supports_autograd and dtype != torch.int64
        yield from entry.sample_inputs("cpu", dtype, requires_grad=differentiable)
    except Exception:  # some entries need features that this build of torch does not have
        return


def _size(sample) -> int:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))


def _case(entry, variant, fn, arguments, tensors, mesh, placings) -> Case:
    parts = [split(t.detach(), p, mesh) for t, p in zip(tensors, placings, strict=True)]
    meant = [_meant(t, p, x) for t, p, x in zip(tensors, placings, parts, strict=True)]
    return Case(name_of(entry), variant, fn, arguments, mesh, tuple(placings), tuple(meant), tuple(parts))


def _meant(t: torch.Tensor, placing: Placing, parts: dict[tuple, torch.Tensor]) -> torch.Tensor:
    """The tensor that the parts make together: t, except for the rounding of sums in the order of the ranks."""
    if not any(p.is_partial() for p in placing):
        return t
    by_column: dict[tuple, list[torch.Tensor]] = {}
    for at, x in parts.items():
        by_column.setdefault(at[1:], []).append(x)
    together = torch.add if placing[0].is_partial("sum") else torch.maximum
    columns = [functools.reduce(together, of) for of in by_column.values()]
    whole = torch.cat(columns, placing[1].dim) if len(placing) > 1 and placing[1].is_shard() else columns[0]
    return whole.requires_grad_(t.requires_grad)


def _ways(tensors: Sequence[torch.Tensor], rng: random.Random) -> Iterator[tuple[tuple[int, ...], list[Placing]]]:
    """Meshes, and placements for each tensor: all replicated, all sharded on one dim, partial sums, and random ones."""
    most = max(t.ndim for t in tensors)
    yield (4,), [(R,)] * len(tensors)
    for dim in range(most):
        yield (4,), [(_shard(t, dim),) for t in tensors]
        yield (2, 2), [(_shard(t, dim), _shard(t, dim + 1)) for t in tensors]
    for mesh in MESHES:
        rest = (R,) * (len(mesh) - 1)
        yield mesh, [(_partial(t), *rest) for t in tensors]
        for _ in range(2):
            yield mesh, [(_any(t, rng, partial=True), *(_any(t, rng) for _ in rest)) for t in tensors]


def _shard(t: torch.Tensor, dim: int) -> Placement:
    return Shard(dim % t.ndim) if t.ndim else R


def _partial(t: torch.Tensor) -> Placement:
    return Partial() if t.is_floating_point() or t.is_complex() else R


def _any(t: torch.Tensor, rng: random.Random, partial: bool = False) -> Placement:
    options: list[Placement] = [R, *(Shard(d) for d in range(t.ndim))]
    if partial and t.is_floating_point():
        options += [Partial(), Partial("max")]
    return rng.choice(options)
