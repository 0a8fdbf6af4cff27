"""Train steps with optimisers, derivatives and layers of one's own; `wild_scripts.py` says what a script is.

Optimisers that count, copies of models that are made in the step, gradients under vmap, hooks, implicit derivatives,
complex numbers, linear algebra, spectra, splines.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from wild_scripts import (
    STEADY,
    Script,
    cosine,
    images,
    loss_step,
    mlp,
    only_vectors,
    pairs,
    plain_step,
    vectors,
    with_adam,
)

# Optimisers of one's own


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                grad, lr, (beta1, beta2), state = p.grad, group["lr"], group["betas"], self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                if grad.dim() > 1:
                    grad.add_(-grad.mean(dim=tuple(range(1, grad.dim())), keepdim=True))
                p.data.mul_(1.0 - lr * group["weight_decay"])
                update = state["exp_avg"].clone().mul_(beta1).add(grad, alpha=1.0 - beta1).sign_()
                p.add_(update, alpha=-lr)
                state["exp_avg"].mul_(beta2).add_(grad, alpha=1.0 - beta2)
        return loss


class Sophia(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, rho=0.04, every=2):
        super().__init__(params, dict(lr=lr, betas=(0.96, 0.99), rho=rho))
        self.every, self.iter = every, 0

    @torch.no_grad()
    def update_hessian(self, bs):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "hessian" not in state:
                    state["hessian"] = torch.zeros_like(p)
                state["hessian"].mul_(0.99).addcmul_(p.grad, p.grad * bs, value=0.01)

    @torch.no_grad()
    def step(self):
        self.iter += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "exp_avg" not in state:
                    state["step"], state["exp_avg"] = torch.tensor(0.0), torch.zeros_like(p)
                    state.setdefault("hessian", torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].mul_(0.96).add_(p.grad, alpha=0.04)
                ratio = (state["exp_avg"].abs() / (group["rho"] * state["hessian"] + 1e-15)).clamp(None, 1)
                p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


def sophia_step(model, optimizer, x, y):
    if optimizer.iter % optimizer.every == 0:
        logits = model(x)
        sampled = torch.distributions.Categorical(logits=logits).sample()
        F.cross_entropy(logits, sampled).backward()
        optimizer.update_hessian(bs=x.shape[0])
        optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


class Shampoo(torch.optim.Optimizer):
    def __init__(self, params, lr=0.05, momentum=0.9, update_freq=2):
        super().__init__(params, dict(lr=lr, momentum=momentum, update_freq=update_freq))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state, order = p.grad, self.state[p], p.grad.ndimension()
                if len(state) == 0:
                    state["step"] = 0
                    state["momentum_buffer"] = grad.clone()
                    for i, dim in enumerate(grad.size()):
                        state[f"precond_{i}"] = 0.1 * torch.eye(dim, out=grad.new(dim, dim))
                        state[f"inv_precond_{i}"] = grad.new(dim, dim).zero_()
                grad = grad.mul(1 - group["momentum"]).add(state["momentum_buffer"], alpha=group["momentum"])
                for i, dim in enumerate(grad.size()):
                    precond, inv = state[f"precond_{i}"], state[f"inv_precond_{i}"]
                    grad = grad.transpose(0, i).contiguous()
                    shape, grad = grad.size(), grad.view(dim, -1)
                    precond.add_(grad @ grad.t())
                    if state["step"] % group["update_freq"] == 0:
                        values, vectors = torch.linalg.eigh(precond)
                        inv.copy_(vectors @ values.pow(-1 / (2 * order)).diag() @ vectors.t())
                    grad = (inv @ grad).view(shape).transpose(0, i)
                state["step"] += 1
                state["momentum_buffer"] = grad.contiguous()
                p.data.add_(grad, alpha=-group["lr"])


class Adam8(torch.optim.Optimizer):
    """Adam whose state is kept in blocks of 8 bits each, with the largest of a block."""

    def __init__(self, params, lr=1e-2, block=16):
        super().__init__(params, dict(lr=lr, betas=(0.9, 0.99), eps=1e-3, block=block))

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        for kept in self.state.values():
            for name in ("m", "v"):  # torch makes all state what the parameter is
                kept[name] = kept[name].to(torch.int8)

    @staticmethod
    def pack(x, block: int):
        flat = F.pad(x.flatten(), (0, -x.numel() % block)).view(-1, block)
        most = flat.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
        return (flat / most * 126.5).round().to(torch.int8), most

    @staticmethod
    def unpack(q, most, like):
        return (q.to(like.dtype) / 126.5 * most).flatten()[: like.numel()].view_as(like)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, block = self.state[p], group["block"]
                if "step" not in state:
                    state["step"] = 0
                    for name in ("m", "v"):
                        state[name], state[f"{name}_most"] = self.pack(torch.zeros_like(p), block)
                state["step"] += 1
                m = self.unpack(state["m"], state["m_most"], p).lerp(p.grad, 0.1)
                v = self.unpack(state["v"], state["v_most"], p).abs().mul(0.99).addcmul(p.grad, p.grad, value=0.01)
                c1, c2 = 1 - 0.9 ** state["step"], 1 - 0.99 ** state["step"]
                p.addcdiv_(m, (v.sqrt() / math.sqrt(c2)).add_(group["eps"]), value=-group["lr"] / c1)
                state["m"], state["m_most"] = self.pack(m, block)
                state["v"], state["v_most"] = self.pack(v, block)


class SGLD(torch.optim.Optimizer):
    """Langevin dynamics, preconditioned, with noise of the learning rate's size, after a burn-in."""

    def __init__(self, params, lr=1e-3, burn_in=2):
        super().__init__(params, dict(lr=lr, burn_in=burn_in, gamma=0.55))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["iteration"], state["square"] = 0, torch.ones_like(p)
                state["iteration"] += 1
                sigma = 1.0 if state["iteration"] > group["burn_in"] else 0.0
                state["square"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                rough = 1 / (1e-3 + state["square"].sqrt())
                lr = group["lr"] / (1 + state["iteration"]) ** group["gamma"]
                p.add_(
                    -lr * rough * p.grad
                    + sigma * torch.normal(torch.zeros_like(p), torch.ones_like(p)) * (2 * lr * rough).sqrt() * 0.1
                )


def of_kind(kind: Callable, make: Callable[[], nn.Module] = lambda: mlp(6, 8, 5), **options) -> Callable[[], tuple]:
    def begin() -> tuple:
        model = make()
        return model, kind(model.parameters(), **options)

    return begin


class Scaled(nn.Module):
    """A loss scale by hand: gradients that are not finite skip the step, without a branch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0**10))
        self.register_buffer("good", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def step(self, params, optimizer):
        params = [p for p in params if p.grad is not None]
        finite = torch.stack([torch.isfinite(p.grad).all() for p in params]).all()
        before = [p.clone() for p in params]
        for p in params:
            p.grad.div_(self.scale).nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
        for p, old in zip(params, before, strict=True):
            p.copy_(torch.where(finite, p, old))
        self.good.copy_(torch.where(finite, self.good + 1, 0))
        grown = self.good >= 2
        self.scale.mul_(torch.where(finite, torch.where(grown, 2.0, 1.0), 0.5))
        self.good.masked_fill_(grown, 0)


def scaled() -> tuple:
    model = mlp(6, 8, 5)
    return model, Scaled(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def overflowing(n: int, g: torch.Generator) -> tuple:
    x, y = vectors(n, g)
    return x * (1e308 if torch.rand((), generator=g) < 0.4 else 1.0), y


def scaled_step(model, scaler, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    (loss * scaler.scale).backward()
    scaler.step(model.parameters(), optimizer)
    return loss.nan_to_num(), scaler.scale.item()


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.heads = (
            mlp(6, 8, 8, act=nn.Tanh),
            nn.ModuleList([nn.Linear(8, 5), nn.Linear(8, 1), nn.Linear(8, 6)]),
        )

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return [head(h) for head in self.heads]


def pcgrad_step(model, optimizer, x, y):
    kinds, values, copied = model(x)
    losses = [F.cross_entropy(kinds, y), F.mse_loss(values.squeeze(-1), x.sum(-1)), F.l1_loss(copied, x)]
    trunk, shapes = list(model.trunk.parameters()), [p.shape for p in model.trunk.parameters()]
    optimizer.zero_grad()
    flat = []
    for i, loss in enumerate(losses):
        grads = torch.autograd.grad(loss, [*trunk, *model.heads[i].parameters()], retain_graph=i < len(losses) - 1)
        flat.append(torch.cat([g.flatten() for g in grads[: len(trunk)]]))
        for p, g in zip(model.heads[i].parameters(), grads[len(trunk) :], strict=True):
            p.grad = g
    projected = [g.clone() for g in flat]
    for i, j in itertools.permutations(range(len(flat)), 2):
        dot = torch.dot(projected[i], flat[j])
        projected[i] -= torch.clamp(dot, max=0) / (flat[j].norm() ** 2 + 1e-12) * flat[j]
    total = torch.stack(projected).mean(0)
    pieces = total.split([s.numel() for s in shapes])
    for p, piece, shape in zip(trunk, pieces, shapes, strict=True):
        p.grad = piece.view(shape)
    optimizer.step()
    cosine_of = F.cosine_similarity(flat[0], flat[1], dim=0)
    return [x.item() for x in losses], cosine_of.item()


# Learning to learn, and learning without forgetting


def reptile_step(model, optimizer, x, y):
    """The inner loop trains a copy, with an optimiser made for it; the outer one moves towards it."""
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.1)
    for _ in range(3):
        loss = F.cross_entropy(fast(x), y)
        inner.zero_grad()
        loss.backward()
        inner.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for p, q in zip(model.parameters(), fast.parameters(), strict=True):
            p.grad = p - q
    optimizer.step()
    return loss.item()


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(6, 8, 5, act=nn.Tanh)
        self.rates = nn.ParameterDict(
            {k.replace(".", "_"): nn.Parameter(torch.full_like(p, 0.1)) for k, p in self.net.named_parameters()}
        )


def task_batches(n: int, g: torch.Generator) -> tuple:
    return torch.randn(n, 6, 6, generator=g), torch.randint(0, 5, (n, 6), generator=g)


def meta_step(model, optimizer, x, y):
    """MAML with learned rates for all tasks at once: gradients of gradients under vmap."""
    params = dict(model.net.named_parameters())

    def loss_of(params, x, y):
        return F.cross_entropy(torch.func.functional_call(model.net, params, (x,)), y)

    def after(x, y):
        fast = params
        for _ in range(2):
            grads = torch.func.grad(loss_of)(fast, x[:3], y[:3])
            fast = {k: p - model.rates[k.replace(".", "_")] * grads[k] for k, p in fast.items()}
        return loss_of(fast, x[3:], y[3:])

    losses = torch.func.vmap(after)(x, y)
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
    return losses.detach()


class Ensemble(nn.Module):
    def __init__(self, n: int = 3):
        super().__init__()
        nets = [mlp(6, 8, 5) for _ in range(n)]
        params, _ = torch.func.stack_module_state(nets)
        self.params = nn.ParameterDict({k.replace(".", "_"): nn.Parameter(p.detach()) for k, p in params.items()})
        self.names = {k.replace(".", "_"): k for k in params}
        self.base = [copy.deepcopy(nets[0]).to("meta")]

    def forward(self, x):
        def call(params, x):
            return torch.func.functional_call(self.base[0], params, (x,))

        return torch.vmap(call, in_dims=(0, None))({self.names[k]: p for k, p in self.params.items()}, x)


def ensemble_step(model, optimizer, x, y):
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.repeat(logits.shape[0]))
    probs = logits.softmax(-1)
    mean = probs.mean(0)
    spread = (probs * (probs.log() - mean.log())).sum(-1).mean()
    optimizer.zero_grad()
    (loss - 0.1 * spread).backward()
    optimizer.step()
    return loss.item(), spread.item()


class EWC:
    def __init__(self, model: nn.Module):
        self.means = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.fisher = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    def penalty(self, model: nn.Module):
        return sum((self.fisher[n] * (p - self.means[n]) ** 2).sum() for n, p in model.named_parameters())

    def see(self, model: nn.Module, x):
        logp = F.log_softmax(model(x), dim=1)
        best = logp.max(1)[1].detach()
        grads = torch.autograd.grad(F.nll_loss(logp, best), list(model.parameters()))
        for (n, p), g in zip(model.named_parameters(), grads, strict=True):
            self.fisher[n] = 0.9 * self.fisher[n] + g.data**2
            self.means[n] = p.data.clone()


def ewc() -> tuple:
    model = mlp(6, 8, 5)
    return model, EWC(model), torch.optim.SGD(model.parameters(), lr=0.1)


def ewc_step(model, ewc, optimizer, x, y):
    loss = F.cross_entropy(model(x), y) + 10 * ewc.penalty(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ewc.see(model, x)
    return loss.item()


class Net(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layer1, self.layer2 = (
            nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()),
        )
        self.fc = nn.Linear(width, 5)

    def forward(self, x):
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


class Hinted(nn.Module):
    """Attention transfer: hooks keep what the layers of both nets give."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = Net(8).requires_grad_(False), Net(4)
        self.seen = {}
        for who in ("teacher", "student"):
            for name in ("layer1", "layer2"):
                getattr(getattr(self, who), name).register_forward_hook(functools.partial(self.keep, f"{who}.{name}"))

    def keep(self, name, module, inputs, output):
        self.seen[name] = output

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x), wanted


