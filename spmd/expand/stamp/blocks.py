"""Calls of modules that repeat are captured twice and stamped.

    model.blocks.0 ... model.blocks.11, all alike    ->    the first two are traced, and ten are stamped

Of two calls of one kind, the nodes of the forward pass are compared, and those of the backward pass. If they are equal
but for what the calls were given - arguments, parameters, buffers - then that is all that they depend on, and the nodes
are written again for later calls. A kind is what the code of a module can see: its structure (`repeats`), its
arguments, the modes around it.

A backward pass begins with the last call. So the backward pass of the second call is traced as soon as its forward
pass is done, aside, with stand-ins for the gradients. What was traced aside is written again for all calls but the
first. When that one's turn comes, the two are compared, and what was traced aside is removed.

For autograd each call is one function. So a gradient that leaves a call is complete, and hooks, sums and parameters
that others use, too, are those of the engine. `Coupled` is raised where something else goes into a call or comes out of
it: the capture then begins again without these stamps.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.attributes import first_set, give_attributes
from spmd.expand.draws import Numbering
from spmd.expand.guards import guard_key
from spmd.expand.modules import modules_of, parameters_of
from spmd.expand.origins import Origins
from spmd.expand.phases import Phases
from spmd.expand.sources.layout import COMPARED_BY_VALUE
from spmd.expand.stamp.calls import Calls
from spmd.expand.stamp.given import Given, node_of
from spmd.expand.stamp.kind import Kind
from spmd.expand.stamp.parts import Coupled, Part, differing, metadata
from spmd.expand.stamp.repeats import FEWEST, Structure, values_of
from spmd.expand.stamp.stencil import Stencil, notes_of
from spmd.expand.stamp.unread import Reads
from spmd.expand.stamp.watch import AutogradSeen, Watch
from spmd.expand.state import State
from spmd.tensor.recipes import stream


class CoupledBlocks(Coupled):
    """Calls of equal modules depend on more than on what they are given."""


@dataclass
class Blocks:
    """Stamps the calls of the modules of one capture. kinds: the traced calls of each kind, by the kind and what they
    read of the attributes that differ. read: the names of these, by kind."""

    state: State
    origins: Origins
    phases: Phases
    numbering: Numbering
    kinds: dict[Hashable, Kind] = field(default_factory=dict)
    read: dict[Hashable, frozenset[str]] = field(default_factory=dict)
    is_inside: bool = False
    wrong: str = ""
    thread: int = field(default_factory=threading.get_ident)

    def __post_init__(self) -> None:
        self.calls = Calls(self)

    @contextlib.contextmanager
    def stamped(self, structures: Mapping[int, Structure]) -> Iterator[None]:
        """Inside, in a capture by this thread, calls of modules that repeat (`repeated`) are traced twice."""
        all_modules = self.state.submodules()
        modules = [m for m in all_modules if id(m) in structures]
        inside = {id(x) for m in modules for x in modules_of(m)}
        whole = [m for m in all_modules if id(m) not in inside and m._modules and "forward" not in vars(m)]
        for m in modules:
            vars(m)["forward"] = self._forward(m, structures[id(m)])
        for m in whole:
            vars(m)["forward"] = self._whole(m)
        modules += whole
        try:
            yield
        finally:
            self.calls.close()
            for m in modules:
                vars(m).pop("forward", None)

    def finish(self, graph: fx.Graph) -> None:
        """Check what could not be checked before, and remove what was traced aside. To be called after the trace."""
        if self.wrong:
            raise CoupledBlocks(self.wrong)
        self.calls.finish()
        for kind in self.kinds.values():
            for call in kind.calls:
                call.check_nothing_leaks()
            if len(kind.calls) == 2:
                kind.calls[1].check_backward_of(kind.calls[0])
        for kind in self.kinds.values():
            for call in kind.calls:
                call.erase_aside(graph)

    def aside_nodes(self) -> set[fx.Node]:
        """What is traced aside, and will be removed."""
        calls = (call for kind in self.kinds.values() for call in kind.calls)
        return {n for call in calls if call.aside is not None for n in call.aside.nodes}

    def paths_of_parameters(self) -> dict[int, str]:
        """The paths of the parameters, by identity."""
        return {id(p): path for path, p in self.state.parameters().items()}

    def couple(self, why: str) -> None:
        """Raise. Should code of the user catch it, `finish` raises again."""
        self.wrong = why
        raise CoupledBlocks(why)

    # ---- calls ----------------------------------------------------------------------------------
    def _forward(self, module: nn.Module, structure: Structure) -> Callable:
        plain = module.forward
        return functools.wraps(plain)(lambda *args, **kwargs: self._call(module, structure, plain, args, kwargs))

    def _whole(self, module: nn.Module) -> Callable:
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return plain(*args, **kwargs)
            return self.calls.call(module, plain, args, kwargs)

        return functools.wraps(plain)(forward)

    def _call(self, module: nn.Module, structure: Structure, plain: Callable, args: tuple, kwargs: dict) -> Any:
        mode = _torch.proxy_mode() if threading.get_ident() == self.thread else None
        if mode is None or self.is_inside or _torch.in_backward() or _torch.saved_tensors_are_hooked():
            return plain(*args, **kwargs)
        call = Given.of(module, structure, args, kwargs, mode.tracer, self.origins.paths.get(id(module), ""))
        if call is None:
            return plain(*args, **kwargs)
        kind = self._kind(call)
        if kind is None or not kind.takes(call):
            return plain(*args, **kwargs)
        made = _Stamped(self, call, kind.calls[1]) if len(kind.calls) == 2 else _Traced(self, call, plain)
        try:
            found = _Function.apply(made, *call.tensors)
        except Exception as error:  # code of the user may catch it and go on
            self.wrong = self.wrong or f"{type(error).__name__}: {error}"
            raise
        self.origins.note_call(call.path)
        if isinstance(made, _Traced):
            self._add(kind, made)
        elif (watch := Watch.present()) is not None:
            kind.note_in(watch)
        values = iter(found)
        leaves = [next(values) if x is _MADE else x for x in made.leaves]
        leaves = [call.tensors[x.number] if type(x) is _Input else x for x in leaves]
        return _torch.unflatten(leaves, made.tree)

    def _kind(self, call: Given) -> Kind | None:
        """The kind of a call; None where too few modules have what this one has in what the code reads."""
        read = self.read.get(call.kind, frozenset())
        if read and call.structure.alike(call.module, read) < FEWEST:
            return None
        return self.kinds.setdefault((call.kind, values_of(call.module, read)), Kind(self.couple, read))

    def _add(self, kind: Kind, made: _Traced) -> None:
        """Add a call that was traced to its kind, and note what the first one reads."""
        call = made.given
        if call.kind not in self.read:
            self.read[call.kind] = kind.read = frozenset(made.read)
            self.kinds[call.kind, values_of(call.module, kind.read)] = self.kinds.pop((call.kind, ()))
        kind.add(made)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside a call, calls of modules are plain."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False


class _Function(torch.autograd.Function):
    """A call, for autograd."""

    @staticmethod
    def forward(ctx, call, *tensors):
        ctx.call = call
        ctx.set_materialize_grads(False)
        made, differentiable = call.forward()
        ctx.mark_non_differentiable(*(x for x, wanted in zip(made, differentiable, strict=True) if not wanted))
        return tuple(made)

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():
            ctx.call.blocks.couple("a gradient of a gradient is asked for")
        return None, *ctx.call.backward(gradients)


@dataclass(frozen=True)
class _Input:
    """A result that is a tensor that the call was given."""

    number: int


_MADE = object()
"""A result that the call has made."""


# ---- traced -----------------------------------------------------------------------------------


def _own(x: torch.Tensor) -> torch.Tensor:
    """The same value for autograd to begin with."""
    new = _torch.to_functional(_torch.from_functional(x))
    is_parameter = isinstance(x, nn.Parameter)
    give_attributes(new, x)
    return _torch.as_parameter(new, x.requires_grad) if is_parameter else new.requires_grad_(x.requires_grad)


class _Traced:
    """A call that is traced. part, stencil: of its forward pass. aside: its backward pass, where that was traced aside.
    later: the parts of its backward passes. leaves, tree: its results."""

    def __init__(self, blocks: Blocks, given: Given, plain: Callable):
        self.blocks, self.given, self._plain = blocks, given, plain
        self.tracer = _torch.proxy_mode().tracer
        self.inner = [_own(x) for x in given.tensors]
        self.aside: _Aside | None = None
        self.later: list[Part] = []
        self.env: dict[fx.Node, fx.Node] = {}

    # ---- forward --------------------------------------------------------------------------------
    def forward(self) -> tuple[list[torch.Tensor], list[bool]]:
        last, constants, before = self._last(), self._constants(), notes_of(self.given.nodes)
        self.places, drawn = self._places(), stream.get_rng_state()
        arguments = iter(self.inner)
        leaves = [next(arguments) if isinstance(x, torch.Tensor) else x for x in self.given.leaves]
        args, kwargs = _torch.unflatten(leaves, self.given.tree)
        with (
            self.blocks.inside(), torch.set_grad_enabled(self.given.grad), self._parameters(list(arguments)),
            AutogradSeen() as asked, Reads(self.given.module, self.given.structure.differing) as reads,
            Watch() as self.seen,
        ):  # fmt: skip
            found = self._plain(*args, **kwargs)
        self.read = self.given.structure.differing if self.seen.copies_state else reads.names
        leaves, self.tree = pytree.tree_flatten(found)
        numbers = {id(x): i for i, x in enumerate(self.inner)}
        self.leaves = [
            _Input(numbers[id(x)]) if id(x) in numbers else _MADE if isinstance(x, torch.Tensor) else x for x in leaves
        ]
        self.made = [x for x, leaf in zip(leaves, self.leaves, strict=True) if leaf is _MADE]
        nodes = [node_of(x, self.tracer) for x in self.made]
        self._check(nodes, constants, asked.found)
        self.part = Part(tuple(_after(last, self.tracer.graph)), self.given.nodes, tuple(nodes))
        draws, now = [n.meta["draw"] for n in self.part.nodes if "draw" in n.meta], stream.get_rng_state()
        if None in (drawn, now) or draws != list(range(drawn["drawn"], now["drawn"])):
            self.blocks.couple("a module sets the generator of random numbers back")
        self.stencil = Stencil.of(self.part, self.given.path, before)
        self.differentiable = [x.requires_grad for x in self.made]
        return [_torch.to_functional(_torch.from_functional(x)) for x in self.made], self.differentiable

    def has_made(self, x: torch.Tensor) -> bool:
        """Whether a tensor is one that this call has made, or a stand-in for what it was given."""
        return any(x is each for each in self.inner) or node_of(x, self.tracer) in set(self.part.nodes)

    def _constants(self) -> dict[str, Hashable]:
        with _torch.no_function_modes():  # they would hear of each flag that is asked for
            return self.blocks.state.constants()

    def _places(self) -> list:
        return [(id(m), name, id(x)) for m in modules_of(self.given.module) for name, x in m._buffers.items()]

    def _check(self, nodes: Sequence[fx.Node | None], constants: dict, asked: str) -> None:
        couple = self.blocks.couple
        plain = [x for x in self.leaves if x is not _MADE and type(x) is not _Input]
        if not all(isinstance(x, (*COMPARED_BY_VALUE, float)) for x in plain) or None in nodes:
            couple("a module gives something else than tensors and plain values")
        pairs = zip(self.inner, self.given.tensors, strict=True)
        is_set = any(first_set(x, _torch.user_attributes(like)) for x, like in pairs)
        if asked or is_set or any(map(_torch.user_attributes, self.made)):
            couple(f"a module uses {asked or 'attributes'} of its tensors")
        given = (*self.inner, *self.given.buffers)
        if any(node_of(x, self.tracer) is not n for x, n in zip(given, self.given.nodes, strict=True)):
            couple("a module writes into what it is given")
        memories = [_torch.memory_of(_torch.from_functional(x)) for x in self.made]
        theirs = {_torch.memory_of(_torch.from_functional(x)) for x in given}
        if len(set(memories)) < len(memories) or theirs & set(memories):
            couple("a module gives a view of what it is given, or two of one tensor")
        if self._places() != self.places:
            couple("a module puts another tensor in the place of a parameter or a buffer")
        if self._constants() != constants:
            couple("a module changes a Python value")
        self.reached = [_torch.leaves_behind(x) for x in self.made]
        self.custom = "a function with a backward pass of the user's" if _torch.has_custom_functions(self.made) else ""
        own = {id(x) for x in self.inner}
        if any(id(x) not in own for several in self.reached for x in several):
            couple("a module computes with a parameter, or what was made of one, that it is not given")

    @contextlib.contextmanager
    def _parameters(self, new: list[torch.Tensor]) -> Iterator[None]:
        """Inside, the modules have these parameters."""
        by_id = {id(p): x for p, x in zip(parameters_of(self.given.module), new, strict=True)}
        held = [(m._parameters, dict(m._parameters)) for m in modules_of(self.given.module)]
        try:
            for parameters, _ in held:
                parameters.update({name: by_id[id(p)] for name, p in parameters.items() if p is not None})
            yield
        finally:
            for parameters, before in held:
                parameters.update(before)

    def compare(self, first: _Traced) -> None:
        """Check that the forward passes of two calls are alike, and trace the backward pass aside."""
        same = self.tree == first.tree and len(self.leaves) == len(first.leaves)
        pairs = zip(self.leaves, first.leaves, strict=True) if same else ()
        if not same or any(a is not b if _MADE in (a, b) else guard_key(a) != guard_key(b) for a, b in pairs):
            self.blocks.couple("two calls of equal modules give other kinds of results")
        self._compare(first.part, self.part, "calls")
        outside = {m for n in self.part.nodes for m in n.all_input_nodes} - {*self.part.nodes, *self.part.inputs}
        if any(isinstance(m.meta.get("val"), torch.Tensor) for m in outside):
            self.blocks.couple("a module reads tensors that it is not given")
        if any(_torch.is_symbol(n.meta.get("val")) for n in self.part.nodes):
            self.blocks.couple("a module computes with numbers of the run")
        if any(self.differentiable):
            self.aside = _Aside.of(self)

    def _compare(self, one: Part, other: Part, what: str) -> None:
        with _torch.no_modes():
            where = differing(one, other, lambda name: getattr(self.tracer.root, name))
        if where:
            self.blocks.couple(f"two {what} of equal modules differ: {where}")

    # ---- backward -------------------------------------------------------------------------------
    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        if self.aside is not None:
            return self.aside.stamped(self.env, gradients, self.given)
        last = self._last()
        found = self.gradients(gradients)
        self.later.append(self.backward_part(last, gradients, found))
        return found

    def gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the inputs, for these of the results; None where there is none."""
        given = [(x, g) for x, g in zip(self.made, gradients, strict=True) if g is not None]
        wanted = [x for x in self.inner if x.requires_grad]
        if not given or not wanted:
            return [None] * len(self.inner)
        outputs, cotangents = zip(*given, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, cotangents, retain_graph=True, allow_unused=True))
        return [next(found) if x.requires_grad else None for x in self.inner]

    def backward_part(self, last: fx.Node, given: Sequence[Any], found: Sequence[Any]) -> Part:
        """What was traced for a backward pass after a node."""
        inputs = [node_of(g, self.tracer) for g in given if g is not None]
        outputs = [node_of(g, self.tracer) for g in found if g is not None]
        nodes = tuple(_after(last, self.tracer.graph))
        if None in inputs or None in outputs or any("draw" in n.meta for n in nodes):
            self.blocks.couple("a backward pass draws random numbers, or meets tensors that are not traced")
        return Part(nodes, (*self.part.inputs, *self.part.nodes, *inputs), tuple(outputs))

    def _last(self) -> fx.Node:
        return next(iter(reversed(self.tracer.graph.nodes)))

    # ---- afterwards -----------------------------------------------------------------------------
    def check_nothing_leaks(self) -> None:
        """Check that nothing but its results is read outside of a call."""
        aside = self.aside.part.nodes if self.aside else ()
        inside = {*self.part.nodes, *aside, *(n for part in self.later for n in part.nodes)}
        inside |= self.aside.written if self.aside else set()
        for part in (self.part, *self.later):
            for n in set(part.nodes) - set(part.outputs):
                if not n.users.keys() <= inside:
                    self.blocks.couple(f"what a module computes is read outside of it: {n.format_node()}")

    def check_backward_of(self, first: _Traced) -> None:
        """Check that the backward passes of the first call are what was traced aside for this one."""
        if self.aside is None or not self.aside.is_used:
            return
        if not first.later:
            self.blocks.couple("the first of equal calls has no backward pass to compare")
        for part in first.later:
            self._compare(part, self.aside.part, "backward passes")

    def erase_aside(self, graph: fx.Graph) -> None:
        for n in reversed(self.aside.nodes if self.aside else ()):
            graph.erase_node(n)


