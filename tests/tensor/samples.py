"""Samples of every op in the book, with cases in which a rule is easily wrong.

The sizes: 4 and 6 divide by 2, 5 and 7 do not, 1 and 2 leave ranks empty on 3.
"""

from __future__ import annotations

import torch

from tests.tensor.oracle import Sample

aten = torch.ops.aten


def f(*shape, dtype=torch.float32):
    """Random numbers, none of them near zero or tied."""
    return torch.randn(shape).to(dtype)


def d(*shape):
    return f(*shape, dtype=torch.float64)


def pos(*shape):
    return torch.rand(shape) * 0.8 + 0.1


def i(*shape, high=5, dtype=torch.int64):
    return torch.randint(0, high, shape).to(dtype)


def b(*shape):
    return torch.rand(shape) < 0.5


def s(name: str, *args, **kwargs) -> Sample:
    """`s("sum.dim_IntList", x, [0])`; without an overload, the default one."""
    base, _, overload = name.partition(".")
    return Sample(getattr(getattr(aten, base), overload or "default"), args, kwargs)


def contractions():
    yield s("mm", f(4, 5), f(5, 3))
    yield s("mm", f(1, 2), f(2, 6))
    yield s("mm", f(5, 4), f(4, 4))
    yield s("mm", i(4, 5), i(5, 3))
    yield s("mm", f(4, 0), f(0, 3))
    yield s("mm", f(5, 4).t(), f(5, 3))
    yield s("mm", f(4, 6, dtype=torch.bfloat16), f(6, 3, dtype=torch.bfloat16))
    yield s("bmm", f(2, 4, 5), f(2, 5, 3))
    yield s("bmm", f(1, 3, 4), f(1, 4, 1))
    yield s("mv", f(4, 5), f(5))
    yield s("dot", f(5), f(5))
    yield s("vdot", f(5), f(5))
    yield s("vdot", f(4, dtype=torch.complex64), f(4, dtype=torch.complex64))
    yield s("ger", f(5), f(4))
    yield s("linear", f(4, 2, 5), f(3, 5))
    yield s("linear", i(4, 5), i(3, 5))
    yield s("matmul", f(4, 2, 5), f(5, 3))
    yield s("matmul", f(4, 5), f(2, 5, 3))
    yield s("matmul", f(2, 4, 5), f(5))
    yield s("matmul", f(5), f(2, 5, 3))
    yield s("matmul", f(2, 1, 4, 5), f(3, 5, 2))
    yield s("matmul", f(3, 0, 5), f(1, 5, 4))
    for mask in ([True, True, False], [True, False, False]):
        yield s("linear_backward", f(4, 2, 5), f(4, 2, 3), f(3, 5), mask)
    gradient = f(4, 2, 3)
    yield s("linear_backward", f(4, 2, 5), gradient, gradient, [False, True, False])
    yield s("linear_backward", f(4, 5), f(4, 3), f(3, 5), [True, True, False])
    yield s("_trilinear", f(4, 3), f(2, 3, 5), f(4, 5), [1, 3], [0], [1, 2], [2, 3])
    yield s("_trilinear", f(4, 3), f(4, 2), f(4, 5), [1, 3], [2, 3], [1, 2], [0])
    stride, zero = [1, 1], [0, 0]
    for bias in (None, f(4)):
        yield s("convolution", f(4, 4, 7, 7), f(4, 4, 3, 3), bias, stride, zero, stride, False, zero, 1)
    yield s("convolution", f(4, 6, 7, 7), f(6, 3, 3, 3), None, stride, zero, stride, False, zero, 2)
    yield s("convolution", f(4, 6, 7, 7), f(6, 3, 3, 3), f(3), stride, zero, stride, True, zero, 1)
    x, w, g = f(4, 2, 7, 7), f(6, 2, 3, 3), f(4, 6, 5, 5)
    for mask in ([True, True, False], [True, True, True], [False, True, True], [True, False, False]):
        yield s("convolution_backward", g, x, w, [6], stride, zero, stride, False, zero, 1, mask)
        yield s("convolution_backward", x, g, w, [2], stride, zero, stride, True, zero, 1, mask)
    yield s("convolution", g, w, None, stride, zero, stride, True, zero, 1)
    yield s("convolution", g, w, f(2), stride, zero, stride, True, zero, 1)
    yield from _side_by_side(stride, zero)


def _side_by_side(one, zero):
    """Convolutions whose windows do not overlap: 1 x 1, patches, with gaps, transposed, in groups."""
    x, step = f(2, 3, 8, 6), [2, 2]
    yield s("convolution", x, f(4, 3, 1, 1), None, one, zero, one, False, zero, 1)
    yield s("convolution", x, f(4, 3, 2, 2), f(4), step, zero, one, False, zero, 1)
    yield s("convolution", x, f(4, 3, 1, 2), None, step, [0, 1], one, False, zero, 1)
    yield s("convolution", f(2, 3, 8), f(3, 1, 2), None, [4], [0], [2], False, [0], 3)
    yield s("convolution", x, f(3, 4, 2, 2), f(4), step, zero, one, True, zero, 1)
    yield s("convolution", x, f(3, 4, 1, 1), None, step, zero, one, True, one, 1)
    for mask in ([True, True, False], [True, True, True], [False, True, False]):
        yield s("convolution_backward", f(2, 4, 4, 3), x, f(4, 3, 2, 2), [4], step, zero, one, False, zero, 1, mask)
        yield s("convolution_backward", f(2, 4, 16, 12), x, f(3, 4, 2, 2), [4], step, zero, one, True, zero, 1, mask)


