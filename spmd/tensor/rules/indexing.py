"""Rows of ops that look elements up: what is indexed is whole, what is carried along is free.

An index and the tensor that it points into are tied, in the other dims, only where their sizes are equal: torch
lets an index be shorter, and a block of the shorter one is no block of the longer one.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from spmd.tensor.call import Call, dims_of
from spmd.tensor.rules.families import broadcast, by_name, named, whole
from spmd.tensor.rules.laws import (
    FILLS,
    FILLS_ZERO,
    LINEAR_IN_FIRST,
    MOVES_FIRST,
    SCATTER,
    SCATTER_ADD,
)  # fmt: skip
from spmd.tensor.rules.networks import is_zero
from spmd.tensor.rules.rule import Dims, Factor, Rule, laws
from spmd.tensor.spec import Spec

# ---- embedding --------------------------------------------------------------------------------


def embedding(call: Call) -> Rule:
    """The rows of the table are whole; its columns and the tokens are free."""
    tokens = named(*range(call["indices"].ndim))
    return by_name(
        call, {"weight": named(None, "d"), "indices": tokens}, ((*tokens, Factor("d")),), laws=MOVES_FIRST
    )  # fmt: skip


def embedding_backward(call: Call) -> Rule:
    """Each token adds its gradient to a row: tokens are summed, unless they must be counted."""
    n = call["indices"].ndim
    tokens = whole(n) if call["scale_grad_by_freq"] else named(*range(n))
    return by_name(
        call, {"grad_output": (*tokens, Factor("d")), "indices": tokens}, (named(None, "d"),),
        kind="sum", laws=LINEAR_IN_FIRST,
    )  # fmt: skip


# ---- gather and scatter -----------------------------------------------------------------------


def gathered(call: Call) -> Rule:
    """`out[i, j] = x[i, index[i, j]]`: i is tied, j is the index's own."""
    x, index = call["self"], call["index"]
    along = dims_of(call["dim"], index.ndim)
    tied = _tied(along, x, index)
    if tied is None:
        return by_name(call, {}, (whole(index.ndim),), laws=MOVES_FIRST)
    out = tuple(Factor(d) if d in along else f for d, f in enumerate(tied))
    return by_name(call, {"self": tied, "index": out}, (out,), laws=MOVES_FIRST)


def _tied(along, *tensors: Spec) -> Dims | None:
    """A factor for each dim but `along` that is as long in all of these; None where one of them is a scalar."""
    n = tensors[0].ndim
    if any(t.ndim != n for t in tensors):
        return None
    return tuple(
        Factor(d) if d not in along and len({t.shape[d] for t in tensors}) == 1 else None for d in range(n)
    )


def _scatter(call: Call, law, others: tuple[str, ...]) -> Rule:
    """The dims that all tensors share, but `dim`, are free."""
    x = call["self"]
    tied = _tied(dims_of(call["dim"], x.ndim), x, *(call[name] for name in others))
    ins = dict.fromkeys(("self", *others), tied) if tied is not None else {}
    return by_name(call, ins, (whole(x.ndim) if tied is None else tied,), laws=law)


def scattered(call: Call) -> Rule:
    """With an index twice, which element stays is not defined; it is the same one on every rank."""
    if call["src"] is None:
        return _scatter(call, _filling(call["value"]) if call["reduce"] is None else (), ("index",))
    return _scatter(call, SCATTER if call["reduce"] is None else (), ("index", "src"))


def scatter_added(call: Call) -> Rule:
    return _pointed(call, _scatter(call, SCATTER_ADD, ("index", "src")), "sum", "src")


def scatter_reduced(call: Call) -> Rule:
    return _pointed(call, _scatter(call, (), ("index", "src")), KINDS.get(call["reduce"]), "src")


KINDS = {"sum": "sum", "amax": "max", "amin": "min"}
"""What ranks that each reduce a part of the source leave. To a sum the target is added once; it is its own maximum."""


def _pointed(call: Call, rule: Rule, kind: str | None, source: str) -> Rule:
    """The same rule, with the places that the index names along `dim` shared out, with what is put there."""
    names = [name for name, _ in call.named_tensors]
    x, index, src = call["self"], call["index"], call[source]
    if kind is None or not x.ndim or call["include_self"] is False or x.dtype == torch.bool:
        return rule
    (along,) = dims_of(call["dim"], x.ndim)
    if index.ndim not in (1, x.ndim) or src.ndim != x.ndim:
        return rule
    at = along if index.ndim == x.ndim and source == "src" else 0
    if index.shape[at] != src.shape[along]:
        return rule
    put = {names.index("index"): at, names.index(source): along}
    ins = tuple(_with(dims, put[i]) if i in put else dims for i, dims in enumerate(rule.ins))
    return replace(rule, ins=ins, kind=kind, added=frozenset([names.index("self")] if kind == "sum" else ()))


