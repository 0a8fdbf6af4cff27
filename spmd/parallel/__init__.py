"""Model code in parallel: styles for the modules of a model, with the names and meanings of torch.distributed.tensor.

    parallelize_module(model, mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})

Nothing here is a mechanism of its own: a style is placements of parameters, of inputs and of outputs.
"""

from spmd.parallel.parallelize import parallelize_module, placements_of
from spmd.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from spmd.parallel.style import ParallelStyle
from spmd.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel", "ParallelStyle", "PrepareModuleInput", "PrepareModuleInputOutput", "PrepareModuleOutput",
    "RowwiseParallel", "SequenceParallel", "parallelize_module", "placements_of",
]  # fmt: skip
