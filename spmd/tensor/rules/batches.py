"""Rows of ops whose first dims only count cases: batches of matrices, of images, of signals.

    _linalg_svd      b m n -> b m k, b k, b k n        b is free, the matrix is whole
    avg_pool2d       n c h w -> n c i j                n and c are free, the image is whole
"""

from __future__ import annotations

from dataclasses import replace

from spmd.tensor.call import Call, dims_of
from spmd.tensor.rules.families import all_whole, by_name, dims_whole, named, whole
from spmd.tensor.rules.laws import LINEAR_IN_FIRST, MOVES, MOVES_FIRST, SCALING
from spmd.tensor.rules.rule import Dims, Factor, Law, Rule
from spmd.tensor.spec import Spec

PER_MATRIX = ("pivots", "LU_pivots", "tau")
"""Operands with a dim less than the matrices they belong to."""


def leading(call: Call, lead: int, law: tuple[Law, ...] = (), nonempty: bool = False, sizes: str | None = None) -> Rule:
    """The first dims are free where all operands and results have them; the others are whole.

    `nonempty`: the kernel refuses images without a channel.
    """
    shapes = [x.shape for x in call.tensors] + [o.shape for o in call.outs if o is not None]
    tied = [d for d in range(lead) if all(len(s) > d and s[d] == shapes[0][d] for s in shapes)]
    n = call.tensors[0].ndim
    if any(x.ndim != n - (name in PER_MATRIX) for name, x in call.named_tensors):
        tied = []  # what is stretched over the batch has other dims in front

    def dims(ndim: int) -> Dims:
        return tuple(Factor(d) if d in tied else None for d in range(ndim))

    outs = tuple(None if o is None else dims(len(o.shape)) for o in call.outs)
    return Rule(
        tuple(dims(x.ndim) for x in call.tensors), outs, None, law,
        frozenset(tied) if nonempty else frozenset(), sizes,
    )  # fmt: skip


def batched(call: Call, last: int, law: tuple[Law, ...] = ()) -> Rule:
    """All but the last few dims of the first operand are a batch."""
    return leading(call, max(call.tensors[0].ndim - last, 0), law)


def windows(call: Call, last: int, law: tuple[Law, ...] = ()) -> Rule:
    """Pooling, padding and resampling: batch and channel are free, the last few dims are whole.

    An average of whole numbers is rounded, so it is not linear. A backward that is told the size of the image has to be
    told the local one.
    """
    law = law if law is MOVES or call.tensors[0].dtype.is_floating_point else ()
    sizes = "input_size" if call["input_size"] is not None else None
    return leading(call, max(call.tensors[0].ndim - last, 0), law, nonempty=True, sizes=sizes)


def solved(call: Call, right: str, law: tuple[Law, ...]) -> Rule:
    """`A X = B`: a batch of matrices; and the columns of B are free, those of X with them. Of `X A = B` the rows."""
    rule = batched(call, 2)
    at = [name for name, _ in call.named_tensors].index(right)
    b, n = call.tensors[at], call.tensors[0].ndim
    if any(x.ndim != n - (name in PER_MATRIX) for name, x in call.named_tensors) or call.outs[0].shape != b.shape:
        return rule
    free = n - 1 if call["left"] in (None, True) else n - 2
    dims = tuple(Factor("column") if d == free else f for d, f in enumerate(rule.ins[at]))
    ins = (*rule.ins[:at], dims, *rule.ins[at + 1 :])
    return replace(rule, ins=ins, outs=(dims, *rule.outs[1:]), laws=law)


def resampled(call: Call) -> Rule:
    """A grid says for each image, and each place in the result, where to look; all channels look there."""
    n, c = Factor("n"), Factor("c")
    places = tuple(Factor(d) for d in range(2, call["input"].ndim))
    ins = {"input": (n, c, *whole(len(places))), "grid": (n, *places, None)}
    return by_name(call, ins, ((n, c, *places),), laws=LINEAR_IN_FIRST, nonempty=frozenset(["n", "c", *range(2, 5)]))


def transformed(call: Call) -> Rule:
    """A Fourier transform along some dims is linear, and sees all of them."""
    n = call.tensors[0].ndim
    shut = dims_of(call["dim"], n)
    dims = tuple(None if d in shut else Factor(d) for d in range(n))
    law = SCALING if call.tensors[0].dtype == call.outs[0].dtype else ()
    return Rule((dims,), (dims,), None, law, nonempty=frozenset(range(n)) - set(shut))  # MKL refuses an empty batch


def unfolded(call: Call) -> Rule:
    """`x.unfold(dim, size, step)`: windows along a dim, laid along a new last one."""
    n = call.tensors[0].ndim
    shut = dims_of(call["dimension"], n)
    dims = tuple(None if d in shut else Factor(d) for d in range(n))
    return Rule((dims,), ((*dims, None),), laws=MOVES)


