"""Does a step send what training by hand sends? Bytes and collectives of programs beside the formulas of the papers.

    python benchmarks/by_hand.py                 # all models and plans, on ranks that do not exist
    python benchmarks/by_hand.py --only llama    # some
    python benchmarks/by_hand.py --train         # and train each for three steps: is it what one device does?

Bytes are those that a rank sends, with ring algorithms: (n-1)/n of the tensor for a gather or a reduce-scatter over n
ranks, twice that for an all-reduce. Collectives are counted before they are put into buckets. Numbers - the loss, its
count of words - are left out. With P the bytes of a parameter where it is computed with, over all parameters:

    data parallel        2 P (n-1)/n                      one all-reduce of the gradient
    ZeRO-1, ZeRO-2       2 P (n-1)/n                      a reduce-scatter, a gather of the new parameter
                         (Rajbhandari et al. 2020, section 7.2.1)
    ZeRO-3               3 P (n-1)/n                      two gathers, a reduce-scatter (7.2.2)
    hybrid               3 P (m-1)/m + 2 P/m (r-1)/r      ZeRO-3 over m ranks, an all-reduce of shards over r
                         (Zhao et al. 2023, section 3.2.2)
    tensor parallel      4 all-reduces of the activations in each layer, two in the forward and two in the backward
                         (Shoeybi et al. 2019, section 3), beside one of the above with P of a rank
    and of mixtral       2, for its attention: what is compared is its dense part, without the experts

What a program need not send is no mistake: the backward reads no embedding and no bias, so ratios may be below 1.
Exits 1 if a ratio is above 1.02, or a training differs.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from _table import table
from torch import nn

import spmd
from spmd import FullyShard, Program, Shard
from spmd.expand.passes.keep_gathered import gathered_bytes

ALLOWED, APART = 1.02, 2e-6
"""The largest ratio, and how far a training may be apart: models compute losses in float32 whatever they are given."""


@dataclass(frozen=True)
class Size:
    """Of a model and of its batch: sequences, words in each, width, layers, words of the vocabulary."""

    batch: int
    time: int
    width: int
    layers: int
    words: int


PLANNED, TRAINED = Size(64, 512, 512, 4, 4096), Size(8, 8, 32, 2, 48)


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

TP = {
    "gpt2": {},
    "llama": {"*.[qkv]_proj.weight": 0, "*.o_proj.weight": 1, "*.gate_proj.weight": 0, "*.up_proj.weight": 0,
              "*.down_proj.weight": 1},
    "bert": {"*.self.*": 0, "*.attention.output.dense.weight": 1, "*.intermediate.dense.*": 0,
             "*.[0-9].output.dense.weight": 1},
    "mixtral": {"*.[qkv]_proj.weight": 0, "*.o_proj.weight": 1},
}  # fmt: skip
"""The dims that tensor parallelism shards, after Megatron. What is not named is replicated: gpt2's fused weights."""


@dataclass(frozen=True)
class Plan:
    """axes: of the mesh. said: to the compiler. each: (kind, copies of the group's share, axes) for a parameter."""

    axes: dict[str, int]
    said: dict
    each: tuple[tuple[str, float, str], ...]

    @property
    def data(self) -> list[str]:
        return [axis for axis in self.axes if axis != "tp"]


ZERO_3 = (("all_gather", 1, "dp"), ("all_gather", 1, "dp"), ("reduce_scatter", 1, "dp"))
PLANS = {
    "data parallel": Plan({"dp": 4}, {}, (("all_reduce", 1, "dp"),)),
    "ZeRO-1": Plan({"dp": 4}, {"fully_shard": FullyShard("dp", 1)}, ZERO_3[1:]),
    "ZeRO-2": Plan({"dp": 4}, {"fully_shard": FullyShard("dp", 2)}, ZERO_3[1:]),
    "ZeRO-3": Plan({"dp": 4}, {"fully_shard": "dp"}, ZERO_3),
    "ZeRO-3, named dims": Plan({"dp": 4}, {"stored": {"*": {"dp": Shard(0)}}}, ZERO_3),
    "hybrid": Plan({"rep": 2, "dp": 4}, {"fully_shard": "dp"}, (*ZERO_3, ("all_reduce", 1 / 4, "rep"))),
    "Megatron": Plan({"dp": 2, "tp": 2}, {}, (("all_reduce", 1, "dp"),)),
    "Megatron, ZeRO-1": Plan({"dp": 2, "tp": 2}, {"fully_shard": FullyShard("dp", 1)}, ZERO_3[1:]),
    "Megatron, ZeRO-3": Plan({"dp": 2, "tp": 2}, {"fully_shard": "dp"}, ZERO_3),
}


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """A plain step, as for one device."""
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def made(name: str, size: Size) -> nn.Module:
    """The model, with the same random weights each time; of a mixture of experts the dense part."""
    torch.manual_seed(0)
    kind, config = MODELS[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**settings(name, size)))
    for layer in model.model.layers if name == "mixtral" else ():
        layer.mlp = nn.Identity()
    return model.double().train()


