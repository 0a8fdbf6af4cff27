"""The program of a loop's body.

    carried    f32[8, 4] +sum@dp before and after each round: a sum of gradients is reduced once, behind the loop

A carried value lies at the end of a round as it does at its beginning. Where the first one lies otherwise, the body is
written again for values that lie as the round leaves them, and the first one is moved to there before the loop.
What the body would move of an invariant in each round alike is moved before the loop, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from spmd.expand.loops.loop import Loop
from spmd.expand.nodes import graph_copied
from spmd.expand.places.places import Places
from spmd.expand.places.reads import PARAMETER
from spmd.expand.places.roles import Roles, placeholders, versions_in
from spmd.expand.program import Program
from spmd.tensor.redistribute.collective_moves import AllReduce
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec

MOST_TRIES = 4
"""How often a body is written until its carried values lie as they did."""

Specs = Sequence[Spec | None]
Named = list[tuple[str, Spec | None]]

WriteBody = Callable[[Named, list[str], Callable[[int, Spec], Spec], Roles], Program]
"""Writes a body: given names and specs of its inputs, names of its outputs, where these have to be, and its roles."""


class CannotLoop(Exception):
    """A body whose carried values lie otherwise after each round. Its rounds are written one behind the other."""


@dataclass(frozen=True)
class Moved:
    """An operand of the body that is an invariant after a move. of: which invariant, or which earlier one of these
    behind them all."""

    of: int
    step: Step


def inputs_of(loop: Loop, specs: Specs) -> Named:
    """The inputs of a body, by name. specs: of what the first round reads."""
    names = [
        *[f"invariant {i}" for i in range(loop.invariants)], *[f"carried {i}" for i in range(loop.carried)],
        *[f"item {i}" for i in range(loop.items)],
    ]  # fmt: skip
    return list(zip(names, specs, strict=True))


def kinds_of(loop: Loop) -> tuple[str, ...]:
    """What each input of a body is. It may write into what is carried, as a step may into its state."""
    return ("argument",) * loop.invariants + ("carried",) * loop.carried + ("argument",) * loop.items


def outputs_of(loop: Loop) -> list[str]:
    """The names of the outputs of a body: a carried value has that of its input."""
    return [
        *[f"carried {i}" for i in range(loop.carried)], *[f"last {i}" for i in range(loop.last)],
        *[f"every {i}" for i in range(loop.every)],
    ]  # fmt: skip


def roles_in(node: fx.Node, roles: Roles) -> Roles:
    """The roles of the nodes of a captured body. A parameter that an optimiser's step gives to the next round is one.
    """
    loop, operands = node.target, node.args
    inputs, new = placeholders(loop.body), versions_in(loop.body)
    pairs = list(zip(inputs[: loop.invariants], operands, strict=False))
    parameters = {inner: roles.parameters[n] for inner, n in pairs if n in roles.parameters}
    carried = inputs[loop.invariants :][: loop.carried]
    given_on = zip(carried, loop.body.output_node().args[0], strict=False)
    parameters |= {inner: new[value] for inner, value in given_on if value in new}
    paths = roles.given | {n: path for path, several in roles.gradients.items() for n in several}
    firsts = zip(carried, operands[loop.invariants :], strict=False)
    gradients = {inner: paths[n] for inner, n in firsts if n in paths}
    return Roles.of_body(loop.body, roles.in_bodies[node], parameters, gradients)


def body_of(loop: Loop, specs: Specs, roles: Roles, write: WriteBody) -> Program:
    """The program of a captured body. specs: of what the first round reads. CannotLoop where there is none."""
    first, names = loop.invariants, outputs_of(loop)
    specs = list(specs)
    carried = range(first, first + loop.carried)
    for _ in range(MOST_TRIES):
        program = write(inputs_of(loop, specs), names, lambda i, spec: spec, roles)
        differing = {i: spec for i, (_, spec) in zip(carried, program.outputs, strict=False) if spec is not specs[i]}
        if not differing:
            program = _reduced_behind(program, carried)
            owed = frozenset(name for name, spec in program.outputs if spec and spec.partial)
            return replace(program, owed=owed, kinds=kinds_of(loop))
        for i, spec in differing.items():
            specs[i] = spec
    raise CannotLoop


def _reduced_behind(program: Program, carried: range) -> Program:
    """The body without the reductions of what it adds to carried values, such as a loss to that of all rounds: the sum
    is reduced once, behind the loop."""
    given, values = placeholders(program.graph), program.graph.output_node().args[0]
    inputs, outputs = list(program.inputs), list(program.outputs)
    for i, value in zip(carried, values, strict=False):
        added_to = given[i]
        if values.count(value) > 1 or (reduced := _term(value, added_to)) is None:  # every round's may be read, too
            continue
        step, term = reduced.target, reduced.args[0]
        spec = added_to.meta["spec"].with_layout(step.before.dims, step.before.units, step.before.partial)
        value.replace_input_with(reduced, term)
        program.graph.erase_node(reduced)
        added_to.meta["spec"] = value.meta["spec"] = spec
        inputs[i], outputs[i - carried.start] = (inputs[i][0], spec), (outputs[i - carried.start][0], spec)
    return replace(program, inputs=tuple(inputs), outputs=tuple(outputs))


def _term(value: fx.Node, added_to: fx.Node) -> fx.Node | None:
    """The reduction of what a value adds to a carried one, if nothing else reads either."""
    if value.target is not ADD or value.kwargs or len(added_to.users) > 1 or added_to not in value.args[:2]:
        return None
    (other,) = [x for x in value.args if x is not added_to] or [None]
    is_term = isinstance(other, fx.Node) and isinstance(other.target, Step) and isinstance(other.target.move, AllReduce)
    if not is_term or len(other.users) > 1 or len(value.users) > 1:
        return None
    specs = other.target.before, other.target.after, added_to.meta["spec"], value.meta["spec"]
    if len({spec.shape for spec in specs}) > 1 or any(spec.partial for spec in specs[1:]):
        return None
    return other if all(kind == "sum" for _, kind in specs[0].partial) else None


ADD = torch.ops.aten.add.Tensor


def before_the_loop(program: Program, invariants: int, places: Mapping[str, Places]) -> tuple[Program, list[Moved]]:
    """The body with what it moves of invariants alike in each round as further invariants, and these.

    What is gathered of a parameter to compute with, and freed again, stays in the body.
    """
    program = replace(program, graph=graph_copied(program.graph))
    given = placeholders(program.graph)
    at = {node: i for i, node in enumerate(given[:invariants]) if not _is_gathered_again(node, places)}
    found: list[Moved] = []
    for node in list(program.graph.nodes):
        if isinstance(node.target, Step) and node.args[0] in at:
            found.append(Moved(at[node.args[0]], node.target))
            with program.graph.inserting_before(given[invariants] if len(given) > invariants else _behind(given)):
                moved = program.graph.placeholder("invariant")
            moved.target = moved.name
            moved.meta.update(node.meta)
            at[moved] = invariants + len(found) - 1
            node.replace_all_uses_with(moved)
            program.graph.erase_node(node)
    new = [(f"moved {i}", each.step.after) for i, each in enumerate(found)]
    inputs = (*program.inputs[:invariants], *new, *program.inputs[invariants:])
    return replace(program, inputs=inputs, kinds=("argument",) * len(new) + program.kinds), found


def _behind(given: Sequence[fx.Node]) -> fx.Node:
    return given[-1].next


def _is_gathered_again(node: fx.Node, places: Mapping[str, Places]) -> bool:
    """Whether a parameter is gathered for each pass, and freed behind it."""
    of = places.get(node.meta.get(PARAMETER, ""))
    return of is not None and not of.is_one and of.reshard is not False


def specs_of_results(loop: Loop, program: Program) -> tuple[Spec | None, ...]:
    """The specs of the results of a loop."""
    return loop.results([spec for _, spec in program.outputs])
