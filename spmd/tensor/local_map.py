"""local_map: a function written for one rank's blocks, called with DTensors.

    def scores(q, k):                                 # plain tensors: this rank's heads
        return torch.softmax(q @ k.mT, -1)

    scores = local_map(scores, out_placements=[Shard(1)], in_placements=([Shard(1)], [Shard(1)]))

Names and arguments are those of torch.distributed.tensor.experimental.local_map. What the ranks' results are together
is said by `out_placements`: of a Shard the global size is read off the ranks' sizes, even or not.

**Gradients.** A gradient on a rank is that of the sum of what all ranks compute, as it is for `spmd.comm` and for
torch's functional collectives, so that collectives inside the function are differentiated by their transposes. From
that follows what a rank is given and what it gives back, without knowing the function:

    result     Shard         its block of the cotangent
               Partial()     all of it: each term of a sum has it
               Replicate()   its n-th part, on n ranks: all have the same result, and it counts once
    argument   Shard         a block of the gradient
               Replicate()   a term of it: Partial()
               Partial()     all of it

torch takes a replicated argument's gradient as replicated: right where no rank has work of its own, and silently too
small where, say, the other argument is sharded. `in_grad_placements` says otherwise, for all arguments, and is read as
torch reads it: a replicated result's cotangent is given whole, and the gradients lie as they are said to. It is for
functions whose collectives have gradients of their own, such as Megatron's, or none, such as `dist.all_reduce`; without
it the latter are an error where gradients are wanted.

In a compiled step, which is traced on whole tensors, whoever traces takes calls over (`traced_whole`); `in_placements`
have to be given there, and arguments are moved to where they say.

Left out: gradients of arguments that are Partial("max"), "min" or "product".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Any

import torch

from spmd._torch import pytree
from spmd.comm import transport, ungraded, wait
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor.cache import Cache, frozen
from spmd.tensor.dtensor import DTensor
from spmd.tensor.placement import REPLICATE, Partial, Placement
from spmd.tensor.spec import Spec, check_placements, spec_of

Placements = Sequence[Placement]
"""How one tensor lies; None stands where there is no tensor."""


def local_map(
    func: Callable | None = None,
    out_placements: Placements | tuple[Placements | None, ...] | None = None,
    in_placements: Sequence[Placements | None] | None = None,
    in_grad_placements: Sequence[Placements | None] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable:
    """Let a function of this rank's blocks be called with DTensors; without `func`, a decorator.

    out_placements: how the results lie: placements, or for several results (flattened) a tuple of them, with None for
    a result that is no tensor. Blocks must be those of torch.chunk; of what is not sharded the ranks give equal shapes.
    in_placements: how each positional argument (flattened) has to lie, None for one that is no DTensor; a DeviceMesh
    is not counted. By default as it does, but in a compiled step. Plain tensors are handed on.
    in_grad_placements: how the gradients lie that the function gives back; see the module.
    device_mesh: of the results; by default that of the arguments.
    redistribute_inputs: move the arguments that lie otherwise. It is an error else.

    Without a DTensor among the arguments the function is called as it is. The sizes of results are compared among ranks
    at the first call of a kind - arguments alike but for their values - and taken for granted from then on; so
    arguments that are no tensors have to be the same on all ranks.

    >>> from spmd.tensor.dtensor import distribute_tensor
    >>> from spmd.tensor.placement import Shard
    >>> double = local_map(lambda x: 2 * x, out_placements=[Shard(0)])
    >>> x = distribute_tensor(torch.ones(3), DeviceMesh("cpu", [0], mesh_dim_names=("dp",)), [Shard(0)])
    >>> double(x)
    DTensor(f32[3], local=tensor([2., 2., 2.]))

    Raises ValueError where arguments or results do not lie as said, and, on all ranks, where the ranks' blocks are not
    those of one tensor.
    """
    if func is None:
        return functools.partial(
            local_map, out_placements=out_placements, in_placements=in_placements,
            in_grad_placements=in_grad_placements, device_mesh=device_mesh, redistribute_inputs=redistribute_inputs,
        )  # fmt: skip
    if not callable(func):
        raise TypeError(f"local_map: {func!r} is not callable; give the function of this rank's blocks")
    outs = _one_each(out_placements)
    return functools.wraps(func, updated=())(
        LocalMap(func, outs, in_placements, in_grad_placements, device_mesh, redistribute_inputs)
    )


def _one_each(placements: Any) -> tuple:
    """One entry a result: a tuple of placements is one entry, a tuple of such tuples or of None is several."""
    several = isinstance(placements, tuple) and not (placements and all(isinstance(p, Placement) for p in placements))
    return placements if several else (placements,)


class LocalMap:
    """A function of blocks, as a function of DTensors.

    `kinds` remembers the specs of results, by the kind of call; `watched` the kinds that were watched differentiating.
    """

    def __init__(self, func, outs, ins, grads, mesh: DeviceMesh | None, moves: bool):
        self.func, self.outs, self.ins, self.grads, self.mesh, self.moves = func, outs, ins, grads, mesh, moves
        self.kinds, self.watched = Cache(maxsize=1024), Cache(maxsize=1024)

    @property
    def name(self) -> str:
        """What the function is called."""
        return getattr(self.func, "__name__", type(self.func).__name__)

    def __repr__(self):
        return f"local_map({getattr(self.func, '__name__', self.func)}, out_placements={self.outs})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flat, tree = pytree.tree_flatten((args, kwargs) if kwargs else args)
        given = [x for x in flat if isinstance(x, DTensor)]
        if not given:
            whole = _whole.get() if any(isinstance(x, torch.Tensor) for x in flat) else None
            return self.func(*args, **kwargs) if whole is None else whole(self, args, kwargs)
        mesh = given[0]._spec.mesh if self.mesh is None else self.mesh
        self._check(len(flat) if not kwargs else len(pytree.tree_leaves(args)), kwargs, given, mesh)
        placed = [self._placed(i, x) for i, x in enumerate(flat)]
        local = [self._local(i, x) if isinstance(x, DTensor) else x for i, x in enumerate(placed)]
        local = pytree.tree_unflatten(local, tree)
        local_args, local_kwargs = local if kwargs else (local, {})
        kind = (tree, *map(_kind, placed))
        with self._watching(kind, placed):
            out, out_tree = pytree.tree_flatten(self.func(*local_args, **local_kwargs))
        return pytree.tree_unflatten(self._results(out, mesh, kind), out_tree)

    @contextmanager
    def _watching(self, kind: tuple, given: list) -> Iterator[None]:
        """Around the first call of a kind that wants gradients: collectives that have none are errors."""
        wants = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)
        if self.grads is not None or not wants or kind in self.watched.entries:
            yield
            return
        with ungraded.watched(repr(self)):
            yield
        self.watched.get(kind, lambda: True)

    # ---- arguments ----------------------------------------------------------------------------
    def _check(self, n: int, kwargs: dict, given: list[DTensor], mesh: DeviceMesh) -> None:
        """The arguments are as many as their placements, and lie on one mesh."""
        other = next((x for x in given if x._spec.mesh != mesh), None)
        if other is not None:
            raise ValueError(f"{self}: an argument lies on {other._spec.mesh!r}, the results on {mesh!r}; use one mesh")
        self.check_lengths(n, "DTensor")
        for name, _ in self._said():
            if any(isinstance(x, DTensor) for x in pytree.tree_leaves(kwargs)):
                raise ValueError(f"{self}: {name} is for positional arguments; pass DTensors by position")

    def check_lengths(self, n: int, kind: str) -> None:
        """There are as many placements as positional arguments, of which those count that are of this kind."""
        for name, said in self._said():
            if len(said) != n:
                raise ValueError(
                    f"{self}: {name} has {len(said)} entries for {n} positional arguments, counted flat; give one for "
                    f"each, None for what is no {kind}"
                )

    def _said(self) -> list[tuple[str, tuple]]:
        """The placements of arguments that were given, with their names."""
        both = (("in_placements", self.ins), ("in_grad_placements", self.grads))
        return [(name, said) for name, said in both if said is not None]

    def _placed(self, i: int, x: Any) -> Any:
        """The i-th argument, lying as it has to."""
        if self.ins is None or (isinstance(x, torch.Tensor) and not isinstance(x, DTensor)) or i >= len(self.ins):
            return x
        want = self.ins[i]
        if isinstance(x, DTensor) == (want is None):
            what = f"{x._spec}, but no placements" if isinstance(x, DTensor) else f"{x!r}, but placements {want}"
            raise ValueError(f"{self}: argument {i} is {what} are given for it; a DTensor needs them, all else None")
        if want is None:
            return x
        target = _target(x._spec, tuple(want))
        if x._spec.lies_as(target):
            return x
        if not self.moves:
            raise ValueError(
                f"{self}: argument {i} is {x._spec}, but in_placements say {target}; write "
                f"x.redistribute(placements={list(want)}) before the call, or redistribute_inputs=True"
            )
        return x.redistribute(placements=want)

    def _local(self, i: int, x: DTensor) -> torch.Tensor:
        """This rank's block; its gradient is a term of the whole, or what in_grad_placements say."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x.to_local()
        return x.to_local(grad_placements=self.gradient_placements(i, x._spec))

    def gradient_placements(self, i: int, spec: Spec) -> Placements:
        """How the gradient lies that comes back to argument i, which lies so."""
        if self.grads is None:
            return [self._terms(i, p) for p in spec.placements]
        if self.grads[i] is None:
            raise ValueError(f"{self}: argument {i} is {spec} and wants a gradient; in_grad_placements has None")
        return self.grads[i]

    def _terms(self, i: int, p: Placement) -> Placement:
        """How the gradients lie of what lies so, each rank's being that of the sum over all ranks."""
        if not isinstance(p, Partial):
            return Partial() if p == REPLICATE else p
        if p.reduce_op not in ("sum", "avg"):
            raise NotImplementedError(
                f"{self}: argument {i} is {p} and wants a gradient, which goes to the rank that has the {p.reduce_op}; "
                "redistribute it before the call"
            )
        return REPLICATE if p.reduce_op == "sum" else Partial()

    # ---- results ------------------------------------------------------------------------------
    def check_results(self, out: list) -> None:
        """The results, flat, are as many as their placements, and tensors where these are placements."""
        if len(out) != len(self.outs):
            raise ValueError(f"{self}: gives {len(out)} results, counted flat, for {len(self.outs)} out_placements")
        for j, (x, placements) in enumerate(zip(out, self.outs, strict=True)):
            if isinstance(x, DTensor):
                raise ValueError(f"{self}: result {j} is a DTensor, {x._spec}; give this rank's block, its to_local()")
            if isinstance(x, torch.Tensor) == (placements is None):
                what = "a tensor, which needs placements" if placements is None else f"{x!r}, which takes None"
                raise ValueError(f"{self}: result {j} is {what} in out_placements")

    def _results(self, out: list, mesh: DeviceMesh, kind: tuple) -> list:
        self.check_results(out)
        out = [wait(x) if isinstance(x, torch.Tensor) else x for x in out]
        tensors = [x for x in out if isinstance(x, torch.Tensor)]
        placed = [p for p in self.outs if p is not None]
        specs = self.kinds.get((mesh, *kind), lambda: _agreed(repr(self), tensors, placed, mesh))
        _check_blocks(repr(self), tensors, specs)
        wrapped = (self._wrapped(x, spec) for x, spec in zip(tensors, specs, strict=True))
        return [next(wrapped) if isinstance(x, torch.Tensor) else x for x in out]

    def _wrapped(self, x: torch.Tensor, spec: Spec) -> DTensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return DTensor(x.view_as(x), spec)
        alike = prod(spec.mesh.shape[a] for a, p in enumerate(spec.placements) if p == REPLICATE)
        if self.grads is None and alike > 1:
            x = _Share.apply(x, alike)
        return DTensor.from_local(x, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)