def batch(size: Size) -> dict[str, torch.Tensor]:
    words = torch.randint(3, size.words, (size.batch, size.time), generator=torch.Generator().manual_seed(1))
    return {"input_ids": words, "labels": words.clone()}


def compiled(name: str, plan: Plan, mesh: spmd.DeviceMesh) -> spmd.CompiledStep:
    params = {pattern: {"tp": Shard(dim)} for pattern, dim in TP[name].items()} if "tp" in plan.axes else {}
    inputs = {"batch.*": {axis: Shard(0) for axis in plan.data}}
    return spmd.compile(train_step, mesh, params=params, inputs=inputs, bucket_mb=None, **plan.said)


def program(name: str, plan: Plan) -> Program:
    """The program of a step. Nothing is run."""
    size = torch.Size(plan.axes.values())
    mesh = spmd.DeviceMesh("cpu", torch.arange(size.numel()).view(size).tolist(), mesh_dim_names=tuple(plan.axes))
    model = made(name, PLANNED)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return compiled(name, plan, mesh).program_for(model, optimizer, batch(PLANNED))


# ---- bytes ------------------------------------------------------------------------------------

TIMES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def on_the_wire(kind: str, whole: float, n: int) -> float:
    """Bytes that a rank sends, where the tensor has `whole` bytes when it is gathered, or before it is scattered."""
    return TIMES.get(kind, 1) * whole * (n - 1) / n


def sent(found: Program) -> tuple[float, int]:
    """Bytes that a rank sends, and collectives, but for single numbers."""
    nbytes, count = 0.0, 0
    for c in found.collectives:
        n = prod(found.mesh.shape[found.mesh.axis(a)] for a in c.axis.split(","))
        if c.nbytes > 8:
            nbytes += on_the_wire(c.kind, c.nbytes * (n if c.kind == "all_gather" else 1), n)
            count += 1
    return nbytes, count


def by_hand(name: str, plan: Plan, found: Program) -> tuple[float, int]:
    """The same by the formulas."""
    nbytes, count = 0.0, 0
    for places in found.places.values():
        for kind, share, axis in plan.each:
            nbytes += on_the_wire(kind, share * places.computed.local_nbytes, plan.axes[axis])
            count += 1
    if "tp" in plan.axes and TP[name]:
        activations = PLANNED.batch // plan.axes["dp"] * PLANNED.time * PLANNED.width * 8
        products = (2 if name == "mixtral" else 4) * PLANNED.layers
        nbytes += products * on_the_wire("all_reduce", activations, plan.axes["tp"])
        count += products
    return nbytes, count


# ---- trained ----------------------------------------------------------------------------------


def trained(name: str, plan: Plan) -> float:
    """How far losses and parameters are from those of one device after three steps, simulated."""
    alone = made(name, TRAINED)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    want = [train_step(alone, optimizer, batch(TRAINED)) for _ in range(3)]
    size = torch.Size(plan.axes.values())
    with spmd.LocalTensorMode(size.numel()):
        mesh = spmd.init_device_mesh("cpu", tuple(size), mesh_dim_names=tuple(plan.axes))
        model, step = made(name, TRAINED), compiled(name, plan, mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        got = [step(model, optimizer, batch(TRAINED)) for _ in range(3)]
        pairs = [*zip(got, want, strict=True), *zip(model.parameters(), alone.parameters(), strict=True)]
        return max(float((_whole(a) - b).abs().max()) for a, b in pairs)


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.detach().full_tensor().reconcile()


# ---- the table --------------------------------------------------------------------------------


def rows(names: Iterable[str], train: bool, show: Callable[..., None]) -> tuple[list[list[str]], bool]:
    found, good = [], True
    for name in names:
        for title, plan in PLANS.items():
            if "tp" in plan.axes and not TP[name]:
                continue
            planned = program(name, plan)
            (hand, count), (nbytes, mine) = by_hand(name, plan, planned), sent(planned)
            apart = trained(name, plan) if train else 0.0
            fine = nbytes <= ALLOWED * hand and mine <= ALLOWED * count and apart < APART
            good &= fine
            cells = [f"{hand / 1e6:.3f}", f"{nbytes / 1e6:.3f}", f"{nbytes / hand:.3f}", f"{count}", f"{mine}"]
            cells += [f"{max(gathered_bytes(planned)) / 1e6:.1f}", f"{apart:.0e}" if train else ""]
            cells += ["" if fine else "ABOVE"]
            found.append([name, title, *cells])
            show(*found[-1])
    return found, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=MODELS, help="these models")
    parser.add_argument("--train", action="store_true", help="train each for three steps, and compare with one device")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    header = ["model", "plan", "by hand, MB", "sent, MB", "ratio", "collectives by hand", "sent"]
    header += ["gathered at once, MB", "apart", ""]
    found, good = rows(args.only or MODELS, args.train, lambda *row: print(*row, sep="  ", flush=True))
    print(table(header, found, left=2))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
