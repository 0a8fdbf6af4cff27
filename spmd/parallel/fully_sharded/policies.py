"""What a user says of a group: dtypes to compute with and to send, and where shards are kept between uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a sharded module computes. Shards, and so the optimiser, keep the dtype of the parameters.

    param_dtype: of the gathered parameters, in which they are sent as well. reduce_dtype: in which gradients are sent
    and summed; by default that of the gradients. output_dtype: of floating-point outputs. cast_forward_inputs: cast
    floating-point inputs to `param_dtype`. None leaves a dtype as it is.

    >>> MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32).output_dtype
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Shards stay on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimiser's state are in host memory; a gather copies them to the device.

    pin_memory: keep them in pages that the device can read by itself.
    """

    pin_memory: bool = True