def attention_map(x):
    return F.normalize(x.pow(2).mean(1).view(x.size(0), -1))


def hinted_step(model, optimizer, x, y):
    out, wanted = model(x)
    loss = F.cross_entropy(out, y) + 4 * F.kl_div(
        F.log_softmax(out / 2, 1), F.log_softmax(wanted / 2, 1), log_target=True, reduction="batchmean"
    )
    for name in ("layer1", "layer2"):
        loss = (
            loss
            + 10
            * (attention_map(model.seen[f"student.{name}"]) - attention_map(model.seen[f"teacher.{name}"]))
            .pow(2)
            .mean()
        )
    model.seen.clear()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def fixmatch() -> tuple:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.1), nn.Linear(8, 5))
    teacher = copy.deepcopy(model)
    return model, teacher, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)


def interleave(x, size):
    s = list(x.shape)
    return x.reshape([-1, size, *s[1:]]).transpose(0, 1).reshape([-1, *s[1:]])


def de_interleave(x, size):
    s = list(x.shape)
    return x.reshape([size, -1, *s[1:]]).transpose(0, 1).reshape([-1, *s[1:]])


def unlabelled(n: int, g: torch.Generator) -> tuple:
    weak = torch.randn(2 * n, 6, generator=g)
    return *vectors(n, g), weak, weak + 0.3 * torch.randn(2 * n, 6, generator=g)


