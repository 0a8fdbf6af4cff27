"""Pairs: layers by columns and the layer by rows behind them, which is what tensor parallelism shares out.

    attention    q, k, v  ->  out        by heads; of one packed layer or of three
    mlp          up, gate ->  down       by hidden features

They are found by names of projections and by shapes. What the shapes contradict is no pair; what the axis does not
divide is a pair with a reason why it is left whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from spmd.parallel.heads import heads_of
from spmd.parallel.layers import IN, OUT, layer_of

PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"), ("q_lin", "k_lin", "v_lin"), ("query_proj", "key_proj", "value_proj"),
)  # fmt: skip
"""What models call the projections of queries, keys and values."""

PACKED = ("c_attn", "qkv", "qkv_proj", "Wqkv", "to_qkv", "in_proj")
"""What they call one layer that holds queries, then keys, then values. (`query_key_value` has them head by head.)"""

RESULT = ("out", "o", "o_proj", "out_proj", "c_proj", "proj", "wo", "to_out", "to_out.0", "out_lin", "dense")
"""What they call the layer that takes the heads' results; BERT and its kin have it in a sibling, `output.dense`."""


@dataclass(frozen=True)
class Linear:
    """A linear layer, and how many features come in and out."""

    name: str
    ins: int
    outs: int


@dataclass(frozen=True)
class Pair:
    """Layers by columns, and one by rows.

    kind: "attention" or "mlp". owner: the module that has the columns. blocks: of a packed layer. inside: modules with
    parameters that compute between the two, whose parameters are replicated. why_whole: why it is not shared out.
    """

    kind: str
    owner: str
    columns: tuple[str, ...]
    row: str
    blocks: int = 1
    inside: tuple[str, ...] = ()
    why_whole: str = ""

    @property
    def layers(self) -> tuple[str, ...]:
        return (*self.columns, self.row)


def linears_in(model: nn.Module) -> dict[str, Linear]:
    """The linear layers of a model, in the order in which they were registered."""
    found = {}
    for name, module in model.named_modules():
        layer = layer_of(module)
        if layer is not None and layer.features is not None:
            sizes = layer.sizes(module)
            found[name] = Linear(name, sizes[IN], sizes[OUT])
    return found


def pairs_in(model: nn.Module, ranks: int, shards: int = 1) -> list[Pair]:
    """The pairs of a model, in the order of its modules.

    ranks: of the axis that shares them out. shards: into how many what a rank has is cut again, to be stored.
    """
    linears, modules = linears_in(model), dict(model.named_modules())
    found = list(_attentions(modules, linears, ranks))
    taken = {name for pair in found for name in pair.layers}
    found += _mlps(modules, {n: x for n, x in linears.items() if n not in taken}, ranks)
    order = {name: i for i, name in enumerate(modules)}
    found = [_packed_evenly(pair, linears, ranks, shards) for pair in found]
    return sorted(found, key=lambda pair: order[pair.owner])


def _packed_evenly(pair: Pair, linears: Mapping[str, Linear], ranks: int, shards: int) -> Pair:
    """A packed layer is cut twice, so both together have to divide each of its blocks."""
    if pair.blocks == 1 or pair.why_whole or linears[pair.columns[0]].outs // pair.blocks % (ranks * shards) == 0:
        return pair
    return replace(pair, why_whole=f"{ranks * shards} shards do not divide a block of its packed layer")


# ---- attention --------------------------------------------------------------------------------


def _attentions(modules: Mapping[str, nn.Module], linears: Mapping[str, Linear], ranks: int) -> Iterator[Pair]:
    for owner, module in modules.items():
        columns = _projections(owner, linears)
        row = _result(owner, columns, linears) if columns else None
        if row is not None:
            blocks = 3 if len(columns) == 1 else 1
            inside = _inside(owner, modules, {*columns, row})
            why = _why_whole(module, [linears[c] for c in columns], linears[row], ranks)
            yield Pair("attention", owner, columns, row, blocks, inside, why)


def _projections(owner: str, linears: Mapping[str, Linear]) -> tuple[str, ...]:
    """The projections that a module has, in three layers or in one."""
    for names in (*PROJECTIONS, *((name,) for name in PACKED)):
        found = tuple(_join(owner, name) for name in names)
        if all(name in linears for name in found):
            return found
    return ()


def _result(owner: str, columns: Collection[str], linears: Mapping[str, Linear]) -> str | None:
    """The layer that takes what the heads give, behind the projections; None where no layer has its name."""
    parent = owner.rpartition(".")[0]
    names = [*(_join(owner, name) for name in RESULT), _join(parent, "output.dense")]
    return next((name for name in names if name in linears and name not in columns), None)


def _why_whole(module: nn.Module, columns: list[Linear], row: Linear, ranks: int) -> str:
    width = sum(c.outs for c in columns) / 3 if len(columns) == 1 else columns[0].outs
    if row.ins != width:
        return f"{row.name.rpartition('.')[2]} takes {row.ins} features, and the queries have {width:g}"
    for attribute, n in heads_of(module):
        if n % ranks:
            return f"{ranks} ranks do not divide its {n} heads ({attribute})"
    if any(c.outs % ranks for c in columns) or row.ins % ranks:
        return f"{ranks} ranks do not divide its features"
    return ""


def _inside(owner: str, modules: Mapping[str, nn.Module], but: Collection[str]) -> tuple[str, ...]:
    """The other modules in a module that have parameters of their own, such as norms of queries; it itself, too."""
    return tuple(
        name for name, module in modules.items()
        if (name == owner or name.startswith(f"{owner}.")) and name not in but and module._parameters
    )  # fmt: skip


# ---- the rest ---------------------------------------------------------------------------------


def _mlps(modules: Mapping[str, nn.Module], linears: dict[str, Linear], ranks: int) -> Iterator[Pair]:
    """Innermost modules first: a layer whose two halves are modules of one linear each is found by what is left."""
    left = dict(linears)
    for owner in sorted(modules, key=lambda name: -name.count(".") - bool(name)):
        if isinstance(modules[owner], (nn.ModuleList, nn.ModuleDict)):
            continue
        own = [x for name, x in left.items() if _is_near(name, owner)]
        pair = _mlp(owner, own, ranks)
        if pair is not None:
            for name in pair.layers:
                del left[name]
            yield pair


def _mlp(owner: str, own: list[Linear], ranks: int) -> Pair | None:
    """One or two layers that widen and, behind the first of them, one that narrows again; None for anything else."""
    if len(own) not in (2, 3):
        return None
    width, hidden = own[0].ins, own[0].outs
    ups = [x for x in own if (x.ins, x.outs) == (width, hidden)]
    downs = [x for x in own if (x.ins, x.outs) == (hidden, width)]
    blocks = 1
    if len(own) == 2 and own[1].ins * 2 == hidden and own[1].outs == width:  # gate and up in one layer
        downs, blocks = own[1:], 2
    if len(downs) != 1 or len(ups) + len(downs) != len(own) or hidden <= width:
        return None
    inner = downs[0].ins
    why = f"{ranks} ranks do not divide its {inner} hidden features" if inner % ranks else ""
    return Pair("mlp", owner, tuple(x.name for x in ups), downs[0].name, blocks, (), why)


def _is_near(name: str, owner: str) -> bool:
    """Whether a layer is in a module, or in a module of it."""
    inside = name[len(owner) + 1 :] if owner and name.startswith(f"{owner}.") else name if not owner else ""
    return bool(inside) and inside.count(".") < 2


def _join(owner: str, name: str) -> str:
    return f"{owner}.{name}".lstrip(".")
