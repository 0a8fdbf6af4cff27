"""Random sessions: a training of several calls between which the user changes something, beside one device.

    differences(Session.of(seed))        what differs, as text; empty if nothing does

A session is a random training (`places/random_trainings.py`) with up to three optimisers, calls of several batch sizes
that accumulate or update, and events: parameters are frozen, layers replaced, states loaded, rates changed, the step
saved and loaded. Each is done to the model on one device and to the one on simulated ranks. After each call all that a
user can see is compared. A session prints as Python.
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from spmd import LocalTensor, LocalTensorMode, MeshTopoInfo
from spmd._torch import pytree
from tests.expand.places.random_trainings import AXES, NEAR, Layer, Net, Training
from tests.expand.side_by_side import seeded

MESHES = ((1,), (3,), (4,), (5,), (2, 2), (1, 3), (2, 1, 2))


@dataclass
class Live:
    """What a session has at one time. step: the function, compiled or not. rate: what the step reads of it."""

    model: nn.Module
    optimizers: list[optim.Optimizer]
    step: Callable
    remake: Callable[[], Callable]
    rate: Rate
    kept: dict[str, Any]


class Rate:
    """An object of the user with a number that the step reads."""

    def __init__(self) -> None:
        self.options = {"factor": 1.0, "names": ["a"]}


@dataclass(frozen=True)
class Session:
    """training: the model, the mesh and what is said. makers: of the optimisers, by name. calls: of each its batch, its
    words, whether it updates, and the events before it."""

    training: Training
    makers: tuple[str, ...]
    style: str
    calls: tuple[tuple[int, int, bool, tuple[tuple[str, int], ...]], ...]

    @classmethod
    def of(cls, seed: int) -> Session:
        draw = random.Random(seed)
        training = Training.of(draw.randrange(10**9))
        mesh = draw.choice(MESHES)
        said = {k: v for k, v in training.said.items() if k != "mixed_precision"}
        fits = len(mesh) >= len(training.mesh)
        if not fits:
            mesh = training.mesh
        if draw.random() < 0.25:
            said["memory_budget"] = draw.choice((10_000, 30_000, 100_000, 10**9))
        training = Training(**{**vars(training), "mesh": mesh, "said": said, "kept": torch.float64})
        makers = tuple(draw.choices(list(MAKERS), k=draw.choice((1, 1, 2, 3))))
        sizes = draw.choices((training.batch, 1, 2, 5, 7), (4, 1, 1, 1, 1), k=6)
        times = draw.choices((training.time, 2, 5), (6, 1, 1), k=6)
        quiet = draw.random() < 0.2
        calls = tuple(
            (size, time, draw.random() < 0.75, () if i < 1 or quiet else _events(draw))
            for i, (size, time) in enumerate(zip(sizes, times, strict=True))
        )
        return cls(training, makers, draw.choice(list(STYLES)), calls)


def _events(draw: random.Random) -> tuple[tuple[str, int], ...]:
    return tuple((draw.choice(list(EVENTS)), draw.randrange(10**6)) for _ in range(draw.choice((0, 0, 1, 1, 2))))


# ---- optimisers -----------------------------------------------------------------------------------

MAKERS: dict[str, Callable] = {
    "sgd": lambda p: optim.SGD(p, 0.05),
    "momentum": lambda p: optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: optim.AdamW(p, 1e-2, eps=1e-3, weight_decay=0.1),
    "loop": lambda p: optim.AdamW(p, 1e-2, eps=1e-3, foreach=False, amsgrad=True),
    "fused": lambda p: optim.Adam(p, 1e-2, eps=1e-3, fused=True),
    "tensor": lambda p: optim.AdamW(p, torch.tensor(1e-2), eps=1e-3, foreach=False),
    "adagrad": lambda p: optim.Adagrad(p, 1e-2, eps=1e-3),
    "rmsprop": lambda p: optim.RMSprop(p, 1e-2, eps=1e-3, momentum=0.5, centered=False),
    "nadam": lambda p: optim.NAdam(p, 1e-2, eps=1e-3),
    "radam": lambda p: optim.RAdam(p, 1e-2, eps=1e-3),
    "adamax": lambda p: optim.Adamax(p, 1e-2, eps=1e-3),
    "adadelta": lambda p: optim.Adadelta(p, 0.5, eps=1e-3),
}


# ---- steps ----------------------------------------------------------------------------------------


def _loss(model, x, y, rate):
    out = model(x)
    return F.cross_entropy(out.flatten(0, 1), y.flatten()) * rate.options["factor"], out


def plain(model, optimizers, x, y, rate, update):
    loss, out = _loss(model, x, y, rate)
    loss.backward()
    if update:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return loss.detach(), out.argmax(-1)


def zeros(model, optimizers, x, y, rate, update):
    """Gradients are set to zero, and kept."""
    if update:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
    loss, out = _loss(model, x, y, rate)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    if update:
        for optimizer in optimizers:
            optimizer.step()
    return {"loss": loss, "norm": norm, "hits": (out.argmax(-1) == y).sum(), "given": x}


def first_clears(model, optimizers, x, y, rate, update):
    model.zero_grad()
    loss, out = _loss(model, x, y, rate)
    (loss / 2).backward(retain_graph=True)
    (loss / 2).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    for optimizer in optimizers[: 1 + update]:
        optimizer.step()
    first = next(model.parameters())
    return loss.detach(), out.detach()[0], first.detach().flatten()[0], (out > 0).any()


def guarded(model, optimizers, x, y, rate, update):
    """No step where the loss is no number."""
    loss, out = _loss(model, x, y, rate)
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            torch.nan_to_num_(p.grad)
    if update:
        for optimizer in optimizers:
            optimizer.step()
        for p in model.parameters():
            p.grad = None
    return loss.detach(), out.detach().max(-1).values.topk(min(2, out.shape[1]), 1).values


STYLES = {f.__name__: f for f in (plain, zeros, first_clears, guarded)}


# ---- events ---------------------------------------------------------------------------------------


def whole(x: torch.Tensor) -> torch.Tensor:
    """The global value, where all ranks have the same."""
    x = x.detach().full_tensor() if isinstance(x, spmd.DTensor) else x.detach().clone()
    return x.reconcile() if isinstance(x, LocalTensor) else x


def _parameters(live: Live) -> list[nn.Parameter]:
    return list(live.model.parameters())


def freezes(live, draw):
    draw.choice(_parameters(live)).requires_grad_(False)


def trains(live, draw):
    for p in _parameters(live):
        p.requires_grad_(True)


def switches(live, draw):
    live.model.train(not live.model.training)


def changes_rate(live, draw):
    for group in draw.choice(live.optimizers).param_groups:
        group["lr"] = group["lr"] * 0.5


def rate_as_tensor(live, draw):
    optimizer = draw.choice(live.optimizers)
    if type(optimizer) is optim.SGD or (type(optimizer) is optim.AdamW and not optimizer.defaults["foreach"]):
        for group in optimizer.param_groups:
            group["lr"] = torch.as_tensor(float(group["lr"])) if optimizer.defaults["foreach"] is False else group["lr"]


def decays(live, draw):
    for group in draw.choice(live.optimizers).param_groups:
        if "weight_decay" in group:
            group["weight_decay"] = draw.choice((0, 0.0, 0.1, 0.2))


def other_momentum(live, draw):
    for group in draw.choice(live.optimizers).param_groups:
        if "betas" in group:
            group["betas"] = (0.8, 0.95)
        if "momentum" in group:
            group["momentum"] = 0.7


def replaces_layer(live, draw):
    i = draw.randrange(len(live.model.layers))
    old = live.model.layers[i]
    n = live.model.words.weight.shape[1]
    new = seeded(lambda: Layer(draw.choice(("linear", "norm", "scale", "gate")), n, 3, None)).double()
    live.model.layers[i] = new
    if draw.random() < 0.6:
        live.optimizers[-1].add_param_group({"params": list(new.parameters())})
    live.kept[f"old {len(live.kept)}"] = old


def loads_own(live, draw):
    live.model.load_state_dict(
        {k: whole(v) * 0.5 if v.is_floating_point() else whole(v) for k, v in live.model.state_dict().items()}
    )


def loads_optimizer(live, draw):
    optimizer = draw.choice(live.optimizers)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def clears_state(live, draw):
    draw.choice(live.optimizers).state.clear()


def scales_data(live, draw):
    p = draw.choice(_parameters(live))
    p.data.mul_(0.5)


def scales_in_place(live, draw):
    with torch.no_grad():
        draw.choice(_parameters(live)).mul_(0.75)


def fills_part(live, draw):
    p = draw.choice([p for p in _parameters(live) if p.ndim])
    with torch.no_grad():
        p[:1].fill_(0.125)


def new_weight(live, draw):
    """Another parameter in the place of one, which no optimiser knows."""
    layer = live.model.head
    layer.weight = nn.Parameter(whole(layer.weight) * 0.9)


def no_gradients(live, draw):
    live.model.zero_grad()


def one_gradient_less(live, draw):
    draw.choice(_parameters(live)).grad = None


def halves_gradients(live, draw):
    for p in _parameters(live):
        if p.grad is not None:
            p.grad.mul_(0.5)


def hooks(live, draw):
    handle = live.model.head.register_forward_hook(_twice)
    live.kept.setdefault("handles", []).append(handle)


def unhooks(live, draw):
    if live.kept.get("handles"):
        live.kept["handles"].pop().remove()


def hooks_gradient(live, draw):
    p = draw.choice(_parameters(live))
    if p.requires_grad:
        live.kept.setdefault("handles", []).append(p.register_hook(_half))


def _twice(module, args, out):
    return out * 2


def _half(gradient):
    return gradient * 0.5


def changes_factor(live, draw):
    live.rate.options["factor"] = draw.choice((0.5, 2.0, 1.0, 3))


def changes_object(live, draw):
    live.rate.options = dict(reversed(live.rate.options.items()))


def new_buffer(live, draw):
    for m in live.model.layers:
        if hasattr(m, "mean"):
            m.register_buffer("mean", torch.full_like(whole(m.mean), 0.5))


def copies(live, draw):
    """Another model, optimiser and all."""
    live.model, live.optimizers = copy.deepcopy((live.model, live.optimizers))


def remakes(live, draw):
    """The step saved and loaded, or compiled anew."""
    live.step = live.remake()


def keeps_views(live, draw):
    """A view of a parameter, which stays one."""
    live.kept["view"] = draw.choice(_parameters(live)).detach().flatten()[:2]


EVENTS = {
    f.__name__: f
    for f in (
        freezes, trains, switches, changes_rate, rate_as_tensor, decays, other_momentum, replaces_layer, loads_own,
        loads_optimizer, clears_state, scales_data, scales_in_place, fills_part, new_weight, no_gradients,
        one_gradient_less, halves_gradients, hooks, unhooks, hooks_gradient, changes_factor, changes_object, new_buffer,
        copies, remakes, keeps_views,
    )
}  # fmt: skip


# ---- run ------------------------------------------------------------------------------------------


def _begin(session: Session) -> tuple[nn.Module, list[optim.Optimizer]]:
    model = seeded(lambda: Net(session.training)).double()
    given = [p for p in model.parameters() if p.requires_grad]
    n = len(session.makers)
    parts = [given[i::n] for i in range(n)]
    return model, [MAKERS[name](part) for name, part in zip(session.makers, parts, strict=True) if part]


def run(session: Session, make: Callable[[], Callable], again: Callable[[Callable], Callable]) -> Iterator[dict]:
    """What is seen after each call, by name; or the error of the call, as text, with which the session ends."""
    model, optimizers = _begin(session)
    live = Live(model, optimizers, make(), lambda: again(live.step), Rate(), {})
    g = torch.Generator().manual_seed(1)
    for size, time, update, events in session.calls:
        for name, seed in events:
            EVENTS[name](live, random.Random(seed))
        x, y = (torch.randint(0, session.training.words, (size, time), generator=g) for _ in range(2))
        result = live.step(live.model, live.optimizers, x, y, live.rate, update)
        yield _seen(result, live)


def _seen(result: Any, live: Live) -> dict[str, Any]:
    found = {f"result{pytree.keystr(path)}": x for path, x in pytree.tree_flatten_with_path(result)[0]}
    found |= {name: p for name, p in (*live.model.named_parameters(), *live.model.named_buffers())}
    for name, p in live.model.named_parameters():
        found[f"{name}.grad"] = p.grad
        found[f"{name}.requires_grad"] = p.requires_grad
        for i, optimizer in enumerate(live.optimizers):
            found |= {f"{i}.{key}[{name}]": x for key, x in optimizer.state.get(p, {}).items()}
    for i, optimizer in enumerate(live.optimizers):
        for j, group in enumerate(optimizer.param_groups):
            found |= {f"{i}.{j}.{key}": x for key, x in group.items() if key != "params"}
        found[f"{i}.count"] = sum(map(bool, optimizer.state.values()))
    return {name: whole(x) if isinstance(x, torch.Tensor) else x for name, x in found.items()}


def _compiled(session: Session) -> spmd.CompiledStep:
    training = session.training
    mesh = spmd.init_device_mesh("cpu", training.mesh, mesh_dim_names=AXES[: len(training.mesh)])
    if training.near:
        mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, machine=NEAR))
    return spmd.compile(STYLES[session.style], mesh, **training.said)


def _again(step: spmd.CompiledStep) -> Callable:
    """The step, loaded where it can be kept and is not stale, else as it is."""
    with tempfile.NamedTemporaryFile(suffix=".spmd") as file:
        try:
            step.save(file.name)
        except ValueError:
            return step
        loaded = spmd.load_step(file.name, step.fn, step.mesh)

    def call(*args):
        try:
            return loaded(*args)
        except spmd.StaleStep:
            return step(*args)

    call.fn, call.mesh, call.save = step.fn, step.mesh, step.save
    return call


REFUSED = "matches nothing", "cannot run in"
"""Of errors that are right: a pattern names a layer that was replaced, and a budget is too small."""


def differences(session: Session) -> list[str]:
    """What differs from one device in the first call in which something does: 1e-9 in float64.

    One device is asked outside of the simulation, in which a tensor drawn beside plain parameters is one of each rank.
    """
    want = list(run(session, lambda: STYLES[session.style], lambda step: step))
    with LocalTensorMode(prod(session.training.mesh)):
        got = run(session, lambda: _compiled(session), _again)
        for i in range(len(session.calls)):
            try:
                ours = next(got)
            except ValueError as error:
                if any(text in str(error) for text in REFUSED):
                    return []
                raise
            found = list(_unlike(want[i], ours))
            if found:
                return [f"call {i}: {text}" for text in found]
    return []


def _unlike(want: dict, got: dict) -> Iterator[str]:
    if set(want) != set(got):
        yield f"one device has {sorted(set(want) - set(got))} alone, the mesh {sorted(set(got) - set(want))}"
    for name in want.keys() & got.keys():
        a, b = want[name], got[name]
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if type(a) is not type(b) or a != b:
                yield f"{name}: {b!r} for {a!r}"
        elif a.dtype != b.dtype or a.shape != b.shape:
            yield f"{name}: {b.dtype} {tuple(b.shape)} for {a.dtype} {tuple(a.shape)}"
        elif not torch.allclose(a.double(), b.double(), rtol=1e-8, atol=1e-9, equal_nan=True):
            yield f"{name}: {float((a.double() - b.double()).abs().max()):.1e} apart"
