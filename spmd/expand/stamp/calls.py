"""Whole calls of a model that come again, such as those of micro-batches, are written as the second one was.

    for x, y in micro_batches:                   the first two: traced, with their blocks stamped
        loss(model(x), y).backward()      ->     others: two parts of the graph, forward and backward, written again

What is asked of the first two is what is asked of calls of blocks (`blocks`, `kind`): equal nodes, and nothing else
that their code can see. But here both are plain calls, so a step that calls its model once is captured as ever: only
calls within a loop are looked at. The backward part is what the engine wrote behind the second call, from the gradients
of its results to the last sum into the gradient of a parameter. It is written again with these sums, in their order,
when the engine comes to a later call; then the engine finds that its marks and sums are there (`phases.Ahead`).

A model whose arguments have gradients, whose parameters are also used elsewhere, or that changes its state is traced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.guards import guard_key
from spmd.expand.hooks import accumulate_hooks, gradient_hooks
from spmd.expand.modules import buffers_of, parameters_of
from spmd.expand.origins import GRADIENT_OF, ORIGIN, SITES, Site, user_lines
from spmd.expand.phases import Ahead, is_dense
from spmd.expand.sources.layout import COMPARED_BY_VALUE
from spmd.expand.stamp.given import Given, node_of
from spmd.expand.stamp.kind import Kind
from spmd.expand.stamp.parts import Part, differing, metadata
from spmd.expand.stamp.reach import names_of
from spmd.expand.stamp.repeats import Structure, has_hooks
from spmd.expand.stamp.stencil import Stencil, notes_of
from spmd.expand.stamp.watch import AutogradSeen, Watch
from spmd.expand.user_code import is_in_loop
from spmd.tensor.recipes import stream

if TYPE_CHECKING:
    from spmd.expand.stamp.blocks import Blocks

log = logging.getLogger("spmd.expand")

GRADIENT, SUM = torch.ops.spmd.gradient.default, torch.ops.aten.add.Tensor


class _Unlike(Exception):
    """Calls that are traced, each by itself."""


def _refuse(why: str) -> None:
    raise _Unlike(why)


class Calls:
    """The calls of one capture. kinds: those that were looked at, by kind. running: whether one is under way."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.kinds: dict[Hashable, Kind] = {}
        self.stamped: list[_Call] = []
        self._structures: dict[int, Structure] = {}
        self._is_running = False

    def call(self, module: nn.Module, plain: Callable, args: tuple, kwargs: dict) -> Any:
        """What the module gives: traced, or written again."""
        mode, origins = _torch.proxy_mode(), self.blocks.origins
        if mode is None or self._is_running or len(origins.stack) > 1 or not is_in_loop(origins.outermost):
            return plain(*args, **kwargs)
        if _torch.in_backward() or _torch.saved_tensors_are_hooked() or has_hooks(module):
            return plain(*args, **kwargs)
        structure = self._structures.setdefault(id(module), Structure((module,), frozenset()))
        path = origins.paths.get(id(module), "")
        given = Given.of(module, structure, args, kwargs, mode.tracer, path, wherever=True)
        if given is None or not _are_leaves(given):
            return plain(*args, **kwargs)
        lines = user_lines(origins.outermost)
        kind = self.kinds.setdefault((given.kind, lines), Kind(_refuse, frozenset()))
        if not kind.takes(given):
            return plain(*args, **kwargs)
        if len(kind.calls) == 2:
            if (again := kind.calls[1].again(given)) is not None:
                return again
            return plain(*args, **kwargs)
        return self._traced(kind, given, plain, args, kwargs)

    def _traced(self, kind: Kind, given: Given, plain: Callable, args: tuple, kwargs: dict) -> Any:
        """The result of a plain call, which is noted."""
        made = _Call(self, given)
        self._is_running = True
        try:
            with AutogradSeen() as asked, made.seen:
                found = plain(*args, **kwargs)
        finally:
            self._is_running = False
        try:
            made.finish(found, asked.found)
            kind.add(made)
        except _Unlike as unlike:
            kind.plain = str(unlike)
            log.debug("whole calls of %s are traced one by one: %s", given.path, unlike)
        return found

    def close(self) -> None:
        """To be called when the trace has ended, be it by an error."""
        for call in (call for kind in self.kinds.values() for call in kind.calls if call.back is not None):
            call.back.stop()

    def finish(self) -> None:
        """Check that what was written again is all that the calls have made."""
        for call in {id(x): x for x in self.stamped}.values():
            call.check_nothing_leaks()


