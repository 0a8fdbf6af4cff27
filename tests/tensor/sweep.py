"""The sweep: every op that torch's op database knows, on tensors lying every way, beside the op on one device.

    for case in cases(entry): print(case, ask(case, Ours((2, 2))))

A case is an op with arguments and a placement for each tensor among them. It is run forward and backward: results and
gradients must be those of one device. Its verdict is one of

    right         on all ranks: values, shapes, dtypes, numbers
    wrong         another number, and nothing said so
    unsupported   NotImplementedError
    crashed       any other error, where one device has none

`Ours` runs it on spmd's DTensors in LocalTensorMode; `benchmarks/coverage.py` has another side, for torch's DTensor.
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

from spmd.sim import LocalTensor, LocalTensorMode
from spmd.tensor.dtensor import DTensor
from spmd.tensor.placement import Partial, Placement, Replicate, Shard
from spmd.tensor.spec import spec_of
from tests.tensor.oracle import close, split
from tests.tensor.single import mesh_of, weights

R = Replicate()
MESHES = ((4,), (2, 2))
LARGEST = 20_000  # elements of all operands of a case

UNWRITTEN = ("empty", "new_empty")
"""Ops, by the beginning of their name, whose results have no values to compare."""

NO_DATA_OF_ITS_OWN = ("jiterator", "sparse", "torch.ops", "to_sparse", "_refs")
"""Entries, by the beginning of their name, that are no ops on strided CPU tensors."""

AS_WRITTEN = {"__getitem__": operator.getitem}
"""Entries that name a method of torch.Tensor, by what calls that of a DTensor, as users do."""

Placing = tuple[Placement, ...]


@dataclass(frozen=True)
class Verdict:
    """`kind`: right, wrong, unsupported, crashed or random. `shared`: results are still shared out; None: could not."""

    kind: str
    why: str = ""
    shared: bool | None = None


@dataclass(frozen=True, eq=False)
class Case:
    """An op of the database with arguments, and a placing for each tensor among them.

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

    def run(self, tensors: Sequence[torch.Tensor], replicated: Callable) -> list:
        """Results and gradients with these in the places of the tensors; `replicated` gives the weights of results."""
        given = iter(tensors)
        args, kwargs = tree_map(lambda x: next(given) if isinstance(x, torch.Tensor) else x, self.arguments)
        if self.variant == "_":
            args = (args[0].clone(), *args[1:])
        out = self.fn(*args, **kwargs)
        if self.variant == "out":
            target = tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x).detach(), out)
            with torch.no_grad():
                given = self.fn(*tree_map_only(torch.Tensor, torch.Tensor.detach, args), out=target, **kwargs)
            return [*_leaves(target), *_leaves(given)]
        return _leaves(out) + self._gradients(_leaves(out), tensors, replicated)

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

    def __enter__(self): ...
    def __exit__(self, *exc): ...
    def place(self, parts: dict[tuple, torch.Tensor], placing: Placing, like: torch.Tensor) -> torch.Tensor: ...
    def whole(self, x: torch.Tensor) -> dict[int, torch.Tensor]: ...
    def is_shared(self, x: torch.Tensor) -> bool: ...


class Ours:
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


# ---- asking -----------------------------------------------------------------------------------


def ask(case: Case, side: Side) -> Verdict | None:
    """What becomes of the case on this side; None where one device itself refuses it."""
    torch.manual_seed(0)
    try:
        with _Draws() as draws:
            want = case.run([_copy(t) for t in case.tensors], _weights)
    except Exception:
        return None
    if draws.any:
        return Verdict("random")
    everywhere = tuple(R for _ in case.mesh)
    parts = [{at: x.clone() for at, x in of.items()} for of in case.parts]
    with side:
        def replicated(shape, dtype):
            with _disable_current_modes():
                w = _weights(shape, dtype)
                parts = split(w, everywhere, case.mesh)
            return side.place(parts, everywhere, w)

        try:
            got = case.run([side.place(*given) for given in zip(parts, case.placings, case.tensors, strict=True)],
                           replicated)  # fmt: skip
            why = _first_difference(case, want, got, side)
        except NotImplementedError as error:
            return Verdict("unsupported", _brief(error))
        except Exception as error:
            return Verdict("crashed", f"{type(error).__name__}: {_brief(error)}")
    return Verdict("wrong", why) if why else Verdict("right", "", _is_shared(case, got, side))


