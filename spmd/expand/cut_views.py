"""Parts of a view that cuts a dim in two are slices of that dim, and are written so.

    v = view(x, [6, n // 6, 16]); v[2]        slice(x, 0, 2 * (n // 6), 3 * (n // 6))

As parts of the view its first dim would have to be whole, and where it is shorter than there are ranks, so would the
rows: `x.unflatten(0, (6, -1))` of a batch that is sharded over 4 ranks. A slice goes where its rows are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from spmd.expand.sizes.lift import SIZED
from spmd.expand.sizes.size import Size
from spmd.tensor.call import TensorMeta

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_PARTS = {aten.unbind.int, aten.select.int}


def write_slices(graph: fx.Graph) -> None:
    """Write parts of views that cut a dim of what they show as slices of it."""
    for node in [n for n in graph.nodes if n.target in _PARTS]:
        view, *rest = node.args
        dim = rest[0] if rest else node.kwargs.get("dim", 0)
        if view.target not in _VIEWS or not _cuts(view, d := dim % len(view.meta["val"].shape)):
            continue
        for part, i in _parts_of(node):
            _write(part, view, d, i % view.meta["val"].shape[d])
        for unread in (node, view):
            if not unread.users:
                graph.erase_node(unread)


def _cuts(view: fx.Node, d: int) -> bool:
    """Whether a view cuts dim d of its operand into so many parts, and leaves all other dims."""
    before, after = view.args[0].meta.get("val"), view.meta["val"]
    if not isinstance(before, TensorMeta) or len(after.shape) != len(before.shape) + 1 or d + 1 == len(after.shape):
        return False
    others = *after.shape[:d], *after.shape[d + 2 :]
    count, length = after.shape[d : d + 2]
    known = type(before.shape[d]) is not int or type(length) is not int or before.shape[d] == count * length
    return others == (*before.shape[:d], *before.shape[d + 1 :]) and type(count) is int and count > 1 and known


def _parts_of(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The nodes that are parts of a view, each with its number."""
    if node.target is aten.select.int:
        return [(node, node.args[2])] if type(node.args[2]) is int else []
    return [(user, user.args[1]) for user in node.users if user.target is operator.getitem]


def _write(part: fx.Node, view: fx.Node, d: int, i: int) -> None:
    length = view.meta["val"].shape[d + 1]
    part.target, part.kwargs = aten.slice.Tensor, {}
    part.args = view.args[0], d, _times(i, length), _times(i + 1, length)
    part.meta[SIZED] = part.meta.get(SIZED, False) or isinstance(length, Size)


def _times(i: int, length: Any) -> Any:
    """
    >>> _times(2, Size("n // 6")), _times(0, Size("n // 6")), _times(2, 4)
    (2 * (n // 6), 0, 8)
    """
    return Size(f"{i} * ({length.text})") if i and isinstance(length, Size) else 0 if not i else i * length
