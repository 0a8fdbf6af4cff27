"""A group: what one call of `fully_shard` took, and when it is whole.

    forward     gather, compute, free              (free: unless it is to stay)
    backward    gather, fetch the group before, compute, free, reduce

The groups of a model share a `Run`: the order in which they were computed, and the reductions that are on their way.

A reentrant checkpoint is a backward pass within the backward pass. One around a module of a group computes it again,
and then its backward, as above. Those inside a module bring the gradients of a bucket one after the other: they are
added, and reduced when the gradients of the module's inputs are there, or when the pass ends. Whether there are such is
seen in the first forward, on all ranks alike: a module of the group is called without gradients inside one with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from spmd import _torch
from spmd.mesh import DeviceMesh
from spmd.parallel.fully_sharded.bucket import Bucket, Policies, Reduction

MANAGED = "_fully_sharded_group"
"""The attribute of a module that says by which group its parameters are gathered."""


@dataclass
class Run:
    """What the groups of a model share while it computes."""

    groups: list[Group] = field(default_factory=list)
    order: list[Group] = field(default_factory=list)  # in which they were computed
    on_the_way: tuple[Reduction, bool] | None = None  # and whether it goes over the copies
    is_last_backward: bool = True
    is_ending: bool = False  # whether the end of this backward pass will be told

    def arrive(self) -> None:
        """Wait for the reduction that is on its way."""
        if self.on_the_way is not None:
            (reduction, over_copies), self.on_the_way = self.on_the_way, None
            reduction.finish(over_copies)

    def expect_end(self) -> None:
        """Ask to be told when this backward pass has ended."""
        if not self.is_ending:
            self.is_ending = True
            _torch.after_backward(self.end)

    def end(self) -> None:
        """The backward pass has ended."""
        self.is_ending = False
        for group in self.groups:
            group.end_backward()
        if self.is_last_backward:
            self.arrive()
            self.order.clear()


class Group:
    """The parameters that are gathered together, and when. `settings` of torch's names are attributes."""

    def __init__(self, modules: Sequence[nn.Module], buckets: Sequence[Bucket], policies: Policies):
        self.modules, self.buckets, self.policies = list(modules), list(buckets), policies
        self.run = Run([self])
        self.is_root: bool | None = None  # None: nobody has computed with it yet
        self.reshard_after_forward: bool | int | None = None
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.divide_factor: float | None = None
        self.unshard_in_backward = True
        self.forward_prefetch: list[Group] = []
        self.backward_prefetch: list[Group] | None = None  # None: the group that was computed before
        self.fewer: tuple[DeviceMesh, int] | None = None  # the mesh and axis of the ranks that gather in the backward
        self.in_backward = False
        self.number = -1  # of the backward pass in which it computes
        self.has_passes_within: bool | None = None  # None: not seen yet
        self.looking: Any = None  # the handle of the hook that sees it
        self.postponed: list[Bucket] = []  # which wait for the passes within
        self.inputs: list[Any] = []  # the hooks that tell when the gradients of the inputs are there

    # ---- whole and sharded --------------------------------------------------------------------
    @property
    def stays_whole(self) -> bool:
        """Whether it stays whole after its forward."""
        said = self.reshard_after_forward
        return bool(self.is_root) if said is None else said is False

    def launch(self) -> None:
        """Begin to gather."""
        for bucket in self.buckets:
            bucket.launch()

    def unshard(self) -> None:
        """Have the whole parameters in memory."""
        self.launch()
        for bucket in self.buckets:
            bucket.receive(None if self.in_backward else self.fewer)

    def show(self) -> None:
        """Let the modules have the whole parameters."""
        for bucket in self.buckets:
            bucket.show(self.reduce)

    def reshard(self) -> None:
        """Free the whole parameters, and let the modules have the shards."""
        for bucket in self.buckets:
            bucket.hide()
            bucket.free()

    # ---- forward ------------------------------------------------------------------------------
    def before_forward(self, inputs: Any = ()) -> None:
        self.unshard()
        self.show()
        if torch.is_grad_enabled() and not _torch.in_backward():
            if self.has_passes_within:
                self._expect_gradients_of(inputs)
            elif self.has_passes_within is None and self.looking is None:
                self.looking = nn.modules.module.register_module_forward_pre_hook(self._look)
        for group in self.forward_prefetch:
            group.launch()

    def after_forward(self, output: Any) -> Any:
        """Free what is not to stay. Returns the output, which tells when its gradient comes."""
        recomputed = _torch.in_backward()
        if self.looking is not None:
            self.looking.remove()
            self.looking, self.has_passes_within = None, bool(self.has_passes_within)
        if torch.is_grad_enabled() and not recomputed:
            self.run.order.append(self)
            for x in _torch.pytree.tree_leaves(output):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    x.register_hook(self.before_backward)
        if recomputed and torch.is_grad_enabled() and not self.in_backward:
            self._enter_backward()  # a checkpoint around it: its backward is next
        if not self.in_backward and not self.stays_whole:
            self.reshard()
        return output

    def _look(self, module: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled() and module.__dict__.get(MANAGED) is self:
            self.has_passes_within = True

    def _expect_gradients_of(self, inputs: Any) -> None:
        found = [x for x in _torch.pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        left = set(range(len(found)))

        def came(_: torch.Tensor, i: int) -> None:
            left.discard(i)
            if not left:
                self._finish_postponed()

        if found and not self.inputs:
            self.inputs = [x.register_hook(partial(came, i=i)) for i, x in enumerate(found)]

    # ---- backward -----------------------------------------------------------------------------
    def before_backward(self, _: torch.Tensor) -> None:
        if self.in_backward:
            return
        self._enter_backward()
        if self.unshard_in_backward:
            self.unshard()
            for bucket in self.buckets:
                bucket.show_again(self.reduce)
        self.run.arrive()  # before there is memory for what is fetched
        for group in self._next_in_backward():
            if group.unshard_in_backward and not group.in_backward:
                group.launch()

    def _enter_backward(self) -> None:
        self.in_backward, self.number = True, _torch.backward_number()
        self.run.expect_end()

    def _next_in_backward(self) -> Sequence[Group]:
        if self.backward_prefetch is not None:
            return self.backward_prefetch
        order = self.run.order
        at = next((i for i in reversed(range(len(order))) if order[i] is self), 0)
        return order[at - 1 : at]

    def reduce(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> None:
        """A bucket has gradients."""
        self.run.expect_end()
        if self.in_backward and self.number != _torch.backward_number():
            self.has_passes_within = True
        if not self.in_backward or not self.has_passes_within:
            self._finish(bucket, gradients)
            return
        self._keep(bucket, gradients)
        if bucket not in self.postponed:
            self.postponed.append(bucket)

    def _finish_postponed(self) -> None:
        postponed, self.postponed = self.postponed, []
        for bucket in postponed:
            self._finish(bucket, [None] * len(bucket.managed))

    def _finish(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> None:
        """A bucket has all of its gradients."""
        self.in_backward = False
        self._leave_backward(bucket)
        if not self.requires_gradient_sync:
            self._keep(bucket, gradients)
            return
        gradients = bucket.added(gradients)
        self.run.arrive()  # before there is memory for the next one
        self.run.on_the_way = bucket.reduced(gradients, self.divide_factor), self.requires_all_reduce

    def _keep(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients to those that were not sent."""
        dtype = self.policies.precision.reduce_dtype
        bucket.unreduced = [_reduced_as(g, dtype) for g in bucket.added(gradients)]

    def end_backward(self) -> None:
        """End what a backward pass has left: sums that wait, and groups whose parameters no gradient reached."""
        self._finish_postponed()
        for hook in self.inputs:
            hook.remove()
        self.in_backward, self.number, self.inputs = False, -1, []
        for bucket in self.buckets:
            bucket.kept = bucket.arriving = None
            bucket.shown = ()
            self._leave_backward(bucket)

    def _leave_backward(self, bucket: Bucket) -> None:
        bucket.hide()  # also where the whole ones stay in memory: users see parameters
        if self.reshard_after_backward:
            bucket.free()

    def reduce_kept(self) -> None:
        """Reduce the gradients that were not sent, out of a backward pass, and wait for them."""
        for bucket in self.buckets:
            if bucket.unreduced is not None:
                self._finish(bucket, [None] * len(bucket.managed))
        self.run.arrive()


def _reduced_as(gradient: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return gradient if gradient is None or dtype is None else gradient.to(dtype)