def _are_leaves(given: Given) -> bool:
    """Whether autograd begins with the parameters of a call: its arguments come from nowhere."""
    own = len(given.tensors) - len(parameters_of(given.module))
    with _torch.no_function_modes():
        return not any(x.requires_grad for x in given.tensors[:own]) and all(x.is_leaf for x in given.tensors[own:])


@dataclass(eq=False)
class _Call:
    """A call that is traced. part, stencil: of its forward pass. back: of the backward pass, as far as it was noted."""

    calls: Calls
    given: Given
    seen: Watch = field(default_factory=Watch)
    read: frozenset[str] = frozenset()
    custom: str = ""

    def __post_init__(self) -> None:
        self.back: _Back | None = None
        self.tracer = _torch.proxy_mode().tracer
        self._last, self._before = next(iter(reversed(self.tracer.graph.nodes))), notes_of(self.given.nodes)
        self._drawn, self._own = stream.get_rng_state(), self._tensors()

    # ---- what a kind asks ------------------------------------------------------------------------
    def has_made(self, x: torch.Tensor) -> bool:
        return False  # a kind that reaches a tensor of the trace is plain

    def compare(self, first: _Call) -> None:
        """Check that two calls are alike, and listen to the backward pass of this one."""
        same = self.tree == first.tree and len(self.leaves) == len(first.leaves)
        if not same or self.differentiable != first.differentiable:
            _refuse("two calls of a module give other kinds of results")
        pairs = zip(self.leaves, first.leaves, strict=True)
        if any(a is not b if _MADE in (a, b) else guard_key(a) != guard_key(b) for a, b in pairs):
            _refuse("two calls of a module give other results")
        root = self.tracer.root
        with _torch.no_modes():
            if where := differing(first.part, self.part, lambda name: getattr(root, name)):
                _refuse(f"two calls of a module differ: {where}")
        _check_closed(self.part)
        if any(self.differentiable):
            self.back = _Back.listening(self)

    # ---- forward --------------------------------------------------------------------------------
    def _tensors(self) -> list[int]:
        return [id(x) for x in (*parameters_of(self.given.module), *buffers_of(self.given.module))]

    def finish(self, found: Any, asked: str) -> None:
        """Note what the call has written and given. Raises _Unlike."""
        leaves, self.tree = pytree.tree_flatten(found)
        self.leaves = [_MADE if isinstance(x, torch.Tensor) else x for x in leaves]
        self.made = [x for x in leaves if isinstance(x, torch.Tensor)]
        if not all(isinstance(x, (_torch.FunctionalTensor, *COMPARED_BY_VALUE)) for x in leaves):
            _refuse("a module gives something else than tensors and plain values")
        aside = self.calls.blocks.aside_nodes()
        nodes = tuple(n for n in _between(self._last, None) if n not in aside)
        outputs = tuple(node_of(x, self.tracer) for x in self.made)
        self.part = Part(nodes, self.given.nodes, outputs)
        with _torch.no_function_modes():
            self._check(set(nodes), asked)
            self.differentiable = [x.requires_grad for x in self.made]
            self.custom = "a function of the user's" if _torch.has_custom_functions(self.made) else ""
        self.stencil = Stencil.of(self.part, self.given.path, self._before)
        self.inner_sites = [n.meta.get(SITES, ()) for n in outputs]

    def _check(self, nodes: set[fx.Node], asked: str) -> None:
        given, made = (*self.given.tensors, *self.given.buffers), self.made
        if not set(self.part.outputs) <= nodes or any(map(_torch.user_attributes, made)):
            _refuse("a module gives what it has not made")
        if any(not names_of(c.code).attributes.isdisjoint(_PLACES) for c in self.seen.codes):
            _refuse("a module may see where its arguments are in their memory")
        if asked:
            _refuse(f"a module uses {asked} of its tensors")
        if any(node_of(x, self.tracer) is not n for x, n in zip(given, self.given.nodes, strict=True)):
            _refuse("a module writes into what it is given")
        memories = [_torch.memory_of(_torch.from_functional(x)) for x in made]
        theirs = {_torch.memory_of(_torch.from_functional(x)) for x in given}
        if len(set(memories)) < len(memories) or theirs & set(memories):
            _refuse("a module gives a view of what it is given, or two of one tensor")
        if self._tensors() != self._own:
            _refuse("a module puts another tensor in the place of a parameter or a buffer")
        own = {id(x) for x in self.given.tensors}
        if any(id(x) not in own for y in made for x in _torch.leaves_behind(y)):
            _refuse("a module computes with a parameter that is not its own")
        draws, now = [n.meta["draw"] for n in self.part.nodes if "draw" in n.meta], stream.get_rng_state()
        if None in (self._drawn, now) or draws != list(range(self._drawn["drawn"], now["drawn"])):
            _refuse("a module sets the generator of random numbers back")

    # ---- written again --------------------------------------------------------------------------
    def again(self, given: Given) -> Any:
        """What the call gives for other arguments; None where it has to be traced."""
        back = None if self.back is None else self.back.complete()
        if back is None and any(self.differentiable):
            return None
        blocks = self.calls.blocks
        blocks.phases.note()
        env = dict(zip(self.part.inputs, given.nodes, strict=True))
        self.stencil.write(env, given.path, blocks.numbering)
        likes = [_torch.from_functional(x) for x in self.made]
        values = _torch.stand_ins(likes, [env[n] for n in self.part.outputs], self.tracer)
        self.calls.stamped.append(self)
        if back is None:
            found = _torch.all_to_functional(values)
        else:
            found = _Function.apply(_Again(self, back, given, env, values), *back.parameters(given))
            blocks.origins.note_made(self.part.outputs[0].meta[ORIGIN])  # what hooks of results compute is from there
            for x, sites in zip(found, self.inner_sites, strict=True):
                for site in sites:
                    blocks.origins.listen(x, site)
        results = iter(found)
        return _torch.unflatten([next(results) if x is _MADE else x for x in self.leaves], self.tree)

    def check_nothing_leaks(self) -> None:
        """Check that only its results are read outside of a call, and of its backward pass only gradients."""
        parts = (self.part, *(() if self.back is None else (self.back.part,)))
        inside = {n for part in parts for n in part.nodes} | self.calls.blocks.aside_nodes()
        for part in parts:
            for n in set(part.nodes) - set(part.outputs):
                if not n.users.keys() <= inside:
                    self.calls.blocks.couple(f"what a module computes is read outside of it: {n.format_node()}")