def algebra():
    broadcasts = ((4, 5), (4, 5)), ((4, 5), (5,)), ((4, 1), (1, 5)), ((3, 1, 2), (5, 1)), ((2, 1), (1,)), ((4,), ())
    for x, y in [(f(*left), f(*right)) for left, right in broadcasts]:
        for name in ("add", "sub", "mul", "div"):
            yield s(f"{name}.Tensor", x, y)
        yield s("rsub.Tensor", x, y)
        yield s("where.self", x > 0, x, y)
        yield s("maximum", x, y)
        yield s("minimum", x, y)
    yield s("add.Tensor", f(4, 5), f(4, 5), alpha=2)
    yield s("add.Tensor", f(4, 5), f(4, 5), alpha=-1.5)
    yield s("add.Tensor", f(4, 5), d(4, 5))
    yield s("add.Tensor", i(4, 5), f(4, 5))
    yield s("add.Tensor", i(4, 5), i(5))
    yield s("add.Tensor", i(4, 5, dtype=torch.uint8), i(4, 5, dtype=torch.int32))
    yield s("mul.Tensor", i(4, 5, dtype=torch.uint8), i(4, 5, dtype=torch.uint8))
    yield s("mul.Tensor", b(4, 5), b(4, 5))
    yield s("mul.Tensor", f(4, 5), b(4, 5))
    yield s("mul.Tensor", f(4, 5, dtype=torch.complex64), f(4, 5))
    for name in ("add.Scalar", "sub.Scalar", "rsub.Scalar", "mul.Scalar", "div.Scalar"):
        yield s(name, f(4, 5), 2.5)
        yield s(name, f(5), -2)
    yield s("div.Tensor", i(4, 5), i(5) + 1)
    yield s("div.Tensor_mode", f(4, 5), f(5), rounding_mode="floor")
    yield s("div.Tensor_mode", f(4, 5), f(5), rounding_mode=None)
    yield s("div.Scalar_mode", f(4, 5), 2, rounding_mode="trunc")
    yield s("true_divide.Tensor", f(4, 5), f(5))
    yield s("neg", f(4, 5))
    yield s("neg", i(4, 5, dtype=torch.uint8))
    yield s("neg", i(4, 5))
    for x in (f(4, 5), f(1, 2), i(4, 5), b(5), f(6, 1).expand(6, 3)):
        for name in ("clone", "alias", "detach", "lift_fresh", "positive"):
            if not (name == "positive" and x.dtype == torch.bool):
                yield s(name, x)
    for src, dst in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.int64),
                     (torch.int64, torch.float32), (torch.float32, torch.bool), (torch.int64, torch.int8),
                     (torch.bool, torch.float32), (torch.float32, torch.complex64), (torch.int64, torch.int64)):
        yield s("_to_copy", (f(4, 5) * 3).to(src), dtype=dst)
    yield s("copy", f(4, 5), f(5))
    yield s("copy", f(4, 5), i(4, 5))
    yield s("copy", i(4, 5), f(4, 5))
    yield s("_neg_view", f(4, 5))
    for name in ("conj_physical", "_conj_physical", "_conj"):
        yield s(name, f(4, 5, dtype=torch.complex64))
    for name in ("deg2rad", "rad2deg"):
        yield s(name, f(4, 5))
    for name in """exp exp2 expm1 relu relu6 sigmoid tanh sinh asinh atan erf ceil floor round trunc sign hardtanh
                   hardsigmoid hardshrink nan_to_num erfc special_erfcx hardswish abs sqrt cos gelu silu""".split():
        yield s(name, f(4, 5))
    yield s("clamp", f(4, 5), -0.5, 0.5)
    yield s("clamp.Tensor", f(4, 5), f(5), f(4, 1))
    yield s("clamp_min", f(4, 5), 0.1)
    yield s("clamp_max.Tensor", f(4, 5), f(5))
    yield s("clamp_min", i(4, 5), 2)
    for name in ("logaddexp", "logaddexp2", "fmax", "fmin"):
        yield s(name, f(4, 5), f(5))
    yield s("maximum", i(4, 5), i(5))
    yield s("maximum", b(4, 5), b(5))
    yield s("lerp.Scalar", f(4, 5), f(5), 0.3)
    yield s("lerp.Tensor", f(4, 5), f(5), f(4, 1))
    for name in ("addcmul", "addcdiv"):
        yield s(name, f(4, 5), f(5), f(4, 1) + 4, value=0.5)
        yield s(name, f(4, 5), f(4, 5), f(4, 5) + 4)
    yield s("where.ScalarOther", b(4, 5), f(4, 5), 2.0)
    yield s("where.ScalarSelf", b(4, 5), 2.0, f(5))
    yield s("where.self", b(4, 5), i(4, 5), f(5))
    yield s("masked_fill.Scalar", f(4, 5), b(5), 2.0)
    yield s("masked_fill.Scalar", f(4, 5), b(4, 1), 0)
    yield s("masked_fill.Scalar", f(4, 5), b(4, 5), float("-inf"))
    yield s("masked_fill.Tensor", f(4, 5), b(4, 5), f())
    yield s("eq.Tensor", i(4, 5), i(5))
    yield s("native_dropout_backward", f(4, 5), b(4, 5), 2.0)
    yield s("floor_divide", f(4, 5), f(5))
    yield s("complex", f(4, 5), f(5))
    yield s("polar", pos(4, 5), f(4, 5))
    for w in (f(1, 6, 1), f(1, 1, 1)):
        yield s("_prelu_kernel", f(4, 6, 5), w)
        yield s("_prelu_kernel_backward", f(4, 6, 5), f(4, 6, 5), w)


