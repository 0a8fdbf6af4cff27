"""Write a captured graph in terms of ops that a choice can be made for.

    linear(x, w, b)    ->    add(linear(x, w), b)

An op whose decomposition asks no spec is written as its decomposition, as the expander would write it. So the product
and the addition get rows of their own, and the choice sees the value between them. A decomposition that asks for the
specs of its operands, as a softmax over a sharded dim does, stays one op.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.decompose import SpecTensor, decomposed
from spmd.expand.nodes import copied
from spmd.mesh import DeviceMesh
from spmd.tensor.call import TensorMeta
from spmd.tensor.rules.decompositions import decompositions
from spmd.tensor.rules.meta import out_metas
from spmd.tensor.spec import Spec


def normalised(graph: fx.Graph, mesh: DeviceMesh) -> fx.Graph:
    """The same function in simpler ops."""
    if not any(n.target in decompositions for n in graph.nodes):
        return graph
    writer = _Writer(mesh)
    for node in graph.nodes:
        writer.copy(node)
    return writer.graph


class _Probe(SpecTensor):
    """An operand that remembers whether a decomposition asks for its spec."""

    asked = False

    @property
    def _spec(self) -> Spec:
        type(self).asked = True
        return self._kept

    @_spec.setter
    def _spec(self, spec: Spec) -> None:
        self._kept = spec


@dataclass
class _Writer:
    """The new graph. of: for each node of the old one its node; for an op with several results, these. meta: what the
    old node knows beside its value."""

    mesh: DeviceMesh
    graph: fx.Graph = field(default_factory=fx.Graph)
    of: dict[fx.Node, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def copy(self, node: fx.Node) -> None:
        """Write one node of the old graph."""
        if node.target is operator.getitem and isinstance(self.of.get(node.args[0]), (list, tuple)):
            self.of[node] = self.of[node.args[0]][node.args[1]]
            return
        self.meta = {k: v for k, v in node.meta.items() if k != "val"}
        results = self._simpler(node)
        self.of[node] = copied(self.graph, node, self.of.__getitem__) if results is None else results

    def _simpler(self, node: fx.Node) -> Any:
        """The nodes of the results of the op's decomposition; None if it stays as it is."""
        if node.target not in decompositions or not all(map(_is_tensor, node.all_input_nodes)):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.of.__getitem__)
        return self._asking_nothing(node.target, args, kwargs)

    def _asking_nothing(self, op: _torch.OpOverload, args: tuple, kwargs: dict) -> Any:
        """The results of a decomposition, if it asks no spec. What it wrote is erased otherwise."""
        marker, _Probe.asked = len(self.graph.nodes), False
        probes = functools.cache(self._probe)  # one for a node: a decomposition may ask whether two operands are one
        out = decomposed(op, *fx.map_arg((args, kwargs), probes))
        if out is NotImplemented or _Probe.asked:
            for extra in list(reversed(list(self.graph.nodes)))[: len(self.graph.nodes) - marker]:
                self.graph.erase_node(extra)
            return None
        return pytree.tree_map_only(SpecTensor, lambda x: x.node, out)

    def _probe(self, node: fx.Node) -> _Probe:
        return _Probe(node, self._replicated(node.meta["val"]), self._emit)

    def _replicated(self, value: Any) -> Spec:
        return Spec.of(self.mesh, tuple(value.shape), value.dtype, stride=_stride(value))

    def _emit(self, op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Write an op of a decomposition; one that has a decomposition of its own is written as that."""
        asked = _Probe.asked
        inner = self._asking_nothing(op, args, kwargs) if op in decompositions else None
        _Probe.asked = asked
        if inner is None:
            inner = self._node(op, args, kwargs)
        return pytree.tree_map_only(fx.Node, self._probe, inner)

    def _node(self, op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        specs = fx.map_arg((args, kwargs), lambda n: self._replicated(n.meta["val"]))
        node = self.graph.create_node("call_function", op, args, kwargs)
        node.meta |= self.meta
        metas = out_metas(op, *specs, torch.device(self.mesh.device_type))
        node.meta["val"] = metas if _torch.returns_many(op) else metas[0]
        if not _torch.returns_many(op):
            return node
        return [None if meta is None else self._item(node, i, meta) for i, meta in enumerate(metas)]

    def _item(self, node: fx.Node, i: int, meta: TensorMeta) -> fx.Node:
        item = self.graph.create_node("call_function", operator.getitem, (node, i))
        item.meta |= {**self.meta, "val": meta}
        return item


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.Tensor, TensorMeta))


def _stride(value: Any) -> tuple[int, ...]:
    return tuple(value.stride() if isinstance(value, torch.Tensor) else value.stride)
