"""The layers that `layers.py` sweeps: each as one function, which runs on one device and on the ranks of a mesh.

    KINDS["RowwiseParallel"](world)    a step: the result, gradients, and the parameters after SGD, as whole tensors

The last axis of the mesh, "ax", is the layer's own; over the others, "dp" and "rep", batches are shared out, or heads,
or time. A `World` says how long dims are, so that blocks are even, uneven or empty, and places tensors; on one device
it leaves them alone. All numbers are drawn once, from their names.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor
from spmd.mesh import per_rank
from spmd.parallel import (
    ColwiseParallel,
    ExpertParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    context_parallel,
    data_parallel,
    fully_shard,
    linear_cross_entropy,
    loss_parallel,
    parallelize_module,
)

COL, ROW, R = ColwiseParallel, RowwiseParallel, Replicate()
Step = dict[str, torch.Tensor]


@functools.cache
def _drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float64)


@functools.cache
def _whole_numbers(name: str, shape: tuple[int, ...], below: int, ignored: bool) -> torch.Tensor:
    found = torch.randint(below, shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if ignored and found.numel() > 1:
        found[0, -1] = -100
    return found


@dataclass(frozen=True)
class World:
    """Where a layer runs. shape: of the mesh, also where there is none, on one device. sort: how blocks are cut."""

    shape: tuple[int, ...]
    sort: str
    dtype: torch.dtype
    mesh: DeviceMesh | None = None

    def size(self, ranks: int) -> int:
        """The length of a dim that so many ranks share out."""
        return 2 if ranks == 1 else {"even": 2 * ranks, "uneven": 2 * ranks - 1, "empty": ranks - 1}[self.sort]

    @property
    def ax(self) -> int:
        return self.size(self.shape[-1])

    @property
    def data(self) -> int:
        """The length of a batch that the axes but the last share out."""
        return self.size(prod(self.shape[:-1]))

    def draw(self, name: str, *shape: int) -> torch.Tensor:
        """Numbers that are the same in all precisions, up to that of bfloat16."""
        return (_drawn(name, shape).bfloat16() / 2).to(self.dtype)

    def ids(self, name: str, *shape: int, below: int, ignored: bool = False) -> torch.Tensor:
        return _whole_numbers(name, shape, below, ignored).clone()

    def over(self, *names: str) -> tuple[str, ...]:
        """Those of these axes that the mesh has."""
        return tuple(a for a in ("rep", "dp", "ax")[-len(self.shape) :] if a in names)

    def place(self, x: torch.Tensor, **dims: int) -> torch.Tensor:
        """On the whole mesh, sharded over the axes that are named and there."""
        if self.mesh is None:
            return x.clone()
        placements = [Shard(dims[a]) if a in dims else R for a in self.mesh.axis_names]
        return distribute_tensor(_of_each_rank(x), self.mesh, placements, src_data_rank=None)

    def own(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        """This rank's rows."""
        if self.mesh is None or not self.over(*names):
            return x.clone()
        part = self.mesh[self.over(*names)]
        return distribute_tensor(x.clone(), part, [Shard(0)] * part.ndim, src_data_rank=None).to_local()

    def joined(self, x: torch.Tensor, like: torch.Tensor, *names: str) -> torch.Tensor:
        """All rows, of those that ranks have."""
        if self.mesh is None or not self.over(*names):
            return whole(x)
        part = self.mesh[self.over(*names)]
        local = x.full_tensor() if isinstance(x, DTensor) else x
        return DTensor.from_local(local, part, [Shard(0)] * part.ndim, shape=like.shape).full_tensor()

    def copies(self, *names: str) -> int:
        """How many ranks share out a batch over these axes."""
        return 1 if self.mesh is None else prod(self.mesh[a].size() for a in self.over(*names))


