"""Give each output memory of its own where two outputs would share it.

A graph may return one value twice, an unchanged input, or a constant. Examples are the old weight as a result beside
the new one, the same gradient for two parameters, and `prev, cur = cur, new`. Outputs outlive the call, and the next
call writes into them. So an output whose memory is also used elsewhere is copied at the end of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from spmd.expand.passes.aliasing import Memory, memory_of, written_into


def unshare_outputs(graph: fx.Graph, homes: Sequence[int | None]) -> int:
    """Rewrite a bound graph in place.

    homes: for each output, the index of the placeholder that it is written back into, or None. Returns the number of
    copies that were added.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    taken = {n: [Memory(n)] for n in graph.nodes if n.op in ("placeholder", "get_attr")}
    output = next(n for n in graph.nodes if n.op == "output")
    values = list(output.args[0])
    copies = 0
    for i, (value, home) in enumerate(zip(values, homes, strict=True)):
        if not isinstance(value, fx.Node) or value.meta.get("spec") is None:  # a number
            continue
        if home is not None and written_into(value) is placeholders[home]:
            continue
        mine = memory_of(value)
        others = taken.setdefault(mine.base, [])
        if any(mine.overlaps(other) for other in others):
            with graph.inserting_before(output):
                values[i] = graph.call_function(torch.ops.aten.clone.default, (value,))
            copies += 1
        else:
            others.append(mine)
    output.args = (tuple(values),)
    return copies
