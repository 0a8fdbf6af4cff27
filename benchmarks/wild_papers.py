"""More train steps as people write them, in the manner of papers' own code; `wild_scripts.py` says what a script is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from wild_scripts import (
    STEADY,
    ActorCritic,
    Script,
    UNet,
    cosine,
    gan,
    images,
    loss_step,
    mlp,
    noisy,
    one_cycle,
    only_vectors,
    pairs,
    plain_step,
    tokens,
    vectors,
    with_adam,
)

# Diffusion with guidance: labels that are dropped, a weighted loss, an average by lerp, samples by the way


class Guided(nn.Module):
    def __init__(self, classes: int = 5, steps: int = 20):
        super().__init__()
        self.net, self.label = UNet(), nn.Embedding(classes + 1, 3)
        self.classes, self.steps = classes, steps
        s = torch.linspace(0, 1, steps + 1)
        self.register_buffer("kept", (torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2)[1:].clamp(min=1e-3))

    def forward(self, x, t, y):
        return self.net(x + self.label(y)[:, :, None, None], t)

    @torch.no_grad()
    def sample(self, x, y, weight: float = 2.0):
        nothing = torch.full_like(y, self.classes)
        for i in reversed(range(0, self.steps, 8)):
            t = torch.full((x.shape[0],), i, device=x.device)
            noise = (1 + weight) * self(x, t, y) - weight * self(x, t, nothing)
            clean = (x - (1 - self.kept[i]).sqrt() * noise) / self.kept[i].sqrt()
            before = self.kept[max(i - 8, 0)]
            x = before.sqrt() * clean.clamp(-1, 1) + (1 - before).sqrt() * noise
        return x


def guided() -> tuple:
    model = Guided()
    return model, copy.deepcopy(model).eval().requires_grad_(False), torch.optim.AdamW(model.parameters(), lr=1e-3)


def guided_step(model, average, optimizer, x, y):
    t = torch.randint(0, model.steps, (x.size(0),), device=x.device)
    noise = torch.randn_like(x)
    kept = model.kept[t][:, None, None, None]
    y_in = torch.where(torch.rand(y.shape, device=y.device) < 0.1, model.classes, y)
    out = model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t, y_in)
    snr = (model.kept / (1 - model.kept))[t]
    loss = (snr.clamp(max=5) / snr * (out - noise).pow(2).mean(dim=(1, 2, 3))).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)
    return loss.detach(), average.sample(torch.randn_like(x), y)


# Self-supervised: MoCo's queue, BYOL, DINO, Barlow twins, VICReg, masks


class MoCo(nn.Module):
    def __init__(self, width: int = 4, keys: int = 16):
        super().__init__()
        self.q = mlp(6, 8, width)
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(width, keys), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x, y):
        q = F.normalize(self.q(x), dim=1)
        with torch.no_grad():
            for a, b in zip(self.q.parameters(), self.k.parameters(), strict=False):
                b.data = b.data * 0.9 + a.data * 0.1
            k = F.normalize(self.k(y), dim=1)
        good = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        bad = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        self.enqueue(k)
        logits = torch.cat([good, bad], dim=1) / 0.2
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device))

    @torch.no_grad()
    def enqueue(self, k):
        n = self.queue.shape[1]
        at = (self.queue_ptr + torch.arange(k.shape[0], device=k.device)) % n
        self.queue[:, at] = k.T
        self.queue_ptr[0] = (self.queue_ptr[0] + k.shape[0]) % n


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False
        self.predictor = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x, y):
        with torch.no_grad():
            of_x, of_y = self.target(torch.cat([x, y])).chunk(2)
        a, b = self.predictor(self.online(x)), self.predictor(self.online(y))
        return 4 - 2 * (F.cosine_similarity(a, of_y) + F.cosine_similarity(b, of_x)).mean()

    @torch.no_grad()
    def update(self, tau: float):
        for a, b in zip(self.online.parameters(), self.target.parameters(), strict=False):
            b.data.mul_(tau).add_((1 - tau) * a.data)


def pairs_step(model, optimizer, x, y):
    return loss_step(model, optimizer, x, y)


def byol_step(model, optimizer, x, y):
    loss = model(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.update(0.96)
    return loss.item()


class DINO(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(mlp(6, 8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 7, bias=False)))
        self.teacher = nn.Sequential(mlp(6, 8, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 7, bias=False)))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 7))


def dino_step(model, optimizer, x, y):
    crops = [x, y, x[:, [5, 4, 3, 2, 1, 0]]]
    student = model.student(torch.cat(crops)).chunk(3)
    with torch.no_grad():
        teacher = model.teacher(torch.cat(crops[:2]))
    total, terms = 0, 0
    for i, q in enumerate(F.softmax((teacher - model.center) / 0.04, dim=-1).detach().chunk(2)):
        for j, s in enumerate(student):
            if i != j:
                total += torch.sum(-q * F.log_softmax(s / 0.1, dim=-1), dim=-1).mean()
                terms += 1
    loss = total / terms
    optimizer.zero_grad()
    loss.backward()
    for p in model.student.parameters():
        if p.grad is not None:
            norm = p.grad.data.norm(2)
            p.grad.data.mul_(torch.clamp(3.0 / (norm + 1e-6), max=1.0))
    optimizer.step()
    with torch.no_grad():
        model.center.mul_(0.9).add_(teacher.mean(dim=0, keepdim=True), alpha=0.1)
        for a, b in zip(model.student.parameters(), model.teacher.parameters(), strict=False):
            b.mul_(0.99).add_(a.detach(), alpha=0.01)
    return loss.item()


def off_diagonal(x):
    n, m = x.shape
    assert n == m
    return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()


def barlow_step(model, optimizer, x, y):
    a, b = model(x), model(y)
    a, b = (a - a.mean(0)) / (a.std(0) + 1e-5), (b - b.mean(0)) / (b.std(0) + 1e-5)
    c = a.T @ b / x.size(0)
    barlow = torch.diagonal(c).add(-1).pow(2).sum() + 0.005 * off_diagonal(c).pow(2).sum()
    a, b = model(x), model(y)
    spread = sum(F.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean() for z in (a, b))
    covariance = sum(off_diagonal(torch.cov(z.T)).pow_(2).sum() / 4 for z in (a, b))
    loss = barlow + 25 * F.mse_loss(a, b) + 25 * spread + covariance
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Masked(nn.Module):
    def __init__(self, width: int = 8, patches: int = 16):
        super().__init__()
        self.patch, self.pos = nn.Linear(12, width), nn.Parameter(torch.randn(1, patches, width) * 0.02)
        self.mask = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.dec, self.out = nn.TransformerEncoderLayer(width, 2, 16, 0.0, batch_first=True), nn.Linear(width, 12)

    def forward(self, x):
        n, p = x.shape[0], 2
        x = x.reshape(n, 3, 4, p, 4, p).permute(0, 2, 4, 3, 5, 1).reshape(n, 16, 12)
        noise = torch.rand(n, 16, device=x.device)
        shuffle = torch.argsort(noise, dim=1)
        restore = torch.argsort(shuffle, dim=1)
        kept = shuffle[:, :4]
        h = self.patch(x) + self.pos
        h = self.enc(torch.gather(h, 1, kept.unsqueeze(-1).repeat(1, 1, h.shape[-1])))
        h = torch.cat([h, self.mask.repeat(n, 12, 1)], dim=1)
        h = torch.gather(h, 1, restore.unsqueeze(-1).expand(-1, -1, h.shape[-1]))
        mask = torch.ones(n, 16, device=x.device)
        mask[:, :4] = 0
        mask = torch.gather(mask, 1, restore)
        loss = (self.out(self.dec(h + self.pos)) - x).pow(2).mean(-1)
        return (loss * mask).sum() / mask.sum()


def masked_step(model, optimizer, x, y):
    return loss_step(model, optimizer, x)


# Privacy, adversaries, domains


def private_step(model, optimizer, x, y):
    """DP-SGD with the gradients of examples by torch.func, clipped, summed, with noise."""
    weights = {k: v.detach() for k, v in model.named_parameters()}

    def loss_of(weights, x, y):
        return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, p in model.named_parameters():
        total = torch.einsum("n,n...->...", factor, grads[name])
        p.grad = (total + 0.5 * torch.randn_like(total)) / x.shape[0]
    optimizer.step()
    optimizer.zero_grad()
    return norms.mean()


def clipped_step(model, optimizer, x, y):
    """A micro-batch of one example each, clipped by value, and noise on the sum."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y, reduction="sum")
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.01).div_(x.size(0))
    optimizer.step()
    return loss.item() / x.size(0)