@per_rank
def _of_each_rank(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def whole(x: torch.Tensor) -> torch.Tensor:
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def stepped(loss: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> Step:
    """The gradients of a loss, and the parameters after a step of SGD."""
    loss.backward()
    used = {name: p for name, p in parameters.items() if p.grad is not None}
    found = {f"{name}.grad": whole(p.grad) for name, p in used.items()}
    torch.optim.SGD(list(parameters.values()), 0.1).step()
    return found | {name: whole(p) for name, p in parameters.items()}


def filled(net: nn.Module, world: World) -> nn.Module:
    net = net.to(world.dtype)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(world.draw(name, *p.shape))
    return net


# ---- styles, fully sharded, data parallel -----------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """One of each module that a style is for."""

    def __init__(self, width: int, hidden: int, words: int):
        super().__init__()
        self.words, self.norm, self.rms = nn.Embedding(words, width), nn.LayerNorm(width), nn.RMSNorm(width)
        self.mlp, self.head = Mlp(width, hidden), nn.Linear(width, words)

    def forward(self, ids):
        x = self.words(ids)
        return self.head(x + self.mlp(self.rms(self.norm(x))))


SEQUENCE = {
    "words": ROW(input_layouts=R, output_layouts=Shard(1), use_local_output=False), "norm": SequenceParallel(),
    "rms": SequenceParallel(), "mlp.up": COL(input_layouts=Shard(1)),
    "mlp.down": ROW(output_layouts=Shard(1), use_local_output=False),
    "head": COL(input_layouts=Shard(1), output_layouts=R),
}  # fmt: skip
STYLES = {
    "ColwiseParallel": {"mlp.up": COL(output_layouts=R), "head": COL(output_layouts=R)},
    "ColwiseParallel, words": {"words": COL(output_layouts=R)},
    "RowwiseParallel": {"mlp.down": ROW(input_layouts=R), "head": ROW(input_layouts=R)},
    "RowwiseParallel, words": {"words": ROW(input_layouts=R)},
    "Colwise and Rowwise": {"mlp.up": COL(), "mlp.down": ROW()},
    "SequenceParallel": SEQUENCE,
    "PrepareModuleInput": {"mlp": PrepareModuleInput(
        input_layouts=R, desired_input_layouts=Shard(1), use_local_output=False),
        "mlp.up": COL(input_layouts=Shard(1)), "mlp.down": ROW()},
    "PrepareModuleOutput": {"norm": PrepareModuleOutput(
        output_layouts=R, desired_output_layouts=Shard(1), use_local_output=False), "rms": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=R, use_local_output=True)},
    "PrepareModuleInputOutput": {"mlp.up": COL(), "mlp": PrepareModuleInputOutput(
        input_layouts=R, desired_input_layouts=R, output_layouts=Shard(1), desired_output_layouts=R),
        "mlp.down": ROW(output_layouts=Shard(1), use_local_output=False)},
}  # fmt: skip


def _trained(world: World, net: nn.Module, batch: int, words: int, *names: str) -> Step:
    """A loss that is a sum over the batch, which the ranks of these axes share out; gradients are averages."""
    ids = world.ids("ids", batch, world.ax, below=words)
    weights = world.draw("weights", batch, world.ax, words)
    parameters = dict(net.named_parameters())  # which fully_shard replaces while they are gathered
    with spmd.implicit_replication():
        out = net(world.own(ids, *names))
        loss = (out * world.own(weights, *names)).sum() * world.copies(*names)
    found = {"out": world.joined(out, weights, *names)}
    return found | stepped(loss, parameters)


def styled(plan: Mapping, world: World) -> Step:
    """The plan over the last axis, and fully sharded over the others."""
    words = world.ax + 1
    net = filled(Net(world.ax, 2 * world.ax, words), world)
    if world.mesh is not None:
        net = parallelize_module(net, world.mesh["ax"], plan)
        if world.over("rep", "dp"):
            fully_shard(net, mesh=world.mesh[world.over("rep", "dp")])
    return _trained(world, net, 2 * prod(world.shape[:-1]), words, "rep", "dp")


def wrapped(wrap: Callable[[nn.Module, DeviceMesh], object], axes: Sequence[str], world: World) -> Step:
    words, ranks = world.ax + 1, prod(world.shape[-len(axes) :])
    net = filled(Net(world.ax, world.ax + 1, words), world)
    if world.mesh is not None:
        wrap(net, world.mesh[world.over(*axes)])
    return _trained(world, net, world.size(ranks), words, *axes)


def _groups(net: nn.Module, mesh: DeviceMesh, **said) -> None:
    fully_shard(net.mlp, mesh=mesh, **said)
    fully_shard(net, mesh=mesh, **said)


WRAPPED = {
    "fully_shard": (_groups, ("dp", "ax")),
    "fully_shard, last dim": (
        functools.partial(_groups, shard_placement_fn=lambda p: Shard(p.ndim - 1)), ("dp", "ax"),
    ),
    "fully_shard, state over all": (lambda net, mesh: _groups(net, mesh, state=mesh.axis_names), ("dp", "ax")),
    "fully_shard, kept": (functools.partial(_groups, reshard_after_forward=False), ("dp", "ax")),
    "data_parallel": (data_parallel, ("ax",)),
    "data_parallel, buckets": (functools.partial(data_parallel, bucket_cap_mb=1e-4), ("dp", "ax")),
}  # fmt: skip


# ---- losses -----------------------------------------------------------------------------------

LOSSES = {
    "mean": {}, "smoothed": {"label_smoothing": 0.2}, "weighted": {"weight": True, "label_smoothing": 0.1},
    "sum": {"reduction": "sum", "weight": True}, "none": {"reduction": "none"}, "z-loss": {"z_loss": 0.1},
    "probabilities": {"probabilities": True, "label_smoothing": 0.1, "weight": True},
}  # fmt: skip


def _reference(x, table, target, bias, z_loss=0.0, **said):
    logits = F.linear(x, table, bias)
    flat = target.flatten(0, 1) if target.is_floating_point() else target.flatten()
    wide = logits.float() if logits.dtype is torch.bfloat16 else logits
    said = {k: v.to(wide.dtype) if isinstance(v, torch.Tensor) else v for k, v in said.items()}
    flat = flat.to(wide.dtype) if flat.is_floating_point() else flat
    loss = F.cross_entropy(wide.flatten(0, 1), flat, **said)
    if z_loss:
        counts = (target != -100).to(wide.dtype)
        loss = loss + z_loss * (wide.logsumexp(-1).square() * counts).sum() / counts.sum()
    return loss.reshape(x.shape[:-1]) if said.get("reduction") == "none" else loss


def _given_loss(world: World, said: Mapping) -> tuple:
    batch, classes = (2 if len(world.shape) == 1 else world.size(world.shape[0])), world.ax + 2 * (world.sort == "even")
    said, time = dict(said), (2 if len(world.shape) < 3 else world.size(world.shape[0]))
    target = world.ids("target", batch, time, below=classes, ignored=True)
    if said.pop("probabilities", False):
        target = world.draw("target", batch, time, classes).softmax(-1)
    if said.pop("weight", False):
        said["weight"] = world.draw("class weights", classes).abs()
    x, table, bias = world.draw("x", batch, time, 4), world.draw("table", classes, 4), world.draw("bias", classes)
    return x, table, bias, target, said


def _weighed(loss: torch.Tensor) -> torch.Tensor:
    return loss.sum() if loss.ndim == 0 else (loss * loss.detach().cos()).sum()


def linear_loss(kind: Mapping, world: World) -> Step:
    x, table, bias, target, said = _given_loss(world, kind)
    if world.mesh is None:
        leaves = {"x": x, "table": table, "bias": bias}
    else:
        placed = {"x": {"dp": 0, "rep": 1}, "table": {"ax": 0}, "bias": {"ax": 0}}
        leaves = {name: world.place(y, **placed[name]) for name, y in (("x", x), ("table", table), ("bias", bias))}
    x, table, bias = (y.detach().requires_grad_() for y in leaves.values())
    if world.mesh is None:
        loss = _reference(x, table, target, bias, **said)
    else:
        loss = linear_cross_entropy(x, table, target, linear_bias=bias, chunk_size=2, **said)
    return {"loss": whole(loss)} | stepped(_weighed(loss), {"x": x, "table": table, "bias": bias})


def context_loss(kind: Mapping, world: World) -> Step:
    """Of logits that are sharded on classes, and of plain targets of this rank."""
    x, table, bias, target, said = _given_loss(world, kind)
    logits = F.linear(x, table, bias).flatten(0, 1)
    target = target.flatten(0, 1)
    leaf = world.place(logits, dp=0, ax=1).requires_grad_()
    if world.mesh is not None:
        target = world.place(target, dp=0, **({"ax": 1} if target.is_floating_point() else {})).to_local()
    with loss_parallel() if world.mesh is not None else contextlib.nullcontext():
        loss = F.cross_entropy(leaf, target, **said)
    return {"loss": whole(loss)} | stepped(_weighed(loss), {"logits": leaf})


def tied(world: World) -> Step:
    """Words and logits are one table, sharded together."""
    words, batch = world.ax, world.data if len(world.shape) > 1 else 2
    ids = world.place(world.ids("ids", batch, 3, below=words), **({"dp": 0} if world.over("dp") else {}))
    table = world.place(world.draw("table", words, 4), ax=0).requires_grad_()
    hidden = F.embedding(ids, table).tanh()
    if world.mesh is None:
        loss = _reference(hidden, table, ids, None, z_loss=0.01)
    else:
        loss = linear_cross_entropy(hidden, table, ids, chunk_size=2, z_loss=0.01)
    return {"loss": whole(loss)} | stepped(loss, {"table": table})


# ---- attention --------------------------------------------------------------------------------


def _attend(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])


