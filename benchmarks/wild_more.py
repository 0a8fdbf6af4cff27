"""Still more train steps as people write them: agents, pictures, language; `wild_scripts.py` says what a script is.

Agents and averages that are plain objects with a count, epochs of minibatches, pools and queues, codes that are taken
from the batch, memories and caches that a model keeps, adversaries that put back what they move.
"""

from __future__ import annotations

import copy
import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from wild_papers import moves, words_step
from wild_scripts import STEADY, Script, cosine, images, loss_step, mlp, only_vectors, pairs, tokens, vectors, with_adam

# Agents: PPO with epochs of minibatches, TD3 as an object that counts, Rainbow's parts, a world model


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = mlp(6, 8, 2, act=nn.Tanh), mlp(6, 8, 1, act=nn.Tanh)
        self.log_std = nn.Parameter(torch.zeros(1, 2))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("var", torch.ones(6))
        self.register_buffer("count", torch.tensor(1e-4))
        for layer in (self.actor[0], self.actor[2], self.critic[0], self.critic[2]):
            nn.init.orthogonal_(layer.weight, math.sqrt(2))
            nn.init.constant_(layer.bias, 0.0)

    @torch.no_grad()
    def see(self, x):
        n = x.shape[0] * x.shape[1]
        mean, var = x.mean((0, 1)), x.var((0, 1), unbiased=False)
        delta, total = mean - self.mean, self.count + n
        m2 = self.var * self.count + var * n + delta**2 * self.count * n / total
        self.mean += delta * n / total
        self.var.copy_(m2 / total)
        self.count += n

    def forward(self, x):
        x = ((x - self.mean) / torch.sqrt(self.var + 1e-8)).clamp(-10, 10)
        mean = self.actor(x)
        normal = torch.distributions.Independent(
            torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean)), 1
        )
        return normal, self.critic(x).squeeze(-1)


def rollout(n: int, g: torch.Generator) -> tuple:
    s, a = torch.randn(n, 6, 6, generator=g), torch.randn(n, 5, 2, generator=g)
    return s, a, torch.randn(n, 5, generator=g), (torch.rand(n, 5, generator=g) > 0.9).to(s.dtype)


def ppo_epochs_step(model, optimizer, obs, actions, rewards, dones, epochs=2, parts=2):
    model.see(obs)
    with torch.no_grad():
        _, values = model(obs)
        dist, _ = model(obs[:, :-1])
        old = dist.log_prob(actions)
        advantages, last = [], torch.zeros_like(rewards[:, 0])
        for t in reversed(range(rewards.shape[1])):
            alive = 1.0 - dones[:, t]
            delta = rewards[:, t] + 0.99 * values[:, t + 1] * alive - values[:, t]
            last = delta + 0.99 * 0.95 * alive * last
            advantages.insert(0, last)
        advantages = torch.stack(advantages, dim=1)
        returns = advantages + values[:, :-1]
    flat = [x.reshape(-1, *x.shape[2:]) for x in (obs[:, :-1], actions, old, advantages, returns, values[:, :-1])]
    kls, clips = [], []
    for _ in range(epochs):
        order = torch.randperm(flat[0].shape[0], device=obs.device)
        for index in order.chunk(parts):
            s, a, logp_old, adv, ret, v_old = (x[index] for x in flat)
            dist, v = model(s)
            log_ratio = dist.log_prob(a) - logp_old
            ratio = log_ratio.exp()
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            policy = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            v_clipped = v_old + torch.clamp(v - v_old, -0.2, 0.2)
            value = 0.5 * torch.max((v - ret) ** 2, (v_clipped - ret) ** 2).mean()
            loss = policy + 0.5 * value - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            with torch.no_grad():
                kls.append(((ratio - 1) - log_ratio).mean().item())
                clips += [((ratio - 1.0).abs() > 0.2).float().mean().item()]
    return loss.item(), sum(kls) / len(kls), clips


class TD3:
    """An agent as in the paper's code: nets, optimisers and a count in one object, that trains itself."""

    def __init__(self):
        self.actor = nn.Sequential(mlp(6, 8, 2, act=nn.ReLU), nn.Tanh())
        self.critic = nn.ModuleList([mlp(8, 8, 1, act=nn.ReLU) for _ in range(2)])
        self.actor_target, self.critic_target = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-3)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-3)
        self.total_it, self.policy_freq = 0, 2

    def train(self, state, action, reward, next_state, done):
        self.total_it += 1
        with torch.no_grad():
            noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
            next_action = (self.actor_target(next_state) + noise).clamp(-1, 1)
            both = [q(torch.cat([next_state, next_action], 1)) for q in self.critic_target]
            target = reward + (1 - done) * 0.99 * torch.min(*both)
        current = [q(torch.cat([state, action], 1)) for q in self.critic]
        critic_loss = sum(F.mse_loss(q, target) for q in current)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()
        if self.total_it % self.policy_freq == 0:
            actor_loss = -self.critic[0](torch.cat([state, self.actor(state)], 1)).mean()
            self.actor_optimizer.zero_grad()
            actor_loss.backward()
            self.actor_optimizer.step()
            for net, slow in ((self.critic, self.critic_target), (self.actor, self.actor_target)):
                for p, q in zip(net.parameters(), slow.parameters(), strict=True):
                    q.data.copy_(0.005 * p.data + 0.995 * q.data)
        return critic_loss.item()


def td3_step(agent, s, a, r, after, done):
    return agent.train(s, a, r, after, done)


class Noisy(nn.Module):
    def __init__(self, a: int, b: int):
        super().__init__()
        self.mu, self.sigma = nn.Parameter(torch.empty(b, a).uniform_(-0.3, 0.3)), nn.Parameter(torch.full((b, a), 0.1))
        self.register_buffer("epsilon", torch.empty(b, a))
        self.reset_noise()

    def reset_noise(self):
        x, y = (torch.randn(n, device=self.mu.device) for n in reversed(self.mu.shape))
        x, y = (e.sign().mul_(e.abs().sqrt_()) for e in (x, y))
        self.epsilon.copy_(y.ger(x))

    def forward(self, x):
        return F.linear(x, self.mu + self.sigma * self.epsilon if self.training else self.mu)


class Rainbow(nn.Module):
    def __init__(self, atoms: int = 7):
        super().__init__()
        self.body, self.value, self.advantage = mlp(6, 8), Noisy(8, atoms), Noisy(8, 3 * atoms)
        self.register_buffer("support", torch.linspace(-2, 2, atoms))
        self.atoms = atoms

    def forward(self, x, log: bool = False):
        x = F.relu(self.body(x))
        v, a = self.value(x).view(-1, 1, self.atoms), self.advantage(x).view(-1, 3, self.atoms)
        q = v + a - a.mean(1, keepdim=True)
        return F.log_softmax(q, dim=2) if log else F.softmax(q, dim=2)

    def reset_noise(self):
        for name, module in self.named_children():
            if name in ("value", "advantage"):
                module.reset_noise()