@functools.lru_cache(maxsize=1024)
def _target(spec: Spec, placements: tuple[Placement, ...]) -> Spec:
    """The spec of the same tensor placed so."""
    return spec_of(spec.mesh, placements, spec.shape, spec.dtype)


class _Share(torch.autograd.Function):
    """The same tensor; of its gradient, which n ranks have alike, each takes the n-th part."""

    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g / ctx.n, None


Whole = Callable[[LocalMap, tuple, dict[str, Any]], Any]
_whole: ContextVar[Whole | None] = ContextVar("spmd_traced_whole", default=None)


@contextmanager
def traced_whole(call: Whole | None) -> Iterator[None]:
    """Inside, calls with whole tensors are handed to `call`, to be written down for all ranks."""
    token = _whole.set(call)
    try:
        yield
    finally:
        _whole.reset(token)


def _kind(x: Any) -> Any:
    """What tells an argument from others, on all ranks alike."""
    if isinstance(x, DTensor):
        return x._spec
    if isinstance(x, torch.Tensor):
        return torch.Tensor, x.dtype, x.ndim
    key = frozen(x)
    try:
        hash(key)
    except TypeError:
        return type(x)
    return key


# ---- one tensor of the blocks of all ranks ----------------------------------------------------


def _agreed(who: str, blocks: list[torch.Tensor], placed: list[Placements], mesh: DeviceMesh) -> tuple[Spec, ...]:
    """The specs of the tensors of which the ranks hold these blocks. All ranks ask, and all raise where they differ."""
    return specs_of_blocks(who, transport().gather_objects(looks_of(blocks), mesh), placed, mesh)


