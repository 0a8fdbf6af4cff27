"""The book: one row an op, from its base name to its rule.

A row says which family the op belongs to, and by which laws partials pass through it. Ops that torch tags
pointwise need no row unless a law holds for them. What stands here in one line each:

    contract    an einsum: fixed rank, spelled out
    elementwise every dim is free
    reduce_to   the dims that `dim` names leave a Partial of this kind
    keep_whole  the dims that an argument names are whole, all others free
    move        a rearrangement of dims

and rows that read more of the call than that, as functions in `indexing`, `networks` and `movement`.

Ops that draw random numbers lie as `zeros_like` does; the numbers are the recipe's (`spmd.tensor.random`).

Not here: ops whose local call needs the rank's offset (a vocabulary-sharded embedding), and ops
that are spelled in a way that is not safe locally (mean: see `decompositions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from spmd import _torch
from spmd.tensor.call import Call
from spmd.tensor.rules import batches, families, indexing, movement, networks, products
from spmd.tensor.rules.draws import FILLS
from spmd.tensor.rules.laws import (
    ADDCDIV,
    ADDCMUL,
    ADDITIVE,
    BILINEAR,
    CLAMPED,
    FALLING,
    FILLS_ZERO,
    LERP,
    LINEAR_IN_FIRST,
    MAX_OVER,
    MIN_OVER,
    MONOTONE2,
    MOVES,
    MOVES_SECOND,
    OF_MAX,
    OF_MIN,
    PARTS_OF_ONE,
    PICKS,
    PICKS_OR_CONST,
    PRODUCT_OVER,
    RISING,
    SCALING,
    SHIFTING,
    UNREAD,
    inexact,
    lawful,
)  # fmt: skip
from spmd.tensor.rules.rule import Law, Rule, laws

Row = Callable[[Call], Rule | None]

book: dict[str, Row] = {}


def rule_of(call: Call) -> Rule | None:
    """The rule of a call, or None where there is none: decompose the op, or replicate all its operands.

    Laws that its dtypes do not allow are left out: an integer has no average, a bool no sum.
    """
    row = book.get(call.name) or (families.pointwise if _is_pointwise(call) else None)
    rule = row(call) if row and _returns_tensors(call) else None
    if rule is None:
        return None
    _check_ties(call, rule)
    return replace(rule, laws=lawful(rule, call))


def _is_pointwise(call: Call) -> bool:
    """Tagged so by torch; random ops are not: every shard would draw the same numbers."""
    return torch.Tag.pointwise in call.op.tags and torch.Tag.nondeterministic_seeded not in call.op.tags


def _returns_tensors(call: Call) -> bool:
    """A call with tensors on both sides, none of them to be written to by `out=`."""
    written = any(a.is_out for a in _torch.arguments(call.op))
    return not written and bool(call.tensors) and any(o is not None for o in call.outs)


def _check_ties(call: Call, rule: Rule) -> None:
    """Dims that a factor ties together have as many units; else shards of them would not meet."""
    assert len(rule.ins) == len(call.tensors) and len(rule.outs) == len(call.outs), (call.op, str(rule))
    units: dict = {}
    for dims, x in zip((*rule.ins, *rule.outs), (*call.tensors, *call.outs), strict=True):
        for factor, size in zip(dims or (), x.shape if dims is not None else (), strict=True):
            if factor is not None:
                count, rest = divmod(size, factor.unit)
                assert not rest and units.setdefault(factor.name, count) == count, (call.op, str(rule), x.shape)


# ---- how rows are written ---------------------------------------------------------------------


def enter(names: str, row: Row) -> None:
    """Write one row for each of these names."""
    for name in names.split():
        assert name not in book, f"{name} is in the book twice"
        book[name] = row


def contract(name: str, equation: str, law: tuple[Law, ...]) -> None:
    enter(name, lambda call: families.contraction(call, equation, law))


def elementwise(law: tuple[Law, ...], names: str) -> None:
    enter(names, lambda call: families.pointwise(call, law))


def reduce_to(kind: str | None, names: str, law: tuple[Law, ...] = (), nonempty: bool = False) -> None:
    enter(names, lambda call: families.reduction(call, kind, law, nonempty))


def keep_whole(arg: str, names: str, law: tuple[Law, ...] = ()) -> None:
    enter(names, lambda call: families.one_dim_whole(call, arg, law))


def move(names: str, source: Callable[[Call, int], list]) -> None:
    enter(names, lambda call: families.moved(call, lambda ndim: source(call, ndim)))


def batch_of(last: int, names: str) -> None:
    enter(names, lambda call: batches.batched(call, last))


def windows(last: int, names: str, law: tuple[Law, ...] = ()) -> None:
    enter(names, lambda call: batches.windows(call, last, law))


def averages(last: int, names: str) -> None:
    """Windows with weights: of whole numbers the result is rounded, and a sum of such is not that of the sum."""
    enter(names, lambda call: batches.windows(call, last, SCALING if inexact(call.tensors[0].dtype) else ()))


def solve(right: str, law: tuple[Law, ...], names: str) -> None:
    enter(names, lambda call: batches.solved(call, right, law))


def look_up(table: str, what: str, names: str) -> None:
    enter(names, lambda call: batches.found_in(call, table, what))


# ---- contraction ------------------------------------------------------------------------------

contract("mm",   "m k, k n -> m n", BILINEAR)
contract("bmm",  "b m k, b k n -> b m n", BILINEAR)
contract("mv",   "m k, k -> m", BILINEAR)
contract("dot",  "k, k ->", BILINEAR)
contract("ger",  "m, n -> m n", BILINEAR)
enter("linear", products.linear)
enter("linear_backward", products.linear_backward)
enter("matmul", products.matmul)
enter("_trilinear", networks.trilinear)
enter("convolution", networks.convolution)
enter("convolution_backward", networks.convolution_backward)

# ---- pointwise: torch tags them; only the algebra of partials is written down -----------------

elementwise(ADDITIVE + SHIFTING, "add sub rsub")
elementwise(BILINEAR + SCALING, "native_dropout_backward")
elementwise(MOVES, "clone alias detach lift_fresh positive _to_copy")
elementwise(MOVES_SECOND, "copy")
elementwise(SCALING + FALLING, "neg")
elementwise(SCALING, "conj_physical _conj_physical _conj _neg_view deg2rad rad2deg")
elementwise(RISING, """exp exp2 expm1 relu relu6 sigmoid tanh sinh asinh atan erf ceil floor round trunc
                       hardtanh hardsigmoid hardshrink""")  # not sign, nan_to_num: of NaN they make a number
elementwise(CLAMPED, "clamp clamp_min clamp_max")
elementwise(FALLING, "erfc special_erfcx")
elementwise(MONOTONE2, "logaddexp logaddexp2")
elementwise(MONOTONE2 + OF_MAX, "maximum")  # not fmax: it drops NaN, which is above all numbers
elementwise(MONOTONE2 + OF_MIN, "minimum")
elementwise(LERP, "lerp")
elementwise(ADDCMUL, "addcmul")
elementwise(ADDCDIV, "addcdiv")
elementwise(LINEAR_IN_FIRST, """gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward
    mish_backward logit_backward elu_backward leaky_relu_backward hardtanh_backward hardsigmoid_backward
    hardswish_backward hardshrink_backward softshrink_backward softplus_backward log_sigmoid_backward""")
elementwise((), "hardswish log_sigmoid_forward floor_divide polar _prelu_kernel")
elementwise(PARTS_OF_ONE, "complex")
elementwise(LINEAR_IN_FIRST, "_prelu_kernel_backward")
elementwise(PICKS + PICKS_OR_CONST, "where")
enter("mul", networks.product)
enter("div true_divide", networks.division)
enter("masked_fill", networks.masked_fill)
enter("zeros_like ones_like full_like empty_like fill", families.like)
elementwise(UNREAD + FILLS_ZERO, "zero")  # in place a sum stays one
enter("uniform normal normal_functional exponential cauchy log_normal geometric bernoulli random",
      lambda call: families.like(call) if call.op in FILLS else None)  # bernoulli(p) reads
enter("new_zeros new_ones new_full new_empty", families.new)

# ---- reduction --------------------------------------------------------------------------------

reduce_to("sum",     "sum", SCALING)
reduce_to("sum",     "nansum count_nonzero")
reduce_to("max",     "amax", MAX_OVER, nonempty=True)
reduce_to("min",     "amin", MIN_OVER, nonempty=True)
reduce_to("product", "prod", PRODUCT_OVER)
reduce_to("max",     "any")  # empty: False, the least
reduce_to("min",     "all")  # empty: True, the greatest
reduce_to(None,      """argmax argmin logsumexp var std var_mean std_mean norm linalg_vector_norm median nanmedian
                        kthvalue mode aminmax""")
enter("histc", networks.histogram)
enter("max", lambda call: networks.extreme(call, "max", MAX_OVER))
enter("min", lambda call: networks.extreme(call, "min", MIN_OVER))

# ---- some dims whole --------------------------------------------------------------------------

keep_whole("dim", "_softmax _log_softmax cumprod logcumsumexp cummax cummin sort topk argsort")
keep_whole("dim", "_softmax_backward_data _log_softmax_backward_data", LINEAR_IN_FIRST)
keep_whole("dim", "cumsum", SCALING)
enter("triu tril", lambda call: families.last_dims_whole(call, 2, MOVES))  # zeros are their own sum and product

# ---- movement ---------------------------------------------------------------------------------

move("permute",   movement.permuted)
move("transpose", movement.transposed)
move("t",         movement.reversed_dims)
move("unsqueeze", movement.unsqueezed)
move("unbind select", movement.without_dim)
move("""split split_with_sizes chunk narrow tensor_split unsafe_split unsafe_split_with_sizes unsafe_chunk""",
     movement.with_dim_whole)
move("diagonal",  movement.diagonal)
enter("diag_embed", movement.diagonal_of)
enter("diagonal_backward", movement.diagonal_put_back)
enter("squeeze",  movement.squeezed)
enter("slice",    movement.sliced)
enter("view reshape _unsafe_view", movement.viewed)
enter("expand",   movement.expanded)
enter("repeat",   movement.repeated)
enter("slice_backward select_backward", movement.put_back)
keep_whole("dims", "flip", MOVES)
enter("roll",     movement.rolled)
enter("constant_pad_nd", movement.padded)
enter("cat",      movement.joined)
enter("stack",    movement.stacked)

# ---- indexing ---------------------------------------------------------------------------------

enter("embedding",   indexing.embedding)
enter("embedding_dense_backward", indexing.embedding_backward)
enter("gather",      indexing.gathered)
enter("scatter",     indexing.scattered)
enter("scatter_add", indexing.scatter_added)
enter("index_select", indexing.selected)
enter("index_add",   indexing.index_added)
enter("index_copy",  indexing.index_copied)
enter("index_fill",  indexing.index_filled)
enter("index",       indexing.indexed)
enter("index_put",   indexing.index_put)

# ---- networks ---------------------------------------------------------------------------------

enter("native_layer_norm _fused_rms_norm", networks.normalised)
enter("native_layer_norm_backward _fused_rms_norm_backward", networks.normalised_backward)
enter("""native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
         _batch_norm_with_update _batch_norm_with_update_functional""", networks.batch_normed)
enter("native_batch_norm_backward", networks.batch_normed_backward)
enter("nll_loss_forward nll_loss2d_forward", networks.nll)
enter("nll_loss_backward nll_loss2d_backward", networks.nll_backward)
enter("mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss", networks.pointwise_loss)
enter("""mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
         soft_margin_loss_backward""", networks.pointwise_loss_backward)
enter("""_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
         _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention""", networks.attention)
enter("""_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward
         _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward""",
      networks.attention_backward)

# ---- batches: of matrices, signals, images ----------------------------------------------------

batch_of(2, """linalg_inv_ex linalg_cholesky_ex cholesky cholesky_inverse _linalg_svd _linalg_eigh
    linalg_eig linalg_qr linalg_lu linalg_lu_factor_ex lu_unpack linalg_ldl_factor_ex linalg_ldl_solve
    _linalg_det
    _linalg_slogdet linalg_matrix_exp linalg_householder_product linalg_pinv geqrf ormqr""")
solve("B",    laws("sum avg: r p -> p r..."), "_linalg_solve_ex linalg_solve_triangular")
solve("B",    laws("sum avg: r r p -> p"),    "linalg_lu_solve")
solve("self", laws("sum avg: p r -> p r..."), "cholesky_solve triangular_solve")
enter("_fft_r2c _fft_c2c _fft_c2r", batches.transformed)
enter("view_as_real", batches.as_real)
enter("view_as_complex", batches.as_complex)
enter("unfold", batches.unfolded)
enter("unfold_backward", batches.folded)
enter("slice_scatter select_scatter", batches.scattered_into)
for _n, _smooth in ((1, "linear"), (2, "bilinear bicubic"), (3, "trilinear")):
    _scaled = [f"upsample_{kind}{_n}d" for kind in ("nearest", *_smooth.split())] + [f"_upsample_nearest_exact{_n}d"]
    _padded = [f"reflection_pad{_n}d", f"replication_pad{_n}d"]
    windows(_n, " ".join(_padded), MOVES)
    averages(_n, " ".join(_scaled))
    windows(_n, " ".join(f"{name}_backward" for name in _padded + _scaled), LINEAR_IN_FIRST)
for _n in (2, 3):
    windows(_n, f"max_pool{_n}d_with_indices adaptive_max_pool{_n}d")
    averages(_n, f"avg_pool{_n}d _adaptive_avg_pool{_n}d")
    windows(_n, f"""max_unpool{_n}d max_pool{_n}d_with_indices_backward adaptive_max_pool{_n}d_backward
                    avg_pool{_n}d_backward _adaptive_avg_pool{_n}d_backward""", LINEAR_IN_FIRST)
averages(2, "_upsample_bilinear2d_aa _upsample_bicubic2d_aa")
windows(2, "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward", LINEAR_IN_FIRST)
windows(3, "pixel_shuffle pixel_unshuffle", MOVES)
enter("grid_sampler_2d grid_sampler_3d", batches.resampled)
enter("grid_sampler_2d_backward grid_sampler_3d_backward", lambda call: batches.leading(call, 1, nonempty=True))
enter("channel_shuffle native_channel_shuffle", lambda call: families.dims_whole(call, [1], MOVES))
enter("_weight_norm_interface", networks.weight_normed)
enter("_weight_norm_interface_backward", networks.weight_normed)
enter("im2col col2im", lambda call: batches.leading(call, 1 if call.tensors[0].ndim > 2 else 0, nonempty=True))

# ---- look-ups ---------------------------------------------------------------------------------

look_up("test_elements", "elements", "isin")
look_up("sorted_sequence", "self", "searchsorted")
look_up("boundaries", "self", "bucketize")
look_up("self", "index", "take")
enter("_cdist_forward", batches.distances)
enter("_cdist_backward", batches.distances_backward)
enter("_embedding_bag _embedding_bag_forward_only", batches.bags)
enter("_embedding_bag_dense_backward", batches.bags_backward)
keep_whole("dim", "_safe_softmax glu glu_backward")
enter("linalg_cross", batches.crossed)
enter("renorm", batches.renormed)
keep_whole("dims", "rot90")
enter("scatter_reduce", indexing.scatter_reduced)
enter("index_reduce", indexing.index_reduced)
enter("_unsafe_index", indexing.indexed)