def gradients():
    g, x = f(4, 5), f(4, 5)
    for name in ("gelu_backward", "silu_backward", "mish_backward", "hardsigmoid_backward", "hardswish_backward"):
        yield s(name, g, x)
    yield s("gelu_backward", g, x, approximate="tanh")
    yield s("sigmoid_backward", g, pos(4, 5))
    yield s("tanh_backward", g, pos(4, 5))
    yield s("logit_backward", g, pos(4, 5), None)
    yield s("threshold_backward", g, x, 0)
    yield s("elu_backward", g, 1.0, 1.0, 1.0, False, x)
    yield s("leaky_relu_backward", g, x, 0.1, False)
    yield s("hardtanh_backward", g, x, -1, 1)
    yield s("hardshrink_backward", g, x, 0.5)
    yield s("softshrink_backward", g, x, 0.5)
    yield s("softplus_backward", g, x, 1, 20)
    yield s("log_sigmoid_forward", x)
    yield s("log_sigmoid_backward", g, x, aten.log_sigmoid_forward(x)[1])
    for dim in (0, -1):
        yield s("_softmax_backward_data", g, torch.softmax(x, dim), dim, torch.float32)
        yield s("_log_softmax_backward_data", g, torch.log_softmax(x, dim), dim, torch.float32)


def factories():
    for x in (f(4, 5), i(1, 2), b(3)):
        for name in ("zeros_like", "ones_like", "empty_like", "zero"):
            yield s(name, x)
        yield s("full_like", x, 1)
        yield s("fill.Scalar", x, 1)
        for name in ("new_zeros", "new_ones", "new_empty"):
            yield s(name, x, list(x.shape))
            yield s(name, x, [7])
        yield s("new_full", x, [2, 2], 3)
    yield s("fill.Tensor", f(4, 5), f())
    yield s("new_empty_strided", f(4, 5), [4, 5], [7, 1])
    yield s("new_empty_strided", f(4, 5), [2], [3])
    yield s("zeros_like", f(4, 5), dtype=torch.int64)


def reductions():
    yield s("histc", f(5, 6), 4, -1.0, 1.0)
    yield s("histc", f(5, 6), 4)
    for x, weight in ((f(5, 2), None), (f(4, 2), pos(4)), (f(3, 4, 2), None)):
        for options in ({}, {"range": [-1.0, 1.0, -2.0, 2.0]}, {"range": [-1.0, 1.0, -2.0, 2.0], "density": True}):
            yield s("_histogramdd_from_bin_cts", x, [3, 4], weight=weight, **options)
    for kind in ("sum", "mean", "max"):
        lengths = torch.tensor([2, 0, 3])
        out = aten.segment_reduce(f(5, 4, 2), kind, lengths=lengths)
        yield s("segment_reduce", f(5, 4, 2), kind, lengths=lengths)
        yield s("segment_reduce", f(5), kind, lengths=lengths)
        yield s("_segment_reduce_backward", f(3, 4, 2), out, f(5, 4, 2), kind, lengths=lengths)
    for x in (f(4, 5), f(1, 2), i(5, 2), b(4, 3), f(4, 5).t(), f(), f(0, 4)):
        for name in ("sum", "nansum", "prod", "any", "all"):
            yield s(name, x)
        yield s("count_nonzero", x)
    for x in (f(4, 5, 2), i(5, 2, 1)):
        for dim in ([0], [-1], [0, 1], [], None):
            for keepdim in (False, True):
                yield s("sum.dim_IntList", x, dim, keepdim)
                yield s("amax", x, dim or [], keepdim)
                yield s("amin", x, dim or [], keepdim)
        for name in ("prod.dim_int", "any.dim", "all.dim"):
            yield s(name, x, 1)
            yield s(name, x, -3, True)
    yield s("any.dims", b(4, 5, 2), [0, 2])
    yield s("nansum", f(4, 5), [1])
    yield s("count_nonzero.dim_IntList", i(4, 5, high=2), [0])
    yield s("sum.dim_IntList", f(4, 5), [0], dtype=torch.float64)
    yield s("sum.dim_IntList", f(4, 5) * 4, [0], dtype=torch.int64)
    yield s("sum", i(4, 5, dtype=torch.int32))
    yield s("sum", i(4, 5, dtype=torch.uint8), dtype=torch.uint8)
    yield s("amax", b(4, 5), [0])
    for name in ("max", "min"):
        yield s(name, f(4, 5))
        yield s(name, i(5))
        yield s(f"{name}.dim", f(4, 5), 0)
        yield s(f"{name}.dim", f(4, 5), -1, True)
        yield s(f"{name}.other", f(4, 5), f(5))
    x = f(4, 5, 2)
    for name in ("argmax", "argmin"):
        yield s(name, x)
        yield s(name, x, 1)
        yield s(name, x, -1, True)
    yield s("logsumexp", x, [0, 2])
    for name in ("var", "std", "var_mean", "std_mean"):
        yield s(f"{name}.correction", x, [1])
        yield s(f"{name}.correction", x, None, correction=0, keepdim=True)
    yield s("norm.ScalarOpt_dim", x, 2, [1])
    yield s("norm.Scalar", x, 2)
    yield s("linalg_vector_norm", x)
    yield s("linalg_vector_norm", x, 3, [0], True)
    yield s("median", x)
    yield s("nanmedian", x)
    for name in ("median.dim", "nanmedian.dim", "mode"):
        yield s(name, x, 1)
    yield s("kthvalue", x, 2, 1)
    yield s("aminmax", x, dim=1)
    yield s("hash_tensor", x, [1])


