"""A stage of torch's pipelines whose gradients are sent once a step, and not once a micro-batch.

    stage = PipelineStage(part, i, n, device, group=mesh.get_group("pp"))       # torch.distributed.pipelining
    Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn).step(x)

torch's stage knows its own data-parallel modules, and waits for the last micro-batch with those alone.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.distributed import pipelining

from spmd.parallel.fully_sharded.fully_shard import groups_in


class PipelineStage(pipelining.PipelineStage):
    """torch's `PipelineStage`, with the same arguments, for modules of `fully_shard` and `data_parallel`.

    Between micro-batches whole parameters and whole gradients of `fully_shard` stay in memory, as with torch's own. The
    schedule has them reduced at the end of the step; shards are averages over the data-parallel ranks.
    """

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
