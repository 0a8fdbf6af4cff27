"""fully_shard: parameters, gradients and optimiser state in shards, with the names and meanings of torch's (FSDP2).

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())        # of shards

Each call makes a group of the parameters that no call before has taken. A group is gathered in one collective before
its forward and before its backward, and its gradients are reduced and scattered in one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from spmd import _torch
from spmd.mesh import DeviceMesh, current_mesh, init_device_mesh, per_rank, world_size
from spmd.parallel.fully_sharded.adopt import ShardPlacement, buckets_of, managed_by
from spmd.parallel.fully_sharded.bucket import Over, Policies
from spmd.parallel.fully_sharded.group import MANAGED, Group, Run
from spmd.parallel.fully_sharded.policies import MixedPrecisionPolicy, OffloadPolicy


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    state: str | Sequence[str] | None = None,
    shard_placement_fn: ShardPlacement | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - a value, as in torch's signature
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
) -> nn.Module | list[nn.Module]:
    """Share out the parameters of a module, or of several as one group, over data-parallel ranks. In place.

    mesh: of one axis, over which parameters are sharded, or of two: copies over the first, shards over the second. By
    default that of the `with mesh:` block around the call, or all ranks. reshard_after_forward: True frees the whole
    parameters after the forward and gathers them again for the backward; False keeps them; a number, which divides the
    axis, leaves a part on each of so many neighbouring ranks, which gather among themselves. None is False for the
    module that is called first of all, True for those inside it; behind a forward that no backward follows it is True.
    `parameters()` are the shards but inside a forward, and behind `unshard`. Until the backward, attributes of modules
    that keep the whole parameters (`net.head.weight`) are these, for losses that compute with them; writes into them
    are errors: call `reshard` before.
    state: on a mesh of two axes the names of both, to share out what is stored and the optimiser's state over the
    copies, too. They gather their shards once after each
    update, and keep them beside, to gather from as often as without; the gradients' sums over the copies are scattered,
    so as many bytes are sent. shard_placement_fn: for a parameter the dim that is sharded, as `Shard(dim)`; None for
    the first. mp_policy, offload_policy: in which dtypes it computes, and where shards are. ignored_params: those that
    stay as they are.

    Parameters stay the objects that they are, as DTensors with `Shard(dim)`, of any sizes. Parameters that are DTensors
    on another axis become DTensors on both. Each rank takes its blocks of its own values, and gradients are averages
    over the ranks: each rank computes the mean loss of an equal part of the batch. On the meta device nothing is made
    until `to_empty`.

    Raises ValueError for a parameter without dims, for tied parameters in two groups, and for a mesh or a number that
    does not fit.

    >>> layer = fully_shard(nn.Linear(3, 2), mesh=DeviceMesh("cpu", [0]))
    >>> print(layer.weight._spec, type(layer).__name__, isinstance(layer, FSDPModule))
    f32[2, 3] FSDPLinear True
    """
    modules = _modules(module)
    over = _over(_mesh(mesh), state)
    policies = Policies(mp_policy, offload_policy)
    ignored = {id(p) for p in ignored_params or ()}
    buckets = buckets_of(managed_by(modules, ignored), over, shard_placement_fn, policies)
    group = Group(modules, buckets, policies)
    _set_reshard_after_forward(group, reshard_after_forward)
    for each in modules:
        _install(each, group)
    return module


def _modules(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard: {each!r} is no nn.Module")
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ValueError(f"fully_shard: a {type(each).__name__} has no forward; call it on what is in it")
        if isinstance(each, FSDPModule):
            raise ValueError(f"fully_shard: this {type(each).__name__} is sharded already; call it once")
    if not modules:
        raise ValueError("fully_shard: an empty list of modules")
    return modules


def _mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        mesh = init_device_mesh(device, (world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard: mesh is {mesh!r}; give a mesh of spmd, such as mesh['dp']")
    if mesh.ndim > 2:
        raise ValueError(
            f"fully_shard: the mesh has axes {', '.join(mesh.axis_names)}; give one, or two, of copies and of shards"
        )
    return mesh


def _over(mesh: DeviceMesh, state: str | Sequence[str] | None) -> Over:
    sharded, replicated = mesh.ndim - 1, 0 if mesh.ndim == 2 else None
    names = {state} if isinstance(state, str) else set(state or (mesh.axis_names[sharded],))
    if not {mesh.axis_names[sharded]} <= names <= set(mesh.axis_names):
        raise ValueError(
            f"fully_shard: state={state!r}; give axes of the mesh, {', '.join(mesh.axis_names)}, and with them "
            f"{mesh.axis_names[sharded]}, over which parameters are sharded"
        )
    return Over(mesh, sharded, replicated, spread=len(names) == 2)


def _set_reshard_after_forward(group: Group, said: bool | int | None) -> None:
    group.reshard_after_forward, group.fewer = said, None
    if said is None or isinstance(said, bool) or not group.buckets:
        return
    over = group.buckets[0].over
    if not isinstance(said, int) or said < 2 or said >= over.n or over.n % said:
        raise ValueError(
            f"reshard_after_forward is {said!r}; give True, False, or a number of ranks from 2 on that is smaller than "
            f"the {over.n} of the axis and divides them"
        )
    group.fewer = _in_parts(over.mesh, over.n // said, said), over.mesh.ndim


@per_rank
def _in_parts(mesh: DeviceMesh, parts: int, ranks: int) -> DeviceMesh:
    """The mesh with its last axis as two: of so many parts, and of so many ranks in each."""
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(*mesh.shape[:-1], parts, ranks))


# ---- modules ----------------------------------------------------------------------------------


class FSDPModule:
    """What a module that `fully_shard` was called on can do besides. torch's names, arguments and meanings."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of the group. async_op: return a handle, and let the module have them when it waits."""
        group = group_of(self)
        group.launch()
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the whole parameters of the group."""
        group_of(self).reshard()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward pass is the last before the gradients are read, by default it is.

        If not, the last reduction may still be on its way when it ends.
        """
        _run_of(self).is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward passes reduce gradients. If not, whole gradients are kept, for the next that does."""
        for group in self._groups(recurse):
            group.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward passes also reduce over copies of the shards. If not, shards of sums are kept."""
        for group in self._groups(recurse):
            group.requires_all_reduce = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """As the argument of `fully_shard`."""
        for group in self._groups(recurse):
            _set_reshard_after_forward(group, reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether the whole parameters are freed after a backward pass: not, where another micro-batch follows."""
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The modules whose gathers begin when this one computes its forward."""
        group_of(self).forward_prefetch = [group_of(m) for m in modules]

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The modules whose gathers begin when this one computes its backward; by default the one computed before."""
        group_of(self).backward_prefetch = [group_of(m) for m in modules]

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide sums of gradients by this, and not by the number of ranks."""
        group_of(self).divide_factor = factor

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call `hook(reduced)` with each reduced bucket before its gradients are given out.

        reduced: this rank's blocks one after the other, summed over the ranks, and divided later (float16 before). The
        hook may write into them, such as their sum over a further mesh. It runs on the current stream, as all else, so
        no other may be given.
        """
        if stream is not None:
            raise ValueError("set_all_reduce_hook: hooks run on the current stream; leave out stream=")
        group_of(self).all_reduce_hook = hook

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sums are all that is ever sent: gradients are divided by themselves, whatever is said here."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:  # fmt: skip
        """Parameters without a gradient are always in the reduction, so that ranks may use different ones."""

    def set_post_optim_event(self, event: Any) -> None:
        """Gathers are launched behind what is on the current stream, so they see the optimiser's step without it."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether the group is gathered for the backward: not, where no gradient reads its parameters."""
        group_of(self).unshard_in_backward = unshard_in_backward

    def reset_iter_state(self) -> None:
        """After an error in a forward or backward pass: forget what was on its way, and what was not sent.

        The next forward does it itself after an error in a backward pass.
        """
        _run_of(self).forget()

    def _groups(self, recurse: bool) -> Iterable[Group]:
        return dict.fromkeys(groups_in(self)) if recurse else [group_of(self)]


class UnshardHandle:
    """A gather that is on its way."""

    def __init__(self, group: Group):
        self._group = group

    def wait(self) -> None:
        """Wait, and let the modules have the whole parameters."""
        self._group.unshard()
        self._group.show()


def group_of(module: Any) -> Group:
    """The group of a module that `fully_shard` was called on. TypeError for others."""
    if not isinstance(module, FSDPModule):
        raise TypeError(f"{type(module).__name__} is not fully sharded; call fully_shard on it first")
    return getattr(module, MANAGED)


def groups_in(module: nn.Module) -> Iterator[Group]:
    """The groups of the modules in a module, itself included."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            yield group_of(each)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method gather and free the parameters as `forward` does. Modules that are not sharded stay as they are."""
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name)
    function = method.__func__ if getattr(method, "__self__", None) is module else lambda _, *a, **k: method(*a, **k)

    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _before_forward(self, args, kwargs)
        return _after_forward(self, args, function(self, *args, **kwargs))  # of a copy of the module its own

    setattr(module, method_name, run.__get__(module, type(module)))


