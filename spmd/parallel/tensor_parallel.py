"""Styles of tensor parallelism: layers whose weight is sharded, and layers that see a part of the sequence.

    up = ColwiseParallel()      x whole      ->  weight by columns  ->  features sharded     no communication
    down = RowwiseParallel()    features sharded  ->  weight by rows  ->  whole              one all-reduce

M. Shoeybi et al., Megatron-LM, arXiv:1909.08053; V. Korthikanti et al., arXiv:2205.05198, for the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spmd import _torch
from spmd.mesh import DeviceMesh
from spmd.parallel.boundary import entering, leaving
from spmd.parallel.layers import OUT, Layer, layer_of
from spmd.parallel.style import ParallelStyle
from spmd.tensor.eager.dtensor import DTensor, distribute_tensor
from spmd.tensor.eager.module import distribute_module
from spmd.tensor.placement import REPLICATE, Placement, Replicate, Shard


class _Style(ParallelStyle):
    """A style that is placements: of parameters, of the first input and of the output."""

    input_layouts: Placement
    output_layouts: Placement
    use_local_output: bool

    def desired_input(self, module: nn.Module) -> Placement:
        """Where the input is moved."""
        raise NotImplementedError

    def input_shape(self, module: nn.Module, x: torch.Tensor) -> tuple[int, ...] | None:
        """The global shape of a plain input, where it is known."""
        return None

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def place(name: str, sub: nn.Module, mesh: DeviceMesh) -> None:
            own = self.params(module) if sub is module else {}
            for key, p in list(sub.named_parameters(recurse=False)):
                if not isinstance(p, DTensor) and p.device.type != "meta":
                    sub.register_parameter(key, self._placed(p, mesh, own.get(key, REPLICATE)))

        patterns = {key: [p] for key, p in self.params(module).items()}
        return distribute_module(
            module, device_mesh, place, self._prepare, self._hand_out, params=patterns, init=self.init
        )

    def _placed(self, p: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
        placed = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=self.src_data_rank)
        return _torch.take_grad_dtype(nn.Parameter(placed, requires_grad=p.requires_grad), p)

    def _prepare(self, module: nn.Module, inputs: tuple, mesh: DeviceMesh) -> tuple:
        if not inputs or not isinstance(inputs[0], torch.Tensor):
            return inputs
        x, *others = inputs
        shape = self.input_shape(module, x)
        return (entering(x, mesh, self.input_layouts, self.desired_input(module), shape), *others)

    def _hand_out(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return leaving(output, mesh, None, self.output_layouts, self.use_local_output)


class _OfLayer(_Style):
    """A style of a linear layer or an embedding."""

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ):  # fmt: skip
        self.input_layouts = self._default_input if input_layouts is None else input_layouts
        self.output_layouts = self._default_output if output_layouts is None else output_layouts
        self.use_local_output = use_local_output

    _default_input: Placement = Replicate()
    _default_output: Placement = Replicate()

    def __repr__(self):
        said = f"input_layouts={self.input_layouts}, output_layouts={self.output_layouts}"
        return f"{type(self).__name__}({said}, use_local_output={self.use_local_output})"

    def __eq__(self, other):
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None

    def check(self, module: nn.Module, name: str) -> None:
        """TypeError for a module that is no linear layer or embedding."""
        _layer(module, name)

    def constraints(self) -> Mapping[str, Placement]:
        return {"output": self.output_layouts}


class ColwiseParallel(_OfLayer):
    """A linear layer or an embedding whose output features are shared out.

    input_layouts: how a plain input lies, by default replicated; it is gathered if it is sharded. output_layouts: how
    the output is to lie, by default sharded on its last dim. use_local_output: hand out this rank's block, or a
    DTensor. blocks: of how many equal layers a packed layer is made, such as 3 of queries, keys and values; each is
    shared out by itself. ValueError, before anything is changed, where they do not divide its features.

    >>> ColwiseParallel()
    ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=True)
    >>> ColwiseParallel(blocks=3).output_layouts
    Shard(-1, blocks=3)
    """

    def __init__(
        self, *, input_layouts: Placement | None = None, output_layouts: Placement | None = None,
        use_local_output: bool = True, blocks: int = 1,
    ):  # fmt: skip
        self.blocks = blocks
        output = Shard(-1, blocks=blocks) if output_layouts is None else output_layouts
        super().__init__(input_layouts=input_layouts, output_layouts=output, use_local_output=use_local_output)

    def check(self, module: nn.Module, name: str) -> None:
        """TypeError for a module that is no linear layer or embedding; ValueError for one of other blocks."""
        features = _layer(module, name).sizes(module)[OUT]
        if features % self.blocks:
            raise ValueError(f"ColwiseParallel: {name!r} has {features} features, which are no {self.blocks} blocks")

    def params(self, module: nn.Module) -> Mapping[str, Placement]:
        placed = _layer(module).sharded(OUT)
        return {name: Shard(p.dim, blocks=self.blocks) if p.is_shard() else p for name, p in placed.items()}

    def desired_input(self, module: nn.Module) -> Placement:
        return REPLICATE

    def constraints(self) -> Mapping[str, Placement]:
        return {"input": REPLICATE, "output": self.output_layouts}


class RowwiseParallel(_OfLayer):
    """A linear layer whose input features are shared out, or an embedding whose rows are.

    input_layouts: how a plain input lies, by default sharded on its last dim; of an embedding give Replicate().
    output_layouts: how the output is to lie, by default replicated, for which it is all-reduced. use_local_output: hand
    out this rank's block, or a DTensor.

    >>> RowwiseParallel(input_layouts=Replicate())
    RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate(), use_local_output=True)
    """

    _default_input = Shard(-1)

    def params(self, module: nn.Module) -> Mapping[str, Placement]:
        return _layer(module).sharded(_layer(module).inputs)

    def desired_input(self, module: nn.Module) -> Placement:
        return Shard(-1) if _layer(module).features is not None else REPLICATE

    def input_shape(self, module: nn.Module, x: torch.Tensor) -> tuple[int, ...] | None:
        features = _layer(module).features
        is_split = self.input_layouts in (Shard(-1), Shard(x.ndim - 1))
        return (*x.shape[:-1], features) if is_split and features is not None else None


class SequenceParallel(_Style):
    """A layer that computes with each position alone - a norm, dropout - on a part of the sequence for each rank.

    Its parameters are replicated. sequence_dim: the dim that is sharded, of input and output. A plain input is taken
    to be this rank's part; all parts are taken as equal. use_local_output: hand out this rank's block, or a DTensor.

    >>> SequenceParallel()
    SequenceParallel(sequence_dim=1, use_local_output=False)
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output
        self.input_layouts = self.output_layouts = Shard(sequence_dim)

    def __repr__(self):
        return f"SequenceParallel(sequence_dim={self.sequence_dim}, use_local_output={self.use_local_output})"

    def params(self, module: nn.Module) -> Mapping[str, Placement]:
        return {name: REPLICATE for name, _ in module.named_parameters()}

    def desired_input(self, module: nn.Module) -> Placement:
        return self.input_layouts

    def constraints(self) -> Mapping[str, Placement]:
        return {"input": self.input_layouts, "output": self.output_layouts}


def _layer(module: nn.Module, name: str = "this") -> Layer:
    found = layer_of(module)
    if found is None:
        raise TypeError(
            f"columns and rows are shared out of linear layers and embeddings, and {name!r} is a "
            f"{type(module).__name__}; name the layers in it, or give placements of its parameters"
        )
    return found
