"""Styles that change no parameter: where the inputs and outputs of a module lie.

PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())      gathers the sequence
PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))   shares it out again
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spmd.mesh import DeviceMesh
from spmd.parallel.boundary import as_tuple, leaving
from spmd.parallel.style import ParallelStyle
from spmd.tensor.placement import Placement

Layouts = Placement | Sequence[Placement | None] | None


class PrepareModuleInput(ParallelStyle):
    """Places the inputs of a module.

    input_layouts: how the positional inputs lie where they are plain, one for each, None for what stays as it is; for a
    single input its placement. desired_input_layouts: where they are moved, as many. input_kwarg_layouts,
    desired_input_kwarg_layouts: the same for inputs by keyword, by name; others stay as they are. use_local_output:
    hand the module this rank's blocks, or DTensors.

    >>> from spmd import Replicate, Shard
    >>> PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    PrepareModuleInput(Shard(1) -> Replicate())

    Raises ValueError if the numbers of layouts differ, and, when the module is called, if it gets another number of
    inputs.
    """

    def __init__(
        self, *, input_layouts: Layouts = None, desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None, use_local_output: bool = False,
    ):  # fmt: skip
        self.inputs = _pairs("input_layouts", input_layouts, desired_input_layouts)
        self.by_name = _pairs_by_name(input_kwarg_layouts or {}, desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output

    def __repr__(self):
        named = [f"{name}: {_arrow(pair)}" for name, pair in self.by_name.items()]
        return f"{type(self).__name__}({', '.join([*map(_arrow, self.inputs or ()), *named])})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def prepare(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return self._prepared(args, device_mesh), self._prepared_by_name(kwargs, device_mesh)

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module

    def _prepared(self, args: tuple, mesh: DeviceMesh) -> tuple:
        if self.inputs is None:
            return args
        _require_as_many(self, "was given {} positional inputs", args, self.inputs)
        return tuple(_placed(x, mesh, pair, self.use_local_output) for x, pair in zip(args, self.inputs, strict=True))

    def _prepared_by_name(self, kwargs: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
        said = {k: self.by_name.get(k, (None, None)) for k in kwargs}
        return {k: _placed(x, mesh, said[k], self.use_local_output) for k, x in kwargs.items()}

    def constraints(self) -> Mapping[str, Placement]:
        return _constraint("input", self.inputs)


class PrepareModuleOutput(ParallelStyle):
    """Places the outputs of a module.

    output_layouts: how the outputs lie where they are plain, one for each, None for what stays as it is.
    desired_output_layouts: where they are moved, as many. use_local_output: hand out this rank's blocks, or DTensors.

    >>> from spmd import Replicate, Shard
    >>> PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
    PrepareModuleOutput(Replicate() -> Shard(1))
    """

    def __init__(self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True):
        self.outputs = _pairs("output_layouts", output_layouts, desired_output_layouts)
        self.use_local_output = use_local_output

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(map(_arrow, self.outputs or ()))})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def hand_out(module: nn.Module, args: tuple, output: Any) -> Any:
            return self._handed_out(output, device_mesh)

        module.register_forward_hook(hand_out)
        return module

    def _handed_out(self, output: Any, mesh: DeviceMesh) -> Any:
        values = as_tuple(output)
        _require_as_many(self, "gave {} outputs", values, self.outputs)
        pairs = zip(values, self.outputs, strict=True)
        placed = tuple(_placed(x, mesh, pair, self.use_local_output) for x, pair in pairs)
        return placed if isinstance(output, (tuple, list)) else placed[0]

    def constraints(self) -> Mapping[str, Placement]:
        return _constraint("output", self.outputs)


class PrepareModuleInputOutput(ParallelStyle):
    """Places the inputs and the outputs of a module: a `PrepareModuleInput` and a `PrepareModuleOutput` in one.

    use_local_input: hand the module this rank's blocks, or DTensors. use_local_output: hand out blocks, or DTensors.
    """

    def __init__(
        self, *, input_layouts: Layouts = None, desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None, use_local_input: bool = False,
        output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True,
    ):  # fmt: skip
        self.before = PrepareModuleInput(
            input_layouts=input_layouts, desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts, desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )  # fmt: skip
        self.after = PrepareModuleOutput(
            output_layouts=output_layouts, desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )  # fmt: skip

    def __repr__(self):
        return f"PrepareModuleInputOutput({self.before}, {self.after})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.after._apply(self.before._apply(module, device_mesh), device_mesh)

    def constraints(self) -> Mapping[str, Placement]:
        return {**self.before.constraints(), **self.after.constraints()}


Pair = tuple[Placement | None, Placement | None]


def _placed(x: Any, mesh: DeviceMesh, pair: Pair, use_local: bool) -> Any:
    return leaving(x, mesh, *pair, use_local) if isinstance(x, torch.Tensor) and pair[0] is not None else x


def _require_as_many(style: ParallelStyle, what: str, values: Sequence, pairs: Sequence[Pair]) -> None:
    if len(values) != len(pairs):
        raise ValueError(
            f"{style}: the module {what.format(len(values))}, and there are layouts for {len(pairs)}; give one for "
            "each, None for what stays as it is"
        )


def _pairs(name: str, layouts: Layouts, desired: Layouts) -> tuple[Pair, ...] | None:
    if layouts is None and desired is None:
        return None
    if layouts is None or desired is None:
        raise ValueError(f"{name} and desired_{name} belong together; give both")
    found, wanted = as_tuple(layouts), as_tuple(desired)
    if len(found) != len(wanted):
        raise ValueError(f"{name} has {len(found)} entries and desired_{name} {len(wanted)}; give as many")
    return tuple(zip(found, wanted, strict=True))


def _pairs_by_name(layouts: Mapping[str, Placement], desired: Mapping[str, Placement]) -> dict[str, Pair]:
    if layouts.keys() != desired.keys():
        raise ValueError(
            f"input_kwarg_layouts names {sorted(layouts)} and desired_input_kwarg_layouts {sorted(desired)}; name the "
            "same inputs in both"
        )
    return {name: (p, desired[name]) for name, p in layouts.items()}


def _constraint(which: str, pairs: Sequence[Pair] | None) -> dict[str, Placement]:
    """What a compiled step is told: a pin names all tensors at once, so it is told where there is one."""
    said = [desired for layout, desired in pairs or () if layout is not None and desired is not None]
    return {which: said[0]} if len(said) == 1 == len(pairs) else {}


def _arrow(pair: Pair) -> str:
    return f"{pair[0]} -> {pair[1]}" if pair[0] is not None else "None"