def trades_step(model, optimizer, x, y):
    """TRADES: a projected ascent on the inputs, then the loss of both."""
    model.eval()
    bad = x.detach() + 0.001 * torch.randn_like(x)
    clean = F.softmax(model(x), dim=1).detach()
    for _ in range(3):
        bad.requires_grad_()
        with torch.enable_grad():
            kl = F.kl_div(F.log_softmax(model(bad), dim=1), clean, reduction="sum")
        grad = torch.autograd.grad(kl, [bad])[0]
        bad = bad.detach() + 0.01 * torch.sign(grad.detach())
        bad = torch.min(torch.max(bad, x - 0.03), x + 0.03)
    model.train()
    optimizer.zero_grad()
    logits = model(x)
    robust = F.kl_div(F.log_softmax(model(bad.detach()), 1), F.softmax(logits, 1), reduction="none").sum() / x.shape[0]
    loss = F.cross_entropy(logits, y) + 6.0 * robust
    loss.backward()
    optimizer.step()
    return loss.item(), (model(bad).argmax(1) == y).sum().item()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg() * ctx.alpha, None


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.classes, self.domain = mlp(6, 8, 8), nn.Linear(8, 5), mlp(8, 8, 2)

    def forward(self, x, alpha):
        h = self.features(x)
        return self.classes(h), self.domain(Reverse.apply(h, alpha))


