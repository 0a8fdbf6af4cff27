"""State dicts of models and optimisers, whole or sharded: torch's functions, right for DTensors.

    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))            whole, on every rank
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))   on rank 0 alone
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))     each rank takes its blocks
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))

All ranks must call them. Tensors are gathered, or broadcast, one after the other; a rank that does not keep the whole
tensors holds one at a time. Tensors that share memory, as tied weights do, share it in a whole state dict, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions

from spmd import _torch
from spmd.comm import broadcast, transport, wait
from spmd.mesh import DeviceMesh, current_rank, world_size
from spmd.sim import LocalTensor
from spmd.tensor.eager.conversions import redistributed
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.spec import Spec, replicated

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
StateDict = dict[str, Any]
Path = tuple[str | int, ...]


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> StateDict:
    """The state dict of a model by the names that its parameters have without wrappers.

    full_state_dict: with plain, whole tensors; on all ranks, or with cpu_offload on rank 0 alone, where other ranks get
    an empty dict. cpu_offload alone: with DTensors whose blocks are on the CPU. ignore_frozen_params: without
    parameters that take no gradient.
    """
    options = options or StateDictOptions()
    found = torchs.get_model_state_dict(model, submodules=submodules, options=_sharded(options))
    return _as_asked(found, options)


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> StateDict:  # fmt: skip
    """The state dict of the optimisers of a model, by the names of the parameters. options: as of the model's.

    An optimiser without state makes it, in a step whose gradients and learning rates are zero.
    """
    options = options or StateDictOptions()
    found = torchs.get_optimizer_state_dict(model, optimizers, submodules=submodules, options=_sharded(options))
    return _as_asked(found, options)


def get_state_dict(
    model: nn.Module, optimizers: Optimizers, *, submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[StateDict, StateDict]:  # fmt: skip
    """The state dicts of a model and of its optimisers."""
    optimizers = _as_tuple(optimizers)
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options),
    )


def set_model_state_dict(
    model: nn.Module, model_state_dict: StateDict, *, options: StateDictOptions | None = None
) -> Any:
    """Load a state dict into a model. Returns the names that were missing and those that were not expected.

    full_state_dict: it has whole tensors, the same on all ranks; each rank takes its blocks, and nothing is sent.
    broadcast_from_rank0: that of rank 0 counts, and other ranks may give an empty one. strict: a name that is missing
    or not expected is an error. A model on the meta device gets tensors.
    """
    options = options or StateDictOptions()
    if not options.full_state_dict:
        return torchs.set_model_state_dict(model, model_state_dict, options=options)
    mine = torchs.get_model_state_dict(model, options=StateDictOptions())
    given = _placed_like(model_state_dict, mine, options)
    if any(isinstance(x, torch.Tensor) and x.is_meta for x in mine.values()):
        return model.load_state_dict(given, strict=options.strict, assign=True)
    return torchs.set_model_state_dict(model, given, options=_sharded(options))


def set_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, optim_state_dict: StateDict, *, options: StateDictOptions | None = None
) -> None:
    """Load a state dict into the optimisers of a model, before a backward pass or after a step. options: as above."""
    options, optimizers = options or StateDictOptions(), _as_tuple(optimizers)
    if options.full_state_dict:
        mine = torchs.get_optimizer_state_dict(model, optimizers, options=_sharded(options))
        optim_state_dict = _placed_like(optim_state_dict, mine, options)
        options = _sharded(options)
    torchs.set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)


def set_state_dict(
    model: nn.Module, optimizers: Optimizers, *, model_state_dict: StateDict, optim_state_dict: StateDict,
    options: StateDictOptions | None = None,
) -> Any:  # fmt: skip
    """Load the state dicts of a model and of its optimisers. Returns what `set_model_state_dict` returns."""
    out = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return out


def _sharded(options: StateDictOptions) -> StateDictOptions:
    """The options with which torch leaves all tensors as they are."""
    return replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)


def _as_tuple(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    return (optimizers,) if isinstance(optimizers, torch.optim.Optimizer) else tuple(optimizers)


def _mapped(tree: Any, fn: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The tree of dicts, lists and tuples with `fn(path, leaf)` for each leaf."""
    if isinstance(tree, dict):
        return {key: _mapped(x, fn, (*path, key)) for key, x in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_mapped(x, fn, (*path, i)) for i, x in enumerate(tree)])
    return fn(path, tree)


