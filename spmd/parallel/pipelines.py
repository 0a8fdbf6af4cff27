"""A stage of torch's pipelines on a mesh: its micro-batches in parts, its gradients sent once a step.

    stage = PipelineStage(part, i, n, device, group=mesh.get_group("pp"), mesh=mesh["dp"])
    Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn).step(x)      # torch.distributed.pipelining

torch's stage knows its own data-parallel modules, and waits for the last micro-batch with those alone. It gives a
module what it was given itself, so that whoever calls it has to cut the batch.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.distributed import pipelining

from spmd.mesh import DeviceMesh
from spmd.parallel.fully_sharded.fully_shard import groups_in
from spmd.parallel.micro_batches import share_out


class PipelineStage(pipelining.PipelineStage):
    """torch's `PipelineStage`, with the same arguments, for modules of `fully_shard` and `data_parallel`.

    Between micro-batches whole parameters and whole gradients of `fully_shard` stay in memory, as with torch's own. The
    schedule has them reduced at the end of the step; shards are averages over the data-parallel ranks.

    mesh: the ranks of this stage that share out the rows of each micro-batch. All of them give the schedule the whole
    batch; the first stage cuts micro-batches, and parts go from stage to stage. Modules of `fully_shard` and
    `data_parallel` compute with plain parts, others with DTensors, whose rows are sharded over the mesh. The last stage
    gives the loss function DTensors, so that its loss is that of one device, and gradients are those of this loss.
    """

    def __init__(self, submodule: nn.Module, *args: Any, mesh: DeviceMesh | None = None, **kwargs: Any) -> None:
        super().__init__(submodule, *args, **kwargs)
        if mesh is not None:
            share_out(submodule, mesh, self.is_first, self.is_last)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict, last_backward: bool = False
    ) -> tuple[Any, Any]:
        """The backward pass of a micro-batch."""
        for group in dict.fromkeys(groups_in(self.submod)):
            group.requires_gradient_sync = group.reshard_after_backward = False
        no_sync = getattr(self.submod, "no_sync", contextlib.nullcontext)
        with contextlib.nullcontext() if last_backward else no_sync():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """What is left to do when all micro-batches had their backward passes."""
        for group in dict.fromkeys(groups_in(self.submod)):
            group.requires_gradient_sync = group.reshard_after_backward = True
            group.reduce_kept()
            group.reshard()
        super().perform_reduce_grad(grad_scale_factor)