def one_dim_whole():
    for x in (f(4, 5), f(5, 1, 2), i(4, 5).float()):
        for dim in (0, -1):
            yield s("_softmax", x, dim, False)
            yield s("_log_softmax", x, dim, False)
            for name in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort"):
                yield s(name, x, dim)
            yield s("topk", x, 1, dim)
    yield s("cumsum", i(4, 5, dtype=torch.int32), 0)
    yield s("cumsum", f(4, 5) * 4, 0, dtype=torch.int64)
    for name in ("triu", "tril"):
        yield s(name, f(4, 5))
        yield s(name, f(2, 4, 5), 1)
        yield s(name, b(3, 3), -1)


def views():
    x = f(4, 5, 6)
    for dims in ([2, 0, 1], [-1, 1, 0], [0, 1, 2]):
        yield s("permute", x, dims)
    yield s("transpose.int", x, 0, -1)
    yield s("transpose.int", f(), 0, -1)
    yield s("t", f(4, 5))
    yield s("t", f(5))
    for dim in (0, 1, -1, 3):
        yield s("unsqueeze", x, dim)
    y = f(4, 1, 5, 1)
    for dims in ([1], [1, 3], [-1], [], [0, 1]):
        yield s("squeeze.dims", y, dims)
    yield s("squeeze.dims", f(), [0])
    yield s("unbind.int", f(4, 3), 1)
    for dim in (0, -1):
        yield s("select.int", x, dim, 2)
        yield s("select.int", x, dim, -1)
        yield s("slice.Tensor", x, dim, 1, 3)
        yield s("slice.Tensor", x, dim, 0, 9223372036854775807)
        yield s("slice.Tensor", x, dim)
        yield s("slice.Tensor", x, dim, 0, 9223372036854775807, 2)
        yield s("slice.Tensor", x, dim, -2)
        yield s("slice.Tensor", x, dim, 0, -1)
        yield s("slice.Tensor", x, dim, 3, 3)
        yield s("split.Tensor", x, 2, dim)
        yield s("split.Tensor", x, 100, dim)
        yield s("chunk", x, 3, dim)
        yield s("unsafe_split.Tensor", x, 2, dim)
        yield s("unsafe_chunk", x, 3, dim)
        yield s("narrow", x, dim, 1, 2)
        yield s("flip", x, [dim])
        yield s("roll", x, [2], [dim])
    yield s("tensor_split.sections", x, 3, 1)
    yield s("split_with_sizes", x, [1, 4], 1)
    yield s("unsafe_split_with_sizes", x, [1, 4], 1)
    for offset, dims in ((0, (0, 1)), (1, (0, -1)), (-1, (2, 1))):
        yield s("diag_embed", f(4, 5), offset, *dims)
        yield s("diagonal_scatter", x, f(*aten.diagonal(x, offset, *dims).shape), offset, *dims)
        yield s("diagonal_backward", f(*aten.diagonal(x, offset, *dims).shape), [4, 5, 6], offset, *dims)
    yield s("flip", x, [])
    yield s("flip", x, [0, 2])
    yield s("roll", x, [3])
    yield s("roll", x, [1, 2], [0, 2])
    yield s("diagonal", x)
    yield s("diagonal", x, 1, 0, -1)
    for src, dst in RESHAPES:
        for name in ("view", "_unsafe_view", "reshape"):
            yield s(name, f(*src), list(dst))
    yield s("view", f(4, 6), [-1, 3])
    yield s("view", i(6, 4), [24])
    yield s("view", f(4, 6).t(), [3, 2, 4])
    yield s("view.dtype", f(4, 6), torch.int32)
    stretched = ((4, 1), [4, 3]), ((4, 1), [2, -1, 5]), ((1,), [1]), ((5,), [4, 5]), ((1, 5), [1, 5]), ((), [3])
    for shape, size in stretched:
        yield s("expand", f(*shape), size)
    yield s("repeat", f(4, 5), [1, 2])
    yield s("repeat", f(4, 5), [3, 1, 1])
    yield s("repeat", f(4, 5), [0, 1])
    for dim in (0, -1):
        shape = [4, 5]
        yield s("slice_backward", f(*[2 if k == dim % 2 else shape[k] for k in range(2)]), shape, dim, 1, 3, 1)
        yield s("select_backward", f(shape[1 - dim % 2]), shape, dim, 2)
    yield s("constant_pad_nd", f(4, 5), [1, 2])
    yield s("constant_pad_nd", f(4, 5), [0, 0, 1, 0], 2.5)
    yield s("constant_pad_nd", f(4, 5, 2), [-1, 0])
    for dim in (0, -1):
        yield s("cat", [f(4, 5), f(4, 5)], dim)
        yield s("stack", [f(4, 5), f(4, 5), f(4, 5)], dim)
    yield s("cat", [f(4, 5), f(4, 2), f(4, 1)], 1)
    yield s("cat", [f(4, 5), f(0)], 1)
    yield s("cat", [f(0), f(4, 5), f(4, 2)], 1)
    yield s("cat", [f(0), i(4, 5)], 1)
    yield s("cat", [f(4, 5), i(4, 5)], 1)
    yield s("cat", [i(3), i(2)])
    yield s("cat", [b(3), b(2)])
    yield s("stack", [f(), f()])


RESHAPES = [
    ((4, 6), (24,)), ((24,), (4, 6)), ((6, 5), (30,)), ((30,), (6, 5)), ((5, 4), (2, 10)), ((4, 6), (8, 3)),
    ((6, 4), (8, 3)), ((2, 3, 4), (6, 4)), ((2, 3, 4), (2, 12)), ((4, 1, 6), (4, 6)), ((4, 6), (1, 4, 1, 6, 1)),
    ((1, 4), (4,)), ((1, 1), ()), ((), (1,)), ((0, 4), (2, 0)), ((2, 1, 6), (2, 2, 3)), ((3, 5, 4), (15, 2, 2)),
    ((12, 2), (4, 6)), ((2, 12), (8, 3)), ((1,), (1, 1)),
]  # fmt: skip


