"""Handlers: how eager calls of one kind are run.

    x + w                      LoweredHandler        moves the operands, calls the op on blocks, wraps the results
    torch.nonzero(x)           FallbackHandler       calls the op on replicated operands
    torch.poisson(x)           FallbackDrawHandler   the same, with the same random numbers on all ranks
    x.as_strided((2, 2), ...)  StridedHandler        a view of the memory of the global tensor
    a composite op             DecomposedHandler     calls the ops that it is made of

A handler depends on the op, the specs and the static arguments alone. So `spmd.tensor.eager.dispatch` keeps it for all
calls of one kind. It has two methods: `plans(call)` gives the plans of the operands, and sends nothing; explicit mode
asks for them first. `run(call)` gives the results. Recipes (`spmd.tensor.recipes`) and the handlers of
`spmd.tensor.eager.in_place` have the same two methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.mesh import per_rank
from spmd.tensor import fallback
from spmd.tensor.call import Call
from spmd.tensor.eager import fast_path
from spmd.tensor.eager.fast_path import memory_of
from spmd.tensor.eager.in_place import replicating_plans, strided
from spmd.tensor.eager.local_functions import BOUND, local_function
from spmd.tensor.eager.operands import EagerCall, replicated_spec, tensors_of, with_tensors
from spmd.tensor.eager.reduced_once import run_once
from spmd.tensor.eager.view_copies import BITS, ViewCopy, block, in_stride_order, note_write
from spmd.tensor.lower import Lowering
from spmd.tensor.recipes import random
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.rules.index_counts import Counts
from spmd.tensor.rules.products import KERNELS
from spmd.tensor.rules.random_ops import RANDOM_FILLS
from spmd.tensor.spec import Spec

aten = torch.ops.aten


class DecomposedHandler:
    """For a composite op: each op that it is made of is dispatched by itself."""

    def plans(self, call: EagerCall) -> Sequence[Plan]:
        return ()

    def run(self, call: EagerCall) -> Any:
        return call.op.decompose(*call.args, **call.kwargs)


class StridedHandler:
    """For `as_strided` and the like, which look at memory."""

    def plans(self, call: EagerCall) -> Sequence[Plan]:
        return replicating_plans(call)

    def run(self, call: EagerCall) -> Any:
        out, memory = strided(call)
        x = call.operands[0]
        result = call.dtensor(out, replicated_spec(x._spec.mesh, tuple(out.shape), out.stride(), out.dtype))
        if _torch.is_view(call.op):
            is_copy = memory is not x._local_tensor
            copy = ViewCopy.of(x, memory, replicating_plans(call)[0]) if is_copy else None
            _mark_views((result,), x, copy)
            result._offset = out.storage_offset()
        return result


# ---- replicated operands ----------------------------------------------------------------------


class FallbackHandler:
    """The op runs on replicated operands.

    So it is where no rule knows the op, where it gives a Python value, and where the data decides the result's shape.
    """

    def plans(self, call: EagerCall) -> Sequence[Plan]:
        return replicating_plans(call)

    def run(self, call: EagerCall) -> Any:
        if _torch.written(call.op):
            raise NotImplementedError(f"{call.op}: writes, and its shapes are not known before it runs")
        plans = self.plans(call)
        nbytes = sum(p.src.nbytes for p in plans if p.steps)
        if nbytes and call.op is not aten._local_scalar_dense.default:
            fallback.note(call.op, nbytes)
        gathered = [in_stride_order(p.run(block(x)), x.stride()) for p, x in zip(plans, call.operands, strict=True)]
        args, kwargs = with_tensors(call.args, call.kwargs, gathered)
        mesh = call.operands[0]._spec.mesh

        def wrapped(x: torch.Tensor):
            return call.dtensor(x, replicated_spec(mesh, tuple(x.shape), x.stride(), x.dtype))

        return pytree.tree_map_only(torch.Tensor, wrapped, self._result(call, args, kwargs))

    def _result(self, call: EagerCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        return _torch.run_with_bits(call.op, *args, **kwargs)


class FallbackDrawHandler(FallbackHandler):
    """For an op that draws as many numbers as the values of its operands ask for, such as poisson.

    No rank can do a part of it: where its numbers begin depends on the values of the other ranks.
    """

    @classmethod
    def of(cls, op) -> FallbackDrawHandler:
        if any(a.name == "generator" for a in _torch.arguments(op)):
            return cls()
        raise NotImplementedError(
            f"{op}: draws random numbers in its kernel, on each rank for its own block. Attention: run it under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which is made of ops that draw for all ranks together, "
            "or set dropout_p to 0. Else write it with uniform_, bernoulli_ or torch.nn.functional.dropout."
        )

    def _result(self, call: EagerCall, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = dict(zip((a.name for a in _torch.arguments(call.op)), args, strict=False)) | kwargs
        key = random.next_key(call.op, call.operands[0]._spec.mesh, given.get("generator"))
        return random.run_seeded(call.op, args, kwargs, call.operands[0].device, key)


# ---- lowered calls ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LoweredHandler:
    """For a call with a lowering, and the facts of its op about memory.

    moves: whether any operand is moved. writes: the operands that the op writes into. returns: for each result the
    operand that it is, None for a new tensor; empty when all results are new. is_view: the results are views of the
    first operand. positions: the positions of the operands among the arguments; None where some are in lists or are
    given by keyword. draws: the op fills its result with random numbers. first_use: that of the `Call`. local: the
    function that a rank runs on its blocks, and hot_local the same for the fast path. offsets: of results that are
    views, where they begin in the memory of the operand; empty where all begin with it.
    """

    lowering: Lowering
    first_use: tuple[int, ...]
    moves: bool
    writes: tuple[int, ...]
    returns: tuple[int | None, ...]
    is_view: bool
    positions: tuple[int, ...] | None
    draws: bool
    local: Callable
    hot_local: Callable
    offsets: tuple[int, ...] = ()

    @classmethod
    def of(cls, call: Call, lowering: Lowering) -> LoweredHandler:
        local, hot_local = KERNELS.get(call.op, call.op), local_function(call.op)
        if any(x.dtype.is_complex for x in (*call.tensors, *filter(None, call.outs))):
            local, hot_local = (functools.partial(_torch.run_with_bits, f) for f in (local, hot_local))
        written = _torch.written(call.op)
        returns = operands_returned(call)
        offsets = tuple(0 if out is None else out.offset for out in call.outs)
        return cls(
            lowering, call.first_use, any(p.steps for p in lowering.plans),
            tuple(i for i, (name, _) in enumerate(call.named_tensors) if name in written),
            returns if any(i is not None for i in returns) else (), _torch.is_view(call.op), _positions(call),
            call.op in RANDOM_FILLS, local, hot_local, offsets if _torch.is_view(call.op) and any(offsets) else (),
        )  # fmt: skip

    def plans(self, call: EagerCall) -> Sequence[Plan]:
        """The plan of each operand; of one that is written the plan back, where only that may send something."""
        return [
            plan(p.dst, p.src) if i in self.writes and not any(s.sends for s in p.steps) else p
            for i, p in enumerate(self.lowering.plans)
        ]

    def run(self, call: EagerCall) -> Any:
        for i in self.writes:
            _check_writable(call, i)
        if self.lowering.gathered:
            fallback.note(call.op, self.lowering.nbytes_gathered)
        moved = self._moved(call.operands)
        out, copied = self._local_call(call, moved)
        for i in self.writes:
            self._write_back(i, call.operands[i], moved[i])
        self._remember(call, out, copied is not None)
        return self._results(call, out, copied)

    def _remember(self, call: EagerCall, out: Any, copied: bool) -> None:
        """Give calls like this one to the fast path, if the fast path can run them."""
        single = isinstance(out, torch.Tensor)
        plain = not copied and (not self.moves or (self.positions is not None and not self.first_use))
        in_place = self.writes == (0,) == self.returns and single
        if not plain or call.given is not call.operands or (not in_place and (self.writes or self.returns)):
            return
        lowering = self.lowering
        moves = tuple((at, p) for at, p in zip(self.positions or (), lowering.plans, strict=False) if p.steps)
        if (moves and (in_place or self.is_view)) or lowering.gathered or _reads_default_dtype(call, lowering):
            return
        if lowering.skips_empty:
            return
        if not single and type(out) not in (list, tuple):
            return
        size_at = _torch.argument_index(call.op, lowering.sizes) if lowering.sizes else -1
        if size_at < len(call.args):
            outs = lowering.outs
            draw = functools.partial(random.draw, call.op, outs[0])
            local = draw if self.draws else self.hot_local
            if lowering.counts:
                local = functools.partial(_call_with_counts, local, call.op, lowering.counts)
            if size_at >= 0 and lowering.sized:
                local, size_at = functools.partial(_call_with_size, local, size_at, outs[lowering.sized]), -1
            can_bind = call.op in BOUND and local is local_function(call.op) and not call.kwargs
            hot = fast_path.HotCall.of(
                call.op, call.dtensor, local, outs, out, is_view=self.is_view, in_place=in_place,
                bound=BOUND[call.op](*call.args[1:]) if can_bind else None,
                size_at=size_at, moves=moves, may_send=bool(moves), offsets=self.offsets,
            )  # fmt: skip
            fast_path.remember(call.op, call.args, call.kwargs, hot, call.dtensor)

    def _moved(self, operands: list) -> list[torch.Tensor]:
        """The blocks of the operands, each moved to where the op wants it. A tensor in two places is moved once."""
        blocks = [block(x) for x in operands]
        if not self.moves:
            return blocks
        done: dict[tuple[int, int], torch.Tensor] = {}
        moved = []
        for i, place in enumerate(self.first_use or range(len(blocks))):
            p = self.lowering.plans[i]
            key = (place, id(p))
            if key not in done:
                may_be_written = self.is_view or i in self.writes
                done[key] = p.run(blocks[i]) if may_be_written else run_once(p, operands[i], blocks[i])
            moved.append(done[key])
        return moved

    def _local_call(self, call: EagerCall, moved: list[torch.Tensor]) -> tuple[Any, torch.Tensor | None]:
        """The result of the op on this rank. With it, for a view of other memory than the operand's, that memory."""
        args, kwargs = self._arguments(call, moved)
        if self.lowering.sizes:
            local = self.lowering.outs[self.lowering.sized].local_shape_here()
            args, kwargs = _torch.with_argument(call.op, args, kwargs, self.lowering.sizes, list(local))
        if self.lowering.counts:
            args, kwargs = self.lowering.counts.here(call.op, args, kwargs)
        if self.draws:
            return random.draw(call.op, self.lowering.outs[0], *args, **kwargs), None
        if self.lowering.skips_empty:
            return _unless_empty(self.local, args, kwargs, self.lowering.outs), None
        if call.op in BITS:  # the global tensor has no such bit
            out = call.op(*args, **kwargs).resolve_conj().resolve_neg()
            return out, out
        copied = moved[0] if self.is_view and self.lowering.plans[0].steps else None
        if not self.is_view and call.op is not aten._unsafe_view.default:
            return self.local(*args, **kwargs), copied
        try:
            return self.local(*args, **kwargs), copied
        except RuntimeError:  # a block that the user gave may have other strides than the global shape suggests
            dense = in_stride_order(args[0], self.lowering.plans[0].dst.stride)
            return self.local(dense, *args[1:], **kwargs), dense

    def _arguments(self, call: EagerCall, moved: list[torch.Tensor]) -> tuple[Sequence, dict[str, Any]]:
        if self.positions is None:
            return with_tensors(call.args, call.kwargs, moved)
        args = list(call.args)
        for i, x in zip(self.positions, moved, strict=True):
            args[i] = x
        return tuple(args), call.kwargs

    def _write_back(self, i: int, target, moved: torch.Tensor) -> None:
        """Move an operand that was written back into its tensor."""
        p = self.lowering.plans[i]
        if p.steps:
            target._local_tensor.copy_(plan(p.dst, p.src).run(moved))
        note_write(target)

    def _results(self, call: EagerCall, out: Any, copied: torch.Tensor | None) -> Any:
        outs = self.lowering.outs
        if isinstance(out, torch.Tensor):
            if self.returns:
                return call.given[self.returns[0]]
            wrapped = call.dtensor(out, outs[0])
            flat, result = (wrapped,), wrapped
        elif out is None:
            return None
        else:
            given = [None if i is None else call.given[i] for i in self.returns] or [None] * len(outs)
            leaves, tree = pytree.tree_flatten(out)
            flat = [
                x if spec is None else call.dtensor(x, spec) if same is None else same
                for x, spec, same in zip(leaves, outs, given, strict=True)
            ]
            result = pytree.tree_unflatten(flat, tree)
        if self.is_view:
            base, bit = call.operands[0], call.op if call.op in BITS else None
            copy = None if copied is None else ViewCopy.of(base, copied, self.lowering.plans[0], bit)
            _mark_views(flat, base, copy, self.offsets)
        return result


