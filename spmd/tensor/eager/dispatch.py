"""The eager front end: lower an op on DTensors, move its operands, call the local op, wrap the results.

    y = x + w        lower(add, f32[8@dp, 4], f32[4])  ->  no moves, aten.add on this rank's blocks, f32[8@dp, 4]

A kind of call is an op with specs and static arguments. How it is run is decided once: the decision is a handler
(`spmd.tensor.eager.handlers`), kept in `lowerings`. A call of a known kind costs one look-up, the moves and the local
op; most calls do not even come here, but take the fast path (`spmd.tensor.eager.fast_path`).

Three rules give a write the same effect as on one device:

    an operand that the op writes into, and that was moved for it, is moved back
    a view of a gathered tensor is a copy, and a write into it is a write into its base
    such a copy is gathered again if its base was written since (`spmd.tensor.eager.view_copies`)

An op that no rule knows runs on replicated operands on every rank. So does an op whose data decides the shape of its
result. Both are counted (`spmd.tensor.fallback`). Ops that write another shape have handlers of their own
(`spmd.tensor.eager.in_place`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.cache import Cache, frozen
from spmd.tensor.call import READS_VALUE, SCALAR, Call, TensorMeta, as_runtime_scalar, base_name
from spmd.tensor.eager import fast_path
from spmd.tensor.eager.handlers import (
    DecomposedHandler,
    FallbackDrawHandler,
    FallbackHandler,
    LoweredHandler,
    StridedHandler,
    operands_returned,
)
from spmd.tensor.eager.in_place import RESIZES, STRIDED, OutHandler, ShapeChangeHandler, resized
from spmd.tensor.eager.local_functions import local_function
from spmd.tensor.eager.operands import (
    EagerCall,
    all_distributed,
    first_uses,
    named_plans,
    on_one_mesh,
    tensors_of,
    with_tensors,
)
from spmd.tensor.lower import READS_STORAGE, Lowering, is_cheaper_by_rule, lower
from spmd.tensor.modes import explicit
from spmd.tensor.recipes import random, recipe_for
from spmd.tensor.recipes.recipe import Recipe
from spmd.tensor.redistribute.plan import steps_made
from spmd.tensor.rules.book import rule_of
from spmd.tensor.rules.decompositions import decompositions
from spmd.tensor.rules.meta import out_metas
from spmd.tensor.rules.products import is_kept_as_one_op
from spmd.tensor.rules.random_ops import RANDOM_FILLS, RANDOM_LIKES
from spmd.tensor.spec import Spec

lowerings = Cache(maxsize=16384, decided_by_rules=True)
"""The handlers of eager calls, by op, specs and static arguments."""


aten = torch.ops.aten
SUMS_OF_PRODUCTS = {
    aten.addmm.default, aten.baddbmm.default, aten.addmv.default, aten.addbmm.default, aten.linear.default,
}  # fmt: skip
COLLECTIVES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"}
"""The libraries of torch's collectives on plain tensors."""
DECOMPOSED_ON_BLOCKS = SUMS_OF_PRODUCTS | {aten.linear_backward.default} | RANDOM_LIKES.keys()
"""Ops whose decomposition uses no global size.

Where its ops need no moves, the decomposition is the op itself on the blocks, or a draw of numbers for the block.
"""


