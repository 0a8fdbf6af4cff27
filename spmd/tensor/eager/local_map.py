"""local_map: call a function of blocks with DTensors.

    def scores(q, k):                                 # plain tensors: this rank's heads
        return torch.softmax(q @ k.mT, -1)

    scores = local_map(scores, out_placements=[Shard(1)], in_placements=([Shard(1)], [Shard(1)]))

Names and arguments are those of torch.distributed.tensor.experimental.local_map. `out_placements` gives the placements
of the results. The global size of a Shard is computed from the sizes of the ranks' blocks, even or not.

**Gradients.** A gradient on a rank is the gradient of the sum of the results of all ranks. This is also the convention
of `spmd.comm` and of torch's functional collectives, so collectives inside the function are differentiated by their
transposes. The gradients of results and arguments follow from it, whatever the function:

    result     Shard         the rank gets its block of the cotangent
               Partial()     all of the cotangent: each term of a sum has it
               Replicate()   the n-th part of it, on n ranks: all have the same result, and it counts once
    argument   Shard         the rank returns a block of the gradient
               Replicate()   a term of the gradient: Partial()
               Partial()     all of the gradient

torch takes the gradient of a replicated argument as replicated. That is right if all ranks do the same work. It is too
small, without an error, if, say, the other argument is sharded. `in_grad_placements` changes the convention for all
arguments, to that of torch: the rank gets all of the cotangent of a replicated result, and the gradients have the
placements that are given. It is for functions whose collectives have gradients of their own, such as Megatron's, or
none, such as `dist.all_reduce`. Without it the latter are an error where gradients are wanted.

A compiled step is traced on global tensors; there the tracer takes over the calls (`traced_by`). Then `in_placements`
must be given, and arguments are moved to these placements.

Left out: gradients of arguments that are Partial("max"), "min" or "product".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from spmd._torch import pytree
from spmd.comm import no_gradient, transport, wait
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor.annotations.block_function import (
    BlockFunction,
    Placements,
    current_tracer,
    metadata_of,
    specs_of_blocks,
)
from spmd.tensor.cache import Cache, frozen
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import REPLICATE, Placement
from spmd.tensor.spec import Spec, spec_of


def local_map(
    func: Callable | None = None,
    out_placements: Placements | tuple[Placements | None, ...] | None = None,
    in_placements: Sequence[Placements | None] | None = None,
    in_grad_placements: Sequence[Placements | None] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable:
    """A function of DTensors from a function of this rank's blocks; without `func`, a decorator.

    out_placements: the placements of the result; for several results (flattened) a tuple of them, with None for a
    result that is no tensor. Blocks must be those of torch.chunk; dims that are not sharded must have equal sizes on
    all ranks.
    in_placements: the placements that each positional argument (flattened) must have, None for one that is no DTensor;
    a DeviceMesh may have None or no entry at all. By default, but not in a compiled step, each argument keeps its own.
    Plain tensors are passed on.
    in_grad_placements: the placements of the gradients that the function returns; see the module.
    device_mesh: of the results; by default that of the arguments.
    redistribute_inputs: move arguments that have other placements. Without it they are an error.

    If no argument is a DTensor, the function is called as it is. Two calls are of one kind if their arguments differ in
    values only. At the first call of a kind the ranks compare the sizes of the results; later calls rely on the sizes.
    So arguments that are no tensors must be the same on all ranks.

    >>> from spmd.tensor.eager.dtensor import distribute_tensor
    >>> from spmd.tensor.placement import Shard
    >>> double = local_map(lambda x: 2 * x, out_placements=[Shard(0)])
    >>> x = distribute_tensor(torch.ones(3), DeviceMesh("cpu", [0], mesh_dim_names=("dp",)), [Shard(0)])
    >>> double(x)
    DTensor(f32[3], local=tensor([2., 2., 2.]))

    Raises ValueError where arguments or results do not have the placements given; on all ranks, where the ranks' blocks
    are not the blocks of one tensor.
    """
    if func is None:
        return functools.partial(
            local_map, out_placements=out_placements, in_placements=in_placements,
            in_grad_placements=in_grad_placements, device_mesh=device_mesh, redistribute_inputs=redistribute_inputs,
        )  # fmt: skip
    if not callable(func):
        raise TypeError(f"local_map: {func!r} is not callable; give the function of this rank's blocks")
    outs = _entry_per_result(out_placements)
    return functools.wraps(func, updated=())(
        LocalMap(func, outs, in_placements, in_grad_placements, device_mesh, redistribute_inputs)
    )


def _entry_per_result(placements: Any) -> tuple:
    """One entry for each result. A tuple of placements is one entry; a tuple of such tuples, or of None, is several."""
    several = isinstance(placements, tuple) and not (placements and all(isinstance(p, Placement) for p in placements))
    return placements if several else (placements,)


class LocalMap(BlockFunction):
    """A function of DTensors, made from a function of blocks.

    specs_by_kind: the specs of the results, by the kind of call. watched: the kinds of calls whose collectives were
    checked for gradients. without_entries: the same function without the entries of meshes, by their places.
    """

    def __init__(self, func, outs, ins, grads, mesh: DeviceMesh | None, moves: bool):
        super().__init__(func, outs, ins, grads, mesh, moves)
        self.specs_by_kind, self.watched = Cache(maxsize=1024), Cache(maxsize=1024)
        self.without_entries = Cache(maxsize=16)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meshes = self.meshes_counted(args)
        if meshes:
            return self.without_entries.get(meshes, lambda: self._without_entries(meshes))(*args, **kwargs)
        flat, tree = pytree.tree_flatten((args, kwargs) if kwargs else args)
        given = [x for x in flat if isinstance(x, DTensor)]
        if not given:
            tracer = current_tracer() if any(isinstance(x, torch.Tensor) for x in flat) else None
            return self.func(*args, **kwargs) if tracer is None else tracer(self, args, kwargs)
        mesh = given[0]._spec.mesh if self.mesh is None else self.mesh
        self._check(len(flat) if not kwargs else len(pytree.tree_leaves(args)), kwargs, given, mesh)
        placed = [self._placed(i, x) for i, x in enumerate(flat)]
        local = [self._local(i, x) if isinstance(x, DTensor) else x for i, x in enumerate(placed)]
        local = pytree.tree_unflatten(local, tree)
        local_args, local_kwargs = local if kwargs else (local, {})
        kind = (tree, *map(_key, placed))
        with self._watching(kind, placed):
            out, out_tree = pytree.tree_flatten(self.func(*local_args, **local_kwargs))
        return pytree.tree_unflatten(self._results(out, mesh, kind), out_tree)

    def _without_entries(self, meshes: tuple[int, ...]) -> LocalMap:
        ins, grads = (self.entries_but(meshes, entries) for entries in (self.ins, self.grads))
        return LocalMap(self.func, self.outs, ins, grads, self.mesh, self.redistributes)

    @contextmanager
    def _watching(self, kind: tuple, given: list) -> Iterator[None]:
        """Inside, in the first call of a kind that wants gradients, collectives without a gradient are errors."""
        wants = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)
        if self.grads is not None or not wants or kind in self.watched.entries:
            yield
            return
        with no_gradient.watched(repr(self)):
            yield
        self.watched.get(kind, lambda: True)

    # ---- arguments ----------------------------------------------------------------------------
    def _check(self, n: int, kwargs: dict, given: list[DTensor], mesh: DeviceMesh) -> None:
        """Check that there are as many arguments as placements, and that they are on one mesh."""
        other = next((x for x in given if x._spec.mesh != mesh), None)
        if other is not None:
            raise ValueError(f"{self}: an argument is on {other._spec.mesh!r}, the results on {mesh!r}; use one mesh")
        self.check_lengths(n, "DTensor")
        for name, _ in self._given_placements():
            if any(isinstance(x, DTensor) for x in pytree.tree_leaves(kwargs)):
                raise ValueError(f"{self}: {name} is for positional arguments; pass DTensors by position")

    def _placed(self, i: int, x: Any) -> Any:
        """The i-th argument, with the placements that it must have."""
        if self.ins is None or (isinstance(x, torch.Tensor) and not isinstance(x, DTensor)) or i >= len(self.ins):
            return x
        want = self.ins[i]
        if isinstance(x, DTensor) == (want is None):
            what = f"{x._spec}, but no placements" if isinstance(x, DTensor) else f"{x!r}, but placements {want}"
            raise ValueError(f"{self}: argument {i} is {what} are given for it; a DTensor needs them, all else None")
        if want is None:
            return x
        target = _target(x._spec, tuple(want))
        if x._spec.same_layout(target):
            return x
        if not self.redistributes:
            raise ValueError(
                f"{self}: argument {i} is {x._spec}, but in_placements say {target}; write "
                f"x.redistribute(placements={list(want)}) before the call, or redistribute_inputs=True"
            )
        return x.redistribute(placements=want)

    def _local(self, i: int, x: DTensor) -> torch.Tensor:
        """This rank's block. Its gradient has the placements in_grad_placements; by default it is a term of a sum."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x.to_local()
        return x.to_local(grad_placements=self.gradient_placements(i, x._spec))

    # ---- results ------------------------------------------------------------------------------
    def check_results(self, out: list) -> None:
        """The same check for a function that may return DTensors by mistake."""
        for j, x in enumerate(out):
            if isinstance(x, DTensor):
                raise ValueError(f"{self}: result {j} is a DTensor, {x._spec}; give this rank's block, its to_local()")
        super().check_results(out)

    def _results(self, out: list, mesh: DeviceMesh, kind: tuple) -> list:
        self.check_results(out)
        out = [wait(x) if isinstance(x, torch.Tensor) else x for x in out]
        tensors = [x for x in out if isinstance(x, torch.Tensor)]
        placed = [p for p in self.outs if p is not None]
        specs = self.specs_by_kind.get((mesh, *kind), lambda: _agreed_specs(repr(self), tensors, placed, mesh))
        _check_blocks(repr(self), tensors, specs)
        wrapped = (self._wrapped(x, spec) for x, spec in zip(tensors, specs, strict=True))
        return [next(wrapped) if isinstance(x, torch.Tensor) else x for x in out]

    def _wrapped(self, x: torch.Tensor, spec: Spec) -> DTensor:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return DTensor(x.view_as(x), spec)
        copies = prod(spec.mesh.shape[a] for a, p in enumerate(spec.placements) if p == REPLICATE)
        if self.grads is None and copies > 1:
            x = _DivideGradient.apply(x, copies)
        return DTensor.from_local(x, spec.mesh, spec.placements, shape=spec.shape, stride=spec.stride)