def dann() -> tuple:
    model = DANN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)


def labelled_pairs(n: int, g: torch.Generator) -> tuple:
    return *pairs(n, g), torch.randint(0, 5, (n,), generator=g)


def dann_step(model, optimizer, source, target, y):
    p = 0.3
    alpha = 2.0 / (1.0 + math.exp(-10 * p)) - 1
    out, domain = model(source, alpha)
    n = source.size(0)
    weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.5])
    loss = F.cross_entropy(out, y, weight=weights, label_smoothing=0.1)
    loss = loss + F.cross_entropy(domain, torch.zeros(n, dtype=torch.long))
    loss = loss + F.cross_entropy(model(target, alpha)[1], torch.ones(target.size(0)).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def r1_step(g, d, opt_g, opt_d, x, z, every: int = 2):
    """StyleGAN's losses: softplus, R1 on the real ones, a path of the generator's average."""
    fake = g(z)
    for p in g.parameters():
        p.requires_grad_(False)
    x = x.detach().requires_grad_(True)
    real = d(x)
    loss_d = F.softplus(d(fake.detach())).mean() + F.softplus(-real).mean()
    (grad,) = torch.autograd.grad(outputs=real.sum(), inputs=x, create_graph=True)
    r1 = grad.pow(2).reshape(grad.shape[0], -1).sum(1).mean()
    opt_d.zero_grad()
    (loss_d + 5.0 * r1 * every + 0 * real[0, 0]).backward()
    opt_d.step()
    for p in g.parameters():
        p.requires_grad_(True)
    loss_g = F.softplus(-d(fake)).mean()
    opt_g.zero_grad()
    loss_g.backward()
    opt_g.step()
    return {"d": loss_d.item(), "g": loss_g.item(), "r1": r1.item()}


# Losses of many kinds


class Uncertain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(6, 8, 8)
        self.heads = nn.ModuleDict({"depth": nn.Linear(8, 1), "kind": nn.Linear(8, 5), "quantiles": nn.Linear(8, 3)})
        self.log_vars = nn.Parameter(torch.zeros(3))
        self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.9]))

    def forward(self, x):
        h = F.gelu(self.body(x))
        return {name: head(h) for name, head in self.heads.items()}


def uncertain_step(model, optimizer, x, z, y):
    out = model(x)
    error = z[:, :1] - out["quantiles"]
    losses = torch.stack(
        [
            F.huber_loss(out["depth"].squeeze(1), z[:, 0], delta=0.5),
            F.cross_entropy(out["kind"], y),
            torch.max((model.levels - 1) * error, model.levels * error).sum(1).mean(),
        ]
    )
    loss = (torch.exp(-model.log_vars) * losses + model.log_vars).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss.item(), "parts": losses.tolist()}


class ArcFace(nn.Module):
    def __init__(self, scale: float = 8.0, margin: float = 0.3):
        super().__init__()
        self.body, self.weight = mlp(6, 8, 4), nn.Parameter(torch.empty(5, 4))
        nn.init.xavier_uniform_(self.weight)
        self.register_buffer("centers", torch.randn(5, 4))
        self.scale, self.margin = scale, margin

    def forward(self, x, y):
        h = self.body(x)
        cos = F.linear(F.normalize(h), F.normalize(self.weight))
        sin = torch.sqrt((1.0 - cos.pow(2)).clamp(0, 1) + 1e-12)
        phi = cos * math.cos(self.margin) - sin * math.sin(self.margin)
        phi = torch.where(cos > math.cos(math.pi - self.margin), phi, cos - math.sin(self.margin) * self.margin)
        hot = torch.zeros(cos.size(), device=x.device)
        hot.scatter_(1, y.view(-1, 1).long(), 1)
        return (hot * phi + (1.0 - hot) * cos) * self.scale, h


def arcface_step(model, optimizer, x, y):
    logits, h = model(x, y)
    center = (h - model.centers.index_select(0, y)).pow(2).sum() / 2 / x.size(0)
    focal = F.cross_entropy(logits, y, reduction="none")
    loss = ((1 - torch.exp(-focal)) ** 2 * focal).mean() + 0.01 * center
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        count = torch.zeros(5).index_add_(0, y, torch.ones(y.size(0)))
        apart = torch.zeros_like(model.centers).index_add_(0, y, model.centers[y] - h.detach())
        model.centers -= 0.5 * apart / (1 + count)[:, None]
    return loss.item(), logits.topk(3, dim=1).indices.eq(y[:, None]).any(1).sum()


