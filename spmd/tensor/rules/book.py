"""The book: a table from the base name of each op to the function that makes its rule.

    contract("mm", "m k, k n -> m n", BILINEAR)

A line says which family the op belongs to, and by which laws Partials pass through it. Ops that torch tags as pointwise
need no line, unless a law holds for them. The families:

    contract    an einsum of fixed rank
    elementwise every dim is free
    reduce_to   the dims that `dim` names leave a Partial of this kind
    keep_whole  the dims that an argument names are whole, all others are free
    rearrange   a rearrangement of dims

Rules that depend on more of the call are functions in `indexing`, `networks`, `movement`, `batches` and `products`.

Ops that draw random numbers have the rule of `zeros_like`. `spmd.tensor.recipes.random` makes the numbers.

Left out: ops whose local call needs the offset of the rank's block (a vocabulary-sharded embedding: see
`spmd.tensor.recipes`), and ops that are not safe on shards (mean: see `decompositions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from spmd import _torch
from spmd.tensor.call import Call, is_pointwise
from spmd.tensor.rules import batches, families, indexing, movement, networks, products
from spmd.tensor.rules.laws import (
    ADDCDIV,
    ADDCMUL,
    BILINEAR,
    COPIES,
    COPIES_SECOND,
    FALLING,
    FILLS_ZERO,
    IGNORES_VALUES,
    LERP,
    LINEAR,
    LINEAR_IN_FIRST,
    MAX_OF_TWO,
    MAX_OVER,
    MIN_OF_TWO,
    MIN_OVER,
    PRODUCT_OVER,
    REAL_AND_IMAGINARY,
    RISING,
    RISING_IN_EACH,
    RISING_IN_FIRST,
    SELECTS,
    SELECTS_OR_CONST,
    inexact,
    lawful,
)  # fmt: skip
from spmd.tensor.rules.random_ops import RANDOM_FILLS
from spmd.tensor.rules.rule import Law, Rule, laws

RuleFunction = Callable[[Call], Rule | None]

book: dict[str, RuleFunction] = {}


def rule_of(call: Call) -> Rule | None:
    """The rule of a call. None if there is none: then decompose the op, or replicate all its operands.

    Laws that the dtypes do not allow are left out: an integer has no average, a bool has no sum.
    """
    make_rule = book.get(call.name) or (families.pointwise if _is_pointwise(call) else None)
    rule = make_rule(call) if make_rule and _returns_tensors(call) else None
    if rule is None:
        return None
    _check_ties(call, rule)
    return replace(rule, laws=lawful(rule, call))


def _is_pointwise(call: Call) -> bool:
    """Whether the op is pointwise. Not if it draws random numbers: every shard would draw the same ones."""
    return is_pointwise(call.op) and torch.Tag.nondeterministic_seeded not in call.op.tags


def _returns_tensors(call: Call) -> bool:
    """Whether a call has tensors as operands and as results, and the op has no `out` argument."""
    written = any(a.is_out for a in _torch.arguments(call.op))
    return not written and bool(call.tensors) and any(o is not None for o in call.outs)


def _check_ties(call: Call, rule: Rule) -> None:
    """Dims of one factor must have the same number of units. Otherwise their shards would not belong together."""
    assert len(rule.ins) == len(call.tensors) and len(rule.outs) == len(call.outs), (call.op, str(rule))
    units: dict = {}
    for dims, x in zip((*rule.ins, *rule.outs), (*call.tensors, *call.outs), strict=True):
        for factor, size in zip(dims or (), x.shape if dims is not None else (), strict=True):
            if factor is not None:
                count, rest = divmod(size, factor.unit * factor.blocks)
                assert not rest and units.setdefault(factor.name, count) == count, (call.op, str(rule), x.shape)


# ---- the notation of the book -----------------------------------------------------------------


def add_rule(names: str, make_rule: RuleFunction) -> None:
    """Add the function that makes the rule of these ops, for each name."""
    for name in names.split():
        assert name not in book, f"{name} is in the book twice"
        book[name] = make_rule


def contract(names: str, equation: str, law: tuple[Law, ...]) -> None:
    add_rule(names, lambda call: families.contraction(call, equation, law))


def elementwise(law: tuple[Law, ...], names: str) -> None:
    add_rule(names, lambda call: families.pointwise(call, law))


def reduce_to(kind: str | None, names: str, law: tuple[Law, ...] = (), nonempty: bool = False) -> None:
    add_rule(names, lambda call: families.reduction(call, kind, law, nonempty))


def keep_whole(arg: str, names: str, law: tuple[Law, ...] = ()) -> None:
    add_rule(names, lambda call: families.one_dim_whole(call, arg, law))


def rearrange(names: str, source: Callable[[Call, int], list]) -> None:
    add_rule(names, lambda call: families.rearranged(call, lambda ndim: source(call, ndim)))


def batch_of(last: int, names: str) -> None:
    add_rule(names, lambda call: batches.batched(call, last))


def windows(last: int, names: str, law: tuple[Law, ...] = ()) -> None:
    add_rule(names, lambda call: batches.windows(call, last, law))


def averages(last: int, names: str) -> None:
    """Windows with weights. For integers the result is rounded, so it is not linear."""
    add_rule(names, lambda call: batches.windows(call, last, LINEAR if inexact(call.tensors[0].dtype) else ()))


def solve(right: str, law: tuple[Law, ...], names: str) -> None:
    add_rule(names, lambda call: batches.solved(call, right, law))


def look_up(table: str, what: str, names: str) -> None:
    add_rule(names, lambda call: batches.looked_up(call, table, what))


# ---- contraction ------------------------------------------------------------------------------

contract("mm",   "m k, k n -> m n", BILINEAR)
contract("bmm",  "b m k, b k n -> b m n", BILINEAR)
contract("mv",   "m k, k -> m", BILINEAR)
contract("dot vdot",  "k, k ->", BILINEAR)
contract("ger",  "m, n -> m n", BILINEAR)
add_rule("linear", products.linear)
add_rule("linear_backward", products.linear_backward)
add_rule("matmul", products.matmul)
add_rule("_trilinear", networks.trilinear)
add_rule("convolution", networks.convolution)
add_rule("convolution_backward", networks.convolution_backward)

# ---- pointwise: torch tags these ops, so the lines only say which laws hold -------------------

add_rule("add sub rsub", networks.addition)
elementwise(BILINEAR + LINEAR, "native_dropout_backward")
elementwise(COPIES, "clone alias detach lift_fresh positive _to_copy")
elementwise(COPIES_SECOND, "copy")
elementwise(LINEAR + FALLING, "neg")
elementwise(LINEAR, "conj_physical _conj_physical _conj _neg_view deg2rad rad2deg")
elementwise(RISING, """exp exp2 expm1 relu relu6 sigmoid tanh sinh asinh atan erf ceil floor round trunc
                       hardtanh hardsigmoid hardshrink""")  # not sign and nan_to_num: they turn NaN into a number
elementwise(RISING_IN_FIRST, "clamp clamp_min clamp_max")
elementwise(FALLING, "erfc special_erfcx")
elementwise(RISING_IN_EACH, "logaddexp logaddexp2")
elementwise(RISING_IN_EACH + MAX_OF_TWO, "maximum")  # not fmax: it drops NaN, which is greater than all numbers
elementwise(RISING_IN_EACH + MIN_OF_TWO, "minimum")
elementwise(LERP, "lerp")
elementwise(ADDCMUL, "addcmul")
elementwise(ADDCDIV, "addcdiv")
elementwise(LINEAR_IN_FIRST, """gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward
    mish_backward logit_backward elu_backward leaky_relu_backward hardtanh_backward hardsigmoid_backward
    hardswish_backward hardshrink_backward softshrink_backward softplus_backward log_sigmoid_backward""")
elementwise((), "hardswish log_sigmoid_forward floor_divide polar _prelu_kernel")
elementwise(REAL_AND_IMAGINARY, "complex")
elementwise(LINEAR_IN_FIRST, "_prelu_kernel_backward")
elementwise(SELECTS + SELECTS_OR_CONST, "where")
add_rule("mul", networks.multiplication)
add_rule("div true_divide", networks.division)
add_rule("masked_fill", networks.masked_fill)
add_rule("zeros_like ones_like full_like empty_like fill", families.like)
elementwise(IGNORES_VALUES + FILLS_ZERO, "zero")  # in place a Partial sum stays a Partial sum
add_rule("uniform normal normal_functional exponential cauchy log_normal geometric bernoulli random",
         lambda call: families.like(call) if call.op in RANDOM_FILLS else None)  # bernoulli(p) reads its operand
add_rule("new_zeros new_ones new_full new_empty", families.new)
add_rule("new_empty_strided", families.new_strided)

# ---- reduction --------------------------------------------------------------------------------

reduce_to("sum",     "sum", LINEAR)
reduce_to("sum",     "nansum count_nonzero")
reduce_to("max",     "amax", MAX_OVER, nonempty=True)
reduce_to("min",     "amin", MIN_OVER, nonempty=True)
reduce_to("product", "prod", PRODUCT_OVER)
reduce_to("max",     "any")  # of no elements it is False, the least value
reduce_to("min",     "all")  # of no elements it is True, the greatest value
reduce_to(None,      """argmax argmin logsumexp var std var_mean std_mean norm linalg_vector_norm median nanmedian
                        kthvalue mode aminmax hash_tensor""")
add_rule("histc", networks.histogram)
add_rule("_histogramdd_from_bin_cts", networks.histogram_of_points)
add_rule("segment_reduce _segment_reduce_backward", networks.segments)
add_rule("max", lambda call: networks.extremum(call, "max", MAX_OVER))
add_rule("min", lambda call: networks.extremum(call, "min", MIN_OVER))

# ---- some dims whole --------------------------------------------------------------------------

# The shards of a sort go to another dim. A sharded vector is gathered: a merge-exchange of values and places between n
# ranks has log n (log n + 1) / 2 rounds of a block, which is less from 128 ranks on, for 28 times the latency.
keep_whole("dim", "_softmax _log_softmax cumprod logcumsumexp cummax cummin sort topk argsort")
keep_whole("dim", "_softmax_backward_data _log_softmax_backward_data", LINEAR_IN_FIRST)
keep_whole("dim", "cumsum", LINEAR)
add_rule("triu tril", lambda call: families.last_dims_whole(call, 2, COPIES))  # zeros are their own sum and product

# ---- rearrangements ---------------------------------------------------------------------------

rearrange("permute",   movement.permuted)
rearrange("transpose", movement.transposed)
rearrange("t",         movement.reversed_dims)
rearrange("unsqueeze", movement.unsqueezed)
rearrange("unbind select", movement.without_dim)
rearrange("split",     movement.with_dim_whole)
add_rule("split_with_sizes unsafe_split_with_sizes", movement.divided)
rearrange("chunk narrow tensor_split unsafe_split unsafe_chunk", movement.with_dim_whole)
rearrange("diagonal",  movement.diagonal)
add_rule("diag_embed", movement.diagonal_of)
add_rule("diagonal_backward", movement.diagonal_gradient)
add_rule("diagonal_scatter", movement.diagonal_replaced)
add_rule("squeeze",  movement.squeezed)
add_rule("slice",    movement.sliced)
add_rule("view reshape _unsafe_view", movement.viewed)
add_rule("expand",   movement.expanded)
add_rule("repeat",   movement.repeated)
add_rule("slice_backward select_backward", movement.slice_gradient)
keep_whole("dims", "flip", COPIES)
add_rule("roll",     movement.rolled)
add_rule("constant_pad_nd", movement.padded)
add_rule("cat",      movement.concatenated)
add_rule("stack",    movement.stacked)

# ---- indexing ---------------------------------------------------------------------------------

add_rule("embedding",   indexing.embedding)
add_rule("embedding_dense_backward", indexing.embedding_backward)
add_rule("gather",      indexing.gathered)
add_rule("scatter",     indexing.scattered)
add_rule("scatter_add", indexing.scatter_added)
add_rule("index_select", indexing.selected)
add_rule("index_add",   indexing.index_added)
add_rule("index_copy",  indexing.index_copied)
add_rule("index_fill",  indexing.index_filled)
add_rule("index",       indexing.indexed)
add_rule("index_put",   indexing.index_put)

# ---- networks ---------------------------------------------------------------------------------

add_rule("native_layer_norm _fused_rms_norm", networks.normalised)
add_rule("native_layer_norm_backward _fused_rms_norm_backward", networks.normalised_backward)
add_rule("""native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
         _batch_norm_with_update _batch_norm_with_update_functional""", networks.batch_normed)
add_rule("native_batch_norm_backward", networks.batch_normed_backward)
add_rule("nll_loss_forward nll_loss2d_forward", networks.nll)
add_rule("nll_loss_backward nll_loss2d_backward", networks.nll_backward)
add_rule("mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss", networks.pointwise_loss)
add_rule("""mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward
         soft_margin_loss_backward""", networks.pointwise_loss_backward)
add_rule("""multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward
         multilabel_margin_loss_backward""", networks.row_loss)
add_rule("""_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
         _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention""", networks.attention)
add_rule("""_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward
         _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward""",
         networks.attention_backward)

# ---- batches: of matrices, signals, images ----------------------------------------------------

batch_of(2, """linalg_inv_ex linalg_cholesky_ex cholesky cholesky_inverse _linalg_svd _linalg_eigh
    linalg_eig linalg_qr linalg_lu linalg_lu_factor_ex lu_unpack linalg_ldl_factor_ex _linalg_det
    _linalg_slogdet linalg_matrix_exp linalg_householder_product linalg_pinv geqrf""")
solve("B",    laws("sum avg: r p -> p r..."), "_linalg_solve_ex linalg_solve_triangular")
solve("B",    laws("sum avg: r r p -> p"),    "linalg_lu_solve linalg_ldl_solve")
solve("input3", laws("sum avg: r r p -> p"),  "ormqr")
solve("self", laws("sum avg: p r -> p r..."), "cholesky_solve triangular_solve")
add_rule("_fft_r2c _fft_c2c _fft_c2r", batches.transformed)
add_rule("view_as_real", batches.as_real)
add_rule("view_as_complex", batches.as_complex)
add_rule("unfold", batches.unfolded)
add_rule("unfold_backward", batches.folded)
add_rule("slice_scatter select_scatter", batches.scattered_into)
for _n, _smooth in ((1, "linear"), (2, "bilinear bicubic"), (3, "trilinear")):
    _scaled = [f"upsample_{kind}{_n}d" for kind in ("nearest", *_smooth.split())] + [f"_upsample_nearest_exact{_n}d"]
    _padded = [f"reflection_pad{_n}d", f"replication_pad{_n}d"]
    windows(_n, " ".join(_padded), COPIES)
    averages(_n, " ".join(_scaled))
    windows(_n, " ".join(f"{name}_backward" for name in _padded + _scaled), LINEAR_IN_FIRST)
for _n in (2, 3):
    windows(_n, f"max_pool{_n}d_with_indices adaptive_max_pool{_n}d")
    averages(_n, f"_adaptive_avg_pool{_n}d")
    add_rule(f"avg_pool{_n}d avg_pool{_n}d_backward", lambda call, n=_n: batches.pooled(call, n))
    windows(_n, f"""max_unpool{_n}d max_pool{_n}d_with_indices_backward adaptive_max_pool{_n}d_backward
                    _adaptive_avg_pool{_n}d_backward""", LINEAR_IN_FIRST)
averages(2, "_upsample_bilinear2d_aa _upsample_bicubic2d_aa")
windows(2, "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward", LINEAR_IN_FIRST)
add_rule("pixel_shuffle pixel_unshuffle", batches.shuffled)
add_rule("grid_sampler_2d grid_sampler_3d", batches.resampled)
add_rule("grid_sampler_2d_backward grid_sampler_3d_backward",
         lambda call: batches.leading_dims_free(call, 1, nonempty=True))
add_rule("channel_shuffle native_channel_shuffle", lambda call: families.dims_whole(call, [1], COPIES))
add_rule("_weight_norm_interface", networks.weight_normed)
add_rule("_weight_norm_interface_backward", networks.weight_normed)
add_rule("im2col col2im",
         lambda call: batches.leading_dims_free(call, 1 if call.tensors[0].ndim > 2 else 0, nonempty=True))

# ---- look-ups ---------------------------------------------------------------------------------

look_up("test_elements", "elements", "isin")
look_up("sorted_sequence", "self", "searchsorted")
look_up("boundaries", "self", "bucketize")
look_up("self", "index", "take")
add_rule("_cdist_forward", batches.distances)
add_rule("_cdist_backward", batches.distances_backward)
add_rule("_embedding_bag _embedding_bag_forward_only", batches.bags)
add_rule("_embedding_bag_dense_backward", batches.bags_backward)
add_rule("_embedding_bag_per_sample_weights_backward", batches.bag_weights)
keep_whole("dim", "_safe_softmax glu glu_backward")
add_rule("linalg_cross", batches.crossed)
add_rule("renorm", batches.renormed)
keep_whole("dims", "rot90")
add_rule("scatter_reduce", indexing.scatter_reduced)
add_rule("index_reduce", indexing.index_reduced)
add_rule("_unsafe_index", indexing.indexed)
