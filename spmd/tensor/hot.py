"""The calls that are made again and again: one look-up, the local op, and the results wrapped.

A call is hot once the slow way (`dispatch`) has been gone for its like: then all that its kind needs - what is moved,
which local function, the specs of its results - is kept here, under the op, the specs of its tensors and its static
arguments. What has a twist - writes into what is moved, tensors in keyword arguments - takes the slow way.

    hot.seen        # Cache(12 of 16384 entries, 340 hits, 12 misses)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from spmd import _torch
from spmd.tensor import explicit
from spmd.tensor.cache import Cache
from spmd.tensor.call import is_pointwise
from spmd.tensor.composites import KEYS
from spmd.tensor.redistribute.plan import Plan
from spmd.tensor.rules.lists import ELEMENTWISE_LISTS
from spmd.tensor.rules.products import KERNELS
from spmd.tensor.spec import Spec, strides_like

seen = Cache(maxsize=16384)
"""Hot calls by op, specs and static arguments."""

_found = seen.entries.get  # looked up once: it is asked in every call

MISS = object()
"""What `run` gives for a call that is not hot."""


class Hot(NamedTuple):
    """How a hot call is run.

    plain: it makes one tensor, new or a view of its only one, and nothing else is to be done. call: the local function.
    outs: the spec of each result, None for what is no tensor. single: it gives one tensor. views: the results show the
    first tensor. in_place: it writes the first tensor and gives it back. sizes: where among the arguments the local
    shape of the result stands, -1 for nowhere. moves: which arguments are moved first, and how. sends: those, or the
    local function, may send something.
    """

    plain: bool
    call: Callable[..., Any]
    outs: tuple[Spec | None, ...]
    single: bool
    views: bool
    in_place: bool
    sizes: int
    moves: tuple[tuple[int, Plan], ...] = ()
    sends: bool = False


NONE: dict[str, Any] = {}

_NUMBERS = frozenset({int, float})
_WHOLE = frozenset({int, bool})
_STATIC = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout})


def run(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any] | None, dtensor: type) -> Any:
    """What the call gives; MISS where it has to be dispatched."""
    if not kwargs:  # the commonest calls, spelled out: what follows does the same for all
        if len(args) == 2:
            a, b = args
            kind = type(b)
            if type(a) is not dtensor:
                pass
            elif kind in _NUMBERS and b - b == 0 != b and is_pointwise(op):
                found = _found((op, a._spec, kind))
                if found is None or a._copy is not None:
                    return MISS
                if found[5]:
                    return _written(found, a, args)
                return _call(found, [a._local_tensor, b], NONE, a, dtensor)
            elif kind is dtensor and a is not b:
                found = _found((op, a._spec, b._spec))
                if found is not None and a._copy is None and b._copy is None:
                    if not found[0]:
                        return _call(found, [a._local_tensor, b._local_tensor], NONE, a, dtensor)
                    seen.hits += 1
                    return wrap(dtensor, found[1](a._local_tensor, b._local_tensor), found[2][0])
            elif kind is list:
                try:
                    found = _found((op, a._spec, tuple(b)))
                except TypeError:  # symbols among the sizes
                    found = None
                if found is not None and a._copy is None:
                    return _call(found, [a._local_tensor, b], NONE, a, dtensor)
        elif len(args) == 1:
            a = args[0]
            if type(a) is dtensor:
                found = _found((op, a._spec))
                if found is not None and a._copy is None:
                    if not found[0]:
                        return _call(found, [a._local_tensor], NONE, a, dtensor)
                    if found[4]:
                        return _shown(found, a, args, dtensor)
                    seen.hits += 1
                    return wrap(dtensor, found[1](a._local_tensor), found[2][0])
        if len(args) > 1 and type(args[1]) in _STATIC and type(args[0]) is dtensor:
            a, types = args[0], tuple(map(type, args))
            if list not in types:
                found = _found((op, a._spec, types, args[1:]))
                if found is not None and a._copy is None:
                    if found[0] and found[4]:
                        return _shown(found, a, args, dtensor)
                    return _call(found, [a._local_tensor, *args[1:]], NONE, a, dtensor)
    if args and type(args[0]) is list and op in ELEMENTWISE_LISTS:
        return run_lists(op, args, kwargs or NONE, dtensor)
    return _any(op, args, kwargs or NONE, dtensor)


def _any(
    op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], dtensor: type, new: Hot | None = None
) -> Any:
    """Read a call of any kind, and give what it gives, or MISS; with `new`, run calls like it so from now on."""
    key: list[Any] = [op]
    local: list[Any] = []
    tensors: list[Any] = []
    for x in args:
        kind = type(x)
        if kind is dtensor:
            for i, t in enumerate(tensors):
                if t is x:
                    key.append(i)  # where it came first; no other number stands in a key by itself
                    break
            key.append(x._spec)
            local.append(x._local_tensor)
            tensors.append(x)
            continue
        if kind in _NUMBERS and x - x == 0 != x and is_pointwise(op):
            key.append(kind)
        elif kind in _STATIC or (kind is float and x == x and x != 0.0):  # NaN is not itself, and 0.0 is -0.0
            key += (kind, x)
        elif kind is list:
            if not x or type(x[0]) in _WHOLE:
                if len(set(map(type, x))) > 1:
                    return MISS
                key.append(tuple(x))
            else:
                if not all([type(y) is dtensor for y in x]):
                    return MISS
                key.append(tuple([y._spec for y in x]))
                tensors += x
                if len({id(y) for y in tensors}) < len(tensors):
                    return MISS
                x = [y._local_tensor for y in x]
        else:
            return MISS
        local.append(x)
    for name, x in kwargs.items():
        kind = type(x)
        if kind in _NUMBERS and x - x == 0 != x and is_pointwise(op):
            key += (name, kind)
        elif kind in _STATIC:
            key += (name, kind, x)
        else:
            return MISS
    if new is not None:
        return seen.get(tuple(key), lambda: new)
    found = _found(tuple(key))
    if found is None:
        return MISS
    for x in tensors:
        if x._copy is not None:
            return MISS
    return _call(found, local, kwargs, tensors[0], dtensor)


@functools.lru_cache(maxsize=4096)
def _is_read_whole(op: _torch.OpOverload, types: tuple[type, ...]) -> bool:
    """Whether arguments of these types, after the first, make a key as they stand: no floats, lists, unread numbers."""
    read = _STATIC - _NUMBERS if is_pointwise(op) else _STATIC
    return all(kind in read for kind in types[1:])


def wrap(dtensor: type, local: torch.Tensor, spec: Spec) -> Any:
    """The DTensor of a block: what calling the class does, in less time."""
    out = _torch.new_wrapper(
        dtensor, spec.shape, spec.stride, dtype=local.dtype, device=local.device, _extra_dispatch_keys=KEYS
    )
    out._local_tensor, out._spec = local, spec
    return out


def is_normal_in_inference(x: torch.Tensor) -> bool:
    """Whether x was made outside of the inference mode that is on now. Then so are its views, in torch's eyes."""
    return torch.is_inference_mode_enabled() and not x.is_inference()


