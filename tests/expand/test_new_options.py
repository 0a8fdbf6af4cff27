"""What the first step of an optimiser puts into its parameter groups, as those that find their own learning rate do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import LocalTensor, LocalTensorMode, Shard, init_device_mesh
from tests.expand.side_by_side import same, seeded

Group = dict[str, Any]


class Stepping(torch.optim.Optimizer):
    """An optimiser that says what it does with a group."""

    options: dict[str, Any] = {}

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, **self.options})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            self.update(group)

    def update(self, group: Group) -> None:
        raise NotImplementedError

    def move(self, group: Group, rate: Any) -> None:
        for p in group["params"]:
            p.sub_(p.grad * group["lr"] * rate)


class Tensor(Stepping):
    def update(self, group):
        if "d" not in group:
            group["d"] = torch.tensor(0.5)
        self.move(group, group["d"])
        group["d"] = group["d"] * 1.5


class WrittenTensor(Stepping):
    def update(self, group):
        if "d" not in group:
            group["d"] = torch.full((3,), 0.5, dtype=torch.float64)
        self.move(group, group["d"].sum())
        group["d"].mul_(1.5)


class TensorForNone(Stepping):
    options = {"d": None}

    def update(self, group):
        if group["d"] is None:
            group["d"] = torch.tensor(0.5)
        self.move(group, group["d"])
        group["d"] = group["d"] * 1.5


class CountInATensor(Stepping):
    def update(self, group):
        if "step" not in group:
            group["step"] = torch.tensor(0)
        group["step"] += 1
        self.move(group, 1 / group["step"].item())


class Count(Stepping):
    def update(self, group):
        group.setdefault("k", 0)
        self.move(group, 1 / (group["k"] + 1))
        group["k"] = group["k"] + 1


class Float(Stepping):
    def update(self, group):
        group["weight_sum"] = group.get("weight_sum", 0.0) + group["lr"] ** 2
        self.move(group, group["weight_sum"])


class Flag(Stepping):
    def update(self, group):
        if not group.get("ready", False):
            group["ready"], group["name"], group["d"] = True, "ready", torch.zeros(3)
        group["d"] += 1
        self.move(group, group["d"].mean())


class List(Stepping):
    def update(self, group):
        if "means" not in group:
            group["means"] = [torch.zeros_like(p) for p in group["params"]]
        for p, mean in zip(group["params"], group["means"], strict=True):
            mean.mul_(0.9).add_(p.grad)
            p.sub_(mean * group["lr"])


class Nested(Stepping):
    def update(self, group):
        if "s" not in group:
            group["s"] = {"h": [torch.zeros(()), (torch.ones(2), 3)], "n": 0, "rate": group["lr"] * 2}
        group["s"]["h"][0] = group["s"]["h"][0] + 1
        group["s"]["n"] = group["s"]["n"] + 2
        self.move(group, group["s"]["rate"] / (group["s"]["h"][0] + group["s"]["n"]) * group["s"]["h"][1][0].sum())


class OneTensorTwice(Stepping):
    def update(self, group):
        if "d" not in group:
            group["d"] = group["e"] = torch.tensor(1.0)
        self.move(group, group["e"])
        group["d"].add_(0.5)


class AtTheThirdStep(Stepping):
    def update(self, group):
        kept = self.state[group["params"][0]]
        kept["n"] = kept.get("n", 0) + 1
        if kept["n"] == 3:
            group["d"] = torch.tensor(3.0)
        self.move(group, group.get("d", 1.0))


class Prodigy(Stepping):
    """Its estimate of the rate, in tensors."""

    options = {"d0": 1e-2}

    def update(self, group):
        if "d" not in group:
            group["d"], group["numerator"], group["k"] = torch.tensor(group["d0"]), torch.zeros(()), 0
        numerator, denominator = group["numerator"] * 0.9, torch.zeros(())
        for p in group["params"]:
            kept = self.state[p]
            if not kept:
                kept["s"], kept["p0"] = torch.zeros_like(p), p.detach().clone()
            numerator = numerator + group["d"] * ((kept["p0"] - p) * p.grad).sum()
            kept["s"].mul_(0.9).add_(p.grad * group["d"])
            denominator = denominator + kept["s"].abs().sum()
        group["d"], group["numerator"] = torch.maximum(group["d"], numerator / denominator), numerator
        group["k"] += 1
        self.move(group, group["d"])


class ScheduleFree(Stepping):
    """As the package of this name: counts and floats of a group, some of which its first step adds."""

    options = {"r": 0.0, "k": 0, "warmup_steps": 3, "weight_sum": 0.0, "lr_max": -1.0}

    def update(self, group):
        k = group["k"]
        warm = (k + 1) / group["warmup_steps"] if k < group["warmup_steps"] else 1.0
        group["scheduled_lr"] = lr = group["lr"] * warm
        lr_max = group["lr_max"] = max(lr, group["lr_max"])
        weight = ((k + 1) ** group["r"]) * lr_max**2
        group["weight_sum"] = group["weight_sum"] + weight
        for p in group["params"]:
            kept = self.state[p]
            if "z" not in kept:
                kept["z"] = torch.clone(p)
            p.lerp_(end=kept["z"], weight=weight / group["weight_sum"])
            kept["z"].sub_(p.grad, alpha=lr)
        group["k"] = k + 1


def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x[:, :2])
    loss.backward()
    optimizer.step()
    return loss


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)]


def global_values(x: Any) -> Any:
    """A nest with global tensors in the place of DTensors, and each tuple as a list."""
    if isinstance(x, dict):
        return {key: global_values(part) for key, part in x.items()}
    if isinstance(x, (list, tuple)):
        return [global_values(part) for part in x]
    if isinstance(x, spmd.DTensor):
        x = x.full_tensor()
        x = x.reconcile() if isinstance(x, LocalTensor) else x
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def trained(step, kind: type[Stepping], groups: int) -> list:
    """Of each call, the loss and the state of the optimiser."""
    model = seeded(net)
    layers = [list(model[0].parameters()), list(model[2].parameters())]
    optimizer = kind(model.parameters() if groups == 1 else [{"params": each} for each in layers])
    found = []
    for x in BATCHES:
        loss = step(model, optimizer, x)
        found.append([*map(global_values, (loss, optimizer.state_dict(), optimizer.param_groups))])
        found[-1].append(str([{key: type(v).__name__ for key, v in g.items()} for g in found[-1][2]]))
    return found


def on_ranks(kind: type[Stepping], groups: int = 1, **how: Any) -> list:
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        return trained(spmd.compile(train, mesh, inputs={"x": {"dp": Shard(0)}}, **how), kind, groups)


KINDS = [
    Tensor, WrittenTensor, TensorForNone, CountInATensor, Count, Float, Flag, List, Nested, OneTensorTwice,
    AtTheThirdStep, Prodigy, ScheduleFree,
]  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"fully_shard": "dp"}], ids=["replicated", "sharded"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_adds_to_groups_is_there(kind: type[Stepping], how: dict) -> None:
    same(on_ranks(kind, **how), trained(train, kind, 1), kind.__name__)


@pytest.mark.parametrize("kind", [Tensor, Nested, ScheduleFree])
def test_each_group_has_its_own(kind: type[Stepping]) -> None:
    same(on_ranks(kind, groups=2), trained(train, kind, 2), kind.__name__)


@pytest.mark.parametrize("kind", [WrittenTensor, Count, Nested, ScheduleFree])
def test_kept_programs_add_it_too(kind: type[Stepping], tmp_path: Path) -> None:
    wanted = trained(train, kind, 1)
    for _ in range(2):
        same(on_ranks(kind, cache=tmp_path), wanted, kind.__name__)


def test_another_model_gets_options_of_its_own() -> None:
    """The program of the first step serves it, too."""
    with LocalTensorMode(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        step = spmd.compile(train, mesh, inputs={"x": {"dp": Shard(0)}})
        for _ in range(2):
            same(trained(step, Nested, 1), trained(train, Nested, 1), "nested")
        assert len(step.programs) == 2


# ---- what is refused --------------------------------------------------------------------------


class Parameter(Stepping):
    def update(self, group):
        group["first"] = group["params"][0]
        self.move(group, 1)


class ViewOfParameter(Stepping):
    def update(self, group):
        group["first"] = group["params"][0].detach()[:2]
        self.move(group, 1)


class Gradient(Stepping):
    def update(self, group):
        group["last"] = group["params"][0].grad
        self.move(group, 1)


class ViewOfAnOption(Stepping):
    def update(self, group):
        if "d" not in group:
            group["d"] = torch.ones(4)
            group["first"] = group["d"][:2]
        group["first"] += 1
        self.move(group, group["d"].sum())


class StateThatIsTheParameter(Stepping):
    def update(self, group):
        for p in group["params"]:
            self.state[p].setdefault("p0", p.detach())
        self.move(group, 1)


class StateThatIsOther(Stepping):
    def update(self, group):
        for p in group["params"]:
            if not self.state[p]:
                self.state[p]["a"] = self.state[p]["b"] = torch.zeros_like(p)
            self.state[p]["a"] += 1
        self.move(group, 1)


class Function(Stepping):
    def update(self, group):
        group["f"] = abs
        self.move(group, 1)


class StateOfAll(Stepping):
    def update(self, group):
        kept = self.state["all"]
        kept["d"] = kept.get("d", torch.ones(())) + 1
        self.move(group, kept["d"])


REFUSED = {
    Parameter: r"share memory with .*0.weight", ViewOfParameter: r"share memory with .*0.weight",
    Gradient: r"share memory with .*0.weight.grad", ViewOfAnOption: "first share memory with .*d, and",
    StateThatIsTheParameter: r"p0\[.*0.weight\] share memory with .*0.weight", StateThatIsOther: "share memory",
    Function: "puts a builtin_function_or_method into optimizer.param_groups.0.f",
    StateOfAll: r"optimizer.state\['all'\], which is no parameter",
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_program_would_part_is_refused(kind: type[Stepping]) -> None:
    with pytest.raises(RuntimeError, match=REFUSED[kind]):
        on_ranks(kind)
