"""Reuse the memory of inputs that are overwritten: `w2 = add(w, u)` becomes `add_(w, u)`.

Capture makes every write functional. A parameter that the step updates then has its old and new value at once,
and the new one must be copied home. Where the old value has no reader after the op that makes the new one, the op may
write into it: the memory and the copy are saved.

Legal when the old value lives in memory of its own (an owned input, or a value this pass has put there), the op
has an in-place variant whose result has the same shape and dtype, and nothing after it reads the old value or a view
of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from spmd import _torch
from spmd.expand.passes.memory import base, holds_operand


def reuse_memory(graph: fx.Graph, owned: Sequence[bool]) -> int:
    """Rewrite a bound graph; `owned`: per placeholder, whether it may be overwritten.

    Returns how many ops it changed.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    last_read = _last_reads(graph, order)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    ours = {n for n, o in zip(placeholders, owned, strict=True) if o}
    changed = 0
    for node in list(graph.nodes):
        variant = _variant(node, ours)
        if variant is None or last_read[node.args[0]] > order[node]:
            continue
        node.target = variant
        ours.add(node)
        changed += 1
    return changed


def _variant(node: fx.Node, ours: set[fx.Node]):
    """The in-place variant of the op, if its first operand is ours and lies as the result does."""
    if not isinstance(node.target, _torch.OpOverload) or not node.args or node.args[0] not in ours:
        return None
    target = node.args[0]
    if any(base(n) is base(target) for n in node.all_input_nodes if n is not target):
        return None  # x + x.t() may not be written into x
    same = target.meta.get("spec") is node.meta.get("spec")
    return _torch.in_place_variant(node.target) if same and torch.Tag.pointwise in node.target.tags else None


def _last_reads(graph: fx.Graph, order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """For each node, where its memory is read last: through itself, a view of it, or a collective under way."""
    last: dict[fx.Node, int] = {}
    for node in reversed(graph.nodes):
        reads = [order[user] for user in node.users]
        reads += [last[user] for user in node.users if holds_operand(user)]
        last[node] = max(reads, default=order[node])
    return last