def segment_step(model, optimizer, x, y):
    """Dice and focal losses with a mask of what to ignore, and the counts of a mean IoU."""
    mask = (x.sum(1) * 10).long() % 3
    mask[:, 0, :] = 255
    logits = model(x, y)
    valid = mask != 255
    hot = F.one_hot(mask.masked_fill(~valid, 0), 3).permute(0, 3, 1, 2).to(x.dtype) * valid.unsqueeze(1)
    probs = logits.softmax(1) * valid.unsqueeze(1)
    dice = 1 - (2 * (probs * hot).sum((0, 2, 3)) + 1) / ((probs + hot).sum((0, 2, 3)) + 1)
    loss = dice.mean() + F.cross_entropy(logits, mask, ignore_index=255)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        best = logits.argmax(1)
        both = torch.stack([((best == c) & (mask == c)).sum() for c in range(3)])
        either = torch.stack([(((best == c) | (mask == c)) & valid).sum() for c in range(3)])
    return loss.item(), (both.float() / either.clamp(min=1)).mean().item()


def sinkhorn_step(model, optimizer, x, y):
    a, b = model(x), model(y)
    cost = torch.cdist(a, b) ** 2
    n, m = cost.shape
    f, g = torch.zeros(n), torch.zeros(m)
    for _ in range(5):
        f = -0.5 * torch.logsumexp((g[None, :] - cost) / 0.5 - math.log(m), dim=1)
        g = -0.5 * torch.logsumexp((f[:, None] - cost) / 0.5 - math.log(n), dim=0)
    plan = torch.exp((f[:, None] + g[None, :] - cost) / 0.5) / (n * m)
    loss = (plan * cost).sum() - 0.1 * a.var(0).sum().clamp(max=1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


# Discrete and relaxed


class Gumbel(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = mlp(6, 8, 12), mlp(12, 8, 6)

    def forward(self, x, tau):
        logits = self.enc(x).view(-1, 3, 4)
        z = F.gumbel_softmax(logits, tau=tau, hard=True, dim=-1)
        q = logits.softmax(-1)
        kl = (q * (q.clamp(min=1e-10).log() - math.log(1 / 4))).sum((1, 2)).mean()
        return F.mse_loss(self.dec(z.flatten(1)), x, reduction="sum") / x.shape[0] + kl


def gumbel_step(model, optimizer, x, tau=0.7):
    optimizer.zero_grad()
    loss = model(x, tau)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Sign(nn.Linear):
    def forward(self, x):
        w = self.weight
        scale = w.abs().mean(1, keepdim=True)
        w = w + (torch.sign(w) * scale - w).detach()
        x = x + (torch.where(x >= 0, 1.0, -1.0) - x.clamp(-1, 1)).detach() if self.in_features > 6 else x
        return F.linear(x, w, self.bias)


def binary_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.multi_margin_loss(model(x), y)
    loss.backward()
    optimizer.step()
    for p in model.parameters():
        p.data.clamp_(-1, 1)
    return loss.item()


# Sequences: a scan, linear attention, rotary positions with a cache, lengths, a CRF, windows


class Scan(nn.Module):
    """Mamba's block, with its scan as a loop."""

    def __init__(self, words: int = 11, width: int = 6, states: int = 3):
        super().__init__()
        self.emb, self.into = nn.Embedding(words, width), nn.Linear(width, 2 * width, bias=False)
        self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.x_proj, self.dt_proj = nn.Linear(width, 2 + 2 * states, bias=False), nn.Linear(2, width)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, states + 1).repeat(width, 1).to(torch.get_default_dtype())))
        self.D, self.out, self.states = nn.Parameter(torch.ones(width)), nn.Linear(width, words), states

    def forward(self, idx):
        x, gate = self.into(self.emb(idx)).chunk(2, dim=-1)
        length = x.shape[1]
        x = F.silu(self.conv(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        dt, b, c = torch.split(self.x_proj(x), [2, self.states, self.states], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        a = torch.exp(torch.einsum("bld,dn->bldn", dt, -torch.exp(self.A_log)))
        bx = torch.einsum("bld,bln,bld->bldn", dt, b, x)
        h, outs = torch.zeros_like(a[:, 0]), []
        for i in range(length):
            h = a[:, i] * h + bx[:, i]
            outs.append(torch.einsum("bdn,bn->bd", h, c[:, i]))
        return self.out((torch.stack(outs, 1) + x * self.D) * F.silu(gate))


def words_step(model, optimizer, x, y):
    logits = model(x)
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item(), torch.exp(loss.detach())


class Linear(nn.Module):
    """Attention that is linear in the length, causal by running sums."""

    def __init__(self, words: int = 11, width: int = 8, heads: int = 2):
        super().__init__()
        self.emb, self.qkv, self.heads = nn.Embedding(words, width), nn.Linear(width, 3 * width), heads
        self.out, self.norm = nn.Linear(width, words), nn.RMSNorm(width)

    def forward(self, idx):
        x = self.norm(self.emb(idx))
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        kv = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(dim=2)
        z = 1 / (torch.einsum("bhnd,bhnd->bhn", q, k.cumsum(2)) + 1e-6)
        y = torch.einsum("bhnd,bhnde,bhn->bhne", q, kv, z)
        return self.out(y.transpose(1, 2).reshape(b, n, d))


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Rotary(nn.Module):
    """Grouped queries, rotary positions, and a cache of keys and values for what is generated."""

    def __init__(self, words: int = 11, width: int = 8, length: int = 16):
        super().__init__()
        self.emb, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.wq, self.wk = nn.Linear(width, width, bias=False), nn.Linear(width, width // 2, bias=False)
        self.wv, self.wo = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width, bias=False)
        angles = torch.outer(torch.arange(length).to(torch.get_default_dtype()), 1 / 100 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)

    def forward(self, idx, cache=None):
        b, n = idx.shape
        start = 0 if cache is None else cache[0].shape[2]
        x = self.emb(idx)
        q = self.wq(x).view(b, n, 2, 4).transpose(1, 2)
        k, v = (w(x).view(b, n, 1, 4).transpose(1, 2) for w in (self.wk, self.wv))
        cos, sin = self.cos[start : start + n], self.sin[start : start + n]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        mask = torch.ones(n, start + n, dtype=torch.bool, device=x.device).tril(diagonal=start)
        y = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask)
        return self.head(x + self.wo(y.transpose(1, 2).reshape(b, n, -1))), (k, v)

    @torch.no_grad()
    def generate(self, idx, n: int):
        logits, cache = self(idx)
        for _ in range(n):
            following = logits[:, -1:].argmax(-1)
            idx = torch.cat([idx, following], 1)
            logits, cache = self(following, cache)
        return idx


def rotary_step(model, optimizer, x, y):
    model.train()
    loss = F.cross_entropy(model(x)[0].transpose(1, 2), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    return loss.item(), model.generate(x[:, :3], 3)


class Lengths(nn.Module):
    """A bidirectional reader of padded sequences, with pooling by length."""

    def __init__(self):
        super().__init__()
        self.emb, self.rnn = nn.Embedding(11, 6, padding_idx=0), nn.LSTM(6, 4, bidirectional=True, batch_first=True)
        self.score, self.out = nn.Linear(8, 1), nn.Linear(24, 5)

    def forward(self, x, lengths):
        h, _ = self.rnn(self.emb(x))
        mask = torch.arange(x.size(1), device=x.device)[None, :] < lengths[:, None]
        mean = (h * mask[..., None]).sum(1) / lengths[:, None]
        most = h.masked_fill(~mask[..., None], float("-inf")).max(1).values
        weights = self.score(h).squeeze(-1).masked_fill(~mask, -1e9).softmax(-1)
        return self.out(torch.cat([mean, most, torch.einsum("bn,bnd->bd", weights, h)], -1))


def padded(n: int, g: torch.Generator) -> tuple:
    longest = int(torch.randint(5, 9, (), generator=g))
    lengths = torch.randint(2, longest + 1, (n,), generator=g)
    x = torch.randint(1, 11, (n, longest), generator=g) * (torch.arange(longest) < lengths[:, None])
    return x, lengths, torch.randint(0, 5, (n,), generator=g)


def lengths_step(model, optimizer, x, lengths, y):
    loss = F.cross_entropy(model(x, lengths), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class CRF(nn.Module):
    def __init__(self, words: int = 11, tags: int = 4):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(words, 6), nn.GRU(6, 8), nn.Linear(8, tags)
        self.start, self.moves = nn.Parameter(torch.randn(tags)), nn.Parameter(torch.randn(tags, tags))

    def forward(self, x, tags):
        e = self.out(self.rnn(self.emb(x.t()))[0])
        tags, every = tags.t() % 4, torch.arange(x.shape[0], device=x.device)
        mask = (x != 0).t()
        score = self.start[tags[0]] + e[0, every, tags[0]]
        alpha = self.start + e[0]
        for i in range(1, e.shape[0]):
            score += (self.moves[tags[i - 1], tags[i]] + e[i, every, tags[i]]) * mask[i]
            after = torch.logsumexp(alpha.unsqueeze(2) + self.moves + e[i].unsqueeze(1), dim=1)
            alpha = torch.where(mask[i].unsqueeze(1), after, alpha)
        return (torch.logsumexp(alpha, 1) - score).mean()


def tags_step(model, optimizer, x, y):
    return loss_step(model, optimizer, x, y)


class Windows(nn.Module):
    """Swin's attention in shifted windows with a table of relative positions."""

    def __init__(self, width: int = 8, window: int = 4, shift: int = 2):
        super().__init__()
        self.window, self.shift = window, shift
        self.enter, self.qkv, self.out = nn.Conv2d(3, width, 1), nn.Linear(width, 3 * width), nn.Linear(width, 5)
        self.norm, self.table = nn.LayerNorm(width), nn.Parameter(torch.randn((2 * window - 1) ** 2, 2) * 0.02)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", apart[..., 0] * (2 * window - 1) + apart[..., 1])
        place = torch.zeros(1, 8, 8, 1)
        for i, rows in enumerate((slice(0, -window), slice(-window, -shift), slice(-shift, None))):
            for j, columns in enumerate((slice(0, -window), slice(-window, -shift), slice(-shift, None))):
                place[:, rows, columns, :] = 3 * i + j
        place = self.split(place).squeeze(-1)
        apart = place.unsqueeze(1) - place.unsqueeze(2)
        self.register_buffer("mask", apart.masked_fill(apart != 0, -100.0))

    def split(self, x):
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, self.window * self.window, c)

    def forward(self, x):
        x = self.enter(x).permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        y = self.split(torch.roll(self.norm(x), shifts=(-self.shift, -self.shift), dims=(1, 2)))
        q, k, v = self.qkv(y).reshape(y.shape[0], -1, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        attn = (q * (c // 2) ** -0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(*self.index.shape, -1).permute(2, 0, 1).contiguous()
        attn = attn + bias.unsqueeze(0)
        n = self.mask.shape[0]
        attn = attn.view(y.shape[0] // n, n, 2, *attn.shape[-2:]) + self.mask.unsqueeze(1).unsqueeze(0)
        y = (
            (attn.view(-1, 2, *attn.shape[-2:]).softmax(-1) @ v)
            .transpose(1, 2)
            .reshape(-1, self.window, self.window, c)
        )
        y = y.view(b, h // self.window, w // self.window, self.window, self.window, c)
        y = y.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, c)
        x = x + torch.roll(y, shifts=(self.shift, self.shift), dims=(1, 2))
        return self.out(x.mean((1, 2)))


# Reinforcement learning: SAC, an advantage over time


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.log_std = mlp(6, 8, 8, act=nn.ReLU), nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, s):
        h = F.relu(self.body(s))
        std = self.log_std(h).clamp(-5, 2).exp()
        normal = torch.distributions.Normal(self.mean(h), std, validate_args=False)
        u = normal.rsample()
        a = torch.tanh(u)
        return a, (normal.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)).sum(1, keepdim=True)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1, self.q2 = mlp(8, 8, 1, act=nn.ReLU), mlp(8, 8, 1, act=nn.ReLU)

    def forward(self, s, a):
        sa = torch.cat([s, a], 1)
        return self.q1(sa), self.q2(sa)


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))


def sac() -> tuple:
    policy, critic, alpha = Policy(), Critic(), Temperature()
    of = [torch.optim.Adam(net.parameters(), lr=3e-3) for net in (policy, critic, alpha)]
    return policy, critic, copy.deepcopy(critic).requires_grad_(False), alpha, *of


def moves(n: int, g: torch.Generator) -> tuple:
    s, after = torch.randn(n, 6, generator=g), torch.randn(n, 6, generator=g)
    r, done = torch.randn(n, 1, generator=g), (torch.rand(n, 1, generator=g) > 0.8).to(torch.get_default_dtype())
    return s, torch.rand(n, 2, generator=g) * 2 - 1, r, after, done


def sac_step(policy, critic, target, alpha, opt_p, opt_c, opt_a, s, a, r, after, done):
    with torch.no_grad():
        a2, logp2 = policy(after)
        q = torch.min(*target(after, a2)) - alpha.log_alpha.exp() * logp2
        wanted = r + (1 - done) * 0.99 * q
    q1, q2 = critic(s, a)
    loss_c = F.mse_loss(q1, wanted) + F.mse_loss(q2, wanted)
    opt_c.zero_grad()
    loss_c.backward()
    opt_c.step()
    for p in critic.parameters():
        p.requires_grad = False
    made, logp = policy(s)
    loss_p = (alpha.log_alpha.exp().detach() * logp - torch.min(*critic(s, made))).mean()
    opt_p.zero_grad()
    loss_p.backward()
    opt_p.step()
    for p in critic.parameters():
        p.requires_grad = True
    loss_a = -(alpha.log_alpha * (logp + -2.0).detach()).mean()
    opt_a.zero_grad()
    loss_a.backward()
    opt_a.step()
    with torch.no_grad():
        for p, t in zip(critic.parameters(), target.parameters(), strict=False):
            t.data.mul_(0.995)
            t.data.add_(0.005 * p.data)
    return loss_c.item(), loss_p.item(), loss_a.item()


def episodes(n: int, g: torch.Generator) -> tuple:
    s, r = torch.randn(n, 7, 6, generator=g), torch.randn(n, 6, generator=g)
    return s, torch.randint(0, 5, (n, 6), generator=g), r, (torch.rand(n, 6, generator=g) > 0.9).to(r.dtype)


def gae_step(model, optimizer, s, a, r, done):
    """Advantages backwards over time into a tensor that is written step by step."""
    dist, values = model(s)
    with torch.no_grad():
        adv, last = torch.zeros_like(r), 0
        for t in reversed(range(r.shape[1])):
            alive = 1.0 - done[:, t]
            delta = r[:, t] + 0.99 * values[:, t + 1] * alive - values[:, t]
            adv[:, t] = last = delta + 0.99 * 0.95 * alive * last
        returns = adv + values[:, :-1]
    logp = torch.distributions.Categorical(logits=dist.logits[:, :-1], validate_args=False).log_prob(a)
    loss = -(logp * adv).mean() + 0.5 * F.mse_loss(values[:, :-1], returns) - 0.01 * dist.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), 1 - (returns - values[:, :-1]).var() / returns.var()


# Fields, energies, densities


class NeRF(nn.Module):
    def __init__(self, freqs: int = 2):
        super().__init__()
        self.freqs, self.net = freqs, mlp(3 + 6 * freqs, 8, 4)

    def encode(self, x):
        bands = 2.0 ** torch.arange(self.freqs, device=x.device)
        angles = (x[..., None] * bands).flatten(-2)
        return torch.cat([x, angles.sin(), angles.cos()], -1)

    def forward(self, rays):
        o, d = rays[:, None, :3], rays[:, None, 3:]
        t = torch.linspace(0.5, 2.0, 6, device=rays.device).expand(rays.shape[0], 6)
        t = t + torch.rand_like(t) * 0.1
        rgb, sigma = self.net(self.encode(o + d * t[..., None])).split([3, 1], dim=-1)
        apart = torch.cat([t[:, 1:] - t[:, :-1], torch.full_like(t[:, :1], 1e10)], -1)
        alpha = 1 - torch.exp(-F.relu(sigma[..., 0]) * apart)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        weights = alpha * through
        return (weights[..., None] * rgb.sigmoid()).sum(1), weights.sum(-1)


def nerf_step(model, optimizer, x, z):
    rgb, acc = model(x)
    loss = F.mse_loss(rgb + (1 - acc[:, None]), z[:, :3].sigmoid())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), -10 * math.log10(loss.item())


def rays(n: int, g: torch.Generator) -> tuple:
    return torch.randn(n, 6, generator=g), torch.randn(n, 4, generator=g)


def energy_step(model, optimizer, x):
    """Contrastive divergence: Langevin steps by the gradient of the inputs."""
    fake = torch.randn_like(x)
    for p in model.parameters():
        p.requires_grad = False
    fake.requires_grad = True
    for _ in range(3):
        out = -model(fake)
        out.sum().backward()
        fake.grad.data.clamp_(-0.03, 0.03)
        fake.data.add_(-0.1 * fake.grad.data)
        fake.grad.detach_()
        fake.grad.zero_()
    for p in model.parameters():
        p.requires_grad = True
    good, bad = model(torch.cat([x, fake.detach()])).chunk(2, dim=0)
    loss = 0.1 * (good**2 + bad**2).mean() + bad.mean() - good.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Mixture(nn.Module):
    def __init__(self, k: int = 3):
        super().__init__()
        self.net, self.k = mlp(6, 8, 3 * k, act=nn.Tanh), k

    def forward(self, x, y):
        logits, mu, log_sigma = self.net(x).chunk(3, -1)
        normals = torch.distributions.Normal(mu, log_sigma.exp().clamp(min=1e-3), validate_args=False)
        kinds = torch.distributions.Categorical(logits=logits, validate_args=False)
        return -torch.distributions.MixtureSameFamily(kinds, normals, validate_args=False).log_prob(y).mean()


def mixture_step(model, optimizer, x, y):
    return loss_step(model, optimizer, x, y[:, 0])


# Averages and mixes


def swa() -> tuple:
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    return model, average, optimizer, torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=3)


