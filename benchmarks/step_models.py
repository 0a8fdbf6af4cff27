"""More models and steps for the table of `step_kinds.py`: precision, hooks, ops, arguments that are objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from step_parts import CLASSES, HIDDEN, ROWS, WIDTH, Net, adamw, rows, sgd, train_step
from torch import nn
from torch.utils.checkpoint import checkpoint


class Dropping(Net):
    """Dropout before and after a layer; with two checkpoints where asked, of which the first is computed again last."""

    def __init__(self, p: float = 0.3, reentrant: bool | None = None):
        super().__init__()
        self.p, self.reentrant = p, reentrant

    def first(self, x):
        return F.gelu(self.up(F.dropout(x, self.p)))

    def second(self, x):
        return F.dropout(self.norm(x), self.p)

    def forward(self, x):
        if self.reentrant is None:
            return self.down(self.second(self.first(x)))
        x = x.detach().requires_grad_() if self.reentrant else x
        for part in self.first, self.second:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return self.down(x)


class Normed(Net):
    def __init__(self, momentum: float | None = 0.1):
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN, momentum=momentum)


class Tied(nn.Module):
    """One matrix reads and writes words."""

    def __init__(self):
        super().__init__()
        self.words, self.up = nn.Embedding(8, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, 8, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.up(self.words(x)).tanh()).flatten(0, 1)


def words() -> list[tuple]:
    g = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, 8, shape, generator=g) for shape in ((ROWS, 3), (ROWS * 3,))) for _ in range(5)]


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


class Buffers(Net):
    """A mean that moves and a count, both in buffers; one that is not saved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x):
        self.count += 1
        self.mean.lerp_(x.mean(0), 0.1)
        self.last = x[0] * 2
        return super().forward(x - self.mean * self.count)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **options: Any):
        super().__init__()
        self.cell = kind(WIDTH, HIDDEN, batch_first=True, **options)
        self.down = nn.Linear(HIDDEN * (2 if options.get("bidirectional") else 1), CLASSES)

    def forward(self, x):
        out, _ = self.cell(x.unsqueeze(1) * torch.arange(1, 4, dtype=x.dtype)[:, None])
        return self.down(out[:, -1])


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.down = nn.LSTMCell(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        state = None
        for _ in range(2):
            state = self.cell(x, state)
        return self.down(state[0])


# ---- precision --------------------------------------------------------------------------------


def autocast_step(model, optimizer, x, y):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def scaler_of(**options: Any) -> Callable[[], tuple]:
    def begin() -> tuple:
        model = Net()
        return model, adamw(model.parameters()), torch.amp.GradScaler("cpu", **options)

    return begin


def scaled_step(model, optimizer, scaler, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def scaled_clipping_step(model, optimizer, scaler, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), norm


def rows_with_overflow(*at: int) -> Callable[[], list[tuple]]:
    """These batches have gradients that are not finite."""

    def batches() -> list[tuple]:
        found = rows()
        for i in at:
            found[i][0][0, 0] = math.inf
        return found

    return batches


# ---- hooks ------------------------------------------------------------------------------------


def hooked(place: Callable[[nn.Module, Any], Any]) -> Callable[[], tuple]:
    """A model with hooks, and an optimiser; `place` gets both."""

    def begin() -> tuple:
        model = Net()
        optimizer = sgd(model.parameters())
        place(model, optimizer)
        return model, optimizer

    return begin


def module_hooks(model: nn.Module, optimizer: Any) -> None:
    model.up.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model.norm.register_forward_hook(lambda module, args, out: out + 1)
    model.down.register_full_backward_hook(lambda module, grads_in, grads_out: (grads_in[0] * 0.5,))
    model.norm.register_full_backward_pre_hook(lambda module, grads_out: (grads_out[0] * 3,))


def gradient_hooks(model: nn.Module, optimizer: Any) -> None:
    model.up.weight.register_hook(lambda gradient: gradient * 0.5)
    model.down.bias.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))


