"""Send all that waits for the backward to host memory, and fetch it for its first reader there.

    x = gelu(h); ...; dh = gelu_backward(dy, h)   ->   to_host(h), on_host(.., h); ...; from_host(..), gelu_backward

Asked for by name, whatever the machine is, and whatever it costs: `memory_budget` with `offload` chooses by cost. Where
host and device are one, as on CPUs, that is a second copy of each value, and saves nothing; the report says so.

A pass behind may read a value later than it was read. Then the wait for the copy to the host comes later, too, or the
reader reads what was fetched (`readers_first`).
"""

from __future__ import annotations

from torch import fx

from spmd.expand.nodes import copied as copied_node
from spmd.expand.passes.keep_gathered import copied
from spmd.expand.passes.recompute.again import CannotRecompute, Effect, Lookup
from spmd.expand.passes.recompute.copies import Window
from spmd.expand.passes.recompute.rewrite import rewritten
from spmd.expand.passes.recompute.values import Values, folded
from spmd.expand.passes.report import Noted
from spmd.expand.program import Program
from spmd.expand.verify import is_view, readers
from spmd.tensor.recipes.host import from_host, on_host

NO_ENGINE = (
    "the machine {name!r} has no copy engine by its figures, so host memory counts as the device's, and nothing is "
    "saved. Where there is one, say so: replace(machine, host=Link(hop_us=5.0, gb_per_s=50.0))"
)


def offloaded(program: Program, least_mb: float = 0.0) -> Noted:
    """The same program with what waits in host memory. least_mb: smaller values stay."""
    values = Values.of(*folded(program))
    units = [u for u in values.units if u not in values.forced and _waits(values, u, least_mb * 2**20)]
    if not units:
        return Noted(program, left=("nothing that is large enough waits for a backward",))
    lookup, machine = Lookup(values), program.mesh.topology.machine
    effect = _effect(lookup, frozenset(units))
    nbytes = sum([r.nbytes for u in units for r in values.units[u]])
    did = f"{len(units)} ops have {nbytes:,} bytes in host memory; copies are waited for {effect.us:,.1f} us"
    left = () if machine.host else (NO_ENGINE.format(name=machine.name),)
    return Noted(rewritten(lookup, values.forced, effect.copies), (did,), left)


NUMBER = 8
"""Bytes of a single number, which stays where it is."""


def _waits(values: Values, unit: int, least: float) -> bool:
    """Whether the values of a unit are large enough, and all of them wait at the same time."""
    roots = values.units[unit]
    if sum([r.nbytes for r in roots]) < max(least, NUMBER + 1):
        return False
    return max([r.before for r in roots]) + 1 < min([r.after for r in roots])


def _effect(lookup: Lookup, units: frozenset[int]) -> Effect:
    """Copies beside the ops; one after the other where a backward comes before a later forward."""
    try:
        return lookup.effect(lookup.values.forced, units)
    except CannotRecompute:
        return lookup.effect(lookup.values.forced, units, Window(*lookup.whole, at_once=True))


# ---- behind passes ----------------------------------------------------------------------------


def readers_first(program: Program) -> Program:
    """The same program, in which nothing that is freed behind a wait for a copy to the host is read later."""
    if not any(_late(node) for node in program.graph.nodes if node.target is on_host):
        return program
    program = copied(program)
    for wait in [node for node in program.graph.nodes if node.target is on_host]:
        back = next(n for n in wait.users if n.target is from_host)
        while late := _late(wait):
            if before := [n for n in late if n < back]:
                max(before).append(wait)
            else:
                _read_from(late[0], wait.args[1], back)
    return program


def _late(wait: fx.Node) -> list[fx.Node]:
    """The readers of what is freed behind the wait, that come later."""
    return [n for n in readers(wait.args[1]) if wait < n]


def _read_from(reader: fx.Node, x: fx.Node, back: fx.Node) -> None:
    """Let a reader of a value, or of a view of it, read what was fetched."""

    def fetched(node: fx.Node) -> fx.Node:
        if node is x:
            return back
        new = copied_node(node.graph, node, lambda n: fetched(n) if n in shown else n)
        reader.prepend(new)
        return new

    shown = {x, *filter(is_view, readers(x))} - {reader}
    for operand in [n for n in reader.all_input_nodes if n in shown]:
        reader.replace_input_with(operand, fetched(operand))
