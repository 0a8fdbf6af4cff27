"""Chunks: a product of matrices and the collective beside it, cut into pieces that overlap.

    y = all_reduce(linear(x, w))      ->    y0 = all_reduce(linear(x0, w)); y1 = all_reduce(linear(x1, w)); y = stack
    y = linear(all_gather(x), w)      ->    g0, g1 = all_gather(x0), all_gather(x1); y = stack of linear(g, w) of each
    dx, dw = linear_backward(...)     ->    dx0 = all_reduce(linear(dy0, w.t())); dx1 = ...; dw = linear_backward(...)

The first dim of the tokens is cut of which a rank has more than one index. No product sums over it, so every row is
made of what it was made of. While one piece is sent, the next one is computed. A backward product whose input's
gradient is reduced is taken apart, too: the gradient of the weight is computed while that of the input is sent. How
many pieces is decided by the replay, for all equal products at once; what does not make the program faster, or makes it
bigger, is left alone.

A dim in shards is cut on each rank, so that the pieces are in shards as well: f32[8@dp, k] in two pieces of
f32[4@dp, k]. That needs shards of one length, and rows enough; all others are left alone, and the report says so. Left
alone, too, are collectives that cut or join that dim themselves, products whose gathered operand others read, and
buckets.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

import torch
from torch import fx

from spmd.expand.constraints import PINNED
from spmd.expand.local_ops import LocalShape
from spmd.expand.nodes import take_origin
from spmd.expand.passes.keep_gathered import copied
from spmd.expand.passes.report import Figures, Noted
from spmd.expand.program import Program
from spmd.tensor.redistribute.collective_moves import AllGather, AllReduce, ReduceScatter
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec

aten = torch.ops.aten

PRODUCTS = {aten.linear.default, aten.mm.default}
PIECES = (1, 2, 4, 8)
"""How many pieces are tried. One piece takes a backward product apart, and is no change of others."""
LEAST_GAIN = 1e-3
"""What is cut makes the step shorter by this part, at least. Below it the model knows no difference."""


@dataclass(frozen=True)
class Site:
    """A product and the collective beside it, by their names. key: what equal sites have in common. us: of the
    collective. gradient: of a backward product, the result that is reduced. most: how many pieces there may be."""

    product: str
    sent: str
    key: Hashable
    us: float
    gradient: str = ""
    most: float = inf

    def __str__(self):
        return f"{self.product} and {self.sent}"


def chunked(program: Program, pieces: Sequence[int] = PIECES) -> Noted:
    """The same program with products cut where that makes it faster, and what was done. pieces: how many to try."""
    sites, left = [], []
    for node in program.graph.nodes:
        for found in _sites(node):
            (sites if isinstance(found, Site) else left).append(found)
    kinds: dict[Hashable, list[Site]] = {}
    for site in sites:
        kinds.setdefault(site.key, []).append(site)
    figures, did = Figures.of(program), []
    for equal in sorted(kinds.values(), key=lambda equal: -sum(site.us for site in equal)):
        program, new, said = _cut(program, figures, equal, pieces)
        (did if new is not figures else left).append(said)
        figures = new
    return Noted(program, tuple(did), tuple(left))


def in_pieces(program: Program, pieces: int) -> Program:
    """The same program with all products that can be cut in this number of pieces, whether that is faster or not."""
    found = [site for node in program.graph.nodes for site in _sites(node) if isinstance(site, Site)]
    return _written(program, [s for s in found if _divides(program, s, pieces) and (pieces > 1 or s.gradient)], pieces)


def _cut(program: Program, before: Figures, sites: Sequence[Site], pieces: Sequence[int]) -> tuple:
    """The program with these sites in the number of pieces that is fastest, its figures, and what was done."""
    best, figures, many = program, before, 0
    why = "a rank has too few rows, or shards are not of one length"
    for n in pieces:
        if (n == 1 and not sites[0].gradient) or not _divides(program, sites[0], n):
            continue
        made = _written(program, sites, n)
        found = Figures.of(made)
        why = "it would not be faster" if found.peak <= before.peak else "it would need more memory"
        if found.peak <= before.peak and found.us < figures.us * (1 - LEAST_GAIN):
            best, figures, many = made, found, n
    others = f" and {len(sites) - 1} equal ones" if len(sites) > 1 else ""
    if not many:
        return program, before, f"{sites[0]}{others}: {why}"
    return best, figures, f"{sites[0]}{others} in {many} pieces: {before.us - figures.us:,.1f} us less"


# ---- which products ---------------------------------------------------------------------------


def _sites(node: fx.Node) -> Iterator[Site | str]:
    """The product that a node is beside a collective, or why it is left alone; nothing for other nodes."""
    if not isinstance(node.target, Step) or not node.target.sends or PINNED in node.meta:
        return
    step, value = node.target, node.args[0]
    if isinstance(step.move, (AllReduce, ReduceScatter)):
        product = value.args[0] if _is_gradient(value) else value
        if not (_is_gradient(value) or product.target in PRODUCTS):
            return
        key = "reduced", _key(product), step
        site = Site(product.name, node.name, key, step.cost, value.name if _is_gradient(value) else "")
    elif isinstance(step.move, AllGather) and any(_reads_first(user, node) for user in node.users):
        product = next(iter(node.users))
        site = Site(product.name, node.name, ("gathered", _key(product), step), step.cost)
    else:
        return
    why = _why_not(node, value)
    if not why and not _keeps_rows(step):
        why = "the collective cuts or joins the dim of the tokens"
        if site.gradient:  # it can be taken apart, though it cannot be cut
            why, site = "", replace(site, most=1)
    yield f"{site}: {why}" if why else site


def _keeps_rows(step: Step) -> bool:
    """Whether a collective leaves the dim of the tokens alone that would be cut."""
    dim = _cut_dim(step.before)
    return step.before.dims[dim] == step.after.dims[dim] and step.before.ndim > 1


def _key(product: fx.Node) -> Hashable:
    return product.target, product.meta["spec"], tuple([n.meta["spec"] for n in product.all_input_nodes])


def _is_gradient(value: fx.Node) -> bool:
    """Whether a value is the gradient of the input of a product, as its backward makes it."""
    of = value.args[0] if value.target is not None and getattr(value.target, "__name__", "") == "getitem" else None
    is_first = of is not None and of.target is aten.linear_backward.default and value.args[1] == 0
    return is_first and list(of.args[3]) == [True, True, False]


def _reads_first(reader: fx.Node, value: fx.Node) -> bool:
    return reader.target in PRODUCTS and reader.args[0] is value and value not in reader.args[1:]


def _why_not(node: fx.Node, value: fx.Node) -> str:
    """Why a collective is not cut; empty if it can be."""
    if isinstance(node.target.move, AllGather):
        return "" if all(_reads_first(u, node) for u in node.users) and len(node.users) == 1 else "others read it, too"
    return "" if len(value.users) == 1 else "others read it before it is reduced"


# ---- pieces -----------------------------------------------------------------------------------


def _ranks(spec: Spec, dim: int) -> int:
    return prod([spec.mesh.shape[a] for a in spec.dims[dim]])


def _cut_dim(spec: Spec) -> int:
    """The first dim of tokens of which a rank has more than one index; pieces of it need no copies."""
    dims = range(max(1, spec.ndim - 1))
    return next((d for d in dims if spec.shape[d] != _ranks(spec, d)), 0)


def _divides(program: Program, site: Site, pieces: int) -> bool:
    """Whether each rank has as many indices of the dim that is cut as the others, in this number of equal pieces."""
    (node,) = [n for n in program.graph.nodes if n.name == site.sent]
    spec = node.target.before
    dim = _cut_dim(spec)
    even = spec.units[dim] == 1 and spec.shape[dim] % (_ranks(spec, dim) * pieces) == 0
    return pieces == 1 or (pieces <= site.most and even)


def _written(program: Program, sites: Sequence[Site], pieces: int) -> Program:
    program = copied(program)
    nodes = {node.name: node for node in program.graph.nodes}
    for site in sites:
        product, sent = nodes[site.product], nodes[site.sent]
        writer = _Writer(program.graph, product, pieces, _cut_dim(sent.target.before))
        if site.gradient:
            writer.take_apart(nodes[site.gradient], sent)
        elif isinstance(sent.target.move, AllGather):
            writer.cut_gathered(sent)
        else:
            writer.cut_reduced(sent)
    return program


@dataclass
class _Writer:
    """Writes a product in pieces of a dim. Nodes are written in front of `product`."""

    graph: fx.Graph
    product: fx.Node
    pieces: int
    dim: int

    def cut_reduced(self, sent: fx.Node) -> None:
        """The pieces of a product, each reduced as soon as it is there."""
        x, *others = self.product.args
        self._reduce(sent, [(piece, *others) for piece in self._cut(x)], self.product.target, self.product.meta["spec"])
        self.graph.erase_node(sent)
        self.graph.erase_node(self.product)

    def take_apart(self, gradient: fx.Node, sent: fx.Node) -> None:
        """The gradient of the input, each piece reduced as soon as it is there; behind them that of the weight."""
        x, dy, weight, _ = self.product.args
        turned = self._op(aten.t.default, (weight,), _turned(weight.meta["spec"]))
        pieces = [(piece, turned) for piece in (self._cut(dy) if self.pieces > 1 else [dy])]
        self._reduce(sent, pieces, aten.linear.default, gradient.meta["spec"])
        self.graph.erase_node(sent)
        self.graph.erase_node(gradient)
        self.product.args = (x, dy, dy, [False, True, False])  # no gradient of the input, so the weight is not read
        self.product.meta["spec"] = (None, *self.product.meta["spec"][1:])

    def cut_gathered(self, sent: fx.Node) -> None:
        """The pieces of what is gathered, and the product of each as soon as it is there."""
        step, (_, *others) = sent.target, self.product.args
        gathered = [self._move(step, piece) for piece in self._cut(sent.args[0])]
        spec = self.product.meta["spec"]
        made = [self._op(self.product.target, (g, *others), self._piece(spec)) for g in gathered]
        self.product.replace_all_uses_with(self._joined(made, spec))
        self.graph.erase_node(self.product)
        self.graph.erase_node(sent)

    def _reduce(self, sent: fx.Node, operands: Sequence[tuple], op: object, spec: Spec) -> None:
        made = [self._move(sent.target, self._op(op, args, self._piece(spec))) for args in operands]
        first = min(sent.users)  # nodes compare by their places
        with self.graph.inserting_before(first):
            joined = self._joined(made, sent.target.after, first) if self.pieces > 1 else made[0]
        sent.replace_all_uses_with(joined)

    # ---- single nodes -------------------------------------------------------------------------
    def _op(self, op: object, args: tuple, spec: Spec, before: fx.Node | None = None) -> fx.Node:
        with self.graph.inserting_before(before or self.product):
            node = self.graph.create_node("call_function", op, args, {})
        take_origin(node, self.product)
        node.meta["spec"] = spec
        return node

    def _move(self, step: Step, piece: fx.Node) -> fx.Node:
        after = self._piece(step.after)
        return self._op(Step(step.move, piece.meta["spec"], after), (piece,), after)

    def _piece(self, spec: Spec) -> Spec:
        d, shape = self.dim, spec.shape
        return spec.with_tensor((*shape[:d], shape[d] // self.pieces, *shape[d + 1 :]))

    def _apart(self, spec: Spec) -> tuple[Spec, int]:
        """The tensor with the dim that is cut as one of ranks, if it is in shards, one of pieces, and one of rows; and
        which of them is that of pieces."""
        d, ranks = self.dim, _ranks(spec, self.dim)
        head = ((ranks, spec.dims[d]),) if ranks > 1 else ()
        split = (*head, (self.pieces, ()), (spec.shape[d] // ranks // self.pieces, ()))

        def with_split(whole: Sequence, middle: Sequence) -> tuple:
            return (*whole[:d], *middle, *whole[d + 1 :])

        shape, dims = (with_split(x, [s[i] for s in split]) for i, x in enumerate((spec.shape, spec.dims)))
        units = with_split(spec.units, (1,) * len(split))
        return Spec.of(spec.mesh, shape, spec.dtype, dims=dims, units=units, partial=spec.partial), d + len(head)

    def _cut(self, x: fx.Node) -> list[fx.Node]:
        """The pieces of a value. Nothing is copied."""
        spec = x.meta["spec"]
        apart, at = self._apart(spec)
        value = self._view(x, apart)
        one = _without(apart, at)
        made = [self._op(aten.select.int, (value, at, i), one) for i in range(self.pieces)]
        return [self._view(piece, self._piece(spec)) if at > self.dim else piece for piece in made]

    def _joined(self, pieces: Sequence[fx.Node], spec: Spec, before: fx.Node | None = None) -> fx.Node:
        """The value of its pieces."""
        apart, at = self._apart(spec)
        one = _without(apart, at)
        rows = [self._view(piece, one, before) if at > self.dim else piece for piece in pieces]
        return self._view(self._op(aten.stack.default, (rows, at), apart, before), spec, before)

    def _view(self, x: fx.Node, spec: Spec, before: fx.Node | None = None) -> fx.Node:
        return self._op(aten.reshape.default, (x, LocalShape(spec)), spec, before)


def _without(spec: Spec, dim: int) -> Spec:
    shape, dims, units = ([x for d, x in enumerate(each) if d != dim] for each in (spec.shape, spec.dims, spec.units))
    return Spec.of(spec.mesh, tuple(shape), spec.dtype, dims=dims, units=tuple(units), partial=spec.partial)


def _turned(spec: Spec) -> Spec:
    return Spec.of(
        spec.mesh, spec.shape[::-1], spec.dtype, stride=spec.stride[::-1], dims=spec.dims[::-1],
        units=tuple(spec.units[::-1]), partial=spec.partial,
    )  # fmt: skip
