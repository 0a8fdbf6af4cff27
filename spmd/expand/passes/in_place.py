"""Reuse memory that nothing reads again: `w2 = add(w, u)` becomes `add_(w, u)`.

Capture makes every write functional. So the old and the new value of an updated parameter exist at the same time, and
the new one must be copied into the parameter. If nothing reads the old value after the op that makes the new one, the
op may write into the old value. That saves the memory and the copy. So it does for what ops make on the way: of
`add(div(sqrt(v), c), eps)` only the root needs memory.

The rewrite is legal when

- the old value has memory of its own: it is an owned input, what an op on elements has made, or a value that this pass
  has written into one of these;
- the op has an in-place variant whose result has the same shape and dtype;
- nothing after the op reads the old value or a view of it.

A loop writes into copies of the values that it carries. A copy of what nothing reads again is not needed.

A fused update (`spmd.tensor.recipes.updates`) writes into the parameter and both averages, if that is legal of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import fx

from spmd import _torch
from spmd.expand.passes.aliasing import base_of, given_back, is_loop, may_alias, may_read_operand
from spmd.tensor.call import is_pointwise
from spmd.tensor.recipes.updates import TENSORS, WRITTEN, adamw, adamw_


def reuse_memory(graph: fx.Graph, owned: Sequence[bool]) -> int:
    """Rewrite a bound graph in place. owned: for each placeholder, whether it may be overwritten.

    Returns the number of ops that were changed.
    """
    order = {n: i for i, n in enumerate(graph.nodes)}
    last_read = _last_reads(graph, order)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    writable = {n for n, o in zip(placeholders, owned, strict=True) if o}
    changed = 0
    for node in list(graph.nodes):
        if is_loop(node):
            changed += _write_without_copies(graph, node, writable, last_read, order)
            writable.update(n for n in node.users if base_of(n) in writable)
            continue
        if isinstance(node.target, _torch.OpOverload) and _makes_elements(node.target):
            writable.add(node)
        if node.target is adamw and _updates_alone(node, writable, last_read, order):
            _update_in_place(graph, node, last_read)
            changed += 1
            continue
        variant = _variant(node) if _is_last_reader(node, writable, last_read, order) else None
        if variant is not None:
            node.target = variant
            writable.add(node)
            changed += 1
    return changed


def _is_last_reader(
    node: fx.Node, writable: set[fx.Node], last_read: dict[fx.Node, int], order: dict[fx.Node, int]
) -> bool:
    """Whether a node is an op whose first operand has memory of its own, which nothing reads later."""
    if not isinstance(node.target, _torch.OpOverload) or not node.args or node.args[0] not in writable:
        return False
    return last_read[node.args[0]] <= order[node]


def _write_without_copies(
    graph: fx.Graph, loop: fx.Node, writable: set[fx.Node], last_read: dict[fx.Node, int], order: dict[fx.Node, int]
) -> int:
    """Let a loop write into the values themselves of which it has copies, where these have memory of their own, which
    nothing else reads later. What it is given of an input, such as a parameter, has to be what it gives of it, too."""
    stay = {loop.args[i] for i in loop.target.given_back.values()}
    copies = [loop.args[i] for i in loop.target.overwritten]
    free = [n for n in copies if n.args[0] in writable and last_read[n.args[0]] <= order[n]]
    free = [n for n in free if n.args[0].op != "placeholder" or n in stay]
    for copy in free:
        given = copy.args[0]
        last_read[given] = max([last_read[given], *[last_read[n] for n in loop.users if given_back(n) is copy]])
        copy.replace_all_uses_with(given)
        graph.erase_node(copy)
    return len(free)


def _updates_alone(
    node: fx.Node, writable: set[fx.Node], last_read: dict[fx.Node, int], order: dict[fx.Node, int]
) -> bool:
    """Whether a fused update may write into its operands: each has memory of its own, which nothing reads later."""
    targets, tensors = [node.args[i] for i in WRITTEN], [base_of(x) for x in node.args[:TENSORS]]
    alone = len(set(tensors)) == len(tensors)
    return alone and all(x in writable and last_read[x] <= order[node] for x in targets)


def _update_in_place(graph: fx.Graph, node: fx.Node, last_read: dict[fx.Node, int]) -> None:
    """Let a fused update write into its operands, which those read who read its results."""
    node.target = adamw_
    for result in list(node.users):
        operand = node.args[WRITTEN[result.args[1]]]
        last_read[operand] = last_read[result]
        result.replace_all_uses_with(operand)
        graph.erase_node(result)


@lru_cache(maxsize=4096)
def _makes_elements(op: _torch.OpOverload) -> bool:
    """Whether it is an op on elements whose result is new and dense. A composite op may return its operand."""
    return is_pointwise(op) and not (_torch.is_composite(op) or may_alias(op) or _torch.returns_many(op))


def _variant(node: fx.Node) -> _torch.OpOverload | None:
    """The in-place variant of the op, if its first operand has the spec of the result, and no other shares memory with
    it. Inside of a recipe nothing has a spec, and a result may be larger, or of another dtype, than the operand."""
    target = node.args[0]
    spec = node.meta.get("spec")
    variant = _on_elements(node.target) if spec is not None and target.meta.get("spec") is spec else None
    others = [base_of(n) for n in _torch.operands_of(node) if n is not target] if variant is not None else ()
    return None if others and base_of(target) in others else variant  # x + x.t() may not be written into x


@lru_cache(maxsize=4096)
def _on_elements(op: _torch.OpOverload) -> _torch.OpOverload | None:
    """The in-place variant of an op on elements."""
    return _torch.in_place_variant(op) if is_pointwise(op) else None


def _last_reads(graph: fx.Graph, order: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """For each node, the last read of its memory: through the node, through a view, or by a collective under way."""
    last = dict(order)
    for node in reversed(graph.nodes):  # behind all its readers
        read = last[node] if may_read_operand(node) else order[node]
        for n in _torch.operands_of(node):
            if last[n] < read:
                last[n] = read
    return last
