"""Models, steps, hooks and batches of many kinds, each small: what the table of `step_kinds.py` is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

ROWS, WIDTH, HIDDEN, CLASSES = 6, 4, 6, 3
"""Six rows and six features on four ranks: blocks of 2, 2, 2 and none."""


class Net(nn.Module):
    """One weight by its rows, one by its columns, a norm between them."""

    def __init__(self, width: int = WIDTH, classes: int = CLASSES):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(width, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, classes)

    def forward(self, x):
        return self.down(self.norm(F.gelu(self.up(x))))


def adamw(params: Any) -> optim.Optimizer:
    return optim.AdamW(params, lr=1e-2, eps=1e-4)


def sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9)


def with_optimizer(model: Callable[[], nn.Module] = Net, optimizer: Callable = adamw) -> Callable[[], tuple]:
    """A function that makes a model and an optimiser of its parameters."""

    def begin() -> tuple[nn.Module, optim.Optimizer]:
        made = model()
        return made, optimizer(made.parameters())

    return begin


def rows(n: int = 5) -> list[tuple]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(ROWS, WIDTH, generator=g), torch.randint(0, CLASSES, (ROWS,), generator=g)) for _ in range(n)
    ]


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


# ---- parts of a step --------------------------------------------------------------------------


def forward(model, optimizer, x, y):
    return model(x)


def forward_no_grad(model, optimizer, x, y):
    with torch.no_grad():
        return {"logits": model(x), "loss": F.cross_entropy(model(x), y)}


@torch.inference_mode()
def forward_inference(model, optimizer, x, y):
    return model(x), y + 1


def forward_backward(model, optimizer, x, y):
    """Leaves its gradients, which add up."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


def gradients(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    return torch.autograd.grad(loss, list(model.parameters()))


def second_derivative(model, optimizer, x, y):
    x = x.detach().requires_grad_()
    out = model(x).square().sum()
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    optimizer.zero_grad()
    (out / x.shape[0] + slope.square().mean()).backward()
    optimizer.step()
    return out.detach(), slope.detach()


# ---- optimisers -------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1}, "SGD nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "eps": 1e-4}, "Adam amsgrad": {"lr": 1e-2, "eps": 1e-4, "amsgrad": True},
    "AdamW": {"lr": 1e-2, "eps": 1e-4}, "AdamW maximize": {"lr": 1e-2, "eps": 1e-4, "maximize": True},
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.1}, "Adadelta": {"lr": 1.0}, "Adamax": {"lr": 1e-2, "eps": 1e-4},
    "ASGD": {"lr": 1e-2, "t0": 2, "weight_decay": 0.1}, "NAdam": {"lr": 1e-2, "eps": 1e-4},
    "RAdam": {"lr": 1e-2, "eps": 1e-4, "betas": (0.9, 0.9)}, "RMSprop": {"lr": 1e-2, "eps": 1e-4, "centered": True},
    "RMSprop momentum": {"lr": 1e-2, "eps": 1e-4, "momentum": 0.5}, "Rprop": {"lr": 1e-2}, "Adafactor": {"lr": 1e-2},
    "Adafactor decay": {"lr": 1e-2, "weight_decay": 0.1, "maximize": True},
}  # fmt: skip

FUSED = ("SGD", "SGD nesterov", "Adam", "Adam amsgrad", "AdamW", "AdamW maximize", "Adagrad")
"""The optimisers that torch has in one kernel on CPUs."""


def optimizer_of(name: str, **way: bool) -> Callable[[Any], optim.Optimizer]:
    """Makes this line of the table, in one of torch's ways to compute it."""
    return lambda params: getattr(optim, name.split()[0])(params, **OPTIMIZERS[name], **way)


def muon() -> tuple:
    """Muon takes matrices alone; the rest goes to AdamW."""
    model = Net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return model, optim.Muon(matrices, lr=1e-2), adamw(others)


def two_optimizers_step(model, first, second, x, y):
    """The loss has gradients of full rank: Muon makes the singular values equal, and would blow up rounding errors."""
    first.zero_grad()
    second.zero_grad()
    loss = F.mse_loss(model(x), F.one_hot(y, CLASSES).to(x.dtype))
    loss.backward()
    first.step()
    second.step()
    return loss.detach()


def grouped(params: Any) -> optim.Optimizer:
    params = list(params)
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "lr": 0.03, "weight_decay": 0.0},
    ]
    return optim.AdamW(groups, lr=1e-2, eps=1e-4)


