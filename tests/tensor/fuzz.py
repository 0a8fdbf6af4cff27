"""Random programs that must give the same results on a mesh as on one device.

A program is text: some tensors with their placements, and steps, each a line of Python over names for tensors.

    Program((2,), (Given("a", (3, 2), "float64", 1, (Shard(0),)),), ("b = a[1:]", "b.mul_(2)", "c = a.sum(0)"))

`write` makes a program by running every step on one device. Most steps that raise there are dropped; the others must
raise on the mesh, too, and change nothing. `differences` runs a program on simulated ranks, twice, so that the second
run finds all caches warm, and lists where a rank differs from one device. `shrink` finds the shortest program that
still differs. Programs print as Python that can be run.

Sums in another order round differently. So a value is *rough* if it comes from ops that round, else it is *exact*: a
small multiple of 1/256, also as a term of a Partial. Discontinuous ops (comparisons, sort, casts to int) get exact
values only.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from spmd.expand.compile import compile as spmd_compile
from spmd.mesh import DeviceMesh
from spmd.sim import LocalTensor, LocalTensorMode
from spmd.tensor.cache import forget_decisions
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import Partial, Placement, Replicate, Shard
from spmd.tensor.redistribute.boxes import cut_one
from spmd.tensor.spec import Spec, spec_of
from tests.tensor.single import mesh_of, weights

MESHES = ((2,), (3,), (4,), (2, 2), (2, 3), (2, 1, 2))
DTYPES = ("float64",) * 6 + ("float32",) * 2 + ("int64",) * 3 + ("bool", "int32", "bfloat16", "complex128", "uint8")
TOLERANCE = {
    torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 2e-3, torch.complex64: 2e-3, torch.bfloat16: 5e-2,
}  # fmt: skip
MAGNITUDE = 1e3
"""The limit of rough values. It keeps the digits that they lose by cancellation below the tolerance."""


@dataclass(frozen=True)
class Given:
    """A tensor that a program begins with. `turned`: blocks are in memory with their dims in the opposite order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    seed: int
    placements: tuple[Placement, ...]
    grad: bool = False
    turned: bool = False


@dataclass(frozen=True)
class Program:
    """Lines of Python over tensors on a mesh of this shape."""

    mesh: tuple[int, ...]
    tensors: tuple[Given, ...]
    steps: tuple[str, ...]

    def __str__(self):
        """The program as a script that runs it and prints what differs."""
        lines = [
            "from tests.tensor.fuzz import *", "",
            "tensors = (", *(f"    {given!r}," for given in self.tensors), ")",
            "steps = (", *(f"    {step!r}," for step in self.steps), ")",
            f"print(*differences(Program({self.mesh}, tensors, steps)), sep='\\n')",
        ]  # fmt: skip
        return "\n".join(lines)


# ---- the tensors a program begins with --------------------------------------------------------


def values(given: Given) -> torch.Tensor:
    """The global tensor: small numbers whose sums are all exact."""
    rng = torch.Generator().manual_seed(given.seed)
    dtype = getattr(torch, given.dtype)
    whole = torch.randint(0, 13, given.shape, generator=rng)
    if dtype in (torch.bool, torch.uint8):
        return (whole > 5) if dtype is torch.bool else whole.to(dtype)
    out = whole - 6 if not (dtype.is_floating_point or dtype.is_complex) else (whole - 6) / 4
    return out.to(dtype) * (1 + 0.5j) if dtype.is_complex else out.to(dtype)


def terms(x: torch.Tensor, kind: str | None, n: int, seed: int) -> list[torch.Tensor]:
    """n tensors whose reduction is exactly x; without a reduction, n times x."""
    if kind is None:
        return [x] * n
    rng = torch.Generator().manual_seed(seed)
    noise = [torch.randint(0, 5, x.shape, generator=rng).to(x.dtype) for _ in range(n - 1)]
    if x.dtype is torch.bool:
        others = [x & e if kind == "max" else x | e for e in noise]
        first = x
    elif kind in ("sum", "avg"):
        others = noise
        first = x * (n if kind == "avg" else 1) - sum(noise)
    elif kind == "product":
        others = [torch.where(e == 0, 1 if x.dtype == torch.uint8 else -1, 1).to(x.dtype) for e in noise]
        first = math.prod(others) * x
    else:
        others = [x + e if kind == "min" else torch.where(x < e, x, x - e) if x.dtype == torch.uint8 else x - e
                  for e in noise]  # fmt: skip
        first = x
    return [*others, first]


def pieces(given: Given, mesh: DeviceMesh) -> tuple[Spec, dict[tuple[int, ...], torch.Tensor]]:
    """The spec of a tensor, and the block of the rank at each coordinate."""
    x = values(given)
    spec = spec_of(mesh, given.placements, x.shape, x.dtype)
    parts = {(): x}
    for axis, n in enumerate(mesh.shape):
        kind = getattr(spec.on(axis), "reduce_op", None)
        split = {at: terms(part, kind, n, given.seed + axis) for at, part in parts.items()}
        parts = {(*at, i): term for at, found in split.items() for i, term in enumerate(found)}
    return spec, {at: _block(part, spec, at, given.turned) for at, part in parts.items()}


def _block(part: torch.Tensor, spec: Spec, at: tuple[int, ...], turned: bool) -> torch.Tensor:
    part = cut_one(part, part.shape, spec.box(at))
    order = tuple(range(part.ndim))[::-1]
    return part.permute(order).contiguous().permute(order) if turned else part


# ---- running ----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The outcome of a run: for each step the error or None, and for each name its value."""

    errors: list[str | None]
    heap: dict[str, Any]


