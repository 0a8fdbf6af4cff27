"""ReplicatedParameters: a module between layers by columns and by rows, such as a norm of queries, gets DTensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from spmd.mesh import DeviceMesh
from spmd.parallel.style import ParallelStyle
from spmd.tensor.eager.module import distribute_module
from spmd.tensor.placement import REPLICATE, Placement


class ReplicatedParameters(ParallelStyle):
    """The parameters of a module are the same on all ranks, and their gradients are those of all ranks' parts.

    >>> ReplicatedParameters()
    ReplicatedParameters()
    """

    def __repr__(self):
        return "ReplicatedParameters()"

    def params(self, module: nn.Module) -> Mapping[str, Placement]:
        return {name: REPLICATE for name, _ in module.named_parameters()}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, init=self.init)