_MADE = object()
"""A result that the call has made."""

_PLACES = {"storage_offset", "as_strided"}
"""Names of what tells the parts of a batch apart, which lie one behind the other."""


def _between(first: fx.Node, last: fx.Node | None) -> Iterator[fx.Node]:
    """The nodes behind one, to another one, or to the end of the graph."""
    root, node = first.graph._root, first
    while node is not last and (node := node.next) is not root:
        yield node


def _check_closed(part: Part) -> None:
    """Raise _Unlike unless the tensors that a part reads are its inputs."""
    outside = {m for n in part.nodes for m in _torch.operands_of(n)} - {*part.nodes, *part.inputs}
    if any(isinstance(m.meta.get("val"), torch.Tensor) for m in outside):
        _refuse("a module reads tensors that it is not given")
    if any(_torch.is_symbol(n.meta.get("val")) for n in part.nodes):
        _refuse("a module computes with numbers of the run")


# ---- backward ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaf:
    """What a backward pass did to the gradient of a parameter: its mark, and the sum of an older one and the mark.

    place: of the parameter among the tensors of a call. old, total: None where there was no gradient.
    """

    place: int
    path: str
    mark: fx.Node
    old: fx.Node | None
    total: fx.Node | None

    @property
    def final(self) -> fx.Node:
        """The gradient behind it."""
        return self.mark if self.total is None else self.total

    def is_read(self, inside: set[fx.Node]) -> bool:
        """Whether one of these nodes reads the mark, but for the sum, or the gradient."""
        others = inside & self.mark.users.keys() - {self.total}
        return bool(others) or not inside.isdisjoint(self.final.users)