class OneDevice:
    """The functions that a program calls, on one device."""

    def leaf(self, given: Given) -> torch.Tensor:
        return values(given).requires_grad_(given.grad)

    def words(self) -> dict[str, Any]:
        move = lambda x, placements: x.clone(memory_format=torch.contiguous_format)  # noqa: E731
        stay = lambda x: x.view_as(x)  # noqa: E731
        words = {"stay": stay, "move": move, "weights": lambda x: weights(x.detach())}
        return {"torch": torch, "F": F, "copy": copy, **words, **PLACEMENTS}

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach().clone()


class OnMesh(OneDevice):
    """The same on the ranks of a mesh, all run by one thread."""

    def __init__(self, program: Program):
        self.mesh = mesh_of(program.mesh)
        self.pieces = {given.name: pieces(given, self.mesh) for given in program.tensors}

    def leaf(self, given: Given) -> DTensor:
        spec, parts = self.pieces[given.name]
        local = LocalTensor({self.mesh.rank_at(at): part for at, part in parts.items()})
        return DTensor(local, spec, requires_grad=given.grad)

    def words(self) -> dict[str, Any]:
        def weighing(x):
            plain = weights(torch.empty(x.shape, dtype=x.dtype))
            return DTensor(plain, spec_of(self.mesh, [Replicate()] * self.mesh.ndim, plain.shape, plain.dtype))

        def move(x, placements):
            return x.redistribute(placements=placements).clone(memory_format=torch.contiguous_format)

        stay = lambda x: x.redistribute(placements=x.placements)  # noqa: E731
        return super().words() | {"stay": stay, "move": move, "weights": weighing}

    def read(self, x: torch.Tensor) -> Any:
        """The global tensor, equal on all ranks; or a text that says what is wrong with it."""
        if not isinstance(x, DTensor):
            return f"a plain tensor of {list(x.shape)}"
        if (wrong := dishonest(x)) is not None:
            return wrong
        whole = x.detach().full_tensor()
        return whole.reconcile() if isinstance(whole, LocalTensor) else whole


PLACEMENTS = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}


def dishonest(x: DTensor) -> str | None:
    """How a DTensor's blocks differ from its spec, if they do."""
    spec, local = x._spec, x._local_tensor
    if (tuple(x.shape), x.stride(), x.dtype) != (spec.shape, spec.stride, spec.dtype):
        return f"{spec} of strides {spec.stride} in a tensor of {list(x.shape)}, strides {x.stride()}, {x.dtype}"
    for rank in spec.mesh.ranks:
        block = local.local[rank] if isinstance(local, LocalTensor) else local
        shape = spec.local_shape(spec.mesh.coordinate_of(rank))
        if tuple(block.shape) != shape or block.dtype != spec.dtype:
            return f"{spec} has a block of {list(block.shape)}, {block.dtype}, not of {list(shape)}, on rank {rank}"
    return None


def run(program: Program, side: OneDevice) -> Outcome:
    """Run the steps one after the other. A step that raises does not stop the others."""
    names = side.words() | {g.name: side.leaf(g) for g in program.tensors}
    words = set(side.words())
    errors: list[str | None] = []
    for step in program.steps:
        errors.append(_error_of(lambda step=step: exec(step, names)))
    left = {name: x for name, x in names.items() if name not in words and not name.startswith("__")}
    return Outcome(errors, {name: _facts(x, side) for name, x in left.items()})


def _error_of(act: Callable[[], Any]) -> str | None:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _facts(x: Any, side: OneDevice) -> Any:
    if isinstance(x, (list, tuple)):
        return [_facts(y, side) for y in x]
    if not isinstance(x, torch.Tensor):
        return x
    if _error_of(lambda: x.is_leaf) is not None:
        return "one of many views, after a write that autograd does not allow"
    facts = {"requires_grad": x.requires_grad, "leaf": x.is_leaf, "dtype": x.dtype, "shape": tuple(x.shape)}
    facts["stride"] = tuple(s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1 and x.numel())
    found: list[Any] = []
    error = _error_of(lambda: found.append(side.read(x)))
    facts["value"] = found[0] if error is None else error
    facts["grad"] = _facts(x.grad, side)["value"] if x.is_leaf and x.grad is not None else None
    return facts


