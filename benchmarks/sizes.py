"""Is a step captured again when its sizes change, what does a new size cost, and are its numbers those of one device?

    python benchmarks/sizes.py                  # gpt, gpt2 and llama, 2 layers, 20 sizes each
    python benchmarks/sizes.py --layers 12 --only gpt

Trains with plain SGD on four simulated ranks (2 x 2, the batch sharded), each step with another batch size and length:
even, uneven, smaller than the axis, one. The table has the captures, the CPU seconds of the first call and of a call
with a new size, median and largest, beside a call with a size that was there before, and the largest relative
difference of a loss. Exits 1 if a size is captured, or a model differs.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import transformers
from _table import table

import spmd
import spmd.expand.compile as compiling
from examples.gpt import GPT, GPTConfig
from spmd import LocalTensorMode, Shard

SIZES = [
    (4, 8), (4, 8), (4, 12), (2, 8), (6, 8), (3, 7), (1, 8), (8, 16), (7, 5), (1, 16), (4, 2), (5, 9), (4, 4), (2, 16),
    (2, 4), (9, 3), (1, 2), (16, 6), (3, 11), (10, 10), (1, 3),
]  # fmt: skip
"""The first step makes gradients, so that of the second has another state."""
WORDS = 64


def gpt(layers: int) -> torch.nn.Module:
    return GPT(GPTConfig(n_layer=layers, n_head=4, n_embd=16, block_size=32, vocab=WORDS))


def gpt2(layers: int) -> torch.nn.Module:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_layer=layers, n_embd=16, n_head=4, vocab_size=WORDS, n_positions=64, **none)
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=16, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS = {"gpt": gpt, "gpt2": gpt2, "llama": llama}


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    if isinstance(model, GPT):
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    else:
        loss = model(input_ids=x, labels=y).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def run(name: str, layers: int) -> list:
    torch.manual_seed(0)
    model = MODELS[name](layers).double()
    alone = copy.deepcopy(model)
    batches = [tuple(torch.randint(WORDS, size) for _ in "xy") for size in SIZES]
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    want = [step(alone, optimizer, *batch).item() for batch in batches]
    captures, real = [], compiling.capture
    with LocalTensorMode(4), mock.patch.object(compiling, "capture", lambda *a: captures.append(a) or real(*a)):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        compiled = spmd.compile(step, mesh, inputs={"[xy]": {"dp": Shard(0)}})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        got, seconds = [], []
        for batch in [*batches, batches[-1]]:
            begin = time.process_time()
            loss = compiled(model, optimizer, *batch)
            seconds.append(time.process_time() - begin)
            got.append(loss.full_tensor().reconcile().item())
    first, _, *new, again = seconds
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=False))
    return [name, layers, len(captures), first, statistics.median(new), max(new), again, worst]


HEADS = ["model", "layers", "captures", "first, s", "new size, s", "largest, s", "known size, s", "loss differs"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    found = [run(name, args.layers) for name in args.only]
    shown = [[row[0], *map(str, row[1:3]), *(f"{x:.2f}" for x in row[3:7]), f"{row[7]:.0e}"] for row in found]
    print(table(HEADS, shown))
    return int(any(row[2] > 2 or row[7] > 1e-6 for row in found))


if __name__ == "__main__":
    sys.exit(main())
