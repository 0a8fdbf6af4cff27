"""A bucket: the parameters of a group that have one dtype. One gather, one reduction.

flat shard [S]  --all-gather-->  [n, S]  --copy-->  memory of the whole parameters
gradients  --copy-->  [n, S]  --reduce-scatter-->  [S], of which the gradients of the shards are views

With copies, of which each has n ranks, the reduction ends with a sum over the r copies. Where they share out the state,
too, that sum is scattered, [r, S] -> [S], and a gather over them, [S] -> [r, S], goes before all others of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from spmd import _torch
from spmd.comm import wait
from spmd.comm.functional import all_gather_tensor, all_reduce, reduce_scatter_tensor
from spmd.mesh import DeviceMesh
from spmd.parallel.fully_sharded import memory
from spmd.parallel.fully_sharded.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from spmd.tensor.eager.conversions import redistributed
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.spec import Spec


@dataclass
class Managed:
    """A parameter of a bucket, and all places where modules have it. others: its names behind the first."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]
    shard: torch.Tensor | None = None
    others: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Over:
    """The ranks of a bucket: the axis over which parameters are shared out, and that of copies, if there is one.

    spread: whether what is stored is shared out over the copies as well.
    """

    mesh: DeviceMesh
    sharded: int
    replicated: int | None
    spread: bool = False

    @property
    def n(self) -> int:
        return self.mesh.shape[self.sharded]

    @property
    def copies(self) -> int:
        return 1 if self.replicated is None else self.mesh.shape[self.replicated]

    @property
    def stored(self) -> tuple[int, ...]:
        """The axes that share out what is stored, the outermost first: what a gather over the last gives is a shard."""
        return (self.sharded, self.replicated) if self.spread else (self.sharded,)


@dataclass(frozen=True)
class Policies:
    """What the user says of a group."""

    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)


