"""data_parallel: each rank has all parameters, and the gradients of all ranks are averaged, in buckets.

    model = data_parallel(model, mesh["dp"])
    loss_of(model(part_of_the_batch)).backward()        # gradients are those of the whole batch

Gradients are copied into a bucket as soon as they are made, in the order in which the backward pass makes them, and a
full bucket is sent while the backward pass goes on. The gradients are then views of what was received.

Buckets are sent in their order, each once, and the last one when the pass has ended: so all ranks send the same,
whatever their data makes them use. A reentrant checkpoint is a pass of its own, and may bring a gradient whose bucket
is gone. Whether it did on some rank is told behind the gradients of the last bucket, and all ranks send it again.

Users' hooks that wait for a gradient, such as an optimiser's step in the backward pass, are called when all of it is
there; in passes that send nothing they are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spmd import _torch
from spmd.comm import transport, wait
from spmd.comm.functional import broadcast
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor.eager.dtensor import DTensor

FIRST_MB, MB = 1.0, 2**20
CACHED_MB = 0.5
"""How much is copied into a bucket at once: as few calls as it is in the cache for."""


@dataclass
class _Bucket:
    """Parameters whose gradients have one dtype, and are sent together.

    waiting: the places of those that have none yet in this pass; came: of those that have one, which is not copied yet,
    and whether it is added to one that is; nbytes: of these. memory: the gradients one after the other, and which there
    are, with views of it, for all passes; is_begun: whether this pass has begun to fill it. late: whether a gradient
    came after it was sent. before: of the last one, those that may be.
    """

    parameters: list[nn.Parameter]
    before: list[_Bucket] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    came: dict[int, bool] = field(default_factory=dict)
    nbytes: int = 0
    memory: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)
    is_begun: bool = False
    sent: torch.Tensor | None = None
    used: list[bool] = field(default_factory=list)
    late: bool = False

    def note(self, i: int, nbytes: int) -> None:
        """A parameter has a gradient."""
        if i in self.waiting:
            self.waiting.discard(i)
            self.came[i] = False
        else:
            self.came.setdefault(i, True)
        self.nbytes += nbytes

    def forget(self) -> None:
        """Begin anew, in other memory: something may still arrive in this one."""
        self.waiting, self.came, self.nbytes = set(range(len(self.parameters))), {}, 0
        self.memory, self.views, self.sent = None, [], None
        self.is_begun = self.late = False

    def take(self, share: torch.Tensor) -> None:
        """Copy gradients into the bucket while they are in the cache. Their memory is free for the next ones then."""
        if not self.is_begun:
            self.is_begun = True
            if self.memory is None or _is_held(self.memory, 1 + len(self.views)):
                blocks, dtype = [_block(p.detach()) for p in self.parameters], _dtype(self.parameters[0])
                self.memory, *self.views = _memory(blocks, len(self.before), dtype)
        parameters = [self.parameters[i] for i in self.came]
        gradients = [_block(_laid_out(p.grad, p)) for p in parameters]
        _put([self.views[i] for i in self.came], gradients, share, list(self.came.values()))
        for p in parameters:
            p.grad = None
        self.came, self.nbytes = {}, 0


def data_parallel(
    module: nn.Module, mesh: DeviceMesh, *, bucket_cap_mb: float = 25.0, broadcast_buffers: bool = True
) -> nn.Module:
    """Average the gradients of a module over all ranks of a mesh, in place; returns the module.

    Every rank computes the mean loss of an equal part of the batch. bucket_cap_mb: how many MB of gradients are sent
    together; where that is not all, the first bucket has one. broadcast_buffers: before each forward, all ranks take
    the buffers of the first rank. Parameters and buffers are the first rank's from now on, and stay the objects that
    they are; so are those that come later, or are unfrozen. Those that are DTensors, by tensor parallelism, have their
    blocks averaged. A parameter that some ranks
    have not used gets the gradient of the others; one that no rank has used gets none. Each rank has to use one at
    least: a backward pass without any of the module's parameters is not seen.

    `module.no_sync()` is a context in which backward passes send nothing: the next one outside sends what they added.
    `module.require_backward_grad_sync` says the same, as of DDP; other attributes of DDP that are set are refused when
    the module is called. What `_ddp_params_and_buffers_to_ignore` names is left as it is.

    >>> layer = data_parallel(nn.Linear(3, 2), DeviceMesh("cpu", [0]))
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> layer.weight.grad
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"data_parallel: mesh is {mesh!r}; give a mesh of spmd, such as mesh['dp']")
    if hasattr(module, "no_sync"):
        raise ValueError(f"data_parallel: this {type(module).__name__} is data-parallel already; call it once")
    module.require_backward_grad_sync = True
    gradients = _Gradients(module, mesh, bucket_cap_mb, broadcast_buffers)
    module.register_forward_pre_hook(gradients.before_forward)
    module.register_forward_hook(gradients.expect_pass)
    module.no_sync = gradients.no_sync
    return module


