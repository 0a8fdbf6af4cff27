"""A value that owes a reduction is reduced once, however many ops need the result.

    y = F.linear(x, w, b)     f32[8, 16] +sum@tp: the ranks hold terms
    y.relu()                  an all-reduce; y keeps what it gave
    y.square()                no all-reduce; nor does a backward that reads y

The terms stay: an op that is linear goes on with them, and a sum to shards is still a reduce-scatter. So do programs. A
write into y, or into a view of it, ends this. Ranks must agree whether there is something to send, so what one rank
alone could know does not count: blocks that the user gave are reduced each time, and a write into the block of an op's
result through `to_local()`, after it was reduced, is an error where the result is read again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from spmd import _torch
from spmd.sim import LocalTensor
from spmd.tensor.eager.user_writes import version_of
from spmd.tensor.redistribute.plan import Plan

_PLAIN = (torch.Tensor, LocalTensor)


class Reduced(NamedTuple):
    """What a plan made of the terms. writes: into the tensor and its views, until then. version: of the terms, then."""

    plan: Plan
    terms: torch.Tensor
    writes: tuple[int, int]
    version: int
    block: torch.Tensor


def run_once(p: Plan, x: Any, local: torch.Tensor) -> torch.Tensor:
    """The block of a DTensor after a plan: as it was made before, if the plan reduces x and x was not written since.

    local: the block of x. RuntimeError where the user wrote into it since.
    """
    if not p.reduces or type(local) not in _PLAIN or not _is_own(x, local) or _torch.in_trace():
        return p.run(local)
    p = p.effective
    writes = x._version, 0 if x._memory is None else x._memory.writes
    kept = x._reduced
    if kept is not None and kept.plan is p and kept.terms is local and kept.writes == writes:
        if kept.version != version_of(local):
            raise RuntimeError(
                f"read of {x._spec}, when its block was written through to_local() after it was reduced. Write into "
                "the DTensor itself; or make a DTensor of the block with from_local, which is reduced each time."
            )
        return kept.block
    out = p.run(local)
    x._reduced = Reduced(p, local, writes, version_of(local), out)
    return out


def _is_own(x: Any, local: torch.Tensor) -> bool:
    """Whether x is the result of an op, whose block nobody else had, and writes into it are counted."""
    return not local._is_view() and x._copy is None and not x.is_inference()