class Bucket:
    """Parameters that are gathered and reduced together."""

    def __init__(self, over: Over, managed: Sequence[Managed], layout: memory.Layout, policies: Policies):
        self.over, self.managed, self.layout, self.policies = over, list(managed), layout, policies
        self.flat: torch.Tensor | None = None  # [S], the memory of the shards
        self.near: torch.Tensor | None = None  # [r * S], what all copies have of the shards
        self.gathered: torch.Tensor | None = None  # the memory of the whole parameters
        self.is_whole = False
        self.kept: torch.Tensor | None = None  # a part of what was gathered, for a gather of fewer ranks
        self.shown: Sequence[torch.Tensor] = ()  # what the last forward that autograd saw had
        self.placed: Sequence[torch.Tensor] = ()  # what modules have of it in the place of parameters
        self.seen: tuple[int, ...] = ()  # the versions of the shards that were gathered
        self.times = 0  # how often the shards got other memory
        self.unwritten: tuple[int, ...] = ()  # the versions of what was placed
        self.is_written = False  # whether somebody has written into it
        self.is_left = False  # whether it is whole behind a forward, and no backward has come
        self.arriving: torch.Tensor | None = None
        self.unreduced: list[torch.Tensor | None] | None = None  # gradients that were not sent
        self.uncopied: list[torch.Tensor] | None = None  # shards of gradients that were not reduced over the copies
        self.comes_again = False  # whether this pass has other forwards of it, with gradients of their own
        self.for_hooks: dict[torch.Tensor, torch.Tensor] = {}  # gradients that hooks get when all have come

    # ---- shards -------------------------------------------------------------------------------
    @property
    def dtype(self) -> torch.dtype:
        """Of the shards."""
        return self.layout.stored[0].dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of the whole parameters."""
        wanted = self.policies.precision.param_dtype
        return wanted if wanted is not None and self.dtype.is_floating_point else self.dtype

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """In which gradients are sent and summed; None for their own."""
        return self.policies.precision.reduce_dtype or max(self._wide(), key=lambda dtype: dtype.itemsize, default=None)

    def _wide(self) -> list[torch.dtype]:
        """The dtypes that users have said of gradients, where they are other ones than those of the parameters."""
        said = [_torch.grad_dtype(m.parameter) for m in self.managed]
        return [dtype for dtype in said if dtype is not None and dtype != self.dtype]

    @property
    def given_dtype(self) -> torch.dtype:
        """The widest in which parameters get their gradients."""
        return max([self.dtype, *self._wide()], key=lambda dtype: dtype.itemsize)

    @property
    def device(self) -> str:
        """Where the whole parameters are."""
        return self.over.mesh.device_type

    def adopt(self) -> None:
        """Let the parameters be views of one flat shard, if they are not: somebody gave them other memory."""
        current = [self._current(i) for i in range(len(self.managed))]
        if all(p is m.parameter and p._local_tensor is m.shard for p, m in zip(current, self.managed, strict=True)):
            return
        for p, m, spec in zip(current, self.managed, self.layout.stored, strict=True):
            _check_adoptable(m, p, spec)
            m.parameter = p
            for module, key in m.places:
                if isinstance(module._parameters[key], nn.Parameter):
                    module._parameters[key] = p
        with torch.no_grad():
            self.take([p._local_tensor for p in current])

    def _current(self, i: int) -> nn.Parameter:
        """The parameter that the modules have; where they have the whole one, that of the shard."""
        m, whole = self.managed[i], self.placed[i] if self.placed else None
        found = [module._parameters.get(key) for module, key in m.places]
        found = [m.parameter if x is whole and x is not None else x for x in found]
        for (module, key), x in zip(m.places, found, strict=True):
            if not isinstance(x, nn.Parameter):
                raise _not_a_parameter(m, module, key)
        if found[0] is m.parameter and any(x is not m.parameter for x in found):
            raise RuntimeError(
                f"fully_shard: {' and '.join([m.name, *m.others])} are one parameter, and one of them was replaced; "
                "put the new one in all places, or untie them before fully_shard"
            )
        return found[0]

    def take(self, blocks: Sequence[torch.Tensor]) -> None:
        """Copy these blocks into a new flat shard, of which the parameters become views."""
        self.free()
        offload = self.policies.offload
        is_offloaded = isinstance(offload, CPUOffloadPolicy) and blocks[0].device.type != "meta"
        device = "cpu" if is_offloaded else blocks[0].device.type
        pinned = is_offloaded and offload.pin_memory and self.device != "cpu"
        self.flat, *shards = memory.flattened(self.layout, list(blocks), device, pinned)
        for m, shard, spec in zip(self.managed, shards, self.layout.stored, strict=True):
            m.shard = shard
            if isinstance(m.parameter, DTensor):
                m.parameter.data = DTensor(shard, spec)
                m.shard = m.parameter._local_tensor
        self.gathered, self.seen, self.kept, self.near, self.times = None, (), None, None, self.times + 1

    # ---- gather -------------------------------------------------------------------------------
    @torch.inference_mode(False)  # what is made here serves forwards that train, too
    @torch.no_grad()
    def launch(self) -> None:
        """Send the shards, if the whole parameters are not here."""
        self.check_unwritten()
        self.adopt()
        if self.flat.is_meta:
            raise RuntimeError(
                f"fully_shard: {self.managed[0].name} is on the meta device; call model.to_empty(device=...) and give "
                "the parameters their numbers before the first forward"
            )
        now = self._versions()
        if now != self.seen:
            self.free()
            self.kept = self.arriving = self.near = None
        if self.is_whole or self.arriving is not None:
            return
        self.seen = now
        self.arriving = self._sent_from_parts() if self.kept is not None else self._sent()

    def _versions(self) -> tuple[int, ...]:
        """How often the parameters, and blocks that were handed out of them, were written into."""
        return self.times, memory.version(self.flat), *[m.parameter._version for m in self.managed]

    def _sent(self) -> torch.Tensor:
        over, flat = self.over, self._over_copies() if self.over.spread else self._computed_flat()
        return flat if over.n == 1 else all_gather_tensor(flat, 0, (over.mesh, over.sharded))

    def _over_copies(self) -> torch.Tensor:
        """The shards of all copies, which are gathered once after each change, and kept until the next."""
        if self.near is None:
            over, flat = self.over, self._computed_flat()
            self.near = flat if over.copies == 1 else wait(all_gather_tensor(flat, 0, (over.mesh, over.replicated)))
        return self.near

    def _computed_flat(self) -> torch.Tensor:
        """The flat shard where and in which dtype it is computed with."""
        flat = self.flat.detach()
        if flat.device.type != self.device:
            flat = flat.to(self.device, non_blocking=True)
        return flat if flat.dtype == self.compute_dtype else flat.to(self.compute_dtype)

    def _sent_from_parts(self) -> torch.Tensor:
        mesh, axis, part = self.kept
        return all_gather_tensor(part, 0, (mesh, axis))

    @torch.inference_mode(False)
    @torch.no_grad()
    def receive(self, keep: tuple[DeviceMesh, int] | None = None) -> None:
        """Have the whole parameters. keep: the mesh and axis of the fewer ranks that gather the next time."""
        self.launch()
        if self.is_whole:
            return
        if self.gathered is None:
            self.gathered = memory.memory(self.layout, self.compute_dtype, self.device)
        came, self.arriving = wait(self.arriving), None
        memory.fill(self.layout, self.gathered, came)
        if keep is not None:
            mesh, axis = keep
            self.kept = mesh, axis, memory.part(came, mesh.get_local_rank(axis), mesh.shape[axis])
        self.is_whole = True

    def check_unwritten(self) -> None:
        """RuntimeError where somebody has written into what nobody reads again."""
        self._note_written()
        if not self.is_written and not (self.is_left and self._differs_from_shards()):
            return
        self.hide()
        self.free()
        self.is_written = False
        names = [m.name for m in self.managed]
        raise RuntimeError(
            f"fully_shard: parameters ({', '.join(names[:4])}{', ...' if names[4:] else ''}) were written into where "
            "it is lost: the whole ones, in a forward or behind one, or shards by .data while the whole ones are kept. "
            "Write outside of forwards, and call reshard() before, which frees the whole ones"
        )

    def _note_written(self) -> None:
        self.is_written |= bool(self.placed) and self._placed_versions() != self.unwritten

    @torch.no_grad()
    def _differs_from_shards(self) -> bool:
        """Whether somebody has written by `.data`, which no version tells, into what a forward has left whole."""
        if not self.is_whole or _torch.in_backward() or self._versions() != self.seen:
            return False
        wholes = [x._local_tensor if isinstance(x, DTensor) else x for x in self.placed or self.wholes()]
        return not memory.are_as_stored(self.layout, wholes, [m.shard for m in self.managed])

    def _placed_versions(self) -> tuple[int, ...]:
        placed = [None if x.is_inference() else x._version for x in self.placed]
        return memory.version(self.gathered), *placed

    def free(self) -> None:
        """Give the memory of the whole parameters back."""
        if self.is_whole:
            memory.free(self.gathered)
            self.is_whole = False

    def show(self, run: Callable) -> Sequence[torch.Tensor]:
        """Let the modules have the whole parameters. Returns them, if autograd sees them.

        run: called after a backward pass, with their gradients.
        """
        wanted = [m.parameter.requires_grad for m in self.managed]
        is_seen = any(wanted) and torch.is_grad_enabled()
        if is_seen:
            self.shown = found = Whole.apply(self, run, wanted, *self._taken_parameters())
        else:
            with torch.no_grad():
                found = self.wholes()
        self._place(found)
        return found if is_seen else ()

    def show_again(self, run: Callable, shown: Sequence[torch.Tensor]) -> None:
        """Let the modules have what they had in their forward: a checkpoint in a module computes it again."""
        if shown:
            self.shown = shown
            self._place(shown)
            return
        with torch.enable_grad():
            self.show(run)

    def _taken_parameters(self) -> list[nn.Parameter]:
        """The parameters, whose hooks are called when their gradients are reduced."""
        for m in self.managed:
            _torch.take_hooks(m.parameter)
        return [m.parameter for m in self.managed]

    def wholes(self) -> list[torch.Tensor]:
        """The whole parameters, as they are computed with: those on an axis of tensor parallelism are DTensors."""
        blocks = memory.wholes(self.layout, self.gathered)
        specs = zip(blocks, self.layout.computed, strict=True)
        return [x if s is None else DTensor(x, s.with_tensor(s.shape, x.dtype)) for x, s in specs]

    def _place(self, tensors: Sequence[torch.Tensor]) -> None:
        self.hide()
        self.placed = tensors
        self.unwritten = self._placed_versions()
        for module, key, _, whole in self._places():
            module._parameters[key] = whole

    def leave(self, for_backward: bool) -> None:
        """Behind a forward: let the modules have the shards as parameters. Before a backward losses may read the whole
        ones, as attributes."""
        if not for_backward:
            self.hide()
        self.is_left = True
        for module, key, p, whole in self._places():
            if module._parameters.get(key) is whole:
                module._parameters[key], vars(module)[key] = p, whole

    def hide(self) -> None:
        """Let the modules have the shards, where nobody has put another parameter in their place."""
        self._note_written()
        for module, key, p, whole in self._places():
            if module._parameters.get(key) is whole:
                module._parameters[key] = p
            if vars(module).get(key) is whole:
                del vars(module)[key]
        self.placed, self.is_left = (), False

    def _places(self) -> Iterator[tuple[nn.Module, str, nn.Parameter, torch.Tensor]]:
        """Where modules have whole parameters: those of the shards, and these."""
        for m, whole in zip(self.managed, self.placed, strict=False):
            for module, key in m.places:
                yield module, key, m.parameter, whole

    # ---- reduce -------------------------------------------------------------------------------
    @torch.no_grad()
    def blocks(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """This rank's blocks of the gradients: those of DTensors as these lie, summed in the dtype that is said."""
        specs = zip(gradients, self.layout.computed, strict=True)
        return [g if g is None or s is None else redistributed(g, self._summed(g._spec, s))._local_tensor
                for g, s in specs]  # fmt: skip

    def _summed(self, gradient: Spec, computed: Spec) -> Spec:
        """The spec of a gradient that owes no sum any more. What owes none stays in its dtype."""
        dtype = self.reduce_dtype if gradient.partial else None
        return computed.with_tensor(computed.shape, dtype or gradient.dtype)

    def added(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients, with those that were not sent before."""
        before, self.unreduced = self.unreduced, None
        return list(gradients) if before is None else self.sums(gradients, before)

    @property
    def no_gradients(self) -> list[None]:
        """What it has where no gradient came."""
        return [None] * len(self.managed)

    def sums(
        self, gradients: Sequence[torch.Tensor | None], before: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients and those that came before, in the dtype in which they are reduced."""
        dtype = self.reduce_dtype
        given = [g if g is None or dtype is None else g.to(dtype) for g in gradients]
        return [a if b is None else b if a is None else a + b for a, b in zip(given, before, strict=True)]

    def give_for_hooks(self) -> None:
        """All gradients of a pass have come: give out those that hooks have to see at once."""
        waiting, self.for_hooks = self.for_hooks, {}
        for p, gradient in waiting.items():
            give_gradient(p, gradient)

    def reduced(
        self, gradients: Sequence[torch.Tensor | None], factor: float | None,
        hook: Callable[[torch.Tensor], None] | None = None,
    ) -> Reduction:  # fmt: skip
        """Launch the sum of the gradients over the ranks. hook: called with the sums of this rank's blocks."""
        found = next((g.dtype for g in gradients if g is not None), self.compute_dtype)
        dtype, n = self.reduce_dtype or found, self.over.n * self.over.copies
        scale = 1 / (n if factor is None else factor)
        with torch.no_grad():
            rows = memory.packed(self.layout, list(gradients), dtype, self.gathered)
            early = dtype is torch.float16  # a sum of halves may be more than a half can be
            return Reduction(self, _sent_to_owners(rows.mul_(scale) if early else rows, self.over),
                             1.0 if early else scale, [g is not None for g in gradients], hook)  # fmt: skip


def _not_a_parameter(m: Managed, module: nn.Module, key: str) -> RuntimeError:
    """The error for a place that has no parameter any more, but a tensor or nothing."""
    if module._parameters.get(key) is None:
        how = f"{m.name} is no parameter any more; weight_norm, pruning and the like have to come before fully_shard"
    else:
        how = (
            f"a {type(module._parameters[key]).__name__} stands in the place of {m.name}, as functional_call puts it; "
            "whole parameters are gathered from the module's own. Use functional_call before fully_shard, or write "
            "into the parameters"
        )
    return RuntimeError(f"fully_shard: {how}")


def _check_adoptable(m: Managed, p: torch.Tensor, spec: Spec) -> None:
    if not isinstance(p, DTensor) or p._spec.shape != spec.shape or not p._spec.same_layout(spec):
        raise RuntimeError(
            f"fully_shard: {m.name} was a parameter {spec} and is now {getattr(p, '_spec', type(p).__name__)}; put a "
            "DTensor of the same layout in its place, or call fully_shard after the change"
        )
    if p.dtype != spec.dtype:
        raise RuntimeError(
            f"fully_shard: {m.name} was {spec.dtype} and is now {p.dtype}; convert the model before fully_shard, or "
            "compute in another dtype by mp_policy"
        )


def _sent_to_owners(rows: torch.Tensor, over: Over) -> torch.Tensor:
    """[n, S] -> [1, S]: the sum of this rank's rows. Of rows for each copy, [n * r, S] -> [r, S]."""
    return rows if over.n == 1 else reduce_scatter_tensor(rows, "sum", 0, (over.mesh, over.sharded))


def _summed_over_copies(rows: torch.Tensor, over: Over) -> torch.Tensor:
    """[1, S] -> [1, S], or of rows for each copy [r, S] -> [1, S]."""
    where = over.mesh, over.replicated
    return wait(reduce_scatter_tensor(rows, "sum", 0, where) if over.spread else all_reduce(rows, "sum", where))


@dataclass
class Reduction:
    """A reduction that is on its way. used: which parameters had a gradient on this rank."""

    bucket: Bucket
    sent: torch.Tensor
    scale: float
    used: list[bool]
    hook: Callable[[torch.Tensor], None] | None = None

    def finish(self, over_copies: bool) -> None:
        """Wait, and give the parameters their gradients; where the copies are not summed yet, keep the shards."""
        bucket, over = self.bucket, self.bucket.over
        with torch.no_grad():
            summed, self.sent = wait(self.sent), None
            if bucket.uncopied is not None:
                summed, bucket.uncopied = summed + bucket.uncopied, None
            if not over_copies and over.copies > 1:
                bucket.uncopied = summed
                return
            if over.copies > 1:
                summed = _summed_over_copies(summed, over)
            if self.hook is not None:
                self.hook(summed[0].narrow(0, 0, summed.shape[1] - len(self.used)))
            counts, *blocks = memory.unpacked(bucket.layout, summed[0], self.scale, bucket.given_dtype)
            used = self.used if all(self.used) else self._used_by_any(counts)
        self._hand_out(blocks, used)

    def _used_by_any(self, counts: torch.Tensor) -> list[bool]:
        return [bool(here or there) for here, there in zip(self.used, _positive(counts), strict=True)]

    def _hand_out(self, blocks: Sequence[torch.Tensor], used: Sequence[bool]) -> None:
        for m, block, spec, is_used in zip(self.bucket.managed, blocks, self.bucket.layout.stored, used, strict=True):
            if is_used and m.parameter.requires_grad:
                block = block if block.device.type == m.parameter._local_tensor.device.type else block.to("cpu")
                dtype = _torch.grad_dtype(m.parameter) or block.dtype
                spec = spec if dtype is spec.dtype else spec.with_tensor(spec.shape, dtype)
                self._give(m.parameter, DTensor(block.to(dtype), spec))

    def _give(self, p: nn.Parameter, gradient: DTensor) -> None:
        waiting = self.bucket.for_hooks
        if p in waiting or (self.bucket.comes_again and _torch.has_hooks(p)):
            waiting[p] = waiting[p] + gradient if p in waiting else gradient
        else:
            give_gradient(p, gradient)


def give_gradient(p: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to that of a parameter, and call the hooks that change it or wait for it."""
    with torch.no_grad():
        gradient = _torch.run_gradient_hooks(p, gradient)
        if p.grad is None:
            p.grad = gradient
        else:
            p.grad += gradient
    _torch.run_post_hooks(p)


@memory.per_rank
def _positive(counts: torch.Tensor) -> list[bool]:
    return [x > 0 for x in counts.tolist()]


class Whole(torch.autograd.Function):
    """The whole parameters of a bucket. Its backward is called when all their gradients are there.

    It gives the parameters none: these come when they are reduced. But autograd knows which parameters a pass is asked
    for.
    """

    @staticmethod
    def forward(ctx, bucket, run, wanted, *parameters):
        ctx.bucket, ctx.run = bucket, run
        ctx.set_materialize_grads(False)
        found = bucket.wholes()
        ctx.mark_non_differentiable(*[x for x, wants in zip(found, wanted, strict=True) if not wants])
        return tuple(found)

    @staticmethod
    def backward(ctx, *gradients):
        nodes = [node for node, _ in ctx.next_functions]
        asked = [g if node is not None and _is_asked(node) else None for g, node in zip(gradients, nodes, strict=True)]
        ctx.run(ctx.bucket, ctx.bucket.blocks(asked))
        return None, None, None, *[None] * len(gradients)


def _is_asked(node: object) -> bool:
    try:
        return _torch.adds_to_leaf(node)
    except _torch.GradIsAsked:
        raise RuntimeError(
            "fully_shard: torch.autograd.grad cannot give gradients of parameters, which are there when they are "
            "reduced; call backward(), or backward(inputs=[...]) for some, and read .grad"
        ) from None