def specs_of_blocks(who: str, every: list[list], placed: list[Placements], mesh: DeviceMesh) -> tuple[Spec, ...]:
    """The specs of the tensors of which the ranks hold blocks that look so (`looks_of`), in the order of the mesh."""
    return tuple(_joined(who, j, p, mesh, [looks[j] for looks in every]) for j, p in enumerate(placed))


@per_rank
def looks_of(blocks: list[torch.Tensor]) -> list[tuple]:
    """Of each its shape, its dtype, and whether it wants a gradient."""
    return [(tuple(x.shape), x.dtype, x.requires_grad) for x in blocks]


def _joined(who: str, j: int, placements: Placements, mesh: DeviceMesh, looks: list[tuple]) -> Spec:
    """The spec of result j, from what each rank's block looks like, in the mesh's order."""
    shapes, dtypes, wants = zip(*looks, strict=True)
    if len({len(s) for s in shapes}) > 1 or len(set(dtypes)) > 1 or len(set(wants)) > 1:
        raise ValueError(f"{who}: result {j} differs between ranks: {_listed(mesh, looks)}")
    placements = check_placements(mesh, placements, len(shapes[0]))
    spec = spec_of(mesh, placements, _global_shape(placements, mesh, shapes), dtypes[0])
    for rank, shape in zip(mesh.ranks, shapes, strict=True):
        want = spec.local_shape(mesh.coordinate_of(rank))
        if want != shape:
            raise ValueError(
                f"{who}: the blocks of result {j} are not those of one tensor that lies as {list(placements)}: of "
                f"{spec} rank {rank} has {list(want)}, cut as torch.chunk does; the ranks gave {_listed(mesh, looks)}"
            )
    return spec