def rainbow() -> tuple:
    online = Rainbow()
    target = copy.deepcopy(online).requires_grad_(False)
    return online, target, torch.optim.Adam(online.parameters(), lr=1e-3, eps=1.5e-4)


def prioritized(n: int, g: torch.Generator) -> tuple:
    s, after = torch.randn(n, 6, generator=g), torch.randn(n, 6, generator=g)
    rest = torch.randint(0, 3, (n,), generator=g), torch.randn(n, generator=g), torch.rand(n, 1, generator=g).round()
    return s, after, *rest, torch.rand(n, generator=g)


def rainbow_step(online, target, optimizer, states, next_states, actions, returns, nonterminals, weights):
    size, atoms, low, high = states.size(0), online.atoms, -2.0, 2.0
    delta = (high - low) / (atoms - 1)
    log_ps_a = online(states, log=True)[range(size), actions]
    with torch.no_grad():
        pns = online(next_states)
        best = (online.support.expand_as(pns) * pns).sum(2).argmax(1)
        target.reset_noise()
        pns_a = target(next_states)[range(size), best]
        tz = returns.unsqueeze(1) + nonterminals * 0.9 * online.support.unsqueeze(0)
        b = (tz.clamp(min=low, max=high) - low) / delta
        lower, upper = b.floor().to(torch.int64), b.ceil().to(torch.int64)
        lower[(upper > 0) * (lower == upper)] -= 1
        upper[(lower < (atoms - 1)) * (lower == upper)] += 1
        m = states.new_zeros(size, atoms)
        offset = torch.linspace(0, ((size - 1) * atoms), size).unsqueeze(1).expand(size, atoms).to(actions)
        m.view(-1).index_add_(0, (lower + offset).view(-1), (pns_a * (upper - b)).view(-1))
        m.view(-1).index_add_(0, (upper + offset).view(-1), (pns_a * (b - lower)).view(-1))
    loss = -torch.sum(m * log_ps_a, 1)
    online.zero_grad()
    (weights * loss).mean().backward()
    nn.utils.clip_grad_norm_(online.parameters(), 10.0)
    optimizer.step()
    online.reset_noise()
    return loss.detach()


def symlog(x):
    return torch.sign(x) * torch.log(1 + torch.abs(x))


class Dreamer(nn.Module):
    """A recurrent world model: discrete latents straight through, KLs that are balanced and have free nats."""

    def __init__(self, kinds: int = 2, classes: int = 3, deter: int = 6):
        super().__init__()
        self.kinds, self.classes, stoch = kinds, classes, kinds * classes
        self.enc, self.cell = mlp(6, 8), nn.GRUCell(stoch + 2, deter)
        self.prior, self.post = nn.Linear(deter, stoch), nn.Linear(deter + 8, stoch)
        self.dec, self.reward, self.go_on = (
            nn.Linear(deter + stoch, 6),
            nn.Linear(deter + stoch, 5),
            nn.Linear(deter + stoch, 1),
        )
        self.register_buffer("bins", torch.linspace(-2, 2, 5))

    def logits(self, x):
        x = x.unflatten(-1, (self.kinds, self.classes))
        return torch.log(0.99 * x.softmax(-1) + 0.01 / self.classes)

    def forward(self, obs, actions):
        b, t = obs.shape[:2]
        h, z = obs.new_zeros(b, self.cell.hidden_size), obs.new_zeros(b, self.kinds * self.classes)
        embed, priors, posts, features = self.enc(symlog(obs)), [], [], []
        for i in range(t):
            h = self.cell(torch.cat([z, actions[:, i]], -1), h)
            priors.append(self.logits(self.prior(h)))
            posts.append(self.logits(self.post(torch.cat([h, embed[:, i]], -1))))
            probs = posts[-1].exp()
            hard = F.one_hot(probs.argmax(-1), self.classes).to(probs.dtype)
            z = (hard + probs - probs.detach()).flatten(-2)
            features.append(torch.cat([h, z], -1))
        return torch.stack(priors, 1), torch.stack(posts, 1), torch.stack(features, 1)


def two_hot(x, bins):
    x = symlog(x).clamp(bins[0], bins[-1])
    above = (bins <= x.unsqueeze(-1)).sum(-1).clamp(max=len(bins) - 1)
    below = (above - 1).clamp(min=0)
    share = ((x - bins[below]) / (bins[above] - bins[below])).unsqueeze(-1)
    return F.one_hot(below, len(bins)) * (1 - share) + F.one_hot(above, len(bins)) * share


def kl(a, b):
    return (a.exp() * (a - b)).sum((-1, -2))


def dreamer_step(model, optimizer, obs, actions, rewards, dones):
    obs = obs[:, :-1]
    prior, post, feature = model(obs, actions)
    dyn = kl(post.detach(), prior).mean().clamp(min=0.1)
    rep = torch.maximum(kl(post, prior.detach()).mean(), torch.tensor(0.1))
    recon = (model.dec(feature) - symlog(obs)).square().sum(-1).mean()
    reward = -(two_hot(rewards, model.bins) * model.reward(feature).log_softmax(-1)).sum(-1).mean()
    go_on = F.binary_cross_entropy_with_logits(model.go_on(feature).squeeze(-1), 1 - dones)
    losses = {"dyn": 0.5 * dyn, "rep": 0.1 * rep, "recon": recon, "reward": reward, "continue": go_on}
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    return {k: v.item() for k, v in losses.items()}