def _with(dims: Dims, at: int) -> Dims:
    """The dims with the places that are pointed at in this one."""
    return (*dims[:at], Factor("place"), *dims[at + 1 :])


def _filling(value):
    return FILLS_ZERO if is_zero(value) else FILLS


# ---- a 1-D index along one dim ----------------------------------------------------------------


def selected(call: Call) -> Rule:
    """`out[i, j] = x[i, index[j]]`."""
    x, index = call["self"], call["index"]
    along = dims_of(call["dim"], x.ndim)
    kept = tuple(None if d in along else Factor(d) for d in range(x.ndim))
    new = Factor("i") if index.ndim and x.ndim else None
    out = tuple(new if d in along else f for d, f in enumerate(kept))
    return by_name(call, {"self": kept, "index": (new,) * index.ndim}, (out,), laws=MOVES_FIRST)


def _along(call: Call, law) -> Rule:
    """`self` and `source` move together; the dim that `index` points along is whole."""
    x, source = call["self"], call["source"]
    along = dims_of(call["dim"], x.ndim)
    tied = _tied(along, *((x, source) if source is not None else (x,)))
    ins = {"self": tied, "source": tied} if tied is not None else {}
    return by_name(call, ins, (whole(x.ndim) if tied is None else tied,), laws=law)


def index_added(call: Call) -> Rule:
    return _pointed(call, _along(call, SCATTER_ADD), "sum", "source")


def index_reduced(call: Call) -> Rule:
    return _pointed(call, _along(call, ()), KINDS.get(call["reduce"]), "source")


def index_copied(call: Call) -> Rule:
    return _along(call, SCATTER)


def index_filled(call: Call) -> Rule:
    return _along(call, _filling(call["value"]))


# ---- x[i, :, j] -------------------------------------------------------------------------------


def indexed(call: Call) -> Rule | None:
    """`x[i, :, j]`: the dims that are not indexed are free, and so are those of the indices."""
    return _index(call, put=False)


def index_put(call: Call) -> Rule | None:
    """`x[i, :, j] = values`: the indices' own dims are whole, for they point anywhere in `x`; or summed, in `+=`."""
    return _index(call, put=True)


def _index(call: Call, put: bool) -> Rule | None:
    """Adjacent indices put their dims in the place of the first; others put them in front, as numpy does.

    A mask has no rule: how many elements it takes is in its values.
    """
    x, given = call["self"], call["indices"]
    at = [d for d, i in enumerate(given) if i is not None]
    indices = [given[d] for d in at]
    if not at or any(i.dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    shape = tuple(torch.broadcast_shapes(*(i.shape for i in indices)))
    adds = put and call["accumulate"] and x.dtype != torch.bool
    own: Dims = named(*(f"i{d}" for d in range(len(shape)))) if adds or not put else whole(len(shape))
    table = tuple(None if d in at else Factor(d) for d in range(x.ndim))
    place = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    rest = [d for d in range(x.ndim) if d not in at]
    seen = named(*rest[:place]) + own + named(*rest[place:])
    sizes = [x.shape[d] for d in rest[:place]] + [*shape] + [x.shape[d] for d in rest[place:]]
    pointers = [_stretched(i.shape, shape, own) for i in indices]
    if not put:
        return Rule((table, *pointers), (seen,), laws=MOVES_FIRST)
    values = _stretched(call["values"].shape, sizes, seen)
    law = _put_laws(call, len(indices))
    if adds:
        return Rule((table, *pointers, values), (table,), "sum", law, added=frozenset([0]))
    return Rule((table, *pointers, values), (table,), laws=law)


def _stretched(shape, to, dims: Dims) -> Dims:
    """The dims of a tensor that is broadcast to a shape with these."""
    return tuple(dims[f.name] if f is not None else None for f in broadcast(shape, to))


def _put_laws(call: Call, n: int):
    """As scatter, with n indices between the two."""
    between = " ".join("r" * n)
    if call["accumulate"]:
        return laws(f"sum avg: p {between} p -> p", f"avg: p {between} r -> p", f"avg: r {between} p -> p")
    return laws(
        f"sum avg max min product: p {between} p -> p",
        f"avg max min: p {between} r -> p",
        f"avg max min: r {between} p -> p",
    )