def differences(program: Program, warm: bool = True) -> list[str]:
    """Where some rank differs from one device, with cold caches and then with warm ones; empty if nowhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = run(program, OneDevice())
        forget_decisions()
        for caches in ("cold", "warm") if warm else ("cold",):
            side = OnMesh(program)
            try:
                with LocalTensorMode(math.prod(program.mesh)):
                    found = [f"{caches}: {text}" for text in _unlike(run(program, side), want, program)]
            except Exception as error:
                return [f"{caches}: the run fails: {type(error).__name__}: {error}"]
            if found:
                return found
    return []


# ---- compiled ---------------------------------------------------------------------------------

DECIDES = re.compile(
    r"copy\.|func\.|item\(\)|tolist|bool\(\(|nonzero\(\)|unique|masked_select|torch.equal|bincount|histc|isin|detach_"
    r"|\[\(\w+ != 1\)\]|\[t?\w+\]|requires_grad_|autograd|backward"
)
"""Steps whose shapes or branches depend on data, which a graph cannot have, or that make an argument require grad.
"""


def graph_of(program: Program) -> Program:
    """The program without the steps that one graph cannot have, and without the steps that need them."""
    tensors = tuple(dataclasses.replace(given, grad=False) for given in program.tensors)
    steps = tuple(step for step in program.steps if not DECIDES.search(step))
    while True:
        program = dataclasses.replace(program, tensors=tensors, steps=steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors = run(program, OneDevice()).errors
        steps = tuple(step for step, error in zip(steps, errors, strict=True) if error is None)
        if len(steps) == len(program.steps):
            return program


def compiled_differences(program: Program) -> list[str]:
    """Where the program as one compiled step differs from one device, in the first call or in the second."""
    side, plain = OnMesh(program), OneDevice()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn = _function(program)
        want = fn(**{given.name: plain.leaf(given) for given in program.tensors})
        try:
            with LocalTensorMode(math.prod(program.mesh)):
                step = spmd_compile(fn, side.mesh)
                for turn in ("first", "second"):
                    got = step(**{given.name: side.leaf(given) for given in program.tensors})
                    found = [text for name in want for text in _differs(name, side.read(got[name]), want[name])]
                    if found:
                        return [f"{turn} call: {text}" for text in found]
        except Exception as error:
            refused = any(text in str(error) for text in REFUSED)
            return [] if refused else [f"the step fails: {type(error).__name__}: {error}"]
    return []


def _function(program: Program) -> Callable[..., dict[str, torch.Tensor]]:
    """The program as a function of its tensors. It does not write into them, and returns all values at the end."""

    def body(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = OneDevice().words() | {name: x.clone() for name, x in given.items()}
        for step in program.steps:
            exec(step, names)
        return {name: x.detach() for name, x in names.items() if isinstance(x, torch.Tensor)}

    words: dict[str, Any] = {"body": body}
    arguments = ", ".join(given.name for given in program.tensors)
    exec(f"def step({arguments}):\n    return body(dict(locals()))", words)
    return words["step"]


# ---- comparing --------------------------------------------------------------------------------

REFUSED = {
    "would get new memory": "out= of another size, with views: torch warns that it will not go on doing that",
    "that shows a part of its memory": "as_strided and resize_ of a part: what lies beside it is on no rank by itself",
    "more than one element of the written-to tensor": "writes into expanded views, of which torch only warns",
    "writes into an expanded tensor": "in a graph: the same, where functionalisation would lose the write",
    "mutated that has internal overlap": "in a graph: torch refuses writes into views whose elements share memory",
    "lshift: Expected input tensor to have an integral dtype": "torch infers no shape of bools here",
    "decides by a value in a tensor": "in a graph: there is one way through it",
    "the size of its result depends on values": "in a graph: sizes are known",
    "which a compiled step cannot; do it outside": "in a graph: x.data of another dtype",
    "mutation on a view chain": "in a graph: torch refuses writes through as_strided of a view",
}
"""Errors that are allowed where one device has none, with the reason. The program is not compared further."""


def _unlike(got: Outcome, want: Outcome, program: Program) -> Iterator[str]:
    for step, mine, theirs in zip(program.steps, got.errors, want.errors, strict=True):
        if mine is not None and any(text in mine for text in REFUSED):
            return
        if (mine is None) != (theirs is None):
            yield f"`{step}`: {mine or 'no error'}; one device: {theirs or 'no error'}"
            return
    for name in sorted(set(got.heap) | set(want.heap)):
        yield from _differs(name, got.heap.get(name), want.heap.get(name))


def _differs(name: str, got: Any, want: Any) -> Iterator[str]:
    if isinstance(got, list) and isinstance(want, list) and len(got) == len(want):
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            yield from _differs(f"{name}[{i}]", a, b)
    elif isinstance(got, dict) and isinstance(want, dict):
        for fact, b in want.items():
            if not alike(got[fact], b):
                yield f"{name}: {fact} is {got[fact]}, not {b}"
    elif not alike(got, want):
        yield f"{name} is {got}, not {want}"


def alike(a: Any, b: Any) -> bool:
    """Equal, or for floats equal up to rounding. NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        limit = TOLERANCE.get(b.dtype, 0.0)
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, limit, limit, equal_nan=True)
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b) or abs(a - b) <= TOLERANCE[torch.float32] * max(1, abs(b))
    return type(a) is type(b) and a == b


# ---- writing ----------------------------------------------------------------------------------
# In a step {x} is a tensor; {y} one that is broadcast with it; {z} any tensor, mostly of the shape of x; {e} an exact
# one that is broadcast with it; {m} a mask for it; {i} indices into dim 0; {n} one new name; {d}, {k} its dims; {s} a
# number; {v} some views; {p} placements.

def _listed(text: str) -> list[str]:
    return [item.strip() for item in text.split(";")]