def _at(tree: Any, path: Path) -> Any:
    """What the tree has there; None if it ends before."""
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return None
    return tree


# ---- from the ranks ---------------------------------------------------------------------------


@torch.no_grad()
def _as_asked(found: StateDict, options: StateDictOptions) -> StateDict:
    on_cpu = options.cpu_offload
    if not options.full_state_dict:
        return _mapped(found, lambda _, x: x.cpu() if isinstance(x, torch.Tensor) else x) if on_cpu else found
    is_kept = not on_cpu or current_rank() == 0
    gathered: dict[tuple, torch.Tensor | None] = {}

    def whole(_: Path, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not isinstance(x, DTensor):
            return x.cpu() if on_cpu else x
        key = _memory_key(x)
        if key not in gathered:  # On all ranks alike, also where the tensor is not kept: all of them take part.
            full = wait(x.detach().full_tensor())
            gathered[key] = (full.cpu() if on_cpu else full) if is_kept else None
        return gathered[key]

    out = _mapped(found, whole)
    return out if is_kept else {}


def _memory_key(x: DTensor) -> tuple:
    """The same for DTensors that are one tensor under two names."""
    local = wait(x._local_tensor)
    blocks = local.local.values() if isinstance(local, LocalTensor) else [local]
    return x._spec, id(x._copy), *[(_torch.memory_of(each), each.storage_offset(), each.stride()) for each in blocks]


# ---- to the ranks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sent:
    """A tensor of rank 0's state dict, which is sent by itself. spec: of a DTensor, which is refused."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: str | None


@torch.no_grad()
def _placed_like(given: StateDict, mine: StateDict, options: StateDictOptions) -> StateDict:
    """The whole tensors of a state dict, laid out as those of this rank's own state dict are."""
    if not options.broadcast_from_rank0:
        return _mapped(given, lambda path, x: _placed(x, _at(mine, path), path))
    ranks = range(world_size())
    device = next((x.device_mesh.device_type for x in _tensors(mine) if isinstance(x, DTensor)), "cpu")
    everyone = DeviceMesh(device, list(ranks))
    sent = transport().gather_objects(_mapped(given, _described), everyone)[0]

    def received(path: Path, x: Any) -> Any:
        if isinstance(x, _Sent):
            x = _received(x, _at(given, path), path, everyone)
        return _placed(x, _at(mine, path), path)

    return _mapped(sent, received)


def _tensors(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(tree, lambda _, x: found.append(x) if isinstance(x, torch.Tensor) else None)
    return found


def _described(_: Path, x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return _Sent(tuple(x.shape), x.dtype, str(x._spec) if isinstance(x, DTensor) else None)


def _received(sent: _Sent, x: Any, path: Path, everyone: DeviceMesh) -> torch.Tensor:
    """The tensor of rank 0. x: what this rank has at its place."""
    if sent.spec is not None:
        raise TypeError(
            f"broadcast_from_rank0: {_name(path)} is a DTensor, {sent.spec}; give whole tensors, such as "
            "get_model_state_dict(..., options=StateDictOptions(full_state_dict=True)) has"
        )
    if not isinstance(x, torch.Tensor) or (tuple(x.shape), x.dtype) != (sent.shape, sent.dtype):
        x = torch.empty(sent.shape, dtype=sent.dtype)  # not rank 0, which sends its own
    x = x.detach().to(everyone.device_type).contiguous()
    return wait(broadcast(x, 0, everyone)) if x.numel() and everyone.size() > 1 else x


def _placed(x: Any, like: Any, path: Path) -> Any:
    """A whole tensor in the layout of a DTensor; anything else as it is."""
    if not isinstance(x, torch.Tensor) or isinstance(x, DTensor) or not isinstance(like, DTensor):
        return x
    spec: Spec = like._spec
    if tuple(x.shape) != spec.shape or spec.partial:
        raise ValueError(
            f"full_state_dict: {_name(path)} has shape {list(x.shape)} in the state dict, and is {spec} in the model"
            + ("; a Partial cannot be loaded" if spec.partial else "; give the whole tensor")
        )
    if spec.mesh.get_coordinate() is None:
        return like
    x = x.detach().to(spec.mesh.device_type)
    target = spec.with_tensor(spec.shape, x.dtype)
    out = redistributed(DTensor(x, replicated(target)), target)
    return out.clone() if out._local_tensor.data_ptr() == x.data_ptr() else out


def _name(path: Path) -> str:
    return ".".join(map(str, path))
