"""Rules of ops with an index: the indexed dim is whole, and all other dims are free.

    gather(f32[t, V], 1, i64[t, k])     0 _, 0 1 -> 0 1     t is tied, V is whole, k is a dim of the index alone

The other dims of the index and of the indexed tensor are tied only where their sizes are equal. torch allows an index
that is shorter. Then a block of the index does not belong to a block of the tensor.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from spmd.tensor.call import Call, dims_of
from spmd.tensor.rules.families import broadcast, factors, rule_by_name, whole_dims
from spmd.tensor.rules.laws import (
    COPIES_FIRST,
    FILLS_CONSTANT,
    FILLS_ZERO,
    LINEAR_IN_FIRST,
    SCATTER,
    SCATTER_ADD,
)  # fmt: skip
from spmd.tensor.rules.networks import is_zero
from spmd.tensor.rules.rule import Dims, Factor, Rule, laws
from spmd.tensor.spec import Spec

# ---- embedding --------------------------------------------------------------------------------


def embedding(call: Call) -> Rule:
    """The rows of the table are whole; its columns and the tokens are free."""
    tokens = factors(*range(call["indices"].ndim))
    return rule_by_name(
        call, {"weight": factors(None, "d"), "indices": tokens}, ((*tokens, Factor("d")),), laws=COPIES_FIRST
    )  # fmt: skip


def embedding_backward(call: Call) -> Rule:
    """Each token adds its gradient to a row, so tokens are summed. If they are counted, they are whole."""
    n = call["indices"].ndim
    tokens = whole_dims(n) if call["scale_grad_by_freq"] else factors(*range(n))
    return rule_by_name(
        call, {"grad_output": (*tokens, Factor("d")), "indices": tokens}, (factors(None, "d"),),
        kind="sum", laws=LINEAR_IN_FIRST,
    )  # fmt: skip


# ---- gather and scatter -----------------------------------------------------------------------


def gathered(call: Call) -> Rule:
    """`out[i, j] = x[i, index[i, j]]`: i is tied, j is a dim of the index alone."""
    x, index = call["self"], call["index"]
    along = dims_of(call["dim"], index.ndim)
    tied = _tied(along, x, index)
    if tied is None:
        return rule_by_name(call, {}, (whole_dims(index.ndim),), laws=COPIES_FIRST)
    out = tuple(Factor(d) if d in along else f for d, f in enumerate(tied))
    return rule_by_name(call, {"self": tied, "index": out}, (out,), laws=COPIES_FIRST)


def _tied(along, *tensors: Spec) -> Dims | None:
    """The dims of tensors that are tied: a factor for each dim, except `along`, with the same size in all tensors.

    None if the tensors have different numbers of dims, as with a scalar.
    """
    n = tensors[0].ndim
    if any(t.ndim != n for t in tensors):
        return None
    return tuple(
        Factor(d) if d not in along and len({t.shape[d] for t in tensors}) == 1 else None for d in range(n)
    )


def _scatter_rule(call: Call, law, others: tuple[str, ...]) -> Rule:
    """The dims with the same size in all tensors are free, except `dim`."""
    x = call["self"]
    tied = _tied(dims_of(call["dim"], x.ndim), x, *(call[name] for name in others))
    ins = dict.fromkeys(("self", *others), tied) if tied is not None else {}
    return rule_by_name(call, ins, (whole_dims(x.ndim) if tied is None else tied,), laws=law)


def scattered(call: Call) -> Rule:
    """If an index is given twice, torch does not define which element remains, but it is the same on every rank."""
    if call["src"] is None:
        return _scatter_rule(call, _fill_laws(call["value"]) if call["reduce"] is None else (), ("index",))
    return _scatter_rule(call, SCATTER if call["reduce"] is None else (), ("index", "src"))


def scatter_added(call: Call) -> Rule:
    return _with_sharded_source(call, _scatter_rule(call, SCATTER_ADD, ("index", "src")), "sum", "src")


def scatter_reduced(call: Call) -> Rule:
    rule = _scatter_rule(call, (), ("index", "src"))
    return _with_sharded_source(call, rule, REDUCE_KINDS.get(call["reduce"]), "src")


REDUCE_KINDS = {"sum": "sum", "amax": "max", "amin": "min"}
"""From the `reduce` argument to the Partial that the ranks leave if each reduces a part of the source.

The target is added to a sum once. For a maximum or minimum each rank may use all of it.
"""


def _with_sharded_source(call: Call, rule: Rule, kind: str | None, source: str) -> Rule:
    """The same rule, with one more factor: the entries of the index along `dim`, and the source with them."""
    names = [name for name, _ in call.named_tensors]
    x, index, src = call["self"], call["index"], call[source]
    if kind is None or not x.ndim or call["include_self"] is False or x.dtype == torch.bool:
        return rule
    (along,) = dims_of(call["dim"], x.ndim)
    if index.ndim not in (1, x.ndim) or src.ndim != x.ndim:
        return rule
    index_dim = along if index.ndim == x.ndim and source == "src" else 0
    if index.shape[index_dim] != src.shape[along]:
        return rule
    sharded = {names.index("index"): index_dim, names.index(source): along}
    ins = tuple(_with_place_factor(dims, sharded[i]) if i in sharded else dims for i, dims in enumerate(rule.ins))
    return replace(rule, ins=ins, kind=kind, added=frozenset([names.index("self")] if kind == "sum" else ()))


def _with_place_factor(dims: Dims, d: int) -> Dims:
    """The dims with the factor of the index's entries at dim d."""
    return (*dims[:d], Factor("place"), *dims[d + 1 :])


