"""Plain tensors that torch makes inside of its ops, and that meet DTensors there.

    F.scaled_dot_product_attention(q, k, v, is_causal=True)     makes a mask
    torch.quantile(x, 0.5), F.embedding_bag(x, w)               make ranks, offsets

Nobody but torch could say that these are the same on all ranks. They are, where torch made them of sizes and numbers;
they need not be where torch made them of a plain tensor that the user gave. So the ranks compare them: what differs is
an error, as it is for the user's own plain tensors, which are not compared but asked about.
"""

from __future__ import annotations

import hashlib
import sys
from types import FrameType

import torch

from spmd import _torch
from spmd.comm import transport
from spmd.mesh import DeviceMesh
from spmd.sim import LocalTensor
from spmd.sim.exchange import is_library

_LENT = 8
"""References to a plain tensor that only the dispatch of an op holds, as `_as_replicated` sees it; a user's has more.

What it takes for torch's own is compared, so a miscount is no wrong number.
"""


def is_torchs_own(x: torch.Tensor) -> bool:
    """Whether torch itself made x, on the way to an op: in C++, so that no Python code holds it, or in its Python."""
    if _torch.is_tracing(x):
        return False
    held = sys.getrefcount(x)
    lent = _LENT + 2 * _torch.in_forward_ad()  # which keeps what an op was given until it has the tangent, too
    return held <= lent or _is_of_library(x)


def _is_of_library(x: torch.Tensor) -> bool:
    """Whether torch's Python code calls the op, and was not handed x by the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("spmd."):
        frame = frame.f_back
    inner, handed = frame, None
    while frame.f_back is not None and is_library(frame.f_code.co_filename):
        handed, frame = frame, frame.f_back
    if handed is None or _has(frame, x):
        return False
    return handed is inner or not _has(handed, x)


def _has(frame: FrameType, x: torch.Tensor) -> bool:
    """Whether a variable of the frame is x, or a list or dict with x in it."""
    for value in frame.f_locals.values():
        inside = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
        if value is x or any(y is x for y in inside):
            return True
    return False


def is_same_everywhere(x: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Whether all ranks of the mesh have the same tensor. All must ask."""
    if isinstance(x, LocalTensor):
        first = x.local[x.ranks[0]]
        return all(_same(first, other) for other in x.local.values())
    if mesh.size() == 1:
        return True
    digests = transport().gather_objects(_digest(x), mesh)
    return all(d == digests[0] for d in digests)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and _digest(a) == _digest(b)


def _digest(x: torch.Tensor) -> tuple:
    flat = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return tuple(x.shape), str(x.dtype), hashlib.sha256(bytes(flat.tolist())).hexdigest()
