"""The fast path of calls that are made again and again: one look-up, the local op, and the results wrapped.

    x + y       the first call is dispatched, and `remember` keeps how calls of its kind are run
    x + y       later calls are looked up, and run at once

A call is hot once `dispatch` has run a call of its kind. The kind is the op, the specs of its tensors and its static
arguments. A `HotCall` has all that the kind needs: the moves, the local function, the specs of the results. Calls that
need more care - writes into an operand that is moved, tensors in keyword arguments - are always dispatched.

    fast_path.seen        # Cache(12 of 16384 entries, 340 hits, 12 misses)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from spmd import _torch
from spmd.tensor.cache import Cache
from spmd.tensor.call import is_pointwise
from spmd.tensor.eager.composites import DISPATCH_KEYS
from spmd.tensor.eager.user_writes import UserWrites, any_copy_held, copies_held
from spmd.tensor.modes import explicit
from spmd.tensor.redistribute.plan import Plan
from spmd.tensor.rules.lists import ELEMENTWISE_LISTS
from spmd.tensor.rules.products import KERNELS
from spmd.tensor.spec import Spec, strides_like

seen = Cache(maxsize=16384, decided_by_rules=True)
"""Hot calls by op, specs and static arguments."""

_look_up = seen.entries.get  # bound once, because every call uses it

MISS = object()
"""The result of `run` for a call that is not hot."""


class HotCall(NamedTuple):
    """How hot calls of one kind are run. The fast path reads some fields by index, which takes less time.

    simple: the result is one tensor, new or a view of the only operand, and nothing else has to be done.
    local: the local function.
    outs: the spec of each result, None for a result that is no tensor.
    single: the result is one tensor.
    is_view: the results are views of the first tensor.
    in_place: the call writes the first tensor and returns it.
    size_at: the position of the argument that is the local shape of the result; -1 if there is none.
    moves: the arguments that are moved first, by position, and their plans.
    may_send: the moves, or the local function, may send something.
    offsets: where results that are views begin in the memory of the first tensor; empty where all begin with it.
    """

    simple: bool
    local: Callable[..., Any]
    outs: tuple[Spec | None, ...]
    single: bool
    is_view: bool
    in_place: bool
    size_at: int
    moves: tuple[tuple[int, Plan], ...] = ()
    may_send: bool = False
    offsets: tuple[int, ...] = ()


NO_KWARGS: dict[str, Any] = {}

_NUMBERS = frozenset({int, float})
_INTEGERS = frozenset({int, bool})
_STATIC = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout})


def run(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any] | None, dtensor: type) -> Any:
    """The result of the call; MISS if it has to be dispatched."""
    if copies_held and any_copy_held():
        return MISS  # dispatch asks whether the user wrote into one
    if not kwargs:  # the most common calls, each by itself to save time; `_run_general` can run them all
        if len(args) == 2:
            a, b = args
            kind = type(b)
            if type(a) is not dtensor:
                pass
            elif kind in _NUMBERS and b - b == 0 != b and is_pointwise(op):
                found = _look_up((op, a._spec, kind))
                if found is None or a._copy is not None:
                    return MISS
                if found[5]:  # in_place
                    return _run_write(found, a, args)
                return _run_hot(found, [a._local_tensor, b], NO_KWARGS, a, dtensor)
            elif kind is dtensor and a is not b:
                found = _look_up((op, a._spec, b._spec))
                if found is not None and a._copy is None and b._copy is None:
                    if not found[0]:  # not simple
                        return _run_hot(found, [a._local_tensor, b._local_tensor], NO_KWARGS, a, dtensor)
                    seen.hits += 1
                    return wrap(dtensor, found[1](a._local_tensor, b._local_tensor), found[2][0])
            elif kind is list:
                try:
                    found = _look_up((op, a._spec, tuple(b)))
                except TypeError:  # symbols among the sizes
                    found = None
                if found is not None and a._copy is None:
                    return _run_hot(found, [a._local_tensor, b], NO_KWARGS, a, dtensor)
        elif len(args) == 1:
            a = args[0]
            if type(a) is dtensor:
                found = _look_up((op, a._spec))
                if found is not None and a._copy is None:
                    if not found[0]:  # not simple
                        return _run_hot(found, [a._local_tensor], NO_KWARGS, a, dtensor)
                    if found[4]:  # is_view
                        return _run_view(found, a, args, dtensor)
                    seen.hits += 1
                    return wrap(dtensor, found[1](a._local_tensor), found[2][0])
        if len(args) > 1 and type(args[1]) in _STATIC and type(args[0]) is dtensor:
            a, types = args[0], tuple(map(type, args))
            if list not in types:
                found = _look_up((op, a._spec, types, args[1:]))
                if found is not None and a._copy is None:
                    if found[0] and found[4]:  # simple and is_view
                        return _run_view(found, a, args, dtensor)
                    return _run_hot(found, [a._local_tensor, *args[1:]], NO_KWARGS, a, dtensor)
    if args and type(args[0]) is list and op in ELEMENTWISE_LISTS:
        return run_lists(op, args, kwargs or NO_KWARGS, dtensor)
    return _run_general(op, args, kwargs or NO_KWARGS, dtensor)


def _run_general(
    op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], dtensor: type, new: HotCall | None = None
) -> Any:
    """The result of a call of any kind, or MISS. With `new`, keep that for calls of this kind, and run nothing."""
    key: list[Any] = [op]
    local: list[Any] = []
    tensors: list[Any] = []
    for x in args:
        kind = type(x)
        if kind is dtensor:
            for i, t in enumerate(tensors):
                if t is x:
                    key.append(i)  # the place of the same tensor; no other number is in a key without its type
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
            if not x or type(x[0]) in _INTEGERS:
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
    found = _look_up(tuple(key))
    if found is None:
        return MISS
    for x in tensors:
        if x._copy is not None:
            return MISS
    return _run_hot(found, local, kwargs, tensors[0], dtensor)


@functools.lru_cache(maxsize=4096)
def _are_key_as_they_are(op: _torch.OpOverload, types: tuple[type, ...]) -> bool:
    """Whether arguments of these types, after the first, are a key as they are: no floats, lists or unread numbers."""
    read = _STATIC - _NUMBERS if is_pointwise(op) else _STATIC
    return all(kind in read for kind in types[1:])


_STRIDED = torch.strided
_REST = (False, False, None, False, False, DISPATCH_KEYS)
"""Of a wrapper: whether it is pinned, requires a gradient, and has sizes, a device and a layout of its own."""


@_torch.not_compiled
def wrap(dtensor: type, local: torch.Tensor, spec: Spec) -> Any:
    """The DTensor of a block: the same as a call of the class, in less time."""
    out = _torch.new_wrapper(
        dtensor, spec.shape, spec.stride, None, None, local.dtype, _STRIDED, local.device, *_REST
    )  # by position: keywords take 15 % more
    out._local_tensor, out._spec = local, spec
    return out


def is_normal_in_inference(x: torch.Tensor) -> bool:
    """Whether x was made outside of the inference mode that is on now. Then torch treats its views so too."""
    return torch.is_inference_mode_enabled() and not x.is_inference()


def _run_view(found: HotCall, base: Any, args: tuple, dtensor: type) -> Any:
    """The view that a simple call gives: `_run_hot` for this case alone, in less time."""
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
        memory = base._memory = Memory(base._local_tensor)
    view._memory = memory
    if found[9] or base._offset:
        place_views((view,), base, found[9])
    return view


def _run_write(found: HotCall, target: Any, args: tuple) -> Any:
    """The target, after a write with a number: `_run_hot` for this case alone, in less time."""
    seen.hits += 1
    found[1](target._local_tensor, args[1])
    if target._memory is not None:
        target._memory.writes += 1
    return target


def _run_hot(found: HotCall, local: list, kwargs: dict[str, Any], first: Any, dtensor: type) -> Any:
    _, function, outs, single, is_view, in_place, size_at, moves, may_send, offsets = found
    if may_send and explicit.is_on():
        return MISS  # dispatch asks the plans whether they send anything
    if is_view and torch.is_inference_mode_enabled() and is_normal_in_inference(first):  # saves most views a call
        return MISS
    seen.hits += 1
    if in_place:
        function(*local, **kwargs)
        if first._memory is not None:
            first._memory.writes += 1
        return first
    if size_at >= 0:
        local[size_at] = outs[0].local_shape_here()
    for i, plan in moves:
        local[i] = plan.run(local[i])
    try:
        out = function(*local, **kwargs)
    except RuntimeError:
        if may_send:
            raise  # nothing is sent twice
        return MISS  # a block with unusual strides that has no such view, or an error that dispatch explains
    if single:
        result = wrap(dtensor, out, outs[0])
        if is_view:
            result._memory = memory_of(first)
            if offsets or first._offset:
                place_views((result,), first, offsets)
        return result
    results = [x if spec is None else wrap(dtensor, x, spec) for x, spec in zip(out, outs, strict=True)]
    if is_view:
        memory = memory_of(first)
        for result in results:
            result._memory = memory
        if offsets or first._offset:
            place_views(results, first, offsets)
    return type(out)(results)


def remember(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], hot: HotCall, dtensor: type) -> None:
    """Run calls like this one as `hot` from now on, if a key can tell them from other calls."""
    types = tuple(map(type, args))
    if len(args) > 1 and types[0] is dtensor and not kwargs and _are_key_as_they_are(op, types):
        seen.get((op, args[0]._spec, types, args[1:]), lambda: hot)
    else:
        _run_general(op, args, kwargs, dtensor, hot)


# ---- lists ------------------------------------------------------------------------------------


def run_lists(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], dtensor: type) -> Any:
    """An elementwise op on lists, as one local call if the i-th tensors of all lists have one layout; else MISS."""
    key: list[Any] = [op]
    local: list[Any] = []
    with_views: list[Any] = []
    for a in args:
        if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor):
            specs = tuple([x._spec if type(x) is dtensor else _NUMBER if _is_number(x) else None for x in a])
            if None in specs:
                return MISS
            key.append(specs)
            with_views += [x for x in a if type(x) is dtensor and x._memory is not None]
            a = [x._local_tensor if type(x) is dtensor else x for x in a]
        elif isinstance(a, torch.Tensor):
            return MISS
        local.append(a)
    if any([x._copy is not None for x in with_views]):
        return MISS
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
    return [wrap(dtensor, x, spec) for x, spec in zip(out, firsts, strict=True)]


aligned = Cache(maxsize=4096, decided_by_rules=True)
"""How ops on lists are run, by op and specs."""

_NUMBER = "number"


class _ListCall(NamedTuple):
    """How an op on lists is run.

    aligned: the tensors of the lists have one layout, so that one local call does. local: the local function.
    returns_list: it returns a list. writes: the positions of the lists that it writes.
    """

    aligned: bool
    local: Callable[..., Any]
    returns_list: bool
    writes: tuple[int, ...]

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


class Memory:
    """The memory that a DTensor shares with its views, and the number of writes to it.

    block: that of the first tensor. storage: the storage that all tensors of the memory show to torch; that of the
    first one that is asked. user: the user's own writes into blocks of the memory.
    """

    __slots__ = ("block", "storage", "user", "writes")

    def __init__(self, block: torch.Tensor | None):
        self.writes, self.block = 0, block
        self.storage: torch.UntypedStorage | None = None
        self.user: UserWrites | None = None

    def __getstate__(self) -> int:
        return self.writes

    def __setstate__(self, writes: int) -> None:
        self.__init__(None)
        self.writes = writes


def memory_of(x) -> Memory:
    """The memory of a DTensor; made at the first call, when the tensor gets its first view."""
    if x._memory is None:
        x._memory = Memory(x._local_tensor)
    return x._memory


def place_views(views: Any, base: Any, offsets: tuple[int, ...]) -> None:
    """Set where views begin in the global memory: as far behind their base as `offsets` say, in their own elements."""
    for i, view in enumerate(views):
        begin = base._offset * base.dtype.itemsize // view.dtype.itemsize
        view._offset = begin + (offsets[i] if offsets else 0)


def local_function(op: _torch.OpOverload) -> Callable[..., Any]:
    """The function that a rank runs on its blocks for the op."""
    return KERNELS.get(op) or QUICK_FUNCTIONS.get(op) or _torch.cpp_callable(op)


QUICK_FUNCTIONS = {
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
"""For an overload a function of torch that runs the same op, and that is called in less time."""
