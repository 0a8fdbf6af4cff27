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
from spmd.tensor.eager.list_calls import MISS, run_lists
from spmd.tensor.eager.reduced_once import run_once
from spmd.tensor.eager.user_writes import UserWrites, any_copy_held, copies_alive, copies_held
from spmd.tensor.eager.wrappers import DEVICE, elsewhere, wrap, wrapper
from spmd.tensor.modes import explicit
from spmd.tensor.redistribute.plan import Plan
from spmd.tensor.rules.lists import ELEMENTWISE_LISTS
from spmd.tensor.spec import Spec

seen = Cache(maxsize=16384, decided_by_rules=True)
"""Hot calls by op, specs and static arguments."""

_look_up = seen.entries.get  # bound once, because every call uses it


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
        *, is_view: bool = False, in_place: bool = False, bound: Callable[..., Any] | None = None, **rest: Any,
    ) -> HotCall:  # fmt: skip
        """For a call that has been run. out: what the local function returned. bound: for a view of one block, a local
        function that has all other arguments, if there is one. rest: other fields."""
        single = isinstance(out, torch.Tensor)
        wrappers = tuple([
            None if spec is None else wrapper(dtensor, x, spec)
            for x, spec in zip((out,) if single else out, outs, strict=True)
        ])
        if in_place:
            finish = _write
        elif not single or rest.get("size_at", -1) >= 0 or rest.get("may_send"):
            finish = _views if is_view else _results
        else:
            finish = _view if is_view else None
            if is_view and bound is not None:
                finish, local = _bound_view, bound
        return cls(finish, local, wrappers, outs, op, **rest)


NO_KWARGS: dict[str, Any] = {}

_NUMBERS = frozenset({int, float})
_INTEGERS = frozenset({int, bool})
_STATIC = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout})

_pointwise: dict[int, _torch.OpOverload] = {}
"""Ops, by id, that have hot calls with a number that is in the key by its type alone."""


def run(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any] | None, dtensor: type) -> Any:
    """The result of the call; MISS if it has to be dispatched.

    The keys of the most common calls are made here, to save time; `_key` makes those of all.
    """
    if copies_alive and _reads_copy(args, dtensor):
        return MISS
    key, n = None, len(args)
    if n and type(args[0]) is dtensor:
        a = args[0]
        if n == 1:
            key, blocks = (id(op), a._spec), (a._local_tensor,)
        elif n == 2:
            b = args[1]
            kind = type(b)
            if kind is dtensor:
                if a is not b:
                    key, blocks = (id(op), a._spec, b._spec), (a._local_tensor, b._local_tensor)
            elif kind is float or kind is int:
                unread = id(op) in _pointwise and b - b == 0 != b
                key = (id(op), a._spec, kind) if unread else (id(op), a._spec, kind, b)
                blocks = (a._local_tensor, b)
            elif kind is list:
                if not b or type(b[0]) in _INTEGERS:
                    key, blocks = (id(op), a._spec, tuple(b)), (a._local_tensor, b)
            elif kind in _STATIC:
                key, blocks = (id(op), a._spec, kind, b), (a._local_tensor, b)
        elif n == 3 and type(args[1]) is dtensor:
            _, b, c = args
            kind = type(c)
            if a is b or a is c:
                pass
            elif kind is dtensor:
                key = (id(op), a._spec, b._spec, c._spec) if b is not c else (id(op), a._spec, b._spec, 1, b._spec)
                blocks = (a._local_tensor, b._local_tensor, c._local_tensor)
            elif kind is float or kind is int:
                unread = id(op) in _pointwise and c - c == 0 != c
                key = (id(op), a._spec, b._spec, kind) if unread else (id(op), a._spec, b._spec, kind, c)
                blocks = (a._local_tensor, b._local_tensor, c)
        else:
            rest = args[1:]
            types = tuple(map(type, rest))
            if _STATIC.issuperset(types):
                key, blocks = (id(op), a._spec, types, rest), (a._local_tensor, *rest)
    if kwargs and key is not None:
        key = _with_options(key, kwargs, id(op) in _pointwise)
    found = None if key is None else _look_up(key)
    if found is None:
        return _run_any(op, args, kwargs or NO_KWARGS, dtensor)
    finish = found[0]
    if finish is not None:
        return finish(found, a, blocks, kwargs, args)
    seen.hits += 1
    local, arguments = found[1](*blocks, **kwargs) if kwargs else found[1](*blocks), found[2][0]
    out = _torch.new_wrapper(*arguments) if local.device == arguments[DEVICE] else elsewhere(arguments, local)
    out._local_tensor, out._spec = local, found[3][0]
    return out


def _run_any(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], dtensor: type) -> Any:
    """The result of a call of any kind, or MISS."""
    if args and type(args[0]) is list and id(op) in _ELEMENTWISE:
        return run_lists(op, args, kwargs, dtensor)
    key, blocks, tensors = _key(id(op), args, kwargs, dtensor, id(op) in _pointwise)
    found = None if key is None else _look_up(key)
    if found is None:
        return MISS
    return (found[0] or _result)(found, tensors[0], blocks, kwargs, args)


