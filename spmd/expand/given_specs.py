"""The specs of what a compiled step is given: its state and its arguments, placed by the patterns of the user.

    weight        {"*.up.weight": {"tp": Shard(0)}}        f32[64@tp, 16]
    weight.grad, optimizer.exp_avg[weight]                 their own places (`spmd.expand.places`), here the same
    tokens        DTensor i64[8@dp, 32], no pattern        as it is

Nothing is moved here but by `block_of`, which gives a rank's block of an argument.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.places.places import Places
from spmd.expand.places.slices import present_spec
from spmd.expand.places.table import PlacesTable
from spmd.expand.state import Slot, State, Tensors
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor.annotations.patterns import placed_spec
from spmd.tensor.redistribute.cross_mesh import move_between_meshes
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import Spec, reduced_spec, replicated, spec_of_value


def state_specs(state: State, tensors: Tensors, table: PlacesTable, first: bool) -> dict[Slot, Spec]:
    """The spec of each tensor of the state: its present one if it was placed before, else that of the user's table."""
    present = [spec_of_value(t) for t in tensors.values()]
    placed = all(spec is not None and spec.mesh == table.mesh for spec in present)
    if placed and not first and not _share_a_memory(tensors):
        return {slot: t._spec for slot, t in tensors.items()}
    table.require_matches([n for several in state.parameter_names().values() for n in several])
    _check_memory(tensors)
    for slot, t in tensors.items():
        _check_mesh(str(slot), t, table.mesh)
    places = places_of(state, tensors, table)
    return {slot: state_spec(slot, t, table.mesh, places) for slot, t in tensors.items()}


AllPlaces = dict[str, Places]
"""The places of each parameter, by the path of its slot."""


def places_of(state: State, tensors: Tensors, table: PlacesTable) -> AllPlaces:
    """The places of the parameters of a step."""
    names = state.parameter_names()
    return {slot.path: table.places(names[slot.path], t) for slot, t in tensors.items() if slot.kind == "parameter"}


def state_spec(slot: Slot, t: torch.Tensor, mesh: DeviceMesh, places: AllPlaces) -> Spec:
    """The spec of a tensor of the state. Gradients and optimiser state of a parameter's shape have their own places."""
    if (own := own_place(slot, t.shape, places)) is not None:
        return own.with_tensor(t.shape, t.dtype)
    present = present_spec(t, mesh)
    if slot.kind == "parameter":
        return places[slot.path].stored
    return placed_spec(mesh, None, t, str(slot)) if present is None else reduced_spec(present)


def own_place(slot: Slot, shape: Sequence[int], places: AllPlaces) -> Spec | None:
    """The place of a gradient, or of optimiser state that has the shape of its parameter; None for other tensors."""
    if slot.kind not in ("grad", "optimizer"):
        return None
    of = places[slot.path]
    return (of.gradient if slot.kind == "grad" else of.state) if of.stored.shape == tuple(shape) else None


def input_spec(path: str, x: torch.Tensor, mesh: DeviceMesh, placements) -> Spec:
    """The spec that an argument gets. A DTensor on another mesh of the step's ranks is moved to the step's mesh."""
    present = spec_of_value(x)
    elsewhere = present is not None and present.mesh != mesh and set(present.mesh.ranks) <= set(mesh.ranks)
    if not elsewhere:
        _check_mesh(path, x, mesh)
    if x.requires_grad:
        raise ValueError(
            f"argument {path} requires a gradient, which a compiled step would not leave in it: pass {path}.detach(), "
            "and take the gradient inside the step with torch.autograd.grad"
        )
    keeps_spec = placements is None and present is not None and not elsewhere
    return present if keeps_spec else placed_spec(mesh, placements, x, path)


def _check_mesh(name: str, t: torch.Tensor, mesh: DeviceMesh) -> None:
    present = present_spec(t, mesh)
    if present is not None and present.mesh != mesh:
        raise ValueError(
            f"{name} is on {present.mesh!r}, but the step is compiled for {mesh!r}; use one mesh for both, or a slice"
        )


