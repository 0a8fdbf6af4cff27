"""The eager front end: an op on DTensors is lowered, its operands moved, the local op called, the results wrapped.

    y = x + w        lower(add, f32[8@dp, 4], f32[4])  ->  no moves, aten.add on this rank's blocks, f32[8@dp, 4]

How calls of one kind are run - op, specs, static arguments - is decided once and kept in `lowerings`; a call that
finds its way there costs one look-up, the moves, and the local op.

Three things make writes come out as on one device:

    an operand that the op writes into, and that had to be moved for it, is moved back
    a view of what had to be gathered is a copy: its base is written with it
    such a copy is gathered anew where its base was written since (`spmd.tensor.copies`)

Ops that no rule knows run on whole tensors on every rank; so do ops whose result's shape is in the data. They are
counted (`spmd.tensor.fallback`). Ops that write another shape have ways of their own (`spmd.tensor.in_place`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor import explicit, fallback, hot, plain, random
from spmd.tensor.cache import Cache, frozen
from spmd.tensor.call import SCALAR, Call, TensorMeta, base_name, unread
from spmd.tensor.copies import Copy, block, laid_out, written
from spmd.tensor.hot import memory_of
from spmd.tensor.in_place import RESIZES, STRIDED, IntoOut, Turned, resized, strided, whole_plans
from spmd.tensor.lower import READS_STORAGE, Lowering, lower
from spmd.tensor.meta import out_metas
from spmd.tensor.recipes import recipe_for
from spmd.tensor.redistribute.plan import Plan, plan, steps_made
from spmd.tensor.rules.book import rule_of
from spmd.tensor.rules.decompositions import decompositions
from spmd.tensor.rules.draws import FILLS, LIKES
from spmd.tensor.rules.products import KERNELS, is_kept
from spmd.tensor.spec import Spec, replicated

lowerings = Cache(maxsize=16384)
"""How eager calls are run, by op, specs and static arguments."""



def forget() -> None:
    """Decide anew how every call is run; nothing but time depends on it."""
    for cache in (lowerings, hot.seen, hot.aligned):
        cache.clear()


aten = torch.ops.aten
SUMS_OF_PRODUCTS = {
    aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addbmm.default, aten.linear.default,
}  # fmt: skip
BY_PARTS = SUMS_OF_PRODUCTS | {aten.linear_backward.default} | LIKES.keys()
"""Ops whose decomposition uses no global size: done on blocks it is the op on blocks, or draws for the block."""

READS_VALUE = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
"""Ops that return a Python value: every rank needs the whole tensor."""

BITS = {aten._conj.default, aten._neg_view.default}
"""Views that only set a bit, which says how to read the memory."""

class Eager(NamedTuple):
    """One call, its tensors DTensors: the `operands`, in order. `given` are the tensors as they came."""

    op: _torch.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    given: list[torch.Tensor]
    operands: list
    dtensor: type


def dispatch(op, args: tuple, kwargs: dict[str, Any], dtensor: type) -> Any:
    """Run an op of which some operand is a `dtensor` (the DTensor class, handed down to keep imports in a line)."""
    if op in decompositions:
        try:
            out = _by_parts(op, args, kwargs, dtensor) if op in BY_PARTS else decompositions[op](*args, **kwargs)
        except explicit.ImplicitCommunicationError as error:
            raise error.of(op) from None
        if out is not NotImplemented:
            return out
    given = operands = _tensors(args, kwargs)
    if not all([isinstance(x, dtensor) for x in given]):
        operands = _all_distributed(op, given, dtensor)
    mesh = operands[0]._spec.mesh
    if any([x._spec.mesh is not mesh for x in operands]):
        operands = _on_one_mesh(op, operands, dtensor)
    if operands is not given:
        args, kwargs = _with_tensors(args, kwargs, operands)
    call = Eager(op, args, kwargs, given, operands, dtensor)
    which = _which(operands)
    options = [(name, _key(op, x)) for name, x in kwargs.items()]
    key = (op, which, torch.get_default_dtype(), *[_key(op, x) for x in args], *options)
    way = lowerings.get(key, lambda: _way(call, which))
    if explicit.is_on():
        explicit.check(op, _named_plans(call, way.plans(call)))
    if _torch.is_view(op) and hot.is_normal_in_inference(operands[0]):
        with torch.inference_mode(False):
            return way.run(call)
    return way.run(call)


def _by_parts(op, args: tuple, kwargs: dict[str, Any], dtensor: type) -> Any:
    """The op by its decomposition; the next one alike by itself, if each of its ops was done on the blocks alone.

    Not where a bias would be added by each of the ranks whose products are to be summed.
    """
    with steps_made() as steps:
        out = decompositions[op](*args, **kwargs)
    if out is NotImplemented:
        return out
    if steps:
        if op is aten.linear.default:
            _remember_linear(args, kwargs, dtensor)
        return out
    single = isinstance(out, torch.Tensor)
    specs = tuple([None if x is None else x._spec for x in ((out,) if single else out)])
    if op not in SUMS_OF_PRODUCTS or not specs[0].partial:
        local = functools.partial(random.draw_like, LIKES[op], specs[0]) if op in LIKES else hot.on_blocks(op)
        kind = hot.Hot(single, local, specs, single, False, False, -1)
        hot.remember(op, args, kwargs, kind, dtensor)
    return out


def _remember_linear(args: tuple, kwargs: dict[str, Any], dtensor: type) -> None:
    """Run a `linear` like this one as a product, what is sent for it, and the bias added to that."""
    if len(args) != 3 or kwargs or not all([type(x) is dtensor for x in args]) or args[1].ndim != 2:
        return
    x, w, bias = [each._spec for each in args]
    first = _lowered(aten.linear.default, x, w)
    second = _lowered(aten.add.Tensor, first.outs[0], bias)
    if args[0] is args[1] or any(each.gathered or each.empties for each in (first, second)):
        return
    reduction, of_bias = second.plans

    def run(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return reduction.run(hot.on_blocks(aten.linear.default)(x, w)) + bias

    moves = [(i, way) for i, way in enumerate((*first.plans, of_bias)) if way.steps]
    kind = hot.Hot(False, run, second.outs, True, False, False, -1, tuple(moves), True)
    hot.remember(aten.linear.default, args, kwargs, kind, dtensor)


def _lowered(op, *specs: Spec) -> Lowering:
    """An op on tensors of these specs, no two of them the same."""
    outs = out_metas(op, specs, {}, torch.device(specs[0].mesh.device_type))
    return lower(Call(op, specs, {}, outs), skips_empty=True)


# ---- operands ---------------------------------------------------------------------------------


def _key(op, x: Any) -> Any:
    """What tells an argument from others: of a tensor, its spec; of a number that is not looked at, its type."""
    if isinstance(x, torch.Tensor):
        return x._spec
    if isinstance(x, torch.Generator):
        return torch.Generator  # how a call is run does not depend on which
    if isinstance(x, (list, tuple)):
        return (list, *[_key(op, y) for y in x])
    return type(x) if unread(op, x) is SCALAR else frozen(x)


def _tensors(args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors of a call in the order of its schema, lists flattened."""
    found: list[torch.Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple)):
            found += [y for y in x if isinstance(y, torch.Tensor)]
    return found


