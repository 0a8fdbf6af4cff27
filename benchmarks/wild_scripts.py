"""Train steps as people write them, each small: what `wild.py` compiles and compares with one device.

    SCRIPTS["gpt"]      Script(begin=gpt, step=gpt_step, batches=tokens)

The steps are plain Python for one device. A script makes what its step is given before the batch, and batches, of
which the last but one is short.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

SIZES = (8, 8, 8, 8, 5, 8)


@dataclass(frozen=True)
class Script:
    """A train step and what it is called with.

    begin: makes what the step gets before the batch; a scheduler among it stays outside of the step. batches: a batch
    by its size and a generator. schedule: called with what `begin` made, before each call but the first. draws: whether
    the step draws random numbers. tolerance: the difference that its own rounding allows. replicated: arguments of the
    batch that are not sharded. sizes: of the batches.
    """

    begin: Callable[[], tuple]
    step: Callable
    batches: Callable[[int, torch.Generator], tuple]
    schedule: Callable[[int, tuple], None] | None = None
    draws: bool = False
    tolerance: float = 1e-10
    replicated: tuple[str, ...] = ()
    sizes: tuple[int, ...] = SIZES


def images(n: int, g: torch.Generator) -> tuple:
    return torch.randn(n, 3, 8, 8, generator=g), torch.randint(0, 5, (n,), generator=g)


def vectors(n: int, g: torch.Generator) -> tuple:
    return torch.randn(n, 6, generator=g), torch.randint(0, 5, (n,), generator=g)


def only_vectors(n: int, g: torch.Generator) -> tuple:
    return (torch.randn(n, 6, generator=g),)


def tokens(n: int, g: torch.Generator) -> tuple:
    x = torch.randint(0, 11, (n, 9), generator=g)
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def mlp(*widths: int, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


# A GPT as in small trainers: groups with and without decay, accumulation, clipping, a cosine, an autocast and a scaler


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool = True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = mlp(width, 4 * width, width)

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, words: int = 11, width: int = 8, depth: int = 2, length: int = 8, checkpointed: bool = False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(length, width)
        self.h = nn.ModuleList([Block(width, 2) for _ in range(depth)])
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.wte.weight = self.lm_head.weight
        self.checkpointed = checkpointed

    def forward(self, idx, targets=None):
        _, t = idx.size()
        assert t <= self.wpe.num_embeddings, f"a sequence of {t} does not fit"
        x = self.wte(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def gpt(**options) -> tuple:
    model = GPT(**options)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)), torch.amp.GradScaler("cpu", init_scale=8.0)


def gpt_step(model, optimizer, scaler, x, y):
    for part, wanted in zip(x.chunk(2), y.chunk(2), strict=False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            _, loss = model(part, wanted)
            loss = loss / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach(), norm


def cosine(i: int, made: tuple) -> None:
    for group in made[1].param_groups:
        group["lr"] = 1e-3 + 0.5 * (1 + math.cos(math.pi * i / 6)) * 9e-3


# ViT, mixup, label smoothing, an average of the weights


class ViT(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.blocks, self.head = nn.Sequential(Block(width, 2, False), Block(width, 2, False)), nn.Linear(width, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        return self.head(self.blocks(x)[:, 0])


def vit() -> tuple:
    model = ViT()
    average = copy.deepcopy(model).requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), average


def vit_step(model, optimizer, average, x, y):
    lam = torch.rand(())
    order = torch.randperm(x.size(0))
    y = F.one_hot(y, 5).to(x.dtype)
    x, y = lam * x + (1 - lam) * x[order], lam * y + (1 - lam) * y[order]
    loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters(), strict=False):
            a.mul_(0.9).add_(p, alpha=0.1)
    return loss.item()


# ResNet, batch norm, Nesterov, one cycle


class Basic(nn.Module):
    def __init__(self, a: int, b: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        self.down = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)) if stride > 1 else None
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        skip = x if self.down is None else self.down(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += skip
        return self.relu(out)


def resnet() -> tuple:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        Basic(4, 4, 1), Basic(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)


def one_cycle(i: int, made: tuple) -> None:
    made[2].step()


def classify_step(model, optimizer, x, y):
    model.train()
    output = model(x)
    loss = F.cross_entropy(output, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    correct = output.argmax(1).eq(y).sum()
    return loss.detach(), correct


# Diffusion: random timesteps and noise, a small UNet, an average


class UNet(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.enter, self.down = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.mid, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width)
        self.up, self.leave = nn.ConvTranspose2d(width, width, 2, stride=2), nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, x, t):
        half = self.time[0].in_features // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, dtype=x.dtype, device=x.device) / half)
        angles = t[:, None].to(x.dtype) * rates[None]
        t = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        first = self.enter(x)
        h = self.down(first) + t[:, :, None, None]
        h = self.up(h + F.silu(self.norm(self.mid(h))))
        return self.leave(torch.cat([h, first], dim=1))


class Diffusion(nn.Module):
    def __init__(self, steps: int = 20):
        super().__init__()
        self.net = UNet()
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, steps), 0))

    def forward(self, x):
        t = torch.randint(0, len(self.alphas), (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        a = self.alphas[t].view(-1, 1, 1, 1)
        return F.mse_loss(self.net(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


def diffusion() -> tuple:
    model = Diffusion()
    return (
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)),
    )


def diffusion_step(model, optimizer, average, x, y):
    loss = model(x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    average.update_parameters(model)
    return loss.detach()


# VAE and VQ-VAE


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mu, self.logvar = mlp(6, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        self.dec = mlp(2, 8, 6, act=nn.ReLU)

    def forward(self, x):
        h = F.relu(self.enc(x))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def vae() -> tuple:
    model = VAE()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def vae_step(model, optimizer, x):
    optimizer.zero_grad()
    recon, mu, logvar = model(x)
    bce = F.binary_cross_entropy_with_logits(recon, x.sigmoid(), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    loss = (bce + kld) / len(x)
    loss.backward()
    optimizer.step()
    return {"loss": loss.item(), "kld": kld.item()}


class Quantizer(nn.Module):
    def __init__(self, codes: int = 5, width: int = 4):
        super().__init__()
        self.register_buffer("embed", torch.randn(codes, width))
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("total", self.embed.clone())

    def forward(self, x):
        codes = torch.cdist(x, self.embed).argmin(-1)
        hot = F.one_hot(codes, self.embed.shape[0]).type(x.dtype)
        found = F.embedding(codes, self.embed)
        if self.training:
            with torch.no_grad():
                self.size.data.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.total.data.mul_(0.9).add_(hot.t() @ x, alpha=0.1)
                n = self.size.sum()
                smoothed = (self.size + 1e-5) / (n + self.embed.shape[0] * 1e-5) * n
                self.embed.data.copy_(self.total / smoothed.unsqueeze(1))
        return x + (found - x).detach(), F.mse_loss(x, found.detach()), codes


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.quantizer, self.dec = mlp(6, 8, 4), Quantizer(), mlp(4, 8, 6)

    def forward(self, x):
        z, commit, codes = self.quantizer(self.enc(x))
        return self.dec(z), commit, codes


def vqvae() -> tuple:
    model = VQVAE()
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def vqvae_step(model, optimizer, x):
    out, commit, codes = model(x)
    loss = F.mse_loss(out, x) + 0.25 * commit
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    used = torch.bincount(codes, minlength=5)
    return loss.detach(), used


# GANs

# A bias before a batch norm, or one that a difference cancels, has a gradient that is zero but for rounding, about
# 1e-17. With an eps of 1e-8 Adam makes of it steps of 1e-11 of either sign, and one device makes others, too, where the
# last bits of its numbers differ. With this one they are too small to matter.
STEADY = 1e-6


class Adversaries(nn.Module):
    def __init__(self, normed: bool = False):
        super().__init__()
        spectral = nn.utils.parametrizations.spectral_norm if normed else lambda layer: layer
        self.g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 6))
        self.d = nn.Sequential(spectral(nn.Linear(6, 8)), nn.LeakyReLU(0.2), spectral(nn.Linear(8, 1)))


def gan(normed: bool = False) -> tuple:
    nets = Adversaries(normed)
    of_g, of_d = (torch.optim.Adam(net.parameters(), 1e-2, (0.5, 0.999), STEADY) for net in (nets.g, nets.d))
    return nets.g, nets.d, of_g, of_d


def noisy(n: int, g: torch.Generator) -> tuple:
    return torch.randn(n, 6, generator=g), torch.randn(n, 4, generator=g)


def gan_step(g, d, opt_g, opt_d, x, z):
    real, fake = torch.ones(x.size(0), 1), torch.zeros(x.size(0), 1)
    made = g(z)
    d.zero_grad()
    loss_d = F.binary_cross_entropy_with_logits(d(x), real) + F.binary_cross_entropy_with_logits(d(made.detach()), fake)
    loss_d.backward()
    opt_d.step()
    g.zero_grad()
    loss_g = F.binary_cross_entropy_with_logits(d(made), real)
    loss_g.backward()
    opt_g.step()
    return loss_d.detach(), loss_g.detach()


def penalty_step(g, d, opt_g, opt_d, x, z):
    for p in d.parameters():
        p.requires_grad_(True)
    fake = g(z).detach()
    alpha = torch.rand(x.size(0), 1, device=x.device).expand_as(x)
    between = (alpha * x + (1 - alpha) * fake).requires_grad_(True)
    out = d(between)
    (grad,) = torch.autograd.grad(out, between, torch.ones_like(out), create_graph=True, retain_graph=True)
    penalty = ((grad.view(grad.size(0), -1).norm(2, dim=1) - 1) ** 2).mean()
    loss_d = d(fake).mean() - d(x).mean() + 10 * penalty
    opt_d.zero_grad()
    loss_d.backward()
    opt_d.step()
    for p in d.parameters():
        p.requires_grad_(False)
    loss_g = -d(g(z)).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    for p in d.parameters():
        p.requires_grad_(True)
    return loss_d.item(), loss_g.item(), penalty.item()


# Reinforcement learning


def dqn() -> tuple:
    q = mlp(6, 8, 5, act=nn.ReLU)
    target = copy.deepcopy(q)
    return q, target, torch.optim.RMSprop(q.parameters(), lr=1e-3)


def transitions(n: int, g: torch.Generator) -> tuple:
    s, after = torch.randn(n, 6, generator=g), torch.randn(n, 6, generator=g)
    return (
        s,
        torch.randint(0, 5, (n,), generator=g),
        torch.randn(n, generator=g),
        after,
        torch.rand(n, generator=g) > 0.7,
    )


def dqn_step(q, target, optimizer, s, a, r, after, done):
    values = q(s).gather(1, a.unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        best = target(after).max(1)[0]
        best[done] = 0.0
    loss = F.smooth_l1_loss(values, r + 0.99 * best)
    optimizer.zero_grad()
    loss.backward()
    for p in q.parameters():
        p.grad.data.clamp_(-1, 1)
    optimizer.step()
    for t, p in zip(target.parameters(), q.parameters(), strict=False):
        t.data.copy_(0.05 * p.data + 0.95 * t.data)
    return loss.item()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = mlp(6, 8, 8, act=nn.Tanh), nn.Linear(8, 5), nn.Linear(8, 1)

    def forward(self, x):
        x = self.body(x)
        return torch.distributions.Categorical(logits=self.actor(x), validate_args=False), self.critic(x).squeeze(-1)


def ppo() -> tuple:
    model = ActorCritic()
    return model, torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)


def rollouts(n: int, g: torch.Generator) -> tuple:
    old, adv, ret = (torch.randn(n, generator=g) for _ in range(3))
    return torch.randn(n, 6, generator=g), torch.randint(0, 5, (n,), generator=g), old - 2, adv, ret


def ppo_step(model, optimizer, s, a, old, adv, ret):
    dist, value = model(s)
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    ratio = (dist.log_prob(a) - old).exp()
    with torch.no_grad():
        kl = ((ratio - 1) - ratio.log()).mean()
        clipped = ((ratio - 1.0).abs() > 0.2).float().mean().item()
    policy = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
    loss = policy - 0.01 * dist.entropy().mean() + 0.5 * 0.5 * ((value - ret) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach(), kl, clipped


# Contrastive


def with_adam(make: Callable[[], nn.Module], eps: float = 1e-8) -> Callable[[], tuple]:
    def begin() -> tuple:
        model = make()
        return model, torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2, eps=eps)

    return begin


def pairs(n: int, g: torch.Generator) -> tuple:
    x = torch.randn(n, 6, generator=g)
    return x, x + 0.1 * torch.randn(n, 6, generator=g)


def simclr_step(model, optimizer, x, y):
    z = F.normalize(model(torch.cat([x, y], dim=0)), dim=1)
    n = x.shape[0]
    similar = z @ z.T / 0.5
    similar.fill_diagonal_(-1e9)
    wanted = torch.cat([torch.arange(n) + n, torch.arange(n)])
    loss = F.cross_entropy(similar, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = mlp(6, 8, 4), mlp(6, 8, 4)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x, y):
        a, b = self.image(x), self.text(y)
        a, b = a / a.norm(dim=-1, keepdim=True), b / b.norm(dim=-1, keepdim=True)
        logits = self.logit_scale.exp() * a @ b.t()
        return logits, logits.t()


def clip_step(model, optimizer, x, y):
    rows, columns = model(x, y)
    labels = torch.arange(len(x), device=x.device)
    loss = (F.cross_entropy(rows, labels) + F.cross_entropy(columns, labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.logit_scale.data.clamp_(0, math.log(100))
    return loss.detach()


def triples(n: int, g: torch.Generator) -> tuple:
    return tuple(torch.randn(n, 6, generator=g) for _ in range(3))


def triplet_step(model, optimizer, x, y, z):
    a, p, n = model(x), model(y), model(z)
    loss = nn.TripletMarginLoss(margin=1.0)(a, p, n)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# Sequences


class WordLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(11, 6), nn.LSTM(6, 8, 2, batch_first=True), nn.Linear(8, 11)

    def forward(self, x, hidden=None):
        x, hidden = self.rnn(self.emb(x), hidden)
        return self.out(x), hidden


def lstm_step(model, optimizer, x, y):
    hidden, losses = None, []
    for i in range(0, x.size(1), 4):
        out, hidden = model(x[:, i : i + 4], hidden)
        loss = F.cross_entropy(out.reshape(-1, 11), y[:, i : i + 4].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        hidden = tuple(h.detach() for h in hidden)
        losses.append(loss.item())
    return sum(losses) / len(losses)


class Seq2Seq(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.emb, self.enc = nn.Embedding(11, width), nn.GRU(width, width, batch_first=True)
        self.cell = nn.GRUCell(width, width)
        self.attn, self.out = nn.Linear(width, width, bias=False), nn.Linear(2 * width, 11)

    def forward(self, src, tgt):
        memory, h = self.enc(self.emb(src))
        h, mask, outs = h[0], src.eq(0), []
        for t in range(tgt.size(1)):
            h = self.cell(self.emb(tgt[:, t]), h)
            scores = torch.bmm(memory, self.attn(h).unsqueeze(2)).squeeze(2).masked_fill(mask, -1e9)
            context = torch.bmm(scores.softmax(1).unsqueeze(1), memory).squeeze(1)
            outs.append(self.out(torch.cat([h, context], 1)))
        return torch.stack(outs, 1)


def seq2seq_step(model, optimizer, x, y):
    optimizer.zero_grad()
    out = model(x, y[:, :-1])
    loss = F.cross_entropy(out.transpose(1, 2), y[:, 1:], ignore_index=0)
    loss.backward()
    optimizer.step()
    mask = y[:, 1:] != 0  # (...)[mask] has a size that depends on values, which a program has no symbol for
    return loss.detach(), ((out.argmax(-1) == y[:, 1:]) & mask).sum() / mask.sum()


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, padding=1)
        self.rnn, self.out = nn.GRU(8, 6, bidirectional=True, batch_first=True), nn.Linear(12, 5)

    def forward(self, x):
        x = F.relu(self.conv(x)).transpose(1, 2)
        return self.out(self.rnn(x)[0]).log_softmax(-1)


def speech(n: int, g: torch.Generator) -> tuple:
    lengths = torch.randint(8, 11, (n,), generator=g)
    return torch.randn(n, 4, 10, generator=g), torch.randint(1, 5, (n, 3), generator=g), lengths, torch.full((n,), 3)


def ctc_step(model, optimizer, x, y, lengths, wanted):
    logp = model(x).transpose(0, 1)
    loss = F.ctc_loss(logp, y, lengths, wanted, zero_infinity=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


# Graphs, words, tables


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.message, self.update, self.head = mlp(12, 8), mlp(14, 8, 6), nn.Linear(6, 2)

    def forward(self, x, edges, graph, n):
        src, dst = edges
        for _ in range(2):
            sent = F.relu(self.message(torch.cat([x[src], x[dst]], -1)))
            total = torch.zeros(x.size(0), 8, dtype=x.dtype).index_add_(0, dst, sent)
            degree = torch.zeros(x.size(0), dtype=x.dtype).scatter_add_(0, dst, torch.ones_like(dst, dtype=x.dtype))
            x = x + self.update(torch.cat([x, total / degree.clamp(min=1).unsqueeze(1)], -1))
        pooled = torch.zeros(n, 6, dtype=x.dtype).scatter_reduce(
            0, graph[:, None].expand(-1, 6), x, "mean", include_self=False
        )
        return self.head(pooled)


def graphs(n: int, g: torch.Generator) -> tuple:
    nodes = 3 * n
    edges = torch.randint(0, nodes, (2, 4 * n), generator=g)
    return torch.randn(nodes, 6, generator=g), edges, torch.arange(nodes) // 3, torch.randint(0, 2, (n,), generator=g)


def graph_step(model, optimizer, x, edges, graph, y):
    loss = F.cross_entropy(model(x, edges, graph, y.shape[0]), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Word2Vec(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.EmbeddingBag(11, 6, mode="mean", sparse=False), nn.Embedding(11, 6)

    def forward(self, context, word, negative):
        v = self.into(context)
        good = F.logsigmoid((v * self.out(word)).sum(-1))
        bad = F.logsigmoid(-torch.bmm(self.out(negative), v.unsqueeze(2)).squeeze(2)).sum(1)
        return -(good + bad).mean()


def words(n: int, g: torch.Generator) -> tuple:
    return tuple(torch.randint(0, 11, s, generator=g) for s in ((n, 4), (n,), (n, 3)))


def loss_step(model, optimizer, *batch):
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def word2vec_step(model, optimizer, context, word, negative):
    return loss_step(model, optimizer, context, word, negative)


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom, self.top = mlp(6, 8, 4, act=nn.ReLU), mlp(4 + 6, 8, 1, act=nn.ReLU)
        self.tables = nn.ModuleList([nn.EmbeddingBag(n, 4, mode="sum") for n in (7, 11, 5)])

    def forward(self, x, offsets, *indices):
        d = self.bottom(x)
        t = torch.stack([d] + [e(i, offsets) for e, i in zip(self.tables, indices, strict=False)], 1)
        z = torch.bmm(t, t.transpose(1, 2))
        li, lj = torch.tril_indices(4, 4, offset=-1)
        return self.top(torch.cat([d, z[:, li, lj]], 1)).squeeze(1)


def clicks(n: int, g: torch.Generator) -> tuple:
    indices = [torch.randint(0, size, (2 * n,), generator=g) for size in (7, 11, 5)]
    return torch.randn(n, 6, generator=g), torch.arange(n) * 2, *indices, torch.rand(n, generator=g).round()


def dlrm() -> tuple:
    model = DLRM()
    return model, torch.optim.Adagrad(model.parameters(), lr=1e-2)


def dlrm_step(model, optimizer, x, offsets, a, b, c, y):
    loss = F.binary_cross_entropy(torch.sigmoid(model(x, offsets, a, b, c)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


# Experts, adapters, distillation


class Experts(nn.Module):
    def __init__(self, n: int = 4):
        super().__init__()
        self.embed, self.gate, self.head = nn.Linear(6, 8), nn.Linear(8, n, bias=False), nn.Linear(8, 5)
        self.experts = nn.ModuleList([mlp(8, 16, 8, act=nn.SiLU) for _ in range(n)])

    def forward(self, x):
        x = self.embed(x)
        probs = self.gate(x).softmax(-1)
        weights, chosen = probs.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            w = (weights * (chosen == i)).sum(-1, keepdim=True)
            out = out + w * expert(x)
        load = F.one_hot(chosen, len(self.experts)).to(x.dtype).mean((0, 1))
        return self.head(out), len(self.experts) * (load * probs.mean(0)).sum()


def moe_step(model, optimizer, x, y):
    out, aux = model(x)
    loss = F.cross_entropy(out, y) + 0.01 * aux
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss.item(), aux.item()


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2, alpha: float = 4.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + (x @ self.a.T @ self.b.T) * self.scaling


def lora() -> tuple:
    net = mlp(6, 8, 8, 5).requires_grad_(False)
    for i in (0, 2):
        net[i] = LoRA(net[i])
    return net, torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=1e-2)


def plain_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def distil() -> tuple:
    teacher = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 5))
    student = mlp(6, 8, 5)
    return teacher, student, torch.optim.SGD(student.parameters(), lr=0.1)


def distil_step(teacher, student, optimizer, x, y):
    teacher.eval()
    student.train()
    with torch.inference_mode():
        wanted = teacher(x)
    out = student(x)
    soft = F.kl_div(F.log_softmax(out / 4, 1), F.softmax(wanted / 4, 1), reduction="batchmean") * 16
    loss = 0.7 * soft + 0.3 * F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# Optimisers of their own


def maml_step(model, optimizer, x, y):
    support, query = x[::2], x[1::2]
    optimizer.zero_grad()
    weights = dict(model.named_parameters())
    inner = F.cross_entropy(torch.func.functional_call(model, weights, support), y[::2])
    grads = torch.autograd.grad(inner, weights.values())
    fast = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), grads, strict=False)}
    loss = F.cross_entropy(torch.func.functional_call(model, fast, query), y[1::2])
    loss.backward()
    optimizer.step()
    return inner.item(), loss.item()


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        norms = [p.grad.norm(p=2) for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.norm(torch.stack(norms), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old"]
        self.base.step()
        self.zero_grad()


def sam() -> tuple:
    model = mlp(6, 8, 5)
    return model, SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def sam_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.first_step()
    F.cross_entropy(model(x), y).backward()
    optimizer.second_step()
    return loss.item()


class Lookahead(torch.optim.Optimizer):
    def __init__(self, base, k=3, alpha=0.5):
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [[p.detach().clone() for p in g["params"]] for g in base.param_groups]

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)

    def state_dict(self):
        return {"base": self.base.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        self.base.load_state_dict(state["base"])
        self.slow, self.count = state["slow"], state["count"]
        self.state = self.base.state

    @torch.no_grad()
    def step(self):
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=False):
                for p, q in zip(group["params"], slow, strict=False):
                    q.add_(p - q, alpha=self.alpha)
                    p.copy_(q)


def lookahead() -> tuple:
    model = mlp(6, 8, 5)
    return model, Lookahead(torch.optim.Adam(model.parameters(), lr=1e-2))


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "buf" not in state:
                    state["buf"] = torch.zeros_like(p.grad)
                buf = state["buf"]
                buf.lerp_(p.grad, 1 - group["momentum"])
                g = p.grad.lerp(buf, group["momentum"])
                x = g / (g.norm() + 1e-7)
                flip = x.size(0) > x.size(1)
                x = x.T if flip else x
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if flip else x
                p.add_(x, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


def muon() -> tuple:
    model = mlp(6, 8, 8, 5)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return model, Muon(matrices), torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=1e-2)


def muon_step(model, first, second, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    for optimizer in (first, second):
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return loss.item()


def adafactor() -> tuple:
    model = mlp(6, 8, 5)
    return model, torch.optim.Adafactor(model.parameters(), lr=1e-2)


# Straight through, flows, equations


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Quantized(nn.Linear):
    def __init__(self, a: int, b: int):
        super().__init__(a, b)
        self.register_buffer("high", torch.tensor(0.0))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.high.copy_(torch.maximum(self.high * 0.9, x.abs().max()))
        step = self.high.clamp(min=1e-8) / 126.5  # with 127 a rounding would say whether the largest is clamped
        x = Round.apply((x / step).clamp(-128, 127)) * step
        scale = self.weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-8) / 7
        return F.linear(x, Round.apply(self.weight / scale).clamp(-8, 7) * scale, self.bias)


def quantized() -> nn.Module:
    return nn.Sequential(Quantized(6, 8), nn.ReLU(), Quantized(8, 5))


class Coupling(nn.Module):
    def __init__(self, flip: bool):
        super().__init__()
        self.net, self.flip = mlp(3, 8, 6, act=nn.Tanh), flip
        self.mix = nn.Parameter(torch.eye(6) + 0.1 * torch.randn(6, 6))

    def forward(self, x):
        x, logdet = x @ self.mix.T, torch.slogdet(self.mix)[1]
        a, b = x.chunk(2, dim=1)
        a, b = (b, a) if self.flip else (a, b)
        s, t = self.net(a).chunk(2, dim=1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([b, a] if self.flip else [a, b], 1), logdet + s.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Coupling(bool(i % 2)) for i in range(2)])
        self.register_buffer("loc", torch.zeros(6))

    def forward(self, x):
        total = 0
        for layer in self.layers:
            x, logdet = layer(x)
            total = total + logdet
        base = torch.distributions.Normal(self.loc, torch.ones_like(self.loc), validate_args=False)
        return -(base.log_prob(x).sum(1) + total).mean()


def flow_step(model, optimizer, x):
    return loss_step(model, optimizer, x)


class ODE(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.head = mlp(6, 8, 6, act=nn.Tanh), nn.Linear(6, 5)

    def forward(self, x):
        h = 0.25
        for _ in range(4):
            a = self.f(x)
            b = self.f(x + h / 2 * a)
            c = self.f(x + h / 2 * b)
            d = self.f(x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return self.head(x)


def points(n: int, g: torch.Generator) -> tuple:
    return torch.rand(n, 1, generator=g), torch.rand(n, 1, generator=g)


def pinn_step(model, optimizer, x, t):
    x.requires_grad_(True)
    t.requires_grad_(True)
    u = model(torch.cat([x, t], 1))
    one = torch.ones_like(u)
    u_t = torch.autograd.grad(u, t, one, create_graph=True)[0]
    u_x = torch.autograd.grad(u, x, one, create_graph=True)[0]
    u_xx = torch.autograd.grad(u_x, x, one, create_graph=True)[0]
    loss = ((u_t + u * u_x - 0.01 / math.pi * u_xx) ** 2).mean()
    edge = model(torch.cat([torch.zeros_like(t), t], 1)).square().mean()
    optimizer.zero_grad()
    (loss + edge).backward()
    optimizer.step()
    return loss.item(), edge.item()


def fresh_pinn_step(model, optimizer, x, t):
    return pinn_step(model, optimizer, x.clone(), t.clone())


# transformers

# Llama's norms, softmax and loss are in float32 whatever the model is in, so sums over ranks differ in the last bit.
IN_FLOAT32 = 1e-6


def stock(name: str) -> tuple:
    import transformers

    small = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=11)
    if name == "bert":
        still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = transformers.BertForMaskedLM(transformers.BertConfig(max_position_embeddings=16, **still, **small))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **small))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, transformers.get_linear_schedule_with_warmup(optimizer, 2, 10)


def sentences(n: int, g: torch.Generator) -> tuple:
    x = torch.randint(1, 11, (n, 8), generator=g)
    mask = (torch.arange(8) < torch.randint(4, 9, (n, 1), generator=g)).long()
    return x, mask, torch.where(mask.bool(), x, -100)


def trainer_step(model, optimizer, input_ids, attention_mask, labels):
    model.train()
    outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
    outputs.loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    model.zero_grad()
    return outputs.loss.detach(), outputs.logits.detach()


SCRIPTS: dict[str, Script] = {
    "gpt, accumulation, scaler, cosine": Script(gpt, gpt_step, tokens, cosine),
    "gpt, checkpointed": Script(lambda: gpt(checkpointed=True), gpt_step, tokens, cosine),
    "vit, mixup, average": Script(vit, vit_step, images, cosine, draws=True),
    "resnet, one cycle": Script(resnet, classify_step, images, one_cycle),
    "diffusion, average": Script(diffusion, diffusion_step, images, cosine, draws=True),
    "vae": Script(vae, vae_step, only_vectors, draws=True),
    "vq-vae": Script(vqvae, vqvae_step, only_vectors),
    "gan": Script(gan, gan_step, noisy),
    "gan, spectral norm": Script(lambda: gan(True), gan_step, noisy),
    "wgan-gp": Script(gan, penalty_step, noisy, draws=True),
    "dqn": Script(dqn, dqn_step, transitions),
    "ppo": Script(ppo, ppo_step, rollouts, cosine),
    "simclr": Script(with_adam(lambda: mlp(6, 8, 4)), simclr_step, pairs),
    "clip": Script(with_adam(CLIP), clip_step, pairs),
    "triplet": Script(with_adam(lambda: mlp(6, 8, 4), STEADY), triplet_step, triples),
    "lstm, truncated": Script(with_adam(WordLSTM), lstm_step, tokens),
    "seq2seq": Script(with_adam(Seq2Seq), seq2seq_step, tokens),
    "ctc": Script(with_adam(Speech), ctc_step, speech),
    "graph": Script(with_adam(GraphNet), graph_step, graphs, replicated=("edges",)),
    "word2vec": Script(with_adam(Word2Vec), word2vec_step, words),
    "dlrm": Script(dlrm, dlrm_step, clicks),
    "experts, top 2": Script(with_adam(Experts), moe_step, vectors),
    "lora": Script(lora, plain_step, vectors, cosine),
    "distillation": Script(distil, distil_step, vectors),
    "maml, first order": Script(with_adam(lambda: mlp(6, 8, 5)), maml_step, vectors),
    "sam": Script(sam, sam_step, vectors, cosine),
    "lookahead": Script(lookahead, plain_step, vectors),
    "muon": Script(muon, muon_step, vectors),
    "adafactor": Script(adafactor, plain_step, vectors, cosine),
    "fake quantised": Script(with_adam(quantized), plain_step, vectors),
    "flow": Script(with_adam(Flow), flow_step, only_vectors),
    "neural ode": Script(with_adam(ODE), plain_step, vectors),
    "pinn": Script(with_adam(lambda: mlp(2, 8, 8, 1, act=nn.Tanh)), pinn_step, points),
    "pinn, cloned": Script(with_adam(lambda: mlp(2, 8, 8, 1, act=nn.Tanh)), fresh_pinn_step, points),
    "bert": Script(lambda: stock("bert"), trainer_step, sentences, one_cycle),
    "llama": Script(lambda: stock("llama"), trainer_step, sentences, one_cycle, tolerance=IN_FLOAT32),
}
