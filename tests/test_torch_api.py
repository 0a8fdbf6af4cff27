"""What torch has, too, is called as torch has it: the same arguments in the same order, with the same defaults.

Arguments that spmd has alone come by keyword, so that they are in nobody's way.
"""

import inspect

import pytest
from torch.distributed import device_mesh, fsdp
from torch.distributed import tensor as dtensor
from torch.distributed.checkpoint import state_dict
from torch.distributed.tensor import debug, experimental, parallel

import spmd
import spmd.checkpoint
import spmd.debug
import spmd.parallel

PAIRS = [
    (spmd, dtensor), (spmd, device_mesh), (spmd, experimental), (spmd.parallel, parallel),
    (spmd.parallel, experimental), (spmd.parallel, fsdp), (spmd.checkpoint, state_dict), (spmd.debug, debug),
]  # fmt: skip

OTHERWISE = {
    "fully_shard": frozenset({"dp_mesh_dims"}),  # docs/from-torch.md: what is missing
    "DeviceMesh": frozenset({"mesh"}),  # torch makes one of a layout, too, by private arguments
}
"""Arguments of torch's that there are not here, or that have another default."""

MISSING = {
    "set_custom_all_gather", "set_custom_reduce_scatter", "set_allocate_memory_from_process_group_for_comm",
    "set_reduce_scatter_max_input_buffers", "set_separate_reduce_scatter_group", "set_symm_mem_for_comm",
    "generate_json_dump", "ALL_REDUCE_OPS", "LINEAR_REDUCE_OPS", "local_shard_size_and_offset",
}  # fmt: skip
"""Attributes of torch's classes that there are not here."""

SHARED = [
    (f"{ours.__name__}.{name}", getattr(ours, name), getattr(theirs, name))
    for ours, theirs in PAIRS
    for name in sorted(set(ours.__all__) & set(dir(theirs)))
    if callable(getattr(theirs, name)) and getattr(ours, name) is not getattr(theirs, name)
]


def own_names(cls: type) -> set[str]:
    """The public names of a class of torch.distributed, but for what it has of tensors, tuples and modes."""
    others = [base for base in cls.__mro__[1:] if not base.__module__.startswith("torch.distributed")]
    return {name for name in dir(cls) if not name.startswith("_") and not any(hasattr(base, name) for base in others)}


def parameters(function: object) -> dict[str, tuple]:
    """By name: whether by keyword alone, and the default. Nothing of what torch has in C++, which tells none."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        return {}
    return {p.name: (p.kind is p.KEYWORD_ONLY, repr(p.default)) for p in found if not p.name.startswith("_")}


def differences(ours: object, theirs: object, otherwise: frozenset[str] = frozenset()) -> list[str]:
    mine, wanted = parameters(ours), parameters(theirs)
    shared = [name for name in wanted if name not in otherwise]
    found = [f"{name}{wanted[name]} is {mine.get(name)}" for name in shared if mine.get(name) != wanted[name]]
    if [name for name in mine if name in shared] != [name for name in shared if name in mine]:
        found.append(f"another order: {list(mine)}")
    more = [name for name in mine if wanted and name not in wanted]
    return found + [f"{name} is not by keyword" for name in more if not mine[name][0]]


@pytest.mark.parametrize("name, ours, theirs", SHARED, ids=[name for name, _, _ in SHARED])
def test_a_name_takes_what_torchs_takes(name, ours, theirs):
    found = differences(ours, theirs, OTHERWISE.get(name.split(".")[-1], frozenset()))
    for method in sorted(own_names(theirs) - MISSING) if inspect.isclass(theirs) else ():
        assert hasattr(ours, method), f"{name} has no {method}"
        found += [f"{method}: {text}" for text in differences(getattr(ours, method), getattr(theirs, method))]
    assert found == []