# Pictures: flow matching with a transformer, CycleGAN with a pool, residual codes, crops, boxes, points


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiT(nn.Module):
    def __init__(self, width: int = 8, patch: int = 4, classes: int = 5):
        super().__init__()
        self.patch, self.enter = patch, nn.Linear(3 * patch * patch, width)
        self.time, self.label = mlp(width, width, width, act=nn.SiLU), nn.Embedding(classes + 1, width)
        self.norm, self.attn = (
            nn.LayerNorm(width, elementwise_affine=False),
            nn.MultiheadAttention(width, 2, batch_first=True),
        )
        self.mlp, self.ada = mlp(width, 16, width), nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.leave, self.last = nn.Linear(width, 3 * patch * patch), nn.Linear(width, 2 * width)
        self.register_buffer("pos", torch.randn(1, 4, width))
        nn.init.normal_(self.ada[1].weight, std=0.02)

    def forward(self, x, t, y):
        n, c, h, w = x.shape
        p = self.patch
        x = torch.einsum("nchpwq->nhwpqc", x.reshape(n, c, h // p, p, w // p, p)).flatten(1, 2).flatten(2)
        freqs = torch.exp(-math.log(10000) * torch.arange(4, device=t.device) / 4)
        angles = t[:, None] * freqs[None]
        cond = self.time(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)) + self.label(y)
        x = self.enter(x) + self.pos
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.ada(cond).chunk(6, dim=1)
        a = modulate(self.norm(x), shift_a, scale_a)
        x = x + gate_a.unsqueeze(1) * self.attn(a, a, a, need_weights=False)[0]
        x = x + gate_m.unsqueeze(1) * self.mlp(modulate(self.norm(x), shift_m, scale_m))
        x = self.leave(modulate(self.norm(x), *self.last(cond).chunk(2, dim=1)))
        return torch.einsum("nhwpqc->nchpwq", x.reshape(n, h // p, w // p, p, p, c)).reshape(n, c, h, w)


class EMA:
    """An average with a decay that warms up, as in many repositories: a dict of tensors and a count."""

    def __init__(self, model: nn.Module, decay: float):
        self.shadow = {k: v.detach().clone() for k, v in model.named_parameters()}
        self.decay, self.step = decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.step += 1
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p, 1 - decay)

    def state_dict(self):
        return {"shadow": self.shadow, "step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]
        for name, x in state["shadow"].items():
            self.shadow[name].copy_(x)


def dit() -> tuple:
    model = DiT()
    return model, EMA(model, 0.95), torch.optim.AdamW(model.parameters(), lr=1e-3, eps=STEADY, weight_decay=0)


def flow_matching_step(model, ema, optimizer, x, y):
    noise = torch.randn_like(x)
    t = torch.sigmoid(torch.randn(x.shape[0], device=x.device))
    xt = torch.lerp(noise, x, t.view(-1, *[1] * (x.ndim - 1)))
    y = torch.where(torch.rand_like(t) < 0.1, torch.full_like(y, 5), y)
    loss = F.mse_loss(model(xt, t * 1000, y), x - noise, reduction="none").flatten(1).mean(1)
    weights = 1 / (1 + (t - 0.5).abs())
    loss = (weights * loss).sum() / weights.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model)
    with torch.no_grad():
        z = noise[:2]
        for i in range(3):
            z = z + model(z, torch.full((z.shape[0],), i / 3 * 1000), y[:2]) / 3
    return loss.item(), z


class Generator(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.enter = nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(3, width, 3), nn.InstanceNorm2d(width), nn.ReLU(True)
        )
        self.block = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width))
        self.leave = nn.Sequential(
            nn.PixelShuffle(2), nn.Upsample(scale_factor=0.5), nn.Conv2d(width // 4, 3, 1), nn.Tanh()
        )

    def forward(self, x):
        x = self.enter(x)
        return self.leave(x + self.block(x))


class Pool:
    """Images made before, of which a random half is shown in the place of new ones."""

    def __init__(self, size: int):
        self.images = torch.zeros(size, 3, 8, 8)

    def query(self, new):
        old = self.images[: new.shape[0]].clone()
        shown = torch.where(torch.rand(new.shape[0], 1, 1, 1) > 0.5, old, new.detach())
        self.images = torch.cat([new.detach(), self.images[new.shape[0] :]])
        return shown


class CycleGAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.G_A, self.G_B = Generator(), Generator()
        self.D_A, self.D_B = (
            nn.Sequential(nn.Conv2d(3, 4, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(4, 1, 3)) for _ in "AB"
        )
        self.register_buffer("real_label", torch.tensor(1.0))
        self.register_buffer("fake_label", torch.tensor(0.0))

    def gan_loss(self, prediction, real: bool):
        label = self.real_label if real else self.fake_label
        return F.mse_loss(prediction, label.expand_as(prediction))


def cycle_gan() -> tuple:
    model = CycleGAN()
    both = [
        itertools.chain(a.parameters(), b.parameters()) for a, b in ((model.G_A, model.G_B), (model.D_A, model.D_B))
    ]
    return model, Pool(8), *(torch.optim.Adam(params, lr=2e-3, betas=(0.5, 0.999), eps=STEADY) for params in both)


def set_requires_grad(nets, requires_grad: bool):
    for net in nets:
        for p in net.parameters():
            p.requires_grad = requires_grad


def two_images(n: int, g: torch.Generator) -> tuple:
    return tuple(torch.rand(n, 3, 8, 8, generator=g) * 2 - 1 for _ in range(2))


def cycle_gan_step(model, pool, optimizer_G, optimizer_D, real_A, real_B):
    fake_B = model.G_A(real_A)
    rec_A, fake_A = model.G_B(fake_B), model.G_B(real_B)
    rec_B = model.G_A(fake_A)
    set_requires_grad([model.D_A, model.D_B], False)
    optimizer_G.zero_grad()
    same = F.l1_loss(model.G_A(real_B), real_B) + F.l1_loss(model.G_B(real_A), real_A)
    fool = model.gan_loss(model.D_A(fake_B), True) + model.gan_loss(model.D_B(fake_A), True)
    loss_G = fool + 10 * (F.l1_loss(rec_A, real_A) + F.l1_loss(rec_B, real_B)) + 5 * same
    loss_G.backward()
    optimizer_G.step()
    set_requires_grad([model.D_A, model.D_B], True)
    optimizer_D.zero_grad()
    losses = []
    for D, real, fake in ((model.D_A, real_B, pool.query(fake_B)), (model.D_B, real_A, fake_A.detach())):
        losses.append((model.gan_loss(D(real), True) + model.gan_loss(D(fake), False)) * 0.5)
        losses[-1].backward()
    optimizer_D.step()
    return loss_G.item(), [x.item() for x in losses]


class Codes(nn.Module):
    """Residual codes by their cosine, with averages, and dead ones that are taken from the batch."""

    def __init__(self, depth: int = 2, codes: int = 6, width: int = 4):
        super().__init__()
        self.register_buffer("books", F.normalize(torch.randn(depth, codes, width), dim=-1))
        self.register_buffer("used", torch.ones(depth, codes))

    def forward(self, z):
        total, rest, loss, found = torch.zeros_like(z), z, 0.0, []
        for i in range(self.books.shape[0]):
            flat = F.normalize(rest.detach(), dim=-1)
            ids = (flat @ self.books[i].t()).max(dim=-1).indices
            code = self.books[i][ids] * rest.norm(dim=-1, keepdim=True).detach()
            if self.training:
                self.learn(i, flat, ids)
            loss = loss + F.mse_loss(rest, code.detach())
            total, rest = total + code, rest - code.detach()
            found.append(ids)
        return z + (total - z).detach(), loss, torch.stack(found, -1)

    @torch.no_grad()
    def learn(self, i, flat, ids):
        hot = F.one_hot(ids, self.books.shape[1]).type_as(flat)
        count = hot.sum(0)
        mean = F.normalize(hot.t() @ flat + 1e-6, dim=-1)
        seen = (count > 0).unsqueeze(-1)
        self.books[i] = torch.where(seen, F.normalize(0.8 * self.books[i] + 0.2 * mean, dim=-1), self.books[i])
        self.used[i].mul_(0.8).add_(count, alpha=0.2)
        fresh = flat[torch.arange(self.books.shape[1], device=flat.device) % flat.shape[0]]
        self.books[i] = torch.where((self.used[i] < 0.7).unsqueeze(-1), fresh, self.books[i])


class Finite(nn.Module):
    """Finite scalar codes: bounded, rounded straight through, with an index by mixed radix."""

    def __init__(self, levels: tuple[int, ...] = (5, 4, 3)):
        super().__init__()
        self.register_buffer("levels", torch.tensor(levels), persistent=False)
        self.register_buffer("basis", torch.cumprod(torch.tensor([1, *levels[:-1]]), dim=0), persistent=False)

    def forward(self, z):
        half = (self.levels - 1) * (1 + 1e-3) / 2
        offset = torch.where(self.levels % 2 == 0, 0.5, 0.0)
        bounded = (z + (offset / half).atanh()).tanh() * half - offset
        rounded = bounded + (bounded.round() - bounded).detach()
        wide = self.levels // 2
        return rounded / wide, ((rounded + wide) * self.basis).sum(-1).to(torch.int32)


class Tokenizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.codes, self.finite, self.dec = mlp(6, 8, 7), Codes(), Finite(), mlp(7, 8, 6)

    def forward(self, x):
        a, b = self.enc(x).split([4, 3], dim=-1)
        a, commit, ids = self.codes(a)
        b, index = self.finite(b)
        return F.mse_loss(self.dec(torch.cat([a, b], -1)), x) + 0.25 * commit, ids, index


def tokenizer_step(model, optimizer, x):
    loss, ids, index = model(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    probs = F.one_hot(ids[:, 0], 6).to(x.dtype).mean(0)
    return loss.item(), torch.exp(-torch.sum(probs * torch.log(probs + 1e-10))), index


class SwAV(nn.Module):
    def __init__(self, width: int = 4, prototypes: int = 6):
        super().__init__()
        self.net, self.prototypes = mlp(6, 8, width), nn.Linear(width, prototypes, bias=False)
        self.register_buffer("queue", torch.randn(2, 12, width))

    def forward(self, inputs):
        if not isinstance(inputs, list):
            inputs = [inputs]
        out = []
        for _, crops in itertools.groupby(inputs, key=lambda x: x.shape[-1]):  # by torch, values would decide
            part = torch.cat(list(crops))
            out.append(self.net(F.pad(part, (0, 6 - part.shape[-1]))))
        z = F.normalize(torch.cat(out), dim=1, p=2)
        return z, self.prototypes(z)


@torch.no_grad()
def sinkhorn(out):
    q = torch.exp(out / 0.5).t()
    k, b = q.shape
    q /= torch.sum(q)
    for _ in range(3):
        q /= torch.sum(q, dim=1, keepdim=True)
        q /= k
        q /= torch.sum(q, dim=0, keepdim=True)
        q /= b
    return (q * b).t()


def swav_step(model, optimizer, x, y):
    with torch.no_grad():
        w = model.prototypes.weight.data.clone()
        model.prototypes.weight.copy_(F.normalize(w, dim=1, p=2))
    bs = x.size(0)
    z, out = model([x, y, x[:, :4], y[:, 2:]])
    z, loss = z.detach(), 0
    for i in (0, 1):
        with torch.no_grad():
            mine = out[bs * i : bs * (i + 1)].detach()
            mine = torch.cat((model.queue[i] @ model.prototypes.weight.t(), mine))
            model.queue[i, bs:] = model.queue[i, :-bs].clone()
            model.queue[i, :bs] = z[i * bs : (i + 1) * bs]
            q = sinkhorn(mine)[-bs:]
        others = [v for v in range(4) if v != i]
        loss -= (
            sum(
                torch.mean(torch.sum(q * F.log_softmax(out[bs * v : bs * (v + 1)] / 0.1, dim=1), dim=1)) for v in others
            )
            / 3
        )
    loss /= 2
    optimizer.zero_grad()
    loss.backward()
    for name, p in model.named_parameters():
        if "prototypes" in name:
            p.grad *= 0.1
    optimizer.step()
    return loss.item()


class Boxes(nn.Module):
    def __init__(self, classes: int = 3):
        super().__init__()
        self.body, self.cls, self.reg = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, classes, 1), nn.Conv2d(8, 4, 1)
        self.scale = nn.Parameter(torch.tensor(1.0))
        ys, xs = torch.meshgrid(torch.arange(4) * 2 + 1, torch.arange(4) * 2 + 1, indexing="ij")
        self.register_buffer(
            "points", torch.stack((xs.reshape(-1), ys.reshape(-1)), dim=1).to(torch.get_default_dtype())
        )

    def forward(self, x):
        h = F.relu(self.body(x))
        logits = self.cls(h).permute(0, 2, 3, 1).flatten(1, 2)
        reach = torch.exp(self.reg(h) * self.scale).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
        return logits, torch.cat([self.points - reach[..., :2], self.points + reach[..., 2:]], -1)


def giou(a, b):
    area = lambda x: (x[..., 2] - x[..., 0]).clamp(min=0) * (x[..., 3] - x[..., 1]).clamp(min=0)  # noqa: E731
    both = torch.cat([torch.max(a[..., :2], b[..., :2]), torch.min(a[..., 2:], b[..., 2:])], -1)
    around = torch.cat([torch.min(a[..., :2], b[..., :2]), torch.max(a[..., 2:], b[..., 2:])], -1)
    union = area(a) + area(b) - area(both)
    return area(both) / union - (area(around) - union) / area(around)


def boxes(n: int, g: torch.Generator) -> tuple:
    corner = torch.rand(n, 2, 2, generator=g) * 4
    labels = torch.randint(0, 3, (n, 2), generator=g)
    return (
        torch.randn(n, 3, 8, 8, generator=g),
        torch.cat([corner, corner + 2 + torch.rand(n, 2, 2, generator=g)], -1),
        labels,
    )


def boxes_step(model, optimizer, images, gt_boxes, gt_labels):
    logits, found = model(images)
    px, py = model.points.unbind(1)
    left, top, right, bottom = gt_boxes.unsqueeze(1).unbind(-1)
    inside = (
        torch.stack([px[:, None] - left, py[:, None] - top, right - px[:, None], bottom - py[:, None]], -1).min(-1)[0]
        > 0
    )
    areas = ((right - left) * (bottom - top)).expand(-1, 16, -1).clone()
    areas[~inside] = 1e8
    least, match = areas.min(dim=-1)
    labels = gt_labels.gather(1, match)
    labels[least == 1e8] = 3
    positive = labels < 3
    hot = F.one_hot(labels, 4)[..., :3].to(logits.dtype)
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, hot, reduction="none")
    focal = (0.25 * hot + 0.75 * (1 - hot)) * ce * ((1 - p) * hot + p * (1 - hot)) ** 2.0
    wanted = torch.gather(gt_boxes, 1, match.unsqueeze(-1).repeat(1, 1, 4))
    apart = torch.where(positive, 1 - giou(found, wanted), torch.zeros_like(least))
    ranks = ce.sum(-1).detach().masked_fill(positive, -1).sort(dim=1, descending=True)[1].argsort(dim=1)
    hard = ranks < 3 * positive.sum(1, keepdim=True)
    n = max(positive.sum().item(), 1)
    loss = (focal.sum() + apart.sum() + 0.1 * (ce.sum(-1) * (hard | positive)).sum()) / n
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), n


