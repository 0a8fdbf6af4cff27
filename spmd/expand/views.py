"""What a step gives that shows a part of the memory of something else: it is a view of that behind the call, too.

    self.last = h[:, -1]        with h returned:      View(of=0, steps=((aten.select.int, 1, -1),))
    self.first = self.buf[0]    of what is there:     View(of=Argument or Slot, steps=...)

Which tensors share a memory, the trace knows. How the one is seen in the other is read off the complete graph: behind
all writes, a view is made anew from the value that its base has then. The step's last ops on it are views, up to the
value of the base, and these are done to the DTensor of the base when the program has run.

Tensors of one memory without a common element, as the pieces of a `chunk`, have memories of their own behind the call:
nobody can tell. Where elements are common, and neither is a view of the other, as of `h[1:]` and `h[:-1]`, the program
also gives what both are views of.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.cleaning import RETURNS_OPERAND
from spmd.expand.sizes.size import Size, evaluated
from spmd.tensor.call import TensorMeta

aten = torch.ops.aten


@dataclass(frozen=True)
class View:
    """A view of what is at a place, or of a result by its number. steps: the ops that make it, each with its arguments
    behind the tensor."""

    of: Any
    steps: tuple[tuple, ...]

    def at(self, values: Mapping[str, float]) -> View:
        """The same with the sizes known."""
        texts = tuple(dict.fromkeys(x.text for x in _flat(self.steps) if isinstance(x, Size)))
        known = dict(zip(texts, evaluated(texts, values), strict=True)) if texts else {}
        return View(self.of, _mapped(self.steps, lambda x: known[x.text] if isinstance(x, Size) else x))

    def shown(self, base: torch.Tensor) -> torch.Tensor:
        """The view of a tensor."""
        with torch.inference_mode(False), torch.no_grad():
            x = base.detach()
            for op, *rest in self.steps:
                x = op(x, *rest)
            return x


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, (tuple, list)):
        for each in x:
            yield from _flat(each)
    else:
        yield x


def _mapped(x: Any, of: Any) -> Any:
    return type(x)([_mapped(each, of) for each in x]) if isinstance(x, (tuple, list)) else of(x)


# ---- in a graph -------------------------------------------------------------------------------


def views_of(bases: Mapping[int, Sequence[Any]], nodes: Mapping[Any, fx.Node]) -> dict[int, View]:
    """Those of some results, by number, that are views of something else. bases: for each, what it may be a view of.
    nodes: the values of all in a complete graph."""
    found = {}
    for leaf, others in bases.items():
        ways = {_key(nodes[base]): base for base in reversed(others)}
        chain = _chain(nodes[leaf])
        met = [(i, ways[key]) for i, node in enumerate(chain) if (key := _key(node)) in ways]
        at = [i for i, base in met if i or _is_first(base, leaf)]
        if at and not any(isinstance(x, fx.Node) for step in _steps(chain[: at[-1]]) for x in _flat(step[1:])):
            found[leaf] = View(ways[_key(chain[at[-1]])], _steps(chain[: at[-1]]))
    return dict(sorted(found.items(), key=lambda each: _depth(each[0], found)))


def _is_first(base: Any, leaf: int) -> bool:
    """Whether of two that are one value, as `x` and `x[:]`, this is the one that the other is a view of."""
    return type(base) is not int or base < leaf


def _depth(leaf: Any, found: Mapping[int, View]) -> int:
    """How many views are to be made before what is at a leaf."""
    return 1 + _depth(found[leaf].of, found) if leaf in found else 0


def _operand(node: fx.Node) -> fx.Node | None:
    """The value that a node is a view of, or a piece of; None for one that is neither."""
    if node.target is operator.getitem or (isinstance(node.target, _torch.OpOverload) and _torch.is_view(node.target)):
        return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    return None


def _chain(node: fx.Node) -> list[fx.Node]:
    """A value and those that it is a view of, but for ops that return their operand."""
    found = [node]
    while (operand := _operand(found[-1])) is not None:
        if found[-1].target in RETURNS_OPERAND:
            found.pop()
        found.append(operand)
    return found


def _steps(chain: Sequence[fx.Node]) -> tuple[tuple, ...]:
    """The ops that make the first of some values of the one behind the last."""
    return tuple((node.target, *node.args[1:], *node.kwargs.values()) for node in reversed(chain))


def _key(node: fx.Node) -> Hashable:
    """What views that were made twice of one value in the same way have in common."""
    chain = _chain(node)
    return chain[-1], str(_steps(chain[:-1]))


def common_base(one: fx.Node, other: fx.Node) -> fx.Node | None:
    """The tensor that two values are views of, which shows all of their memory; None where there is none."""
    its = {_key(node) for node in _chain(other)}
    tensors = (node for node in reversed(_chain(one)) if isinstance(node.meta.get("val"), (torch.Tensor, TensorMeta)))
    return next((node for node in tensors if node.op != "placeholder" and _key(node) in its), None)


def share_elements(one: fx.Node, other: fx.Node) -> bool:
    """Whether two views of one memory may have common elements: not where they are different pieces of a split, or
    slices one behind the other."""
    mine, its = list(reversed(_chain(one))), list(reversed(_chain(other)))
    if mine[0] is not its[0]:
        return True
    n = 1
    while n < min(len(mine), len(its)) and _steps([mine[n]]) == _steps([its[n]]):
        n += 1
    if n < min(len(mine), len(its)) and mine[n].target is its[n].target is operator.getitem:
        return False
    boxes = [_box(each[n:]) for each in (mine, its)]
    return not any(_are_apart(a, b) for dim, a in boxes[0].items() for b in [boxes[1].get(dim)] if b is not None)


def _box(chain: Sequence[fx.Node]) -> dict[int, tuple[Any, Any]]:
    """By dim, where slices and selections at the begin of a chain begin and end; None for an end that is not known."""
    dims, found = list(range(MOST_DIMS)), {}
    for node in chain:
        if node.target not in (aten.select.int, aten.slice.Tensor) or len(node.args) < 3 or node.args[1] < 0:
            break
        _, at, begin, *end = node.args
        dim = dims[at]
        if dim in found or len(end) > 1:
            break
        if node.target is aten.select.int:
            del dims[at]
            end = [begin + 1 if type(begin) is int and begin >= 0 else None]
        found[dim] = begin or 0, end[0] if end else None
    return found


MOST_DIMS = 64
"""As many as torch has."""


def _are_apart(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Whether one interval ends where the other begins, or before."""
    return any(
        end is not None and (end == begin or (type(end) is type(begin) is int and 0 <= end <= begin))
        for (_, end), (begin, _) in ((a, b), (b, a))
    )
