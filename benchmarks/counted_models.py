"""What models of transformers send by their ready plans, eagerly and compiled: how many collectives, and their bytes.

    python benchmarks/counted_models.py

Small models in float32 on 2 x 2 ranks, dp and tp, fully sharded over dp; one step of SGD with a batch of 4 x 6 words.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import counted
import torch
import transformers
from _table import table
from torch import nn

import spmd
from spmd import LocalTensorMode, Shard, distribute_tensor, init_device_mesh
from spmd.debug import CommDebugMode
from spmd.parallel import parallelize_module, plan_for

SMALL = {"vocab_size": 51, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": 51, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 16}),
    "BERT": ("BertForMaskedLM", "BertConfig", SMALL | {
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}),
}  # fmt: skip
AXES = {"dp": 2, "tp": 2}


def made(name: str) -> nn.Module:
    kind, config, said = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**said)).train()


def step(net: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> torch.Tensor:
    loss = net(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss


def given() -> torch.Tensor:
    return torch.randint(3, 51, (4, 6), generator=torch.Generator().manual_seed(1))


def eager(name: str) -> list[tuple[str, int]]:
    with LocalTensorMode(4):
        mesh, net = init_device_mesh("cpu", tuple(AXES.values()), mesh_dim_names=tuple(AXES)), made(name)
        net = parallelize_module(net, mesh, plan_for(net, mesh))
        own = distribute_tensor(given(), mesh["dp"], [Shard(0)], src_data_rank=None).to_local()
        with CommDebugMode() as comm:
            step(net, torch.optim.SGD(net.parameters(), 0.1), own)
    return [(counted.SHORT.get(each.kind, each.kind), each.nbytes) for each in comm.counted]


def compiled(name: str) -> list[tuple[str, int]]:
    ranks = torch.arange(4).view(*AXES.values())
    mesh, net = spmd.DeviceMesh("cpu", ranks, mesh_dim_names=tuple(AXES)), made(name)
    plan = plan_for(net, mesh)
    made_step = spmd.compile(
        step, mesh, params=plan, fully_shard=plan.fully_shard, inputs={"ids": {"dp": Shard(0)}}
    )
    program = made_step.program_for(net, torch.optim.SGD(net.parameters(), 0.1), given())
    return [(each.kind, each.nbytes) for each in program.collectives]


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = [[name, *(counted.said(counted.total(send(name))) for send in (eager, compiled))] for name in MODELS]
    print(table(["model", "eager", "compiled"], rows, left=3))


if __name__ == "__main__":
    main()
