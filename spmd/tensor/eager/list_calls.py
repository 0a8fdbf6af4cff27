"""Elementwise ops on lists: one local call does for tensors whose layouts are the same in all lists.

    torch._foreach_add([x, y], [u, v])     one call with the blocks of x and y, and of u and v
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from spmd import _torch
from spmd.tensor.cache import Cache
from spmd.tensor.eager.wrappers import wrap, wrapper
from spmd.tensor.spec import Spec, strides_like

MISS = object()
"""The result for a call that has to be dispatched."""


def run_lists(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], dtensor: type) -> Any:
    """An elementwise op on lists, as one local call if the i-th tensors of all lists have one layout; else MISS."""
    key: list[Any] = [op]
    local: list[Any] = []
    for a in args:
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
            specs = tuple([x._spec if type(x) is dtensor else _NUMBER if _is_number(x) else None for x in a])
            if None in specs:
                return MISS
            key.append(specs)
            a = [x._local_tensor if type(x) is dtensor else x for x in a]
        elif isinstance(a, torch.Tensor):
            return MISS
        local.append(a)
    if kwargs and any([isinstance(x, torch.Tensor) for x in kwargs.values()]):
        return MISS
    key = tuple(key)
    found = aligned.entries.get(key) or aligned.get(key, lambda: _ListCall.of(key))
    if not found.aligned:
        return MISS
    out = found.local(*local, **kwargs)
    if not found.returns_list:
        for i in found.writes:
            torch.autograd.graph.increment_version(args[i])  # autograd does not do it for a list
            for x in args[i]:
                if type(x) is dtensor and x._memory is not None:
                    x._memory.writes += 1
        return None
    firsts = key[1]
    if any([x.dtype != spec.dtype for x, spec in zip(out, firsts, strict=True)]):
        return MISS
    wrappers = found.wrappers
    if not wrappers:
        wrappers = tuple([wrapper(dtensor, x, spec) for x, spec in zip(out, firsts, strict=True)])
        aligned.entries[key] = found._replace(wrappers=wrappers)
    return list(map(wrap, wrappers, out, firsts))


aligned = Cache(maxsize=4096, decided_by_rules=True)
"""How ops on lists are run, by op and specs."""

_NUMBER = "number"


class _ListCall(NamedTuple):
    """How an op on lists is run.

    aligned: the tensors of the lists have one layout, so that one local call does. local: the local function.
    returns_list: it returns a list. writes: the positions of the lists that it writes. wrappers: as in a `HotCall`,
    once it was run.
    """

    aligned: bool
    local: Callable[..., Any]
    returns_list: bool
    writes: tuple[int, ...]
    wrappers: tuple[tuple, ...] = ()

    @classmethod
    def of(cls, key: tuple) -> _ListCall:
        op, *lists = key
        name, returns_list = op._schema.name.removeprefix("aten::"), bool(op._schema.returns)
        aligned = _are_aligned(lists) and (not returns_list or all(map(_is_dense, lists[0])))
        return cls(aligned, getattr(torch, name, op), returns_list, _torch.written_positions(op))


def _is_number(x: Any) -> bool:
    return type(x) is torch.Tensor and x.ndim == 0


def _is_dense(spec: Spec) -> bool:
    """Whether a new tensor like it has its strides. torch does not keep those of a tensor with holes, or expanded."""
    return 0 not in spec.stride and strides_like(spec.shape, spec.stride) == spec.stride


def _are_aligned(lists: list[tuple]) -> bool:
    """Whether the first list has DTensors that are not Partial, and the other lists have the same layouts."""
    if any(spec is _NUMBER or spec.partial for spec in lists[0]) or any(len(x) != len(lists[0]) for x in lists):
        return False
    return all(
        spec is _NUMBER or (spec.same_layout(first) and spec.shape == first.shape and spec.mesh == first.mesh)
        for others in lists[1:]
        for first, spec in zip(lists[0], others, strict=True)
    )