def indexing():
    w, idx = f(7, 4), i(3, 5)
    yield s("embedding", w, idx)
    yield s("embedding", w, i(6), 2)
    yield s("embedding", w, i())
    for by_freq in (False, True):
        for padding in (-1, 2):
            yield s("embedding_dense_backward", f(3, 5, 4), idx, 7, padding, by_freq)
            yield s("embedding_dense_backward", f(4, 5), i(4), 7, padding, by_freq)
    yield s("embedding_dense_backward", f(4), i(), 7, -1, False)
    x = f(4, 5, 2)
    for dim in (0, 1, -1):
        yield s("gather", x, dim, i(4, 5, 2, high=2))
        yield s("gather", x, dim, i(2, 3, 1, high=2))
        index = torch.argsort(f(4, 5, 2), dim)
        yield s("scatter.src", x, dim, index, f(4, 5, 2))
        yield s("scatter.src", x, dim, index[:2], f(4, 5, 2))
        yield s("scatter.value", x, dim, index, 2.5)
        yield s("scatter.value", x, dim, index, 0)
        yield s("scatter.reduce", x, dim, index, f(4, 5, 2), reduce="add")
        yield s("scatter.value_reduce", x, dim, index, 2.0, reduce="multiply")
        yield s("scatter_add", x, dim, i(4, 5, 2, high=2), f(4, 5, 2))
        yield s("scatter_add", x, dim, i(2, 3, 1, high=2), f(4, 5, 2))
        yield s("index_select", x, dim, i(3, high=2))
        n = x.shape[dim]
        shape = [2 if k == dim % 3 else x.shape[k] for k in range(3)]
        yield s("index_add", x, dim, i(2, high=n), f(*shape))
        yield s("index_add", x, dim, i(2, high=n), f(*shape), alpha=2)
        yield s("index_copy", x, dim, torch.randperm(n)[:2], f(*shape))
        yield s("index_fill.int_Scalar", x, dim, i(2, high=n), 0)
        yield s("index_fill.int_Scalar", x, dim, i(2, high=n), 2.5)
        yield s("index_fill.int_Tensor", x, dim, i(2, high=n), f())
    yield s("gather", f(), 0, i(1, high=1))
    yield s("gather", f(3), 0, i(high=3))
    yield s("gather", i(4, 5), 1, i(4, 7))
    yield s("index_select", f(), 0, i(1, high=1))
    yield s("index_select", f(5), 0, i(high=5))
    a, c = i(3, high=4), i(3, high=2)
    square = i(2, 2, high=2)
    for indices in ([a], [None, c], [a, c], [a, None, c], [i(2, 1, high=4), c], [None, None, square], [i(high=4)]):
        x = f(4, 5, 2)
        seen = aten.index(x, indices)
        yield s("index.Tensor", x, indices)
        yield s("index_put", x, indices, f(*seen.shape), True)
        yield s("index_put", x, indices, f(), True)
        yield s("index_put", x, indices, f(1, *seen.shape[1:]) if seen.ndim > 1 else f(1), True)
        yield s("index_put", x, indices, f(), False)
    yield s("index_put", f(4, 5), [torch.tensor([2, 0])], f(2, 5))
    for make in (i, b):
        yield s("scatter_add", make(4, 5), 1, i(4, 7), make(4, 7))
        yield s("index_put", make(4, 5), [i(6, high=4)], make(6, 5), True)
    yield s("index_add", i(6), 0, i(7, high=6), i(7))
    yield s("scatter_add", f(6), 0, i(7, high=6), f(9))
    yield s("index.Tensor", f(4, 5), [b(4)])


def networks():
    x, w, bias = f(4, 5, 6), f(6), f(6)
    for shape, weight, offset in (([6], w, bias), ([6], None, None), ([6], w, None), ([5, 6], f(5, 6), f(5, 6))):
        _, mean, rstd = aten.native_layer_norm(x, shape, weight, offset, 1e-5)
        yield s("native_layer_norm", x, shape, weight, offset, 1e-5)
        for mask in ([True, True, True], [True, False, False], [True, False, True]):
            mask = [m and given is not None for m, given in zip(mask, (x, weight, offset), strict=True)]
            yield s("native_layer_norm_backward", f(4, 5, 6), x, shape, mean, rstd, weight, offset, mask)
        yield s("_fused_rms_norm", x, shape, weight, 1e-5)
    yield from batch_norms()
    yield from losses()
    yield from margin_losses()
    yield from attention()


def batch_norms():
    """In training and in evaluation, with and without running statistics and weights."""
    for shape in ((4, 6), (5, 4, 3), (2, 1, 3, 2)):
        x, w, mean, var = f(*shape), f(shape[1]), f(shape[1]), pos(shape[1])
        for training, given in ((True, (w, w, mean, var)), (True, (None,) * 4), (False, (w, None, mean, var))):
            clones = [None if t is None else t.clone() for t in given]
            _, save, rstd = aten.native_batch_norm(x, *clones, training, 0.1, 1e-5)
            yield s("native_batch_norm", x, *given, training, 0.1, 1e-5)
            stats = given[2:], save, rstd, training, 1e-5
            for mask in ([True, True, True], [True, False, False], [False, True, True]):
                yield s("native_batch_norm_backward", f(*shape), x, given[0], *stats[0], *stats[1:], mask)
            if given[2] is not None:
                yield s("_native_batch_norm_legit", x, *given, training, 0.1, 1e-5)
                yield s("_native_batch_norm_legit_functional", x, *given, training, 0.1, 1e-5)
        yield s("_native_batch_norm_legit.no_stats", x, w, w, True, 0.1, 1e-5)
        yield s("_batch_norm_with_update", x, w, w, mean, var, 0.1, 1e-5)
        yield s("_batch_norm_with_update_functional", x, w, w, mean, var, 0.1, 1e-5)