SMOOTH = """{n} = {x} / (({y}).abs() + 1); {n} = {x}.exp(); {n} = {x}.sigmoid(); {n} = {x}.tanh();
    {n} = ({x}.abs() + 0.5).sqrt(); {n} = {x}.sin(); {n} = F.gelu({x}); {n} = {x} / 3; {n} = {x}.mean();
    {n} = {x}.mean({d}); {n} = {x}.mean({d}, keepdim=True); {n} = {x}.var({d}); {n} = {x}.std(correction=0);
    {n} = {x}.logsumexp({d}); {n} = {x}.softmax({d}); {n} = {x}.log_softmax({d});
    {n} = F.layer_norm({x}, {x}.shape[-1:]); {n} = torch.linalg.vector_norm({x}, 3, {d}); {n} = {x}.norm();
    {n} = {x} @ {z}; {n} = {x} @ {x}.mT; {n} = {x}.mT @ {z}; {n} = torch.einsum('...i,...i->...', {x}, {z});
    {n} = F.linear({x}, {z}); {n} = torch.addmm({z}, {x}, {x}, beta=0.5); {n} = torch.lerp({x}, {z}, 0.3);
    {n} = torch.addcmul({x}, {y}, {y}, value=0.5); {n} = torch.addcdiv({x}, {y}, {z}.abs() + 1);
    {n} = {x}.cumprod({d}); {n} = torch.logaddexp({x}, {y}); {n} = F.mse_loss({x}, {z});
    {n} = F.smooth_l1_loss({x}, {z}); {n} = torch.bmm({x}, {x}.mT); {n} = torch.outer({x}.flatten(), {z}.flatten());
    {n} = {x}.prod({d}); {n} = F.conv1d({x}[None], {x}[None]); {n} = F.scaled_dot_product_attention({x}, {z}, {z});
    {n} = F.cross_entropy({x}, {x}.argmax(-1)); {n} = torch.tensordot({x}, {z}, 1); {n} = torch.kron({x}, {z});
    {n} = {x} @ {z}.flatten(); {n} = torch.matmul({z}.mT, {x}); {n} = F.normalize({x}, dim={d});
    {n} = F.cosine_similarity({x}, {z}, {d}); {n} = torch.cdist({x}, {z}); {n} = F.silu({x});
    {n} = F.rms_norm({x}, {x}.shape[-1:]); {n} = F.group_norm({x}, 1); {n} = F.avg_pool1d({x}, 2);
    {n} = torch.cov({x}); {n} = {x}.cumsum({d}) / 3;
    {n} = torch.einsum('ij,kj->ik', {x}, {z}); {n} = torch.baddbmm({z}, {x}, {x}.mT);
    {n} = {x}.square().mean().sqrt(); {n} = torch.fft.rfft({x}).real; {n} = F.softplus({x}); {n} = F.logsigmoid({x});
    {n} = F.binary_cross_entropy_with_logits({x}, {z})"""

EXACT = """{n} = {x} + {y}; {n} = {x} - {y}; {n} = {y} - {x}; {n} = {x} * {y}; {n} = {x} * {s}; {n} = {s} * {x};
    {n} = {x} + {s}; {n} = {s} - {x}; {n} = -{x}; {n} = torch.add({x}, {y}, alpha=2); {n} = {x} / 2; {n} = {x} / -4;
    {n} = torch.sub({x}, {y}, alpha=-1); {n} = {x}.masked_fill({m}, {s}); {n} = torch.where({m}, {x}, {y});
    {n} = torch.where({m}, {x}, {s}); {n} = torch.where({m}, {s}, {x}); {n} = {x}.sum(); {n} = {x}.sum({d});
    {n} = {x}.sum({d}, keepdim=True); {n} = {x}.sum(dtype=torch.float64); {n} = {x}.cumsum({d}); {n} = {x}.clone();
    {n} = {x}.contiguous(); {n} = torch.cat([{x}, {z}], {d}); {n} = torch.stack([{x}, {z}], {d}); {n} = {x}.double();
    {n} = {x}.index_select({d}, torch.tensor([0])); {n} = {x}[{i}]; {n} = {x}[{m}]; {n} = {x}.masked_select({m});
    {n} = {x}.flip({d}); {n} = {x}.roll(1, {d}); {n} = F.pad({x}, (1, 0)); {n} = F.pad({x}, (0, 2), value=1.5);
    {n} = {x}.repeat(2, *[1] * {x}.ndim); {n} = torch.zeros_like({x}); {n} = {x}.new_ones(3, 2); {n} = {x}.tril();
    {n} = {x}.repeat_interleave(2, {d}); {n} = {x}.nansum({d}); {n} = torch.full_like({x}, 1.5); {n} = {x} * {x};
    {n} = {x}.to({x}.dtype); {n} = {x}.type_as({z}) if {z}.dtype == torch.float64 else {x} * 1;
    {n} = {x}.reshape(-1); {n} = {x}.trace(); {n} = {x}.dot({z}); {n} = {x}.conj() * 1; {n} = {x} * (1 + 2j);
    {n} = {x}.new_zeros({x}.shape); {n} = {x}.float() * 2; {n} = {x}.index_add({d}, torch.tensor([0]), {z});
    {n} = {x}.gather({d}, {x}.long() * 0); {n} = torch.tensor(2.0, dtype=torch.float64) * {x};
    {n} = {x} * torch.tensor(3); {n} = {x} + torch.tensor(1.5); {n} = move({x}, {p}); {n} = move({x}, {p});
    {n} = move({x}, {p}); {n} = {x}.scatter({d}, {x}.long() * 0, {s}); {n} = stay({x}); {n} = {x}.diff(dim={d});
    {n} = torch.select_scatter({x}, {x}.select({d}, 0) * 2, {d}, -1);
    {n} = torch.slice_scatter({x}, {x}.narrow({d}, 0, 1) * 0, {d}, 0, 1);
    {n} = {x}.diagonal_scatter({x}.diagonal() + 1); {n} = {x}.scatter_add({d}, {x}.long() * 0, {z});
    {n} = {x}.index_put(([0, -1],), torch.tensor(2.0, dtype={x}.dtype));
    {n} = torch.index_put({x}, (torch.tensor([0]),), {x}[:1], accumulate=True); {n} = {x}.rot90();
    {n} = torch.diag_embed({x}); {n} = torch.block_diag({x}, {z});
    {n} = torch.meshgrid({x}.flatten(), {z}.flatten(), indexing='ij')[0]; {n} = torch.tile({x}, (2,));
    {n} = torch.cartesian_prod({x}.flatten(), {z}.flatten()); {n} = torch.hstack([{x}, {z}]);
    {n} = torch.vstack([{x}, {x}]); {n} = {x}.unfold({d}, 2, 1).sum(-1); {n} = copy.deepcopy({x}.detach());
    {n} = torch.broadcast_tensors({x}, {y})[1] * 1; {n} = torch.take_along_dim({x}, {x}.long() * 0, {d});
    {n} = torch.block_diag({x}); {n} = F.embedding({i}, {x}); {n} = torch.addcmul({x}, {y}, {y}, value=2);
    {n} = {x}.view(torch.int64).view(torch.float64); {n} = {x}.triu(1); {n} = {x}.sum(({d}, {k}));
    {n} = torch.stack([{x}, {z}]).sum(0); {n} = torch.cat([{x}[:1], {z}, {x}], 0);
    {n} = {x}.to(torch.float64, copy=True); {n} = torch.rsub({x}, {y}, alpha=2)"""

