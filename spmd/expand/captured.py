"""What a capture has found: the graph, its inputs and outputs, and for which calls it is right."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.asked import Answers, environment_differs
from spmd.expand.containers import Outcome, There
from spmd.expand.draws import Draws
from spmd.expand.kept_numbers import Kept, parted
from spmd.expand.sizes.assumed import Assumed, Failed
from spmd.expand.sizes.at import graph_at, ops_agree
from spmd.expand.sizes.sources import Shapes
from spmd.expand.sources.layout import Contents
from spmd.expand.sources.redo import Write
from spmd.expand.state import Slot
from spmd.expand.views import View
from spmd.mesh import DeviceMesh


@dataclass(frozen=True)
class Argument:
    """An input of the graph that is an argument of the call: a tensor, or a number that may change between calls."""

    path: str

    def __str__(self):
        return self.path


@dataclass(frozen=True)
class Captured:
    """A single-device function as a graph.

    inputs: one `Slot` or `Argument` for each placeholder, and `Draws` last if the function draws random numbers.
    outputs: for each output its `Slot`, the index of a leaf of the return value, or the `Argument` that it is written
    into. leaves, tree: the flattened return value, with None in place of tensors, and its structure: of what the
    function returns, what it changes, arguments by name and attributes of modules by path, and containers that it has
    written besides. identities: of the containers among these, as in `Before.numbers`. same: the leaves
    that are the tensor of an earlier leaf, with that one. given: the leaves that are a tensor that the function has
    been given, with its place. detached: of both, those that share all of its memory, and are another tensor, as what
    `detach` gives. views: the leaves that show a part of another leaf, or of
    a tensor that the function has been given. fixed: the number arguments that could not stay
    symbols, with the values that the graph is right for. changes: what the function changes in the Python state of
    modules, to be done when the program has run. writes: the same of other Python values. kept: the numbers in the
    tensors of the state, which the function may decide by. shared: the names of those that several tensors hold,
    and of which the graph computes something once (`equal_counts`). assumed: what the graph takes for granted about
    sizes. sizes: the values of their symbols, once they are known (`at`). first: inputs that optimisers make in
    their first step; they are to be made before the program runs. ignores_gradients: whether the graph is right for
    any gradients that earlier steps left. stepped: the names of the optimisers that make a step. first_kept: what
    optimisers keep from then on besides tensors, such as a count of steps, by optimiser, number of the parameter,
    and key. new_options: what the step adds to parameter groups (`new_options`).
    is_stamped: whether calls of equal modules were traced as blocks, for which independent nodes have another order.
    attributes: those of modules that it sets, by path, with tensors without values of their own. grown: those whose
    tensors are others than before in number or kind. looped: the graph with equal rounds as a loop, if it has any.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    inputs: tuple[Slot | Argument | Draws, ...]
    outputs: tuple[Slot | int | Argument, ...]
    leaves: tuple[Any, ...]
    tree: Any
    symbols: _torch.Symbols
    fixed: dict[str, float]
    identities: Mapping[int, There | int] = field(default_factory=dict)
    same: dict[int, int] = field(default_factory=dict)
    given: dict[int, Slot | Argument] = field(default_factory=dict)
    detached: tuple[int, ...] = ()
    views: Mapping[int, View] = field(default_factory=dict)
    changes: Contents = field(default_factory=list, repr=False)
    kept: Kept = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    assumed: Assumed = field(default_factory=Assumed)
    first: tuple[Slot, ...] = ()
    ignores_gradients: bool = False
    stepped: tuple[str, ...] = ()
    first_kept: dict[tuple[str, Any, Any], Any] = field(default_factory=dict)
    is_stamped: bool = False
    environment: Answers = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict, repr=False)
    grown: tuple[str, ...] = ()
    sizes: Mapping[str, float] = field(default_factory=dict)
    looped: fx.Graph | None = None
    writes: list[Write] = field(default_factory=list, repr=False)
    new_options: dict[tuple[str, Any], Any] = field(default_factory=dict)

    def holds(self, numbers: Mapping[str, float]) -> bool:
        """Whether the graph is right for these numbers, those of `watched` among them: a trace would go the same way.
        """
        return not self.parted(numbers) and self.decides_alike(numbers)

    def parted(self, numbers: Mapping[str, float]) -> str:
        """The first tensors that are to hold one number and hold several, as a sentence; empty for none."""
        return next(filter(None, (parted(several, numbers) for several in self.equal.values())), "")

    def decides_alike(self, numbers: Mapping[str, float], shapes: Shapes | None = None) -> bool:
        """The same where tensors that are to hold one number do: of these, those of `deciding` are read. shapes: of the
        arguments, where the sizes are not known."""
        fixed = all(repr(numbers[path]) == repr(value) for path, value in self.fixed.items())
        if not fixed or environment_differs(self.environment):
            return False
        known = {**numbers, **{name: numbers[str(slot)] for name, slot in self.deciding.items()}}
        sizes = self.sizes if shapes is None else self.assumed.values(shapes, numbers)
        known |= {_torch.of_size(name): n for name, n in sizes.items()}
        return self.symbols.still_hold(known) and (not self.sizes or self.assumed.hold_for(self.sizes, numbers))

    @property
    def decides(self) -> bool:
        """Whether the graph is right for some numbers alone, whatever is equal."""
        return bool(self.fixed or self.symbols.asked or self.assumed.ask_arguments or self.environment)

    def failed(self, shapes: Shapes, numbers: Mapping[str, float], mesh: DeviceMesh) -> Failed | None:
        """What the graph takes for granted and arguments of these shapes do not have; None if it is right for them."""
        return self.assumed.failed(shapes, numbers, lambda: self._fits(shapes, numbers, mesh))

    def _fits(self, shapes: Shapes, numbers: Mapping[str, float], mesh: DeviceMesh) -> bool:
        """Whether the inputs and the ops of the graph have at these sizes the shapes that the graph says."""
        try:
            graph = self.at(shapes, numbers).graph
        except ArithmeticError:  # a division by a size of zero
            return False
        given = zip(graph.find_nodes(op="placeholder"), self.inputs, strict=True)
        said = {i.path: n.meta["val"].shape for n, i in given if isinstance(i, Argument) and i.path in shapes}
        return said == shapes and ops_agree(graph, mesh)

    def at(self, shapes: Shapes, numbers: Mapping[str, float]) -> Captured:
        """The same function for arguments of these shapes, and these ints, as a capture with these would give it."""
        return self.known_at(shapes, numbers).sized()

    def sized(self, loops: bool = False) -> Captured:
        """The same with the known sizes in the graph. loops: with equal rounds as a loop, where that is known."""
        return replace(self, graph=graph_at(self.looped if loops and self.looped else self.graph, self.sizes))

    def known_at(self, shapes: Shapes, numbers: Mapping[str, float]) -> Captured:
        """The same with the sizes known, but for the graph: what a program that was written needs to be run."""
        sizes = self.assumed.values(shapes, numbers)
        views = {leaf: view.at(sizes) for leaf, view in self.views.items()}
        return replace(self, fixed=self.fixed | self.assumed.sized(numbers), sizes=sizes, views=views)

    @property
    def is_for_one_call(self) -> bool:
        """Whether the function has changed Python values as it does in this call alone."""
        return bool(self.changes or self.writes)

    @functools.cached_property
    def outcome(self) -> Outcome:
        """What the function gives, to be made of its leaves."""
        return Outcome(self.tree, self.identities)

    @functools.cached_property
    def written(self) -> tuple[Argument, ...]:
        """The tensors in arguments and in attributes that the function writes into."""
        return tuple([where for where in self.outputs if isinstance(where, Argument)])

    @functools.cached_property
    def placed(self) -> frozenset[str]:
        """The paths of these, and of those that it returns, or of whose memory it makes another tensor."""
        shown = [self.given[i] for i in (*self.outputs, *self.detached) if i in self.given]
        shown += [view.of for view in self.views.values()]
        return frozenset(i.path for i in (*self.written, *shown) if isinstance(i, Argument))

    @functools.cached_property
    def watched(self) -> tuple[Slot, ...]:
        """The tensors of the state whose numbers are to be read at each call."""
        return tuple(slot for several in self.equal.values() for slot in several)

    @functools.cached_property
    def equal(self) -> Kept:
        """The tensors that are to hold one number each, by its name: those that decided how the trace went, and those
        that are one number in the graph."""
        return {
            name: several for name, several in self.kept.items()
            if name in self.symbols.asked or (name in self.shared and len(several) > 1)
        }  # fmt: skip

    @functools.cached_property
    def deciding(self) -> dict[str, Slot]:
        """A tensor for each number that decided how the trace went, by its name."""
        return {name: several[0] for name, several in self.kept.items() if name in self.symbols.asked}