def _install(module: nn.Module, group: Group) -> None:
    """Give a module the methods of `FSDPModule`, and the hooks that gather and free."""
    for each in module.modules():
        group.known.update((each, key) for key in each._parameters)
        if getattr(each, MANAGED, None) is None:
            each.__dict__[MANAGED] = group
    module.__class__ = _sharded_class(type(module))
    module.register_forward_pre_hook(_before_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(_after_forward, always_call=False)
    module.register_state_dict_pre_hook(_with_shards)
    module.register_load_state_dict_pre_hook(_with_shards)


def _sharded_class(kind: type) -> type:
    """The class with the methods of `FSDPModule`, one for each class of modules."""
    for made in kind.__subclasses__():
        if made.__bases__ == (FSDPModule, kind):
            return made
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})


def _with_shards(module: nn.Module, *_: Any) -> None:
    """Before a state dict is read or loaded: the module has its shards."""
    group_of(module).reshard()


def _run_of(module: Any) -> Any:
    _begin(group_of(module), module)
    return group_of(module).run


def _begin(group: Group, module: nn.Module) -> None:
    """The first module that computes is the root: the groups in it share its order and its reductions."""
    if group.is_root is not None:
        return
    for each in dict.fromkeys(groups_in(module)):
        if each.is_root:
            raise RuntimeError("fully_shard: a module inside was called by itself before; call the whole model first")
        each.is_root, each.run = each is group, group.run
        if each is not group:
            group.run.groups.append(each)