def fixmatch_step(model, teacher, optimizer, x, y, weak, strong):
    n = x.shape[0]
    logits = de_interleave(model(interleave(torch.cat((x, weak, strong)), 5)), 5)
    of_x, (of_weak, of_strong) = logits[:n], logits[n:].chunk(2)
    labelled = F.cross_entropy(of_x, y, reduction="mean")
    pseudo = torch.softmax(of_weak.detach() / 1.0, dim=-1)
    most, target = torch.max(pseudo, dim=-1)
    mask = most.ge(0.3).to(x.dtype)
    with torch.no_grad():
        steady = teacher(weak).softmax(-1)
    other = (F.cross_entropy(of_strong, target, reduction="none") * mask).mean()
    loss = labelled + other + F.mse_loss(of_weak.softmax(-1), steady)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        needed = dict(teacher.named_parameters())
        for k, p in model.named_parameters():
            needed[k].copy_(needed[k] * 0.99 + (1.0 - 0.99) * p.detach())
        for (_, b), (_, a) in zip(teacher.named_buffers(), model.named_buffers(), strict=True):
            b.copy_(a)
    model.zero_grad()
    return loss.item(), mask.mean().item()


# Numbers of other kinds: spectra, complex weights, matrices, splines, equations


class Spectral(nn.Module):
    def __init__(self, a: int, b: int, modes: int):
        super().__init__()
        self.modes = modes
        self.weights1, self.weights2 = (
            nn.Parameter(torch.rand(a, b, modes, modes, dtype=torch.complex128) / (a * b)) for _ in range(2)
        )

    def forward(self, x):
        n, m = x.shape[0], self.modes
        ft = torch.fft.rfft2(x)
        out = torch.zeros(
            n, self.weights1.shape[1], x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat, device=x.device
        ).to(ft.dtype)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", ft[:, :, :m, :m], self.weights1)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", ft[:, :, -m:, :m], self.weights2)
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))