def _fill_laws(value):
    return FILLS_ZERO if is_zero(value) else FILLS_CONSTANT


# ---- a 1-D index along one dim ----------------------------------------------------------------


def selected(call: Call) -> Rule:
    """`out[i, j] = x[i, index[j]]`."""
    x, index = call["self"], call["index"]
    along = dims_of(call["dim"], x.ndim)
    kept = tuple(None if d in along else Factor(d) for d in range(x.ndim))
    new = Factor("i") if index.ndim and x.ndim else None
    out = tuple(new if d in along else f for d, f in enumerate(kept))
    return rule_by_name(call, {"self": kept, "index": (new,) * index.ndim}, (out,), laws=COPIES_FIRST)


def _indexed_along_dim(call: Call, law) -> Rule:
    """The dims of `self` and `source` are tied, except the dim that `index` points along, which is whole."""
    x, source = call["self"], call["source"]
    along = dims_of(call["dim"], x.ndim)
    tied = _tied(along, *((x, source) if source is not None else (x,)))
    ins = {"self": tied, "source": tied} if tied is not None else {}
    return rule_by_name(call, ins, (whole_dims(x.ndim) if tied is None else tied,), laws=law)


def index_added(call: Call) -> Rule:
    return _with_sharded_source(call, _indexed_along_dim(call, SCATTER_ADD), "sum", "source")


def index_reduced(call: Call) -> Rule:
    return _with_sharded_source(call, _indexed_along_dim(call, ()), REDUCE_KINDS.get(call["reduce"]), "source")


def index_copied(call: Call) -> Rule:
    return _indexed_along_dim(call, SCATTER)


def index_filled(call: Call) -> Rule:
    return _indexed_along_dim(call, _fill_laws(call["value"]))


# ---- x[i, :, j] -------------------------------------------------------------------------------


def indexed(call: Call) -> Rule | None:
    """`x[i, :, j]`: the dims that are not indexed are free, and the dims of the indices are free."""
    return _index_rule(call, put=False)


def index_put(call: Call) -> Rule | None:
    """`x[i, :, j] = values`: the dims of the indices are whole, because an index may point anywhere in `x`.

    In `+=` they are summed.
    """
    return _index_rule(call, put=True)


def _index_rule(call: Call, put: bool) -> Rule | None:
    """Adjacent indices put their dims in the place of the first one. Others put them first, as in numpy.

    A mask has no rule, because the number of elements that it selects depends on its values.
    """
    x, given = call["self"], call["indices"]
    at = [d for d, i in enumerate(given) if i is not None]
    indices = [given[d] for d in at]
    if not at or any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    shape = tuple(torch.broadcast_shapes(*(i.shape for i in indices)))
    adds = put and call["accumulate"] and x.dtype != torch.bool
    of_index: Dims = factors(*(f"i{d}" for d in range(len(shape)))) if adds or not put else whole_dims(len(shape))
    table = tuple(None if d in at else Factor(d) for d in range(x.ndim))
    place = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    rest = [d for d in range(x.ndim) if d not in at]
    selected = factors(*rest[:place]) + of_index + factors(*rest[place:])
    sizes = [x.shape[d] for d in rest[:place]] + [*shape] + [x.shape[d] for d in rest[place:]]
    index_dims = [_broadcast_dims(i.shape, shape, of_index) for i in indices]
    if not put:
        return Rule((table, *index_dims), (selected,), laws=COPIES_FIRST)
    values = _broadcast_dims(call["values"].shape, sizes, selected)
    law = _put_laws(call, len(indices))
    if adds:
        return Rule((table, *index_dims, values), (table,), "sum", law, added=frozenset([0]))
    return Rule((table, *index_dims, values), (table,), laws=law)


def _broadcast_dims(shape, to, dims: Dims) -> Dims:
    """The dims of a tensor of `shape` that is broadcast to a tensor with these dims."""
    return tuple(dims[f.name] if f is not None else None for f in broadcast(shape, to))


def _put_laws(call: Call, n: int):
    """The laws of scatter, with n indices between the tensor and the values."""
    between = " ".join("r" * n)
    if call["accumulate"]:
        return laws(f"sum avg: p {between} p -> p", f"avg: p {between} r -> p", f"avg: r {between} p -> p")
    return laws(
        f"sum avg max min product: p {between} p -> p",
        f"avg max min: p {between} r -> p",
        f"avg max min: r {between} p -> p",
    )
