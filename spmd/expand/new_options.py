"""Options that a step adds to parameter groups, as optimisers do in their first step.

    group["d"] = torch.tensor(0.5)      -> {("opt.param_groups.0", "d"): Slot("hyper", "opt.param_groups.0.d")}
    group["k"] = 1                      -> {("opt.param_groups.0", "k"): 1}
    group["lr_max"] = 2 * group["lr"]   -> {("opt.param_groups.0", "lr_max"): Slot("number", "opt. ... .lr_max")}

An option may be a list, a tuple or a dict of these. One that was None and is given a value counts as new. Once they are
there, they are tensors of the state and numbers as all options are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.state import Slot, State, Tensors, option_path

NewOptions = dict[tuple[str, Any], Any]
"""By the path of the group and the key, with slots in the place of tensors, and of numbers that the program gives."""

Numbers = dict[Slot, Any]

CONSTANTS = int, float, bool, str, complex, type(None), torch.dtype, torch.device
BOXES = dict, list, tuple


def new_options(
    before: Mapping[tuple[str, Any], Any], state: State, after: Tensors
) -> tuple[NewOptions, Numbers]:  # fmt: skip
    """The options that groups have and did not have before, and the numbers in them that a program computes.

    before, after: the options before the step, and the tensors of the state after it. RuntimeError for an option of
    another kind.
    """
    numbers: Numbers = {}
    slots = {id(x): slot for slot, x in after.items() if slot.kind == "hyper"}

    def written(x: Any, path: str) -> Any:
        if type(x) in BOXES:
            items = x.items() if type(x) is dict else enumerate(x)
            parts = {key: written(part, option_path(path, key)) for key, part in items}
            return parts if type(x) is dict else type(x)(parts.values())
        if isinstance(x, (torch.SymFloat, torch.SymInt)):
            numbers[slot := Slot("number", path)] = x
            return slot
        if isinstance(x, torch.Tensor):
            return slots[id(x)]
        if type(x) in CONSTANTS:
            return x
        raise RuntimeError(
            f"the step puts a {type(x).__name__} into {path}, which its program would not; put tensors, numbers, "
            "strings, and lists, tuples or dicts of these there, or put it there before the step"
        )

    return {
        (path, key): written(x, option_path(path, key))
        for (path, key), x in state.options().items()
        if x is not None and before.get((path, key)) is None
    }, numbers


def shapes_of(state: State) -> dict[Any, str]:
    """How many values are in the options that are lists, tuples or dicts, as text."""
    return {at: str(pytree.tree_structure(x)) for at, x in state.options().items() if type(x) in BOXES}


def check_shapes(before: Mapping[Any, str], state: State) -> None:
    """Raise if a list, tuple or dict among the options has tensors or numbers in other places than before.

    before: as `shapes_of` gave it.
    """
    now = shapes_of(state)
    for (path, key), x in state.options().items():
        old = before.get((path, key))
        if old not in (None, now.get((path, key))) and any(map(_is_of_trace, pytree.tree_leaves(x))):
            raise RuntimeError(
                f"the step changes how many values are in {option_path(path, key)}, which its program would not; "
                "let it have as many before the step, or keep it in the optimiser's state"
            )


def _is_of_trace(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or _torch.is_symbol(x)


def options_in(paths: Iterable[str], new: NewOptions) -> set[str]:
    """Those of these paths that lead into new options."""
    at = {option_path(*each) for each in new}
    inside = tuple(f"{path}." for path in at)
    return {path for path in paths if at and (path in at or path.startswith(inside))}


def check_memories(before: Tensors, after: Tensors, given: Mapping[Any, Any]) -> None:
    """Raise if state or options that a step has made share memory with other state, or with what it was given: each is
    a tensor of its own behind the program. before, after: the tensors of the state, as they are in the trace."""
    made = {s: x for s, x in after.items() if s.kind in ("optimizer", "hyper") and before.get(s) is not x}
    if not made:
        return
    known: dict[int | None, Any] = {}
    for at, x in {**given, **after}.items():
        other = known.setdefault(_torch.memory_of(x), at) if isinstance(x, torch.Tensor) else at
        if other is not at and (at in made or other in made):
            raise RuntimeError(
                f"the step lets {at} share memory with {other}, and its program would part the two: let it keep a "
                "clone()"
            )


def check_kept(state: State) -> None:
    """Raise if an optimiser keeps a tensor of the trace for something that is no parameter."""
    parameters = {id(p) for p in state.parameters().values()}
    for root, optimizer in state.optimizers.items():
        others = ((key, kept) for key, kept in optimizer.state.items() if id(key) not in parameters)
        for key, kept in others:
            if any(isinstance(x, _torch.FunctionalTensor) for x in pytree.tree_leaves(kept)):
                raise RuntimeError(
                    f"the step keeps a tensor in {root}.state[{key!r:.40}], which is no parameter, and its program "
                    "would not; keep it in a parameter group, such as group['d']"
                )
