"""What functions of blocks send in a program: the collectives in the code that a rank gets of them.

    local_map[attention_of_blocks]          all_to_all cp, all_to_all cp, ...
    gradients_of_local_map[...]             all_to_all cp, ...

A program only names such a function. Here its code is traced, as it is when the program is bound, for the first rank,
whose blocks are the largest. An exchange whose sizes depend on data is counted with the most that it may send.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from torch import fx

from spmd import _torch
from spmd.comm.rows import EXCHANGE_ROWS
from spmd.expand.local_map import BlockTrace, LocalMapGradientOp, LocalMapOp
from spmd.expand.nodes import is_collective
from spmd.mesh import DeviceMesh, MeshTopoInfo, cost
from spmd.mesh.groups import ranks_in

Cost = Callable[[float, tuple[int, ...], MeshTopoInfo], float]
COSTS: dict[str, Cost] = {
    "all_reduce": cost.all_reduce_cost, "all_gather": cost.all_gather_cost, "reduce_scatter": cost.reduce_scatter_cost,
    "all_to_all": cost.all_to_all_cost, "broadcast": cost.broadcast_cost, "permute": cost.permute_cost,
}  # fmt: skip
KINDS = {
    "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all", "exchange_rows": "all_to_all",
}  # fmt: skip
"""The kinds that are named otherwise in a rank's code."""


@dataclass(frozen=True)
class Sent:
    """A collective in a function of blocks. nbytes: what a rank puts in; priced: the bytes that its price is of."""

    kind: str
    axes: tuple[int, ...]
    nbytes: int
    priced: int
    tensors: int

    def us(self, topology: MeshTopoInfo) -> float:
        """Its modelled time."""
        return COSTS[self.kind](self.priced, self.axes, topology)


_found: weakref.WeakKeyDictionary[LocalMapOp, tuple[tuple[Sent, ...], tuple[Sent, ...]]] = weakref.WeakKeyDictionary()


def sent_by(op: LocalMapOp | LocalMapGradientOp) -> tuple[Sent, ...]:
    """What a function of blocks sends, or its gradient, in order."""
    of = op.of if isinstance(op, LocalMapGradientOp) else op
    if of not in _found:
        trace = BlockTrace(of, (0,) * of.call.mesh.ndim, any(of.call.needs_grad))
        _found[of] = tuple(tuple(_sent(nodes, of.call.mesh)) for nodes in (trace.forward, trace.backward))
    return _found[of][op is not of]


def _sent(nodes: Sequence[fx.Node], mesh: DeviceMesh) -> Iterator[Sent]:
    for node in nodes:
        if node.target is not EXCHANGE_ROWS and not is_collective(node):
            continue
        name = _torch.qualified_name(node.target).split("::")[1].removesuffix("_").removesuffix("_coalesced")
        kind = KINDS.get(name, name)
        if kind not in COSTS:
            continue  # a wait
        if kind == "all_to_all" and _is_permutation(node):
            kind = "permute"
        sent, got = (_tensors(value) for value in (node.args[0], node))
        nbytes, received = (sum(n.meta["val"].nbytes for n in each) for each in (sent, got))
        yield Sent(kind, _axes(node.args[-1], mesh), nbytes, received if kind == "all_gather" else nbytes, len(sent))


def _tensors(value: fx.Node | Sequence[fx.Node]) -> list[fx.Node]:
    return [value] if isinstance(value, fx.Node) else list(value)


def _is_permutation(node: fx.Node) -> bool:
    """Whether an all-to-all sends to one rank at most and gets from one."""
    splits = node.args[1:3] if node.target is not EXCHANGE_ROWS else ()
    return len(splits) == 2 and all(each is not None and sum(map(bool, each)) <= 1 for each in splits)


def _axes(group: str, mesh: DeviceMesh) -> tuple[int, ...]:
    """The fewest axes whose group has all ranks of this one."""
    first = (0,) * mesh.ndim
    ranks = set(ranks_in(group, mesh.rank_at(first)) or mesh.ranks)
    every = (axes for n in range(mesh.ndim + 1) for axes in combinations(range(mesh.ndim), n))
    return next(axes for axes in every if ranks <= set(mesh.ranks_along(axes, first)))