def knn(x, k: int):
    inner = -2 * torch.matmul(x.transpose(2, 1), x)
    xx = torch.sum(x**2, dim=1, keepdim=True)
    return (-xx - inner - xx.transpose(2, 1)).topk(k=k, dim=-1)[1]


def farthest(xyz, n: int):
    b, total, _ = xyz.shape
    centroids, distance = torch.zeros(b, n, dtype=torch.long), torch.ones(b, total) * 1e10
    latest, rows = torch.zeros(b, dtype=torch.long), torch.arange(b, dtype=torch.long)
    for i in range(n):
        centroids[:, i] = latest
        dist = torch.sum((xyz - xyz[rows, latest, :].view(b, 1, 3)) ** 2, -1)
        distance = torch.min(distance, dist)
        latest = torch.max(distance, -1)[1]
    return centroids


class Points(nn.Module):
    """DGCNN's edges on points that PointNet turns."""

    def __init__(self):
        super().__init__()
        self.turn, self.edge = (
            mlp(3, 8, 9),
            nn.Sequential(nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2)),
        )
        self.out, self.fold = nn.Linear(16, 5), nn.Linear(16, 4 * 3)

    def forward(self, x):
        turn = self.turn(x).max(1)[0].view(-1, 3, 3) + torch.eye(3).view(1, 3, 3).repeat(x.size(0), 1, 1)
        x = torch.bmm(x, turn).transpose(1, 2)
        b, c, n = x.size()
        idx = (knn(x, 4) + torch.arange(0, b, device=x.device).view(-1, 1, 1) * n).view(-1)
        flat = x.transpose(2, 1).contiguous()
        near = flat.view(b * n, -1)[idx, :].view(b, n, 4, c)
        mine = flat.view(b, n, 1, c).repeat(1, 1, 4, 1)
        h = self.edge(torch.cat((near - mine, mine), dim=3).permute(0, 3, 1, 2).contiguous()).max(dim=-1)[0]
        h = torch.cat([F.adaptive_max_pool1d(h, 1).view(b, -1), F.adaptive_avg_pool1d(h, 1).view(b, -1)], 1)
        return self.out(h), self.fold(h).view(b, 4, 3), turn