def losses():
    for scores, target in ((f(5, 7), i(5)), (f(4, 7), i(4)), (f(2, 3, 4, 1), i(2, 4, 1, high=3)), (f(7), i())):
        name = "nll_loss" if scores.ndim < 3 else "nll_loss2d"
        target.view(-1)[:1] = 3 if scores.ndim == 1 else 1
        for weight in (None, pos(scores.shape[1] if scores.ndim > 1 else 7)):
            for reduction in (0, 1, 2):
                for ignored in (-100, 1):
                    loss, total = getattr(aten, f"{name}_forward")(scores, target, weight, reduction, ignored)
                    yield s(f"{name}_forward", scores, target, weight, reduction, ignored)
                    yield s(f"{name}_backward", f(*loss.shape), scores, target, weight, reduction, ignored, total)
    x, y = pos(4, 5), pos(4, 5)
    for reduction in (0, 1, 2):
        g = f(4, 5) if reduction == 0 else f()
        yield s("mse_loss", x, y, reduction)
        yield s("mse_loss_backward", g, x, y, reduction)
        yield s("smooth_l1_loss", x, y, reduction, 0.3)
        yield s("smooth_l1_loss_backward", g, x, y, reduction, 0.3)
        yield s("huber_loss", x, y, reduction, 0.3)
        yield s("huber_loss_backward", g, x, y, reduction, 0.3)
        yield s("soft_margin_loss", x, y, reduction)
        yield s("soft_margin_loss_backward", g, x, y, reduction)
        for weight in (None, pos(5)):
            yield s("binary_cross_entropy", x, y, weight, reduction)
            yield s("binary_cross_entropy_backward", g, x, y, weight, reduction)


def margin_losses():
    x, one, many = f(4, 5), i(4), i(4, 5) - 1
    for reduction in (0, 1, 2):
        g = f(4) if reduction == 0 else f()
        for weight in (None, pos(5)):
            yield s("multi_margin_loss", x, one, 1, 1.0, weight, reduction)
            yield s("multi_margin_loss_backward", g, x, one, 2, 0.5, weight, reduction)
        _, is_target = aten.multilabel_margin_loss_forward(x, many, reduction)
        yield s("multilabel_margin_loss_forward", x, many, reduction)
        yield s("multilabel_margin_loss_backward", g, x, many, reduction, is_target)
    yield s("multi_margin_loss", f(5), i(), 1, 1.0, None, 0)
    yield s("multi_margin_loss", f(1, 1), i(1, high=1), 1, 1.0, None, 0)


def attention():
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    masks = [f(*lead, 3, 5) for lead in ((), (1, 1), (4, 1), (4, 6), (1, 6))]
    for t, causal, mask in ((3, True, None), (5, False, None), *((5, False, mask) for mask in masks)):
        q, k, v = f(4, 6, 3, 8), f(4, 6, t, 8), f(4, 6, t, 8)
        out, lse = forward(q, k, v, 0.0, causal, attn_mask=mask)
        yield Sample(forward.default, (q, k, v, 0.0, causal), {"attn_mask": mask})
        yield Sample(backward.default, (f(*out.shape), q, k, v, out, lse, 0.0, causal), {"attn_mask": mask})
    for heads, mask in ((2, None), (2, masks[3]), (1, None)):  # heads of keys for six of queries
        q, k, v = f(4, 6, 3, 8), f(4, heads, 5, 8), f(4, heads, 5, 8)
        out, lse = forward(q, k, v, 0.0, False, attn_mask=mask)
        yield Sample(forward.default, (q, k, v, 0.0, False), {"attn_mask": mask})
        yield Sample(backward.default, (f(*out.shape), q, k, v, out, lse, 0.0, False), {"attn_mask": mask})
    q = f(1, 4, 3, 8)
    yield Sample(forward.default, (q, q, q), {})
    q = f(3, 3, 3, 8)  # as many batches as heads as tokens
    yield Sample(forward.default, (q, q, q), {"attn_mask": f(3, 3)})
    yield Sample(forward.default, (q, q, q), {"attn_mask": f(1, 3, 3, 3)})


