"""The metadata of an op's results: the shapes, strides and dtypes that torch gives on one device. No data is computed.

    out_metas(aten.mm.default, (f32[8@dp, 4], f32[4, 6]), {}, cpu)   (TensorMeta((8, 6), (6, 1), torch.float32),)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.tensor.cache import Cache, frozen
from spmd.tensor.call import SCALAR, TensorMeta
from spmd.tensor.rules.index_meta import index_result
from spmd.tensor.rules.products import KERNELS
from spmd.tensor.spec import Spec, contiguous

aten = torch.ops.aten


metas = Cache(maxsize=4096, decided_by_rules=True)
"""The metadata of results, by op, shapes, strides, dtypes and static arguments: it does not depend on placements."""


def out_metas(op, args: tuple, kwargs: dict, device: torch.device) -> tuple[TensorMeta | None, ...]:
    """A `TensorMeta` for each result of the op on tensors with these specs; None for a result that is no tensor.

    Raises torch's own error for arguments that do not fit, and NotImplementedError for a sparse result.
    """
    if torch.Tag.pointwise in op.tags and float in map(type, (*args, *kwargs.values())):  # it may change in each call
        return _out_metas(op, args, kwargs, device)
    key = (op, device, torch.get_default_dtype(), _without_placements(args), _without_placements(kwargs))
    try:
        hash(key)
    except TypeError:  # a symbolic number
        return _out_metas(op, args, kwargs, device)
    return metas.get(key, lambda: _out_metas(op, args, kwargs, device))


def _without_placements(x: object) -> Hashable:
    """A hashable value in place of an argument, with the shape, stride and dtype of each spec in it."""
    if isinstance(x, Spec):
        return Spec, x.shape, x.stride, x.dtype
    if isinstance(x, (list, tuple)):
        return (list, *map(_without_placements, x))
    if isinstance(x, dict):
        return (dict, *((name, _without_placements(y)) for name, y in x.items()))
    return frozen(x)


def _out_metas(op, args: tuple, kwargs: dict, device: torch.device) -> tuple[TensorMeta | None, ...]:
    if op is aten._ctc_loss.default and args[0].ndim == 3:
        return _ctc_loss(*args, **kwargs)
    _torch.check_has_shape_function(op)
    if torch.Tag.pointwise in op.tags and "device" not in kwargs:  # torch's meta kernels are right for these
        out = _run_without_data(op, args, kwargs, torch.device("meta"))
    else:
        with _torch.uncached_fake_mode(), _torch.fake_errors_unlogged():
            out = _run_without_data(op, args, kwargs, device)
    leaves = pytree.tree_leaves(out)
    sparse = [t.layout for t in leaves if isinstance(t, torch.Tensor) and t.layout is not torch.strided]
    if sparse:
        raise NotImplementedError(f"{op}: gives a tensor of layout {sparse[0]}; a DTensor is strided")
    if op in (aten.index.Tensor, aten._unsafe_index.Tensor):
        meta = torch.device("meta")
        return (index_result(_empty_like(args[0], meta), [x and _empty_like(x, meta) for x in args[1]]),)
    return tuple(TensorMeta.of(t) if isinstance(t, torch.Tensor) else None for t in leaves)


Shapes = list[tuple[tuple[int, ...], torch.dtype] | None]
"""The shape and dtype of each result; None for a result that is no tensor."""


def makes(shapes: Shapes, op, args: tuple, kwargs: dict, device: torch.device) -> bool:
    """Whether the op gives tensors of these shapes and dtypes. A None stands for any.

    The meta kernel is asked first, which takes less time; its answer counts if it is yes.
    """
    try:
        if _are(shapes, pytree.tree_leaves(_run_without_data(op, args, kwargs, torch.device("meta")))):
            return True
    except (NotImplementedError, RuntimeError):  # no meta kernel, or it does not take these arguments
        pass
    return _are(shapes, out_metas(op, args, kwargs, device))


def makes_with_numbers(shapes: Shapes, op, args: tuple, kwargs: dict, device: torch.device) -> bool:
    """The same where SCALAR stands for numbers: for floats or for whole ones, of which torch may make other dtypes."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    several = (1.0, 1) if any(x is SCALAR for x in leaves) else (1.0,)
    return any(
        makes(shapes, op, *pytree.tree_unflatten([n if x is SCALAR else x for x in leaves], tree), device)
        for n in several
    )


def _are(shapes: Shapes, made: Sequence) -> bool:
    pairs = zip(shapes, made, strict=False)
    return len(shapes) == len(made) and all(
        have is None or (t is not None and have == (tuple(t.shape), t.dtype)) for have, t in pairs
    )


def _run_without_data(op, args: tuple, kwargs: dict, device: torch.device) -> object:
    args, kwargs = pytree.tree_map_only(Spec, lambda spec: _empty_like(spec, device), (args, kwargs))
    return KERNELS.get(op, op)(*args, **kwargs)


def _ctc_loss(log_probs: Spec, targets: Spec, input_lengths: list, target_lengths: list, *_, **__) -> tuple:
    """torch has no shapes for it, although they depend on the arguments alone."""
    steps, batch, _ = log_probs.shape
    shape = batch, steps, 2 * max(target_lengths, default=0) + 1
    return TensorMeta((batch,), (1,), log_probs.dtype), TensorMeta(shape, contiguous(shape), log_probs.dtype)


def _empty_like(spec: Spec, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