KINKED = """{n} = {x}.abs(); {n} = {x}.relu(); {n} = {x}.clamp(-1, 1); {n} = {x}.clamp(max={s}); {n} = {x}.amax({d});
    {n} = {x}.amin(); {n} = torch.maximum({x}, {y}); {n} = torch.minimum({x}, {y}); {n} = {x}.max({d}).values;
    {n} = {x}.max(); {n} = {x}.sort({d}, stable=True).values; {n} = {x}.topk(1, {d}).values;
    {n} = {x}.norm(float('inf')); {n} = torch.linalg.vector_norm({x}, 1, {d}); {n} = {x}.median({d}).values;
    {n} = {x}.cummax({d}).values; {n} = torch.fmax({x}, {y}); {n} = torch.stack(torch.aminmax({x}));
    {n} = torch.linalg.vector_norm({x}, float('-inf'))"""

STEEP = """{n} = {x} > {y}; {n} = {x} <= {s}; {n} = {x} == {y}; {n} = {x}.long(); {n} = {x}.bool(); {n} = {x}.int();
    {n} = {x}.argmax({d}); {n} = {x}.argmin(); {n} = {x}.sort({d}, descending=True, stable=True).indices;
    {n} = {x}.sign(); {n} = {x}.floor(); {n} = {x}.round(); {n} = {x} // 2; {n} = {x} % 3; {n} = {x}.any();
    {n} = {x}.all({d}); {n} = {x}.any({d}); {n} = {x}.nonzero(); {n} = {x}.unique(); {n} = {x}.count_nonzero({d});
    {n} = torch.div({x}, 2, rounding_mode='trunc'); {n} = {x}.max({d}).indices; {n} = torch.isin({x}, {z});
    {n} = {x}.to(torch.bfloat16).double(); {n} = torch.equal({x}, {z}); {n} = {x}.norm(0); {n} = {x}.logical_not();
    {n} = bool(({x} > 0).any()); {n} = {x}.tolist(); {n} = {x}.sum().item(); {n} = torch.isnan({x}); {n} = {x} & {y};
    {n} = {x} | {y}; {n} = ~{x}; {n} = {x}.searchsorted({z}); {n} = {x}.bincount(); {n} = {x} << 1;
    {n} = {x}.flatten().kthvalue(1).values; {n} = {x}.mode({d}).values; {n} = torch.histc({x}, 3);
    {n} = {x}.aminmax(dim={d}).max; {n} = {x}.argsort({d}, stable=True); {n} = {x}.unique(return_inverse=True)[1];
    {n} = {x}.nanmedian({d}).indices; {n} = torch.bucketize({x}, {z}.flatten().sort().values); {n} = {x} != {x};
    {n} = torch.where({x} > 0); {n} = {x}.ne({y}); {n} = torch.clamp({x}, {y}, {x}.amax()); {n} = {x}.heaviside({y});
    {n} = torch.fmod({x}, 2); {n} = torch.remainder({x}, {y}); {n} = {x}.to(torch.float16);
    {n} = torch.cummin({x}, {d}).indices"""

LOOKS = """{n} = {x}{v}; {n} = {x}{v}; {n} = {x}{v}; {n} = {x}{v}; {n} = {x}{v}; {n} = {x}{v}"""

WRITES = """{x}{v}.add_({y}); {x}{v}.mul_({s}); {x}{v}.sub_({s}); {x}{v}.zero_(); {x}{v}.fill_({s});
    {x}{v}.mul_({y}); {x}{v}.copy_({y}); {x}{v}.copy_({z}); {x} += {s}; {x} *= {y}; {x}{v}.neg_(); {x}{v}.div_(2);
    {x}{v}.masked_fill_({m}, {s}); {x}[{c}] = {s}; {x}[{c}] = {z}; {x}[{c}] += 1; {x}[{m}] = {s}; {x}[{i}] = {s};
    {x}[{m}] *= 2; {x}.addcmul_({y}, {y}, value=0.5); {x}.cumsum_({d}); {x}.tril_();
    {x}.index_fill_({d}, torch.tensor([0]), 2); torch.add({x}, {y}, out={z}); torch.mul({x}, {s}, out={x});
    torch.sum({x}, {d}, out={z}); {x}.t_(); {x}.unsqueeze_({d}); torch._foreach_add_([{x}, {z}], [{y}, {y}]);
    torch._foreach_mul_([{x}, {z}], 2); torch._foreach_zero_([{x}]);
    {n} = torch._foreach_mul([{x}, {z}], [2.0, 0.5])[0]; torch._foreach_copy_([{x}, {z}], [{y}, {z}]);
    {x}{v}.add_({x}{v}); {x}.transpose_(0, {d}); {x}.squeeze_(); torch.cat([{x}, {x}], out={z});
    {x}{v}.index_add_({d}, torch.tensor([0]), {z}); {x}{v}.scatter_({d}, {z}.long() * 0, 3);
    {x}{v}.index_copy_({d}, torch.tensor([0]), {z}); {x}[{c}][{c}] = {s}; {x}[{c}][{c}] *= 2;
     {x}.data = {x}.data * 2; {x}{v}.addcmul_({y}, {y}); {x}{v}.cumsum_(0);
    {x}{v}.index_put_((torch.tensor([0]),), torch.tensor(2.0, dtype={x}.dtype), accumulate=True); {x}{v}.squeeze_();
    {x}{v}.fill_diagonal_(2); torch.where({m}, {x}, {x}, out={z}); torch.sub({x}, {y}, out={z}{v});
    torch._foreach_add_([{x}{v}, {z}], 1); torch._foreach_mul_([{x}, {z}{v}], [2, 3]);
    torch._foreach_sub_([{x}], [{x}], alpha=2); {x}{v}.swapdims_(0, -1); {x}{v}.bernoulli_(0.0)"""