def matrices():
    a, x = f(4, 3, 3), f(4, 3, 2)
    square = a @ a.mT + torch.eye(3)
    lower = torch.linalg.cholesky(square)
    for name in """linalg_inv_ex linalg_cholesky_ex cholesky _linalg_eigh linalg_eig linalg_qr linalg_lu
                   linalg_lu_factor_ex linalg_ldl_factor_ex _linalg_det _linalg_slogdet linalg_matrix_exp
                   geqrf""".split():
        yield s(name, square)
        yield s(name, square[:1])
    yield s("_linalg_svd", f(5, 4, 3))
    yield s("linalg_pinv.atol_rtol_tensor", f(4, 3, 2))
    yield s("cholesky_inverse", lower)
    yield s("cholesky_solve", x, lower)
    yield s("_linalg_svd", f(5, 4, 3), False, False)
    yield s("_linalg_eigh", square, "L", False)
    for b in (x, f(1, 3, 2), f(3, 3), f(3), f(4, 3), f(3, 6), f(5, 1, 3, 2), f(2, 1, 3, 4)):
        yield s("_linalg_solve_ex", square[:3] if b.shape == (3, 3) else square, b)
    yield s("_linalg_solve_ex", square[0], f(5, 3, 2))
    yield s("_linalg_solve_ex", square[0], f(5, 3), left=False)
    yield s("_linalg_solve_ex", square[0], f(3))
    yield s("linalg_solve_triangular", lower, x, upper=False)
    yield s("linalg_solve_triangular", lower, f(4, 2, 3), upper=False, left=False)
    yield s("_linalg_solve_ex", square, f(4, 2, 3), left=False)
    yield s("triangular_solve", x, lower, False)
    lu, pivots = torch.linalg.lu_factor(square)
    yield s("lu_unpack", lu, pivots)
    yield s("lu_unpack", lu, pivots, unpack_data=False)
    yield s("lu_unpack", lu, pivots, unpack_pivots=False)
    yield s("linalg_lu_solve", lu[0], pivots[0], x)
    yield s("linalg_lu_solve", lu, pivots, x)
    ld, at = torch.linalg.ldl_factor(square)
    yield s("linalg_ldl_solve", ld, at, x)
    yield s("linalg_ldl_solve", ld[0], at[0], x[0])
    q, tau = torch.geqrf(f(4, 3, 3))
    yield s("linalg_householder_product", q, tau)
    yield s("ormqr", q, tau, x)
    yield s("ormqr", q[0], tau[0], f(5, 3), left=False)
    yield s("linalg_cross", f(4, 3), f(4, 3), dim=-1)
    yield s("linalg_cross", f(4, 3), f(1, 3), dim=-1)
    yield s("linalg_cross", f(3, 1, 5), f(3, 4, 5), dim=0)
    for rows in ((2, 4, 3), (4, 3)):
        yield s("_cdist_forward", f(*rows), f(*rows[:-2], 5, 3), 2.0, None)
    yield s("_cdist_forward", f(1, 4, 3), f(2, 5, 3), 1.0, None)
    for batch in ((), (2,)):
        x, y = f(*batch, 4, 3), f(*batch, 5, 3)
        for p in (1.0, 2.0, 3.5, float("inf")):
            yield s("_cdist_backward", f(*batch, 4, 5), x, y, p, aten._cdist_forward(x, y, p, None))


def signals():
    c = f(4, 5, 6, dtype=torch.complex64)
    yield s("_fft_r2c", f(4, 5, 6), [1], 0, True)
    yield s("_fft_c2c", c, [2, 0], 1, True)
    yield s("_fft_c2r", c, [2], 0, 10)
    yield s("view_as_real", c)
    yield s("view_as_complex", f(4, 5, 2))
    for dim in (0, -1):
        yield s("unfold", f(4, 5), dim, 3, 1)
        yield s("unfold", f(4, 8), dim, 2, 2)
        yield s("unfold_backward", f(*((2, 8, 2) if dim == 0 else (4, 4, 2))), [4, 8], dim, 2, 2)
        yield s("unfold_backward", f(*((2, 5, 3) if dim == 0 else (4, 3, 3))), [4, 5], dim, 3, 1)
        yield s("slice_scatter", f(4, 5), f(*((2, 5) if dim == 0 else (4, 2))), dim, 1, 3)
        yield s("select_scatter", f(4, 5), f(5 if dim == 0 else 4), dim, 1)
        yield s("renorm", f(4, 5), 2, dim, 1.0)
        yield s("_safe_softmax", f(4, 5), dim)
        yield s("glu", f(4, 6), dim)
        yield s("glu_backward", f(*((2, 6) if dim == 0 else (4, 3))), f(4, 6), dim)
    yield s("unfold", f(), 0, 1, 1)
    yield s("rot90", f(4, 5, 3), 1, [0, 2])
    yield s("isin.Tensor_Tensor", i(4, 5), i(3))
    yield s("isin.Tensor_Scalar", i(4, 5), 2)
    yield s("isin.Tensor_Tensor", i(4, 5), i(3), invert=True)
    table = f(6).sort().values
    yield s("searchsorted.Tensor", table, f(4, 5))
    yield s("searchsorted.Tensor", f(4, 6).sort(-1).values, f(4, 5))
    yield s("searchsorted.Scalar", table, 0.5)
    shuffled = torch.randperm(6)
    yield s("searchsorted.Tensor", table[shuffled], f(4, 5), sorter=shuffled.argsort())
    yield s("searchsorted.Tensor", table, f(5), right=True, out_int32=True)
    yield s("bucketize.Tensor", f(4, 5), table)
    yield s("take", f(4, 5), i(3, 2, high=20))
    index = i(4, 5, high=4)
    for kind in ("sum", "prod", "mean", "amax"):
        yield s("scatter_reduce.two", f(4, 5), 0, index, f(4, 5), kind)
        yield s("scatter_reduce.two", f(4, 5), 0, index, f(4, 5), kind, include_self=False)
        yield s("index_reduce", f(4, 5), 0, i(6, high=4), f(6, 5), {"sum": "mean"}.get(kind, kind), include_self=False)
        yield s("index_reduce", f(4, 5), 1, i(3), f(4, 3), {"sum": "prod"}.get(kind, kind).replace("sum", "prod"))
    yield s("_unsafe_index.Tensor", f(4, 5), [None, i(3)])
    for dim in (0, -1):
        v, g = f(4, 5, 6), f(*((4, 1, 1) if dim == 0 else (1, 1, 6)))
        _, norms = aten._weight_norm_interface(v, g, dim % 3)
        yield s("_weight_norm_interface", v, g, dim % 3)
        yield s("_weight_norm_interface_backward", f(4, 5, 6), v, g, norms, dim % 3)
    at, starts, bag = i(6, high=7), torch.tensor([0, 2, 5]), torch.tensor([0, 0, 1, 1, 1, 2])
    for given in (bag, i(0)):
        yield s("_embedding_bag_per_sample_weights_backward", f(3, 4), f(7, 4), at, starts, given, 0)
    at, bag, size = i(6, high=7), torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([2, 3, 1])
    for mode in (0, 1, 2):
        for by_freq in (False, True) if mode < 2 else (False,):
            most = i(3, 4, high=7) if mode == 2 else i(0)
            yield s("_embedding_bag_dense_backward", f(3, 4), at, bag, size, most, 7, by_freq, mode, None)
        yield s("_embedding_bag", f(7, 4), i(6), torch.tensor([0, 2, 5]), False, mode)
        yield s("_embedding_bag_forward_only", f(7, 4), i(6), torch.tensor([0, 2, 5]), False, mode)


