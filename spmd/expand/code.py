"""The code of a program for one rank: bound, its memory reused, verified.

`bind` writes the graph of the rank. Then the passes over such graphs rewrite it, and what they have left is verified.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from spmd.comm import Transport
from spmd.expand.bind import bind
from spmd.expand.collector import collector_off
from spmd.expand.passes.in_place import reuse_memory
from spmd.expand.passes.join_bias import join_biases
from spmd.expand.passes.reduce_in_place import reduce_in_place
from spmd.expand.passes.unshare_outputs import unshare_outputs
from spmd.expand.verify_bound import verify_bound, writes

if TYPE_CHECKING:
    from spmd.expand.program import Program


@dataclass(frozen=True)
class Code:
    """What a rank runs. owned: for each input, whether the run may overwrite it. homes: for each output, the input
    that it is written back into, or None."""

    module: fx.GraphModule
    owned: tuple[bool, ...]
    homes: tuple[int | None, ...]


def code_for(program: Program, coordinate: tuple[int, ...], transport: Transport) -> Code:
    """The verified code of the program for the rank at the coordinate, whose collectives `transport` carries out."""
    at = {name: i for i, (name, _) in enumerate(program.inputs)}
    homes = tuple(at.get(name) for name, _ in program.outputs)
    written_back = set(homes)
    state = ["argument" != kind != "grad" for kind in program.kinds or ["argument"] * len(program.inputs)]
    owned = tuple(i in written_back and mine for i, mine in enumerate(state))
    returned = tuple(name.startswith("result ") for name, _ in program.outputs)
    written: set[str] = set()
    passes = (
        lambda graph: written.update(n.name for n in graph.nodes if writes(n)),
        join_biases,
        lambda graph: reuse_memory(graph, owned),
        lambda graph: reduce_in_place(graph, transport.all_reduce, transport.all_reduce_),
        lambda graph: unshare_outputs(graph, homes, returned),
    )
    with collector_off():
        module = bind(program, coordinate, transport, passes, lambda body: code_for(body, coordinate, transport).module)
        verify_bound(module.graph, program, coordinate, transport, owned, homes, frozenset(written))
    return Code(module, owned, homes)
