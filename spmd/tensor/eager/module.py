"""distribute_module: all parameters and buffers of a module become DTensors on one mesh.

    def rows(name, module, mesh):
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]))

    model = distribute_module(model, mesh, rows, input_fn=lambda module, inputs, mesh: ...)

    model = distribute_module(model, mesh, params={"*.up.weight": {"tp": Shard(0)}})

Of a model on the meta device each rank makes its blocks (`meta_models`). Tensors that the partition function leaves
plain are replicated. Each tensor stays the object that it is for everybody who holds it, under all its names. After a
failure the module is as it was before: its parameters, buffers, submodules, hooks and attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from spmd import _torch
from spmd.comm import agree
from spmd.comm.numbered import Met
from spmd.mesh import DeviceMesh, current_mesh
from spmd.tensor.annotations.patterns import Patterns, check_patterns, placed_spec, placements_for, require_matches
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.eager.identity import become, check_can_become, placed
from spmd.tensor.eager.meta_models import Init, check_initialisers, initialise, is_to_be_made, made_empty
from spmd.tensor.placement import Placement
from spmd.tensor.spec import Spec

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]
HookFn = Callable[[nn.Module, Any, DeviceMesh], Any]

_DONE = "_distribute_module_applied"


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: PartitionFn | None = None,
    input_fn: HookFn | None = None,
    output_fn: HookFn | None = None,
    *,
    params: Patterns | None = None,
    init: Init = True,
) -> nn.Module:
    """Put a module on a mesh, in place, and return it.

    device_mesh: by default that of the DTensors in the module, or of the `with mesh:` block around the call.
    partition_fn: called as `partition_fn(name, submodule, device_mesh)` for the module and all its submodules. It may
    replace parameters and buffers by DTensors. The rest is replicated, with the values of the first rank.
    params: placements of parameters by name pattern, `{"*.up.weight": {"tp": Shard(0)}}`, as `spmd.compile` takes them.
    init: for tensors on the meta device, of which each rank makes its block and runs the initialisers of their modules
    (`reset_parameters`, `_init_weights`) on it: True for these alone, or a function that is then called with each
    module. False leaves the memory as it is, for a checkpoint that is loaded next.
    input_fn, output_fn: called before and after each forward as `input_fn(module, inputs, device_mesh)`, with the tuple
    of positional arguments, and `output_fn(module, outputs, device_mesh)`. If they return something else than None, it
    replaces the inputs or the outputs.

    Each parameter and buffer stays the object that it was, with its gradient, attributes and hooks, so optimisers may
    be made before or after. State that an optimiser has by then, such as momentum, stays whole on every rank.

    >>> layer = distribute_module(nn.Linear(3, 2), DeviceMesh("cpu", [0]))
    >>> print(layer.weight._spec, layer.weight.requires_grad)
    f32[2, 3] True

    Raises ValueError if a tensor of the module is on another mesh, before or after partition_fn, if tied tensors got
    different specs, and for a pattern that matches nothing; RuntimeError for a second call, if the ranks placed tensors
    differently, and for a tensor that views or torch hold, which cannot stay the object that it is. An error of
    partition_fn on one rank is raised on all ranks.
    """
    mesh = _mesh_of(module, device_mesh)
    _check_callable("input_fn", input_fn, (module, (), mesh))
    _check_callable("output_fn", output_fn, (module, None, mesh))
    if getattr(module, _DONE, False):
        raise RuntimeError("distribute_module: this module is distributed already; call it once")
    patterns, before = check_patterns(mesh, params or {}, "params"), _Snapshot(module)
    try:
        _place(_partition(module, mesh, partition_fn, patterns, init), module, init)
    except BaseException:
        before.restore()
        raise
    if input_fn is not None:
        module.register_forward_pre_hook(partial(_call_input_fn, input_fn, mesh))
    if output_fn is not None:
        module.register_forward_hook(partial(_call_output_fn, output_fn, mesh))
    setattr(module, _DONE, True)
    return module


def _call_input_fn(input_fn: HookFn, mesh: DeviceMesh, module: nn.Module, inputs: tuple) -> Any:
    return input_fn(module, inputs, mesh)


def _call_output_fn(output_fn: HookFn, mesh: DeviceMesh, module: nn.Module, inputs: tuple, outputs: Any) -> Any:
    return output_fn(module, outputs, mesh)


# ---- checks -----------------------------------------------------------------------------------


def _mesh_of(module: nn.Module, mesh: DeviceMesh | None) -> DeviceMesh:
    if not isinstance(module, nn.Module):
        raise TypeError(f"distribute_module: {module!r} is no nn.Module; for a tensor use distribute_tensor")
    found = [place.tensor for place in _named_tensors(module) if isinstance(place.tensor, DTensor)]
    if mesh is None:
        mesh = found[0].device_mesh if found else current_mesh()
    if mesh is None:
        raise ValueError("distribute_module: no tensor of the module is on a mesh yet; pass device_mesh")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"distribute_module: device_mesh is {mesh!r}; give a DeviceMesh")
    _check_on(mesh, module)
    return mesh


def _check_on(mesh: DeviceMesh, module: nn.Module) -> None:
    """Check that all tensors have a shape, and that those that are distributed are on the mesh."""
    for place in _named_tensors(module):
        if nn.parameter.is_lazy(place.tensor):
            raise ValueError(f"distribute_module: {place.name} has no shape yet; run the module once before")
        if isinstance(place.tensor, DTensor) and place.tensor.device_mesh != mesh:
            raise ValueError(
                f"distribute_module: {place.name} is on {place.tensor.device_mesh!r}, not on {mesh!r}; a module is "
                "on one mesh. Take its full_tensor() first, or distribute its parts one by one."
            )


def _check_callable(name: str, fn: Callable | None, arguments: tuple) -> None:
    if fn is None:
        return
    try:
        inspect.signature(fn).bind(*arguments)
    except TypeError as error:
        raise TypeError(f"distribute_module: {name} takes (module, {name[:-3]}s, device_mesh), but {error}") from None


# ---- the tensors of a module ------------------------------------------------------------------


class _NamedTensor(NamedTuple):
    """A tensor of a submodule under one of its names: `table[key]` is the tensor."""

    name: str
    table: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor


def _named_tensors(module: nn.Module) -> Iterator[_NamedTensor]:
    for prefix, sub in module.named_modules():
        for table in (sub._parameters, sub._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield _NamedTensor(f"{prefix}.{key}".lstrip("."), table, key, tensor)


class _Snapshot:
    """The attributes of all submodules of a module, so that they can be restored."""

    def __init__(self, module: nn.Module):
        self.kept = [(sub, {k: _copied(v) for k, v in vars(sub).items()}) for sub in module.modules()]

    def restore(self) -> None:
        for sub, kept in self.kept:
            vars(sub).clear()
            vars(sub).update(kept)


def _copied(value: Any) -> Any:
    """A shallow copy of a table; any other attribute itself."""
    return value.copy() if isinstance(value, (dict, set, list)) else value


# ---- placing ----------------------------------------------------------------------------------


class _Placing(NamedTuple):
    """A tensor of a module, and where it goes. kept: the object that is to become it, where partition_fn replaced one.

    places: all its names.
    """

    tensor: torch.Tensor
    spec: Spec
    kept: torch.Tensor
    places: list[_NamedTensor]

    def __str__(self):
        gradient = " with a gradient" if self.grad is not None else ""
        return f"{', '.join(place.name for place in self.places)}: {self.spec}{gradient}"

    @property
    def is_to_be_made(self) -> bool:
        """Whether the tensor has no numbers yet."""
        return is_to_be_made(self.tensor, self.spec)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, also if partition_fn left it in the tensor that it replaced."""
        own = self.tensor.grad
        return self.kept.grad if own is None and self.kept.shape == self.tensor.shape else own

    def placed(self) -> DTensor:
        """What the kept object becomes: with the gradient, and the attributes that the user set on the tensor."""
        out = made_empty(self.tensor, self.spec) if self.is_to_be_made else placed(self.tensor, self.spec)
        if out is self.kept:
            return out
        if out is self.tensor:
            out = DTensor(out._local_tensor, out._spec, requires_grad=out.requires_grad)
        if self.grad is not None:
            out.grad = placed(self.grad, self.spec.with_tensor(self.spec.shape, self.grad.dtype))
        own = _torch.declared(type(self.tensor))
        vars(out).update({name: value for name, value in vars(self.tensor).items() if name not in own})
        return out


