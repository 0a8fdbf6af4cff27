"""Keep products of tensors of several dims as one op in a trace, as eager calls do.

    x @ w,   f32[B, T, k] by f32[k, n]      linear and its gradient, and not a view, a product of matrices, a view

Autograd sees such a product as one op. torch's functionalisation would decompose torch's own op into several. So the
graph gets an op of our own in its place, and when the trace is done it becomes torch's op again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.overrides import TorchFunctionMode

from spmd import _torch
from spmd.expand.checks import gaussian_nll_loss
from spmd.expand.covariances import corrcoef, cov
from spmd.expand.dense_views import as_strided
from spmd.expand.interpolate import interpolate
from spmd.expand.losses import ctc_loss
from spmd.expand.user_code import current_frames, short_place
from spmd.tensor.rules.diagonals import fill_diagonal_
from spmd.tensor.rules.einsum import product
from spmd.tensor.rules.products import is_kept_as_one_op, matmul_backward
from spmd.tensor.rules.spectra import centred_stft, istft

aten = torch.ops.aten


def _linear_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], y.shape[0]))


def _matmul_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]))


_library = torch.library.Library("spmd", "DEF")
for _name, _shape in (("linear", _linear_shape), ("matmul", _matmul_shape)):
    _library.define(f"{_name}(Tensor x, Tensor y) -> Tensor")
    _library.impl(_name, _shape, "Meta")

_OURS = {torch.ops.spmd.linear.default: aten.linear.default, torch.ops.spmd.matmul.default: aten.matmul.default}
"""The ops of our own that are in the graph while it is made, and those of torch that they become."""


def _kept_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not is_kept_as_one_op("linear", input, weight) or input.shape[-1] != weight.shape[1]:
        return aten.linear.default.decompose(input, weight, bias)
    out = torch.ops.spmd.linear(input, weight)
    return out if bias is None else out + bias


def _kept_matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    batches = x.ndim > 1 < y.ndim and is_kept_as_one_op("matmul", x, y) and x.shape[-1] == y.shape[-2]
    return torch.ops.spmd.matmul(x, y) if batches else aten.matmul.default.decompose(x, y)


TRACED_AS = {aten.linear.default: _kept_linear, aten.matmul.default: _kept_matmul}
"""torch's ops that are kept as one op, where `KeepProducts` asks for it and in inference mode; what is traced for them.

In inference mode torch takes no op apart before it is traced, so these come with vectors, and with a bias, too.
"""


class KeepProducts(TorchFunctionMode):
    """Inside, products of tensors of more than two dims stay one op. note: called with what each function gives."""

    def __init__(self, note: Callable[[Any], None] | None = None):
        super().__init__()
        self.note = note

    def __torch_function__(self, function, types, args=(), kwargs=None):
        replacement = None if kwargs and "out" in kwargs else REPLACEMENTS.get(function)
        out = NotImplemented if replacement is None else replacement(*args, **(kwargs or {}))
        if out is NotImplemented:
            out = function(*args, **(kwargs or {}))
        if self.note is not None:
            self.note(out)
        return out


def restore_torch_ops(graph: fx.Graph) -> None:
    """Put torch's ops back in the place of our own."""
    for node in graph.nodes:
        if node.target in _OURS:  # to set the target of a node takes longer
            node.target = _OURS[node.target]
        if node.target is aten.linear_backward.default and not node.args[3][2]:
            # No gradient of the bias is asked for; torch's metadata says that there is one all the same.
            node.meta["val"] = (*node.meta["val"][:2], None)


_linear = _torch.undecomposed(aten.linear.default)


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """The product as one op, and then the bias. NotImplemented where torch's own way is as good."""
    if not _is_handled(input, weight) or weight.ndim != 2 or input.shape[-1] != weight.shape[1]:
        return NotImplemented
    out = _linear(input, weight)
    return out if bias is None else out + bias


def matmul(input: Any, other: Any) -> Any:
    """A product with a matrix becomes a `linear`. A product of two batches stays a `matmul`."""
    if not _is_handled(input, other) or input.shape[-1] != other.shape[-2]:
        return NotImplemented
    return _linear(input, other.mT) if other.ndim == 2 else _Matmul.apply(input, other)


def _is_handled(x: Any, y: Any) -> bool:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.dtype != y.dtype:
        return False
    if x.ndim < 3 or y.ndim < 2:
        return False
    return not x.is_complex() and not _torch.is_autocast_on(x.device.type)


class _Matmul(torch.autograd.Function):
    """`matmul` with its derivative as one op. torch has such an op for the first derivative and none for the second."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return torch.ops.spmd.matmul(x, y)

    @staticmethod
    def backward(ctx, grad):
        # Autograd runs under the modes that were on in `forward`. This mode was off there: it had made the call itself.
        with KeepProducts():
            return matmul_backward(grad, *ctx.saved_tensors, ctx.needs_input_grad)


def einsum(equation: Any, *operands: Any) -> Any:
    """An einsum as products that keep their dims. NotImplemented where the arguments are not tensors."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str) or not all(isinstance(x, torch.Tensor) for x in tensors):
        return NotImplemented
    with KeepProducts():  # for the products inside
        return product(equation, tensors)


def _istft(*args: Any, **kwargs: Any) -> Any:
    return istft(*args, **kwargs, where=short_place(current_frames()))


REPLACEMENTS = {
    F.linear: linear, torch.matmul: matmul, torch.Tensor.matmul: matmul, torch.Tensor.__matmul__: matmul,
    torch.einsum: einsum, torch.ctc_loss: ctc_loss, F.ctc_loss: ctc_loss,
    torch.cov: cov, torch.Tensor.cov: cov, torch.corrcoef: corrcoef, torch.Tensor.corrcoef: corrcoef,
    F.interpolate: interpolate,
    torch.Tensor.fill_diagonal_: fill_diagonal_, F.gaussian_nll_loss: gaussian_nll_loss,
    torch.stft: centred_stft, torch.Tensor.stft: centred_stft, torch.istft: _istft, torch.Tensor.istft: _istft,
    torch.as_strided: as_strided, torch.Tensor.as_strided: as_strided,
}  # fmt: skip
"""The functions that are replaced, with their replacements."""