def _weights(shape, dtype) -> torch.Tensor:
    return weights(torch.empty(tuple(shape), dtype=dtype))


def _copy(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_(t.requires_grad)


def _brief(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


class _Draws(TorchDispatchMode):
    """Notes whether an op draws random numbers."""

    any = False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.any |= torch.Tag.nondeterministic_seeded in op.tags
        return op(*args, **(kwargs or {}))


def _first_difference(case: Case, want: list, got: list, side: Side) -> str:
    if len(want) != len(got):
        return f"{len(got)} results, not {len(want)}"
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        why = _difference(case, a, b, side)
        if why:
            return f"result {i} {why}"
    return ""


def _difference(case: Case, want: Any, got: Any, side: Side) -> str:
    if not isinstance(want, torch.Tensor):
        return "" if type(want) is type(got) and _equal(want, got) else f"is {got!r}, not {want!r}"
    if got is None:
        return "is None, not a tensor"
    for rank, x in side.whole(got).items():
        if (x.shape, x.dtype) != (want.shape, want.dtype):
            return f"on rank {rank} is {x.dtype}{list(x.shape)}, not {want.dtype}{list(want.shape)}"
        if not case.op.startswith(UNWRITTEN) and not _close(x, want.detach()):
            return f"on rank {rank} is {x.flatten()[:6].tolist()}, not {want.flatten()[:6].tolist()}"
    return ""


def _equal(a: Any, b: Any) -> bool:
    return a == b or (isinstance(a, float) and (math.isclose(a, b, rel_tol=1e-4) or (a != a and b != b)))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.layout == b.layout and close(a, b, 1e-3 if b.is_floating_point() or b.is_complex() else 0)


def _is_shared(case: Case, got: list, side: Side) -> bool | None:
    """Whether some result is still shared out; None where no operand was, or no result has a dim to shard."""
    placed = zip(case.tensors, case.placings, strict=True)
    given = any(p.is_shard() and t.shape[p.dim] > 1 for t, placing in placed for p in placing)
    able = [x for x in got if isinstance(x, torch.Tensor) and any(n > 1 for n in x.shape)]
    return any(side.is_shared(x) for x in able) if given and able else None


# ---- cases ------------------------------------------------------------------------------------


def entries() -> list:
    """The entries of torch's op database that run on CPU in float32."""
    from torch.testing._internal.common_methods_invocations import op_db  # slow to import

    return [e for e in op_db if torch.float32 in e.dtypes and not e.name.startswith(NO_DATA_OF_ITS_OWN)]


def name_of(entry) -> str:
    return f"{entry.name}.{entry.variant_test_name}" if entry.variant_test_name else entry.name


def cases(entry, per_entry: int = 3, per_sample: int | None = None) -> Iterator[Case]:
    """The cases of an entry: samples spread over those of the database, each placed in many ways, or in so many."""
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
        yield from entry.sample_inputs("cpu", torch.float32, requires_grad=entry.supports_autograd)
    except Exception:  # some entries need what this build of torch has not
        return


def _size(sample) -> int:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(x.numel() for x in leaves if isinstance(x, torch.Tensor))


def _case(entry, variant, fn, arguments, tensors, mesh, placings) -> Case:
    parts = [split(t.detach(), p, mesh) for t, p in zip(tensors, placings, strict=True)]
    meant = [_meant(t, p, x) for t, p, x in zip(tensors, placings, parts, strict=True)]
    return Case(name_of(entry), variant, fn, arguments, mesh, tuple(placings), tuple(meant), tuple(parts))


def _meant(t: torch.Tensor, placing: Placing, parts: dict[tuple, torch.Tensor]) -> torch.Tensor:
    """What the parts are together: t itself, but for the rounding of sums, done in the order of the ranks."""
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
    """Meshes, and for each tensor a placing: none moved, all sharded on one dim, partial sums, and any."""
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