class FNO(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.enter, self.conv, self.w, self.leave = (
            nn.Linear(5, width),
            Spectral(width, width, 3),
            nn.Conv2d(width, width, 1),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        n, h, w = x.shape[0], x.shape[2], x.shape[3]
        rows = torch.linspace(0, 1, h).reshape(1, h, 1, 1).repeat([n, 1, w, 1])
        columns = torch.linspace(0, 1, w).reshape(1, 1, w, 1).repeat([n, h, 1, 1])
        x = self.enter(torch.cat((x.permute(0, 2, 3, 1), rows, columns), dim=-1)).permute(0, 3, 1, 2)
        x = F.pad(x, [0, 2, 0, 2])
        x = F.gelu(self.conv(x) + self.w(x))[..., :-2, :-2]
        return self.leave(x.permute(0, 2, 3, 1)).squeeze(-1)


def operator_step(model, optimizer, x, y):
    out, wanted = model(x), x.mean(1).cumsum(-1)
    n = x.shape[0]
    apart = torch.norm(out.reshape(n, -1) - wanted.reshape(n, -1), 2, 1) / torch.norm(wanted.reshape(n, -1), 2, 1)
    loss = torch.sum(apart)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item() / n


class Denoiser(nn.Module):
    """A mask on a spectrum, with losses at several resolutions, and mel bands that are partly hidden."""

    def __init__(self):
        super().__init__()
        self.net, self.rnn = nn.Conv1d(9, 9, 3, padding=1), nn.GRU(9, 9, batch_first=True)
        self.register_buffer("window", torch.hann_window(16))
        self.register_buffer("mel", torch.rand(4, 9))

    def forward(self, x):
        spec = torch.stft(x, 16, 4, window=self.window, return_complex=True)
        mag, phase = spec.abs(), torch.angle(spec)
        mask = torch.sigmoid(self.net(self.rnn(mag.transpose(1, 2))[0].transpose(1, 2)))
        mel = torch.log(self.mel @ mag.pow(2) + 1e-5)
        return torch.istft(torch.polar(mag * mask, phase), 16, 4, window=self.window, length=x.shape[-1]), mel


def resolution(a, b, n_fft: int, hop: int):
    window = torch.hann_window(n_fft)
    A, B = (torch.stft(z, n_fft, hop, window=window, return_complex=True).abs().clamp(min=1e-3) for z in (a, b))
    return torch.norm(B - A, p="fro") / torch.norm(B, p="fro") + F.l1_loss(A.log(), B.log())


def waves(n: int, g: torch.Generator) -> tuple:
    clean = torch.sin(torch.arange(64) * (0.2 + torch.rand(n, 1, generator=g)))
    return clean + 0.3 * torch.randn(n, 64, generator=g), clean


def denoise_step(model, optimizer, noisy, clean):
    made, mel = model(noisy)
    f0 = torch.randint(0, 3, (mel.shape[0], 1))
    hidden = (torch.arange(4) >= f0) & (torch.arange(4) < f0 + 1)
    mel = mel.masked_fill(hidden.unsqueeze(-1), 0.0)
    loss = sum(resolution(made, clean, n, hop) for n, hop in ((16, 4), (32, 8))) + 0.01 * mel.pow(2).mean()
    snr = 10 * torch.log10(clean.pow(2).sum(-1) / (clean - made).pow(2).sum(-1))
    optimizer.zero_grad()
    (loss - 0.01 * snr.mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5)
    optimizer.step()
    return loss.item(), snr.detach()


class Deep(nn.Module):
    """A Gaussian process on features of a net: kernels of all pairs, Cholesky, a marginal likelihood."""

    def __init__(self):
        super().__init__()
        self.net = mlp(6, 8, 2, act=nn.Tanh)
        self.log_length, self.log_noise = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.tensor(0.0))

    def forward(self, x, y):
        h = self.net(x) / self.log_length.exp()
        n = x.shape[0]
        k = torch.exp(-0.5 * torch.cdist(h, h, compute_mode="donot_use_mm_for_euclid_dist").pow(2))
        k = k + (self.log_noise.exp() + 1e-4) * torch.eye(n)
        chol = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y.unsqueeze(-1), chol)
        white = torch.linalg.solve_triangular(chol, y.unsqueeze(-1), upper=False)
        dist = torch.distributions.MultivariateNormal(torch.zeros(n), scale_tril=chol)
        nll = 0.5 * (y.unsqueeze(-1) * alpha).sum() + chol.diagonal().log().sum() + 0.5 * n * math.log(2 * math.pi)
        return (nll - dist.log_prob(y)) / n + white.square().mean()


