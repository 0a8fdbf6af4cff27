"""Before a compiled step runs, the ranks compare what they are about to run, in one small exchange a call.

    program: 3f6a...                     which program
    step: train.py:31, object 2          which step: the line that compiled it, and its number among the objects met
    call: 17                             which call of it
    model: object 1                      which model and optimiser it gets
    optimizer.param_groups.0.lr: 0.001   numbers, and the values of small CPU tensors of the state

Without it, ranks that were called with different arguments would wait for each other for ever, or their replicas would
diverge. Tensors of one element on the CPU, such as counts of steps and learning rates, are read at every call: they
cost microseconds. Digests of the arguments are compared in the first calls of a step (`FIRST_CALLS`): whoever comes
from DistributedDataParallel has a loader that gives each rank other rows, and here each rank would take its part of its
own rows alone. Where $SPMD_CHECK_EQUAL is set to n, digests of the plain arguments, parameters and buffers are compared
at the first call of a step and at each n-th one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch

from spmd.comm import RanksDiffer, agree
from spmd.comm.numbered import Met
from spmd.expand.state import Slot, Tensors
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor.redistribute.replicas import check_replicas
from spmd.tensor.spec import Spec, spec_of_value

TO_BE_MADE = "to be made"
"""In the place of the program that a call runs."""


class SomeMakeIt(Exception):
    """Some ranks have a program for the call, and others have to make one: all are to make it, and to compare."""


def agree_on_call(
    step: object, site: str, what: str, mesh: DeviceMesh, text: str, objects: dict[str, object], small: Tensors,
    numbers: dict[str, float],
) -> int:  # fmt: skip
    """How often the step was called before, if all ranks make this call; if not, RuntimeError with a diff on all ranks.

    site: the line that compiled the step. text: which program the call runs, or that it is TO_BE_MADE. Raises
    SomeMakeIt on all ranks if that is so on some: one rank alone may keep notes in a module. objects: the modules and
    optimisers that it gets. small: the tensors whose values are compared, as `one_element` gives them.
    """
    met = Met.on(mesh).with_objects(step, *objects.values())
    calls = met.calls(step)
    lines = [
        f"program: {text}",
        f"step: compiled at {site}, object {met.number(step)}",
        f"call: {calls}",
        *(f"{path}: object {met.number(obj)}" for path, obj in objects.items()),
        *(f"{path}: {value!r}" for path, value in numbers.items()),
    ]
    # As they are: to bring a view that had to be copied up to date would send before the ranks have compared.
    blocks = [getattr(t, "_local_tensor", t) for t in small.values()]
    try:
        agree("\n".join(lines), mesh, what, key=_bits(blocks), more=lambda: _shown(list(map(str, small)), blocks))
    except RanksDiffer as error:
        making = {value.startswith(f"program: {TO_BE_MADE}\n") for value in error.values}
        if len(making) > 1:
            raise SomeMakeIt from None
        raise
    met.called(step).keep()
    return calls


def one_element(tensors: Tensors, specs: dict[Slot, Spec]) -> Tensors:
    """The CPU tensors of the state that hold one number. Buffers count once they are placed: that makes them equal."""
    numbers = [slot for slot, spec in specs.items() if not spec.shape and slot.kind in _SMALL_KINDS]
    found = {slot: tensors[slot] for slot in numbers}
    return {
        slot: t
        for slot, t in found.items()
        if t.device.type == "cpu" and (slot.kind != "buffer" or hasattr(t, "_spec"))
    }


_SMALL_KINDS = ("optimizer", "hyper", "buffer")


@per_rank
def _bits(blocks: list[torch.Tensor]) -> bytes:
    """The bits of tensors of one element."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for x in blocks:
        by_dtype.setdefault(x.dtype, []).append(x)
    with torch.no_grad():
        return b"".join(torch.stack(xs).view(torch.uint8).numpy().tobytes() for xs in by_dtype.values())


@per_rank
def _shown(names: list[str], blocks: list[torch.Tensor]) -> str:
    return "\n".join(f"{name}: {x.item()!r}" for name, x in zip(names, blocks, strict=True))


def calls_between_checks() -> int:
    """$SPMD_CHECK_EQUAL: after how many calls of a step digests are compared; 0 for never."""
    text = os.environ.get("SPMD_CHECK_EQUAL", "")
    if not text.isdecimal() and text:
        raise ValueError(f"$SPMD_CHECK_EQUAL is {text!r}; give after how many calls of a step to compare, or unset it")
    return int(text or 0)


def check_equal(what: str, mesh: DeviceMesh, leaves: dict[str, Any], tensors: Tensors) -> None:
    """RuntimeError on all ranks if a plain argument, or a replica of a parameter or buffer, differs between ranks."""
    plain = {path: x for path, x in leaves.items() if isinstance(x, torch.Tensor) and not hasattr(x, "_spec")}
    state = {str(slot): t for slot, t in tensors.items() if slot.kind in ("parameter", "buffer")}
    check_replicas(plain | state, mesh, what)


FIRST_CALLS = 3
"""In how many calls of a step the arguments are compared. A first batch alone may be equal by chance, as one of zeros
for warming up is; after three loaders of ranks have parted, if ever they do, and later calls cost nothing."""


def check_given(what: str, mesh: DeviceMesh, arguments: Mapping[str, Any], own: Collection[int]) -> None:
    """RuntimeError on all ranks if a plain tensor, or a block that several ranks are to give alike, differs. own: the
    arguments that stand for blocks of the ranks, by identity."""
    tensors = {path: x for path, x in arguments.items() if isinstance(x, torch.Tensor)}
    blocks = {path for path, x in tensors.items() if id(x) in own}
    compared = {path: x for path, x in sorted(tensors.items()) if path in blocks or spec_of_value(x) is None}
    if compared:
        check_replicas(compared, mesh, what, lambda path: _advice(path, path in blocks, mesh))


def _advice(path: str, is_block: bool, mesh: DeviceMesh) -> str:
    if is_block:
        return "they are at one place of the axes for which inputs say PerRank, so let them read the same rows"
    axis = mesh.axis_name(0)
    return (
        "a compiled step takes the global tensor, and each rank computes with its part of it. Give all ranks the same, "
        "from a loader without a DistributedSampler; or, if each rank has rows of its own, say so: "
        f'inputs={{"{path}": spmd.PerRank(Shard(0))}}, or {{"{path}": {{"{axis}": spmd.PerRank(Shard(0))}}}} for rows '
        "that differ along one axis alone"
    )