def _after(last: fx.Node, graph: fx.Graph) -> list[fx.Node]:
    """The nodes behind a node."""
    found = []
    for node in reversed(graph.nodes):
        if node is last:
            return found[::-1]
        found.append(node)
    return found[::-1]


# ---- traced aside -----------------------------------------------------------------------------


def _gradient_of_result() -> torch.Tensor:
    raise AssertionError("it stands for a gradient in what is traced aside, and is removed")


@dataclass(eq=False)
class _Aside:
    """The backward pass of a call, traced with stand-ins for the gradients of its results.

    nodes: all that was written aside. gradients: of the inputs, as values without data. cotangents: what is compared of
    the stand-ins, one for each result, None where it has no gradient. of_call: the call. written: the nodes that were
    written again for the call itself. is_used: whether it was written again.
    """

    part: Part
    stencil: Stencil
    nodes: tuple[fx.Node, ...]
    gradients: tuple[Any, ...]
    cotangents: tuple[Any, ...]
    of_call: _Traced
    written: set[fx.Node] = field(default_factory=set)
    is_used: bool = False

    @classmethod
    def of(cls, call: _Traced) -> _Aside:
        blocks, graph, last = call.blocks, call.tracer.graph, call._last()
        likes = [_torch.from_functional(x) for x, wanted in zip(call.made, call.differentiable, strict=True) if wanted]
        nodes = [graph.create_node("call_function", _gradient_of_result) for _ in likes]
        for node, like in zip(nodes, likes, strict=True):
            node.meta["val"] = like
        values = iter(_torch.all_to_functional(_torch.stand_ins(likes, nodes, call.tracer)))
        given = [next(values) if wanted else None for wanted in call.differentiable]
        inputs = (*call.part.inputs, *call.part.nodes, *nodes)
        before = notes_of(inputs)
        with blocks.inside(), blocks.phases.paused(), blocks.origins.outside_modules(), Watch() as seen:
            begin = call._last()
            found = call.gradients(given)
        if seen.codes or seen.unseen:
            ran = seen.unseen or ", ".join(sorted(c.code.co_name for c in seen.codes))
            blocks.couple(f"code of the user's runs in the backward pass of a module: {ran}")
        part = call.backward_part(begin, given, found)
        if any(_torch.is_symbol(n.meta.get("val")) for n in part.nodes):
            blocks.couple("a backward pass computes with numbers of the run")
        gradients = tuple(None if g is None else _torch.from_functional(g) for g in found)
        cotangents = tuple(None if g is None else metadata(g) for g in given)
        stencil = Stencil.of(part, call.given.path, before)
        return cls(part, stencil, tuple(_after(last, graph)), gradients, cotangents, call)

    def stamped(self, env: dict, gradients: Sequence[torch.Tensor | None], given: Given) -> list[torch.Tensor | None]:
        """Write the backward pass for a call. env: its nodes by those of the call that was traced."""
        call = self.of_call
        if tuple(None if g is None else metadata(g) for g in gradients) != self.cotangents:
            call.blocks.couple("the gradient of a result lies otherwise in memory, or is not there")
        self.is_used = True
        call.blocks.phases.note()
        nodes = [node_of(g, call.tracer) for g in gradients if g is not None]
        if None in nodes:
            call.blocks.couple("a gradient is not traced")
        inputs = self.part.inputs[len(self.part.inputs) - len(nodes) :]
        env = env | dict(zip(inputs, nodes, strict=True))
        copies = self.stencil.write(env, given.path, call.blocks.numbering)
        if given is call.given:
            self.written |= set(copies)
        likes = [g for g in self.gradients if g is not None]
        outputs = [env.get(n, n) for n in self.part.outputs]
        values = _torch.stand_ins(likes, outputs, call.tracer)
        with _torch.no_function_modes():  # the gradient of a leaf goes nowhere else
            leaves = [x.is_leaf for x, g in zip(given.tensors, self.gradients, strict=True) if g is not None]
        call.blocks.phases.unshared.update({id(x): x for x, own in zip(values, leaves, strict=True) if own})
        new = iter(_torch.all_to_functional(values))
        return [None if g is None else next(new) for g in self.gradients]


# ---- stamped ----------------------------------------------------------------------------------


class _Stamped:
    """A call that is written as another one was."""

    def __init__(self, blocks: Blocks, given: Given, like: _Traced):
        self.blocks, self.given, self.like = blocks, given, like
        self.leaves, self.tree = like.leaves, like.tree

    def forward(self) -> tuple[list[torch.Tensor], list[bool]]:
        like = self.like
        self.blocks.phases.note()
        self.env = dict(zip(like.part.inputs, self.given.nodes, strict=True))
        like.stencil.write(self.env, self.given.path, self.blocks.numbering)
        likes = [_torch.from_functional(x) for x in like.made]
        nodes = [self.env[n] for n in like.part.outputs]
        return _torch.all_to_functional(_torch.stand_ins(likes, nodes, like.tracer)), like.differentiable

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return self.like.aside.stamped(self.env, gradients, self.given)
