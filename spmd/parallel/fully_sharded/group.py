"""A group: what one call of `fully_shard` took, and when it is whole.

    forward     gather, compute, free              (free: unless it is to stay)
    backward    gather, fetch the group before, compute, free, reduce

The groups of a model share a `Run`: the order in which they were computed, and the reductions that are on their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spmd import _torch
from spmd.mesh import DeviceMesh
from spmd.parallel.fully_sharded.bucket import Bucket, Policies, Reduction


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
        self.running = 0  # how many modules of the group are in their forward

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
    def before_forward(self) -> None:
        self.unshard()
        self.show()
        for group in self.forward_prefetch:
            group.launch()

    def after_forward(self, output: Any) -> Any:
        """Free what is not to stay. Returns the output, which tells when its gradient comes."""
        recomputed = _torch.in_backward()
        if torch.is_grad_enabled() and not recomputed:
            self.run.order.append(self)
            for x in _torch.pytree.tree_leaves(output):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    x.register_hook(self.before_backward)
        if not self.in_backward and not self.stays_whole:
            self.reshard()
        return output

    # ---- backward -----------------------------------------------------------------------------
    def before_backward(self, _: torch.Tensor) -> None:
        if self.in_backward:
            return
        self.in_backward = True
        self.run.expect_end()
        if self.unshard_in_backward:
            self.unshard()
            for bucket in self.buckets:
                bucket.show_again(self.reduce)
        self.run.arrive()  # before there is memory for what is fetched
        for group in self._next_in_backward():
            if group.unshard_in_backward and not group.in_backward:
                group.launch()

    def _next_in_backward(self) -> Sequence[Group]:
        if self.backward_prefetch is not None:
            return self.backward_prefetch
        order = self.run.order
        at = next((i for i in reversed(range(len(order))) if order[i] is self), 0)
        return order[at - 1 : at]

    def reduce(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> None:
        """A bucket has its gradients."""
        self.run.expect_end()
        self.in_backward = False
        self._leave_backward(bucket)
        gradients = bucket.added(gradients)
        if not self.requires_gradient_sync:
            bucket.unreduced = [_reduced_as(g, self.policies.precision.reduce_dtype) for g in gradients]
            return
        self.run.arrive()  # before there is memory for the next one
        self.run.on_the_way = bucket.reduced(gradients, self.divide_factor), self.requires_all_reduce

    def end_backward(self) -> None:
        """Free what the backward pass has left whole: groups whose parameters no gradient reached."""
        self.in_backward = False
        for bucket in self.buckets:
            bucket.kept = bucket.arriving = None
            bucket.shown = ()
            self._leave_backward(bucket)

    def _leave_backward(self, bucket: Bucket) -> None:
        if self.reshard_after_backward or not self.stays_whole:
            bucket.hide()
        if self.reshard_after_backward:
            bucket.free()


def _reduced_as(gradient: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return gradient if gradient is None or dtype is None else gradient.to(dtype)
