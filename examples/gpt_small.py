"""The GPT of `gpt.py` in a size that trains in seconds, as an example of `train.py`.

python -m examples.train gpt_small --mesh dp=2,tp=2
"""

from __future__ import annotations

from torch import nn

from .gpt import GPT, GPTConfig
from .llama import batches, loss_of

__all__ = ["MESHES", "batches", "loss_of", "make"]

MESHES = ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2})


def make() -> nn.Module:
    return GPT(GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16))