def _kept(module: nn.Module, named: Iterable[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors that all ranks have alike, which are all but those that DDP is told to ignore."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [x for name, x in named if name not in ignored]


def _refuse_norms(module: nn.Module, averaged: Container[nn.Parameter]) -> None:
    """ValueError for tables whose forward writes into the rows that this rank's data reads: ranks would drift apart."""
    for name, each in module.named_modules():
        if not isinstance(each, (nn.Embedding, nn.EmbeddingBag)) or each.max_norm is None:
            continue
        if each.weight in averaged and each.weight.requires_grad:
            raise ValueError(
                f"data_parallel: {name or 'module'}: max_norm={each.max_norm} writes into the rows that a rank's own "
                "data reads, so that ranks would drift apart. Set max_norm=None, and scale rows behind the step"
            )


_OF_DDP = (
    "require_forward_param_sync", "find_unused_parameters", "static_graph", "gradient_as_bucket_view",
    "broadcast_buffers", "bucket_bytes_cap", "mixed_precision", "process_group", "parameters_to_ignore",
    "skip_all_reduce_unused_params",
)  # fmt: skip


class _Gradients:
    """The gradients of a module in buckets, which are sent in order."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, cap_mb: float, with_buffers: bool):
        self.module, self.mesh, self.next, self.is_running = module, mesh, 0, False
        self.cap_mb, self.with_buffers = cap_mb, with_buffers
        self.refused = set(_OF_DDP) - vars(module).keys()  # a model may have some for itself
        self.share = torch.tensor(1 / mesh.size(), dtype=torch.float64)  # a number in whatever dtype it multiplies
        self.modules: dict[nn.Module, None] = {}
        self.parameters: dict[nn.Parameter, None] = {}
        self.buckets: list[_Bucket] = []
        self._arrange()

    def _arrange(self) -> None:
        """Take the modules and parameters as they are now. New ones, and their buffers, become the first rank's."""
        modules = dict.fromkeys(self.module.modules())
        parameters = dict.fromkeys(_kept(self.module, self.module.named_parameters()))
        if self.mesh.size() > 1:
            _refuse_norms(self.module, parameters)
        of_new = {id(x) for m in modules.keys() - self.modules.keys() for x in m._buffers.values()}
        buffers = [x for x in _kept(self.module, self.module.named_buffers()) if id(x) in of_new]
        _take_first(self.mesh, [*[p for p in parameters if p not in self.parameters], *buffers])
        self.modules, self.parameters = modules, parameters
        self.tables = _torch.Unwritten([table for m in modules for table in (m._modules, m._parameters)])
        self._fill_buckets()

    def _fill_buckets(self) -> None:
        for p in [p for bucket in self.buckets for p in bucket.parameters]:
            _torch.take_post_hooks(p).set_own(self, None)
        trained = [p for p in self.parameters if p.requires_grad]
        self.nodes = _torch.LeafNodes(trained)
        self.frozen = [p for p in self.parameters if not p.requires_grad]
        self.buckets = list(_buckets(trained[::-1], self.cap_mb))
        if self.buckets:
            self.buckets[-1].before = self.buckets[:-1]
        for bucket in self.buckets:
            bucket.waiting = set(range(len(bucket.parameters)))
            for i, p in enumerate(bucket.parameters):
                _torch.take_post_hooks(p).set_own(self, self._hook(bucket, i, _bytes(p)))

    @_torch.left_out_by_dynamo
    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Look at what is there now: what was unfrozen, replaced or registered since is averaged, too."""
        self._refuse_attributes()
        if not self.tables.are_so() or any([p.requires_grad for p in self.frozen]):
            self._arrange()
        if self.with_buffers and any([m._buffers for m in self.modules]):
            _take_first(self.mesh, _kept(module, module.named_buffers()))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes add their gradients on each rank."""
        before, self.module.require_backward_grad_sync = self.syncs, False
        try:
            yield
        finally:
            self.module.require_backward_grad_sync = before

    def _refuse_attributes(self) -> None:
        """AttributeError for what the user has set that is of DDP and that nobody reads here."""
        found = vars(self.module).keys() & self.refused
        if found:
            raise AttributeError(
                f"data_parallel: {', '.join(sorted(found))} was set on this {type(self.module).__name__}; only torch's "
                "DistributedDataParallel reads it. Give data_parallel bucket_cap_mb and broadcast_buffers, use "
                "no_sync(), or delete it"
            )

    @property
    def syncs(self) -> bool:
        """Whether backward passes send."""
        return self.module.require_backward_grad_sync

    def _hook(self, bucket: _Bucket, i: int, nbytes: int) -> Any:
        def made(p: nn.Parameter) -> None:
            if not self.syncs:
                return
            self._begin()
            if bucket.sent is not None:
                bucket.late = True
                return
            bucket.note(i, nbytes)
            if not bucket.waiting or bucket.nbytes >= CACHED_MB * MB:
                bucket.take(self.share)
            if not bucket.waiting:
                self._send_full()

        return made

    def expect_pass(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a forward: know of the backward pass when it begins, and not in a pass within it."""
        if self.is_running and not _torch.in_backward():
            self._forget()  # a pass that ended by an error
        for x in _torch.pytree.tree_leaves(output) if torch.is_grad_enabled() else ():
            if isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf:
                x.register_hook(self._begin)

    def _begin(self, _: Any = None) -> None:
        if self.syncs and not self.is_running:
            self._refuse_grad()
            self.is_running = True
            _torch.after_backward(self._end)

    def _refuse_grad(self) -> None:
        """RuntimeError where gradients of parameters are given out as they are, and no hook sees them."""
        try:
            for node in self.nodes if self.mesh.size() > 1 else ():
                _torch.adds_to_leaf(node)
        except _torch.GradIsAsked:
            raise RuntimeError(
                "data_parallel: torch.autograd.grad would give this rank's own gradients of parameters. Call "
                "backward(), or backward(inputs=[...]) for some, and read .grad; or average them yourself, and ask for "
                "them in `with module.no_sync():`"
            ) from None

    def _forget(self) -> None:
        self.next, self.is_running = 0, False
        for bucket in self.buckets:
            bucket.forget()

    def _send_full(self) -> None:
        """Send the buckets that are full, up to the first that is not: the order is the same on all ranks."""
        while self.next < len(self.buckets) - 1 and not self.buckets[self.next].waiting:
            self._send(self.buckets[self.next])
            self.next += 1

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        for i in [i for i in bucket.waiting if bucket.parameters[i].grad is not None]:
            bucket.note(i, 0)  # of a pass that sent nothing
        bucket.take(self.share)
        bucket.used = [not bucket.waiting or i not in bucket.waiting for i in range(len(bucket.parameters))]
        _say_used(bucket.views, bucket.used, [each.late for each in bucket.before])
        bucket.sent = bucket.memory
        if self.mesh.size() > 1:
            everywhere = transport().group(self.mesh, tuple(range(self.mesh.ndim)))
            bucket.sent = transport().all_reduce_(bucket.memory, "sum", everywhere)

    @torch.no_grad()
    def _end(self) -> None:
        for bucket in self.buckets[self.next :]:
            self._send(bucket)
        ready: dict[nn.Parameter, None] = {}
        for bucket in self.buckets:
            ready |= self._receive(bucket)
        self.next, self.is_running = 0, False
        late = [bucket for bucket in self.buckets if bucket.late]
        for bucket in late:
            bucket.late = False
            self._send(bucket)
        for bucket in late:
            ready |= self._receive(bucket)
        for p in ready:
            _torch.run_post_hooks(p)

    def _receive(self, bucket: _Bucket) -> dict[nn.Parameter, None]:
        """Wait, and give the parameters their gradients, beside those that came late. Returns those that have some."""
        if self.mesh.size() > 1:
            transport().wait_tensor(bucket.sent)
        *views, told = bucket.views
        n = len(views)
        any_rank = _positive(told) if bucket.before or not all(bucket.used) else bucket.used
        ready: dict[nn.Parameter, None] = {}
        for p, view, is_used in zip(bucket.parameters, views, any_rank[:n], strict=True):
            if is_used:
                gradient = _like(p, view.detach())  # a tensor of its own: it tells that somebody has the memory
                p.grad = gradient if p.grad is None else p.grad + gradient
                ready[p] = None
        for each, is_late in zip(bucket.before, any_rank[n:], strict=True):
            each.late = is_late
        bucket.sent, bucket.is_begun, bucket.waiting = None, False, set(range(n))
        return ready


def _buckets(parameters: Sequence[nn.Parameter], cap_mb: float) -> Iterator[_Bucket]:
    """The parameters in buckets of one dtype of gradients, in order.

    The first of several is small, so that something is sent early. What fits into one bucket is sent at once: of so
    little a small part that comes early hides less than another collective costs.
    """
    is_one = sum(map(_bytes, parameters)) <= cap_mb * MB
    most, size, found = (cap_mb if is_one else min(FIRST_MB, cap_mb)) * MB, 0, []
    for p in parameters:
        nbytes = _bytes(p)
        if found and (size + nbytes > most or _dtype(p) != _dtype(found[0])):
            yield _Bucket(found)
            most, size, found = cap_mb * MB, 0, []
        found.append(p)
        size += nbytes
    if found:
        yield _Bucket(found)


def _dtype(p: torch.Tensor) -> torch.dtype:
    """Of its gradient."""
    return _torch.grad_dtype(p) or p.dtype


def _bytes(p: torch.Tensor) -> int:
    """Of its gradient."""
    numel = p._spec.local_nbytes // p.itemsize if isinstance(p, DTensor) else p.numel()
    return numel * _dtype(p).itemsize


def _block(x: torch.Tensor | None) -> torch.Tensor | None:
    return x._local_tensor if isinstance(x, DTensor) else x


def _laid_out(gradient: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
    """The gradient as its parameter lies. That of a DTensor may be a sum that is owed, or whole, where that is not."""
    if not isinstance(p, DTensor) or gradient._spec.same_layout(p._spec):
        return gradient
    return gradient.redistribute(placements=p.placements)


def _like(p: nn.Parameter, block: torch.Tensor) -> torch.Tensor:
    if not isinstance(p, DTensor):
        return block
    return DTensor(block, p._spec if block.dtype is p.dtype else p._spec.with_tensor(p.shape, block.dtype))


@per_rank
def _memory(like: Sequence[torch.Tensor], more: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One vector for gradients and behind them what is told: which there are, and some numbers more. And views of it,
    for each gradient, and for what is told."""
    sizes = [*(p.numel() for p in like), len(like) + more]
    flat = like[0].new_empty(sum(sizes), dtype=dtype)
    *parts, told = flat.split(sizes)
    return [flat, *(part.view(p.shape) for part, p in zip(parts, like, strict=True)), told]


@per_rank
def _is_held(memory: torch.Tensor, own: int) -> bool:
    """Whether there are more tensors on a memory than the bucket's own: somebody has gradients of a pass before."""
    return _torch.tensors_on(memory) > own


@per_rank
def _put(
    into: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], scale: torch.Tensor, adds: Sequence[bool]
) -> None:
    with torch.no_grad():  # a pass that makes a graph has it on
        for part, gradient, is_second in zip(into, gradients, adds, strict=True):
            part.add_(gradient * scale) if is_second else torch.mul(gradient, scale, out=part)


@per_rank
def _say_used(views: Sequence[torch.Tensor], used: Sequence[bool], late: Sequence[bool]) -> None:
    """Zeros for gradients that there are not. Behind all which there are, and which buckets before are late."""
    if all(used) and not late:
        views[-1].fill_(1.0)
        return
    for view, is_used in zip(views, used, strict=False):
        if not is_used:
            view.zero_()
    views[-1].copy_(torch.tensor([float(x) for x in (*used, *late)]))


@per_rank
def _positive(counts: torch.Tensor) -> list[bool]:
    return [x > 0 for x in counts.tolist()]


@torch.no_grad()
def _take_first(mesh: DeviceMesh, tensors: Sequence[torch.Tensor]) -> None:
    """Write the first rank's numbers into these tensors, those of one dtype in one collective."""
    blocks = [_block(x) for x in tensors]
    group = transport().group(mesh, tuple(range(mesh.ndim)))
    for dtype in dict.fromkeys(x.dtype for x in blocks) if mesh.size() > 1 else ():
        mine = [x for x in blocks if x.dtype is dtype]
        _write(wait(broadcast(_joined(mine), 0, group)), mine)


@per_rank
def _joined(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([x.detach().reshape(-1) for x in blocks])


@per_rank
def _write(flat: torch.Tensor, blocks: Sequence[torch.Tensor]) -> None:
    for x, part in zip(blocks, flat.split([x.numel() for x in blocks]), strict=True):
        x.copy_(part.view(x.shape))
