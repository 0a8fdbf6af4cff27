"""Does a step send what training by hand sends? Bytes and collectives of programs beside the formulas of the papers.

    python benchmarks/by_hand.py                 # all models and plans, on ranks that do not exist
    python benchmarks/by_hand.py --only llama    # some
    python benchmarks/by_hand.py --train         # and train each for three steps: is it what one device does?
    python benchmarks/by_hand.py --pinned        # only rows that need a pin to send Megatron's bytes, with that pin

Bytes are those that a rank sends, with ring algorithms: (n-1)/n of the tensor for a gather or a reduce-scatter over n
ranks, twice that for an all-reduce. Collectives are counted before they are put into buckets. Numbers - the loss, its
count of words - are left out. With P the bytes of a parameter where it is computed with, over all parameters:

    data parallel        2 P (n-1)/n                      one all-reduce of the gradient
    ZeRO-1, ZeRO-2       2 P (n-1)/n                      a reduce-scatter, a gather of the new parameter
                         (Rajbhandari et al. 2020, section 7.2.1)
    ZeRO-3               3 P (n-1)/n                      two gathers, a reduce-scatter (7.2.2)
    hybrid               3 P (m-1)/m + 2 P/m (r-1)/r      ZeRO-3 over m ranks, an all-reduce of shards over r
                         (Zhao et al. 2023, section 3.2.2)
    Megatron             4 all-reduces of the activations in each layer, two in the forward and two in the backward; one
                         for the words that are looked up, one for the gradient of what the words are predicted from,
                         and three of a number a word for the loss over words that are shared out
                         (Shoeybi et al. 2019, section 3), beside one of the above with P of a rank
    and of mixtral       2 in each layer, for its attention: what is compared is its dense part, without the experts
    sequence parallel    each of these all-reduces is a reduce-scatter and a gather, and parameters that are whole have
                         the terms of their gradients on all ranks (Korthikanti et al. 2022, section 4.2.2); the words
                         and what they are compared with, which come in shards, are gathered

What a program need not send is no mistake: the backward reads no embedding and no bias, so ratios may be below 1.
Tensor parallelism is compared where it is the sensible plan: with so few words on a rank that to gather weights would
send more than to reduce activations, and with enough of them that to reduce gradients sends less than to move
activations between the ranks of the data. Each plan is asked of both choices, by op and for the program; "us" is the
modelled time of all collectives, one after the other, by the formulas and of the program; "step" that of the whole
step with its work, which is what a choice makes least. Where a choice for the program sends more than by hand, it is
cheaper so: by op the step is that by hand.
Trained are smaller models in float64; what they compute in float32, whatever they are given, is computed in float64.
Exits 1 if a ratio is above 1.02, or a training is further than 1e-10 from one device.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from _float64 import APART, all_in_float64
from _table import table
from torch import nn

import spmd
from spmd import FullyShard, Program, Shard
from spmd.expand.choose.price import program_cost
from spmd.expand.passes.keep_gathered import gathered_bytes
from spmd.mesh.cost import all_gather_cost, all_reduce_cost, reduce_scatter_cost

ALLOWED = 1.02
"""The largest ratio."""


@dataclass(frozen=True)
class Size:
    """Of a model and of its batch: sequences, words in each, width, layers, words of the vocabulary."""

    batch: int
    time: int
    width: int
    layers: int
    words: int


PLANNED, FEW_WORDS, TRAINED = Size(64, 512, 512, 4, 4096), Size(8, 64, 1024, 2, 1024), Size(8, 8, 32, 2, 48)
"""For data parallelism; beside tensor parallelism, half as many words on a rank as the width; and what is trained."""


def settings(name: str, size: Size) -> dict:
    """The configuration of a model of this size."""
    if name == "gpt2":
        return {"n_embd": size.width, "n_layer": size.layers, "n_head": 8, "vocab_size": size.words,
                "n_positions": size.time, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
    common = {"hidden_size": size.width, "num_hidden_layers": size.layers, "num_attention_heads": 8,
              "intermediate_size": 3 * size.width, "vocab_size": size.words,
              "max_position_embeddings": size.time}  # fmt: skip
    if name == "bert":
        return common | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return common | {"num_key_value_heads": 4}


MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "bert": ("BertForMaskedLM", "BertConfig"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig"),
}

HEADS = {"*.[qkv]_proj.weight": 0, "*.o_proj.weight": 1, "*.embed_tokens.weight": 0, "*.lm_head.weight": 0}
OF_GPT2 = {"*.c_attn.*": -1, "*.c_proj.weight": 0, "*.c_fc.*": -1, "*.wte.weight": 0}
TP: dict[str, dict[str, Shard | int]] = {
    "gpt2": OF_GPT2,
    "gpt2 packed": OF_GPT2 | {"*.c_attn.*": Shard(-1, blocks=3)},
    "llama": HEADS | {"*.gate_proj.weight": 0, "*.up_proj.weight": 0, "*.down_proj.weight": 1},
    "bert": {"*.self.*": 0, "*.attention.output.dense.weight": 1, "*.intermediate.dense.*": 0,
             "*.[0-9].output.dense.weight": 1, "*.word_embeddings.weight": 0, "*.predictions.bias": 0},
    "mixtral": HEADS,
}  # fmt: skip
"""What tensor parallelism shards, after Megatron: a dim, or a placement. What is not named is replicated."""


@dataclass(frozen=True)
class Plan:
    """axes: of the mesh. said: to the compiler. each: (kind, copies of the group's share, axes) for a parameter.

    sequence: whether the words of a sequence are shared out over tp, too.
    """

    axes: dict[str, int]
    said: dict
    each: tuple[tuple[str, float, str], ...]
    sequence: bool = False

    @property
    def tensor_parallel(self) -> bool:
        return "tp" in self.axes

    @property
    def size(self) -> Size:
        return FEW_WORDS if self.tensor_parallel else PLANNED

    @property
    def inputs(self) -> dict[str, Shard]:
        """How the batch comes."""
        own = {axis: Shard(0) for axis in self.axes if axis != "tp"}
        return own | {"tp": Shard(1)} if self.sequence else own


ZERO_3 = (("all_gather", 1, "dp"), ("all_gather", 1, "dp"), ("reduce_scatter", 1, "dp"))
REDUCED = (("all_reduce", 1, "dp"),)
LINE, SQUARE = {"dp": 4}, {"dp": 2, "tp": 4}
PLANS = {
    "data parallel": Plan(LINE, {}, REDUCED),
    "ZeRO-1": Plan(LINE, {"fully_shard": FullyShard("dp", 1)}, ZERO_3[1:]),
    "ZeRO-2": Plan(LINE, {"fully_shard": FullyShard("dp", 2)}, ZERO_3[1:]),
    "ZeRO-3": Plan(LINE, {"fully_shard": "dp"}, ZERO_3),
    "all on dp": Plan(LINE, {"params": {"*": {"dp": Shard(0)}}}, tuple((kind, 4, axis) for kind, _, axis in ZERO_3)),
    "ZeRO-3, named dims": Plan(LINE, {"stored": {"*": {"dp": Shard(0)}}}, ZERO_3),
    "hybrid": Plan({"rep": 2, "dp": 4}, {"fully_shard": "dp"}, (*ZERO_3, ("all_reduce", 1 / 4, "rep"))),
    "Megatron": Plan(SQUARE, {}, REDUCED),
    "Megatron, ZeRO-1": Plan(SQUARE, {"fully_shard": FullyShard("dp", 1)}, ZERO_3[1:]),
    "Megatron, ZeRO-3": Plan(SQUARE, {"fully_shard": "dp"}, ZERO_3),
    "sequence": Plan(SQUARE, {}, REDUCED, sequence=True),
}


NORMS = {"*norm": {"dp": Shard(0)}}
PINNED: dict[tuple[str, str], tuple[str, dict]] = {
    ("llama", "Megatron, ZeRO-1"): ("program", NORMS),
    ("mixtral", "Megatron, ZeRO-1"): ("program", NORMS),
    ("mixtral", "Megatron"): ("op", NORMS),
}
"""Who chooses, and the `placements=` with which Megatron's own bytes are sent, where the cheaper step sends more."""


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A plain step, as for one device."""
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def made(name: str, size: Size, dtype: torch.dtype) -> nn.Module:
    """The model, with the same random weights each time; of a mixture of experts the dense part."""
    torch.manual_seed(0)
    kind, config = MODELS[name.split()[0]]
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings(name.split()[0], size)))
    for layer in model.model.layers if name == "mixtral" else ():
        layer.mlp = nn.Identity()
    return model.to(dtype).train()


def batch(size: Size) -> dict[str, torch.Tensor]:
    words = torch.randint(3, size.words, (size.batch, size.time), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "labels": words.clone()}


def compiled(name: str, plan: Plan, mesh: spmd.DeviceMesh, choose: str, pins: dict | None = None) -> spmd.CompiledStep:
    sharded = TP[name].items() if plan.tensor_parallel else ()
    params = {pattern: {"tp": p if isinstance(p, Shard) else Shard(p)} for pattern, p in sharded}
    inputs = {"batch.*": plan.inputs}
    said = {"params": params, "inputs": inputs} | plan.said
    return spmd.compile(train_step, mesh, bucket_mb=None, choose=choose, placements=pins, **said)


def program(name: str, plan: Plan, choose: str, pins: dict | None = None) -> Program:
    """The program of a step. Nothing is run."""
    size = torch.Size(plan.axes.values())
    mesh = spmd.DeviceMesh("cpu", torch.arange(size.numel()).view(size).tolist(), mesh_dim_names=tuple(plan.axes))
    model = made(name, plan.size, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return compiled(name, plan, mesh, choose, pins).program_for(model, optimizer, batch(plan.size))


# ---- what is sent -----------------------------------------------------------------------------

TIMES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
COSTS = {"all_gather": all_gather_cost, "reduce_scatter": reduce_scatter_cost, "all_reduce": all_reduce_cost}


@dataclass(frozen=True)
class Total:
    """Bytes that a rank sends, collectives, and their modelled microseconds, one after the other."""

    nbytes: float = 0.0
    count: int = 0
    us: float = 0.0

    def __add__(self, other: Total) -> Total:
        return Total(self.nbytes + other.nbytes, self.count + other.count, self.us + other.us)


def on_the_wire(kind: str, whole: float, n: int) -> float:
    """Bytes that a rank sends, where the tensor has `whole` bytes when it is gathered, or before it is scattered."""
    return TIMES.get(kind, 1) * whole * (n - 1) / n


def sent(found: Program) -> Total:
    """What a rank sends, but for single numbers."""
    total = Total()
    for c in found.collectives:
        n = prod(found.mesh.shape[found.mesh.axis(a)] for a in c.axis.split(","))
        if c.nbytes > 8:
            total += Total(on_the_wire(c.kind, c.nbytes * (n if c.kind == "all_gather" else 1), n), 1, c.us)
    return total


def by_hand(name: str, plan: Plan, found: Program) -> Total:
    """The same by the formulas."""
    total = Total()
    for kind, nbytes, axes in (*of_parameters(plan, found), *of_activations(name, plan)):
        over = [found.mesh.axis(a) for a in axes]
        n = prod(found.mesh.shape[a] for a in over)
        total += Total(on_the_wire(kind, nbytes, n), 1, COSTS[kind](nbytes, tuple(over), found.mesh.topology))
    return total


Term = tuple[str, float, tuple[str, ...]]
"""A collective of a formula: its kind, the bytes of the whole tensor, and the axes."""


def of_parameters(plan: Plan, found: Program) -> Iterator[Term]:
    """What is gathered and reduced for each parameter."""
    for places in found.places.values():
        shared = any(p.is_shard() for p in places.computed.placements)
        for kind, share, axis in plan.each:
            over = (axis, "tp") if plan.sequence and not shared and kind != "all_gather" else (axis,)
            yield kind, share * places.computed.local_nbytes, over


def of_activations(name: str, plan: Plan) -> Iterator[Term]:
    """What tensor parallelism sends of activations and of words."""
    if not plan.tensor_parallel:
        return
    words = plan.size.batch // plan.axes["dp"] * plan.size.time
    each = ("reduce_scatter", "all_gather") if plan.sequence else ("all_reduce",)
    for _ in range((2 if name == "mixtral" else 4) * plan.size.layers + 2):
        yield from ((kind, words * plan.size.width * 4, ("tp",)) for kind in each)
    yield from [("all_reduce", words * 4, ("tp",))] * 3
    yield from [("all_gather", words * 8, ("tp",))] * (2 if plan.sequence else 0)


# ---- trained ----------------------------------------------------------------------------------


def trained(name: str, plan: Plan, choose: str, pins: dict | None = None) -> float:
    """How far losses and parameters are from those of one device after three steps, simulated."""
    with all_in_float64():
        return _apart(name, plan, choose, pins)


def _apart(name: str, plan: Plan, choose: str, pins: dict | None) -> float:
    alone = made(name, TRAINED, torch.float64)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    want = [train_step(alone, optimizer, batch(TRAINED)) for _ in range(3)]
    size = torch.Size(plan.axes.values())
    with spmd.LocalTensorMode(size.numel()):
        mesh = spmd.init_device_mesh("cpu", tuple(size), mesh_dim_names=tuple(plan.axes))
        model, step = made(name, TRAINED, torch.float64), compiled(name, plan, mesh, choose, pins)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        got = [step(model, optimizer, batch(TRAINED)) for _ in range(3)]
        pairs = [*zip(got, want, strict=True), *zip(model.parameters(), alone.parameters(), strict=True)]
        return max(float((_whole(a) - b).abs().max()) for a, b in pairs)


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.detach().full_tensor().reconcile()


# ---- the table --------------------------------------------------------------------------------


def row(name: str, title: str, choose: str, train: bool, pins: dict | None = None) -> tuple[list[str], bool]:
    plan = PLANS[title]
    planned = program(name, plan, choose, pins)
    hand, own = by_hand(name, plan, planned), sent(planned)
    apart = trained(name, plan, choose, pins) if train else 0.0
    fine = own.nbytes <= ALLOWED * hand.nbytes and own.count <= ALLOWED * hand.count and apart < APART
    cells = [f"{hand.nbytes / 1e6:.3f}", f"{own.nbytes / 1e6:.3f}", f"{own.nbytes / hand.nbytes:.3f}"]
    cells += [str(hand.count), str(own.count), f"{hand.us:,.0f}", f"{own.us:,.0f}", f"{program_cost(planned).us:,.0f}"]
    cells += [f"{max(gathered_bytes(planned)) / 1e6:.1f}", f"{apart:.0e}" if train else "", "" if fine else "ABOVE"]
    return [name, title, f"{choose}, pinned" if pins else choose, *cells], fine


def asked(args: argparse.Namespace) -> Iterator[tuple[str, str, str, dict | None]]:
    """Models and plans of the table, who chooses, and pins. Packed weights are for tensor parallelism."""
    for name, title in ((name, title) for name in args.only for title in args.plans):
        if args.pinned:
            yield from [(name, title, *PINNED[name, title])] if (name, title) in PINNED else ()
        elif PLANS[title].tensor_parallel or "packed" not in name:
            yield from ((name, title, choose, None) for choose in args.choose)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TP, default=list(TP), help="these models")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS), help="these plans")
    parser.add_argument("--choose", nargs="+", choices=("op", "program"), default=["op", "program"])
    parser.add_argument("--train", action="store_true", help="train each for three steps, and compare with one device")
    parser.add_argument("--pinned", action="store_true", help="only rows with pins that give Megatron's own bytes")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    header = ["model", "plan", "chosen by", "by hand, MB", "sent, MB", "ratio", "collectives by hand", "sent"]
    header += ["by hand, us", "us", "step, us", "gathered at once, MB", "apart", ""]
    found, good = [], True
    for name, title, choose, pins in asked(args):
        cells, fine = row(name, title, choose, args.train, pins)
        print(*cells, sep="  ", flush=True)
        found.append(cells)
        good &= fine
    print(table(header, found, left=3))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