def _call_with_size(local: Callable, at: int, spec: Spec, *args: Any, **kwargs: Any) -> Any:
    """Call the function with the local size of a result in the place of the argument at this position."""
    return local(*args[:at], list(spec.local_shape_here()), *args[at + 1 :], **kwargs)


def _call_with_counts(local: Callable, op: _torch.OpOverload, counts: Counts, *args: Any, **kwargs: Any) -> Any:
    """Call the function with the arguments that count indices as this rank counts."""
    args, kwargs = counts.here(op, args, kwargs)
    return local(*args, **kwargs)


def operands_returned(call: Call) -> tuple[int | None, ...]:
    """For each result the operand that it is, None for a new tensor."""
    names = [name for name, _ in call.named_tensors]
    return tuple(None if name is None else names.index(name) for name in _torch.returned(call.op))


def _positions(call: Call) -> tuple[int, ...] | None:
    """The positions of the operands among the arguments; None where some operands are elsewhere."""
    positions = tuple(i for i, x in enumerate(call.args) if isinstance(x, Spec))
    return positions if len(positions) == len(call.tensors) else None


def _reads_default_dtype(call: EagerCall, lowering: Lowering) -> bool:
    """Whether the call makes floats of integers: their dtype is the default dtype, which the user may set."""
    floats = any(s is not None and not _is_integral(s.dtype) for s in lowering.outs)
    return floats and all(_is_integral(x.dtype) for x in call.operands)


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


