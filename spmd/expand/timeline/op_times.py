"""What local ops take by a calibration: curves by kind and size, in place of the roofline.

    mm(f32[64, 128], f32[128, 512])    a "product" of 8.4e6 operations, with 0.43 MB read and written
    gelu(f32[64, 512])                 a "special" op of 0.26 MB read and written

The curves hold what it takes to call an op from Python, and were taken while all ranks of a host ran.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.expand.choose.price import LocalWork
from spmd.expand.choose.work import FLOPS
from spmd.mesh.machine import LocalOp

_KINDS = {
    "special": "gelu silu sigmoid tanh exp exp2 log log1p erf pow rsqrt sin cos softplus mish elu logsigmoid "
    "gelu_backward silu_backward",
    "reduction": "sum mean prod amax amin max min any all argmax argmin norm linalg_vector_norm var var_mean "
    "nll_loss_forward cumsum",
    "norm": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm "
    "native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm native_batch_norm logsumexp",
}
KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names.split()}
"""The kind of an op, by its name in the book. Those that are not here, and multiply no matrices, are pointwise."""


def kind_of(name: str) -> str:
    """The kind of an op.

    >>> kind_of("mm"), kind_of("gelu"), kind_of("add"), kind_of("_scaled_dot_product_flash_attention")
    ('product', 'special', 'pointwise', 'attention')
    """
    if name in FLOPS:
        return "attention" if "attention" in name else "product"
    return KIND_OF.get(name, "pointwise")


class OpTimes:
    """The curves of a calibration, by kind and dtype. A dtype that was not timed has the curve of the first one.

    >>> times = OpTimes([LocalOp("pointwise", "float32", ((2.0, 0.0), (1.0, 0.001)))])
    >>> times.bytes_us(5000), OpTimes([]).is_known
    (6.0, False)
    """

    def __init__(self, curves: Sequence[LocalOp]) -> None:
        self.curves: dict[str, dict[str, LocalOp]] = {}
        for curve in curves:
            self.curves.setdefault(curve.kind, {})[curve.dtype] = curve

    @property
    def is_known(self) -> bool:
        """Whether there are curves to price ops by."""
        return "pointwise" in self.curves

    @property
    def view_us(self) -> float:
        """Microseconds of an op that computes nothing: what it takes to call it, where that was timed."""
        return max([curve.us(0.0) for curve in self.curves.get("view", {}).values()], default=0.0)

    def us(self, work: LocalWork) -> float:
        """Microseconds of an op. A kind that was not timed is priced as a pointwise op, by its bytes."""
        by_dtype = self.curves.get(kind_of(work.name))
        if by_dtype is None:
            return self.bytes_us(work.nbytes)
        curve = by_dtype.get(str(work.dtype).removeprefix("torch.")) or next(iter(by_dtype.values()))
        if curve.kind in ("product", "attention"):
            return curve.us(work.flops, work.nbytes)
        return curve.us(work.nbytes)

    def bytes_us(self, nbytes: float) -> float:
        """Microseconds of an op that reads and writes so many bytes."""
        return next(iter(self.curves["pointwise"].values())).us(nbytes)