def _shown(found: Hot, base: Any, args: tuple, dtensor: type) -> Any:
    """What a plain view gives: `_call` for nothing else, in less time."""
    if torch.is_inference_mode_enabled() and is_normal_in_inference(base):
        return MISS
    try:
        out = found[1](base._local_tensor, *args[1:])
    except RuntimeError:
        return MISS
    seen.hits += 1
    view = wrap(dtensor, out, found[2][0])
    memory = base._memory
    if memory is None:
        memory = base._memory = Memory()
    view._memory = memory
    return view


def _written(found: Hot, target: Any, args: tuple) -> Any:
    """What a write of a number gives: `_call` for nothing else, in less time."""
    seen.hits += 1
    found[1](target._local_tensor, args[1])
    if target._memory is not None:
        target._memory.writes += 1
    return target


def _call(found: Hot, local: list, kwargs: dict[str, Any], first: Any, dtensor: type) -> Any:
    _, call, outs, single, views, in_place, sizes, moves, sends = found
    if sends and explicit.is_on():
        return MISS  # the slow way asks whether they send anything
    if views and torch.is_inference_mode_enabled() and is_normal_in_inference(first):  # spares most views a call
        return MISS
    seen.hits += 1
    if in_place:
        call(*local, **kwargs)
        if first._memory is not None:
            first._memory.writes += 1
        return first
    if sizes >= 0:
        local[sizes] = outs[0].local_shape_here()
    for i, way in moves:
        local[i] = way.run(local[i])
    try:
        out = call(*local, **kwargs)
    except RuntimeError:
        if sends:
            raise  # what was sent is not sent again
        return MISS  # a block with unusual strides that has no such view, or an error that the slow way explains
    if single:
        result = wrap(dtensor, out, outs[0])
        if views:
            result._memory = memory_of(first)
        return result
    results = [x if spec is None else wrap(dtensor, x, spec) for x, spec in zip(out, outs, strict=True)]
    if views:
        memory = memory_of(first)
        for result in results:
            result._memory = memory
    return type(out)(results)


