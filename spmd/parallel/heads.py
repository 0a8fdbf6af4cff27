"""Heads of attention, which have to stay in one piece where modules get this rank's features as plain blocks.

    q = self.q_proj(x).view(batch, time, -1, head_dim)      on 3 ranks of 4 heads: some would get a part of a head

Nor may ranks have heads of queries without those of keys that belong to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from spmd.mesh import DeviceMesh
from spmd.parallel.style import ParallelStyle
from spmd.parallel.tensor_parallel import ColwiseParallel
from spmd.tensor.placement import Shard

HEADS = (
    "num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads",
    "n_local_heads", "nhead", "heads",
)  # fmt: skip
"""What models call the number of heads, as an attribute of a module or of its `config`."""


def check_heads(modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """ValueError for a module with heads that the axis does not divide, where layers hand it plain blocks of them."""
    ranks = mesh.size()
    for name, style in styles.items():
        if not isinstance(style, ColwiseParallel) or not style.use_local_output or style.output_layouts != Shard(-1):
            continue
        owner = name.rpartition(".")[0]
        for attribute, n in heads_of(modules[owner]) if owner in modules else ():
            if n % ranks:
                raise ValueError(
                    f"parallelize_plan {name!r}: {ranks} ranks do not divide the {n} heads of {owner!r} "
                    f"({attribute}); use a mesh whose size divides them, or ColwiseParallel(use_local_output=False), "
                    "with which the global number of heads stays"
                )


def heads_of(module: nn.Module) -> Iterator[tuple[str, int]]:
    """The numbers of heads that a module, or its config, tells."""
    has_heads = any(isinstance(vars(module).get(name), int) for name in (*HEADS, "head_dim", "head_size"))
    for owner, prefix in ((module, ""), (getattr(module, "config", None), "config.")):
        for name in HEADS if owner is module or has_heads else ():
            n = getattr(owner, name, None)
            if isinstance(n, int) and not isinstance(n, bool) and n > 0:
                yield prefix + name, n