def _given_attention(world: World, heads: int, is_masked: bool) -> tuple:
    batch, time = world.size(world.shape[-2]) if len(world.shape) > 1 else 2, world.ax
    q, k, v = (world.draw(name, batch, n, time, 8) for name, n in (("q", 4), ("k", heads), ("v", heads)))
    mask = world.ids("mask", batch, 1, time, time, below=2).bool() if is_masked else None
    return q, k, v, world.draw("weights", *q.shape), mask if mask is None else mask | torch.eye(time, dtype=torch.bool)


SEQ = {"dp": 0, "rep": 1, "ax": 2}


def attention(method: str, balanced: bool | None, heads: int, is_masked: bool, world: World) -> Step:
    """Of DTensors: batch over dp, heads over rep, positions over the last axis."""
    *leaves, weights, mask = _given_attention(world, heads, is_masked)
    q, k, v = (world.place(x, **SEQ).requires_grad_() for x in leaves)
    uses = world.mesh is not None and method
    if mask is not None and world.mesh is not None and not method:
        mask = world.place(mask)
    with context_parallel(world.mesh["ax"], method=method, balanced=balanced) if uses else contextlib.nullcontext():
        out = _attend(q, k, v, mask)
    return {"out": whole(out)} | stepped((out * world.place(weights, **SEQ)).sum(), {"q": q, "k": k, "v": v})