def remember(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], hot: Hot, dtensor: type) -> None:
    """Run calls like this one so from now on, if they can be told from others at a glance."""
    types = tuple(map(type, args))
    if len(args) > 1 and types[0] is dtensor and not kwargs and _is_read_whole(op, types):
        seen.get((op, args[0]._spec, types, args[1:]), lambda: hot)
    else:
        _any(op, args, kwargs, dtensor, hot)


# ---- lists ------------------------------------------------------------------------------------


def run_lists(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], dtensor: type) -> Any:
    """An elementwise op on lists, as one local call where the i-th tensors of all lists lie alike; MISS elsewhere."""
    key: list[Any] = [op]
    local: list[Any] = []
    shared: list[Any] = []  # tensors with views
    for a in args:
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
            specs = tuple([x._spec if type(x) is dtensor else _NUMBER if _is_number(x) else None for x in a])
            if None in specs:
                return MISS
            key.append(specs)
            shared += [x for x in a if type(x) is dtensor and x._memory is not None]
            a = [x._local_tensor if type(x) is dtensor else x for x in a]
        elif isinstance(a, torch.Tensor):
            return MISS
        local.append(a)
    if any([x._copy is not None for x in shared]):
        return MISS
    if kwargs and any([isinstance(x, torch.Tensor) for x in kwargs.values()]):
        return MISS
    key = tuple(key)
    found = aligned.entries.get(key) or aligned.get(key, lambda: _Aligned.of(key))
    if not found.yes:
        return MISS
    out = found.call(*local, **kwargs)
    if not found.gives:
        for i in found.writes:
            torch.autograd.graph.increment_version(args[i])  # no kernel of autograd's does it for a list
            for x in args[i]:
                if type(x) is dtensor and x._memory is not None:
                    x._memory.writes += 1
        return None
    firsts = key[1]
    if any([x.dtype != spec.dtype for x, spec in zip(out, firsts, strict=True)]):
        return MISS
    return [wrap(dtensor, x, spec) for x, spec in zip(out, firsts, strict=True)]


aligned = Cache(maxsize=4096)
"""Whether the tensors of lists lie alike, by op and specs."""

_NUMBER = "number"


