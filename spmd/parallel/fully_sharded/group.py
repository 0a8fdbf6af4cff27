"""A group: what one call of `fully_shard` took, and when it is whole.

    forward     gather, compute, free              (free: unless it is to stay)
    backward    gather, fetch the group before, compute, free, reduce

The groups of a model share a `Run`: the order in which they were computed, and the reductions that are on their way.

A forward of a group (`Use`) has one reduction of each bucket: when the gradients of the module's inputs are there, or,
where these want none, when the pass ends. Until then gradients are added up, in however many parts they come, and none
may come: so ranks whose data makes them use other parameters of a group reduce at the same place.

A reentrant checkpoint is a backward pass within the backward pass. Those inside a module bring such parts. One around a
module of a group computes it again, and then its backward, within which all gradients of the group come: they are
reduced at once, but where there are passes within that one, and then when all has ended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
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

Made = tuple[int, int]
"""A result of autograd: the number of the node that made it, and which of its results it is."""
Gradients = Sequence[torch.Tensor | None]


@dataclass
class Run:
    """What the groups of a model share while it computes."""

    groups: list[Group] = field(default_factory=list)
    order: list[Group] = field(default_factory=list)  # in which they were computed
    begun: list[Use] = field(default_factory=list)  # whose backward has begun, and is not reduced
    on_the_way: tuple[Reduction, bool] | None = None  # and whether it goes over the copies
    is_last_backward: bool = True
    is_ending: bool = False  # whether the end of this backward pass will be told
    outermost: Group | None = None  # in whose forward the others are
    modules: Sequence[nn.Module] = ()  # of the root, in which all parameters are of a group, or ignored
    counts: Sequence[int] = ()  # how many parameters each had then
    tables: _torch.Unwritten | None = None  # and whether they are the same ones

    def enter(self, group: Group) -> None:
        """A forward begins. That of the root has none around it: one that is left over has ended by an error."""
        if not _torch.in_backward() and (self.outermost is None or group.is_root):
            self.outermost = group

    def leave(self, group: Group) -> None:
        """A forward has ended. Behind the outermost one modules have their parameters."""
        if self.outermost is not group or _torch.in_backward():
            return
        self.outermost = None
        for each in self.groups:
            each.leave()

    def arrive(self) -> None:
        """Wait for the reduction that is on its way."""
        if self.on_the_way is not None:
            (reduction, over_copies), self.on_the_way = self.on_the_way, None
            reduction.finish(over_copies)

    def came(self, made: Made) -> None:
        """The gradient of a tensor is there: reduce what has waited for it."""
        for use in list(self.begun):
            use.came(made)

    def expect_end(self) -> None:
        """Ask to be told when this backward pass has ended."""
        if not self.is_ending:
            self.is_ending = True
            _torch.after_backward(self.end)

    def forget(self) -> None:
        """Forget what is on its way, and what was not sent."""
        self.on_the_way, self.is_ending = None, False
        self.order.clear()
        self.begun.clear()
        for group in self.groups:
            for bucket in group.buckets:
                bucket.unreduced = bucket.uncopied = None
                bucket.for_hooks.clear()
            group.end_backward()
            group.reshard()

    def end(self) -> None:
        """The backward pass has ended."""
        self.is_ending = False
        for use in list(self.begun):
            use.finish()
        for group in self.groups:
            group.end_backward()
        if self.is_last_backward:
            self.arrive()
            self.order.clear()
            for group in self.groups:
                for bucket in group.buckets:
                    bucket.give_for_hooks()


class Use:
    """A forward of a group, outside of backward passes.

    inputs: the tensors whose gradients come last; left: those that are still to come. shown: what autograd saw of each
    bucket, and seen: of which versions of the shards. kept: the gradients that came.
    """

    def __init__(self, group: Group, inputs: Sequence[torch.Tensor]):
        self.group, self.inputs = group, {made_as(x) for x in inputs}
        self.left = set(self.inputs)
        self.shown: list[Sequence[torch.Tensor]] = []
        self.seen: list[tuple[int, ...]] = []
        self.kept: dict[Bucket, Gradients] = {}
        for x in inputs:
            x.register_hook(partial(self._came, made_as(x)))

    def _came(self, made: Made, _: torch.Tensor) -> None:
        self.came(made)

    def behind(self, x: Any) -> Any:
        """A result of the forward: what it was given comes as another tensor, whose gradient is there before."""
        is_given = isinstance(x, torch.Tensor) and x.grad_fn is not None and made_as(x) in self.inputs
        return x.view_as(x) if is_given else x

    def check_unchanged(self) -> None:
        """RuntimeError where the backward has other parameters than the forward had."""
        for bucket, seen, shown in zip(self.group.buckets, self.seen, self.shown, strict=True):
            if shown and bucket.seen != seen:
                raise RuntimeError(
                    f"fully_shard: the group of {bucket.managed[0].name} was written into between its forward and its "
                    "backward, so that gradients would be those of other numbers; write before the forward, or after "
                    "the backward"
                )

    def begin(self) -> None:
        """Its backward begins."""
        if self not in self.group.run.begun:
            self.group.run.begun.append(self)

    def came(self, made: Made) -> None:
        """The gradient of a tensor is there, maybe of an input, and maybe of the last one."""
        if made in self.left:
            self.left.discard(made)
            if not self.left and self in self.group.run.begun:
                self.finish()

    def keep(self, bucket: Bucket, gradients: Gradients) -> None:
        """Add gradients to those that came before."""
        before = self.kept.get(bucket)
        self.kept[bucket] = list(gradients) if before is None else bucket.sums(gradients, before)

    def finish(self) -> None:
        """Reduce all that came."""
        self.group.run.begun.remove(self)
        kept, self.kept, self.left = self.kept, {}, set(self.inputs)
        for bucket, shown in zip(self.group.buckets, self.shown, strict=True):
            if shown:
                self.group.finish(bucket, kept.get(bucket, bucket.no_gradients))


def made_as(x: torch.Tensor) -> Made:
    """Which result of autograd a tensor is, without a hold on it."""
    return x.grad_fn._sequence_nr(), x.output_nr


def _made(tensors: Any) -> list[torch.Tensor]:
    """The tensors that autograd made, each once."""
    found = {id(x): x for x in _torch.pytree.tree_leaves(tensors) if isinstance(x, torch.Tensor)}
    return [x for x in found.values() if x.requires_grad and x.grad_fn is not None]


class Group:
    """The parameters that are gathered together, and when. `settings` of torch's names are attributes."""

    def __init__(self, modules: Sequence[nn.Module], buckets: Sequence[Bucket], policies: Policies):
        self.modules, self.buckets, self.policies = list(modules), list(buckets), policies
        self.run = Run([self])
        self.known: set[tuple[nn.Module, str]] = set()  # all places of parameters when it was made, ignored ones too
        self.is_root: bool | None = None  # None: nobody has computed with it yet
        self.reshard_after_forward: bool | int | None = None
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.divide_factor: float | None = None
        self.all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self.unshard_in_backward = True
        self.forward_prefetch: list[Group] = []
        self.backward_prefetch: list[Group] | None = None  # None: the group that was computed before
        self.fewer: tuple[DeviceMesh, int] | None = None  # the mesh and axis of the ranks that gather in the backward
        self.in_backward = False
        self.number = -1  # of the backward pass in which it computes
        self.use: Use | None = None  # the forward that it is in

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

    def show(self) -> list[Sequence[torch.Tensor]]:
        """Let the modules have the whole parameters. Returns what autograd sees of each bucket."""
        run = partial(self.reduce, self.use and weakref.ref(self.use))  # which has what the run belongs to
        return [bucket.show(run) for bucket in self.buckets]

    def reshard(self) -> None:
        """Free the whole parameters, and let the modules have the shards."""
        for bucket in self.buckets:
            if bucket.placed:
                bucket.check_unwritten()
            bucket.hide()
            bucket.free()

    def leave(self) -> None:
        """Behind a forward of all: what nobody has asked to keep is freed where no backward follows."""
        for_backward = torch.is_grad_enabled()
        if not for_backward and self.reshard_after_forward is None:
            self.reshard()
        for bucket in self.buckets:
            bucket.check_unwritten()
            bucket.leave(for_backward)

    # ---- forward ------------------------------------------------------------------------------
    def before_forward(self, inputs: Any = ()) -> None:
        self.run.enter(self)
        self.unshard()
        is_first = torch.is_grad_enabled() and not _torch.in_backward()
        self.use = Use(self, _made(inputs)) if is_first else None
        shown = self.show()
        if self.use is not None:
            self.use.shown, self.use.seen = shown, [bucket.seen for bucket in self.buckets]
        for group in self.forward_prefetch:
            group.launch()

    def after_forward(self, output: Any) -> Any:
        """Free what is not to stay. Returns the output, which tells when its gradient comes."""
        recomputed, use = _torch.in_backward(), self.use
        self.use = None
        if use is not None:
            self.run.order.append(self)
            output = _torch.pytree.tree_map(use.behind, output)
            for x in _made(output):
                x.register_hook(partial(self.before_backward, use, made_as(x)))
        if recomputed and torch.is_grad_enabled() and not self.in_backward:
            self._enter_backward()  # a checkpoint around it: its backward is next
        if not self.in_backward and not self.stays_whole:
            self.reshard()
        self.run.leave(self)
        return output

    # ---- backward -----------------------------------------------------------------------------
    def before_backward(self, use: Use, made: Made, _: torch.Tensor) -> None:
        self.run.came(made)  # before there is memory for what is fetched
        use.begin()
        if self.in_backward:
            return
        self._enter_backward()
        if self.unshard_in_backward:
            self.unshard()
            use.check_unchanged()
            for bucket, shown in zip(self.buckets, use.shown, strict=True):
                bucket.show_again(partial(self.reduce, weakref.ref(use)), shown)
        self.run.arrive()
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

    def reduce(self, of: weakref.ref[Use] | None, bucket: Bucket, gradients: Gradients) -> None:
        """A bucket has gradients. of: the forward that they are of; None in one that is computed again."""
        self.run.expect_end()
        use = of and of()
        if use is None and self.in_backward and self.number != _torch.backward_number():
            use = self._within()
        if use is None:
            self.finish(bucket, gradients)
            return
        use.begin()
        use.keep(bucket, gradients)

    def _within(self) -> Use:
        """What waits for the passes within one in which the group was computed again."""
        for use in self.run.begun:
            if use.group is self and not use.inputs:
                return use
        use = Use(self, ())
        use.shown = [bucket.shown for bucket in self.buckets]
        return use

    def finish(self, bucket: Bucket, gradients: Gradients) -> None:
        """A bucket has all of its gradients."""
        self.in_backward = False
        self._leave_backward(bucket)
        if not self.requires_gradient_sync:
            self._keep(bucket, gradients)
            return
        gradients = bucket.added(gradients)
        self.run.arrive()  # before there is memory for the next one
        bucket.comes_again = self.run.order.count(self) > 1
        reduction = bucket.reduced(gradients, self.divide_factor, self.all_reduce_hook)
        self.run.on_the_way = reduction, self.requires_all_reduce

    def _keep(self, bucket: Bucket, gradients: Gradients) -> None:
        """Add the gradients to those that were not sent."""
        dtype = bucket.reduce_dtype
        bucket.unreduced = [_reduced_as(g, dtype) for g in bucket.added(gradients)]

    def end_backward(self) -> None:
        """End what a backward pass has left: groups whose parameters no gradient reached."""
        self.in_backward, self.number = False, -1
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
                self.finish(bucket, bucket.no_gradients)
        self.run.arrive()


def _reduced_as(gradient: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
    return gradient if gradient is None or dtype is None else gradient.to(dtype)