@functools.lru_cache(maxsize=1024)
def _target(spec: Spec, placements: tuple[Placement, ...]) -> Spec:
    """The spec of the same tensor with these placements."""
    return spec_of(spec.mesh, placements, spec.shape, spec.dtype)


class _DivideGradient(torch.autograd.Function):
    """The same tensor. Its gradient is equal on n ranks, and each rank takes the n-th part."""

    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g / ctx.n, None


def _key(x: Any) -> Any:
    """The part of an argument that belongs to the kind of a call: the same on all ranks."""
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


# ---- the specs of results ---------------------------------------------------------------------


def _agreed_specs(who: str, blocks: list[torch.Tensor], placed: list[Placements], mesh: DeviceMesh) -> tuple[Spec, ...]:
    """The specs of the tensors with these blocks. All ranks must ask, and all raise if the blocks do not fit."""
    return specs_of_blocks(who, transport().gather_objects(metadata_of(blocks), mesh), placed, mesh)


@per_rank
def _check_blocks(who: str, blocks: list[torch.Tensor], specs: Sequence[Spec]) -> None:
    """Check that this call's blocks have the specs that the ranks agreed on for its kind."""
    for j, (x, spec) in enumerate(zip(blocks, specs, strict=True)):
        want = spec.local_shape_here()
        if tuple(x.shape) != want or x.dtype != spec.dtype:
            raise ValueError(
                f"{who}: result {j} is {x.dtype}{list(x.shape)} here, but in the first call with such arguments it was "
                f"a block of {spec}, which is {list(want)}; a size that depends on values must be an argument"
            )