def folded(call: Call) -> Rule:
    """The gradient of `unfold`: each window is added where it was taken."""
    n = len(call.outs[0].shape)
    shut = dims_of(call["dim"], n)
    dims = tuple(None if d in shut else Factor(d) for d in range(n))
    return Rule(((*dims, None),), (dims,), laws=SCALING, sizes="input_sizes")


def scattered_into(call: Call) -> Rule:
    """`slice_scatter`, `select_scatter`: a part along one dim is replaced; that dim is whole."""
    x, src = call["self"], call["src"]
    shut = dims_of(call["dim"], x.ndim)
    dims = tuple(None if d in shut else Factor(d) for d in range(x.ndim))
    part = dims if src.ndim == x.ndim else tuple(f for d, f in enumerate(dims) if d not in shut)
    return Rule((dims, part), (dims,))


def found_in(call: Call, table: str, what: str) -> Rule:
    """`isin`, `searchsorted`, `bucketize`, `take`: each element is looked up by itself, in one table for all.

    Which of many is known part by part: an element is in a table if it is in a part, and as many are below it as are
    below it in the parts together. What an index takes is not.
    """
    x, given = call[what], call[table]
    if not isinstance(x, Spec) or (table == "sorted_sequence" and given.ndim > 1):
        return all_whole(call)
    ins = {what: named(*range(x.ndim))}
    kind = {"test_elements": "max", "sorted_sequence": "sum", "boundaries": "sum"}.get(table)
    if kind and isinstance(given, Spec) and given.ndim == 1 and not call["invert"] and call["sorter"] is None:
        ins[table] = named("part")
    return by_name(call, ins, (ins[what],), kind=kind, laws=MOVES_FIRST if table == "self" else ())


def crossed(call: Call) -> Rule:
    """`linalg_cross`: the dim of three is whole."""
    x, y = call.tensors
    return dims_whole(call, dims_of(call["dim"], x.ndim)) if x.shape == y.shape else all_whole(call)


def renormed(call: Call) -> Rule:
    """Each slice along `dim` has a norm of its own, over all the other dims."""
    n = call.tensors[0].ndim
    return dims_whole(call, [d for d in range(n) if d not in dims_of(call["dim"], n)])


def distances(call: Call) -> Rule:
    """`_cdist_forward`: rows of either side are free, what they are made of is whole."""
    n = len(call.outs[0].shape)
    if call["x1"].ndim != n or call["x2"].ndim != n or call["x1"].shape[:-2] != call["x2"].shape[:-2]:
        return all_whole(call)
    batch = named(*range(n - 2))
    m, k = Factor("m"), Factor("k")
    return by_name(call, {"x1": (*batch, m, None), "x2": (*batch, k, None)}, ((*batch, m, k),))


def distances_backward(call: Call) -> Rule:
    """Each coordinate of a row for itself; the rows of the other side are summed."""
    n = call["grad"].ndim
    if any(t.ndim != n or t.shape[:-2] != call["grad"].shape[:-2] for t in call.tensors):
        return all_whole(call)
    batch = named(*range(n - 2))
    m, k, d = Factor("m"), Factor("k"), Factor("d")
    pairs, rows = (*batch, m, k), (*batch, m, d)
    ins = {"grad": pairs, "cdist": pairs, "x1": rows, "x2": (*batch, k, d)}
    return by_name(call, ins, (rows,), kind="sum", laws=LINEAR_IN_FIRST)


def as_complex(call: Call) -> Rule:
    """`view_as_complex`: the last dim is the two parts of a number."""
    dims = named(*range(call.tensors[0].ndim - 1))
    return Rule(((*dims, None),), (dims,), None, SCALING)


def as_real(call: Call) -> Rule:
    dims = named(*range(call.tensors[0].ndim))
    return Rule((dims,), ((*dims, None),), None, SCALING)


def bags(call: Call) -> Rule:
    """`_embedding_bag`: only the columns of the table are free."""
    columns = named(None, "d")
    outs = [columns, *(whole(len(o.shape)) if o is not None else None for o in call.outs[1:])]
    if call["mode"] == 2:  # the maxima point at rows, for each column
        outs[3] = columns
    return by_name(call, {"weight": columns}, outs)


def bags_backward(call: Call) -> Rule:
    """Columns are free; each look-up adds to a row of the table."""
    columns = named(None, "d")
    ins = {"grad": columns}
    if call["mode"] == 2:
        ins["maximum_indices"] = columns
    elif not call["scale_grad_by_freq"]:
        ins |= dict.fromkeys(("indices", "offset2bag", "per_sample_weights"), named("n"))
    return by_name(call, ins, (columns,), kind="sum", laws=LINEAR_IN_FIRST)
