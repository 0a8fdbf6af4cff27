"""The modelled cost of a program: its moves, one after the other, and the work between them.

It is what a choice is judged by, whatever chose: the specs that the program really has, not those that were foreseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import fx

from spmd import _torch
from spmd.expand.choose.work import Roofline, flops, is_free, read_and_written
from spmd.expand.local_ops import SAFE_LOCALLY, UnlessEmpty
from spmd.mesh import DeviceMesh
from spmd.tensor.call import base_name
from spmd.tensor.recipes.random import Draw
from spmd.tensor.recipes.recipe import Recipe
from spmd.tensor.spec import Spec

if TYPE_CHECKING:
    from spmd.expand.program import Program


@dataclass(frozen=True)
class Cost:
    """Microseconds. moves: what is sent and copied by moves. work: local ops, on the rank with the largest blocks."""

    moves: float
    work: float

    @property
    def us(self) -> float:
        return self.moves + self.work


def program_cost(program: Program) -> Cost:
    """The modelled cost of a program."""
    roofline = Roofline(program.mesh.topology)
    moves = sum([step.cost for _, step in program.steps()])
    return Cost(moves, sum([node_work(node, program.mesh, roofline) for node in program.graph.nodes]))


def node_work(node: fx.Node, mesh: DeviceMesh, roofline: Roofline) -> float:
    """Microseconds of one op of a program on the first rank, which has the largest blocks."""
    work = local_work(node, mesh)
    return 0.0 if work is None else float(roofline.us(work.flops, work.nbytes, work.dtype))


@dataclass(frozen=True)
class LocalWork:
    """What one op does. name: in the book. flops: of the products in it. nbytes: read and written. dtype: of its
    first operand."""

    name: str
    flops: float
    nbytes: float
    dtype: torch.dtype


def local_work(node: fx.Node, mesh: DeviceMesh) -> LocalWork | None:
    """What an op of a program does on the first rank; None where it computes nothing, or reads nothing."""
    op = node.target.op if isinstance(node.target, (UnlessEmpty, Draw)) else node.target
    computes = isinstance(op, (_torch.OpOverload, Recipe)) and op not in SAFE_LOCALLY.values()
    if node.op != "call_function" or not computes:
        return None
    outs = node.meta["spec"] if isinstance(node.meta["spec"], tuple) else (node.meta["spec"],)
    ins = [n.meta["spec"] for n in node.all_input_nodes if isinstance(n.meta["spec"], Spec)]
    if is_free(op) or not ins:
        return None
    at = (0,) * mesh.ndim
    shapes = [[spec and spec.local_shape(at) for spec in side] for side in (ins, outs)]
    nbytes = [[prod(s) * spec.dtype.itemsize for s, spec in zip(*each, strict=True) if spec is not None]
              for each in zip(shapes, (ins, outs), strict=True)]  # fmt: skip
    name = op.op if isinstance(op, Recipe) else base_name(op)
    return LocalWork(name, flops(name, *shapes), read_and_written(name, *nbytes), ins[0].dtype)