def _partition(
    module: nn.Module, mesh: DeviceMesh, partition_fn: PartitionFn | None, patterns: dict[str, tuple[Placement, ...]],
    init: Init,
) -> list[_Placing]:  # fmt: skip
    """Call partition_fn, and find where every tensor goes. If one rank fails, or the ranks differ, all ranks raise."""
    before, found, failed = list(_named_tensors(module)), [], None
    try:
        for name, sub in list(module.named_modules()) if partition_fn is not None else ():
            partition_fn(name, sub, mesh)
        _tie_again(before)
        _check_on(mesh, module)
        found = _placings(module, mesh, patterns, before)
        if mesh.device_type != "meta":
            check_initialisers({"module": module}, init)
        moving = [p for p in found if p.kept is not p.tensor or getattr(p.tensor, "_spec", None) is not p.spec]
        check_can_become("distribute_module", ((p.places[0].name, p.kept) for p in moving))
    except Exception as error:
        failed = error
    agree("\n".join(map(str, found)), mesh, "distribute_module: the layout of the tensors", failed)
    Met.on(mesh).with_objects(module).keep()  # from now on the ranks can tell it from an equal module
    return found


def _placings(
    module: nn.Module, mesh: DeviceMesh, patterns: dict[str, tuple[Placement, ...]], before: list[_NamedTensor]
) -> list[_Placing]:
    now: dict[int, list[_NamedTensor]] = {}
    for place in _named_tensors(module):
        now.setdefault(id(place.tensor), []).append(place)
    params = [_full_name(p) for places in now.values() for p in places if isinstance(p.tensor, nn.Parameter)]
    require_matches(patterns, params, "params")
    kept = {p.name: p.tensor for p in before if id(p.tensor) not in now}
    found = []
    for places in now.values():
        x = places[0].tensor
        placements = placements_for(patterns, map(_full_name, places)) if isinstance(x, nn.Parameter) else None
        is_placed = isinstance(x, DTensor) and placements is None
        spec = x._spec if is_placed else placed_spec(mesh, placements, x, places[0].name)
        found.append(_Placing(x, spec, next((kept[p.name] for p in places if p.name in kept), x), places))
    return found


def _full_name(place: _NamedTensor) -> str:
    """The name as in a compiled step, with an argument in front: patterns match with it and without it."""
    return f"module.{place.name}"


def _place(found: list[_Placing], module: nn.Module, init: Init) -> None:
    """Place all tensors, then put them into the objects that were there before. Initialise those without numbers."""
    fresh = [p.kept for p in found if p.is_to_be_made]
    for placing, new in [(p, p.placed()) for p in found]:
        become(placing.kept, new)
        for place in placing.places:
            place.table[place.key] = placing.kept
    initialise({"module": module}, fresh, init)


def _tie_again(before: list[_NamedTensor]) -> None:
    """If a tensor had several names and one of them was placed, give all names the placed tensor."""
    names: dict[int, list[_NamedTensor]] = {}
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
