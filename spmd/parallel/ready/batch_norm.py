"""GlobalBatchNorm: batch norms whose mean and variance are those of the batch of all ranks.

    parallelize_module(model, mesh["dp"], {"norm": GlobalBatchNorm()})

Data-parallel ranks see parts of a batch, and a mean of a part is another number. Each call sends two small
all-reduces, of sums and of squares around the mean, and its backward two for their gradients.
"""

from __future__ import annotations

import torch
from torch import nn

from spmd.comm import all_reduce, wait
from spmd.mesh import DeviceMesh
from spmd.parallel.style import ParallelStyle
from spmd.tensor.annotations.constraint import capturing

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


class GlobalBatchNorm(ParallelStyle):
    """A batch norm of the batches of all ranks of a mesh of one axis or several; each has its own part, of any size.

    Parameters and running statistics stay plain, and equal on all ranks. Gradients are those of this rank's loss, as
    `data_parallel` and `fully_shard` average them. S. Ioffe and C. Szegedy, arXiv:1502.03167.

    >>> from spmd.parallel import parallelize_module
    >>> norm = parallelize_module(nn.BatchNorm1d(2), DeviceMesh("cpu", [0]), GlobalBatchNorm())
    >>> norm(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).detach().round()
    tensor([[-1., -1.],
            [ 1.,  1.]])
    """

    def __repr__(self):
        return "GlobalBatchNorm()"

    def check(self, module: nn.Module, name: str) -> None:
        """TypeError for another module than a batch norm."""
        if not isinstance(module, BATCH_NORMS):
            raise TypeError(f"GlobalBatchNorm: {name!r} is a {type(module).__name__}; it takes batch norms")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.__class__ = _of_all_ranks(type(module))
        module._batch_mesh = device_mesh if device_mesh.ndim == 1 else device_mesh.flatten()
        return module


class OfAllRanks(nn.Module):
    """What a batch norm is then."""

    _batch_mesh: DeviceMesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if capturing() is not None or not (self.training or self.running_mean is None):
            return super().forward(x)  # in a compiled step tensors are global
        self._check_input_dim(x)
        mean, variance, n = _statistics(x, self._batch_mesh)
        self._note(mean, variance, n)
        shape = [1, -1] + [1] * (x.ndim - 2)
        out = ((x - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)).to(x.dtype)
        return out if self.weight is None else out * self.weight.view(shape) + self.bias.view(shape)

    @torch.no_grad()
    def _note(self, mean: torch.Tensor, variance: torch.Tensor, n: torch.Tensor) -> None:
        """Running statistics, with the variance of n - 1 numbers, as torch keeps them."""
        if not self.track_running_stats:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * n / (n - 1)).to(self.running_var.dtype), share)


def _statistics(x: torch.Tensor, mesh: DeviceMesh) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and variance of each channel, and of how many numbers.

    Squares are summed around the mean of all: a mean of squares less a square would cancel.
    """
    x = x.double() if x.dtype is torch.float64 else x.float()
    dims = [d for d in range(x.ndim) if d != 1]
    own = x.new_tensor(x.numel() // x.shape[1])
    total = _sum(torch.cat([x.sum(dims), own.view(1)]), mesh)
    mean, n = total[:-1] / total[-1], total[-1].detach()
    shape = [1, -1] + [1] * (x.ndim - 2)
    return mean, _sum((x - mean.view(shape)).square().sum(dims), mesh) / n, n


def _sum(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return wait(all_reduce(x, "sum", mesh)) if mesh.size() > 1 else x


def _of_all_ranks(kind: type) -> type:
    """The class of a batch norm of all ranks, one for each class of modules."""
    for made in kind.__subclasses__():
        if made.__bases__ == (OfAllRanks, kind):
            return made
    return type(f"Global{kind.__name__}", (OfAllRanks, kind), {"__module__": kind.__module__})
