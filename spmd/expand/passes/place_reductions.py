"""Reduce where it costs least: once at the end of a chain of linear ops, or at its beginning, and not at each step.

    (x + all_reduce(a)) + all_reduce(b)             ->   all_reduce((to_partial(x) + a) + b)
    all_reduce(g * w), all_reduce((g * y).sum(0))   ->   h = all_reduce(g); h * w, (h * y).sum(0)

The expander decides op by op, and cannot see what reads a result later. Here the program is complete. The values that
owe sums, or could owe them because the ops between are linear, form a graph. Each path in it leads from an op that
makes terms to a reader that needs the sum, and somewhere on the path the terms are reduced. So the cheapest places are
a minimum cut (`minimum_cut.py`). Local ops stay what they are: only which of their values are terms changes.

A value that the user has pinned stays what it is.

Left out: reductions to shards, reductions over a part of the axes, and ops with several results.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.constraints import PINNED
from spmd.expand.local_ops import SAFE_LOCALLY, LocalCount, LocalShape
from spmd.expand.minimum_cut import minimum_cut
from spmd.expand.nodes import added, described, described_call, take_origin
from spmd.expand.passes.keep_gathered import copied
from spmd.expand.program import Program
from spmd.tensor.cache import Cache
from spmd.tensor.call import SCALAR, Call, TensorMeta
from spmd.tensor.lower.follows import why_not
from spmd.tensor.lower.price import DELAYED, latency_us
from spmd.tensor.redistribute.collective_moves import AllReduce
from spmd.tensor.redistribute.moves import ToPartial
from spmd.tensor.redistribute.plan import Plan, Step, plan
from spmd.tensor.spec import Spec

Owed = tuple[tuple[int, str], ...]
"""What a value owes: the `partial` of its spec."""


def place_reductions(program: Program, own: bool = False) -> Program:
    """The same program with its sums reduced where that costs least, by the modelled cost; itself where they are.

    own: whether the given program is not needed any more, so that its graph can be changed.
    """
    new, changed = replace(program) if own else copied(program), False
    steps = [step for _, step in new.steps() if isinstance(step, Step) and isinstance(step.move, AllReduce)]
    for owed in dict.fromkeys(step.before.partial for step in steps if not step.after.partial):
        if all(kind == "sum" for _, kind in owed):
            for values in _Terms.of(new.graph, owed).components():
                changed |= values.improve()
    return new if changed else program


@dataclass
class _Terms:
    """The values of a graph that owe these sums, or could owe them.

    sources: for each of the values, in order, the others of them that its op reads. made: those whose op makes terms.
    summed: those that have a reader who needs the sum. kept: those that some reader wants as they are.
    """

    graph: fx.Graph
    owed: Owed
    sources: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    made: set[fx.Node] = field(default_factory=set)
    summed: set[fx.Node] = field(default_factory=set)
    kept: set[fx.Node] = field(default_factory=set)
    _linear: dict[Hashable, bool] = field(default_factory=dict)
    _read: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.Graph, owed: Owed) -> _Terms:
        """All of them. What needs the sum of a value can leave its readers without terms, so it is asked again."""
        barred: set[fx.Node] = set()
        known: dict[Hashable, bool] = {}
        read: dict[fx.Node, tuple[fx.Node, ...]] = {}
        found = cls(graph, owed)
        makers = [n for n in graph.nodes if found._owes(n) and not found._is_move(n)]
        while True:
            found = cls(graph, owed, _linear=known, _read=read)
            new = found._scan(makers, barred)
            if not new:
                return found
            barred |= new

    # ---- what the values are ------------------------------------------------------------------
    def _values(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The values that a node reads."""
        found = self._read.get(node)
        if found is None:
            found = self._read[node] = tuple(dict.fromkeys(map(self.base, _torch.operands_of(node))))
        return found

    def _readers(self, value: fx.Node) -> Iterator[fx.Node]:
        """The nodes that read a value, or a move of it, and are no such moves."""
        for user in value.users:
            if self._is_move(user):
                yield from self._readers(user)
            else:
                yield user

    def _in_order(self, makers: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """The nodes that owe sums, and the readers of all values that are found on the way, in the order of the graph.
        """
        queue, met, seen = list(makers), set(makers), 0
        while queue:
            yield heapq.heappop(queue)  # nodes compare by their places
            for value in itertools.islice(reversed(self.sources), len(self.sources) - seen):
                for reader in self._readers(value):
                    if reader not in met:
                        met.add(reader)
                        heapq.heappush(queue, reader)
            seen = len(self.sources)

    def _scan(self, makers: Sequence[fx.Node], barred: set[fx.Node]) -> set[fx.Node]:
        """Go through the values once. makers: the nodes that owe sums. barred: values whose readers get the sum.
        Returns further ones."""
        clash: set[fx.Node] = set()
        for node in self._in_order(makers):
            read = tuple([b for b in self._values(node) if b in self.sources])
            if not read:
                self._note_made(node)
                continue
            free = tuple(b for b in read if b not in barred)
            if free and self._is_linear(node, free):
                self.sources[node] = free
                self._note_readers(node, [b for b in read if b in barred])
                continue
            if len(free) > 1 and all(self._is_linear(node, (b,)) for b in free):
                clash |= {b for b in free if not self._reads_terms(node, b)} or set(free)
            self._note_readers(node, read)
            self._note_made(node)
        return self._to_bar(barred, clash)

    def _note_made(self, node: fx.Node) -> None:
        if self._owes(node):
            self.sources[node] = ()
            self.made.add(node)

    def _to_bar(self, barred: set[fx.Node], clash: set[fx.Node]) -> set[fx.Node]:
        """The values that are reduced in any case, and that no op reads as terms now."""
        reduced = {n for n in self.summed if n in self.made or n in self.sources}
        terms_read = {b for n, read in self.sources.items() for b in read if self._reads_terms(n, b)}
        return reduced - terms_read - self.kept - barred or clash - barred

    def _note_readers(self, node: fx.Node, read: Sequence[fx.Node]) -> None:
        for b in read:
            (self.kept if self._reads_terms(node, b) else self.summed).add(b)

    def _reads_terms(self, node: fx.Node, value: fx.Node) -> bool:
        return node in value.users and self._owes(value)

    def _owes(self, node: fx.Node) -> bool:
        spec = node.meta.get("spec")
        return isinstance(spec, Spec) and spec.partial == self.owed

    def _is_move(self, node: fx.Node) -> bool:
        """Whether a node reduces these sums, or makes terms of a replicated value."""
        step = node.target
        if not isinstance(step, Step) or step.before.dims != step.after.dims or PINNED in node.meta:
            return False
        ends = (step.before.partial, step.after.partial)
        if isinstance(step.move, AllReduce):
            return ends == (self.owed, ())
        return isinstance(step.move, ToPartial) and ends == ((), self.owed)

    def base(self, node: fx.Node) -> fx.Node:
        """The value that a node has, before it was reduced or made terms of."""
        while self._is_move(node):
            node = node.args[0]
        return node

    def _is_linear(self, node: fx.Node, read: tuple[fx.Node, ...]) -> bool:
        """Whether the op gives terms if these operands are terms, and the sum if all operands are sums."""
        found = self._linear.get((node, read))
        if found is None:
            found = self._linear[node, read] = self._linear_by_specs(node, read)
        return found

    def _linear_by_specs(self, node: fx.Node, read: tuple[fx.Node, ...]) -> bool:
        """The same, asked once of all nodes whose operands have the same specs."""
        if not isinstance(node.target, _torch.OpOverload):
            return False

        def operand(x: fx.Node) -> tuple:
            base = self.base(x)
            return x.meta.get("spec"), base.meta.get("spec"), base in read

        try:
            key = described_call(node, operand), node.meta.get("spec"), PINNED in node.meta
            found = self._linear.get(key)
        except TypeError:  # an argument that has no hash
            return self._found_linear(node, read)
        if found is None:
            found = self._linear[key] = self._found_linear(node, read)
        return found

    def _found_linear(self, node: fx.Node, read: tuple[fx.Node, ...]) -> bool:
        spec = node.meta.get("spec")
        if not isinstance(spec, Spec) or self.terms(spec) is None:
            return False
        if PINNED in node.meta:
            return False
        if spec.partial not in ((), self.owed) or _counts(node) or _casts(node):
            return False
        operands = {x: self.base(x) for x in _torch.operands_of(node) if isinstance(x.meta.get("spec"), Spec)}
        sums = {x: self.sum(b.meta["spec"]) for x, b in operands.items()}
        return _follows(node, sums, self.sum(spec)) and self.layout(node, frozenset(read)) is not None

    def terms(self, spec: Spec) -> Spec | None:
        """The spec as terms of these sums; None where their axes shard the tensor, and where terms make no such sum."""
        sharding = {a for axes in spec.dims for a in axes}
        if spec.dtype is torch.bool or spec.partial not in ((), self.owed) or sharding & {a for a, _ in self.owed}:
            return None
        return spec.with_layout(spec.dims, spec.units, self.owed)

    def sum(self, spec: Spec) -> Spec:
        """The spec without these sums owed."""
        return spec.with_layout(spec.dims, spec.units) if spec.partial == self.owed else spec

    def layout(self, node: fx.Node, terms: frozenset[fx.Node]) -> dict[fx.Node, Spec] | None:
        """The specs that operands must have so that the op gives terms, if these values are terms; None if none do.

        The other operands stay sums, or, where the op adds them, all become terms.
        """
        operands = {x: self.base(x) for x in _torch.operands_of(node) if isinstance(x.meta.get("spec"), Spec)}
        for others in (self.sum, self.terms):
            specs = {x: (self.terms if b in terms else others)(b.meta["spec"]) for x, b in operands.items()}
            if None not in specs.values() and _follows(node, specs, self.terms(node.meta["spec"])):
                return specs
        return None

    # ---- parts that have nothing to do with each other ----------------------------------------
    def components(self) -> Iterator[_Component]:
        """The values in sets that no path connects, of those that are reduced more than once."""
        leader = {n: n for n in self.sources}

        def find(n: fx.Node) -> fx.Node:
            while leader[n] is not n:
                n = leader[n]
            return n

        for n, read in self.sources.items():
            for b in read:
                leader[find(b)] = find(n)
        sets: dict[fx.Node, list[fx.Node]] = {}
        for n in self.sources:
            sets.setdefault(find(n), []).append(n)
        for values in sets.values():
            if sum(len(self.reductions(n)) for n in values) > 1:
                yield _Component(self, values)

    def reductions(self, node: fx.Node) -> list[fx.Node]:
        """The moves that reduce a value."""
        return [r for r in node.users if self._is_move(r) and isinstance(r.target.move, AllReduce)]


@dataclass
class _Component:
    """Values of a graph with the paths between them. values: in the order of the graph."""

    of: _Terms
    values: list[fx.Node]

    def improve(self) -> bool:
        """Move the reductions of these values, if that makes the program cheaper. Returns whether it did."""
        cut, owing = self._cut()
        reduced = cut | (self.of.summed & owing)
        terms = {n for n in self.values if n in owing}
        before = sum(r.target.cost for n in self.values for r in self.of.reductions(n))
        layouts = self._layouts(terms, terms - cut)
        if layouts is None:
            return False
        new_terms = [(x, spec) for specs in layouts.values() for x, spec in specs.items() if spec.partial]
        copies = sum(
            plan(self.of.sum(spec), spec).modelled_us for x, spec in new_terms if self.of.base(x) not in terms - cut
        )
        is_cheaper = sum(self._reduction(n).modelled_us for n in reduced) + copies < before - 1e-9
        if is_cheaper:
            self._rewrite(terms, reduced, layouts)
        return is_cheaper

    def _cut(self) -> tuple[set[fx.Node], set[fx.Node]]:
        """The values to reduce, and those that are terms."""
        readers: dict[fx.Node, list[fx.Node]] = {n: [] for n in self.values}
        for n in self.values:
            for b in self.of.sources[n]:
                readers[b].append(n)
        fixed = self._before_kept()
        prices = {n: inf if n in fixed else self._price(n) for n in self.values}
        made = [n for n in self.values if n in self.of.made]
        return minimum_cut(prices, readers, made, [n for n in self.values if n in self.of.summed - fixed])

    def _before_kept(self) -> set[fx.Node]:
        """The values that lead to one that some reader wants as terms."""
        found: set[fx.Node] = set()
        queue = [b for n in self.values if n in self.of.kept for b in self.of.sources[n]]
        while queue:
            n = queue.pop()
            if n not in found:
                found.add(n)
                queue += self.of.sources[n]
        return found

    def _reduction(self, node: fx.Node) -> Plan:
        spec = node.meta["spec"]
        return plan(self.of.terms(spec), self.of.sum(spec))

    def _price(self, node: fx.Node) -> float:
        """The time of reducing a value. What leaves the program as it is can be reduced with others, in a bucket."""
        us, spec = self._reduction(node).modelled_us, node.meta["spec"]
        if all(r.op == "output" for x in (node, *self.of.reductions(node)) for r in x.users if not self.of._is_move(r)):
            us -= (1 - DELAYED) * sum(latency_us(a, spec.mesh.topology) for a, _ in self.of.owed)
        return us

    # ---- writing it ---------------------------------------------------------------------------
    def _layouts(self, terms: set[fx.Node], passed_on: set[fx.Node]) -> dict[fx.Node, dict[fx.Node, Spec]] | None:
        """The specs of the operands of each value that becomes terms of others. passed_on: the terms that are read."""
        found = {}
        for n in self.values:
            if n in terms and n not in self.of.made:
                found[n] = self.of.layout(n, frozenset(b for b in self.of.sources[n] if b in passed_on))
        return None if None in found.values() else found

    def _rewrite(self, terms: set[fx.Node], reduced: set[fx.Node], layouts: Mapping) -> None:
        old = {n: self.of.reductions(n) for n in self.values}
        sums: dict[fx.Node, fx.Node] = {}
        for n in self.values:
            spec = n.meta["spec"]
            if n not in self.of.made:
                self._set_spec(n, self.of.terms(spec) if n in terms else self.of.sum(spec))
                operands = {x: self._operand(x, layouts[n][x] if n in layouts else None, terms, sums, n)
                            for x in n.all_input_nodes if isinstance(x.meta.get("spec"), Spec)}  # fmt: skip
                n.args, n.kwargs = fx.map_arg((n.args, n.kwargs), lambda x, new=operands: new.get(x, x))
            if n in reduced:
                others = [] if spec.partial else [user for user in n.users if n not in self.of.sources.get(user, ())]
                sums[n] = self._moved(n, self._reduction(n), after=n)
                for user in others:
                    user.replace_input_with(n, sums[n])
            elif n not in terms:
                sums[n] = n
        for n, moves in old.items():
            for r in moves:
                if n in sums and r.users:
                    r.replace_all_uses_with(sums[n])
        self._drop_unread()

    def _operand(self, x: fx.Node, want: Spec | None, terms, sums: Mapping[fx.Node, fx.Node], reader: fx.Node):
        """The node of an operand in the spec that is wanted; of its sum if nothing is said."""
        base, wants_terms = self.of.base(x), want is not None and bool(want.partial)
        if wants_terms and base.meta["spec"].partial and base not in sums:
            return base
        value = sums.get(base) or (self._sum_of(base) if base.meta["spec"].partial == self.of.owed else base)
        return self._moved(value, plan(value.meta["spec"], want), before=reader) if wants_terms else value

    def _sum_of(self, value: fx.Node) -> fx.Node:
        """The sum of a value that is not of this set, and is reduced."""
        found = self.of.reductions(value)
        return found[0] if found else self._moved(value, self._reduction(value), after=value)

    def _moved(self, value: fx.Node, moves: Plan, after: fx.Node | None = None, before: fx.Node | None = None):
        of = before or after
        for step in moves.effective.steps:
            with self.of.graph.inserting_after(after) if after is not None else self.of.graph.inserting_before(before):
                new = added(self.of.graph, "call_function", step, (value,), {}, step.move.kind)
            take_origin(new, of)
            new.meta["spec"] = step.after
            value, after = new, new if after is not None else None
        return value

    def _set_spec(self, node: fx.Node, spec: Spec) -> None:
        node.meta["spec"] = spec
        node.args, node.kwargs = fx.node.map_aggregate(
            (node.args, dict(node.kwargs)), lambda a: LocalShape(spec) if isinstance(a, LocalShape) else a
        )

    def _drop_unread(self) -> None:
        for node in reversed(self.of.graph.nodes):
            if not node.users and isinstance(node.target, Step) and self.of._is_move(node):
                self.of.graph.erase_node(node)


# ---- ops with other specs ---------------------------------------------------------------------


def _casts(node: fx.Node) -> bool:
    """Whether an op changes the dtype. Terms are added in the dtype in which the user has them added: a gradient that
    is cast to float32 to be reduced is not reduced in bfloat16, though that would send half the bytes."""
    specs = [x.meta.get("spec") for x in _torch.operands_of(node)]
    return any(isinstance(s, Spec) and s.dtype != node.meta["spec"].dtype for s in specs)


def _counts(node: fx.Node) -> bool:
    found: list[Any] = []
    fx.node.map_aggregate((node.args, dict(node.kwargs)), lambda a: found.append(isinstance(a, LocalCount)))
    return any(found)


_AS_LOWERED = {safe: op for op, safe in SAFE_LOCALLY.items()}


_followed = Cache(maxsize=8192, decided_by_rules=True)
"""Whether results follow, by op, arguments, and the spec of the result."""


def _follows(node: fx.Node, specs: Mapping[fx.Node, Spec], out: Spec) -> bool:
    """Whether the result follows from the operands of a node, if they have these specs."""
    args, kwargs = fx.node.map_aggregate(
        (node.args, dict(node.kwargs)), lambda x: list(x.spec.shape) if isinstance(x, LocalShape) else x
    )
    try:
        key = node.target, described(args, specs.get), described(dict(kwargs), specs.get), out
    except TypeError:  # an argument that has no hash
        return _follow(node.target, args, dict(kwargs), specs, out)
    return _followed.get(key, lambda: _follow(node.target, args, dict(kwargs), specs, out))


def _follow(op: _torch.OpOverload, args, kwargs: dict[str, Any], specs: Mapping[fx.Node, Spec], out: Spec) -> bool:
    args, kwargs = fx.map_arg((args, kwargs), lambda x: specs.get(x, SCALAR))
    metadata = (TensorMeta(out.shape, out.stride, out.dtype),)
    return not why_not(Call(_AS_LOWERED.get(op, op), args, kwargs, metadata), (out,))