def clouds(n: int, g: torch.Generator) -> tuple:
    return torch.randn(n, 10, 3, generator=g), torch.randint(0, 5, (n,), generator=g)


def points_step(model, optimizer, x, y):
    out, made, turn = model(x)
    kept = torch.gather(x, 1, farthest(x, 4).unsqueeze(-1).expand(-1, -1, 3))
    dist = ((made.unsqueeze(2) - kept.unsqueeze(1)) ** 2).sum(-1)
    chamfer = dist.min(1)[0].mean() + dist.min(2)[0].mean()
    regular = torch.norm(torch.bmm(turn, turn.transpose(2, 1)) - torch.eye(3)[None, :, :], dim=(1, 2)).mean()
    loss = F.cross_entropy(out, y, label_smoothing=0.2) + chamfer + 0.001 * regular
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), (out.data.max(1)[1] == y).double().mean().item()


# Language: preferences, groups of answers, memories, buckets of positions, masks, capacities


class Words(nn.Module):
    def __init__(self, words: int = 11, width: int = 8):
        super().__init__()
        self.emb, self.rnn, self.norm = (
            nn.Embedding(words, width),
            nn.GRU(width, width, batch_first=True),
            nn.LayerNorm(width),
        )
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.rnn(self.emb(x))[0]))


def of_policy() -> tuple:
    policy, reference = Words(), Words().eval()
    for p in reference.parameters():
        p.requires_grad_(False)
    return policy, reference, torch.optim.AdamW(policy.parameters(), lr=1e-2, fused=False)


def preferences(n: int, g: torch.Generator) -> tuple:
    chosen, rejected = (torch.randint(1, 11, (n, length), generator=g) for length in (7, 9))
    where = torch.arange(9)
    masks = [
        (where[: x.shape[1]] >= 3) & (where[: x.shape[1]] < torch.randint(5, 10, (n, 1), generator=g))
        for x in (chosen, rejected)
    ]
    return {"chosen": chosen, "rejected": rejected, "chosen_mask": masks[0], "rejected_mask": masks[1]}


def preference_batches(n: int, g: torch.Generator) -> tuple:
    return tuple(preferences(n, g).values())


def pad_to(x, length: int, value):
    return (
        x
        if x.size(1) >= length
        else torch.cat([x, value * torch.ones(x.size(0), length - x.size(1), dtype=x.dtype)], dim=1)
    )


def logps_of(model, ids, mask):
    logits, labels = model(ids)[:, :-1, :], ids[:, 1:].clone()
    mask = mask[:, 1:]
    labels[~mask] = 0
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (per_token * mask).sum(-1), mask.sum(-1)


