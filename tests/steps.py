"""The plain step of training that many tests compile."""

from __future__ import annotations

import torch
from torch import nn


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    """One step for the mean of the squares of what the model gives. Returns that mean."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