def swa_schedule(i: int, made: tuple) -> None:
    made[3].step()


def swa_step(model, average, optimizer, x, y):
    loss = F.nll_loss(F.log_softmax(model(x), 1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    return loss.item()


class Deep(nn.Module):
    """Residual blocks that are left out at random, and a dropout of whole channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.AdaptiveAvgPool2d((2, 2))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())] * 2)
        self.scales = nn.ParameterList([nn.Parameter(1e-1 * torch.ones(4)) for _ in range(2)])
        self.drop, self.head = nn.Dropout2d(0.2), nn.Linear(16, 5)

    def forward(self, x):
        x = self.stem(x)
        for scale, block in zip(self.scales, self.blocks, strict=False):
            y = block(x) * scale[:, None, None]
            if self.training:
                y = y * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.8).div_(0.8)
            x = x + y
        return self.head(self.drop(self.pool(x)).flatten(1))


def cutmix_step(model, optimizer, x, y, box):
    lam = torch.rand(())
    order = torch.randperm(x.shape[0], device=x.device)
    rows, columns = torch.arange(x.shape[2]), torch.arange(x.shape[3])
    inside = ((rows >= box[0]) & (rows < box[1]))[:, None] & ((columns >= box[2]) & (columns < box[3]))[None]
    cut = torch.where(inside, x[order], x)
    share = 1 - inside.to(x.dtype).mean()
    mixed = lam * x + (1 - lam) * x[order]
    loss = 0.0
    for given, kept in ((cut, share), (mixed, lam)):
        out = model(given)
        loss = loss + kept * F.cross_entropy(out, y) + (1 - kept) * F.cross_entropy(out, y[order])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def boxed(n: int, g: torch.Generator) -> tuple:
    a, b = (torch.randint(0, 4, (), generator=g) for _ in range(2))
    return *images(n, g), torch.stack([a, a + 3, b, b + 4])


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.mid = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)
        self.norm, self.out = nn.InstanceNorm2d(4, affine=True), nn.Conv2d(7, 3, 1)

    def forward(self, x, y):
        h = F.leaky_relu(self.norm(self.mid(F.relu(self.down(x)))), 0.1)
        h = F.interpolate(h, size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(torch.cat([h, x], 1))


def with_sgd(make: Callable[[], nn.Module]) -> Callable[[], tuple]:
    def begin() -> tuple:
        model = make()
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    return begin


PAPERS: dict[str, Script] = {
    "guided diffusion": Script(guided, guided_step, images, draws=True),
    "moco": Script(with_sgd(MoCo), pairs_step, pairs),
    "byol": Script(with_adam(BYOL, STEADY), byol_step, pairs),
    "dino": Script(with_adam(DINO), dino_step, pairs, cosine),
    "barlow, vicreg": Script(with_adam(lambda: mlp(6, 8, 4), STEADY), barlow_step, pairs),
    "masked images": Script(with_adam(Masked), masked_step, images, draws=True),
    "dp-sgd by vmap": Script(with_sgd(lambda: mlp(6, 8, 5)), private_step, vectors, draws=True),
    "clip by value, noise": Script(with_sgd(lambda: mlp(6, 8, 5)), clipped_step, vectors, draws=True),
    "trades": Script(with_sgd(lambda: mlp(6, 8, 5)), trades_step, vectors, draws=True),
    "dann, warm restarts": Script(dann, dann_step, labelled_pairs, one_cycle),
    "r1": Script(gan, r1_step, noisy),
    "uncertainty, quantiles": Script(with_adam(Uncertain), uncertain_step, labelled_pairs),
    "arcface, centers": Script(with_sgd(ArcFace), arcface_step, vectors),
    "segmentation": Script(with_adam(Segmenter, STEADY), segment_step, images),
    "sinkhorn": Script(with_sgd(lambda: mlp(6, 8, 4)), sinkhorn_step, pairs),
    "gumbel": Script(with_adam(Gumbel), gumbel_step, only_vectors, draws=True),
    "binary": Script(with_sgd(lambda: nn.Sequential(Sign(6, 8), nn.BatchNorm1d(8), Sign(8, 5))), binary_step, vectors),
    "mamba": Script(with_adam(Scan), words_step, tokens),
    "linear attention": Script(with_adam(Linear), words_step, tokens),
    "rotary, generation": Script(with_adam(Rotary), rotary_step, tokens),
    "lengths": Script(with_adam(Lengths), lengths_step, padded),
    "crf": Script(with_adam(CRF), tags_step, tokens),
    "windows": Script(with_adam(Windows), plain_step, images),
    "sac": Script(sac, sac_step, moves, draws=True),
    "advantages": Script(with_adam(ActorCritic), gae_step, episodes),
    "nerf": Script(with_adam(NeRF), nerf_step, rays, draws=True),
    "energies": Script(with_adam(lambda: mlp(6, 8, 1, act=nn.SiLU)), energy_step, only_vectors, draws=True),
    "mixture": Script(with_adam(Mixture), mixture_step, pairs),
    "swa": Script(swa, swa_step, vectors, swa_schedule),
    "cutmix, stochastic depth": Script(with_sgd(Deep), cutmix_step, boxed, draws=True),
}
