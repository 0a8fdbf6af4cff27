"""The eager front end: an op on DTensors is lowered, its operands moved, the local op called, the results wrapped."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.tensor.cache import Cache, frozen
from spmd.tensor.call import Call
from spmd.tensor.lower import Lowering, lower
from spmd.tensor.meta import out_metas
from spmd.tensor.placement import REPLICATE
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.rules.decompositions import decompositions
from spmd.tensor.spec import Spec, replicated, spec_of

lowerings = Cache(maxsize=16384)
"""Lowerings of eager calls, by op, specs and static arguments."""

aten = torch.ops.aten
READS_VALUE = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
"""Ops that return a Python value: every rank needs the whole tensor."""

_implicit = contextvars.ContextVar("spmd_implicit_replication", default=False)


@contextlib.contextmanager
def implicit_replication() -> Iterator[None]:
    """Take plain tensors that meet DTensors as replicated: they must be equal on all ranks.

    Without it a plain tensor with dims among DTensors is an error, since only the user knows whether it is the
    same everywhere.
    """
    token = _implicit.set(True)
    try:
        yield
    finally:
        _implicit.reset(token)


def dispatch(op, args: tuple, kwargs: dict[str, Any], dtensor: type) -> Any:
    """Run an op of which some operand is a `dtensor` (the DTensor class, handed down to keep imports in a line)."""
    if op in decompositions:
        out = decompositions[op](*args, **kwargs)
        if out is not NotImplemented:
            return out
    leaves, tree = pytree.tree_flatten((args, kwargs))
    mesh, device = _where(op, leaves, dtensor)
    leaves = [_wrapped(op, x, mesh, dtensor) for x in leaves]
    locals_ = [x._local_tensor if isinstance(x, dtensor) else x for x in leaves]
    specs = [x._spec if isinstance(x, dtensor) else x for x in leaves]
    if op in READS_VALUE:
        return _value(op, locals_, specs, tree)
    spec_args, spec_kwargs = pytree.tree_unflatten(specs, tree)
    key = (op, device.type, frozen(spec_args), frozen(spec_kwargs))
    lowering = lowerings.get(key, lambda: _lowered(op, spec_args, spec_kwargs, device))
    if lowering is DECOMPOSE:
        return op.decompose(*args, **kwargs)
    if _torch.writes_first(op):
        return _in_place(op, lowering, leaves, tree, dtensor)
    out = _local_call(op, lowering, locals_, specs, tree, mesh)
    return _wrap_all(op, lowering, out, leaves, dtensor)


# ---- operands ---------------------------------------------------------------------------------


def _where(op, leaves: list, dtensor: type):
    found = [x for x in leaves if isinstance(x, dtensor)]
    mesh = found[0]._spec.mesh
    other = next((x for x in found if x._spec.mesh != mesh), None)
    if other is not None:
        raise ValueError(
            f"{op}: operands lie on two meshes, {mesh!r} and {other._spec.mesh!r}; redistribute one of them first"
        )
    if mesh.get_coordinate() is None:
        raise RuntimeError(f"{op}: rank {mesh.get_rank()} is not in {mesh!r}; run the op on the ranks of the mesh only")
    return mesh, found[0]._local_tensor.device


def _wrapped(op, x, mesh, dtensor: type):
    """A plain tensor as a replicated DTensor, where that is safe or was asked for."""
    if not isinstance(x, torch.Tensor) or isinstance(x, dtensor):
        return x
    if x.ndim and not _implicit.get():
        raise TypeError(
            f"{op}: a plain tensor of shape {list(x.shape)} met a DTensor. If it is the same on all ranks write "
            "distribute_tensor(t, mesh, [Replicate(), ...]) or run under spmd.implicit_replication(); if it is this "
            "rank's part write DTensor.from_local(t, mesh, placements)."
        )
    return dtensor(x.detach(), spec_of(mesh, [REPLICATE] * mesh.ndim, x.shape, x.dtype, stride=x.stride()))


def _value(op, locals_: list, specs: list, tree) -> Any:
    whole = [
        plan(s, replicated(s)).run(x) if isinstance(s, Spec) else x for x, s in zip(locals_, specs, strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(whole, tree)
    return op(*args, **kwargs)


# ---- lowering and calling ---------------------------------------------------------------------

DECOMPOSE = "decompose"


def _lowered(op, args: tuple, kwargs: dict, device: torch.device) -> Lowering | str:
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise NotImplementedError(f"{op}: random ops on DTensors are not supported yet; draw before distributing")
    if _torch.is_composite(op):
        return DECOMPOSE
    call = Call(op, args, kwargs, out_metas(op, args, kwargs, device))
    return lower(call, in_place=_torch.writes_first(op))


def _local_call(op, lowering: Lowering, locals_: list, specs: list, tree, mesh) -> Any:
    plans = iter(lowering.plans)
    moved = [next(plans).run(x) if isinstance(s, Spec) else x for x, s in zip(locals_, specs, strict=True)]
    args, kwargs = pytree.tree_unflatten(moved, tree)
    if lowering.sizes:
        local = lowering.outs[0].local_shape(mesh.get_coordinate())
        args, kwargs = _torch.with_argument(op, args, kwargs, lowering.sizes, list(local))
    return op(*args, **kwargs)


def _wrap_all(op, lowering: Lowering, out: Any, leaves: list, dtensor: type) -> Any:
    flat, tree = pytree.tree_flatten(out)
    wrapped = [x if spec is None else dtensor(x, spec) for x, spec in zip(flat, lowering.outs, strict=True)]
    if _torch.is_view(op) and (lowering.plans[0].steps or _first(leaves, dtensor)._orphan):
        for w in wrapped:
            w._orphan = True
    return pytree.tree_unflatten(wrapped, tree)


def _first(leaves: list, dtensor: type):
    return next(x for x in leaves if isinstance(x, dtensor))


def _in_place(op, lowering: Lowering, leaves: list, tree, dtensor: type):
    """Write into the first operand's local tensor, through a copy where the op must see it lie otherwise."""
    target = _first(leaves, dtensor)
    if target._orphan:
        raise RuntimeError(
            f"{op}: writing through a view of a sharded dim of {target._spec}: the view had to be gathered into a "
            "copy, so the write would be lost. Redistribute the base to Replicate() before taking the view."
        )
    locals_ = [x._local_tensor if isinstance(x, dtensor) else x for x in leaves]
    specs = [x._spec if isinstance(x, dtensor) else x for x in leaves]
    out = _local_call(op, lowering, locals_, specs, tree, target._spec.mesh)
    if out is not target._local_tensor:
        target._local_tensor.copy_(plan(lowering.outs[0], target._spec).run(out))
    return target