WRITES_SMOOTH = """{x}{v}.exp_(); {x}{v}.lerp_({y}, 0.3); {x}{v}.div_(3); {x}{v}.sigmoid_();
    {x}.addmm_({x} * 1, {x} * 1);
    torch._foreach_lerp_([{x}], [{y}], 0.3); torch._foreach_addcdiv_([{x}], [{y}], [{z}.abs() + 1]);
    {x}{v}.tanh_()"""

WRITES_KINKED = """{x}{v}.relu_(); {x}{v}.clamp_(-1, 2); {x}{v}.abs_(); {x}.clamp_(max={s});
    {x}.copy_({z}.sort(-1).values)"""

GRADS = """{n} = {x}.detach(); {n} = {x}.detach().requires_grad_(); ({x} * weights({x})).sum().backward();
    {n} = torch.autograd.grad(({x} * weights({x})).sum(), {z}, allow_unused=True)[0]; {x}.requires_grad_();
    {x}.sum().backward(); {n} = torch.autograd.grad(({x} * {x}).sum(), {z}, create_graph=True, allow_unused=True)[0];
    ({x}{v} * weights({x}{v})).sum().backward(); ({x} * {x} * weights({x})).sum().backward();
    {n} = torch.func.grad(lambda u: (u * u * u).sum())({x}.detach());
    {n} = torch.func.vmap(lambda u: u * 2)({x});
    {n} = torch.func.jvp(lambda u: u * u, ({x}.detach(),), ({x}.detach(),))[1]"""


VIEWS = """[1:]; [:, :2]; [0]; [..., 0]; [::2]; [..., 1:]; .t(); .mT; .unsqueeze(0); .view(-1); .flatten(); [-1];
    [None]; .transpose(0, -1); .select({d}, 0); .narrow({d}, 0, 1); .diagonal(); .squeeze(0); .expand(2, *{x}.shape);
    [:]; .split(1, {d})[0]; .chunk(2, {d})[-1]; .unbind({d})[0]; .detach(); .unfold({d}, 2, 1); .movedim(0, -1);
    .squeeze(); .view(2, -1); .view(-1, 2); .view(-1, 1, 3); .swapaxes(0, 1); [..., ::2];
    .split_with_sizes([1, 1], {d})[1]; .T; .real; .conj(); .reshape(-1); .reshape(2, -1); .ravel(); .view_as({x});
    .unflatten(0, (2, -1)); .mH; [1]; [..., -1:]; .tensor_split(2, {d})[0]; .select({d}, -1); .flatten(0, 1);
    .expand_as({z}); .broadcast_to({z}.shape);   .swapdims(0, 1);
    .hsplit(2)[0]; .unsqueeze(-1); .view({x}.shape); .permute(*range({x}.ndim)[::-1]); .data; .squeeze(-1);
    .squeeze((0, -1)); .narrow({d}, -1, 1); .expand(-1, *[-1] * ({x}.ndim - 1))"""
PLACES = "0; 1:; ..., 0; ::2; :2; -1; ..., 1:; :, 1; 0, 0; ..."
NUMBERS = "2; -1.5; True; 0; -3; 0.5; 1; torch.tensor(2.5); torch.tensor(-3); torch.tensor(True)"
KINDS = {
    "smooth": (SMOOTH, 3), "exact": (EXACT, 6), "kinked": (KINKED, 2), "steep": (STEEP, 2), "looks": (LOOKS, 4),
    "writes": (WRITES, 4), "writes smooth": (WRITES_SMOOTH, 1), "writes kinked": (WRITES_KINKED, 1),
    "grads": (GRADS, 1),
}  # fmt: skip
TABLE = {kind: _listed(text) for kind, (text, _) in KINDS.items()}
CHOICES = [kind for kind, (_, weight) in KINDS.items() for _ in range(weight)]
WHOLE_NUMBERS = re.compile(r"long|int\(|histc|//|%|bincount|round")