@per_rank
def _unless_empty(local: Callable, args: Sequence, kwargs: dict[str, Any], outs: Sequence[Spec]) -> Any:
    """The results of an op. A rank whose results are empty makes them itself, for the op refuses empty operands."""
    shapes = [spec.local_shape_here() for spec in outs]
    if any(map(prod, shapes)):
        return local(*args, **kwargs)
    like = tensors_of(tuple(args), kwargs)[0]
    empty = [like.new_empty(shape, dtype=spec.dtype) for shape, spec in zip(shapes, outs, strict=True)]
    return tuple(empty) if len(empty) > 1 else empty[0]


# ---- memory -----------------------------------------------------------------------------------


def _mark_views(views: Sequence, base, copy: ViewCopy | None, offsets: Sequence[int] = ()) -> None:
    """Tie views to the memory of their base, and to the copy that they, or their base, are views of."""
    memory = memory_of(base)
    for view in views:
        view._memory = memory
        view._copy = copy or base._copy
    if offsets or base._offset:
        fast_path.place_views(views, base, offsets)


def _check_writable(call: EagerCall, i: int) -> None:
    target = call.operands[i]
    if target is not call.given[i] and torch.is_grad_enabled() and any(x.requires_grad for x in call.operands):
        raise RuntimeError(
            f"{call.op}: a plain tensor of shape {list(target.shape)} would take a gradient to DTensors; instead of "
            "writing into it use the op that returns a new tensor, such as total = total + loss"
        )