def _named_plans(call: Eager, plans: Sequence[Plan]) -> list[tuple[str, Plan]]:
    """The plans of the first operands, each with the operand's name in the schema of its op."""
    given = dict(zip((a.name for a in _torch.arguments(call.op)), call.args, strict=False)) | call.kwargs
    names = [
        f"{name}[{i}]" if isinstance(x, (list, tuple)) else name
        for name, x in given.items()
        for i, y in enumerate(x if isinstance(x, (list, tuple)) else [x])
        if isinstance(y, torch.Tensor)
    ]
    return [(name, way) for name, way in zip(names, plans, strict=False)]


def _with_tensors(args: tuple, kwargs: dict[str, Any], new: Sequence) -> tuple[tuple, dict[str, Any]]:
    """The arguments with these in the places of the tensors that `_tensors` finds."""
    rest = iter(new)

    def put(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return next(rest)
        return [put(y) for y in x] if isinstance(x, (list, tuple)) else x

    return tuple([put(x) for x in args]), {name: put(x) for name, x in kwargs.items()}


def _which(operands: list) -> tuple[int, ...]:
    """For each operand the first place where the same tensor stands; empty when all are different."""
    if len(operands) == 1:
        return ()
    ids = [id(x) for x in operands]
    return () if len(set(ids)) == len(ids) else tuple(map(ids.index, ids))


def _on_one_mesh(op, operands: list, dtensor: type) -> list:
    """The operands on the mesh of those that are no numbers: a tensor of one element is whole on every rank for little.

    So the norm of all gradients, and the loss that is logged, may be of parameters that lie on several meshes.
    """
    large = [x for x in operands if x.numel() > 1 or (x is operands[0] and _torch.written(op))] or operands
    mesh = large[0]._spec.mesh
    for x in operands:
        if x._spec.mesh != mesh and (x.numel() > 1 or not _may_be_lent(op, x)):
            raise ValueError(
                f"{op}: operands lie on two meshes, {mesh!r} and {x._spec.mesh!r}. Build both on one mesh, or take one "
                "of them off its mesh with full_tensor() and distribute_tensor it on the other."
            )
    lent = iter(_as_numbers(op, [x for x in operands if x._spec.mesh != mesh], mesh, dtensor))
    return [x if x._spec.mesh == mesh else next(lent) for x in operands]


def _may_be_lent(op, x) -> bool:
    """Whether x is but read, and no gradient has to find its way back to the mesh of x."""
    wants = x.requires_grad and torch.is_grad_enabled()
    return not wants and (not _torch.written(op) or _torch.writes_first(op))


def _as_numbers(op, lent: list, mesh: DeviceMesh, dtensor: type) -> list:
    """Tensors of one element as ones on this mesh; all ranks compare those that lie on but some of them."""
    ways = [plan(x._spec, replicated(x._spec)) for x in lent]
    for way in ways:
        explicit.check(op, [("x", way)])
    blocks = [way.run(block(x)) for way, x in zip(ways, lent, strict=True)]
    known = [_covers(x._spec.mesh, mesh) for x in lent]
    if not all(known) and not plain.are_same_everywhere([x for x, k in zip(blocks, known, strict=True) if not k], mesh):
        specs = ", ".join(f"{x._spec} on {x._spec.mesh!r}" for x, k in zip(lent, known, strict=True) if not k)
        raise ValueError(f"{op}: {specs} is not the same number on all ranks of {mesh!r}")
    return [
        dtensor(local, _whole_spec(mesh, tuple(x.shape), local.stride(), x.dtype))
        for x, local in zip(lent, blocks, strict=True)
    ]


@per_rank
def _covers(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    return set(mesh.ranks) >= set(other.ranks)


def _all_distributed(op, given: list[torch.Tensor], dtensor: type) -> list:
    """The tensors with plain ones as replicated DTensors, on the mesh of the others."""
    mesh = next(x for x in given if isinstance(x, dtensor))._spec.mesh
    return [x if isinstance(x, dtensor) else _as_replicated(op, x, mesh, dtensor) for x in given]


def _as_replicated(op, x: torch.Tensor, mesh: DeviceMesh, dtensor: type):
    """A plain tensor as a replicated DTensor, where that is safe or was asked for; RuntimeError elsewhere."""
    if _torch.is_nothing(x):
        x = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
    else:
        plain.check(op, x, mesh)
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: a plain tensor of shape {list(x.shape)} that requires a gradient met a DTensor, and its gradient "
            "would not come back as a plain tensor. Make it a DTensor first, with distribute_tensor or from_local."
        )
    return dtensor(x, _whole_spec(mesh, tuple(x.shape), x.stride(), x.dtype))


@functools.lru_cache(maxsize=1024)
def _whole_spec(mesh: DeviceMesh, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Spec:
    return Spec.of(mesh, shape, dtype, stride=stride)


# ---- deciding how a call is run ---------------------------------------------------------------


def _way(eager: Eager, which: tuple[int, ...]) -> Way | Whole | Decomposed:
    """How calls like this one are run: read off the op and the specs alone."""
    op = eager.op
    args, kwargs = _with_tensors(eager.args, eager.kwargs, [x._spec for x in eager.operands])
    kwargs.pop("generator", None)
    given = args, kwargs  # one way for all numbers that no rule looks at: none is to be seen
    args, kwargs = tuple([unread(op, x) for x in args]), {name: unread(op, x) for name, x in kwargs.items()}
    call = Call(op, args, kwargs, (), which)
    if _torch.is_composite(op) and not is_kept(call.name, *call.tensors[:2]):
        return Decomposed()
    if call.draws and op not in FILLS:
        return WholeDraw.of(op)
    special = _special(op)
    if special is not None:
        return special
    if op in READS_VALUE or not (_torch.returns_tensors(op) or _torch.written(op)):
        return Whole()
    try:
        outs = out_metas(op, *given, torch.device(call.mesh.device_type))
    except _torch.UNKNOWN_SHAPE:
        return Whole()
    _refuse_memory_tricks(call, outs)
    call = Call(op, args, kwargs, outs, which)
    recipe = recipe_for(call)
    if recipe is not None:
        return recipe
    if rule_of(call) is None and not _torch.written(op) and not _torch.is_view(op):
        return Whole()
    return Way.of(call, lower(call, in_place=_torch.writes_first(op), skips_empty=call.makes_new))


def _special(op) -> Any:
    """How ops are run that change the shape of what they write into, or look at memory; None for all others."""
    if op in STRIDED:
        return Strided()
    if op in RESIZES:
        return Turned(resized)
    functional = _torch.without_out(op)
    if functional is not None:
        return IntoOut(op, functional)
    turned = _torch.not_in_place(op) if torch.Tag.inplace_view in op.tags else None
    return None if turned is None else Turned(turned)


def _refuse_memory_tricks(call: Call, outs: tuple[TensorMeta | None, ...]) -> None:
    """A write may not change the shape of what it writes into, nor an op reach below the tensor to its memory."""
    if call.name in READS_STORAGE:
        raise NotImplementedError(
            f"{call.op}: a DTensor's memory is spread over ranks and cannot be laid out anew. Use view, slicing, "
            "permute or expand, or take full_tensor() first."
        )
    for out, i in zip(outs, _results_written(call), strict=False):
        if i is not None and (out.shape, out.stride) != (call.tensors[i].shape, call.tensors[i].stride):
            raise NotImplementedError(
                f"{call.op}: changes {call.tensors[i]} in place to the shape {list(out.shape)}, stride "
                f"{list(out.stride)}; use {base_name(call.op)} and take its result"
            )


def _results_written(call: Call) -> tuple[int | None, ...]:
    """For each result the operand that it is, None for a new tensor."""
    names = [name for name, _ in call.named_tensors]
    return tuple(None if name is None else names.index(name) for name in _torch.returned(call.op))


class Decomposed:
    """The op is made of others; each of them comes here by itself."""

    def plans(self, call: Eager) -> Sequence[Plan]:
        return ()

    def run(self, call: Eager) -> Any:
        return call.op.decompose(*call.args, **call.kwargs)


class Strided:
    """`as_strided` and its kin, which look at memory."""

    def plans(self, call: Eager) -> Sequence[Plan]:
        return whole_plans(call)

    def run(self, call: Eager) -> Any:
        out, laid_out = strided(call)
        x = call.operands[0]
        shown = call.dtensor(out, _whole_spec(x._spec.mesh, tuple(out.shape), out.stride(), out.dtype))
        if _torch.is_view(call.op):
            copied = laid_out is not x._local_tensor
            copy = Copy.of(x, laid_out, whole_plans(call)[0]) if copied else None
            _mark_views((shown,), x, copy)
        return shown


class Whole:
    """The op runs on whole tensors: no rule knows it, it gives a Python value, or its result's shape is in the data."""

    def plans(self, call: Eager) -> Sequence[Plan]:
        """How the operands get to where the op wants them: what is sent for it."""
        return whole_plans(call)

    def run(self, call: Eager) -> Any:
        if _torch.written(call.op):
            raise NotImplementedError(f"{call.op}: writes, and its shapes are not known before it runs")
        plans = self.plans(call)
        nbytes = sum(p.src.nbytes for p in plans if p.steps)
        if nbytes and call.op is not aten._local_scalar_dense.default:
            fallback.note(call.op, nbytes)
        whole = [laid_out(p.run(block(x)), x.stride()) for p, x in zip(plans, call.operands, strict=True)]
        args, kwargs = _with_tensors(call.args, call.kwargs, whole)
        mesh = call.operands[0]._spec.mesh

        def wrapped(x: torch.Tensor):
            return call.dtensor(x, _whole_spec(mesh, tuple(x.shape), x.stride(), x.dtype))

        return pytree.tree_map_only(torch.Tensor, wrapped, self._result(call, args, kwargs))

    def _result(self, call: Eager, args: tuple, kwargs: dict[str, Any]) -> Any:
        return call.op(*args, **kwargs)


class WholeDraw(Whole):
    """An op that draws as many numbers as its operands' values ask for, so that no rank can do a part: poisson."""

    @classmethod
    def of(cls, op) -> WholeDraw:
        if any(a.name == "generator" for a in _torch.arguments(op)):
            return cls()
        raise NotImplementedError(
            f"{op}: draws random numbers in its kernel, on each rank for its own block. Attention: run it under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which is made of ops that draw for all ranks together, "
            "or set dropout_p to 0. Else write it with uniform_, bernoulli_ or torch.nn.functional.dropout."
        )

    def _result(self, call: Eager, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = dict(zip((a.name for a in _torch.arguments(call.op)), args, strict=False)) | kwargs
        key = random.next_key(call.op, call.operands[0]._spec.mesh, given.get("generator"))
        return random.run_seeded(call.op, args, kwargs, call.operands[0].device, key)


# ---- running a lowered call -------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A lowered call with what its op does to memory.

    moves: whether any operand is moved. writes: the operands that the op writes into. returns: for each result the
    operand that it is, None for a new tensor; empty when all are new. views: the results show the first operand.
    flat: the places of the operands among the arguments; None where some are in lists or given by keyword. draws: the
    op fills its result with random numbers.
    """

    lowering: Lowering
    which: tuple[int, ...]
    moves: bool
    writes: tuple[int, ...]
    returns: tuple[int | None, ...]
    views: bool
    flat: tuple[int, ...] | None
    draws: bool

    @classmethod
    def of(cls, call: Call, lowering: Lowering) -> Way:
        written = _torch.written(call.op)
        returns = _results_written(call)
        return cls(
            lowering, call.which, any(p.steps for p in lowering.plans),
            tuple(i for i, (name, _) in enumerate(call.named_tensors) if name in written),
            returns if any(i is not None for i in returns) else (), _torch.is_view(call.op), _places(call),
            call.op in FILLS,
        )  # fmt: skip

    def plans(self, call: Eager) -> Sequence[Plan]:
        """How the operands get to where the op wants them; where what was written has to be sent back, the way back."""
        return [
            plan(way.dst, way.src) if i in self.writes and not any(s.sends for s in way.steps) else way
            for i, way in enumerate(self.lowering.plans)
        ]

    def run(self, call: Eager) -> Any:
        for i in self.writes:
            _check_writable(call, i)
        if self.lowering.gathered:
            fallback.note(call.op, self.lowering.nbytes_gathered)
        moved = self._moved(call.operands)
        out, shown = self._local_call(call, moved)
        for i in self.writes:
            self._write_back(i, call.operands[i], moved[i])
        self._remember(call, out, shown is not None)
        return self._results(call, out, shown)

    def _remember(self, call: Eager, out: Any, copied: bool) -> None:
        """Let calls like this one be run at a glance, if there is no twist to them."""
        single = isinstance(out, torch.Tensor)
        plain = not copied and (not self.moves or (self.flat is not None and not self.which))
        in_place = self.writes == (0,) == self.returns and single
        if not plain or call.given is not call.operands or (not in_place and (self.writes or self.returns)):
            return
        moves = tuple((at, way) for at, way in zip(self.flat or (), self.lowering.plans, strict=False) if way.steps)
        if (moves and (in_place or self.views)) or self.lowering.gathered or _reads_default_dtype(call, self.lowering):
            return
        if self.lowering.empties:
            return
        if not single and type(out) not in (list, tuple):
            return
        sizes = _torch.argument_index(call.op, self.lowering.sizes) if self.lowering.sizes else -1
        if sizes < len(call.args):
            outs = self.lowering.outs
            local = functools.partial(random.draw, call.op, outs[0]) if self.draws else hot.on_blocks(call.op)
            plain = single and not in_place and sizes < 0 and not moves and (not self.views or len(call.operands) == 1)
            kind = hot.Hot(plain, local, outs, single, self.views, in_place, sizes, moves, bool(moves))
            hot.remember(call.op, call.args, call.kwargs, kind, call.dtensor)

    def _moved(self, operands: list) -> list[torch.Tensor]:
        """The blocks of the operands, each moved to where the op wants it; one tensor in two places moves once."""
        blocks = [block(x) for x in operands]
        if not self.moves:
            return blocks
        done: dict[tuple[int, int], torch.Tensor] = {}
        moved = []
        for place, way, x in zip(self.which or range(len(blocks)), self.lowering.plans, blocks, strict=True):
            key = (place, id(way))
            if key not in done:
                done[key] = way.run(x)
            moved.append(done[key])
        return moved

    def _local_call(self, call: Eager, moved: list[torch.Tensor]) -> tuple[Any, torch.Tensor | None]:
        """What the op gives on this rank, and the memory it shows if it is a view and that is not the operand's."""
        args, kwargs = self._arguments(call, moved)
        if self.lowering.sizes:
            local = self.lowering.outs[0].local_shape_here()
            args, kwargs = _torch.with_argument(call.op, args, kwargs, self.lowering.sizes, list(local))
        if self.draws:
            return random.draw(call.op, self.lowering.outs[0], *args, **kwargs), None
        if self.lowering.empties:
            return _unless_empty(call.op, args, kwargs, self.lowering.outs), None
        if call.op in BITS:  # the global tensor has no bit that says so
            out = call.op(*args, **kwargs).resolve_conj().resolve_neg()
            return out, out
        shown = moved[0] if self.views and self.lowering.plans[0].steps else None
        if not self.views and call.op is not aten._unsafe_view.default:
            return KERNELS.get(call.op, call.op)(*args, **kwargs), shown
        try:
            return call.op(*args, **kwargs), shown
        except RuntimeError:  # a block that the user gave need not have the strides that the global shape suggests
            dense = laid_out(args[0], self.lowering.plans[0].dst.stride)
            return call.op(dense, *args[1:], **kwargs), dense

    def _arguments(self, call: Eager, moved: list[torch.Tensor]) -> tuple[Sequence, dict[str, Any]]:
        if self.flat is None:
            return _with_tensors(call.args, call.kwargs, moved)
        args = list(call.args)
        for i, x in zip(self.flat, moved, strict=True):
            args[i] = x
        return tuple(args), call.kwargs

    def _write_back(self, i: int, target, moved: torch.Tensor) -> None:
        way = self.lowering.plans[i]
        if way.steps:
            target._local_tensor.copy_(plan(way.dst, way.src).run(moved))
        written(target)

    def _results(self, call: Eager, out: Any, shown: torch.Tensor | None) -> Any:
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
        if self.views:
            base, bit = call.operands[0], call.op if call.op in BITS else None
            _mark_views(flat, base, None if shown is None else Copy.of(base, shown, self.lowering.plans[0], bit))
        return result


def _reads_default_dtype(call: Eager, lowering: Lowering) -> bool:
    """Whether the call makes floats of whole numbers, so that their dtype is the one that the user set as default."""
    floats = any(s is not None and not _is_whole(s.dtype) for s in lowering.outs)
    return floats and all(_is_whole(x.dtype) for x in call.operands)


def _is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


@per_rank
def _unless_empty(op, args: Sequence, kwargs: dict[str, Any], outs: Sequence[Spec]) -> Any:
    """What the op gives; on a rank whose results are empty, those, for the op refuses empty operands."""
    shapes = [spec.local_shape_here() for spec in outs]
    if any(map(prod, shapes)):
        return op(*args, **kwargs)
    like = _tensors(tuple(args), kwargs)[0]
    empty = [like.new_empty(shape, dtype=spec.dtype) for shape, spec in zip(shapes, outs, strict=True)]
    return tuple(empty) if len(empty) > 1 else empty[0]


def _places(call: Call) -> tuple[int, ...] | None:
    at = tuple(i for i, x in enumerate(call.args) if isinstance(x, Spec))
    return at if len(at) == len(call.tensors) else None


# ---- memory -----------------------------------------------------------------------------------


def _mark_views(views: Sequence, base, copy: Copy | None) -> None:
    """Tie views to the memory of their base, and to the copy that they show, or their base does."""
    memory = memory_of(base)
    for view in views:
        view._memory = memory
        view._copy = copy or base._copy


def _check_writable(call: Eager, i: int) -> None:
    target = call.operands[i]
    if target is not call.given[i] and torch.is_grad_enabled() and any(x.requires_grad for x in call.operands):
        raise RuntimeError(
            f"{call.op}: a plain tensor of shape {list(target.shape)} would take a gradient to DTensors; instead of "
            "writing into it use the op that returns a new tensor, such as total = total + loss"
        )
