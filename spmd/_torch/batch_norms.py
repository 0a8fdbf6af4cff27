"""Batch norms that average over all batches, as the compiler traces them.

    nn.BatchNorm2d(64, momentum=None)      running_mean = the mean of the means of all n batches: momentum 1/n

torch makes a Python number of the count of batches, and a program has none for it. In a trace the count stays a tensor:
with a momentum of 1 torch's op gives the mean and the variance of the batch, and ops on tensors average them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

INSTEAD_OF_MODULES = (__file__,)
"""Code that runs in the place of torch's modules: what it reads of them, they read."""


@contextlib.contextmanager
def averages_traced() -> Iterator[None]:
    """Inside, in this thread, batch norms without a momentum compute with the count of batches as a tensor."""
    plain, thread = _BatchNorm.forward, threading.get_ident()

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        averages = _averages(module) and threading.get_ident() == thread
        return _averaged(module, x) if averages else plain(module, x)

    _BatchNorm.forward = forward
    try:
        yield
    finally:
        _BatchNorm.forward = plain


def _averages(module: nn.Module) -> bool:
    """Whether a call of a batch norm averages the running statistics over all batches."""
    has_count = module.track_running_stats and module.num_batches_tracked is not None
    return module.momentum is None and module.training and has_count


def _averaged(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    module._check_input_dim(x)
    module.num_batches_tracked.add_(1)
    running = module.running_mean, module.running_var
    of_batch = [torch.zeros_like(each) for each in running]
    out = F.batch_norm(x, *of_batch, module.weight, module.bias, True, 1.0, module.eps)
    share = module.num_batches_tracked.double().reciprocal()
    with torch.no_grad():
        for each, new in zip(running, of_batch, strict=True):
            each.mul_(1 - share).add_(new * share)
    return out