def norms_step(model, optimizer, x, y):
    """Hooks that last for the step take the norms of gradients, and of all together when the last is there."""
    norms, together, parameters = {}, [], dict(model.named_parameters())
    handles = [p.register_hook(lambda g, name=name: norms.update({name: g.norm()})) for name, p in parameters.items()]
    after_all = torch.autograd.graph.register_multi_grad_hook
    handles.append(after_all(parameters.values(), lambda grads: together.append(sum(g.sum() for g in grads))))
    loss = train_step(model, optimizer, x, y)
    for handle in handles:
        handle.remove()
    return loss, [norms[name] for name in parameters], together


def accumulate_hooks(model: nn.Module, optimizer: Any) -> None:
    @torch.no_grad()
    def halve(p):
        p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)


def update_in_backward() -> tuple:
    """Each parameter has an optimiser of its own, which steps as soon as the gradient is there."""
    model = Net()
    optimizers = {p: sgd([p]) for p in model.parameters()}

    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return model, list(optimizers.values())


def backward_step(model, optimizers, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss.detach()


def activation_hook_step(model, optimizer, x, y):
    optimizer.zero_grad()
    hidden = model.norm(model.up(x))
    hidden.register_hook(lambda gradient: gradient * 2)
    hidden.retain_grad()
    loss = F.cross_entropy(model.down(hidden), y)
    loss.backward()
    optimizer.step()
    return loss.detach(), hidden.grad


# ---- ops --------------------------------------------------------------------------------------


class _Clamped(torch.autograd.Function):
    """A clamp whose gradient passes where it clamps, too."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (1 + x.abs().lt(0.1)), None


@torch.library.custom_op("spmd_steps::scaled_tanh", mutates_args=())
def scaled_tanh(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.tanh(x) * scale


@scaled_tanh.register_fake
def _(x, scale):
    return torch.empty_like(x)


def _setup(ctx, inputs, output):
    ctx.scale = inputs[1]
    ctx.save_for_backward(output)


def _backward(ctx, gradient):
    (out,) = ctx.saved_tensors
    return gradient * (ctx.scale - out * out / ctx.scale), None


scaled_tanh.register_autograd(_backward, setup_context=_setup)


class OfFunctions(Net):
    def forward(self, x):
        return self.down(self.norm(_Clamped.apply(self.up(x), 0.5)))


class OfCustomOps(Net):
    def forward(self, x):
        return self.down(self.norm(scaled_tanh(self.up(x), 2.0)))


# ---- arguments and results --------------------------------------------------------------------


@dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "batch"


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


def dict_step(model, optimizer, batch):
    return {"loss": train_step(model, optimizer, batch["x"], batch["y"]), "n": len(batch)}


def dataclass_step(model, optimizer, batch):
    loss = train_step(model, optimizer, batch.x, batch.y)
    with torch.no_grad():
        hidden = model.up(batch.x)
        return Output(loss, model(batch.x), (hidden, model.norm(hidden)))


def model_output_step(model, optimizer, batch):
    from transformers.modeling_outputs import SequenceClassifierOutput  # heavy, and for this kind alone

    loss = train_step(model, optimizer, **batch)
    return SequenceClassifierOutput(loss=loss, logits=model(batch["x"]).detach())


class KeyValueCache:
    """Grows by a row of keys and values in each step."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def update(self, k, v):
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 1)
        self.values = v if self.values is None else torch.cat([self.values, v], 1)
        return self.keys, self.values


def decode_step(model, cache, x, y):
    with torch.no_grad():
        hidden = model.norm(model.up(x)).unsqueeze(1)  # [rows, 1, hidden]
        keys, values = cache.update(hidden, hidden * 2)
        seen = F.scaled_dot_product_attention(hidden, keys, values)
        return model.down(seen.squeeze(1))


def static_cache_step(model, cache, x, y, at):
    """A cache of a fixed size, which is a buffer of a module; the place to write is a tensor."""
    with torch.no_grad():
        hidden = model.norm(model.up(x)).unsqueeze(1)
        cache.keys.index_copy_(1, at, hidden)
        return model.down(F.scaled_dot_product_attention(hidden, cache.keys, cache.keys).squeeze(1))


class StaticCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(ROWS, 5, HIDDEN))


def rows_and_places() -> list[tuple]:
    return [(*batch, torch.tensor([i])) for i, batch in enumerate(rows())]


def wrapped(batch: Callable) -> Callable[[], list[tuple]]:
    return lambda: [(batch(x=x, y=y),) for x, y in rows()]