class _Aligned(NamedTuple):
    """Whether lists lie alike; which function to call, whether it gives lists, and where those stand that it writes."""

    yes: bool
    call: Callable[..., Any]
    gives: bool
    writes: tuple[int, ...]

    @classmethod
    def of(cls, key: tuple) -> _Aligned:
        op, *lists = key
        name, gives = op._schema.name.removeprefix("aten::"), bool(op._schema.returns)
        yes = _are_aligned(lists) and (not gives or all(map(_is_dense, lists[0])))
        return cls(yes, getattr(torch, name, op), gives, _torch.written_places(op))


def _is_number(x: Any) -> bool:
    return type(x) is torch.Tensor and x.ndim == 0


def _is_dense(spec: Spec) -> bool:
    """Whether a new tensor like it has its strides: those of one with holes, or stretched, are not kept."""
    return 0 not in spec.stride and strides_like(spec.shape, spec.stride) == spec.stride


def _are_aligned(lists: list[tuple]) -> bool:
    """Whether the first list is of DTensors without reductions to be done, and the others lie as it does."""
    if any(spec is _NUMBER or spec.partial for spec in lists[0]) or any(len(x) != len(lists[0]) for x in lists):
        return False
    return all(
        spec is _NUMBER or (spec.lies_as(first) and spec.shape == first.shape and spec.mesh == first.mesh)
        for others in lists[1:]
        for first, spec in zip(lists[0], others, strict=True)
    )


class Memory:
    """What a DTensor shares with its views: how often it was written."""

    __slots__ = ("writes",)

    def __init__(self):
        self.writes = 0


def memory_of(x) -> Memory:
    """The memory of a DTensor, from now on shared with what asks for it."""
    if x._memory is None:
        x._memory = Memory()
    return x._memory


def on_blocks(op: _torch.OpOverload) -> Callable[..., Any]:
    """What a rank runs on its blocks for the op."""
    return KERNELS.get(op) or SAME.get(op) or _torch.direct(op)


SAME = {
    torch.ops.aten.linear.default: torch.nn.functional.linear, torch.ops.aten.matmul.default: torch.matmul,
    torch.ops.aten.add.Tensor: torch.add, torch.ops.aten.sub.Tensor: torch.sub, torch.ops.aten.mul.Tensor: torch.mul,
    torch.ops.aten.div.Tensor: torch.div, torch.ops.aten.mm.default: torch.mm, torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.relu.default: torch.relu, torch.ops.aten.exp.default: torch.exp, torch.ops.aten.t.default: torch.t,
    torch.ops.aten.where.self: torch.where, torch.ops.aten.clone.default: torch.clone,
    torch.ops.aten.detach.default: torch.detach, torch.ops.aten.neg.default: torch.neg,
    torch.ops.aten.transpose.int: torch.transpose, torch.ops.aten.unsqueeze.default: torch.unsqueeze,
    torch.ops.aten.gt.Scalar: torch.gt, torch.ops.aten.tanh.default: torch.tanh,
    torch.ops.aten.sqrt.default: torch.sqrt,
    torch.ops.aten.sigmoid.default: torch.sigmoid, torch.ops.aten.embedding.default: torch.embedding,
    torch.ops.aten.cat.default: torch.cat, torch.ops.aten.sum.dim_IntList: torch.sum,
    torch.ops.aten.view.default: torch.Tensor.view,
    torch.ops.aten.sum.default: torch.sum, torch.ops.aten.pow.Tensor_Scalar: torch.pow,
    torch.ops.aten.native_layer_norm.default: torch.native_layer_norm,
    torch.ops.aten.add_.Tensor: torch.Tensor.add_, torch.ops.aten.mul_.Tensor: torch.Tensor.mul_,
    torch.ops.aten.addcmul_.default: torch.Tensor.addcmul_, torch.ops.aten.addcdiv_.default: torch.Tensor.addcdiv_,
    torch.ops.aten.lerp_.Scalar: torch.Tensor.lerp_, torch.ops.aten.div_.Tensor: torch.Tensor.div_,
}  # fmt: skip
"""Functions that are the same op as an overload and are called in less time."""