def unread_inputs(graph: fx.Graph) -> frozenset[int]:
    """The places of the inputs that a program does not read."""
    return frozenset([i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder") if not n.users])


def inputs_given_back(graph: fx.Graph) -> frozenset[int]:
    """The places of the outputs that go out as they came in: all other state is written. An output may be a number."""
    (output,) = graph.find_nodes(op="output")
    given = enumerate(output.args[0])
    return frozenset([i for i, x in given if isinstance(x, fx.Node) and x.op == "placeholder"])


def check_arguments(
    arguments: Mapping[str, Any], attributes: Collection[str], tensors: Tensors, written: Collection[Any]
) -> None:  # fmt: skip
    """Refuse an argument, or a tensor in an attribute, that shares memory with what the step writes: the program would
    read it as it was before. arguments: both, by path. attributes: the paths of those in attributes. written: slots,
    and the `Argument`s among these."""
    names: dict[tuple[type, int], list[str]] = {}
    for name, x in arguments.items() if written else ():
        if isinstance(x, torch.Tensor) and (memory := _memory_of(x)) is not None:
            names.setdefault(memory, []).append(name)
    for where in written if names else ():
        home = tensors.get(where) if isinstance(where, Slot) else arguments[where.path]
        found = names.get(_memory_of(home), ()) if home is not None else ()
        # What is the same tensor is one in the trace, too.
        if name := next((name for name in found if arguments[name] is not home), None):
            said, give = (name, "set it to") if name in attributes else (f"the argument {name}", "pass")
            raise ValueError(
                f"{said} shares memory with {where}, which the step writes, and the step would not see the write in "
                f"it: {give} {name}.clone(), or take the view inside the step"
            )


def check_can_be_placed(placed: Sequence[tuple[str, torch.Tensor]], others: Mapping[str, Any]) -> None:
    """Refuse plain tensors that would be placed on the mesh, and that show memory of others, which would stay behind.
    placed: by path. others: all tensors that the step is given, by path."""
    for path, x in placed:
        if spec_of_value(x) is not None or (memory := _memory_of(x)) is None:
            continue
        tensors = {name: y for name, y in others.items() if isinstance(y, torch.Tensor) and y is not x}
        name = next((name for name, y in tensors.items() if _memory_of(y) == memory), "")
        if name or _torch.shows_what_is_held(x):
            raise ValueError(
                f"{path} shares memory with {name or 'another tensor'}, and the step writes, returns or shares it, so "
                f"that it is placed on the mesh by itself: set it to {path}.clone() before"
            )


def _memory_of(t: torch.Tensor) -> tuple[type, int] | None:
    """What tensors of one memory have in common; None of a tensor that has no data."""
    if spec_of_value(t) is not None:
        return Spec, id(t if t._memory is None else t._memory)
    is_plain = type(t) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not t.is_meta
    return (torch.Tensor, t.untyped_storage()._cdata) if is_plain else None


def _share_a_memory(tensors: Tensors) -> bool:
    """Whether two DTensors are views of one, of the same part of it or not."""
    memories = [id(t._memory) for t in tensors.values() if t._memory is not None]
    return len(set(memories)) < len(memories)


def _check_memory(tensors: Tensors) -> None:
    """Refuse tensors that share memory: the program has each by itself, and a write into one would miss the other."""
    copies: dict[int, Slot] = {}
    for slot, t in tensors.items():
        memory = getattr(t, "_memory", None)
        other = copies.setdefault(id(memory), slot) if memory is not None else slot
        if other is not slot and (t._copy is not None or tensors[other]._copy is not None):
            raise _sharing(str(other), str(slot))
    _check_spans({str(slot): getattr(t, "_local_tensor", t) for slot, t in tensors.items()})


@per_rank
def _check_spans(blocks: dict[str, torch.Tensor]) -> None:
    there = [(name, x) for name, x in blocks.items() if x.numel() and not x.is_meta]
    spans = sorted((x.device.type, x.data_ptr(), x.data_ptr() + _extent(x), name) for name, x in there)
    for (device, _, end, one), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise _sharing(one, other)


def _sharing(one: str, other: str) -> ValueError:
    return ValueError(f"{one} and {other} share memory; tie them by registering one tensor under both names")


def _extent(t: torch.Tensor) -> int:
    """The bytes from the first element to the end of the last."""
    return (sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1) * t.element_size()


def block_of(x: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's block of a tensor: by moves of a DTensor, or cut from a global tensor that all ranks have."""
    present = spec_of_value(x)
    if present is None:
        return plan(replicated(spec), spec).run(x.detach().contiguous())
    block = x._current_block.detach()  # a view of x itself would be one that later calls ask for
    return plan(present, spec).run(block) if present.mesh == spec.mesh else move_between_meshes(block, present, spec)


def blocks_like(x: torch.Tensor, spec: Spec) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same of tensors like x, in less time."""
    if spec_of_value(x) is not None:
        return functools.partial(block_of, spec=spec)
    whole = replicated(spec)
    return lambda y: plan(whole, spec).run(y.detach().contiguous())
