"""The values of a program that wait long for a reader, and what it takes to compute them again.

    h = linear(x, w); y = gelu(h); ...; dh = gelu_backward(dy, h)       h waits from gelu to gelu_backward

A value may be freed behind its last reader before the wait, and be computed again before the first one behind it. Its
op is a *unit*: all results of an op are freed together. Places are those of the program's nodes.

A gather that is made twice of the same parameter counts as one value that must be freed between (`folded`), so that who
is computed again between the two finds it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import fx

from spmd import _torch
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp
from spmd.expand.nodes import is_backward
from spmd.expand.passes.keep_gathered import copied
from spmd.expand.program import Program
from spmd.expand.timeline.work import Work
from spmd.tensor.call import READS_VALUE
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Step

MUCH = 0.5
"""A value can be freed if it waits at a time at which so much waits, as a part of the most that does."""


@dataclass(frozen=True)
class Root:
    """A value with memory of its own.

    place: of its node. unit: the place of the op that makes it. nbytes: its size. touches: where it, or a view of it,
    is made or read. before, after: the touches around its longest wait.
    """

    place: int
    unit: int
    nbytes: int
    touches: tuple[int, ...]
    before: int
    after: int


@dataclass(frozen=True)
class Values:
    """What is known of the values of a program.

    roots: values that ops make, by place. units: for each op that may be computed again, its roots that wait long, in
    order of the program. forced: units that are freed in any case. alive: bytes alive at each node.
    """

    program: Program
    nodes: tuple[fx.Node, ...]
    work: Work
    roots: dict[int, Root]
    units: dict[int, tuple[Root, ...]]
    forced: frozenset[int]
    alive: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, forced: frozenset[str]) -> Values:
        """The values of a folded program. forced: the names of nodes that are freed in any case. Of those one after the
        other, as where a parameter is gathered in two steps, the first ones have one reader, and are gone behind it."""
        return _Reader(program, program.work).values(forced)

    @cached_property
    def turn(self) -> int:
        """The last place at which a value that can be freed is read before it waits."""
        return max([r.before for roots in self.units.values() for r in roots], default=0)

    def root(self, place: int) -> int:
        """The place of the value whose memory a node shows."""
        return self.work.tasks[place].shows

    def unit(self, place: int) -> int:
        """The place of the op that makes the value of a node."""
        found = self.roots.get(self.root(place))
        return self.root(place) if found is None else found.unit


@dataclass
class _Reader:
    program: Program
    work: Work
    nodes: tuple[fx.Node, ...] = ()
    touches: dict[int, list[int]] = field(default_factory=dict)

    def values(self, forced: frozenset[str]) -> Values:
        self.nodes = tuple(self.program.graph.nodes)
        tasks = self.work.tasks
        for i, task in enumerate(tasks):
            if task.makes:
                self.touches[i] = [i]
        for i, task in enumerate(tasks):
            if task.is_op or self.nodes[i].op == "output":
                for r in task.reads:
                    if (shown := tasks[r].shows) in self.touches and self.touches[shown][-1] != i:
                        self.touches[shown].append(i)
        must = frozenset([i for i, reads in self.touches.items() if self.nodes[i].name in forced and len(reads) > 2])
        roots = {i: self._root(i, touches, i in must) for i, touches in self.touches.items()}
        alive = tuple(self.work.memory(range(len(tasks))))
        units = self._units(roots, must)
        return Values(self.program, self.nodes, self.work, roots, units, must.intersection(units), alive)

    def _root(self, i: int, touches: Sequence[int], is_folded: bool) -> Root:
        node = self.nodes[i]
        reads = touches[1:] if is_folded and len(touches) > 2 else touches  # a schedule may gather long before it reads
        is_piece = node.target is operator.getitem and node.op == "call_function"
        unit = self.work.tasks[i].reads[0] if is_piece else i
        before, after = max(itertools.pairwise(reads), key=lambda w: w[1] - w[0], default=(i, i))
        return Root(i, unit, self.work.tasks[i].makes, tuple(touches), before, after)

    def _waits(self, root: Root) -> bool:
        """Whether a value waits for the backward. Gradients, which wait for the optimiser, do not."""
        return is_backward(self.nodes[root.after]) and not is_backward(self.nodes[root.unit])

    def _units(self, roots: dict[int, Root], forced: frozenset[int]) -> dict[int, tuple[Root, ...]]:
        """The ops whose results wait while much waits, and that can be computed again."""
        idle = np.zeros(len(self.nodes) + 1, dtype=np.int64)
        can = recomputable(self.nodes)
        fine = [r for r in roots.values() if can[r.unit] and can[r.place] and r.after > r.before + 1]
        waiting = [r for r in fine if r.unit in forced or self._waits(r)]
        for r in waiting:
            idle[r.before + 1] += r.nbytes
            idle[r.after] -= r.nbytes
        busy = np.flatnonzero(np.cumsum(idle) >= MUCH * max(1, int(np.cumsum(idle).max(initial=0))))
        found: dict[int, list[Root]] = {}
        for r in waiting:
            covered = np.searchsorted(busy, r.before + 1) < np.searchsorted(busy, r.after)
            if (covered or r.unit in forced) and self.nodes[r.unit].op == "call_function":
                found.setdefault(r.unit, []).append(r)
        return {unit: tuple(found[unit]) for unit in sorted(found)}


def recomputable(nodes: Sequence[fx.Node]) -> list[bool]:
    """For each node, whether running it twice gives the same twice and changes nothing.

    What reads memory that an op of the program writes into does not.
    """
    written = {_base(n.args[0]) for n in nodes if isinstance(n.target, _torch.OpOverload) and _torch.written(n.target)}
    return [_is_pure(node) and written.isdisjoint(map(_base, (node, *node.all_input_nodes))) for node in nodes]


def _is_pure(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr")
    if isinstance(node.target, (Bucket, LocalMapOp, LocalMapGradientOp)) or node.target in READS_VALUE:
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_pure(node.args[0])
    return not (isinstance(node.target, _torch.OpOverload) and _torch.written(node.target))  # draws have numbers


def _base(node: object) -> object:
    while isinstance(node, fx.Node) and isinstance(node.target, _torch.OpOverload) and _torch.is_view(node.target):
        node = node.args[0]
    return node


# ---- gathers that are made twice ---------------------------------------------------------------


def folded(program: Program) -> tuple[Program, frozenset[str]]:
    """The program with each parameter gathered once, where it was gathered again; and the names of these gathers."""
    program = copied(program)
    numbers: dict[fx.Node, Hashable] = {}
    first: dict[Hashable, fx.Node] = {}
    forced: set[str] = set()
    can = recomputable(tuple(program.graph.nodes))
    for node, fine in zip(list(program.graph.nodes), can, strict=True):
        key = _key(node, numbers) if fine else None
        if key is None:
            continue
        numbers[node] = key
        kept = first.setdefault(key, node)
        if kept is not node:
            forced.add(kept.name)
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)
    return program, frozenset(forced)


def _key(node: fx.Node, numbers: dict[fx.Node, Hashable]) -> Hashable | None:
    """What tells apart values that follow from one input alone; None for others."""
    if node.op == "placeholder":
        return node.name
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or node.all_input_nodes[0] not in numbers:
        return None
    if not isinstance(node.target, Step) and not (isinstance(node.target, _torch.OpOverload) and _is_cheap(node)):
        return None
    try:
        key = node.target, numbers[node.all_input_nodes[0]], str(node.args[1:]), str(node.kwargs)
        hash(key)
    except TypeError:
        return None
    return key


def _is_cheap(node: fx.Node) -> bool:
    """Whether an op is a view or a cast, as they stand around gathers."""
    return _torch.is_view(node.target) or node.target in (
        torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default
    )  # fmt: skip
