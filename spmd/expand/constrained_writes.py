"""Writes in place around `spmd.constrain`, of which a program would see less than one device.

    y = spmd.constrain(x, {"dp": Shard(0)})       on one device x itself, in a program a value of its own
    x += 1
    return y                                      on one device with the 1

Such a step is an error, which names the line that writes. What is read before the write is right, and so is what is
written when nobody reads the other one any more, as where a step goes on with `y` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.user_code import at_user_line, current_frames

CONSTRAIN = torch.ops.spmd.constrain.default


@dataclass(eq=False)
class _Constrained:
    """A tensor and what `constrain` gave for it, with their nodes. message: of the error. writes: whether each was into
    the first, the last node of the graph behind it, and the line. until: the last node of the graph before the second
    was written back to where it is from."""

    given: torch.Tensor
    made: torch.Tensor
    nodes: tuple[fx.Node, fx.Node]
    words: tuple[str, str]
    message: str
    writes: list[tuple[bool, fx.Node, str]] = field(default_factory=list)
    until: fx.Node | None = None


class ConstrainedWrites:
    """What is constrained in a trace, and what is written there afterwards."""

    def __init__(self) -> None:
        self._constrained: list[_Constrained] = []

    def note(self, op: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        """An op of the trace was called."""
        if op is CONSTRAIN:
            if not _torch.in_backward():  # gradients of constrained values, which autograd alone holds
                self._note_pair(args[0], out, _WORDS, _MESSAGE)
        elif self._constrained:
            for i, name in zip(_torch.written_positions(op), _torch.written(op), strict=True):
                x = args[i] if i < len(args) else kwargs.get(name)
                if type(x) is _torch.FunctionalTensor:
                    self._note_write(x)

    def note_copy(self, given: torch.Tensor, made: torch.Tensor, message: str) -> None:
        """A tensor of the trace is a copy of a part of another one, and on one device a view. message: of the error,
        with places for the two, and for the line."""
        self._note_pair(given, made, ("the tensor", "the part"), message)

    def written_back(self, given: torch.Tensor, made: torch.Tensor) -> None:
        """A copy is about to be written to where it is from, as x[i] += 1 does it behind the write into the copy."""
        for each in self._constrained:
            if each.given is given and each.made is made:
                each.until = _last()

    def _note_pair(self, given: torch.Tensor, made: torch.Tensor, words: tuple[str, str], message: str) -> None:
        nodes = _node(given), _node(made)
        if None not in nodes:
            self._constrained.append(_Constrained(given, made, nodes, words, message))

    def _note_write(self, x: torch.Tensor) -> None:
        for each in self._constrained:
            into = [_share_memory(x, each.given), _share_memory(x, each.made)]
            if any(into):
                each.writes.append((into[0], _last(), at_user_line(current_frames())))

    def check(self, graph: fx.Graph) -> None:
        """Raise RuntimeError if the step reads what one device would have written. graph: that of the complete trace.
        """
        if any(each.writes for each in self._constrained):
            order = {n: i for i, n in enumerate(graph.nodes)}
            for each in self._constrained:
                for into_given, last, line in each.writes:
                    if _is_read(each, into_given, _place(last, order), order):
                        raise RuntimeError(each.message.format(*each.words[:: 1 if into_given else -1], line=line))


_WORDS = "what spmd.constrain was given", "what spmd.constrain returned"
_MESSAGE = (
    "the step writes in place into {0}, and reads {1} afterwards: they are one on one device, and two values in a "
    "program. Go on with what spmd.constrain returns alone, or write out of place, as in x = x + 1{line}"
)


def _is_read(each: _Constrained, into_given: bool, since: int, order: dict[fx.Node, int]) -> bool:
    """Whether the one of the two tensors that a write was not into is read behind it."""
    given, made = each.nodes
    until = len(order) if each.until is None else _place(each.until, order)
    ends = since <= until < len(order)
    between = range(since + 1, until + 1 if ends else len(order))
    if not into_given and until < since:  # there is a newer value of the first
        return True
    if into_given:
        return _reads_within(made, None, between, order)
    root = given
    while (inner := _viewed(root)) is not None:
        root = inner
    return (root.op == "placeholder" and not ends) or _reads_within(root, made, between, order)


def _reads_within(node: fx.Node, but: fx.Node | None, between: range, order: dict[fx.Node, int]) -> bool:
    """Whether a node, or a view of it, is read within these places in the graph. but: what is no view of it."""
    for user in node.users:
        if user is but:
            continue
        shows = _viewed(user) is node or user.target is CONSTRAIN
        if _reads_within(user, but, between, order) if shows else order[user] in between:
            return True
    return False


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a node shows the memory of."""
    if node.op != "call_function":
        return None
    if node.target is getitem:
        return node.args[0] if _viewed(node.args[0]) is not None else None
    return node.args[0] if isinstance(node.target, _torch.OpOverload) and _torch.is_view(node.target) else None


def _place(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """Where a node is, or, if it was taken out, the one before it."""
    while node not in order:
        node = node.prev
    return order[node]


def _last() -> fx.Node:
    """The last node of the graph of the trace."""
    return next(iter(reversed(_torch.proxy_mode().tracer.graph.nodes)))


def _node(x: torch.Tensor) -> fx.Node | None:
    return _torch.node_of(_torch.from_functional(x), _torch.proxy_mode().tracer)


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two traced tensors have elements in common, or may have some."""
    if _torch.memory_of(x.elem) != _torch.memory_of(y.elem):
        return False
    (begin, end), (other, others_end) = _extent(x), _extent(y)
    return begin < others_end and other < end


def _extent(x: torch.Tensor) -> tuple[int, int]:
    """The first element of a tensor in its memory, and the one behind its last."""
    sizes = [(_torch.number_now(n), _torch.number_now(step)) for n, step in zip(x.shape, x.stride(), strict=True)]
    begin = _torch.number_now(x.storage_offset())
    return begin, begin + all(n for n, _ in sizes) * (1 + sum((n - 1) * step for n, step in sizes))
