"""The fast path of calls that are made again and again: one look-up, the local op, and the results wrapped.

    x + y       the first call is dispatched, and `remember` keeps how calls of its kind are run
    x + y       later calls are looked up, and run at once

A call is hot once `dispatch` has run a call of its kind. The kind is the op, the specs of its tensors and its static
arguments. A `HotCall` has all that the kind needs: the moves, the local function, the specs of the results. Calls that
need more care - writes into an operand that is moved, tensors in keyword arguments - are always dispatched.

    fast_path.seen        # Cache(12 of 16384 entries, 340 hits, 12 misses)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from spmd import _torch
from spmd.tensor.cache import Cache
from spmd.tensor.call import is_pointwise
from spmd.tensor.eager.composites import DISPATCH_KEYS
from spmd.tensor.eager.user_writes import UserWrites, any_copy_held, copies_alive, copies_held
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
    """How hot calls of one kind are run. The first fields are read by index, which takes less time.

    finish: runs the call if there is more to do than to wrap one new tensor; else None.
    local: the local function.
    wrappers: for each result the arguments that its wrapper is made with; None for a result that is no tensor.
    outs: the spec of each result; None for a result that is no tensor.
    op: the op. The keys have its id, so it is kept alive.
    size_at: the position of the argument that is the local shape of the result; -1 if there is none.
    moves: the arguments that are moved first, by position, and their plans.
    may_send: the moves, or the local function, may send something.
    offsets: where results that are views begin in the memory of the first tensor; empty where all begin with it.
    """

    finish: Callable[..., Any] | None
    local: Callable[..., Any]
    wrappers: tuple[tuple | None, ...]
    outs: tuple[Spec | None, ...]
    op: _torch.OpOverload
    size_at: int = -1
    moves: tuple[tuple[int, Plan], ...] = ()
    may_send: bool = False
    offsets: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, op: _torch.OpOverload, dtensor: type, local: Callable[..., Any], outs: tuple[Spec | None, ...], out: Any,
        *, is_view: bool = False, in_place: bool = False, **rest: Any,
    ) -> HotCall:  # fmt: skip
        """For a call that has been run. out: what the local function returned. rest: other fields."""
        single = isinstance(out, torch.Tensor)
        wrappers = tuple([
            None if spec is None else _wrapper(dtensor, x, spec)
            for x, spec in zip((out,) if single else out, outs, strict=True)
        ])
        if in_place:
            finish = _write
        elif not single or rest.get("size_at", -1) >= 0 or rest.get("may_send"):
            finish = _views if is_view else _results
        else:
            finish = _view if is_view else None
        return cls(finish, local, wrappers, outs, op, **rest)


NO_KWARGS: dict[str, Any] = {}

_NUMBERS = frozenset({int, float})
_INTEGERS = frozenset({int, bool})
_STATIC = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout})

_pointwise: dict[int, _torch.OpOverload] = {}
"""Ops, by id, that have hot calls with a number that is in the key by its type alone."""


def run(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any] | None, dtensor: type) -> Any:
    """The result of the call; MISS if it has to be dispatched.

    The most common calls are looked up here, to save time; `_key` has the keys of all.
    """
    if copies_alive and _reads_copy(args, dtensor):
        return MISS
    found, n = None, len(args)
    if not kwargs and n and type(args[0]) is dtensor:
        a = args[0]
        if n == 1:
            found = _look_up((id(op), a._spec))
            blocks = (a._local_tensor,)
        elif n == 2:
            b = args[1]
            kind = type(b)
            if kind is dtensor:
                if a is not b:
                    found = _look_up((id(op), a._spec, b._spec))
                    blocks = (a._local_tensor, b._local_tensor)
            elif kind in _STATIC or kind is float:
                read = kind not in _NUMBERS or id(op) not in _pointwise or b - b != 0 or b == 0
                found = _look_up((id(op), a._spec, kind, b) if read else (id(op), a._spec, kind))
                blocks = (a._local_tensor, b)
            elif kind is list and not (b and type(b[0]) not in _INTEGERS):
                found = _look_up((id(op), a._spec, tuple(b)))
                blocks = (a._local_tensor, b)
        elif n == 3 and type(args[1]) is dtensor is type(args[2]):
            _, b, c = args
            if a is not b is not c is not a:
                found = _look_up((id(op), a._spec, b._spec, c._spec))
                blocks = (a._local_tensor, b._local_tensor, c._local_tensor)
        else:
            rest = args[1:]
            types = tuple(map(type, rest))
            if _STATIC.issuperset(types):
                found = _look_up((id(op), a._spec, types, rest))
                blocks = (a._local_tensor, *rest)
    if found is None:
        return _run_any(op, args, kwargs or NO_KWARGS, dtensor)
    if found[0] is not None:
        return found[0](found, a, blocks, NO_KWARGS)
    seen.hits += 1
    local, arguments = found[1](*blocks), found[2][0]
    out = _torch.new_wrapper(*arguments) if local.device == arguments[_DEVICE] else _elsewhere(arguments, local)
    out._local_tensor, out._spec = local, found[3][0]
    return out


def _run_any(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], dtensor: type) -> Any:
    """The result of a call of any kind, or MISS."""
    if args and type(args[0]) is list and id(op) in _ELEMENTWISE:
        return run_lists(op, args, kwargs, dtensor)
    key, blocks, tensors = _key(id(op), args, kwargs, dtensor, id(op) in _pointwise)
    found = _look_up(key)
    if found is None:
        return MISS
    return (found[0] or _result)(found, tensors[0], blocks, kwargs)


_ELEMENTWISE = frozenset(map(id, ELEMENTWISE_LISTS))


def remember(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], hot: HotCall, dtensor: type) -> None:
    """Run calls like this one as `hot` from now on, if a key can tell them from other calls."""
    types = tuple(map(type, args[1:]))
    pointwise = is_pointwise(op)
    if pointwise and not _NUMBERS.isdisjoint(map(type, (*args, *kwargs.values()))):
        _pointwise[id(op)] = op
    if len(types) > 1 and not kwargs and type(args[0]) is dtensor and _are_key_as_they_are(types, pointwise):
        key = id(op), args[0]._spec, types, args[1:]
    else:
        key, _, _ = _key(id(op), args, kwargs, dtensor, pointwise)
    if key is not None:
        seen.get(key, lambda: hot)


def _are_key_as_they_are(types: tuple[type, ...], pointwise: bool) -> bool:
    """Whether arguments of these types are a key as they are: no floats, lists, tensors or unread numbers."""
    return (_STATIC - _NUMBERS if pointwise else _STATIC).issuperset(types)


_NO_KEY = None, None, None


def _key(op: int, args: tuple, kwargs: dict[str, Any], dtensor: type, pointwise: bool) -> tuple:
    """The key of a call, its arguments with blocks, and its tensors; None if no key can tell it from other calls.

    op: its id. pointwise: a finite number that is not zero is in the key by its type; no rule reads its value.
    """
    key: list[Any] = [op]
    blocks: list[Any] = []
    tensors: list[Any] = []
    for x in args:
        kind = type(x)
        if kind is dtensor:
            for i, t in enumerate(tensors):
                if t is x:
                    key.append(i)  # the place of the same tensor; no other number is in a key without its type
                    break
            key.append(x._spec)
            tensors.append(x)
            x = x._local_tensor
        elif kind is list:
            if not x or type(x[0]) in _INTEGERS:
                if len(set(map(type, x))) > 1:
                    return _NO_KEY
                key.append(tuple(x))
            else:
                if set(map(type, x)) != {dtensor}:
                    return _NO_KEY
                key.append(tuple(map(_spec_of, x)))
                tensors += x
                if len(set(map(id, tensors))) < len(tensors):
                    return _NO_KEY
                x = list(map(_block_of, x))
        elif kind in _NUMBERS and pointwise and x - x == 0 != x:
            key.append(kind)
        elif kind in _STATIC or (kind is float and x == x and x != 0.0):  # NaN is not itself, and 0.0 is -0.0
            key += (kind, x)
        else:
            return _NO_KEY
        blocks.append(x)
    for name, x in kwargs.items():
        kind = type(x)
        if kind in _NUMBERS and pointwise and x - x == 0 != x:
            key += (name, kind)
        elif kind in _STATIC:
            key += (name, kind, x)
        else:
            return _NO_KEY
    return tuple(key), blocks, tensors


def _reads_copy(args: tuple, dtensor: type) -> bool:
    """Whether a call may read a copy that is not up to date, or something else than the user wrote into a copy."""
    if copies_held and any_copy_held():
        return True  # dispatch asks whether the user wrote into one
    operands = [x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,)) if type(x) is dtensor]
    return any([x._copy is not None for x in operands])


# ---- wrappers -----------------------------------------------------------------------------------

_spec_of, _block_of = operator.attrgetter("_spec"), operator.attrgetter("_local_tensor")
_DEVICE = 7


def _wrapper(dtensor: type, local: torch.Tensor, spec: Spec) -> tuple:
    """The arguments that the DTensor of a block like this one is made with. By position: keywords take 15 % more.

    The last ones are whether it is pinned, requires a gradient, and has sizes, a device and a layout of its own.
    """
    return (
        dtensor, spec.shape, spec.stride, None, None, local.dtype, torch.strided, local.device,
        False, False, None, False, False, DISPATCH_KEYS,
    )  # fmt: skip


def _elsewhere(arguments: tuple, local: torch.Tensor) -> Any:
    """A wrapper for a block that is on another device than that of the call that was remembered."""
    return _torch.new_wrapper(*arguments[:_DEVICE], local.device, *arguments[_DEVICE + 1 :])


@_torch.not_compiled
def wrap(arguments: tuple, local: torch.Tensor, spec: Spec) -> Any:
    """The DTensor of a block: the same as a call of the class, in less time."""
    out = _torch.new_wrapper(*arguments) if local.device == arguments[_DEVICE] else _elsewhere(arguments, local)
    out._local_tensor, out._spec = local, spec
    return out


# ---- what else is to do -------------------------------------------------------------------------


def is_normal_in_inference(x: torch.Tensor) -> bool:
    """Whether x was made outside of the inference mode that is on now. Then torch treats its views so too."""
    return torch.is_inference_mode_enabled() and not x.is_inference()


def _view(found: HotCall, base: Any, blocks: Sequence, kwargs: dict[str, Any]) -> Any:
    """The view that a call gives."""
    if torch.is_inference_mode_enabled() and is_normal_in_inference(base):  # asked twice: it saves most views a call
        return MISS
    try:
        local = found[1](*blocks, **kwargs)
    except RuntimeError:
        return MISS
    seen.hits += 1
    view = wrap(found[2][0], local, found[3][0])
    memory = base._memory
    if memory is None:
        memory = base._memory = Memory(base._local_tensor)
    view._memory = memory
    if found.offsets or base._offset:
        place_views((view,), base, found.offsets)
    return view


def _write(found: HotCall, target: Any, blocks: Sequence, kwargs: dict[str, Any]) -> Any:
    """The first tensor, after a write into it."""
    seen.hits += 1
    found[1](*blocks, **kwargs)
    if target._memory is not None:
        target._memory.writes += 1
    return target


def _result(found: HotCall, first: Any, blocks: Sequence, kwargs: dict[str, Any]) -> Any:
    """The one new tensor that a call gives."""
    seen.hits += 1
    return wrap(found[2][0], found[1](*blocks, **kwargs), found[3][0])


def _results(found: HotCall, first: Any, blocks: Sequence, kwargs: dict[str, Any]) -> Any:
    """What a call of any kind gives that is neither a view nor a write."""
    _, function, wrappers, outs, _, size_at, moves, may_send, _ = found
    if may_send and explicit.is_on():
        return MISS  # dispatch asks the plans whether they send anything
    seen.hits += 1
    if size_at >= 0 or moves:
        blocks = list(blocks)
        if size_at >= 0:
            blocks[size_at] = outs[0].local_shape_here()
        for i, plan in moves:
            blocks[i] = plan.run(blocks[i])
    try:
        out = function(*blocks, **kwargs)
    except RuntimeError:
        if may_send:
            raise  # nothing is sent twice
        return MISS  # a block with unusual strides that has no such view, or an error that dispatch explains
    if isinstance(out, torch.Tensor):
        return wrap(wrappers[0], out, outs[0])
    if None in outs:
        rows = zip(wrappers, out, outs, strict=True)
        results = [x if spec is None else wrap(arguments, x, spec) for arguments, x, spec in rows]
    else:
        results = map(wrap, wrappers, out, outs)
    return type(out)(results)


def _views(found: HotCall, base: Any, blocks: Sequence, kwargs: dict[str, Any]) -> Any:
    """The views that a call gives."""
    if is_normal_in_inference(base):
        return MISS
    out = _results(found, base, blocks, kwargs)
    if out is MISS:
        return MISS
    views, memory = (out,) if isinstance(out, torch.Tensor) else out, memory_of(base)
    for view in views:
        view._memory = memory
    if found.offsets or base._offset:
        place_views(views, base, found.offsets)
    return out


# ---- lists ------------------------------------------------------------------------------------


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
        wrappers = tuple([_wrapper(dtensor, x, spec) for x, spec in zip(out, firsts, strict=True)])
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
    offset = base._offset
    for i, view in enumerate(views):
        begin = offset and offset * base.dtype.itemsize // view.dtype.itemsize
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
