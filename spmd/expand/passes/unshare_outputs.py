"""Give each output memory of its own where two outputs would share it.

A graph may return one value twice, an unchanged input, or a constant. Examples are the old weight as a result beside
the new one, the same gradient for two parameters, and `prev, cur = cur, new`. Outputs outlive the call, and the next
call writes into them. So an output whose memory is also used elsewhere is copied at the end of the graph.

So is a result that is a piece of a buffer, such as a loss that was reduced in one bucket with the gradients: a loss
that somebody keeps for a log shall not keep all gradients of its step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from spmd.expand.passes.aliasing import SPLITS, Memory, memory_of, written_into


def unshare_outputs(graph: fx.Graph, homes: Sequence[int | None], returned: Sequence[bool] = ()) -> int:
    """Rewrite a bound graph in place.

    homes: for each output, the index of the placeholder that it is written back into, or None. returned: for each,
    whether it is a result, which the caller may keep; by default none is. Returns the number of copies that were added.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    taken: dict[fx.Node, _Taken] = {n: {None: {0}} for n in graph.nodes if n.op in ("placeholder", "get_attr")}
    output = next(n for n in graph.nodes if n.op == "output")
    values = list(output.args[0])
    copies = 0
    for i, (value, home, kept) in enumerate(zip(values, homes, returned or [False] * len(values), strict=True)):
        if not isinstance(value, fx.Node) or value.meta.get("spec") is None:  # a number
            continue
        if home is not None and written_into(value) is placeholders[home]:
            continue
        mine = memory_of(value)
        others = taken.setdefault(mine.base, {})
        if (kept and _is_of_buffer(mine)) or _overlaps(mine, others):
            with graph.inserting_before(output):
                values[i] = graph.call_function(torch.ops.aten.clone.default, (value,))
            copies += 1
        else:
            others.setdefault(mine.split, set()).add(mine.index)
    output.args = (tuple(values),)
    return copies


_Taken = dict[fx.Node | None, set[int]]
"""What outputs have of one memory: the numbers of pieces of each split; under None, all of it."""


def _overlaps(memory: Memory, taken: _Taken) -> bool:
    """Whether an output has elements of this memory, without a look at each of the pieces of a bucket."""
    if memory.split is None or not taken.keys() <= {memory.split}:
        return bool(taken)
    return memory.index in taken.get(memory.split, ())


def _is_of_buffer(memory: Memory) -> bool:
    """Whether the memory is a piece of what a move has split: an op that the user has split with has a spec."""
    return memory.split is not None and memory.split.target in SPLITS and memory.split.meta.get("spec") is None
