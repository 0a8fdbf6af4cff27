"""What single-device torch would return: shapes, strides and dtypes, without data."""

from __future__ import annotations

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.tensor.call import TensorMeta
from spmd.tensor.index_meta import indexed
from spmd.tensor.rules.products import KERNELS
from spmd.tensor.spec import Spec

aten = torch.ops.aten


def out_metas(op, args: tuple, kwargs: dict, device: torch.device) -> tuple[TensorMeta | None, ...]:
    """One `TensorMeta` per result of the op on tensors of these specs; None where it returns no tensor.

    Raises what torch raises for arguments that do not fit, and NotImplementedError for a sparse result.
    """
    _torch.check_has_shapes(op)
    if torch.Tag.pointwise in op.tags and "device" not in kwargs:  # C++ has all that there is to say
        out = _on(op, args, kwargs, torch.device("meta"))
    else:
        with _torch.forgetful_fakes(), _torch.quiet_fakes():
            out = _on(op, args, kwargs, device)
    leaves = pytree.tree_leaves(out)
    other = [t.layout for t in leaves if isinstance(t, torch.Tensor) and t.layout is not torch.strided]
    if other:
        raise NotImplementedError(f"{op}: gives a tensor of layout {other[0]}; a DTensor is strided")
    if op in (aten.index.Tensor, aten._unsafe_index.Tensor):
        meta = torch.device("meta")
        return (indexed(_fake(args[0], meta), [x and _fake(x, meta) for x in args[1]]),)
    return tuple(TensorMeta.of(t) if isinstance(t, torch.Tensor) else None for t in leaves)


def _on(op, args: tuple, kwargs: dict, device: torch.device) -> object:
    args, kwargs = pytree.tree_map_only(Spec, lambda spec: _fake(spec, device), (args, kwargs))
    return KERNELS.get(op, op)(*args, **kwargs)


def _fake(spec: Spec, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