class Writer:
    """Writes one program and runs it on one device meanwhile. `rng` is used only for choices."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        mesh = rng.choice(MESHES)
        self.mesh = mesh_of(mesh)
        self.pool = [rng.choice((1, 2, 3, 4, 5, 6)) for _ in range(3)]
        self.program = Program(mesh, tuple(self._given(name) for name in "abc"[: rng.choice((2, 3))]), ())
        self.rough: set[int] = set()
        self.names: dict[str, Any] = {}
        self._replay()

    def program_of(self, length: int) -> Program:
        """A program of this many steps."""
        for _ in range(length * 12):
            if len(self.program.steps) == length:
                break
            self._try()
        return self.program

    # ---- the first tensors --------------------------------------------------------------------
    def _given(self, name: str) -> Given:
        shape = tuple(self.rng.choice(self.pool) for _ in range(self.rng.choice((0, 1, 2, 2, 2, 3))))
        if shape and self.rng.random() < 0.04:
            shape = (0, *shape[1:])
        dtype = self.rng.choice(DTYPES)
        smooth = dtype in ("float64", "float32", "complex128")
        return Given(
            name, shape, dtype, self.rng.randrange(1000), self._placements(shape, getattr(torch, dtype)),
            smooth and self.rng.random() < 0.4, self.rng.random() < 0.15,
        )  # fmt: skip

    def _placements(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Placement, ...]:
        units = [self.rng.choice([u for u in (1, 1, 1, 2, 3) if n % u == 0]) for n in shape]
        sizes = [n // unit for n, unit in zip(shape, units, strict=True)]
        blocks = [self.rng.choice([b for b in (1, 1, 1, 2, 3) if n % b == 0]) for n in sizes]
        kind = self.rng.choice(kinds_of(dtype))
        out = []
        for _ in self.mesh.shape:
            shards = [Shard(d, units[d], blocks[d]) for d in range(len(shape))]
            partial = Partial(self.rng.choice(("sum", "avg")) if kind == "avg" else kind)
            out.append(self.rng.choice([Replicate(), partial, *shards, *shards]))
        return tuple(out)

    # ---- steps --------------------------------------------------------------------------------
    def _try(self) -> None:
        """Add one more step, if the chosen one fits."""
        kind = self.rng.choice(CHOICES)
        step = self._filled(self.rng.choice(TABLE[kind]))
        if step is None or not self._fits(kind, step):
            return
        before = {name: x._version for name, x in self._tensors().items()}
        if kind.startswith("writes") and self.rng.random() < 0.4:
            step = f"with torch.no_grad(): {step}"
        used = list(self._named_in(step).values())
        rough = "smooth" in kind or kind == "grads" or any(map(self.is_rough, used))
        if (error := _error_of(lambda: exec(step, self.names))) is not None:
            if self.rng.random() < 0.05 and not re.search("out=|foreach|is out of|not implemented", step + error):
                self.program = dataclasses.replace(self.program, steps=(*self.program.steps, step))
            self._replay()
            return
        changed = [x for name, x in self._tensors().items() if x._version != before.get(name)]
        if any(rough and _largest(x) > MAGNITUDE for x in changed):
            self._replay()
            return
        self.rough |= {_memory(x) for x in changed if rough or not is_short(x)}
        self.program = dataclasses.replace(self.program, steps=(*self.program.steps, step))

    def _fits(self, kind: str, step: str) -> bool:
        used = list(self._named_in(step).values())
        rough = any(map(self.is_rough, used))
        if WHOLE_NUMBERS.search(step) and not all(x.isfinite().all() for x in used):
            return False
        if (out := re.search(r"(sum|cat)\(.*out=(\w+)\)", step)) and self._shares(step, out[2]):
            return False  # torch clears such a result before it reads the same memory
        if kind.startswith("writes") and self._reads_what_it_writes(step):
            return False
        if "kinked" in kind:
            return not (rough and any(x.requires_grad for x in used))
        return not (rough and (kind == "steep" or WHOLE_NUMBERS.search(step)))

    def _named_in(self, text: str) -> dict[str, torch.Tensor]:
        return {name: x for name, x in self._tensors().items() if re.search(rf"\b{name}\b", text)}

    def _reads_what_it_writes(self, step: str) -> bool:
        """Whether a step writes into a part of a memory and reads another part of it, in an undefined order."""
        target, *given = re.split(r"_\(|\] [+*]?= | [+*]= ", step, maxsplit=1)
        if target.startswith("torch") or not given:
            return False
        same = [n for n, x in self._named_in(given[0]).items() if _memory(x) == _memory(self.it)]
        return any(n != self.x or not re.fullmatch(r"\w+(\.[a-z]+)?", target) for n in same)

    def _shares(self, step: str, name: str) -> bool:
        """Whether a step names the memory of this tensor twice."""
        same = [n for n, x in self._named_in(step).items() if _memory(x) == _memory(self.names[name])]
        return sum(len(re.findall(rf"\b{n}\b", step)) for n in same) > 1

    def is_rough(self, x: torch.Tensor) -> bool:
        return _memory(x) in self.rough or x.dtype is torch.bfloat16

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {name: x for name, x in self.names.items() if isinstance(x, torch.Tensor)}
        return {name: x for name, x in found.items() if _error_of(lambda x=x: x.is_leaf) is None}

    def _replay(self) -> None:
        """The heap as the steps leave it. A step that was dropped may have changed it."""
        marked = [name for name, x in self._tensors().items() if _memory(x) in self.rough]
        side = OneDevice()
        self.names = side.words() | {g.name: side.leaf(g) for g in self.program.tensors}
        for step in self.program.steps:
            _error_of(lambda step=step: exec(step, self.names))
        self.rough = {_memory(self.names[name]) for name in marked if name in self._tensors()}

    # ---- filling in ---------------------------------------------------------------------------
    def _filled(self, template: str) -> str | None:
        names = list(self._tensors())
        self.x = self.rng.choice(names[-4:] if self.rng.random() < 0.5 else names)
        return self._fill(template)

    def _fill(self, text: str) -> str | None:
        for field in re.findall(r"{(\w)}", text):
            value = getattr(self, f"_{field}")()
            if value is None:
                return None
            text = text.replace("{" + field + "}", value, 1)
        return text

    @property
    def it(self) -> torch.Tensor:
        return self.names[self.x]

    def _x(self) -> str:
        return self.x

    def _n(self) -> str:
        return next(f"t{i}" for i in itertools.count() if f"t{i}" not in self.names)

    def _y(self) -> str | None:
        fit = [name for name, t in self._tensors().items() if _broadcast(self.it, t)]
        return self.rng.choice(fit)

    def _z(self) -> str:
        tensors = self._tensors()
        fit = [name for name, t in tensors.items() if t.shape == self.it.shape]
        return self.rng.choice(fit if self.rng.random() < 0.7 else list(tensors))

    def _e(self) -> str | None:
        fit = [name for name, t in self._tensors().items() if _broadcast(self.it, t) and not self.is_rough(t)]
        return self.rng.choice(fit) if fit else None

    def _m(self) -> str | None:
        name = self._e()
        return None if name is None else name if self.names[name].dtype is torch.bool else f"({name} != 1)"

    def _i(self) -> str | None:
        fit = [name for name, t in self._tensors().items() if t.dtype is torch.int64 and t.ndim < 3]
        n = self.it.shape[0] if self.it.ndim else 0
        if not n:
            return None
        return f"{self.rng.choice(fit)}.remainder({n})" if fit and self.rng.random() < 0.7 else "[0, -1]"

    def _d(self) -> str:
        n = self.it.ndim
        return str(self.rng.choice(range(-n, n))) if n else "0"

    def _s(self) -> str:
        numbers = [name for name, x in self.names.items() if type(x) in (int, float, bool)]
        return self.rng.choice([*numbers, *_listed(NUMBERS)])

    def _k(self) -> str:
        return self._d()

    def _c(self) -> str:
        return self.rng.choice(_listed(PLACES))

    def _v(self) -> str | None:
        return "".join(self._fill(self.rng.choice(_listed(VIEWS))) for _ in range(self.rng.choice((0, 1, 1, 2))))

    def _p(self) -> str:
        return repr(self._placements(tuple(self.it.shape), self.it.dtype))


def kinds_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The reductions that exist for a dtype."""
    if dtype is torch.bool:
        return ("max", "min")
    if dtype.is_complex:
        return ("sum", "avg")
    return ("sum", "sum", *(["avg"] * dtype.is_floating_point), "max", "min", "product")