def process_step(model, optimizer, x, y):
    return loss_step(model, optimizer, x, y[:, 0])


class Spline(nn.Module):
    """KAN's layer: splines on a grid, by their recursion."""

    def __init__(self, a: int, b: int, size: int = 3, order: int = 2):
        super().__init__()
        self.order, h = order, 2 / size
        grid = (torch.arange(-order, size + order + 1) * h - 1).expand(a, -1).contiguous().to(torch.get_default_dtype())
        self.register_buffer("grid", grid)
        self.base, self.spline = (
            nn.Parameter(torch.randn(b, a) * 0.3),
            nn.Parameter(torch.randn(b, a, size + order) * 0.3),
        )

    def bases(self, x):
        assert x.dim() == 2 and x.size(1) == self.grid.size(0)
        x, grid = x.unsqueeze(-1), self.grid
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1]
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:(-k)]) * bases[:, :, 1:]
            bases = left + right
        return bases.contiguous()

    def forward(self, x):
        out = F.linear(F.silu(x), self.base)
        return out + F.linear(self.bases(x).view(x.size(0), -1), self.spline.view(self.spline.size(0), -1))


class KAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Spline(6, 4), Spline(4, 5)])

    def forward(self, x, update_grid: bool = False):
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return x

    def regular(self):
        total = 0
        for layer in self.layers:
            l1 = layer.spline.abs().mean(-1)
            p = l1 / l1.sum()
            total = total + l1.sum() - torch.sum(p * p.log())
        return total


def kan_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y) + 1e-3 * model.regular()
    loss.backward()
    optimizer.step()
    return loss.item()


class Implicit(nn.Module):
    """A deep equilibrium: a fixed number of rounds without gradients, and a hook that solves for the gradient."""

    def __init__(self):
        super().__init__()
        self.f, self.into, self.out = nn.Linear(8, 8), nn.Linear(6, 8), nn.Linear(8, 5)
        nn.init.normal_(self.f.weight, std=0.1)

    def cell(self, z, x):
        return torch.tanh(self.f(z) + x)

    def forward(self, x):
        x = self.into(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(12):
                z = self.cell(z, x)
        z = self.cell(z, x)
        if self.training:
            z0 = z.clone().detach().requires_grad_()
            f0 = self.cell(z0, x)

            def backward_hook(grad):
                g = grad
                for _ in range(12):
                    g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
                return g

            z.register_hook(backward_hook)
        return self.out(z)


class Adjoint(torch.autograd.Function):
    """An equation solved forwards without a tape, and its adjoint backwards."""

    @staticmethod
    def forward(ctx, z, func, steps, *params):
        ctx.func, ctx.steps = func, steps
        with torch.no_grad():
            for _ in range(steps):
                z = z + func(z) / steps
        ctx.save_for_backward(z, *params)
        return z

    @staticmethod
    def backward(ctx, grad):
        z, *params = ctx.saved_tensors
        total = [torch.zeros_like(p) for p in params]
        for _ in range(ctx.steps):
            with torch.enable_grad():
                z = z.detach().requires_grad_(True)
                f = ctx.func(z)
                of_z, *of_params = torch.autograd.grad(f, (z, *params), grad)
            z = z.detach() - f.detach() / ctx.steps
            grad = grad + of_z / ctx.steps
            total = [a + b / ctx.steps for a, b in zip(total, of_params, strict=True)]
        return grad, None, None, *total


class AdjointODE(nn.Module):
    def __init__(self):
        super().__init__()
        self.func, self.head = mlp(6, 8, 6, act=nn.Tanh), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(Adjoint.apply(x, self.func, 4, *self.func.parameters()))


class ActNorm(nn.Module):
    """Glow's: scales that the first batch sets."""

    def __init__(self, n: int):
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(1, n, 1, 1)), nn.Parameter(torch.ones(1, n, 1, 1))
        self.initialized = False

    def forward(self, x):
        if not self.initialized:
            with torch.no_grad():
                flat = x.permute(1, 0, 2, 3).contiguous().view(x.shape[1], -1)
                self.loc.data.copy_(-flat.mean(1).view(1, -1, 1, 1))
                self.scale.data.copy_(1 / (flat.std(1).view(1, -1, 1, 1) + 1e-6))
            self.initialized = True
        return self.scale * (x + self.loc), x.shape[2] * x.shape[3] * torch.sum(torch.log(torch.abs(self.scale)))