def dpo_step(policy, reference, optimizer, chosen, rejected, chosen_mask, rejected_mask, beta=0.1):
    length = max(chosen.shape[1], rejected.shape[1])
    ids = torch.cat([pad_to(chosen, length, 0), pad_to(rejected, length, 0)], dim=0)
    mask = torch.cat([pad_to(chosen_mask.long(), length, 0), pad_to(rejected_mask.long(), length, 0)]).bool()
    n = chosen.shape[0]
    logps, lengths = logps_of(policy, ids, mask)
    with torch.no_grad():
        wanted, _ = logps_of(reference, ids, mask)
    ratios = logps[:n] - logps[n:] - (wanted[:n] - wanted[n:])
    loss = (-F.logsigmoid(beta * ratios) * 0.9 - F.logsigmoid(-beta * ratios) * 0.1).mean()
    loss = loss - 0.2 * (logps[:n] / lengths[:n]).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(policy.parameters(), max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    metrics = {
        "rewards/chosen": beta * (logps[:n] - wanted[:n]).detach(),
        "rewards/rejected": beta * (logps - wanted)[n:].detach(),
    }
    metrics["rewards/accuracies"] = (metrics["rewards/chosen"] > metrics["rewards/rejected"]).float()
    return loss.item(), norm, {k: v.mean().item() for k, v in metrics.items()}


def answers(n: int, g: torch.Generator) -> tuple:
    n *= 4
    return (
        torch.randint(1, 11, (n, 8), generator=g),
        torch.randn(n, generator=g),
        torch.arange(7) < torch.randint(3, 8, (n, 1), generator=g),
    )


def grpo_step(policy, reference, optimizer, ids, rewards, mask, group=4, eps=0.2, beta=0.04):
    mask = mask.to(rewards.dtype)
    grouped = rewards.view(-1, group)
    mean, std = grouped.mean(dim=1), grouped.std(dim=1)
    advantages = (rewards - mean.repeat_interleave(group, dim=0)) / (std.repeat_interleave(group, dim=0) + 1e-4)

    def logps(model):
        logits = model(ids)[:, :-1]
        chosen = logits.gather(-1, ids[:, 1:, None]).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits.unbind(1)], 1)

    with torch.inference_mode():
        old, ref = logps(policy), logps(reference)
    out = []
    for _ in range(2):
        new = logps(policy)
        ratio = torch.exp(new - old)
        clipped = torch.clamp(ratio, 1 - eps, 1 + eps)
        per_token = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
        k3 = torch.exp(ref - new) - (ref - new) - 1
        loss = (((per_token + beta * k3) * mask).sum(1) / mask.sum(1).clamp(min=1.0)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append({"loss": loss.item(), "kl": ((k3 * mask).sum() / mask.sum()).item()})
    return out


class XL(nn.Module):
    """Transformer-XL: relative positions by a shift, and a memory that the model keeps for the next segment."""

    def __init__(self, words: int = 11, width: int = 8, heads: int = 2, mem_len: int = 4):
        super().__init__()
        self.emb, self.heads, self.mem_len = nn.Embedding(words, width), heads, mem_len
        self.qkv, self.r, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, words),
        )
        self.u, self.v = (
            nn.Parameter(torch.zeros(heads, width // heads)),
            nn.Parameter(torch.zeros(heads, width // heads)),
        )
        self.register_buffer("inv_freq", 1 / (100 ** (torch.arange(0.0, width, 2.0) / width)))
        self.mems = None

    def shift(self, x):
        pad = torch.zeros((x.size(0), 1, *x.size()[2:]), device=x.device, dtype=x.dtype)
        padded = torch.cat([pad, x], dim=1)
        return padded.view(x.size(1) + 1, x.size(0), *x.size()[2:])[1:].view_as(x)

    def forward(self, idx):
        h = self.emb(idx.t())
        if self.mems is None or self.mems.size(1) != h.size(1):
            self.mems = h.new_zeros(self.mem_len, h.size(1), h.size(2))
        q_len, b, width = h.shape
        both = torch.cat([self.mems, h], 0)
        k_len = both.size(0)
        self.mems = both[-self.mem_len :].detach()
        angles = torch.outer(torch.arange(k_len - 1, -1, -1.0), self.inv_freq)
        r = self.r(torch.cat([angles.sin(), angles.cos()], dim=-1)).view(k_len, self.heads, -1)
        q, k, v = (x.view(x.size(0), b, self.heads, -1) for x in torch.chunk(self.qkv(both), 3, dim=-1))
        q = q[-q_len:]
        ac = torch.einsum("ibnd,jbnd->ijbn", q + self.u, k)
        bd = self.shift(torch.einsum("ibnd,jnd->ijbn", q + self.v, r))
        mask = torch.triu(h.new_ones(q_len, k_len), diagonal=1 + k_len - q_len).bool()[:, :, None, None]
        score = ((ac + bd) / 2).masked_fill(mask, -1e30).softmax(dim=1)
        return self.out(h + torch.einsum("ijbn,jbnd->ibnd", score, v).reshape(q_len, b, width)).transpose(0, 1)


class RWKV(nn.Module):
    def __init__(self, words: int = 11, width: int = 6):
        super().__init__()
        self.emb, self.shift = nn.Embedding(words, width), nn.ZeroPad2d((0, 0, 1, -1))
        self.decay, self.first = (
            nn.Parameter(torch.linspace(-3, 1, width)),
            nn.Parameter(torch.full((width,), math.log(0.3))),
        )
        self.mix = nn.ParameterDict({k: nn.Parameter(torch.rand(1, 1, width)) for k in "kvr"})
        self.key, self.value, self.receptance = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out, self.norm = nn.Linear(width, words), nn.LayerNorm(width)

    def forward(self, idx):
        x = self.norm(self.emb(idx))
        before = self.shift(x)
        k, v, r = (
            f(x * m + before * (1 - m))
            for f, m in zip((self.key, self.value, self.receptance), self.mix.values(), strict=True)
        )
        w = -torch.exp(self.decay)
        a, b = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        top = torch.full_like(a, -1e38)
        y = torch.empty_like(v)
        for t in range(x.shape[1]):
            kt, vt = k[:, t], v[:, t]
            q = torch.maximum(top, self.first + kt)
            e1, e2 = torch.exp(top - q), torch.exp(self.first + kt - q)
            y[:, t] = (e1 * a + e2 * vt) / (e1 * b + e2)
            q = torch.maximum(top + w, kt)
            e1, e2 = torch.exp(top + w - q), torch.exp(kt - q)
            a, b, top = e1 * a + e2 * vt, e1 * b + e2, q
        return self.out(x + torch.sigmoid(r) * y)


class T5(nn.Module):
    def __init__(self, words: int = 11, width: int = 8, heads: int = 2, buckets: int = 8):
        super().__init__()
        self.shared, self.bias, self.buckets, self.heads = (
            nn.Embedding(words, width),
            nn.Embedding(buckets, heads),
            buckets,
            heads,
        )
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.cq, self.ckv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.norm = nn.RMSNorm(width)

    def bucket(self, apart, two_sided: bool):
        n, found = self.buckets, 0
        if two_sided:
            n //= 2
            found = (apart > 0).to(torch.long) * n
            apart = torch.abs(apart)
        else:
            apart = -torch.min(apart, torch.zeros_like(apart))
        exact = n // 2
        far = exact + (torch.log(apart.double() / exact) / math.log(16 / exact) * (n - exact)).to(torch.long)
        far = torch.min(far, torch.full_like(far, n - 1))
        return found + torch.where(apart < exact, apart, far)

    def attend(self, q, k, v, bias=0.0):
        q, k, v = (x.view(x.shape[0], -1, self.heads, 4).transpose(1, 2) for x in (q, k, v))
        scores = torch.matmul(q, k.transpose(3, 2)) + bias
        return self.o(torch.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).contiguous().view(q.shape[0], -1, 8))

    def block(self, x, two_sided: bool, mask):
        n = x.shape[1]
        at = torch.arange(n, dtype=torch.long)
        bias = self.bias(self.bucket(at[None, :] - at[:, None], two_sided)).permute([2, 0, 1]).unsqueeze(0)
        h = self.norm(x)
        return x + self.attend(self.q(h), self.k(h), self.v(h), bias + mask)

    def forward(self, ids, labels):
        low = torch.finfo(self.norm.weight.dtype).min
        mask = (1.0 - (ids != 0)[:, None, None, :].to(self.norm.weight.dtype)) * low
        memory = self.block(self.shared(ids), True, mask)
        shifted = labels.new_zeros(labels.shape)
        shifted[..., 1:] = labels[..., :-1].clone()
        shifted[..., 0] = 0
        shifted.masked_fill_(shifted == -100, 0)
        n = labels.shape[1]
        x = self.block(self.shared(shifted), False, torch.full((n, n), low).triu(1))
        k, v = self.ckv(memory).chunk(2, dim=-1)
        x = x + self.attend(self.cq(self.norm(x)), k, v, mask)
        logits = (self.norm(x) * 8**-0.5) @ self.shared.weight.t()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-100)


def two_lengths(n: int, g: torch.Generator) -> tuple:
    labels = torch.randint(1, 11, (n, 6), generator=g)
    return torch.randint(0, 11, (n, 8), generator=g), torch.where(torch.rand(n, 6, generator=g) < 0.2, -100, labels)


def t5_step(model, optimizer, ids, labels):
    return loss_step(model, optimizer, ids, labels)


class Capacity(nn.Module):
    """Switch's experts with a capacity, jitter, a z-loss, and a bias that balances without a loss."""

    def __init__(self, n: int = 4, width: int = 8, capacity: float = 1.25):
        super().__init__()
        self.emb, self.gate, self.head = nn.Embedding(11, width), nn.Linear(width, n, bias=False), nn.Linear(width, 11)
        self.w1, self.w2 = nn.Parameter(torch.randn(n, width, 16) * 0.3), nn.Parameter(torch.randn(n, 16, width) * 0.3)
        self.register_buffer("bias", torch.zeros(n))
        self.capacity = capacity

    def forward(self, idx):
        x = self.emb(idx)
        tokens = x.reshape(-1, x.shape[-1])
        n, e = tokens.shape[0], self.bias.shape[0]
        room = int(self.capacity * n / e)
        noise = torch.empty_like(tokens).uniform_(0.99, 1.01) if self.training else 1.0
        logits = self.gate(tokens * noise)
        probs = F.softmax(logits, dim=-1)
        chosen = torch.topk(probs.detach() + self.bias, 2, dim=-1).indices
        weight = probs.gather(1, chosen)
        weight = weight / weight.sum(-1, keepdim=True)
        hot = F.one_hot(chosen.t().reshape(-1), e)
        place = (torch.cumsum(hot, dim=0) - 1) * hot
        kept = (place < room) & hot.bool()
        slot = F.one_hot(place.sum(-1).clamp(max=room - 1), room) * kept.any(-1, keepdim=True)
        dispatch = (hot.unsqueeze(-1) * slot.unsqueeze(1)).to(x.dtype).view(2, n, e, room)
        combine = (dispatch * weight.t()[..., None, None]).sum(0)
        inside = torch.einsum("nec,nd->ecd", dispatch.sum(0), tokens)
        out = torch.einsum("ecf,efd->ecd", F.silu(torch.einsum("ecd,edf->ecf", inside, self.w1)), self.w2)
        if self.training:
            with torch.no_grad():
                load = hot.sum(0).to(x.dtype)
                self.bias += 0.01 * torch.sign(load.mean() - load)
        out = x + torch.einsum("nec,ecd->nd", combine, out).view_as(x)
        z_loss = torch.logsumexp(logits, dim=-1).square().mean()
        return self.head(out), 1e-2 * z_loss, 1 - kept.sum() / kept.shape[0]


def capacity_step(model, optimizer, x, y):
    logits, aux, dropped = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) + aux
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), dropped