def is_short(x: torch.Tensor) -> bool:
    """Whether sums of these numbers, in any order, are exact in 24 bits."""
    if not (x.is_floating_point() or x.is_complex()):
        return True
    parts = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    scaled = parts.double() * 2**8
    return bool(((scaled == scaled.round()) & (scaled.abs() < 2**19) | ~scaled.isfinite()).all())


def _largest(x: torch.Tensor) -> float:
    finite = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach().double()
    finite = finite.abs()
    finite = finite[finite.isfinite()]
    return finite.max().item() if finite.numel() else 0.0


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _broadcast(x: torch.Tensor, y: torch.Tensor) -> bool:
    pairs = zip(reversed(x.shape), reversed(y.shape), strict=False)
    return y.ndim <= x.ndim and all(b in (1, a) for a, b in pairs)


def write(rng: random.Random) -> Program:
    """A random program of 3 to 15 steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Writer(rng).program_of(rng.randrange(3, 16))


# ---- shrinking --------------------------------------------------------------------------------


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The shortest program found from this one by dropping steps, replicating tensors and simplifying."""
    for smaller in _smaller(program):
        if fails(smaller):
            return shrink(smaller, fails)
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for size in (8, 4, 2, 1):
        for i in range(0, len(program.steps), size):
            steps = program.steps[:i] + program.steps[i + size :]
            if len(steps) < len(program.steps):
                yield dataclasses.replace(program, steps=steps)
    for i, given in enumerate(program.tensors):
        rest = program.tensors[:i], program.tensors[i + 1 :]
        if not any(re.search(rf"\b{given.name}\b", step) for step in program.steps):
            yield dataclasses.replace(program, tensors=rest[0] + rest[1])
        for simpler in _simpler(given):
            yield dataclasses.replace(program, tensors=(*rest[0], simpler, *rest[1]))


def _simpler(given: Given) -> Iterator[Given]:
    if given.turned:
        yield dataclasses.replace(given, turned=False)
    if given.grad:
        yield dataclasses.replace(given, grad=False)
    if given.dtype != "float64":
        yield dataclasses.replace(given, dtype="float64")
    for axis, p in enumerate(given.placements):
        if not p.is_replicate():
            fewer = (*given.placements[:axis], Replicate(), *given.placements[axis + 1 :])
            yield dataclasses.replace(given, placements=fewer)


def fails_like(program: Program, ask: Callable[[Program], list[str]] = differences) -> Callable[[Program], bool]:
    """Whether a program has a difference of the same kind as this one, and uses no name that it lacks."""
    kind = symptom(ask(program))

    def fails(smaller: Program) -> bool:
        return not _names_missing(smaller) and symptom(ask(smaller)) == kind

    return fails


def _names_missing(program: Program) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return any(error and "NameError" in error for error in run(program, OneDevice()).errors)


def symptom(found: Sequence[str]) -> str:
    """The kind of a difference: the error, or the property that differs."""
    if not found:
        return ""
    error = re.search(r"(\w+(Error|Warning|Exception)): .{,60}", found[0])
    fact = re.search(r": (\w+) is ", found[0])
    return error[0] if error else fact[1] if fact else "value"
