"""Give each output memory of its own, where two would share it.

A graph may return one value twice, an input as it came, or a constant: the old weight as a result beside the new
one, the same gradient for two parameters, `prev, cur = cur, new`. Outputs outlive the call and are written into by the
next one, so what would show memory that lives on elsewhere is copied at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from spmd.expand.passes.memory import Part, part, written_into


def separate_outputs(graph: fx.Graph, homes: Sequence[int | None]) -> int:
    """Rewrite a bound graph; `homes`: for each output the number of the placeholder it is written back into, if any.

    Returns how many copies it made.
    """
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    taken = {n: [Part(n)] for n in graph.nodes if n.op in ("placeholder", "get_attr")}
    output = next(n for n in graph.nodes if n.op == "output")
    values = list(output.args[0])
    copies = 0
    for i, (value, home) in enumerate(zip(values, homes, strict=True)):
        if not isinstance(value, fx.Node) or value.meta.get("spec") is None:  # a number
            continue
        if home is not None and written_into(value) is placeholders[home]:
            continue
        mine = part(value)
        others = taken.setdefault(mine.base, [])
        if any(mine.meets(other) for other in others):
            with graph.inserting_before(output):
                values[i] = graph.call_function(torch.ops.aten.clone.default, (value,))
            copies += 1
        else:
            others.append(mine)
    output.args = (tuple(values),)
    return copies