class Leaves(nn.Module):
    def __init__(self, q, k, v):
        super().__init__()
        self.q, self.k, self.v = map(nn.Parameter, (q, k, v))


def compiled_attention(method: str, balanced: bool | None, heads: int, is_masked: bool, world: World) -> Step:
    """The same in a compiled step, of parameters that are placed so."""
    *leaves, weights, mask = _given_attention(world, heads, is_masked)
    net, mesh = Leaves(*leaves), world.mesh

    def run(net, weights, mask):
        said = {"method": method, "balanced": balanced}
        with context_parallel(mesh["ax"], **said) if mesh is not None else contextlib.nullcontext():
            out = _attend(net.q, net.k, net.v, mask)
        (out * weights).sum().backward()
        return out

    if mesh is not None:
        placed = {a: Shard(d) for a, d in SEQ.items() if a in mesh.axis_names}
        run = spmd.compile(run, mesh, params={"*": placed}, inputs={"weights": placed})
    out = run(net, weights, mask)
    found = {f"{name}.grad": whole(p.grad) for name, p in net.named_parameters()}
    torch.optim.SGD(net.parameters(), 0.1).step()
    return {"out": whole(out)} | found | {name: whole(p) for name, p in net.named_parameters()}


# ---- experts ----------------------------------------------------------------------------------


class Experts(nn.Module):
    """In the manner of transformers: all experts in one tensor for each kind of weight."""

    def __init__(self, experts: int, width: int = 4, inner: int = 6):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.zeros(experts, width, inner))
        self.act_fn, self.num_experts = F.silu, experts

    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for i in index.unique().tolist():
            if i < self.num_experts:
                token, place = (index == i).nonzero(as_tuple=True)
                gate, up = F.linear(x[token], self.gate_up_proj[i]).chunk(2, -1)
                y = F.linear(self.act_fn(gate) * up, self.down_proj[i]) * weights[token, place, None]
                out = out.index_add(0, token, y.to(x.dtype))
        return out


