"""parallelize_module: a model and a plan, with torch's name, arguments and meaning.

    parallelize_module(model, mesh["tp"], {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})

The same plan for a compiled step: `spmd.compile(step, mesh=mesh, **placements_of(model, mesh, plan))`.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from spmd.mesh import DeviceMesh, current_mesh
from spmd.parallel.plans import ModelPlan, Parts, Plan, parts
from spmd.tensor.eager.meta_models import Init
from spmd.tensor.eager.module import distribute_module
from spmd.tensor.placement import Placement


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan = None,
    *,
    src_data_rank: int | None = 0,
    init: Init = True,
) -> nn.Module:
    """Make the modules of a model parallel by a plan, in place, and return the model.

    device_mesh: of one axis, such as `mesh["tp"]`; by default that of the `with mesh:` block around the call.
    parallelize_plan: a style for the module itself, or a dict from names of modules to styles, where a star stands for
    one part of a name: {"layers.*.up": ColwiseParallel()}; or transformers' `model.tp_plan`, with its names of styles.
    Of several entries that match a module the first counts. A plan of placements, {"layers.*.up.weight": Shard(0)} or
    by axis as `spmd.compile` takes them, makes all tensors of the model DTensors, on a mesh of any number of axes. Or
    what `plan_for` gives, on its mesh. src_data_rank: the rank whose values are taken; None takes each rank's own.
    init: how parameters on the meta device get numbers, as in `distribute_module`; False for a checkpoint that is read
    next.

    A parameter that has several names stays one. Everything that can be wrong with a plan is an error before anything
    is changed: ValueError for a name that matches nothing, or nothing that no entry before it says otherwise, for
    heads that the axis does not divide, for a tied parameter that would lie in two ways; TypeError for a module that
    cannot have its style.

    >>> from spmd.parallel import ColwiseParallel
    >>> layer = parallelize_module(nn.Linear(2, 4), DeviceMesh("cpu", [0]), ColwiseParallel())
    >>> print(layer.weight._spec)
    f32[4, 2]
    """
    mesh = _mesh(device_mesh)
    if parallelize_plan is None:
        return module
    if isinstance(parallelize_plan, ModelPlan):
        return _applied(module, mesh, parallelize_plan, init)
    found = parts(module, mesh, parallelize_plan)
    _check_kinds(found)
    if found.params:
        return distribute_module(module, mesh, params=_patterns(found), init=init)
    _check_axis(mesh, found)
    modules = dict(module.named_modules())
    for name, style in found.styles.items():
        style = copy.copy(style)
        style.src_data_rank, style.init = src_data_rank, init
        made = style._apply(modules[name], mesh)
        module = _put(module, name, made)
    return module


def placements_of(
    module: nn.Module, device_mesh: DeviceMesh, parallelize_plan: Plan, *, axis: str | int | None = None
) -> dict[str, Any]:
    """What a plan says, as arguments of `spmd.compile`: `params=`, and `placements=` of values.

    device_mesh: the mesh of the step. axis: the axis that the styles are for, by default the only one, or "tp". On
    other axes parameters are replicated, and values lie as it is found best.

    >>> from spmd.parallel import ColwiseParallel
    >>> mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "tp"))
    >>> for name, said in placements_of(nn.Sequential(nn.Linear(2, 4)), mesh, {"0": ColwiseParallel()}).items():
    ...     print(name, said)
    params {'0.weight': {'tp': Shard(0)}, '0.bias': {'tp': Shard(0)}}
    placements {'0.input': {'tp': Replicate(), 'dp': None}, '0': {'tp': Shard(-1), 'dp': None}}
    """
    mesh = _mesh(device_mesh)
    chosen = _axis(mesh, axis)
    found = parts(module, mesh[chosen], parallelize_plan)
    _check_kinds(found)
    modules, others = dict(module.named_modules()), dict.fromkeys(a for a in mesh.axis_names if a != chosen)
    params = {
        f"{name}.{key}".lstrip("."): {chosen: p}
        for name, style in found.styles.items() for key, p in style.params(modules[name]).items()
    }  # fmt: skip
    values = {
        name + _END[which]: {chosen: p} | others
        for name, style in found.styles.items() if name for which, p in style.constraints().items()
    }  # fmt: skip
    return {"params": {**params, **_patterns(found)}, "placements": values}


_END = {"input": ".input", "output": ""}


def _axis(mesh: DeviceMesh, axis: str | int | None) -> str:
    if axis is None and mesh.ndim > 1 and "tp" not in mesh.axis_names:
        raise ValueError(
            f"placements_of: the mesh has {', '.join(mesh.axis_names)}; say which axis= the styles are for"
        )
    return mesh.axis_name(mesh.axis(("tp" if mesh.ndim > 1 else 0) if axis is None else axis))


def _mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    mesh = current_mesh() if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"parallelize_module: device_mesh is {mesh!r}; give a mesh of spmd, such as mesh['tp']")
    return mesh


def _applied(module: nn.Module, mesh: DeviceMesh, plan: ModelPlan, init: Init) -> nn.Module:
    if plan.mesh != mesh:
        raise ValueError(f"parallelize_module: the plan is for {plan.mesh!r}, and device_mesh is {mesh!r}")
    return plan.apply(module, init=init)


def _check_axis(mesh: DeviceMesh, found: Parts) -> None:
    if found.styles and mesh.ndim != 1:
        raise ValueError(
            f"parallelize_module: a style is for one axis, and the mesh has {', '.join(mesh.axis_names)}; give one of "
            f"them, such as mesh[{mesh.axis_names[-1]!r}]"
        )


def _check_kinds(found: Parts) -> None:
    if found.styles and found.params:
        raise ValueError(
            f"parallelize_plan has styles and placements; of placements ({', '.join(found.params)}) all tensors of the "
            "model become DTensors. Use one of the two."
        )


def _patterns(found: Parts) -> dict[str, Any]:
    return {pattern: [p] if isinstance(p, Placement) else p for pattern, p in found.params.items()}


def _put(root: nn.Module, name: str, made: nn.Module) -> nn.Module:
    """The model with what a style made in the place of a module: users' styles may return another one."""
    if not name:
        return made
    parent, _, key = name.rpartition(".")
    setattr(root.get_submodule(parent), key, made)
    return root
