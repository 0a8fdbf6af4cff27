"""A parallel style: what one module of a plan becomes.

    class Rows(ParallelStyle):
        def _apply(self, module, device_mesh):
            return distribute_module(module, device_mesh, params={"weight": [Shard(0)]})

Styles of torch's users define `_apply` alone. Those of spmd are values that say what they do before they do it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import nn

from spmd.mesh import DeviceMesh
from spmd.tensor.eager.meta_models import Init
from spmd.tensor.placement import Placement


class ParallelStyle(ABC):
    """What `parallelize_module` does to a module. `_apply` does it; the other methods tell of it before.

    src_data_rank: the rank whose values parameters take, as in `distribute_tensor`. init: how parameters on the meta
    device get numbers, as in `distribute_module`. `parallelize_module` sets both.
    """

    src_data_rank: int | None = 0
    init: Init = True

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Make the module parallel on a mesh of one axis, in place, and return it."""

    def params(self, module: nn.Module) -> Mapping[str, Placement]:
        """The placements of the module's own parameters, by name; of a style that does not tell, none."""
        return {}

    def constraints(self) -> Mapping[str, Placement]:
        """Where "input" and "output" lie in a compiled step; what is absent is open."""
        return {}

    def check(self, module: nn.Module, name: str) -> None:  # noqa: B027 - a style may take any module
        """Raise ValueError or TypeError if the module cannot have this style. Nothing is changed."""
