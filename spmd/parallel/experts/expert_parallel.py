"""ExpertParallel: each rank has some of the experts of a layer, and gets the tokens that are for them.

    parallelize_module(model, mesh["ep"], {"model.layers.*.mlp.experts": ExpertParallel()})

The layer has all experts in one tensor for each kind of weight, [experts, ...], and is called as transformers calls
the experts of Mixtral, Qwen-MoE and others: experts(tokens, index, weights). Its own forward runs, unchanged, on this
rank's experts and the tokens that came for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from spmd import _torch
from spmd.comm.chunk import lengths
from spmd.mesh import DeviceMesh
from spmd.parallel.blocks import place_parameters
from spmd.parallel.experts.dispatch import Capacity, Dispatch, Dropless
from spmd.parallel.experts.each_rank import on_each_rank
from spmd.parallel.experts.ragged import ragged_experts
from spmd.parallel.experts.whole import has_usual_weights, whole_experts
from spmd.parallel.style import ParallelStyle
from spmd.tensor.annotations.constraint import capturing
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import Placement, Shard


class ExpertParallel(ParallelStyle):
    """A layer of experts that is shared out: its parameters are sharded on their first dim, evenly or not.

    The layer is called with [tokens, features], [tokens, k] experts of each token, and [tokens, k] weights; an expert
    that is the number of experts is none. The tokens are this rank's own; as DTensors, sharded on their first dim by
    the axis.

    capacity_factor: how many tokens an expert takes of a rank, in units of what it gets if all get as much; what is
    beyond is dropped, in order of the tokens. None takes all. average_gradients: the gradients of experts are averages
    over the ranks' losses, as `fully_shard` and `data_parallel` make them of other parameters; of DTensors, and
    otherwise, they are sums. padded: without a capacity, a compiled step pads what each rank sends to the most that can
    come, so that the sizes of its moves are known, and shown, counted and scheduled with the program. False sends what
    is there, as eagerly: sizes are read on the host where the exchange stands, a program serves one number of tokens,
    and experts' weights are gathered over axes that shard them further.

    >>> ExpertParallel(capacity_factor=1.25)
    ExpertParallel(capacity_factor=1.25)
    >>> ExpertParallel(padded=False)
    ExpertParallel(padded=False)
    """

    def __init__(self, *, capacity_factor: float | None = None, average_gradients: bool = True, padded: bool = True):
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"ExpertParallel: capacity_factor is {capacity_factor}; give a positive number, or None")
        if capacity_factor is not None and not padded:
            raise ValueError("ExpertParallel: with a capacity_factor sizes are known; leave out padded=False")
        self.padded = padded
        self.capacity_factor, self.average_gradients = capacity_factor, average_gradients

    def __repr__(self):
        said = "" if self.capacity_factor is None else f"capacity_factor={self.capacity_factor}"
        said += "" if self.padded else "padded=False"
        return f"ExpertParallel({said})"

    def params(self, module: nn.Module) -> Mapping[str, Placement]:
        return {name: Shard(0) for name, _ in module.named_parameters(recurse=False)}

    def check(self, module: nn.Module, name: str) -> None:
        """TypeError for a module whose parameters are not all of as many experts."""
        every, own = list(module.parameters()), list(module.parameters(recurse=False))
        sizes = {p.shape[0] if p.ndim else 0 for p in every}
        if len(sizes) != 1 or len(every) > len(own) or max(p.ndim for p in own) < 3:
            raise TypeError(
                f"ExpertParallel: {name!r} is a {type(module).__name__} whose parameters have {sorted(sizes)} entries "
                "on their first dim; it takes a layer with one tensor of all experts for each kind of weight, of "
                "[experts, ...]"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place_parameters(module, device_mesh, self.params(module), self.src_data_rank)
        module.__class__ = _shared_out(type(module))
        module._expert_parallel, module._expert_mesh = self, device_mesh
        return module


class SharedExperts(nn.Module):
    """What a layer of experts is once it is shared out."""

    _expert_parallel: ExpertParallel
    _expert_mesh: DeviceMesh

    @_torch.left_out_by_dynamo  # which tokens go where is of each call: code for these sizes would serve no other
    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor):
        x, mesh = hidden_states, self._expert_mesh
        if capturing() is not None:
            return self._of_all(x, top_k_index, top_k_weights)
        if not isinstance(x, DTensor):
            share = mesh.size() if self._expert_parallel.average_gradients else 1
            return self._of_own(x, top_k_index, top_k_weights, share)
        if x.device_mesh != mesh or not x.placements[0].is_shard(0):
            raise ValueError(
                f"ExpertParallel: the tokens are {x._spec}, and the experts on {mesh!r}; give x.redistribute(mesh, "
                "[Shard(0)]) on that mesh, or plain tensors of this rank's tokens"
            )
        blocks = [y.redistribute(placements=x.placements).to_local() for y in (x, top_k_index, top_k_weights)]
        most = lengths(x.shape[0], x._spec.units[0], (mesh.size(),))[0]
        return DTensor.from_local(self._of_own(*blocks, 1, most), mesh, x.placements, shape=x.shape)

    def _of_own(
        self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, share: int, most: int | None = None
    ) -> torch.Tensor:
        """Of this rank's tokens. share: what the gradients of experts are divided by. most: as of `Capacity`."""
        mesh, factor = self._expert_mesh, self._expert_parallel.capacity_factor
        named = {name: p for name, p in self._parameters.items() if p is not None}
        experts = next(iter(named.values())).shape[0]
        sent: Dispatch = (
            Dropless.of(index, experts, mesh) if factor is None else Capacity.of(index, experts, mesh, factor, most)
        )
        tokens, ids = sent.out(x)
        blocks = [_divided(p.to_local(), share) for p in named.values()]
        return sent.back(on_each_rank(functools.partial(self._computed, tuple(named)), tokens, ids, *blocks), weights)

    def _computed(self, names: Sequence[str], tokens: torch.Tensor, ids: torch.Tensor, *blocks: torch.Tensor):
        """The layer's own forward, of the experts and tokens that this rank has."""
        with self._parameters_are(dict(zip(names, blocks, strict=True))):
            y = tokens
            if len(blocks[0]):  # modules of no experts are an error in some versions of transformers
                y = super().forward(tokens, ids.unsqueeze(1), tokens.new_ones(len(ids), 1))
            if not len(ids):  # the ranks whose tokens are computed elsewhere wait for this rank's backward, too
                y = _DependsOn.apply(y, tokens, *blocks)
        return y

    def _of_all(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """In a compiled step, where tensors are global."""
        if not has_usual_weights(self):
            raise NotImplementedError(
                f"ExpertParallel: a compiled step computes experts with gate_up_proj [experts, 2 f, d], down_proj "
                f"[experts, d, f] and act_fn, and {type(self).__name__} has others; run it eagerly"
            )
        mesh, style = self._expert_mesh, self._expert_parallel
        if not style.padded:
            return ragged_experts(self, x, index, weights, capturing().mesh, mesh.axis_name(0))
        return whole_experts(self, x, index, weights, mesh, style.capacity_factor)

    @contextmanager
    def _parameters_are(self, blocks: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Inside, the layer has these parameters, and as many experts."""
        kept, count = dict(self._parameters), vars(self).get("num_experts")
        self._parameters.update(blocks)
        if count is not None:
            self.num_experts = next(iter(blocks.values())).shape[0]
        try:
            yield
        finally:
            self._parameters.update(kept)
            if count is not None:
                self.num_experts = count


@functools.lru_cache(maxsize=1024)
def _shared_out(cls: type) -> type:
    return type(f"Shared{cls.__name__}", (SharedExperts, cls), {})


def _divided(block: torch.Tensor, share: int) -> torch.Tensor:
    if share > 1 and block.requires_grad:
        block.register_hook(lambda g: g / share)
    return block


class _DependsOn(torch.autograd.Function):
    """The first tensor, for autograd computed from the others, too: their gradients are zero."""

    @staticmethod
    def forward(ctx, y, *others):
        ctx.others = [(x.shape, x.dtype, x.device) for x in others]
        return y.view_as(y)

    @staticmethod
    def backward(ctx, g):
        return g, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
