"""The price of local work: microseconds that an op takes on the rank with the largest blocks.

    linear(f32[64, 128], f32[512, 128])    8.4e6 operations at 19.5 TFLOP/s, 0.4 MB at 1.7 TB/s: the slower counts

A roofline from the machine's figures (`Machine.compute`). A product that is replicated costs more than one that is
shared out. Views are free, and an op that reads some rows of a table does not read all of it. The start of a kernel is
left out: it is the same whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from spmd import _torch
from spmd.mesh import MeshTopoInfo
from spmd.mesh.presets import TEXTBOOK

Shape = Sequence[int]

READS_SOME = frozenset({"embedding", "gather", "index", "index_select", "select", "slice", "nll_loss_forward"})
"""Ops that read of their first operand only as much as they return."""


def _product(ins: Sequence[Shape], outs: Sequence[Shape | None]) -> int:
    """`m k, k n -> m n`, with any batch dims."""
    return 2 * prod(outs[0]) * ins[0][-1]


def _linear_backward(ins: Sequence[Shape], outs: Sequence[Shape | None]) -> int:
    wanted = sum(out is not None for out in outs[:2])
    return 2 * wanted * prod(ins[1]) * ins[0][-1]


def _convolution(ins: Sequence[Shape], outs: Sequence[Shape | None]) -> int:
    return 2 * prod(outs[0]) * prod(ins[1][1:])


def _convolution_backward(ins: Sequence[Shape], outs: Sequence[Shape | None]) -> int:
    wanted = sum(out is not None for out in outs[:2])
    return 2 * wanted * prod(ins[0]) * prod(ins[2][1:])


def _attention(ins: Sequence[Shape], outs: Sequence[Shape | None]) -> int:
    q, k = ins[0], ins[1]
    return 4 * prod(q) * k[-2]


def _attention_backward(ins: Sequence[Shape], outs: Sequence[Shape | None]) -> int:
    q, k = ins[1], ins[2]
    return 10 * prod(q) * k[-2]


_KERNELS = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")

FLOPS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "linear", "matmul"), _product),
    "linear_backward": _linear_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **{f"_scaled_dot_product_{kernel}": _attention for kernel in _KERNELS},
    **{f"_scaled_dot_product_{kernel}_backward": _attention_backward for kernel in _KERNELS},
}
"""Operations of the ops that multiply matrices, from the shapes of operands and results. All others are as fast as they
read and write."""


def flops(name: str, ins: Sequence[Shape], outs: Sequence[Shape | None]) -> int:
    """The operations of the op of this name in the book; 0 if it multiplies no matrices.

    >>> flops("mm", [(64, 128), (128, 512)], [(64, 512)])
    8388608
    """
    return FLOPS[name](ins, outs) if name in FLOPS and outs[0:2] != (None, None) else 0


def is_free(op: object) -> bool:
    """Whether an op only shows memory of its operand in another way."""
    return isinstance(op, _torch.OpOverload) and _torch.is_view(op)


class Roofline:
    """Microseconds of operations and of bytes on a machine.

    >>> from spmd.mesh import HostGrid
    >>> round(float(Roofline(MeshTopoInfo(HostGrid((4,)))).us(8_388_608, 425_984, torch.float32)), 2)
    0.43
    """

    def __init__(self, topology: MeshTopoInfo) -> None:
        self.compute = topology.machine.compute or TEXTBOOK.compute

    def us(self, operations: float, nbytes: float, dtype: torch.dtype) -> float:
        """The time of the slower of the two."""
        of_dtype = self.compute.us_per_flop(str(dtype).removeprefix("torch."))
        return np.maximum(operations * of_dtype, nbytes * self.compute.us_per_byte)


def read_and_written(name: str, ins: Sequence[float], outs: Sequence[float]) -> float:
    """Bytes that an op reads and writes, from the bytes of its operands and results."""
    read = list(ins)
    if name in READS_SOME and read:
        read[0] = np.minimum(read[0], sum(outs))
    return sum(read) + sum(outs)