class _Back:
    """The backward pass of a call, which is noted while the engine runs. number: of that pass. first, last: the nodes
    of the graph before it and at its end. cotangents: the nodes of the gradients of results, by place. sites: those of
    values in the call that have these gradients, too."""

    def __init__(self, call: _Call) -> None:
        self.call, self.number, self.wrong = call, None, ""
        self.first = self.last = None
        self.cotangents: dict[int, fx.Node] = {}
        self.sites: dict[int, tuple[Site, ...]] = {}
        self._noted: dict[int, int] = {}
        self.leaves: list[_Leaf] | None = None
        self._finals: dict[int, fx.Node] = {}
        self._handles: list[Any] = []
        self._seen, self._is_watching = Watch(), False

    @classmethod
    def listening(cls, call: _Call) -> _Back:
        self = cls(call)
        with _torch.no_function_modes():
            for i, (x, wanted) in enumerate(zip(call.made, call.differentiable, strict=True)):
                if wanted:
                    self._handles.append(x.register_hook(lambda g, i=i: self._begin(i, g)))
            for i, p in enumerate(call.given.tensors):
                if p.requires_grad:
                    self._handles.append(p.register_post_accumulate_grad_hook(lambda p, i=i: self._end(i, p)))
        return self

    def _begin(self, place: int, gradient: torch.Tensor) -> None:
        node, number = node_of(gradient, self.call.tracer), _torch.backward_number()
        if place in self.cotangents or node is None or self.number not in (None, number):
            self.wrong = "its results have several gradients"
            return
        if self.number is None:
            self.number, self.first = number, next(iter(reversed(self.call.tracer.graph.nodes)))
            self._seen.__enter__()
            self._is_watching = True
            _torch.after_backward(self.stop)
        self.cotangents[place], self._noted[place] = node, len(node.meta.get(GRADIENT_OF, ()))

    def _end(self, place: int, parameter: torch.Tensor) -> None:
        if self.number == _torch.backward_number():
            self._finals[place] = node_of(_gradient(parameter), self.call.tracer)
            self.last = next(iter(reversed(self.call.tracer.graph.nodes)))

    def stop(self) -> None:
        """Watch no longer which code runs: the pass has ended, or was left by an error."""
        if self._is_watching:
            self._is_watching = False
            self._seen.__exit__(None, None, None)

    def complete(self) -> _Back | None:
        """This, once a backward pass has ended that can be written again; None where there was none."""
        if self.leaves is None and not self.wrong:
            for handle in self._handles:
                handle.remove()
            try:
                self._complete()
            except _Unlike as unlike:
                self.wrong = str(unlike)
                log.debug("whole calls of %s are traced one by one: %s", self.call.given.path, unlike)
        return None if self.wrong else self

    def _complete(self) -> None:
        call = self.call
        if self.wrong or self.last is None:
            _refuse(self.wrong or "there was no backward pass behind it")
        hooks = [hook for x in call.made for hook in gradient_hooks(x)]
        if self._seen.codes or self._seen.unseen or not all(map(_is_of_spmd, hooks)):
            _refuse("code of the user's runs in its backward pass")  # and would run again for a later call
        nodes = tuple(_between(self.first, self.last))
        inside = set(nodes)
        self.leaves = list(self._found_leaves(nodes))
        olds = [leaf.old for leaf in self.leaves if leaf.old is not None]
        cotangents = [self.cotangents[i] for i in sorted(self.cotangents)]
        given = (*olds, *cotangents)
        if len(set(given)) < len(given) or not inside.isdisjoint(given):
            _refuse("gradients come from what it computes, or are one")
        if any(leaf.is_read(inside) for leaf in self.leaves):
            _refuse("gradients of parameters are read in its backward pass")
        inputs = (*call.part.inputs, *call.part.nodes, *cotangents, *olds)
        finals = tuple(leaf.final for leaf in self.leaves)
        self.part = Part(nodes, inputs, finals)
        _check_closed(self.part)
        if any("draw" in n.meta for n in nodes):
            _refuse("its backward pass draws random numbers")
        self.described = [metadata(n.meta["val"]) for n in cotangents]
        self.likes = [leaf.mark.meta["val"] for leaf in self.leaves]
        self.stencil = Stencil.of(self.part, call.given.path, notes_of(inputs))
        self.sites = {i: self._inner_sites(i) for i in self.cotangents}
        without = {n for leaf in self.leaves for n in (leaf.mark, leaf.total)}
        bare = Part(tuple(n for n in nodes if n not in without), inputs, ())
        self.bare = Stencil.of(bare, call.given.path, notes_of(inputs))

    def _inner_sites(self, place: int) -> tuple[Site, ...]:
        """The sites of other values in the call whose gradient is that of a result."""
        known = {id(site) for site in self.call.part.outputs[place].meta.get(SITES, ())}
        noted = self.cotangents[place].meta.get(GRADIENT_OF, ())[self._noted[place] :]
        return tuple(site for site in noted if id(site) not in known)

    def _found_leaves(self, nodes: Sequence[fx.Node]) -> Iterator[_Leaf]:
        """What was done to each parameter. Raises _Unlike where that is more than a mark and a sum."""
        marks: dict[str, list[fx.Node]] = {}
        for n in nodes:
            if n.target is GRADIENT:
                marks.setdefault(n.args[1], []).append(n)
        inside, paths = set(nodes), self.call.calls.blocks.paths_of_parameters()
        for place, final in self._finals.items():
            path = paths.get(id(self.call.given.tensors[place]), "")
            mark, *more = marks.pop(path, [None])
            if mark is None or more or final not in inside:
                _refuse("gradients are not marked")
            if final is mark:
                yield _Leaf(place, path, mark, None, None)
            elif final.target is SUM and final.args[1:] == (mark,) and not final.kwargs:
                yield _Leaf(place, path, mark, final.args[0], final)
            else:
                _refuse("gradients are more than added up")
        if marks:
            _refuse("parameters of others get gradients in its backward pass")

    def parameters(self, given: Given) -> list[torch.Tensor]:
        return [given.tensors[leaf.place] for leaf in self.leaves]