def _global_shape(placements: Sequence[Placement], mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Along a dim the sizes of the blocks that lie behind each other are added up."""
    whole = list(shapes[0])
    for d in range(len(whole)):
        axes = [a for a, p in enumerate(placements) if p.is_shard(d)]
        coordinates = [mesh.coordinate_of(rank) for rank in mesh.ranks]
        whole[d] = sum(
            shape[d] for at, shape in zip(coordinates, shapes, strict=True)
            if not any(i for a, i in enumerate(at) if a not in axes)
        )  # fmt: skip
    return whole


def _listed(mesh: DeviceMesh, looks: list[tuple]) -> str:
    found = [
        f"{dtype}{list(shape)} on rank {rank}{' with a gradient' if wants else ''}"
        for rank, (shape, dtype, wants) in zip(mesh.ranks, looks, strict=True)
    ]
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")


@per_rank
def _check_blocks(who: str, blocks: list[torch.Tensor], specs: Sequence[Spec]) -> None:
    """What was agreed on for calls of this kind holds for this one."""
    for j, (x, spec) in enumerate(zip(blocks, specs, strict=True)):
        want = spec.local_shape_here()
        if tuple(x.shape) != want or x.dtype != spec.dtype:
            raise ValueError(
                f"{who}: result {j} is {x.dtype}{list(x.shape)} here, but in the first call with such arguments it was "
                f"a block of {spec}, which is {list(want)}; a size that depends on values must be an argument"
            )
