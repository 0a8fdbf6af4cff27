"""Send small all-reduces together: one bucket for many gradients.

    all_reduce(g1), all_reduce(g2), ...  ->  one bucket: one all-reduce of all of them

A bucket collects all-reduces over one axis, of one kind and dtype, whose results nobody has read yet. It is sent when
it is full or when one of the results is read. The first bucket is small, so that sending begins early in the backward.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

from torch import fx

from spmd.expand.program import Program
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.collective_moves import AllReduce
from spmd.tensor.redistribute.plan import Step

MB = 1 << 20


def bucket_all_reduces(program: Program, first_mb: float = 1.0, cap_mb: float = 25.0) -> Program:
    """The same program with its all-reduces in buckets.

    The first bucket is sent when it has `first_mb` megabytes, the others when they have `cap_mb`, and any bucket when
    one of its results is read. An all-reduce that is read at once, such as that of the activations of a tensor-parallel
    layer, stays alone. The sums are bitwise the same if the transport reduces an element in the same way wherever it is
    in the buffer.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    output = next(n for n in graph.nodes if n.op == "output")
    old = next(n for n in program.graph.nodes if n.op == "output")
    output.meta = dict(old.meta)
    _Packer(graph, first_mb * MB, cap_mb * MB).pack()
    return replace(program, graph=graph)


@dataclass
class _OpenBucket:
    """A bucket that is being filled. It is sent when it has `limit` bytes."""

    limit: float
    members: list[fx.Node] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(n.target.nbytes for n in self.members)


@dataclass
class _Packer:
    graph: fx.Graph
    first: float
    cap: float
    open: dict[tuple, _OpenBucket] = field(default_factory=dict)

    def pack(self) -> None:
        for node in list(self.graph.nodes):
            for key, bucket in list(self.open.items()):
                if any(n in bucket.members for n in node.all_input_nodes):
                    with self.graph.inserting_before(node):
                        self._close(key)
            if isinstance(node.target, Step) and isinstance(node.target.move, AllReduce):
                self._add(node)

    def _add(self, node: fx.Node) -> None:
        spec = node.target.before
        key = node.target.move, tuple(map(spec.on, node.target.axes)), spec.dtype
        bucket = self.open.setdefault(key, _OpenBucket(self.first))
        bucket.members.append(node)
        if bucket.nbytes >= bucket.limit:
            with self.graph.inserting_after(node):
                self._close(key)

    def _close(self, key: tuple) -> None:
        """Write the bucket at the insert point of the graph, and let the readers of its members read from it."""
        members = self.open[key].members
        self.open[key] = _OpenBucket(self.cap)
        if len(members) < 2:
            return
        bucket = Bucket(tuple(n.target for n in members))
        sent = self.graph.create_node("call_function", bucket, ([n.args[0] for n in members],), name="bucket")
        sent.meta["spec"] = bucket.after
        after = sent
        for i, member in enumerate(members):
            with self.graph.inserting_after(after):
                after = self.graph.create_node("call_function", operator.getitem, (sent, i), name=f"{member.name}_of")
            after.meta |= member.meta
            member.replace_all_uses_with(after)
            self.graph.erase_node(member)