class ManyLoRAs(nn.Module):
    def __init__(self, tasks: int = 3, rank: int = 2):
        super().__init__()
        self.base = mlp(6, 8, 5).requires_grad_(False)
        self.gate, self.tasks = nn.Linear(6, tasks), tasks
        self.a = nn.ParameterList([nn.Parameter(torch.randn(tasks, rank, k)) for k in (6, 8)])
        self.b = nn.ParameterList([nn.Parameter(torch.zeros(tasks, k, rank)) for k in (8, 5)])

    def forward(self, x, task):
        mix = 0.5 * F.softmax(self.gate(x), -1) + 0.5 * F.one_hot(task, self.tasks)
        for i, layer in enumerate((self.base[0], self.base[2])):
            picked = torch.bmm(self.b[i][task], torch.bmm(self.a[i][task], x.unsqueeze(-1))).squeeze(-1)
            mixed = torch.einsum("nt,tor,tri,ni->no", mix, self.b[i], self.a[i], x)
            x = layer(x) + picked + mixed
            x = F.gelu(x) if i == 0 else x
        return x


def task_vectors(n: int, g: torch.Generator) -> tuple:
    return (
        torch.randn(n, 6, generator=g),
        torch.randint(0, 3, (n,), generator=g),
        torch.randint(0, 5, (n,), generator=g),
    )


def many_loras_step(model, optimizer, x, task, y):
    per = F.cross_entropy(model(x, task), y, reduction="none")
    count = torch.bincount(task, minlength=3).clamp(min=1)
    by_task = torch.zeros(3, dtype=per.dtype).scatter_add(0, task, per) / count
    loss = by_task.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), by_task.tolist()


class LowRank(nn.Module):
    def __init__(self, out: int, into: int, rank: int = 2):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(rank, into)), nn.Parameter(torch.zeros(out, rank))
        self.enabled = True

    def forward(self, weight):
        return weight + 0.5 * (self.b @ self.a) if self.enabled else weight


class Orthogonal(nn.Module):
    def forward(self, x):
        skew = x.triu(1) - x.triu(1).t()
        return torch.matrix_exp(skew)


def parametrized() -> tuple:
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8, bias=False), nn.Linear(8, 5))
    model.requires_grad_(False)
    for i in (0, 3):
        parametrize.register_parametrization(model[i], "weight", LowRank(*model[i].weight.shape))
    parametrize.register_parametrization(model[2], "weight", Orthogonal())
    model[2].requires_grad_(True)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def parametrized_step(model, optimizer, x, y):
    with parametrize.cached():
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x.flip(0)), y.flip(0))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        merged = [layer.weight for layer in model if hasattr(layer, "weight")]
        h = F.gelu(F.linear(x, merged[0], model[0].bias))
        out = F.linear(F.linear(h, merged[1]), merged[2], model[3].bias)
    return loss.item(), out.argmax(-1)


class Encoder(nn.Module):
    def __init__(self, words: int = 12, width: int = 8):
        super().__init__()
        self.embeddings = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.project, self.head, self.classes = nn.Linear(6, width), nn.Linear(width, words), nn.Linear(width, 2)

    def forward(self, ids, seen=None, padding=None):
        x = self.embeddings(ids)
        if seen is not None:
            place = (ids == 1).unsqueeze(-1).expand_as(x)
            x = x.masked_scatter(place, self.project(seen).to(x.dtype))
        h = self.layers(x, src_key_padding_mask=padding)
        return self.head(h), self.classes(h[:, 0])


def captions(n: int, g: torch.Generator) -> tuple:
    ids = torch.randint(2, 11, (n, 8), generator=g)
    ids[:, 1:3] = 1
    return ids, torch.randn(n, 2, 6, generator=g)