def dispatch(op, args: tuple, kwargs: dict[str, Any], dtensor: type) -> Any:
    """Run an op with some operand that is a `dtensor`: the DTensor class, handed down so that imports go one way."""
    if op in decompositions:
        try:
            on_blocks = op in DECOMPOSED_ON_BLOCKS
            out = _decomposed(op, args, kwargs, dtensor) if on_blocks else decompositions[op](*args, **kwargs)
        except explicit.ImplicitCommunicationError as error:
            raise error.of(op) from None
        if out is not NotImplemented:
            return out
    if torch.SymFloat in map(type, args) or torch.SymFloat in map(type, kwargs.values()):
        args = tuple([_number(op, x) for x in args])
        kwargs = {name: _number(op, x) for name, x in kwargs.items()}
    given = operands = tensors_of(args, kwargs)
    if op.namespace in COLLECTIVES:
        raise TypeError(
            f"{op}: a collective of torch.distributed was given a DTensor, which is spread over ranks already. Give "
            "it x.to_local(), or write x.redistribute(...) or x.full_tensor(). torch's parallelize_module, fully_shard "
            "and DistributedDataParallel take models of plain tensors; use spmd.distribute_module or spmd.compile"
        )
    if not all([isinstance(x, dtensor) for x in given]):
        operands = all_distributed(op, given, dtensor)
    mesh = operands[0]._spec.mesh
    if any([x._spec.mesh is not mesh for x in operands]):
        operands = on_one_mesh(op, operands, dtensor)
    if operands is not given:
        args, kwargs = with_tensors(args, kwargs, operands)
    call = EagerCall(op, args, kwargs, given, operands, dtensor)
    first_use = first_uses(operands)
    options = [(name, _key(op, x)) for name, x in kwargs.items()]
    key = (op, first_use, torch.get_default_dtype(), *[_key(op, x) for x in args], *options)
    handler = lowerings.get(key, lambda: _handler(call, first_use))
    if explicit.is_on():
        sums = handler.sums if isinstance(handler, Recipe) else ()
        results = [(f"result {i}", p) for i, p in enumerate(sums) if p is not None]
        explicit.check(op, [*named_plans(call, handler.plans(call)), *results])
    if _torch.is_view(op) and fast_path.is_normal_in_inference(operands[0]):
        with torch.inference_mode(False):
            return handler.run(call)
    return handler.run(call)


def _number(op, x: Any) -> Any:
    """An argument; of a symbol of torch.compile whose value the handler depends on, the value, and a guard on it."""
    known = as_runtime_scalar(op, x) if type(x) is torch.SymFloat else SCALAR
    return x if known is SCALAR else known


def _key(op, x: Any) -> Any:
    """The part of an argument that handlers depend on: a tensor's spec; of a number that no rule reads, the type."""
    if isinstance(x, torch.Tensor):
        return x._spec
    if isinstance(x, torch.Generator):
        return torch.Generator  # no handler depends on which generator it is
    if isinstance(x, (list, tuple)):
        return (list, *[_key(op, y) for y in x])
    return type(x) if as_runtime_scalar(op, x) is SCALAR else frozen(x)


# ---- decompositions ---------------------------------------------------------------------------


def _decomposed(op, args: tuple, kwargs: dict[str, Any], dtensor: type) -> Any:
    """The op by its decomposition. If no step was needed, later calls of its kind run the op itself on the blocks.

    That is wrong where each of several ranks would add the bias to its term of a sum, so such calls are left out.
    """
    with steps_made() as steps:
        out = decompositions[op](*args, **kwargs)
    if out is NotImplemented:
        return out
    if steps:
        if op is aten.linear.default:
            _remember_linear(args, kwargs, out, dtensor)
        return out
    single = isinstance(out, torch.Tensor)
    specs = tuple([None if x is None else x._spec for x in ((out,) if single else out)])
    if op not in SUMS_OF_PRODUCTS or not specs[0].partial:
        if op in RANDOM_LIKES:
            local = functools.partial(random.draw_like, RANDOM_LIKES[op], specs[0])
        else:
            local = local_function(op)
        blocks = out._local_tensor if single else [None if x is None else x._local_tensor for x in out]
        hot = fast_path.HotCall.of(op, dtensor, local, specs, blocks)
        fast_path.remember(op, args, kwargs, hot, dtensor)
    return out


