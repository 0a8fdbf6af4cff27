"""distribute_module: all parameters and buffers of a module become DTensors on one mesh.

    def rows(name, module, mesh):
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))

    model = distribute_module(model, mesh, rows, input_fn=lambda module, inputs, mesh: ...)

What the partition function leaves plain is replicated. One tensor under several names stays one. A failure leaves the
module as it was: its parameters, buffers, submodules, hooks and attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from spmd.comm import agree
from spmd.mesh import DeviceMesh
from spmd.tensor.dtensor import DTensor, distribute_tensor

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]
HookFn = Callable[[nn.Module, Any, DeviceMesh], Any]

_DONE = "_distribute_module_applied"


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: HookFn | None = None,
    output_fn: HookFn | None = None,
) -> nn.Module:
    """Put a module on a mesh, in place, and return it.

    device_mesh: by default that of the DTensors in the module.
    partition_fn: called as `partition_fn(name, submodule, device_mesh)` for the module and all in it; what it puts in
    place of parameters and buffers stays, and the rest is replicated. The first rank's values count.
    input_fn, output_fn: called before and after each forward as `input_fn(module, inputs, device_mesh)`, with the tuple
    of positional arguments, and `output_fn(module, outputs, device_mesh)`; what they return, if not None, takes the
    place of the inputs or the outputs.

    Make optimisers afterwards: they hold the parameters that they were given. Gradients move with their parameters.

    >>> layer = distribute_module(nn.Linear(3, 2), DeviceMesh("cpu", [0]))
    >>> print(layer.weight._spec, layer.weight.requires_grad)
    f32[2, 3] True

    Raises ValueError where the module, or what partition_fn made of it, lies on another mesh, or where tied tensors
    were placed apart; RuntimeError for a second call, and where ranks placed tensors differently; and what
    partition_fn raises - on all ranks, if it raises on one.
    """
    mesh = _mesh_of(module, device_mesh)
    _check_callable("input_fn", input_fn, (module, (), mesh))
    _check_callable("output_fn", output_fn, (module, None, mesh))
    if getattr(module, _DONE, False):
        raise RuntimeError("distribute_module: this module is distributed already; call it once")
    before = _Snapshot(module)
    try:
        _partition(module, mesh, partition_fn)
        _replicate(module, mesh)
    except BaseException:
        before.restore()
        raise
    if input_fn is not None:
        module.register_forward_pre_hook(partial(_prepare, input_fn, mesh))
    if output_fn is not None:
        module.register_forward_hook(partial(_settle, output_fn, mesh))
    setattr(module, _DONE, True)
    return module


def _prepare(input_fn: HookFn, mesh: DeviceMesh, module: nn.Module, inputs: tuple) -> Any:
    return input_fn(module, inputs, mesh)


def _settle(output_fn: HookFn, mesh: DeviceMesh, module: nn.Module, inputs: tuple, outputs: Any) -> Any:
    return output_fn(module, outputs, mesh)


# ---- checks -----------------------------------------------------------------------------------


def _mesh_of(module: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
    if not isinstance(module, nn.Module):
        raise TypeError(f"distribute_module: {module!r} is no nn.Module; for a tensor use distribute_tensor")
    found = [place.tensor for place in _places(module) if isinstance(place.tensor, DTensor)]
    if mesh is None and not found:
        raise ValueError("distribute_module: no tensor of the module lies on a mesh yet; pass device_mesh")
    mesh = found[0].device_mesh if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"distribute_module: device_mesh is {mesh!r}; give a DeviceMesh")
    _check_on(mesh, module)
    return mesh


def _check_on(mesh: DeviceMesh, module: nn.Module) -> None:
    """All tensors have a shape, and those that are distributed lie on the mesh."""
    for place in _places(module):
        if nn.parameter.is_lazy(place.tensor):
            raise ValueError(f"distribute_module: {place.name} has no shape yet; run the module once before")
        if isinstance(place.tensor, DTensor) and place.tensor.device_mesh != mesh:
            raise ValueError(
                f"distribute_module: {place.name} lies on {place.tensor.device_mesh!r}, not on {mesh!r}; a module lies "
                "on one mesh. Take its full_tensor() first, or distribute its parts one by one."
            )


def _check_callable(what: str, fn: Callable | None, arguments: tuple) -> None:
    if fn is None:
        return
    try:
        inspect.signature(fn).bind(*arguments)
    except TypeError as error:
        raise TypeError(f"distribute_module: {what} takes (module, {what[:-3]}s, device_mesh), but {error}") from None


# ---- where the tensors of a module are --------------------------------------------------------


class _Place(NamedTuple):
    """One name of a tensor: the table of a submodule that holds it."""

    name: str
    table: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor


def _places(module: nn.Module) -> Iterator[_Place]:
    for prefix, sub in module.named_modules():
        for table in (sub._parameters, sub._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield _Place(f"{prefix}.{key}".lstrip("."), table, key, tensor)


class _Snapshot:
    """What the submodules of a module hold, to be put back."""

    def __init__(self, module: nn.Module):
        self.kept = [(sub, {k: _copied(v) for k, v in vars(sub).items()}) for sub in module.modules()]

    def restore(self) -> None:
        for sub, kept in self.kept:
            vars(sub).clear()
            vars(sub).update(kept)


def _copied(value: Any) -> Any:
    """A table as it is now; other attributes as they are."""
    return value.copy() if isinstance(value, (dict, set, list)) else value


# ---- placing ----------------------------------------------------------------------------------


def _partition(module: nn.Module, mesh: DeviceMesh, partition_fn: PartitionFn | None) -> None:
    """Let partition_fn place what it will; ranks compare what came of it, and one that failed fails all."""
    before, text, failed = list(_places(module)), "", None
    try:
        for name, sub in list(module.named_modules()) if partition_fn is not None else ():
            partition_fn(name, sub, mesh)
        _tie(before)
        _check_on(mesh, module)
        text = "\n".join(f"{place.name}: {_shown(place.tensor)}" for place in _places(module))
    except Exception as error:
        failed = error
    agree(text, mesh, "distribute_module: how the tensors lie", failed)


def _tie(before: list[_Place]) -> None:
    """What was one tensor under several names is one again, if one of them was placed."""
    names: dict[int, list[_Place]] = {}
    for place in before:
        names.setdefault(id(place.tensor), []).append(place)
    for places in names.values():
        now = [(place, place.table.get(place.key)) for place in places]
        placed = [(place, x) for place, x in now if isinstance(x, DTensor) and x is not place.tensor]
        for place, x in placed[1:]:
            if x._spec is not placed[0][1]._spec:
                raise ValueError(
                    f"distribute_module: {placed[0][0].name} and {place.name} are one tensor, but were placed as "
                    f"{placed[0][1]._spec} and {x._spec}; place them alike, or only one of them"
                )
        for place, x in now if placed else ():
            if x is not None:
                place.table[place.key] = placed[0][1]


def _shown(x: torch.Tensor) -> str:
    return str(x._spec) if isinstance(x, DTensor) else f"{x.dtype}{list(x.shape)}"


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate what is plain; a tensor of two names once."""
    made: dict[int, torch.Tensor] = {}
    for place in list(_places(module)):
        if not isinstance(place.tensor, DTensor):
            if id(place.tensor) not in made:
                made[id(place.tensor)] = _replicated(place, mesh)
            place.table[place.key] = made[id(place.tensor)]


def _replicated(place: _Place, mesh: DeviceMesh) -> torch.Tensor:
    x = place.tensor
    out = distribute_tensor(x.detach(), mesh)
    if isinstance(x, nn.Parameter):
        out = nn.Parameter(out, requires_grad=x.requires_grad)
        if x.grad is not None:
            out.grad = distribute_tensor(x.grad, mesh)
    vars(out).update(vars(x))
    return out
