"""plan_for: a plan for a stock model on a mesh, by the model's structure; nothing is changed and nothing is sent.

    plan_for(GPT2LMHeadModel(config), init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")))

Tensor parallelism is for pairs of layers (`pairs`), for the table of words and for the head; experts go to an axis of
their own; the batch, and with it parameters in shards, to all other axes. Layers hand out DTensors, so code between
them computes what it computes on one device, whatever it does with sizes and heads. Where transformers' own plan says
that the code works on blocks, it gets blocks, which is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

import torch
from torch import nn

from spmd.mesh import DeviceMesh
from spmd.parallel.experts.expert_parallel import ExpertParallel
from spmd.parallel.ready import sends
from spmd.parallel.ready.batch_norm import BATCH_NORMS, GlobalBatchNorm
from spmd.parallel.ready.pairs import Pair, linears_in, pairs_in
from spmd.parallel.ready.plan import ReadyPlan
from spmd.parallel.ready.replicated import ReplicatedParameters
from spmd.parallel.style import ParallelStyle
from spmd.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from spmd.tensor.annotations.patterns import matches_module
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import Placement, Replicate

DATA = "fully_shard", "data_parallel"


def plan_for(
    model: nn.Module, mesh: DeviceMesh, *, tp: str = "tp", ep: str = "ep", data: str = "fully_shard"
) -> ReadyPlan:
    """What a stock model would become on a mesh: a value to print, and then to apply.

    model: of plain tensors, also on the meta device. tp: the axis for pairs of layers, words and the head; ep: the axis
    for experts, which share out the batch, too. Axes that the mesh does not have are not used. All other axes share out
    the batch: with data="fully_shard" parameters are stored in shards, of two axes over the second, with copies over
    the first; with "data_parallel" each rank has all of them. Batch norms are those of the whole batch.

    Heads that the axis does not divide, and layers that are no pair, are left whole, and the plan says why. Each rank
    computes the mean loss of its part of the batch; parts are equal.

    Raises TypeError for a model or a mesh that is none, ValueError for an unknown `data`, for DTensors, for more than
    two axes of data, and for experts beside "data_parallel".

    >>> mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    >>> print(plan_for(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), mesh))
    Sequential on tp 2: 76 parameters
    tp: by style
      0                                          1 x ColwiseParallel(Replicate() -> Shard(-1), as DTensors)
      2                                          1 x RowwiseParallel(Shard(-1) -> Replicate(), as blocks)
    parameters in shards
      0.weight                                   1 x {'tp': Shard(0)}
      0.bias                                     1 x {'tp': Shard(0)}
      2.weight                                   1 x {'tp': Shard(1)}
    a step sends, in elements that a rank gives, with T tokens of a rank:
      all_reduce             tp        1 x T*4              the results of 1 pairs
      all_reduce             tp        1 x T*4              the gradients of what 1 pairs are given
    """
    _check(model, mesh, data)
    return _Finder(model, mesh, tp if tp in mesh.axis_names else "", ep if ep in mesh.axis_names else "", data).plan()


def _check(model: nn.Module, mesh: DeviceMesh, data: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan_for: model is {model!r}; give a module")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"plan_for: mesh is {mesh!r}; give a mesh of spmd")
    if data not in DATA:
        raise ValueError(f"plan_for: data is {data!r}; it may be {' or '.join(map(repr, DATA))}")
    placed = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if placed:
        raise ValueError(f"plan_for: {placed[0]} is a DTensor already; give the model before it is placed")


@dataclass
class _Finder:
    """What there is in a model. tp, ep: axes of the mesh, empty where it has none."""

    model: nn.Module
    mesh: DeviceMesh
    tp: str
    ep: str
    data: str

    def plan(self) -> ReadyPlan:
        styles = {axis: found for axis, found in self._styles() if found}
        params = {
            f"{name}.{key}": {axis: placement}
            for axis, found in styles.items() for name, style in found.items()
            for key, placement in style.params(self.modules[name]).items() if placement.is_shard()
        }  # fmt: skip
        self._check_axes()
        total = sum(p.numel() for p in self.model.parameters())
        axes = " x ".join(f"{axis} {n}" for axis, n in zip(self.mesh.axis_names, self.mesh.shape, strict=True))
        return ReadyPlan(
            self.mesh, f"{type(self.model).__name__} on {axes}: {total:,} parameters", styles, params, self.data,
            self.data_axes, self.groups, tuple(self.experts if self.ep else ()), self.expert_axes,
            tuple(self._sends(params)), tuple(self._left(styles)), tuple(self._notes()),
            frozenset(n for n, _ in self.model.named_parameters()),
        )  # fmt: skip

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        return dict(self.model.named_modules())

    @property
    def data_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh.axis_names if axis != self.tp)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes over which experts have copies, or are stored in shards."""
        return tuple(axis for axis in self.data_axes if axis != self.ep) if self.ep else ()

    def _check_axes(self) -> None:
        if len(self.data_axes) > 2 and self.data == "fully_shard":
            raise ValueError(
                f"plan_for: the batch would be over {', '.join(self.data_axes)}, and parameters are stored in shards "
                "over one axis, with copies over another; flatten some, or use data='data_parallel'"
            )
        if self.ep and self.experts and self.data == "data_parallel":
            raise ValueError(
                "plan_for: data='data_parallel' would average experts that differ; use data='fully_shard' with experts"
            )

    # ---- what there is ----------------------------------------------------------------------------
    @cached_property
    def pairs(self) -> list[Pair]:
        shards = self.mesh[self.data_axes[-1]].size() if self.data_axes and self.data == "fully_shard" else 1
        return pairs_in(self.model, self.ranks, shards) if self.tp else []

    @property
    def ranks(self) -> int:
        return self.mesh[self.tp].size() if self.tp else 1

    @cached_property
    def words(self) -> str | None:
        """The table that words are looked up in."""
        tables = {name: m for name, m in self.modules.items() if isinstance(m, nn.Embedding)}
        ask = getattr(self.model, "get_input_embeddings", None)
        wanted = _asked(ask) if ask is not None else None
        if wanted is None and self.head is not None:
            rows = self.modules[self.head].weight.shape[0]
            wanted = next((m for m in tables.values() if m.num_embeddings == rows), None)
        return next((name for name, m in tables.items() if m is wanted), None)

    @cached_property
    def head(self) -> str | None:
        """The layer that gives a number for each word."""
        ask = getattr(self.model, "get_output_embeddings", None)
        asked = _asked(ask) if ask is not None else None
        tables = [m.num_embeddings for m in self.modules.values() if isinstance(m, nn.Embedding)]
        linears = linears_in(self.model)
        heads = [name for name, x in linears.items() if self.modules[name] is asked]
        return next(iter(heads or [n for n, x in linears.items() if x.outs in tables and x.outs > x.ins]), None)

    @cached_property
    def experts(self) -> list[str]:
        """Layers with all experts in one tensor for each kind of weight."""
        return [name for name, m in self.modules.items() if _are_experts(m)]

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The outermost modules in lists, but for those that share a parameter with others."""
        if not self.data_axes or self.data != "fully_shard":
            return ()
        found: list[str] = []
        for name, module in self.modules.items():
            if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{g}.") for g in found):
                found += [f"{name}.{key}" for key, each in module.named_children() if [*each.parameters()]]
        return tuple(name for name in found if not self._shares(name))

    def _shares(self, name: str) -> bool:
        own = {id(p) for p in self.modules[name].parameters()}
        every = self.model.named_parameters(remove_duplicate=False)
        return any(id(p) in own and not key.startswith(f"{name}.") for key, p in every)

    # ---- what it becomes --------------------------------------------------------------------------
    def _styles(self) -> Iterator[tuple[str, dict[str, ParallelStyle]]]:
        if self.tp:
            yield self.tp, dict(self._of_tensors())
        if self.ep:
            yield self.ep, {name: ExpertParallel() for name in self.experts}
        norms = {name: GlobalBatchNorm() for name, m in self.modules.items() if isinstance(m, BATCH_NORMS)}
        if self.data_axes and norms:
            yield ",".join(self.data_axes), norms

    def _of_tensors(self) -> Iterator[tuple[str, ParallelStyle]]:
        for pair in self.pairs:
            if pair.why_whole:
                continue
            is_local = self._works_on_blocks(pair)
            for name in pair.columns:
                yield name, ColwiseParallel(use_local_output=is_local, blocks=pair.blocks)
            for name in pair.inside:
                yield name, ReplicatedParameters()
            yield pair.row, RowwiseParallel()
        if self.words is not None:
            yield self.words, RowwiseParallel(input_layouts=Replicate())
        if self.head is not None:
            yield self.head, ColwiseParallel(output_layouts=Replicate())

    def _works_on_blocks(self, pair: Pair) -> bool:
        """Whether transformers says so, of all layers by columns, and nothing with parameters comes between."""
        said: Mapping[str, str] = getattr(self.model, "tp_plan", None) or {}
        names = [next((s for p, s in said.items() if matches_module(p, name)), "") for name in pair.columns]
        return not pair.inside and pair.blocks == 1 and all(name == "colwise" for name in names)

    # ---- what is said of it -----------------------------------------------------------------------
    def _sends(self, params: Mapping[str, Mapping[str, Placement]]) -> Iterator[sends.Send]:
        linears, done = linears_in(self.model), [pair for pair in self.pairs if not pair.why_whole]
        for width in dict.fromkeys(linears[pair.row].outs for pair in done):
            yield from sends.of_pairs(sum(linears[pair.row].outs == width for pair in done), width, self.tp)
        inside = [p.numel() for pair in done for name in pair.inside for p in self.modules[name].parameters()]
        yield from sends.of_inside(inside, self.tp)
        if self.tp and self.words is not None:
            yield from sends.of_words(self.modules[self.words].embedding_dim, self.tp)
        if self.tp and self.head is not None:
            head = linears[self.head]
            yield from sends.of_head(head.ins, head.outs, self.ranks, self.tp)
        for name in self.experts if self.ep else ():
            p = next(self.modules[name].parameters())
            yield from sends.of_experts(1, p.shape[-1], _chosen(self.model), p.shape[0], self.ep)
            yield from self._sends_of_experts(name)
        norms = [m.num_features for m in self.modules.values() if isinstance(m, BATCH_NORMS)]
        if self.data_axes:
            yield from sends.of_batch_norms(norms, ",".join(self.data_axes))
            yield from self._sends_of_data(params)

    def _sends_of_experts(self, name: str) -> Iterator[sends.Send]:
        """Experts are a group of their own, over the axes that are left."""
        if not self.expert_axes:
            return
        n, own = self.mesh[self.expert_axes[-1]].size(), list(self.modules[name].parameters())
        rows = ceil(ceil(own[0].shape[0] / self.mesh[self.ep].size()) / n)
        elements = sum(rows * prod(p.shape[1:]) for p in own)
        yield from sends.of_group(elements, len(own), n, self.expert_axes[-1], None, 1, is_root=False)

    def _sends_of_data(self, params: Mapping[str, Mapping[str, Placement]]) -> Iterator[sends.Send]:
        if self.data == "data_parallel":
            named = list(self.model.named_parameters())
            held = sum(prod(self._local_shape(name, p, params)) for name, p in named)
            yield from sends.of_copies(held + len(named), ",".join(self.data_axes))
            return
        shards, copies = self.data_axes[-1], self.data_axes[0] if len(self.data_axes) == 2 else None
        n, sizes = self.mesh[shards].size(), {name: (0, 0) for name in (*self.groups, "")}
        for name, p in self.model.named_parameters():
            if not any(name.startswith(f"{e}.") for e in self.experts if self.ep):
                group = next((g for g in self.groups if name.startswith(f"{g}.")), "")
                rows, *others = self._local_shape(name, p, params)
                sizes[group] = sizes[group][0] + ceil(rows / n) * prod(others), sizes[group][1] + 1
        alike = [sizes[g] for g in self.groups]
        for size in dict.fromkeys(alike):
            yield from sends.of_group(*size, n, shards, copies, alike.count(size), is_root=False)
        if sizes[""][1]:
            yield from sends.of_group(*sizes[""], n, shards, copies, 1, is_root=True)

    def _local_shape(self, name: str, p: torch.Tensor, params: Mapping[str, Mapping[str, Placement]]) -> list[int]:
        """What a rank computes with; of several ranks the one that has most."""
        shape, placement = list(p.shape), params.get(name, {}).get(self.tp)
        if placement is not None and placement.is_shard():
            shape[placement.dim] = ceil(shape[placement.dim] / self.ranks)
        return shape

    def _left(self, styles: Mapping[str, Mapping[str, ParallelStyle]]) -> Iterator[tuple[str, str]]:
        reasons = {name: pair.why_whole for pair in self.pairs if pair.why_whole for name in pair.layers}
        styled = {name for found in styles.values() for name in found}
        for name, module in self.modules.items():
            if self.tp and [*module.parameters(recurse=False)] and name not in styled:
                yield name or "parameters of the model itself", reasons.get(name) or self._why(name, module)

    def _why(self, name: str, module: nn.Module) -> str:
        if name in self.experts:
            return f"experts go to an axis {self.ep!r}" if self.ep else "experts are shared out over an axis 'ep'"
        if isinstance(module, nn.Embedding):
            return "not the table of words: looked up on each rank"
        if isinstance(module, nn.MultiheadAttention):
            return "its projections are no layers: put three linear layers in its place"
        if "Norm" in type(module).__name__:
            return "a norm: each rank has whole features"
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return "a convolution: shared out over the batch alone"
        return "no pair of columns and rows" if name else "each rank has them"

    def _notes(self) -> Iterator[str]:
        if self.tp and self.ranks > 1 and not any(True for _ in self._of_tensors()):
            yield f"nothing is shared out over {self.tp}: its {self.ranks} ranks do the same work"
        if self.tp and any(isinstance(m, nn.Dropout) and m.p > 0 for m in self.modules.values()):
            yield f"dropout draws on each rank: seed the ranks of {self.tp} alike (torch.manual_seed)"


def _asked(ask) -> nn.Module | None:
    try:
        return ask()
    except (NotImplementedError, AttributeError):
        return None


def _are_experts(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    return (
        bool(own) and all(p.ndim == 3 for p in own) and len({p.shape[0] for p in own}) == 1
        and hasattr(module, "num_experts") and len(own) == len(list(module.parameters()))
    )  # fmt: skip


def _chosen(model: nn.Module) -> int:
    """How many experts a token has."""
    return getattr(getattr(model, "config", None), "num_experts_per_tok", 1)