def _remember_linear(args: tuple, kwargs: dict[str, Any], out: Any, dtensor: type) -> None:
    """Run a `linear` like this one as a product, the reduction of the product, and a sum with the bias."""
    if len(args) != 3 or kwargs or not all([type(x) is dtensor for x in args]) or args[1].ndim != 2:
        return
    x, w, bias = [each._spec for each in args]
    product = _lowered(aten.linear.default, x, w)
    total = _lowered(aten.add.Tensor, product.outs[0], bias)
    if args[0] is args[1] or any(each.gathered or each.skips_empty for each in (product, total)):
        return
    reduction, plan_of_bias = total.plans

    def run(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return reduction.run(local_function(aten.linear.default)(x, w)) + bias

    moves = [(i, p) for i, p in enumerate((*product.plans, plan_of_bias)) if p.steps]
    hot = fast_path.HotCall.of(
        aten.linear.default, dtensor, run, total.outs, out._local_tensor, moves=tuple(moves), may_send=True
    )
    fast_path.remember(aten.linear.default, args, kwargs, hot, dtensor)


def _lowered(op, *specs: Spec) -> Lowering:
    """The lowering of an op on tensors of these specs, all of them different tensors."""
    outs = out_metas(op, specs, {}, torch.device(specs[0].mesh.device_type))
    return lower(Call(op, specs, {}, outs), skips_empty=True)


# ---- the handler of a kind of call ------------------------------------------------------------


def _handler(eager: EagerCall, first_use: tuple[int, ...]) -> Any:
    """The handler of calls like this one: a function of the op, the specs and the static arguments."""
    op = eager.op
    args, kwargs = with_tensors(eager.args, eager.kwargs, [x._spec for x in eager.operands])
    kwargs.pop("generator", None)
    given = args, kwargs  # metadata needs the numbers
    args = tuple([as_runtime_scalar(op, x) for x in args])  # one handler serves all numbers that no rule reads
    kwargs = {name: as_runtime_scalar(op, x) for name, x in kwargs.items()}
    call = Call(op, args, kwargs, (), first_use)
    if _torch.is_composite(op) and not is_kept_as_one_op(call.name, *call.tensors[:2]):
        return DecomposedHandler()
    if call.draws and op not in RANDOM_FILLS:
        return FallbackDrawHandler.of(op)
    special = _special_handler(op)
    if special is not None:
        return special
    if op in READS_VALUE or not (_torch.returns_tensors(op) or _torch.written(op)):
        return FallbackHandler()
    try:
        outs = out_metas(op, *given, torch.device(call.mesh.device_type))
    except _torch.UNKNOWN_SHAPE:
        return FallbackHandler()
    _refuse_memory_tricks(call, outs)
    call = Call(op, args, kwargs, outs, first_use)
    recipe = None if _torch.is_view(op) else recipe_for(call)  # what is written into a view is written into its base
    if recipe is not None and not is_cheaper_by_rule(call, recipe.moves_from(call.tensors), recipe.outs):
        return recipe
    rule = rule_of(call)
    if rule is None and not _torch.written(op) and not _torch.is_view(op):
        return FallbackHandler()
    lowering = lower(call, in_place=_torch.writes_first(op), skips_empty=call.makes_new, rule=rule)
    return LoweredHandler.of(call, lowering)


def _special_handler(op) -> Any:
    """The handler of an op that changes the shape of its operand, or looks at memory; None for all other ops."""
    if op in STRIDED:
        return StridedHandler()
    if op in RESIZES:
        return ShapeChangeHandler(resized)
    without_out = _torch.without_out(op)
    if without_out is not None:
        return OutHandler(op, without_out)
    functional = _torch.out_of_place_variant(op) if torch.Tag.inplace_view in op.tags else None
    return None if functional is None else ShapeChangeHandler(functional)


def _refuse_memory_tricks(call: Call, outs: tuple[TensorMeta | None, ...]) -> None:
    """Refuse an op that reads the storage itself, and a write that changes the shape of its operand."""
    if call.name in READS_STORAGE:
        raise NotImplementedError(
            f"{call.op}: a DTensor's memory is spread over ranks and cannot be laid out anew. Use view, slicing, "
            "permute or expand, or take full_tensor() first."
        )
    for out, i in zip(outs, operands_returned(call), strict=False):
        if i is not None and (out.shape, out.stride) != (call.tensors[i].shape, call.tensors[i].stride):
            raise NotImplementedError(
                f"{call.op}: changes {call.tensors[i]} in place to the shape {list(out.shape)}, stride "
                f"{list(out.stride)}; use {base_name(call.op)} and take its result"
            )
