"""What a training must be of one device, in float64, and how models compute in float64 throughout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

APART = 1e-10
"""How far a loss or a parameter may be from one device, in float64."""


@contextlib.contextmanager
def all_in_float64() -> Iterator[None]:
    """Inside, models that ask for float32 by name get float64, also where a capture has its own kind of tensor."""
    kept = torch.float32, torch.float, torch.Tensor.float, FunctionalTensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float, FunctionalTensor.float = torch.Tensor.double, FunctionalTensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float, FunctionalTensor.float = kept
