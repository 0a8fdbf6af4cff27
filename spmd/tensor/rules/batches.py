"""Rules of ops whose first dims are a batch: of matrices, of images, of signals.

    _linalg_svd      b m n -> b m k, b k, b k n        b is free, the matrix is whole
    _linalg_solve_ex b n n, b n k -> b n k             b is free, and the columns k are
    avg_pool2d       n c h w -> n c i j                n and c are free, the image is whole where windows overlap
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from spmd.comm.chunk import split_unit
from spmd.tensor.call import Call, dims_of
from spmd.tensor.rules.families import all_whole, broadcast, dims_whole, factors, rule_by_name, whole_dims
from spmd.tensor.rules.laws import BILINEAR, COPIES, COPIES_FIRST, LINEAR, LINEAR_IN_FIRST, inexact
from spmd.tensor.rules.movement import blocks_between, of_blocks
from spmd.tensor.rules.rule import CountArguments, Dims, Factor, Law, Rule
from spmd.tensor.rules.tiles import tiles
from spmd.tensor.spec import Spec

PER_MATRIX = ("pivots", "LU_pivots", "tau")
"""Operands that have one dim less than the matrices that they belong to."""


def leading_dims_free(
    call: Call, lead: int, law: tuple[Law, ...] = (), nonempty: bool = False, sizes: str | None = None
) -> Rule:
    """The first `lead` dims are free where all operands and results have them. The others are whole.

    `nonempty`: the kernel raises an error for images without a channel.
    """
    shapes = [x.shape for x in call.tensors] + [o.shape for o in call.outs if o is not None]
    tied = [d for d in range(lead) if all(len(s) > d and s[d] == shapes[0][d] for s in shapes)]

    def dims(ndim: int) -> Dims:
        return tuple(Factor(d) if d in tied else None for d in range(ndim))

    outs = tuple(None if o is None else dims(len(o.shape)) for o in call.outs)
    return Rule(
        tuple(dims(x.ndim) for x in call.tensors), outs, None, law,
        frozenset(tied) if nonempty else frozenset(), sizes,
    )  # fmt: skip


def batched(call: Call, last: int, law: tuple[Law, ...] = (), vectors: tuple[str, ...] = ()) -> Rule:
    """All dims of an operand except its last few are a batch. Batches are broadcast.

    vectors: the operands that have one dim less than a matrix, besides those that always have. A result that the call
    does not ask for, such as U of `svdvals`, has no batch, and no elements.
    """
    vectors = (*PER_MATRIX, *vectors)
    leads = [x.shape[: max(x.ndim - last + (name in vectors), 0)] for name, x in call.named_tensors]
    batch = tuple(torch.broadcast_shapes(*leads))
    asked = [o for o in call.outs if o is not None and not (o.shape == (0,) != batch)]
    out_leads = [leads[0] if call.name == "_linalg_solve_ex" else batch] * len(asked)  # of LU: the batch of A
    out_leads[0] = batch
    fit = all(o.shape[: len(lead)] == lead for o, lead in zip(asked, out_leads, strict=True))

    def dims(lead: tuple[int, ...], ndim: int) -> Dims:
        return (broadcast(lead, batch) if fit else whole_dims(len(lead))) + whole_dims(ndim - len(lead))

    ins = tuple(dims(lead, x.ndim) for lead, x in zip(leads, call.tensors, strict=True))
    found = iter(out_leads)
    outs = [None if o is None else dims(next(found), len(o.shape)) if o in asked else (None,) for o in call.outs]
    return Rule(ins, tuple(outs), None, law)


def windows(call: Call, last: int, law: tuple[Law, ...] = ()) -> Rule:
    """Pooling, padding and resampling: batch and channel are free, the last few dims are whole.

    An average of integers is rounded, so it is not linear. A backward op that takes the size of the image as an
    argument needs the local size.
    """
    law = law if law is COPIES or call.tensors[0].dtype.is_floating_point else ()
    sizes = "input_size" if call["input_size"] is not None else None
    return leading_dims_free(call, max(call.tensors[0].ndim - last, 0), law, nonempty=True, sizes=sizes)


def pooled(call: Call, last: int) -> Rule:
    """An average over windows. Windows that do not overlap are free (`tiles`)."""
    rule = windows(call, last, LINEAR_IN_FIRST if inexact(call.tensors[0].dtype) else ())
    image, pools = call["self"].shape, (call["grad_output"] or call.outs[0]).shape
    inner, outer = tiles(image[-last:], pools[-last:], call["kernel_size"], call)
    sides = [rule.ins[0][:-last] + (outer if call["grad_output"] else inner)]
    sides += [rule.ins[0][:-last] + inner] * (len(call.tensors) - 1)
    out = rule.outs[0][:-last] + (inner if call["grad_output"] else outer)
    return replace(rule, ins=tuple(sides), outs=(out,), nonempty=rule.nonempty | {f.name for f in inner if f})


def shuffled(call: Call) -> Rule:
    """`pixel_shuffle`: r x r channels become a square of r x r places. Channels and places are free in units of these.

    `pixel_unshuffle` is the reverse.
    """
    n, r = call.tensors[0].ndim, call["upscale_factor"] or call["downscale_factor"]
    batch = tuple(map(Factor, range(n - 3)))
    channels = (*batch, Factor("c", r * r), Factor("h"), Factor("w"))
    places = (*batch, Factor("c"), Factor("h", r), Factor("w", r))
    sides = (channels, places) if call["upscale_factor"] else (places, channels)
    return Rule(sides[:1], sides[1:], laws=COPIES, nonempty=frozenset(f.name for f in channels))


def solved(call: Call, right: str, law: tuple[Law, ...]) -> Rule:
    """`A X = B`, a batch of matrices: the columns of B are free, and so are those of X. For `X A = B`, the rows are.

    right: the name of the argument B. `_linalg_solve_ex` takes a B that has one dim less than A as a batch of vectors
    if the sizes fit, and as one matrix if not. The sizes of a block may fit where those of B do not, so there the
    batch is whole.
    """
    b_index = [name for name, _ in call.named_tensors].index(right)
    a, b = call.tensors[0 if b_index else 1], call.tensors[b_index]
    if call.name == "_linalg_solve_ex" and b.ndim in (1, a.ndim - 1):
        if b.ndim > 1 and b.shape != a.shape[:-1]:
            return replace(all_whole(call), laws=law)
        return batched(call, 2, law, vectors=(right,))
    rule = batched(call, 2, law, vectors=("input2",) if call.name == "ormqr" else ())  # that is its `tau`
    if call.outs[0].shape != b.shape:
        return rule
    free = b.ndim - 1 if call["left"] in (None, True) else b.ndim - 2
    dims = tuple(Factor("column") if d == free else f for d, f in enumerate(rule.ins[b_index]))
    ins = (*rule.ins[:b_index], dims, *rule.ins[b_index + 1 :])
    return replace(rule, ins=ins, outs=(dims, *rule.outs[1:]))


def resampled(call: Call) -> Rule:
    """`grid_sampler`: the grid says, for each image and each point of the result, where to sample all channels."""
    n, c = Factor("n"), Factor("c")
    points = tuple(Factor(d) for d in range(2, call["input"].ndim))
    ins = {"input": (n, c, *whole_dims(len(points))), "grid": (n, *points, None)}
    nonempty = frozenset(["n", "c", *range(2, 5)])
    return rule_by_name(call, ins, ((n, c, *points),), laws=LINEAR_IN_FIRST, nonempty=nonempty)


def transformed(call: Call) -> Rule:
    """A Fourier transform along some dims is linear, and these dims are whole."""
    n = call.tensors[0].ndim
    whole = dims_of(call["dim"], n)
    dims = tuple(None if d in whole else Factor(d) for d in range(n))
    law = LINEAR if call.tensors[0].dtype == call.outs[0].dtype else ()
    return Rule((dims,), (dims,), None, law, nonempty=frozenset(range(n)) - set(whole))  # MKL refuses an empty batch


def unfolded(call: Call) -> Rule:
    """`x.unfold(dim, size, step)`: windows along a dim. The elements of a window are a new last dim."""
    n = call.tensors[0].ndim
    inner, outer = _unfolded_dims(call, call["dimension"], call.tensors[0].shape, call.outs[0].shape[:n])
    return Rule((inner,), ((*outer, None),), laws=COPIES, nonempty=_windowed(inner, call["dimension"]))


def _unfolded_dims(call: Call, dim: int, image: Sequence[int], pieces: Sequence[int]) -> tuple[Dims, Dims]:
    """The dims of a tensor and of its windows along a dim. That dim is whole, unless the windows are side by side."""
    n, step = len(image), call["step"]
    whole = dims_of(dim, n)
    side_by_side = all(call["size"] <= step and image[d] == pieces[d] * step for d in whole)
    inner = tuple(None if d in whole and not side_by_side else Factor(d, step if d in whole else 1) for d in range(n))
    return inner, tuple(f and Factor(f.name) for f in inner)


def folded(call: Call) -> Rule:
    """The gradient of `unfold`: each window is added to the place that it was taken from."""
    shape = call.outs[0].shape
    inner, outer = _unfolded_dims(call, call["dim"], shape, call.tensors[0].shape[: len(shape)])
    return Rule(((*outer, None),), (inner,), laws=LINEAR, sizes="input_sizes", nonempty=_windowed(inner, call["dim"]))


def _windowed(dims: Dims, dim: int) -> frozenset:
    """The factor of the dim that has windows: there is none in an empty block, also of a single index."""
    return frozenset(dims[d].name for d in dims_of(dim, len(dims)) if dims[d])


def scattered_into(call: Call) -> Rule:
    """`slice_scatter`, `select_scatter`: a part along one dim is replaced. That dim is whole, except where the part is
    some blocks of a packed dim."""
    x, src = call["self"], call["src"]
    d = call["dim"] % max(x.ndim, 1)
    blocks = split_unit(x.units[d])[0] if x.ndim == src.ndim else 1
    if blocks > 1 and (part := blocks_between(x.shape[d], blocks, call["start"], call["end"], call["step"])):
        every = factors(*range(x.ndim))
        all_of, some = of_blocks(every, d, blocks), of_blocks(every, d, part)
        return Rule((all_of, some), (all_of,), counts=CountArguments(("start", "end"), d))
    whole = dims_of(call["dim"], x.ndim)
    dims = tuple(None if d in whole else Factor(d) for d in range(x.ndim))
    part = dims if src.ndim == x.ndim else tuple(f for d, f in enumerate(dims) if d not in whole)
    return Rule((dims, part), (dims,))


def looked_up(call: Call, table: str, what: str) -> Rule:
    """`isin`, `searchsorted`, `bucketize`, `take`: each element of `what` is looked up in one `table`.

    A sharded table leaves a Partial: an element is in the table if it is in one of the shards (max), and the number of
    entries below it is the sum of the numbers in the shards (sum). For `take`, the table is whole.
    """
    x, given = call[what], call[table]
    if not isinstance(x, Spec) or (table == "sorted_sequence" and given.ndim > 1):
        return all_whole(call)
    ins = {what: factors(*range(x.ndim))}
    kind = {"test_elements": "max", "sorted_sequence": "sum", "boundaries": "sum"}.get(table)
    if kind and isinstance(given, Spec) and given.ndim == 1 and not call["invert"] and call["sorter"] is None:
        ins[table] = factors("part")
    return rule_by_name(call, ins, (ins[what],), kind=kind, laws=COPIES_FIRST if table == "self" else ())


def crossed(call: Call) -> Rule:
    """`linalg_cross`: the dim of length three is whole. The others are broadcast."""
    shape = call.outs[0].shape
    whole = dims_of(call["dim"], len(shape))
    ins = [tuple(f if f and f.name not in whole else None for f in broadcast(x.shape, shape)) for x in call.tensors]
    return Rule(tuple(ins), (tuple(None if d in whole else Factor(d) for d in range(len(shape))),), laws=BILINEAR)


def renormed(call: Call) -> Rule:
    """`renorm`: each slice along `dim` has its own norm over all other dims. So `dim` is free and the others are whole.
    """
    n = call.tensors[0].ndim
    return dims_whole(call, [d for d in range(n) if d not in dims_of(call["dim"], n)])


def distances(call: Call) -> Rule:
    """`_cdist_forward`: the rows of both operands are free, their coordinates are whole."""
    n = len(call.outs[0].shape)
    if call["x1"].ndim != n or call["x2"].ndim != n or call["x1"].shape[:-2] != call["x2"].shape[:-2]:
        return all_whole(call)
    batch = factors(*range(n - 2))
    m, k = Factor("m"), Factor("k")
    return rule_by_name(call, {"x1": (*batch, m, None), "x2": (*batch, k, None)}, ((*batch, m, k),))


def distances_backward(call: Call) -> Rule:
    """The coordinates are free. The rows of the other operand are summed."""
    n = call["grad"].ndim
    if any(t.ndim != n or t.shape[:-2] != call["grad"].shape[:-2] for t in call.tensors):
        return all_whole(call)
    batch = factors(*range(n - 2))
    m, k, d = Factor("m"), Factor("k"), Factor("d")
    pairs, rows = (*batch, m, k), (*batch, m, d)
    ins = {"grad": pairs, "cdist": pairs, "x1": rows, "x2": (*batch, k, d)}
    return rule_by_name(call, ins, (rows,), kind="sum", laws=LINEAR_IN_FIRST)


def as_complex(call: Call) -> Rule:
    """`view_as_complex`: the last dim is the real and the imaginary part, and is whole."""
    dims = factors(*range(call.tensors[0].ndim - 1))
    return Rule(((*dims, None),), (dims,), None, LINEAR)


def as_real(call: Call) -> Rule:
    """`view_as_real`: the reverse."""
    dims = factors(*range(call.tensors[0].ndim))
    return Rule((dims,), ((*dims, None),), None, LINEAR)


def bags(call: Call) -> Rule:
    """`_embedding_bag`: only the columns of the table are free."""
    columns = factors(None, "d")
    outs = [columns, *(whole_dims(len(o.shape)) if o is not None else None for o in call.outs[1:])]
    if call["mode"] == 2:  # the indices of the maxima are rows, for each column
        outs[3] = columns
    return rule_by_name(call, {"weight": columns}, outs)


def bags_backward(call: Call) -> Rule:
    """The columns are free. The look-ups are summed: each adds to a row of the table."""
    columns = factors(None, "d")
    ins = {"grad": columns}
    if call["mode"] == 2:
        ins["maximum_indices"] = columns
    elif not call["scale_grad_by_freq"]:
        ins |= dict.fromkeys(("indices", "offset2bag", "per_sample_weights"), factors("n"))
    return rule_by_name(call, ins, (columns,), kind="sum", laws=LINEAR_IN_FIRST)


def bag_weights(call: Call) -> Rule:
    """The gradient of the weights of samples: a product with a row of the table, so the columns are summed.

    The look-ups are free, if the op need not find out itself which bag each of them is in.
    """
    looked = factors("n") if call["indices"].shape == call["offset2bag"].shape else whole_dims(1)
    columns = factors(None, "d")
    ins = {"grad": columns, "weight": columns, "indices": looked, "offset2bag": looked}
    return rule_by_name(call, ins, (looked,), kind="sum", laws=LINEAR_IN_FIRST)
