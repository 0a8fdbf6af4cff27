"""Layers that tensor parallelism knows: which dims of their parameters are output features, and which are inputs.

nn.Linear       weight [out, in], bias [out]
nn.Embedding    weight [rows, out]
Conv1D          weight [in, out], bias [out]     transformers' GPT-2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from spmd.tensor.placement import REPLICATE, Placement, Shard

OUT, IN, ROWS = "out", "in", "rows"


@dataclass(frozen=True)
class Layer:
    """What the dims of a layer's parameters are. features: how many features come in; None for an embedding."""

    dims: Mapping[str, tuple[str, ...]]
    features: int | None

    @property
    def inputs(self) -> str:
        """What the inputs of the layer run over: features, or rows of a table."""
        return ROWS if self.features is None else IN

    def sizes(self, module: nn.Module) -> dict[str, int]:
        """How many there are of what its weight runs over."""
        return dict(zip(self.dims["weight"], module.weight.shape, strict=True))

    def sharded(self, what: str) -> dict[str, Placement]:
        """The placements of the parameters where `what` is shared out; parameters without it are replicated."""
        return {name: Shard(dims.index(what)) if what in dims else REPLICATE for name, dims in self.dims.items()}


def layer_of(module: nn.Module) -> Layer | None:
    """The layer that a module is; None for other modules."""
    dims, features = _dims(module)
    present = {name: d for name, d in dims.items() if getattr(module, name, None) is not None}
    return Layer(present, features) if present else None


def _dims(module: nn.Module) -> tuple[dict[str, tuple[str, ...]], int | None]:
    if isinstance(module, nn.Linear):
        return {"weight": (OUT, IN), "bias": (OUT,)}, module.in_features
    if isinstance(module, nn.Embedding):
        return {"weight": (ROWS, OUT)}, None
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of transformers, which need not be there
        return {"weight": (IN, OUT), "bias": (OUT,)}, module.weight.shape[0]
    return {}, None
