"""What the nodes of a program cost on the streams of a rank, in microseconds.

    mm(f32[64, 128], f32[128, 512])        2.0 to start, and the slower of its operations and its bytes: compute
    all_reduce over dp of f32[64, 512]     packed on compute, sent on the stream "dp", put in order on compute
    to_host(f32[64, 512])                  carried by the copy engine on the stream "to host"

Prices are those of the rank with the largest blocks. Where a calibration has curves of local ops, an op takes what they
say (`op_times.py`). Elsewhere it takes a start, where the machine says what a small copy takes, and then the time of a
roofline. Equal ops have one price, which is computed once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from spmd import _torch
from spmd.comm.transport import C10dTransport
from spmd.expand.choose.price import local_work, node_work
from spmd.expand.choose.work import Roofline, is_free
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp
from spmd.expand.local_ops import SAFE_LOCALLY, UnlessEmpty
from spmd.expand.loops.loop import Loop
from spmd.expand.timeline.op_times import OpTimes
from spmd.mesh import DeviceMesh, Link, MeshTopoInfo
from spmd.mesh.cost import link_shares
from spmd.tensor.recipes.host import HOST_COPIES, to_host
from spmd.tensor.recipes.random import Draw
from spmd.tensor.recipes.recipe import Recipe
from spmd.tensor.recipes.updates import adamw
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.moves import Parts
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec


@dataclass(frozen=True)
class Sending:
    """A collective on the stream of its group, or a copy to host memory or back on that of its engine.

    stream: the axes of the group, by name; "to host" or "from host". us: from its start to its end, if it is alone.
    links: for each level of links, how long its bytes keep it busy. joined_us: the copies behind it, on the compute
    stream. packed: bytes of the buffer that is filled before it is sent. joined: bytes of the one that is put in order
    behind it. terms: bytes that come for a reduction and are added up behind it, where it is an exchange of terms.
    """

    stream: str
    us: float
    links: tuple[tuple[int, float], ...]
    joined_us: float
    nbytes: int
    packed: int = 0
    joined: int = 0
    terms: int = 0


class Prices:
    """The prices of the nodes of programs on one mesh; with its links, or with others."""

    def __init__(self, mesh: DeviceMesh, topology: MeshTopoInfo | None = None) -> None:
        self.mesh, self.topology = mesh, topology or mesh.topology
        self.roofline = Roofline(self.topology)
        memory = self.topology.machine.memory
        self.start_us = memory.hop_us if memory else 0.0
        is_device = self.topology.machine.host is not None  # a CPU's ranks may stand for those of devices
        self.exchanges_terms = not is_device and C10dTransport().exchanges_terms(mesh.device_type)
        self.times = OpTimes(self.topology.machine.local_ops)
        self._ops: dict[tuple, float] = {}
        self._sent: dict[Step | Bucket, Sending | None] = {}
        self._cuts: dict[fx.Node, float] = {}

    def compute_us(self, node: fx.Node) -> float:
        """What a node takes on the compute stream before its result is there, or before it is sent."""
        if isinstance(node.target, (Step, Bucket)):
            parts = self._parts(node.target)
            return parts.packed + (0.0 if node.target.sends else parts.joined)
        if is_cut(node):
            return self._cut_us(node)
        if node.op != "call_function" or not isinstance(node.meta.get("spec"), (Spec, tuple)):
            return 0.0
        key = node.target, node.meta["spec"], tuple([n.meta.get("spec") for n in node.all_input_nodes])
        try:
            found = self._ops.get(key)
        except TypeError:  # a target that has no hash
            return self._op_us(node)
        if found is None:
            found = self._ops[key] = self._op_us(node)
        return found

    def _cut_us(self, node: fx.Node) -> float:
        """What it takes to cut a tensor out of what was gathered: its part of the copies behind the collective."""
        of, index = node.args
        if of not in self._cuts:
            self._cuts[of] = self._parts(of.target).joined / max(1, _nbytes(of.target.after))
        return self._cuts[of] * of.target.after[index].local_nbytes

    def sending(self, node: fx.Node) -> Sending | None:
        """What a node sends, or None."""
        step = node.target
        if isinstance(step, _torch.OpOverload):  # most nodes: it takes longer to hash one
            return None
        if not isinstance(step, (Step, Bucket)):
            return self._copying(node) if step in HOST_COPIES else None
        if not step.sends:
            return None
        if step not in self._sent:
            self._sent[step] = self._sending(step)
        return self._sent[step]

    def _copying(self, node: fx.Node) -> Sending | None:
        """A copy on an engine, or None where host and device are one."""
        link, nbytes = self.topology.machine.host, _nbytes(node.meta["spec"])
        if link is None:
            return None
        stream = "to host" if node.target is to_host else "from host"
        return Sending(stream, copy_us(link, nbytes), (), 0.0, nbytes)

    def _parts(self, step: Step | Bucket) -> Parts:
        return step.parts if self.topology is self.mesh.topology else step.parts_over(self.topology)

    def _op_us(self, node: fx.Node) -> float:
        if isinstance(node.target, Loop):
            return node.target.times * node.target.body.timeline(self.topology).us
        op = node.target.op if isinstance(node.target, (UnlessEmpty, Draw)) else node.target
        if isinstance(op, _torch.OpOverload) and (is_free(op) or op in SAFE_LOCALLY.values()):
            return self.times.view_us
        copies_itself = op in HOST_COPIES and self.topology.machine.host is None
        if isinstance(op, (Recipe, LocalMapOp, LocalMapGradientOp)) or op is adamw or copies_itself:
            return self.times.bytes_us(self._nbytes(node)) if self.times.is_known else self._roofline_us(node)
        if not isinstance(op, _torch.OpOverload):
            return 0.0
        if self.times.is_known:
            work = local_work(node, self.mesh)
            return self.times.bytes_us(_nbytes(node.meta["spec"])) if work is None else self.times.us(work)
        return self.start_us + (node_work(node, self.mesh, self.roofline) or self._made_us(node))

    def _roofline_us(self, node: fx.Node) -> float:
        """What it takes to read the operands and to write the results."""
        return self.start_us + self._nbytes(node) * self.roofline.compute.us_per_byte

    def _nbytes(self, node: fx.Node) -> int:
        read = [_nbytes(n.meta.get("spec")) for n in node.all_input_nodes]
        return sum(read) + _nbytes(node.meta["spec"])

    def _made_us(self, node: fx.Node) -> float:
        return _nbytes(node.meta["spec"]) * self.roofline.compute.us_per_byte

    def _sending(self, step: Step | Bucket) -> Sending | None:
        parts, axes = self._parts(step), step.axes
        if not parts.sent:  # a group of one rank
            return None
        stream = ",".join(map(self.mesh.axis_name, axes))
        shares = link_shares(axes, self.topology)
        on_links = max(0.0, parts.sent - step.latency_over(self.topology))
        links = tuple((level, share * on_links) for level, share in shares)
        is_bucket = isinstance(step, Bucket)  # which is a buffer, whether copies cost anything or not
        packed = step.nbytes if is_bucket or parts.packed else 0
        joined_us = 0.0 if is_bucket and step.copies_out else parts.joined  # those who cut it do the copies
        joined = _nbytes(step.after) if joined_us else 0
        terms = step.nbytes if step.kind == "reduce_scatter" and self.exchanges_terms else 0
        return Sending(stream, parts.sent, links, joined_us, step.nbytes, packed, joined, terms)


def is_cut(node: fx.Node) -> bool:
    """Whether a node cuts one of the tensors of a bucket out of what came."""
    if node.target is not operator.getitem:
        return False
    return isinstance(of := node.args[0].target, Bucket) and of.copies_out


def copy_us(link: Link, nbytes: int) -> float:
    """Microseconds of a copy to host memory or back.

    >>> copy_us(Link(hop_us=5.0, gb_per_s=50.0), 1_000_000)
    25.0
    """
    return link.hop_us + nbytes * link.us_per_byte


def _nbytes(spec: Spec | tuple | None) -> int:
    specs = spec if isinstance(spec, tuple) else (spec,)
    return sum([s.local_nbytes for s in specs if s is not None])