def _given_experts(world: World, tokens: int) -> tuple:
    """Tokens, two experts for each, how much these count, numbers for the loss, and how many experts there are."""
    experts = max(world.ax, 2)
    first = world.ids("experts", tokens, below=experts)
    index = torch.stack([first, (first + 1) % experts], 1)
    weights = world.draw("shares", tokens, 2).abs()
    return world.draw("tokens", tokens, 4), index, weights, world.draw("weights", tokens, 4), experts


def _kept(index: torch.Tensor, weights: torch.Tensor, experts: int, factor: float | None, ranks: int) -> torch.Tensor:
    """On one device: the weights of what an expert has room for, of each rank's tokens the first ones."""
    if factor is None:
        return weights
    kept, capacity = torch.ones_like(weights), ceil(factor * -(-len(index) // ranks) * index.shape[1] / experts)
    for part, of_part in zip(index.split(-(-len(index) // ranks)), kept.split(-(-len(index) // ranks)), strict=True):
        seen = [0] * (experts + 1)  # the last: of no expert
        for place, e in enumerate(part.flatten().tolist()):
            seen[e] += 1
            of_part.view(-1)[place] = seen[e] <= capacity
    return weights * kept


def _shared_out(world: World, experts: int, factor: float | None) -> nn.Module:
    """Over the last axis; over the others there are copies, which are fully sharded there."""
    net = filled(Experts(experts), world)
    if world.mesh is not None:
        net = parallelize_module(net, world.mesh["ax"], ExpertParallel(capacity_factor=factor))
        if world.over("rep", "dp"):
            fully_shard(net, mesh=world.mesh[world.over("rep", "dp")])
    return net


def global_experts(factor: float | None, world: World) -> Step:
    """Tokens are DTensors over the last axis, where a rank may have fewer; the other axes have tokens of their own."""
    slices, data = prod(world.shape[:-1]), ("rep", "dp")
    x, index, shares, weights, experts = _given_experts(world, slices * 2 * world.ax)
    net, mesh, each = _shared_out(world, experts, factor), world.mesh, 2 * world.ax
    if mesh is None:
        pairs = zip(index.split(each), shares.split(each), strict=True)
        kept = [_kept(i, s, experts, factor, world.shape[-1]) for i, s in pairs]
        given = x, index, torch.cat(kept), weights
    else:
        own = [world.own(t, *data) for t in (x, index, shares, weights)]
        given = [distribute_tensor(_of_each_rank(t), mesh["ax"], [Shard(0)], src_data_rank=None) for t in own]
    parameters = dict(net.named_parameters())
    out = net(*given[:3])
    loss = (out * given[3]).sum() * world.copies(*data)
    return {"out": world.joined(out.detach(), weights, *data)} | stepped(loss, parameters)


def own_experts(world: World) -> Step:
    """Each rank has plain tokens and a loss of its own."""
    x, index, shares, weights, experts = _given_experts(world, 2 * world.size(prod(world.shape)))
    net, names = _shared_out(world, experts, None), ("rep", "dp", "ax")
    parameters = dict(net.named_parameters())
    x, index, shares, own = (world.own(t, *names) for t in (x, index, shares, weights))
    x.requires_grad_()
    out = net(x, index, shares)
    (out * own).sum().mul(world.copies(*names)).backward()
    found = {"out": world.joined(out.detach(), weights, *names),
             "x.grad": world.joined(x.grad, weights, *names) / world.copies(*names)}  # fmt: skip
    found |= {f"{name}.grad": whole(p.grad) for name, p in parameters.items()}
    torch.optim.SGD(list(parameters.values()), 0.1).step()
    return found | {name: whole(p) for name, p in parameters.items()}


def _experts_step(net, x, index, shares, weights):
    out = net(x, index, shares)
    (out * weights).sum().backward()
    return out


def compiled_experts(factor: float | None, padded: bool, world: World) -> Step:
    """Global tokens, of which each group has its capacity; the other axes share out the tokens, too."""
    x, index, shares, weights, experts = _given_experts(world, prod(world.shape[:-1]) * 2 * world.ax)
    net, run = filled(Experts(experts), world), _experts_step
    if world.mesh is None:
        shares = _kept(index, shares, experts, factor, world.shape[-1])
    else:
        net = parallelize_module(net, world.mesh["ax"], ExpertParallel(capacity_factor=factor, padded=padded))
        of_tokens = dict.fromkeys(world.over("rep", "dp", "ax"), Shard(0))
        given = dict.fromkeys(("x", "index", "shares", "weights"), of_tokens)
        run = spmd.compile(run, world.mesh, inputs=given)
    out = run(net, x, index, shares, weights)
    found = {f"{name}.grad": whole(p.grad) for name, p in net.named_parameters()}
    torch.optim.SGD(net.parameters(), 0.1).step()
    return {"out": whole(out)} | found | {name: whole(p) for name, p in net.named_parameters()}


# ---- windows over a sharded dim ---------------------------------------------------------------

WINDOWS: dict[str, tuple[Callable, tuple[int, ...] | None]] = {
    "conv1d": (lambda x, w: F.conv1d(x.flatten(2), w.flatten(2)[..., :3], padding=1), (4, 3, 3, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), (4, 3, 3, 3)),
    "conv2d, stride 2": (lambda x, w: F.conv2d(x, w, stride=2, padding=1), (4, 3, 3, 3)),
    "conv2d, dilated": (lambda x, w: F.conv2d(x, w, padding=2, dilation=2), (4, 3, 3, 3)),
    "conv2d, by channel": (lambda x, w: F.conv2d(x, w, padding=1, groups=3), (3, 1, 3, 3)),
    "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1), (3, 4, 3, 3)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), None),
    "group_norm": (lambda x: F.group_norm(x, 3), None),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, stride=1, padding=1), None),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2, stride=2, ceil_mode=True), None),
    "unfold": (lambda x: x.unfold(2, min(2, x.shape[2]), 1), None),
}


def windowed(fn: Callable, shape: tuple[int, ...] | None, world: World) -> Step:
    """Images: batch over dp and rep, rows over the last axis."""
    batch = world.size(world.shape[0]) if len(world.shape) > 1 else 2
    x = world.place(world.draw("image", batch, 3, world.ax, 4), dp=0, ax=2).requires_grad_()
    leaves = {"x": x} | ({"w": world.place(world.draw("kernel", *shape)).requires_grad_()} if shape else {})
    out = fn(*leaves.values())
    return {"out": whole(out)} | stepped((out * out.detach().cos()).sum(), leaves)


# ---- all --------------------------------------------------------------------------------------

ATTENTION: dict[str, tuple[str, bool | None, int, bool]] = {  # method, balanced, heads of keys, masked
    "as an op": ("", None, 4, True), "ring": ("ring", None, 2, True), "ring_q": ("ring_q", None, 4, False),
    "allgather": ("allgather", None, 2, False), "heads": ("heads", None, 4, True),
    "ring, balanced": ("ring", True, 2, False), "ring_q, balanced": ("ring_q", True, 4, False),
    "allgather, balanced": ("allgather", True, 4, False),
}  # fmt: skip
FACTORS = {"dropless": None, "capacity": 1.0}
LINEAR_LOSS, CONTEXT_LOSS = LOSSES, {k: v for k, v in LOSSES.items() if k != "z-loss"}

KINDS: dict[str, Callable[[World], Step]] = {
    **{name: functools.partial(styled, plan) for name, plan in STYLES.items()},
    **{name: functools.partial(wrapped, *said) for name, said in WRAPPED.items()},
    **{f"linear_cross_entropy, {name}": functools.partial(linear_loss, said) for name, said in LINEAR_LOSS.items()},
    **{f"loss_parallel, {name}": functools.partial(context_loss, said) for name, said in CONTEXT_LOSS.items()},
    "tied words and logits": tied,
    **{f"attention, {name}": functools.partial(attention, *s) for name, s in ATTENTION.items()},
    **{f"compiled attention, {name}": functools.partial(compiled_attention, *s)
       for name, s in ATTENTION.items() if s[0]},
    "experts, own tokens": own_experts,
    **{f"experts, {name}": functools.partial(global_experts, factor) for name, factor in FACTORS.items()},
    **{f"compiled experts, {name}": functools.partial(compiled_experts, factor, True)
       for name, factor in FACTORS.items()},
    "compiled experts, not padded": functools.partial(compiled_experts, None, False),
    **{name: functools.partial(windowed, *said) for name, said in WINDOWS.items()},
}  # fmt: skip