def _check_all_are_known(run: Run, root: nn.Module) -> None:
    """RuntimeError for a parameter that came later, which no group has: each rank would train its own."""
    if run.tables is not None and run.tables.are_so() and run.counts == _counts(run.modules):
        return
    known = set().union(*[group.known for group in groups_in(root)])
    for name, module in root.named_modules():
        for key, p in module._parameters.items():
            if p is not None and (module, key) not in known:
                raise RuntimeError(
                    f"fully_shard: {f'{name}.{key}'.lstrip('.')} is a parameter that came later and that no group has: "
                    "ranks would drift apart. Put it there before fully_shard, or call fully_shard on its module"
                )
    run.modules = list(root.modules())
    run.tables, run.counts = _torch.Unwritten([m._modules for m in run.modules]), _counts(run.modules)


def _counts(modules: Sequence[nn.Module]) -> list[int]:
    """How many parameters each has. Which these are is looked at when they are gathered."""
    return [len(module._parameters) for module in modules]


@_torch.left_out_by_dynamo  # what compiled blocks do is compute: gathers, and what is known of them, are of each call
def _before_forward(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    group = group_of(module)
    _begin(group, module)
    if group.is_root:
        _check_all_are_known(group.run, module)
    if group.run.is_ending and not _torch.in_backward():
        group.run.forget()  # a backward pass ended by an error
    group.before_forward((args, kwargs))
    policy = group.policies.precision
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        args, kwargs = _torch.pytree.tree_map(lambda x: _cast(x, policy.param_dtype), (args, kwargs))
    return args, kwargs


@_torch.left_out_by_dynamo
def _after_forward(module: nn.Module, args: tuple, output: Any) -> Any:
    group = group_of(module)
    output = group.after_forward(output)
    dtype = group.policies.precision.output_dtype
    return output if dtype is None else _torch.pytree.tree_map(lambda x: _cast(x, dtype), output)


def _cast(x: Any, dtype: torch.dtype) -> Any:
    is_other = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not dtype
    return x.to(dtype) if is_other else x