# ---- clipping, accumulation -------------------------------------------------------------------


def clipping(clip: Callable, *limit: float, **options: Any) -> Callable:
    """A step that clips its gradients."""

    def clipping_step(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = clip(model.parameters(), *limit, **options)
        optimizer.step()
        return loss.detach(), norm

    return clipping_step


def micro_batches(model, optimizer, x, y):
    """A loop over micro-batches, one update."""
    optimizer.zero_grad()
    losses = []
    for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
        loss = F.cross_entropy(model(a), b) / 3
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return losses


def accumulate(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y) / 2
    loss.backward()
    return loss.detach()


def accumulate_and_update(model, optimizer, x, y):
    loss = accumulate(model, optimizer, x, y)
    optimizer.step()
    optimizer.zero_grad()
    return loss


# ---- schedules --------------------------------------------------------------------------------


def scheduled(lr: Any, **options: Any) -> Callable[[], tuple]:
    """A model, an optimiser, and a schedule that is stepped between the steps."""

    def begin() -> tuple:
        model = Net()
        return model, optim.AdamW(model.parameters(), lr=copy.deepcopy(lr), eps=1e-4, **options)

    return begin


_SCHEDULES: dict[int, Any] = {}


def step_schedule(i: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if i == 0:
        _SCHEDULES[id(optimizer)] = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    else:
        _SCHEDULES[id(optimizer)].step()


def rate_as_argument(model, optimizer, x, y, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr
    return train_step(model, optimizer, x, y)


def decaying_step(model, optimizer, x, y):
    """A schedule by hand, in the step."""
    loss = train_step(model, optimizer, x, y)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    return loss, optimizer.param_groups[0]["lr"]


def rows_and_rates() -> list[tuple]:
    return [(*batch, 0.1 / (i + 1)) for i, batch in enumerate(rows())]


def scheduled_by_count(model, optimizer, x, y, count):
    """A warm-up by hand: the number of the step is an argument."""
    loss = F.cross_entropy(model(x), y) * min(1.0, (count + 1) / 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def rows_and_counts() -> list[tuple]:
    return [(*batch, i) for i, batch in enumerate(rows())]


# ---- several models ---------------------------------------------------------------------------


def with_average(optimizer: Callable = adamw) -> Callable[[], tuple]:
    def begin() -> tuple:
        model = Net()
        return model, copy.deepcopy(model).requires_grad_(False), optimizer(model.parameters())

    return begin


def averaging_step(model, average, optimizer, x, y):
    loss = train_step(model, optimizer, x, y)
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.lerp_(new, 0.1)
    return loss


def foreach_averaging_step(model, average, optimizer, x, y):
    loss = train_step(model, optimizer, x, y)
    torch._foreach_mul_(list(average.parameters()), 0.9)
    torch._foreach_add_(list(average.parameters()), [p.detach() for p in model.parameters()], alpha=0.1)
    return loss


def averaged_model() -> tuple:
    """torch's own average, which counts in a buffer and begins with a copy."""
    model = Net()
    return model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), adamw(model.parameters())


def averaged_model_step(model, average, optimizer, x, y):
    loss = train_step(model, optimizer, x, y)
    average.update_parameters(model)
    return loss


def pupils() -> tuple:
    student, teacher = Net(), Net()
    return student, teacher, adamw(student.parameters())


def adversaries() -> tuple:
    maker, judge = Net(WIDTH, WIDTH), Net(WIDTH, 1)
    return maker, judge, adamw(maker.parameters()), sgd(judge.parameters())


def adversarial_step(maker, judge, maker_optimizer, judge_optimizer, x, y):
    made = maker(x.flip(0))
    judge_optimizer.zero_grad()
    judged = F.softplus(-judge(x)).mean() + F.softplus(judge(made.detach())).mean()
    judged.backward()
    judge_optimizer.step()
    maker_optimizer.zero_grad()
    fooled = F.softplus(-judge(made)).mean()
    fooled.backward()
    maker_optimizer.step()
    return judged.detach(), fooled.detach()


def distilling_step(student, teacher, optimizer, x, y):
    with torch.no_grad():
        wanted = teacher(x).softmax(-1)
    optimizer.zero_grad()
    loss = F.kl_div(student(x).log_softmax(-1), wanted, reduction="batchmean")
    loss.backward()
    optimizer.step()
    return loss.detach()
