"""Model code in parallel: styles for the modules of a model, with the names and meanings of torch.distributed.tensor.

    parallelize_module(model, mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})

Nothing here is a mechanism of its own: a style is placements of parameters, of inputs and of outputs.
"""

import importlib

from spmd.parallel.clip import clip_grad_norm_
from spmd.parallel.context.context_parallel import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
)
from spmd.parallel.data_parallel import data_parallel
from spmd.parallel.experts.balance import load_balancing_loss
from spmd.parallel.experts.expert_parallel import ExpertParallel
from spmd.parallel.fully_sharded.fully_shard import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method
from spmd.parallel.fully_sharded.policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from spmd.parallel.losses.linear_cross_entropy import linear_cross_entropy
from spmd.parallel.losses.loss_parallel import loss_parallel
from spmd.parallel.parallelize import parallelize_module, placements_of
from spmd.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from spmd.parallel.ready.batch_norm import GlobalBatchNorm
from spmd.parallel.ready.plan import ReadyPlan
from spmd.parallel.ready.plan_for import plan_for
from spmd.parallel.style import ParallelStyle
from spmd.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "CPUOffloadPolicy", "ColwiseParallel", "ExpertParallel", "FSDPModule", "GlobalBatchNorm", "MixedPrecisionPolicy",
    "OffloadPolicy", "ParallelStyle", "PipelineStage", "PrepareModuleInput", "PrepareModuleInputOutput",
    "PrepareModuleOutput", "ReadyPlan", "RowwiseParallel", "SequenceParallel", "UnshardHandle", "clip_grad_norm_",
    "context_parallel", "context_parallel_shard", "context_parallel_unshard", "data_parallel", "from_torch",
    "fully_shard", "linear_cross_entropy", "load_balancing_loss", "loss_parallel", "parallelize_module",
    "placements_of", "plan_for", "register_fsdp_forward_method", "to_torch",
]  # fmt: skip


_LATER = {
    "PipelineStage": "spmd.parallel.pipelines", "from_torch": "spmd.parallel.exchange",
    "to_torch": "spmd.parallel.exchange",
}  # fmt: skip
"""Where names are that are imported when they are first asked for: torch's own DTensor and pipelines take a second."""


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module 'spmd.parallel' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(_LATER[name]), name)
    return found


def __dir__():
    return sorted({*globals(), *__all__})