_ELEMENTWISE = frozenset(map(id, ELEMENTWISE_LISTS))


def remember(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any], hot: HotCall, dtensor: type) -> None:
    """Run calls like this one as `hot` from now on, if a key can tell them from other calls."""
    types = tuple(map(type, args[1:]))
    pointwise = is_pointwise(op)
    if pointwise and not _NUMBERS.isdisjoint(map(type, (*args, *kwargs.values()))):
        _pointwise[id(op)] = op
    if len(types) > 1 and type(args[0]) is dtensor and (_STATIC - _NUMBERS if pointwise else _STATIC).issuperset(types):
        key = _with_options((id(op), args[0]._spec, types, args[1:]), kwargs, pointwise)
    else:
        key, _, _ = _key(id(op), args, kwargs, dtensor, pointwise)
    if key is not None:
        seen.get(key, lambda: hot)


_NO_KEY = None, None, None
_spec_of, _block_of = operator.attrgetter("_spec"), operator.attrgetter("_local_tensor")


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
    return _with_options(tuple(key), kwargs, pointwise), blocks, tensors


def _with_options(key: tuple, kwargs: dict[str, Any], pointwise: bool) -> tuple | None:
    """The key of a call with these options; None if no key can tell it from other calls."""
    options: list[Any] = []
    for name, x in kwargs.items():
        kind = type(x)
        if pointwise and kind in _NUMBERS and x - x == 0 != x:
            options += (name, kind)
        elif kind in _STATIC:
            options += (name, kind, x)
        else:
            return None
    return (*key, *options)


def _reads_copy(args: tuple, dtensor: type) -> bool:
    """Whether a call may read a copy that is not up to date, or something else than the user wrote into a copy."""
    if copies_held and any_copy_held():
        return True  # dispatch asks whether the user wrote into one
    operands = [x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,)) if type(x) is dtensor]
    return any([x._copy is not None for x in operands])


# ---- what else is to do -------------------------------------------------------------------------

_in_inference_mode = torch.is_inference_mode_enabled
_OFFSETS = HotCall._fields.index("offsets")


def is_normal_in_inference(x: torch.Tensor) -> bool:
    """Whether x was made outside of the inference mode that is on now. Then torch treats its views so too."""
    return _in_inference_mode() and not x.is_inference()


def _view(found: HotCall, base: Any, blocks: Sequence, kwargs: dict[str, Any], args: tuple) -> Any:
    """The view that a call gives."""
    if _in_inference_mode() and is_normal_in_inference(base):  # asked twice: it saves most views a call
        return MISS
    try:
        local = found[1](*blocks, **kwargs) if kwargs else found[1](*blocks)
    except RuntimeError:
        return MISS
    seen.hits += 1
    view = wrap(found[2][0], local, found[3][0])
    memory = base._memory
    if memory is None:
        memory = base._memory = Memory(base._local_tensor)
    view._memory = memory
    if found[_OFFSETS] or base._offset:
        place_views((view,), base, found[_OFFSETS])
    return view


def _bound_view(found: HotCall, base: Any, blocks: Sequence, kwargs: dict[str, Any], args: tuple) -> Any:
    """The view that a call gives whose local function has all arguments but the block."""
    return _view(found, base, blocks[:1], NO_KWARGS, args)


def _write(found: HotCall, target: Any, blocks: Sequence, kwargs: dict[str, Any], args: tuple) -> Any:
    """The first tensor, after a write into it."""
    seen.hits += 1
    if kwargs:
        found[1](*blocks, **kwargs)
    else:
        found[1](*blocks)
    if target._memory is not None:
        target._memory.writes += 1
    return target


def _result(found: HotCall, first: Any, blocks: Sequence, kwargs: dict[str, Any], args: tuple) -> Any:
    """The one new tensor that a call gives."""
    seen.hits += 1
    return wrap(found[2][0], found[1](*blocks, **kwargs), found[3][0])


def _results(found: HotCall, first: Any, blocks: Sequence, kwargs: dict[str, Any], args: tuple) -> Any:
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
            blocks[i] = run_once(plan, args[i], blocks[i])
    try:
        out = function(*blocks, **kwargs) if kwargs else function(*blocks)
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


def _views(found: HotCall, base: Any, blocks: Sequence, kwargs: dict[str, Any], args: tuple) -> Any:
    """The views that a call gives."""
    if is_normal_in_inference(base):
        return MISS
    out = _results(found, base, blocks, kwargs, args)
    if out is MISS:
        return MISS
    views, memory = (out,) if isinstance(out, torch.Tensor) else out, memory_of(base)
    for view in views:
        view._memory = memory
    if found[_OFFSETS] or base._offset:
        place_views(views, base, found[_OFFSETS])
    return out


# ---- memory -----------------------------------------------------------------------------------


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
