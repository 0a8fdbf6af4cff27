"""Functions of torch that take torch's meshes, and would half accept one of spmd.

    torch.distributed.fsdp.fully_shard(model, mesh=mesh)      TypeError: ... use spmd.parallel.fully_shard ...

All of them first ask whether they were given a mesh, `mesh or default`: that is where they can be told. A DTensor
meets most of them as a plain tensor in a collective, which is an error; fully_shard asks it whether it is contiguous,
and functions for state dicts look parameters up in a table.
"""

from __future__ import annotations

import sys

_TAKE_TORCHS_MESHES = ("torch.distributed.tensor.", "torch.distributed.fsdp.", "torch.distributed._composable.")

_STATE_DICTS = "torch.distributed.checkpoint.state_dict"

_INSTEAD = {
    "parallelize_module": "spmd.parallel.parallelize_module, or spmd.compile with params={name: placements}",
    "fully_shard": "spmd.parallel.fully_shard, or spmd.compile with fully_shard=",
    "distribute_module": "spmd.distribute_module",
    "distribute_tensor": "spmd.distribute_tensor",
    "from_local": "spmd.DTensor.from_local",
    "local_map": "spmd.local_map",
    "zeros": "spmd.zeros",
    "ones": "spmd.ones",
    "empty": "spmd.empty",
    "full": "spmd.full",
    "rand": "spmd.rand",
    "randn": "spmd.randn",
}


def check_is_not_fsdp(what: str) -> None:
    """TypeError if the caller's caller is torch's fully_shard, which would shard the blocks of a DTensor again."""
    if sys._getframe(2).f_globals.get("__name__", "").startswith("torch.distributed.fsdp."):
        raise TypeError(
            f"torch.distributed.fsdp.fully_shard takes models of plain tensors, and was given {what}; use "
            f"{_INSTEAD['fully_shard']}, or redistribute"
        )


def check_asks_for_no_whole_state() -> None:
    """TypeError if the caller's caller is torch's function for state dicts and was asked for whole tensors.

    It gathers tensors of torch's own class alone. It would hand out others as they are, blocks, under the name of a
    full state dict.
    """
    frame = sys._getframe(2)
    if frame.f_code.co_name != "_verify_options" or frame.f_globals.get("__name__") != _STATE_DICTS:
        return
    if frame.f_locals["options"].full_state_dict:
        raise TypeError(
            "torch.distributed.checkpoint.state_dict with full_state_dict=True knows torch's DTensor alone, and would "
            "take blocks of spmd's for whole tensors; use the functions of the same names in spmd.checkpoint"
        )


def check_caller() -> None:
    """TypeError if the caller's caller is a function of torch that takes torch's meshes."""
    frame = sys._getframe(2)
    where = f"{frame.f_globals.get('__name__', '')}."
    if where.startswith(_TAKE_TORCHS_MESHES):
        name = frame.f_code.co_name
        raise TypeError(
            f"{where}{name} takes a mesh of torch.distributed, and was given one of spmd, whose tensors it does not "
            f"know; use {_INSTEAD.get(name, 'the function of spmd for it')}"
        )