def images():
    for n in (1, 2, 3):
        yield from _resized(n)
        x = f(4, 3, *[5, 6, 7][:n])
        for kind in ("reflection", "replication"):
            name, pad = f"{kind}_pad{n}d", [1, 2] * n
            yield s(name, x, pad)
            yield s(name, x[0], pad)
            out = getattr(aten, name)(x, pad)
            yield s(f"{name}_backward", f(*out.shape), x, pad)
    for n in (2, 3):
        yield from _pooled(n, f(4, 3, *[6] * n))
        yield from _pooled(n, f(3, *[6] * n))
        at = (f(4, 2, *[5] * n), f(4, *[3] * n, n), 0, 0, False)
        yield s(f"grid_sampler_{n}d", *at)
        for mask in ([True, True], [False, True]):
            yield s(f"grid_sampler_{n}d_backward", f(4, 2, *[3] * n), *at, mask)
    for name in ("bilinear2d", "bicubic2d"):
        yield s(f"_upsample_{name}_aa", f(4, 3, 6, 6), [4, 4], False)
        yield s(f"_upsample_{name}_aa_backward", f(4, 3, 4, 4), [4, 4], [4, 3, 6, 6], False)
    yield s("pixel_shuffle", f(4, 8, 3, 3), 2)
    for name in ("channel_shuffle", "native_channel_shuffle"):
        yield s(name, f(4, 6, 5, 2), 3)
    yield s("pixel_unshuffle", f(4, 2, 4, 6), 2)
    yield s("im2col", f(4, 2, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1])
    yield s("im2col", f(2, 5, 5), [2, 2], [1, 1], [0, 0], [1, 1])
    yield s("col2im", f(4, 8, 16), [5, 5], [2, 2], [1, 1], [0, 0], [1, 1])


def _resized(n: int):
    sizes, x = [4, 5, 6][:n], f(4, 3, *[3] * n)
    smooth = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[n]
    for name in [*(f"upsample_{kind}{n}d" for kind in smooth)]:
        yield s(name, x, sizes, False)
        if n == 2:
            yield s(name, i(4, 3, 3, 3, high=100, dtype=torch.uint8), sizes, False)
        yield s(f"{name}_backward", f(4, 3, *sizes), sizes, list(x.shape), False)
    for name in (f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"):
        yield s(name, x, sizes)
        yield s(f"{name}_backward", f(4, 3, *sizes), sizes, list(x.shape))


def _pooled(n: int, x):
    window, step, pad = [2] * n, [2] * n, [0] * n
    out, at = getattr(aten, f"max_pool{n}d_with_indices")(x, window, step)
    yield s(f"max_pool{n}d_with_indices", x, window, step)
    yield s(f"max_pool{n}d_with_indices_backward", f(*out.shape), x, window, step, pad, [1] * n, False, at)
    yield s(f"max_unpool{n}d", out, at, [6] * n, *([step, pad] if n == 3 else []))
    yield s(f"avg_pool{n}d", x, window, step)
    yield s(f"avg_pool{n}d", i(4, 3, *[6] * n), window, step)
    yield s(f"avg_pool{n}d", f(2, 3, *[6] * n), 2)
    yield s(f"avg_pool{n}d_backward", f(2, 3, *[3] * n), f(2, 3, *[6] * n), [2], [2], [0], False, True, None)
    yield s(f"avg_pool{n}d_backward", f(*out.shape), x, window, step, pad, False, True, None)
    out, at = getattr(aten, f"adaptive_max_pool{n}d")(x, [4] * n)
    yield s(f"adaptive_max_pool{n}d", x, [4] * n)
    yield s(f"adaptive_max_pool{n}d_backward", f(*out.shape), x, at)
    yield s(f"_adaptive_avg_pool{n}d", x, [4] * n)
    yield s(f"_adaptive_avg_pool{n}d_backward", f(*out.shape), x)


PARTS = (contractions, algebra, gradients, factories, reductions, one_dim_whole, views, indexing, networks,
         matrices, signals, images)  # fmt: skip


def samples_of(part) -> list[Sample]:
    """The samples of one part. They are the same every time."""
    torch.manual_seed(0)
    return list(part())


def table() -> list[Sample]:
    """All samples."""
    return [sample for part in PARTS for sample in samples_of(part)]


ELSEWHERE = dict.fromkeys(
    """_fused_rms_norm_backward
       _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
       _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
       _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward""".split(),
    "has no CPU kernel; the rule is that of native_layer_norm_backward, or of the CPU's attention",
)
ELSEWHERE |= dict.fromkeys(
    "uniform normal normal_functional exponential cauchy log_normal geometric bernoulli random".split(),
    "draws random numbers; on each rank those of its block, see test_random",
)
"""Ops of the book that no sample here runs, with the reason."""