class Glow(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.net = ActNorm(12), nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 1))
        self.register_buffer("p", torch.eye(12)[torch.randperm(12)])
        self.l, self.u = nn.Parameter(torch.randn(12, 12) * 0.1), nn.Parameter(torch.randn(12, 12) * 0.1)
        self.log_s = nn.Parameter(torch.zeros(12))
        self.register_buffer("sign_s", torch.sign(torch.randn(12)))

    def forward(self, x):
        b, c, h, w = x.shape
        x = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).contiguous().view(b, c * 4, h // 2, w // 2)
        x, logdet = self.norm(x)
        lower = torch.tril(self.l, -1) + torch.eye(12)
        upper = torch.triu(self.u, 1) + torch.diag(self.sign_s * torch.exp(self.log_s))
        x = F.conv2d(x, (self.p @ lower @ upper).unsqueeze(2).unsqueeze(3))
        logdet = logdet + x.shape[2] * x.shape[3] * self.log_s.sum()
        a, b_ = x.chunk(2, 1)
        log_s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        x = torch.cat([a, (b_ + t) * s], 1)
        logdet = logdet + torch.sum(torch.log(s).view(b, -1), 1)
        return (-0.5 * (x**2 + math.log(2 * math.pi))).flatten(1).sum(1) + logdet


def glow_step(model, optimizer, x, y):
    x = x + torch.rand_like(x) / 32
    loss = -(model(x) / (math.log(2) * x[0].numel())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


# Layers of other kinds


class WSConv(nn.Conv2d):
    def forward(self, x):
        var, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        return F.conv2d(x, (self.weight - mean) * torch.rsqrt(var + 1e-5), self.bias, self.stride, self.padding)


def standardized() -> nn.Module:
    return nn.Sequential(WSConv(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def unitwise(x):
    if x.ndim <= 1:
        return x.norm(2)
    return x.norm(2, dim=tuple(range(1, x.ndim)), keepdim=True)


def standardized_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        most = unitwise(p.detach()).clamp_(min=1e-3).mul_(0.1)
        norm = unitwise(p.grad.detach())
        clipped = p.grad.detach() * (most / norm.clamp(min=1e-6))
        p.grad.detach().copy_(torch.where(norm < most, p.grad.detach(), clipped))
    optimizer.step()
    return loss.item()


class Fake(torch.autograd.Function):
    """LSQ: a step that is learned, with the gradient of the paper."""

    @staticmethod
    def forward(ctx, x, alpha, g, qn, qp):
        ctx.save_for_backward(x, alpha)
        ctx.other = g, qn, qp
        return (x / alpha).round().clamp(qn, qp) * alpha

    @staticmethod
    def backward(ctx, grad):
        x, alpha = ctx.saved_tensors
        g, qn, qp = ctx.other
        q = x / alpha
        small, big = (q < qn).to(x.dtype), (q > qp).to(x.dtype)
        middle = 1.0 - small - big
        of_alpha = ((small * qn + big * qp + middle * (q.round() - q)) * grad * g).sum().unsqueeze(dim=0)
        return middle * grad, of_alpha, None, None, None


class LSQ(nn.Linear):
    def __init__(self, a: int, b: int, bits: int = 4):
        super().__init__(a, b)
        self.qn, self.qp = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        self.alpha = nn.Parameter(2 * self.weight.detach().abs().mean().view(1) / math.sqrt(self.qp))
        self.act_scale = nn.Parameter(torch.ones(1) * 0.3)

    def forward(self, x):
        g = 1.0 / math.sqrt(self.weight.numel() * self.qp)
        w = Fake.apply(self.weight, self.alpha, g, self.qn, self.qp)
        x = Fake.apply(x, self.act_scale, 1.0 / math.sqrt(x[0].numel() * self.qp), self.qn, self.qp)
        return F.linear(x, w, self.bias)


def sparsemax(z):
    z = z - z.max(dim=-1, keepdim=True)[0]
    ordered = torch.sort(z, dim=-1, descending=True)[0]
    at = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype).view(1, -1).expand_as(ordered)
    bound = 1 + at * ordered
    is_gt = torch.gt(bound, torch.cumsum(ordered, -1)).type(z.dtype)
    k = torch.max(is_gt * at, -1, keepdim=True)[0]
    tau = (torch.sum(is_gt * ordered, -1, keepdim=True) - 1) / k
    return torch.clamp(z - tau, min=0)


class TabNet(nn.Module):
    def __init__(self, virtual: int = 4):
        super().__init__()
        self.virtual, self.bn, self.att_bn = virtual, nn.BatchNorm1d(6, momentum=0.01), nn.BatchNorm1d(6)
        self.fc, self.att, self.out = nn.Linear(6, 2 * 8, bias=False), nn.Linear(4, 6, bias=False), nn.Linear(4, 5)

    def ghost(self, x):
        chunks = x.chunk(math.ceil(x.shape[0] / self.virtual), 0)
        return torch.cat([self.att_bn(part) for part in chunks], dim=0)

    def forward(self, x):
        x = self.bn(x)
        prior, total, loss = torch.ones(x.shape), 0, 0
        a = x[:, :4]
        for _ in range(2):
            mask = sparsemax(self.ghost(self.att(a)) * prior)
            loss = loss + torch.mean(torch.sum(torch.mul(mask, torch.log(mask + 1e-15)), dim=1))
            prior = torch.mul(1.3 - mask, prior)
            d, a = F.glu(self.fc(mask * x)).split([4, 4], dim=1)
            total = torch.add(total, F.relu(d))
        return self.out(total), loss / 2


def tabnet_step(model, optimizer, x, y):
    out, sparse = model(x)
    loss = F.cross_entropy(out, y) - 1e-3 * sparse
    for p in model.parameters():
        p.grad = None
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1)
    optimizer.step()
    return loss.item()


class Perceiver(nn.Module):
    def __init__(self, width: int = 8, latents: int = 4):
        super().__init__()
        self.latents = nn.Parameter(torch.empty(latents, width))
        nn.init.trunc_normal_(self.latents, std=0.5)
        self.into, self.q, self.kv = nn.Linear(3 + 2 * 5, width), nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.self_attn, self.norm = nn.MultiheadAttention(width, 2), nn.LayerNorm(width)
        self.head, self.registers = nn.Linear(width, 5), nn.Parameter(torch.randn(2, width) * 0.5)

    def fourier(self, shape, like):
        axes = [torch.linspace(-1.0, 1.0, steps=size, device=like.device, dtype=like.dtype) for size in shape]
        pos = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).unsqueeze(-1)
        scales = torch.linspace(1.0, 5.0, 2, dtype=like.dtype)
        x = pos * scales * math.pi
        return torch.cat((torch.cat([x.sin(), x.cos()], dim=-1), pos), dim=-1).flatten(-2)

    def forward(self, images):
        x = images.movedim(1, -1)
        b, *axis, _ = x.shape
        enc = self.fourier(axis, x)
        x = torch.cat((x, enc[None].expand(b, *enc.shape)), dim=-1).reshape(b, -1, 13)
        x = self.into(x)
        z = torch.cat([self.latents[None].repeat(b, 1, 1), self.registers.unsqueeze(0).expand(b, -1, -1)], dim=1)
        for _ in range(2):
            k, v = self.kv(self.norm(x)).tensor_split(2, dim=-1)
            z = z + F.scaled_dot_product_attention(self.q(self.norm(z)), k, v)
            s = self.norm(z).permute(1, 0, 2)
            z = z + self.self_attn(s, s, s)[0].permute(1, 0, 2)
        return self.head(z[:, : self.latents.shape[0]].mean(dim=-2))


class GAT(nn.Module):
    def __init__(self, heads: int = 2, width: int = 4):
        super().__init__()
        self.w, self.heads, self.width = nn.Linear(6, heads * width, bias=False), heads, width
        self.a_src, self.a_dst = nn.Parameter(torch.randn(1, heads, width)), nn.Parameter(torch.randn(1, heads, width))
        self.head = nn.Linear(heads * width, 5)

    def forward(self, x, edge_index):
        n = x.size(0)
        h = self.w(x).view(-1, self.heads, self.width)
        src, dst = edge_index[0], edge_index[1]
        e = F.leaky_relu(((h * self.a_src).sum(-1))[src] + ((h * self.a_dst).sum(-1))[dst], 0.2)
        at = dst.unsqueeze(-1).expand(-1, self.heads)
        most = torch.full((n, self.heads), float("-inf"), dtype=e.dtype).scatter_reduce(
            0, at, e.detach(), reduce="amax"
        )
        e = (e - most[dst]).exp()
        total = torch.zeros(n, self.heads, dtype=e.dtype).scatter_add_(0, at, e)
        alpha = e / (total[dst] + 1e-16)
        out = torch.zeros_like(h)
        out.index_add_(0, dst, h[src] * alpha.unsqueeze(-1))
        return self.head(F.elu(out.reshape(n, -1)))


def meshes(n: int, g: torch.Generator) -> tuple:
    edges = torch.cat([torch.randint(0, n, (2, 3 * n), generator=g), torch.arange(n).repeat(2, 1)], 1)
    return (
        torch.randn(n, 6, generator=g),
        edges,
        torch.randint(0, 5, (n,), generator=g),
        torch.rand(n, generator=g) > 0.3,
    )


def gat_step(model, optimizer, x, edge_index, y, train_mask):
    model.train()
    optimizer.zero_grad()
    out = model(x, edge_index)
    loss = F.cross_entropy(out[train_mask], y[train_mask])
    loss.backward()
    optimizer.step()
    others = ~train_mask
    correct = (out[others].argmax(dim=-1) == y[others]).sum()
    return loss.item(), correct


def batch_hard_step(model, optimizer, x, y):
    z = F.normalize(model(x), dim=1)
    dist = (2 - 2 * z @ z.t()).clamp(min=1e-12).sqrt()
    n = dist.size(0)
    same = y.expand(n, n).eq(y.expand(n, n).t())
    far = (dist * same).max(dim=1)[0]
    near = (dist + 1e6 * same.to(dist.dtype)).min(dim=1)[0]
    triplet = F.margin_ranking_loss(near, far, torch.ones_like(near), margin=0.3)
    logits = z @ z.t() / 0.2
    others = torch.scatter(torch.ones_like(logits), 1, torch.arange(n).view(-1, 1), 0)
    positive = same.to(z.dtype) * others
    exp = torch.exp(logits) * others
    log_prob = logits - torch.log(exp.sum(1, keepdim=True))
    supcon = -((positive * log_prob).sum(1) / positive.sum(1).clamp(min=1)).mean()
    labels = 2 * torch.eye(n) - torch.ones(n, n)
    siglip = -F.logsigmoid(labels * (logits - 1.0)).sum() / n
    loss = triplet + supcon + 0.1 * siglip
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), (near > far).sum().item() / n


