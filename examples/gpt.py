"""A small GPT and its training step, written for one device.

This file knows nothing of ranks, meshes or placements. ``spmd.compile`` gets it as it is.

    model = GPT(GPTConfig())
    optimizer = torch.optim.AdamW(model.parameters())
    loss = train_step(model, optimizer, tokens, targets)   # tokens, targets: int64[batch, time]
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT. ``tied``: the head shares its weight with the token embedding."""

    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 64
    vocab: int = 256
    tied: bool = True
    bias: bool = True

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise ValueError(
                f"a width of {self.n_embd} cannot be split into {self.n_head} heads of one size: "
                f"{self.n_head} does not divide {self.n_embd}. "
                f"A width of {math.ceil(self.n_embd / self.n_head) * self.n_head} fits."
            )


class Attention(nn.Module):
    """Causal self-attention, with a projection for each of q, k and v."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.q = nn.Linear(width, width, bias=config.bias)
        self.k = nn.Linear(width, width, bias=config.bias)
        self.v = nn.Linear(width, width, bias=config.bias)
        self.out = nn.Linear(width, width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, time, self.n_head, -1).transpose(1, 2)  # [batch, head, time, width / head]

        y = F.scaled_dot_product_attention(heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """int64[batch, time] tokens -> float[batch, time, vocab] logits, for any time up to ``config.block_size``."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(config.vocab, config.n_embd)
        self.pos_emb = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab, bias=False)
        self.apply(init)
        for block in self.blocks:
            for branch in (block.attn.out, block.mlp.down):  # as in GPT-2: keeps the variance of the residual stream
                nn.init.normal_(branch.weight, std=0.02 / math.sqrt(2 * config.n_layer))
        if config.tied:
            self.head.weight = self.tok_emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        x = self.tok_emb(tokens) + self.pos_emb(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def init(module: nn.Module) -> None:
    """Initialises as GPT-2 does: weights from N(0, 0.02), biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    """One step on one batch: forward, loss, backward, update. Returns the loss before the update, 0-dim."""
    optimizer.zero_grad()
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss
