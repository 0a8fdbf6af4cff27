"""transformers' names of styles: what `model.tp_plan` and `model.ep_plan` say, as styles.

    "layers.*.self_attn.q_proj": "colwise"                       a layer
    "layers.*.mlp.experts": "moe_tp_experts"                     a module that computes with its parameters' blocks
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise"        one of them

A model's plan is that of its family: an entry for layers that this model does not have is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from spmd.parallel.blocks import ComputesWithBlocks, UsedInPart
from spmd.parallel.experts.expert_parallel import ExpertParallel
from spmd.parallel.style import ParallelStyle
from spmd.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from spmd.tensor.annotations.patterns import matches_module
from spmd.tensor.placement import REPLICATE, Placement, Replicate, Shard

LAYERS: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": lambda: ColwiseParallel(),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": lambda: RowwiseParallel(),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "sequence_parallel": lambda: SequenceParallel(use_local_output=True),
    "replicated_with_grad_allreduce": lambda: ComputesWithBlocks({}),
}
"""Of modules by themselves."""

OF_BLOCKS: Mapping[str, bool] = {"moe_tp_experts": True, "local_params": False}
"""Of modules that compute with blocks of their parameters, which entries of their own tell: whether it is a sum."""

PARAMETERS: Mapping[str, Callable[[int], Placement]] = {
    "colwise": lambda ndim: Shard(max(ndim - 2, 0)),
    "rowwise": lambda ndim: Shard(ndim - 1),
    "packed_colwise": lambda ndim: Shard(ndim - 2, blocks=2) if ndim > 1 else Shard(0),
    "packed_rowwise": lambda ndim: Shard(ndim - 1, blocks=2) if ndim > 1 else REPLICATE,
    "replicate": lambda ndim: REPLICATE,
    "grouped_gemm": lambda ndim: Shard(0),
}
"""Of the parameters of such a module, by how many dims they have."""

EXPERTS = "ep_dispatch_experts"
KNOWN = sorted({*LAYERS, *OF_BLOCKS, *PARAMETERS, EXPERTS, "mla_kv_a_proj"})


def with_styles(module: nn.Module, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plan with styles for their names. NotImplementedError for a name that is not known here."""
    if not any(isinstance(said, str) for said in plan.values()):
        return plan
    return dict(_styled(module, plan))


def _styled(module: nn.Module, plan: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    modules = dict(module.named_modules())
    names = {*modules, *(name for name, _ in module.named_parameters(remove_duplicate=False))}
    of_family = {**(getattr(module, "ep_plan", None) or {}), **(getattr(module, "tp_plan", None) or {})}
    for pattern, said in plan.items():
        if not isinstance(said, str):
            yield pattern, said
            continue
        _require_known(pattern, said)
        found = [name for name in modules if matches_module(pattern, name)]
        if found and said != "replicate":
            yield pattern, _style(pattern, said, plan, modules, found)
        elif not found and not _is_parameter(pattern, plan) and not _is_of_others(pattern, said, of_family, names):
            yield pattern, LAYERS.get(said, ColwiseParallel)()  # which matches nothing, and that is said


def _require_known(pattern: str, said: str) -> None:
    if said not in KNOWN:
        raise NotImplementedError(
            f"parallelize_plan {pattern!r}: {said!r} is no style that is known here; there are {', '.join(KNOWN)}"
        )


def _is_parameter(pattern: str, plan: Mapping[str, Any]) -> bool:
    """Whether an entry is about a parameter of a module whose entry asks for it."""
    owner = plan.get(pattern.rpartition(".")[0])
    return isinstance(owner, str) and owner in (*OF_BLOCKS, EXPERTS)


def _is_of_others(pattern: str, said: str, of_family: Mapping[str, str], names: Iterable[str]) -> bool:
    """Whether an entry that matches nothing is for other models of the family, and no wrong place in this one."""
    depth = pattern.count(".") + 1
    tails = {".".join(name.split(".")[-depth:]) for name in names}
    return of_family.get(pattern) == said and not any(matches_module(pattern, tail) for tail in tails)


def _style(
    pattern: str, said: str, plan: Mapping[str, Any], modules: Mapping[str, nn.Module], found: list[str]
) -> ParallelStyle:
    if said in LAYERS:
        return LAYERS[said]()
    if said == EXPERTS:
        return ExpertParallel()
    if said in OF_BLOCKS:
        return ComputesWithBlocks(_placements(pattern, plan, modules[found[0]]), is_sum=OF_BLOCKS[said])
    if said == "mla_kv_a_proj":
        return UsedInPart(_rotary_size(pattern, modules[found[0].rpartition(".")[0]]))
    raise ValueError(
        f"parallelize_plan {pattern!r}: {said!r} is for a parameter of a module that has an entry, too, of "
        f"{', '.join((*OF_BLOCKS, EXPERTS))}; {found[0]!r} is a {type(modules[found[0]]).__name__}"
    )


def _placements(pattern: str, plan: Mapping[str, Any], module: nn.Module) -> dict[str, Placement]:
    """What a plan says of the parameters of a module."""
    own = {name: p.ndim for name, p in module.named_parameters(recurse=False)}
    said = {name: plan.get(f"{pattern}.{name}") for name in own}
    return {name: PARAMETERS[style](own[name]) for name, style in said.items() if style is not None}


def _rotary_size(pattern: str, attention: nn.Module) -> int:
    """How many of the last features are keys with positions, which all heads have in common."""
    for owner in (attention, getattr(attention, "config", None)):
        if isinstance(size := getattr(owner, "qk_rope_head_dim", None), int):
            return size
    raise ValueError(f"parallelize_plan {pattern!r}: {type(attention).__name__} does not tell its qk_rope_head_dim")
