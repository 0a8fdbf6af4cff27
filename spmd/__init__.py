"""spmd: write a PyTorch model and a train step for one device, run them on a mesh of ranks with the same numbers."""

import gc
import importlib

# `import torch` leaves a full collection of garbage due, which takes as long as all of these imports together, and
# finds nothing: modules stay. It may wait until something else is done.
_collects = gc.isenabled()
gc.disable()
try:
    from spmd.comm import CommTensor, mesh_broadcast, mesh_scatter, shard_dim_alltoall
    from spmd.mesh import DeviceMesh, MeshTopoInfo, init_device_mesh
    from spmd.sim import LocalTensor, LocalTensorMode
    from spmd.tensor.eager.constrain import constrain
    from spmd.tensor.eager.dtensor import DTensor, distribute_tensor
    from spmd.tensor.eager.factories import empty, full, ones, rand, randn, zeros
    from spmd.tensor.eager.local_map import local_map
    from spmd.tensor.eager.module import distribute_module
    from spmd.tensor.eager.plain_tensors import implicit_replication
    from spmd.tensor.modes.deterministic import deterministic, set_deterministic
    from spmd.tensor.modes.explicit import ImplicitCommunicationError, explicit, set_explicit
    from spmd.tensor.placement import Partial, PerRank, Placement, Replicate, Shard
    from spmd.tensor.recipes.stream import get_rng_state, manual_seed, recompute, set_rng_state
    from spmd.tensor.redistribute.plan import plan_redistribute, redistribute_cost
    from spmd.tensor.rules import equations as rules
    from spmd.tensor.rules.register import register_rule
finally:
    if _collects:
        gc.enable()

__version__ = "0.1.0"

__all__ = [
    "CommTensor", "CompiledStep", "DTensor", "DeviceMesh", "FullyShard", "ImplicitCommunicationError",
    "LocalTensor", "LocalTensorMode", "MeshTopoInfo", "MixedPrecision", "Partial", "PerRank", "Placement", "Places",
    "Program",
    "Replicate", "Shard", "StaleStep", "UnreadableStep", "compile", "constrain", "debug", "deterministic",
    "distribute_module", "distribute_tensor", "empty", "explicit", "full", "get_rng_state", "implicit_replication",
    "init_device_mesh", "load_step", "local_map", "manual_seed",
    "mesh_broadcast", "mesh_scatter", "ones", "parallel", "plan_redistribute", "rand", "randn", "recompute",
    "redistribute_cost",
    "register_rule", "rules", "set_deterministic", "set_explicit", "set_rng_state", "shard_dim_alltoall", "zeros",
]  # fmt: skip


_LATER = {
    "CompiledStep": "spmd.expand.compile", "FullyShard": "spmd.expand.places.fully_shard",
    "MixedPrecision": "spmd.expand.precision", "Places": "spmd.expand.places.places",
    "Program": "spmd.expand.program", "StaleStep": "spmd.expand.kept.library",
    "UnreadableStep": "spmd.expand.kept.archive", "compile": "spmd.expand.compile",
    "load_step": "spmd.expand.kept.load",
}  # fmt: skip
"""Where names are that are imported when they are first asked for: eager code does without the compiler."""


def __getattr__(name: str):
    if name in ("debug", "parallel"):
        return importlib.import_module(f"spmd.{name}")
    if name not in _LATER:
        raise AttributeError(f"module 'spmd' has no attribute {name!r}")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found
    return found


def __dir__():
    return sorted({*globals(), *__all__})