def _is_of_spmd(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("spmd.")


def _gradient(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter. That this looks at it is no read of the step's."""
    with _torch.no_function_modes():
        return torch.Tensor.grad.__get__(p)


class _Function(torch.autograd.Function):
    """A call that is written again, for autograd."""

    @staticmethod
    def forward(ctx, again, *parameters):
        ctx.again = again
        ctx.set_materialize_grads(False)
        made = _torch.all_to_functional(again.values)
        wanted = again.call.differentiable
        ctx.mark_non_differentiable(*(x for x, is_wanted in zip(made, wanted, strict=True) if not is_wanted))
        return tuple(made)

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():
            ctx.again.call.calls.blocks.couple("a gradient of a gradient is asked for")
        return None, *ctx.again.backward(gradients)


@dataclass(frozen=True, eq=False)
class _Again:
    """A call that is written as another one was. env: its nodes by those of that one. values: what it gives."""

    call: _Call
    back: _Back
    given: Given
    env: dict[fx.Node, fx.Node]
    values: list[torch.Tensor]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The gradients of the parameters, marked, with the sums that they will be in."""
        back, blocks, tracer = self.back, self.call.calls.blocks, self.call.tracer
        there = {i: g for i, g in enumerate(gradients) if g is not None}
        if list(there) != sorted(back.cotangents) or [metadata(g) for g in there.values()] != back.described:
            blocks.couple("the gradient of a result lies otherwise in memory, or is not there")
        nodes = {i: node_of(g, tracer) for i, g in there.items()}
        if None in nodes.values():
            blocks.couple("a gradient is not traced")
        blocks.phases.note()
        for i, node in nodes.items():
            if sites := back.sites[i]:
                node.meta[GRADIENT_OF] = (*node.meta.get(GRADIENT_OF, ()), *sites)
        env = self.env | {back.cotangents[i]: node for i, node in nodes.items()}
        olds = self._olds()
        written, at = (
            (back.bare, [leaf.mark.args[0] for leaf in back.leaves]) if olds is None
            else (back.stencil, [leaf.mark for leaf in back.leaves])
        )  # fmt: skip
        env |= olds or {}
        written.write(env, self.given.path, blocks.numbering)
        values = _torch.stand_ins(back.likes, [env.get(n, n) for n in at], tracer)
        for leaf, value in zip(back.leaves, values, strict=True) if olds is not None else ():
            old, total = (None, None) if leaf.total is None else (env[leaf.old], env[leaf.total])
            blocks.phases.ahead[leaf.path] = Ahead(value, old, total, blocks.couple)
        return _torch.all_to_functional(values)

    def _olds(self) -> dict[fx.Node, fx.Node] | None:
        """The nodes of the gradients that are there, by those that were there in the pass that is written again. None
        where it would be another one: then the engine adds them up itself."""
        found: dict[fx.Node, fx.Node] = {}
        memories = set()
        with _torch.no_function_modes():
            for leaf, p in zip(self.back.leaves, self.back.parameters(self.given), strict=True):
                g = _gradient(p)
                if (g is None) != (leaf.old is None) or len(gradient_hooks(p)) > 1 or accumulate_hooks(p):
                    return None
                if g is None:
                    continue
                if type(g) is not _torch.FunctionalTensor or g._is_view() or g.requires_grad:
                    return None
                value = _torch.from_functional(g)
                node = _torch.node_of(value, self.call.tracer)
                if node is None or not is_dense(value) or metadata(value) != metadata(leaf.old.meta["val"]):
                    return None
                found[leaf.old] = node
                memories.add(_torch.memory_of(g.elem))
        return found if len(memories) == len(found) else None