def masked_words_step(model, optimizer, ids, seen):
    inputs, labels = ids.clone(), ids.clone()
    special = (ids == 1) | (torch.arange(ids.shape[1]) == 0)
    chance = torch.full(labels.shape, 0.3)
    chance.masked_fill_(special, value=0.0)
    masked = torch.bernoulli(chance).bool()
    labels[~masked] = -100
    replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & masked
    inputs[replaced] = 11
    random = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & masked & ~replaced
    inputs[random] = torch.randint(2, 11, labels.shape, dtype=torch.long)[random]
    logits, _ = model(inputs, seen)
    loss = F.cross_entropy(logits.view(-1, 12), labels.view(-1), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), masked.sum()


class FGM:
    """An adversary on the embeddings, by name, that keeps and puts back what it moves."""

    def __init__(self, model: nn.Module):
        self.model, self.backup = model, {}

    def attack(self, epsilon: float = 0.1):
        for name, p in self.model.named_parameters():
            if p.requires_grad and "embeddings" in name:
                self.backup[name] = p.data.clone()
                p.data.add_(epsilon * p.grad / (torch.norm(p.grad) + 1e-8))

    def restore(self):
        for name, p in self.model.named_parameters():
            if name in self.backup:
                p.data = self.backup[name]
        self.backup = {}


def finetuned() -> tuple:
    model = Encoder()
    groups = [{"params": model.embeddings.parameters(), "lr": 1e-3 * 0.8**3}]
    groups += [
        {"params": layer.parameters(), "lr": 1e-3 * 0.8 ** (2 - i)} for i, layer in enumerate(model.layers.layers)
    ]
    groups += [{"params": [*model.head.parameters(), *model.classes.parameters()], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, eps=STEADY)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 3))


def sentences(n: int, g: torch.Generator) -> tuple:
    ids = torch.randint(2, 11, (n, 7), generator=g)
    return ids, torch.arange(7) >= torch.randint(4, 8, (n, 1), generator=g), torch.randint(0, 2, (n,), generator=g)


def rdrop_step(model, optimizer, ids, padding, y):
    fgm = FGM(model)
    model.train()
    _, a = model(ids, padding=padding)
    _, b = model(ids, padding=padding)
    p, q = F.log_softmax(a, -1), F.log_softmax(b, -1)
    apart = (F.kl_div(p, q.exp(), reduction="none").sum() + F.kl_div(q, p, reduction="none", log_target=True).sum()) / 2
    loss = (F.cross_entropy(a, y) + F.cross_entropy(b, y)) / 2 + 0.5 * apart / ids.size(0)
    loss.backward()
    fgm.attack()
    F.cross_entropy(model(ids, padding=padding)[1], y).backward()
    fgm.restore()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), apart.item()


def by_lambda(i: int, made: tuple) -> None:
    made[-1].step()


class Cached(nn.Module):
    """Llama's attention in complex numbers, with caches of a fixed size that it writes into."""

    def __init__(self, words: int = 11, width: int = 8, room: int = 12, batch: int = 8):
        super().__init__()
        self.emb, self.out = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.wq, self.wkv, self.wo = (
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 8, bias=False),
            nn.Linear(width, width, bias=False),
        )
        freqs = torch.outer(
            torch.arange(room).to(torch.get_default_dtype()), 1 / 100 ** (torch.arange(0, 4, 2)[:2] / 4)
        )
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(freqs), freqs), persistent=False)
        self.cache_k, self.cache_v = torch.zeros(batch, room, 1, 4), torch.zeros(batch, room, 1, 4)

    def rotary(self, x, freqs):
        x_ = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(x_ * freqs.view(1, x_.shape[1], 1, x_.shape[-1])).flatten(3).type_as(x)

    def forward(self, idx, start: int = 0, cached: bool = False):
        b, n = idx.shape
        h = self.emb(idx)
        xq, (xk, xv) = self.wq(h).view(b, n, 2, 4), self.wkv(h).view(b, n, 2, 4).split(1, dim=2)
        freqs = self.freqs_cis[start : start + n]
        xq, xk = self.rotary(xq, freqs), self.rotary(xk, freqs)
        if cached:
            self.cache_k[:b, start : start + n] = xk
            self.cache_v[:b, start : start + n] = xv
            xk, xv = self.cache_k[:b, : start + n], self.cache_v[:b, : start + n]
        mask = None
        if n > 1:
            mask = torch.triu(torch.full((n, n), float("-inf")), diagonal=1)
            mask = torch.hstack([torch.zeros((n, start)), mask]).type_as(h)
        xk, xv = (
            x[:, :, :, None, :].expand(b, x.shape[1], 1, 2, 4).reshape(b, -1, 2, 4).transpose(1, 2) for x in (xk, xv)
        )
        scores = torch.matmul(xq.transpose(1, 2), xk.transpose(2, 3)) / math.sqrt(4)
        scores = F.softmax(scores if mask is None else scores + mask, dim=-1)
        return self.out(h + self.wo(torch.matmul(scores, xv).transpose(1, 2).contiguous().view(b, n, -1)))


def cached_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x).view(-1, 11), y.reshape(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        ids = torch.full((x.shape[0], 8), 0, dtype=torch.long)
        ids[:, :4] = x[:, :4]
        before = 0
        for now in range(4, 7):
            logits = model(ids[:, before:now], before, cached=True)
            ids[:, now] = torch.argmax(logits[:, -1], dim=-1).reshape(-1)
            before = now
    return loss.item(), ids


MORE: dict[str, Script] = {
    "ppo, epochs": Script(with_adam(Gaussian), ppo_epochs_step, rollout, cosine, draws=True),
    "td3": Script(lambda: (TD3(),), td3_step, moves, draws=True),
    "rainbow": Script(rainbow, rainbow_step, prioritized, draws=True),
    "dreamer": Script(with_adam(Dreamer), dreamer_step, rollout),
    "flow matching": Script(dit, flow_matching_step, images, draws=True),
    "cycle gan": Script(cycle_gan, cycle_gan_step, two_images, draws=True),
    "residual and finite codes": Script(with_adam(Tokenizer), tokenizer_step, only_vectors),
    "swav": Script(with_adam(SwAV), swav_step, pairs),
    "boxes": Script(with_adam(Boxes), boxes_step, boxes),
    "points": Script(with_adam(Points, STEADY), points_step, clouds),
    "dpo": Script(of_policy, dpo_step, preference_batches),
    "grpo": Script(of_policy, grpo_step, answers),
    "transformer-xl": Script(with_adam(XL), words_step, tokens),
    "rwkv": Script(with_adam(RWKV), words_step, tokens),
    "t5": Script(with_adam(T5), t5_step, two_lengths),
    "experts, capacity": Script(with_adam(Capacity), capacity_step, tokens, draws=True),
    "many loras": Script(with_adam(ManyLoRAs), many_loras_step, task_vectors),
    "parametrized": Script(parametrized, parametrized_step, vectors, cosine),
    "masked words": Script(with_adam(Encoder, STEADY), masked_words_step, captions, draws=True),
    "r-drop, fgm": Script(finetuned, rdrop_step, sentences, by_lambda, draws=True),
    "llama's caches": Script(with_adam(Cached), cached_step, tokens),
}