class IWAE(nn.Module):
    def __init__(self, k: int = 4):
        super().__init__()
        self.enc, self.dec, self.k = mlp(6, 8, 4), mlp(2, 8, 6), k

    def forward(self, x):
        mu, log_var = self.enc(x).tensor_split(2, dim=-1)
        q = torch.distributions.Normal(mu, (0.5 * log_var).exp())
        z = q.rsample((self.k,))
        prior = torch.distributions.Normal(torch.zeros_like(z), torch.ones_like(z))
        px = torch.distributions.Bernoulli(logits=self.dec(z))
        wanted = torch.sigmoid(x).round().expand(self.k, -1, -1)
        log_w = px.log_prob(wanted).sum(-1) + prior.log_prob(z).sum(-1) - q.log_prob(z).sum(-1)
        kl = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0)).sum(-1).mean()
        return -(torch.logsumexp(log_w, 0) - math.log(self.k)).mean(), kl


def iwae_step(model, optimizer, x):
    loss, kl = model(x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), kl.item()


OWN: dict[str, Script] = {
    "lion": Script(of_kind(Lion), plain_step, vectors, cosine),
    "sophia": Script(of_kind(Sophia), sophia_step, vectors, cosine, draws=True),
    "shampoo": Script(of_kind(Shampoo), plain_step, vectors, cosine),
    "8-bit adam": Script(of_kind(Adam8), plain_step, vectors, cosine),
    "sgld": Script(of_kind(SGLD), plain_step, vectors, cosine, draws=True),
    "loss scale by hand": Script(scaled, scaled_step, overflowing),
    "pcgrad": Script(with_adam(Tasks), pcgrad_step, vectors),
    "reptile": Script(of_kind(torch.optim.SGD, lr=0.5), reptile_step, vectors, cosine),
    "meta-sgd by vmap": Script(with_adam(Learner), meta_step, task_batches),
    "ensemble by vmap": Script(with_adam(Ensemble), ensemble_step, vectors),
    "ewc": Script(ewc, ewc_step, vectors),
    "attention transfer": Script(with_adam(Hinted), hinted_step, images),
    "fixmatch": Script(fixmatch, fixmatch_step, unlabelled),
    "neural operator": Script(with_adam(FNO), operator_step, images),
    "spectra": Script(with_adam(Denoiser), denoise_step, waves, draws=True),
    "gaussian process": Script(with_adam(Deep, STEADY), process_step, pairs),
    "kan": Script(with_adam(KAN), kan_step, vectors),
    "deep equilibrium": Script(with_adam(Implicit), plain_step, vectors),
    "adjoint": Script(with_adam(AdjointODE), plain_step, vectors),
    "glow": Script(with_adam(Glow), glow_step, images, draws=True),
    "weight standardisation": Script(with_adam(standardized), standardized_step, images),
    "lsq": Script(with_adam(lambda: nn.Sequential(LSQ(6, 8), nn.ReLU(), LSQ(8, 5))), plain_step, vectors),
    "tabnet": Script(with_adam(TabNet), tabnet_step, vectors),
    "perceiver": Script(with_adam(Perceiver, STEADY), plain_step, images),
    "gat": Script(with_adam(GAT), gat_step, meshes, replicated=("edge_index",)),
    "batch hard, supcon": Script(with_adam(lambda: mlp(6, 8, 4)), batch_hard_step, vectors),
    "iwae": Script(with_adam(IWAE), iwae_step, only_vectors, draws=True),
}
