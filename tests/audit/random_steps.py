"""Random steps that keep a value somewhere in Python from call to call, each beside one device.

    print(Drawn.of(7))              the step, as Python
    outcome(Drawn.of(7))            "right", "refused", or "wrong" with the first difference

A step draws a place, a kind of value, the way to the holder of it, who sets it, when, and whether the loss reads it
before or after that (`places.py`). It is run on one device and, compiled, on four simulated ranks. After each call all
that either has is compared (`compare.py`): the value itself, what the step returned, the model, the optimiser.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import sys
import sysconfig
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import spmd
from spmd import LocalTensorMode, Shard
from tests.audit import installed
from tests.audit.described import Left, described, difference, own_of
from tests.audit.places import DECLARED, KINDS, ORDER, PLACES, ROUTED_BY, ROUTES, WHEN, WHO

SIZES = (8, 8, 8, 8, 8, 8)
OF_SIZES = (8, 8, 8, 4, 8, 4)
"""The rows of each call's batch, and those for steps that read how many there are."""

TOP = """\
import argparse, array, collections, contextvars, ctypes, dataclasses, enum, functools, io, itertools, multiprocessing
import numpy, os, queue, random, threading, torch, types, weakref
import audit_installed

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x):
        return self.a(x)

class Slots:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k

class Plain:
    def __init__(self, k):
        self.k = k

m = Net()
with torch.no_grad():
    for p in m.parameters():
        p.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(p.shape))
    del p
opt = torch.optim.SGD(m.parameters(), lr=0.05)
"""


@dataclass(frozen=True)
class Drawn:
    """A step. sharded: whether its parameters are kept in shards."""

    place: str
    kind: str
    route: str = "global"
    who: str = "step"
    when: str = "every"
    order: str = "use, set"
    sharded: bool = False

    @classmethod
    def of(cls, seed: int) -> Drawn:
        draw = random.Random(seed)
        place = draw.choice(list(PLACES))
        route = draw.choice(list(ROUTES)) if PLACES[place].routed else "global"
        kind, who = draw.choice(PLACES[place].fits), draw.choice(WHO)
        when = "every" if who == "hook" else draw.choice(list(WHEN))
        return cls(place, kind, route, who, when, draw.choice(ORDER), draw.random() < 0.5)

    def __str__(self) -> str:
        """The step as the text of a Python module."""
        given = "ARGUMENTS = (S,)" if self.route == "argument" else ""
        parts = [TOP, _filled(self._place.setup, init=self._kind.init), ROUTED_BY.get(self.route, ""), given]
        return "\n".join([*filter(None, parts), *self._functions()]) + "\n"

    @property
    def title(self) -> str:
        """What is unlike the simplest step of all."""
        plain = {"route": "global", "who": "step", "when": "every", "order": "use, set"}
        more = [f"{name} {x}" for name, x in vars(self).items() if name in plain and x != plain[name]]
        return ", ".join([f"{self.place}, {self.kind}", *more])

    def on_shards(self, sharded: bool) -> Drawn:
        return replace(self, sharded=sharded)

    @property
    def _place(self):
        return PLACES[self.place]

    @property
    def _kind(self):
        return KINDS[self.kind]

    def _functions(self) -> list[str]:
        if self.place == "closure":
            inner = [f"n = {self._kind.init}", *self._helper(), *self._step("n")]
            names = "advance, step" if self.who != "step" else "None, step"
            return ["def make():", *_in(inner), *_in([f"return {names}"]), "advance, step = make()", *self._extra()]
        if self.route == "closure":
            head, inner = ["def make(s):"], self._step(ROUTES[self.route])
            made = [*head, *_in(inner), "    return step", "step = make(S)"]
        elif self.route == "bound":
            inner = self._step(ROUTES[self.route])
            head = ["class Runner:", "    def __init__(self, s):", "        self.s = s"]
            made = [*head, *_in(inner), "step = Runner(S).step"]
        else:
            made = self._step(ROUTES[self.route])
        return [*self._helper(), *self._extra(), *made]

    @property
    def _handed(self) -> bool:
        """Whether the helper is given the holder."""
        return self._place.routed and self.route in ("argument", "default", "closure", "bound")

    def _helper(self) -> list[str]:
        if self.who == "step":
            return []
        s = "s" if self._handed else ROUTES[self.route]
        more = ", s" if self._handed else ""
        return [f"def advance(m, opt, x, i, loss{more}):", *_in([*self._declared(), *self._update(s)])]

    def _extra(self) -> list[str]:
        if self.who == "callback":
            return ["CALLBACKS = [advance]"]
        more = ", S" if self._handed else ""
        if self.who == "hook":
            call = f"advance(m, opt, args[0], 0, out.square().mean(){more})"
            return ["def hook(module, args, out):", f"    {call}", "m.a.register_forward_hook(hook)"]
        if self.who == "caller":
            loss = "torch.tensor(3.0 / (1 + i), dtype=x.dtype)"
            return ["def between(x, i):", f"    advance(m, opt, x, i, {loss}{more})"]
        return []

    def _declared(self) -> list[str]:
        return [DECLARED[self.place]] if self.place in DECLARED else []

    def _update(self, s: str) -> list[str]:
        get, kind = _filled(self._place.get, s=s, init=self._kind.init), self._kind
        if kind.new:
            lines = [f"v = {get}", _filled(self._place.put, s=s, v=kind.new)]
        else:
            lines = [_filled(kind.do, n=get)]
        lines = [line for each in lines for line in each.split("; ")]
        return [WHEN[self.when], *_in(lines)] if WHEN[self.when] else lines

    def _step(self, s: str) -> list[str]:
        given = {"argument": ", s", "default": ", s=S"}.get(self.route, "") if self._place.routed else ""
        first = "self, " if self.route == "bound" else ""
        get = _filled(self._place.get, s=s, init=self._kind.init)
        use = [f"v = {get}", f"loss = loss * {self._kind.use}"]
        more = f", {s}" if self._handed else ""
        call = f"(m, opt, x, i, loss{more})"
        sets = {
            "step": self._update(s),
            "helper": [f"advance{call}"],
            "callback": ["for each in CALLBACKS:", f"    each{call}"],
        }.get(self.who, [])
        body = [line for part in self.order.split(", ") for line in (use if part == "use" else sets)]
        declared = self._declared() if self.who == "step" else []
        body = [*declared, "opt.zero_grad()", "loss = m(x).square().mean()", *body, "loss.backward()", "opt.step()"]
        return [f"def step({first}m, opt, x, i{given}):", *_in([*body, "return loss.detach()"])]

    def smaller(self) -> Iterator[Drawn]:
        """Simpler steps, the simplest first."""
        plain = {"route": "global", "who": "step", "when": "every", "order": "use, set", "sharded": False}
        differ = [name for name, x in plain.items() if getattr(self, name) != x]
        for n in range(len(differ), 0, -1):
            for names in itertools.combinations(differ, n):
                yield replace(self, **{name: plain[name] for name in names})


def _filled(text: str, **values: str) -> str:
    return text.format(**values)


def _in(lines: list[str]) -> list[str]:
    return [f"    {line}" for each in lines for line in each.split("\n")]


# ---- worlds ---------------------------------------------------------------------------------------


@dataclass
class World:
    """A module of a step that was loaded, and its own variable of the process's environment."""

    module: types.ModuleType
    variable: str | None

    @classmethod
    def of(cls, file: Path) -> World:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module
        spec.loader.exec_module(module)
        return cls(module, os.environ.pop("AUDIT_N", None))

    @contextmanager
    def entered(self) -> Iterator[None]:
        if self.variable is not None:
            os.environ["AUDIT_N"] = self.variable
        sys.modules[self.module.__name__] = self.module
        try:
            yield
        finally:
            self.variable = os.environ.pop("AUDIT_N", None)

    def call(self, step: Callable, x: torch.Tensor, i: int) -> Any:
        return step(self.module.m, self.module.opt, x, i, *getattr(self.module, "ARGUMENTS", ()))

    def between(self, x: torch.Tensor, i: int) -> None:
        """What the caller does before a call."""
        for group in self.module.opt.param_groups:
            group["lr"] = group["lr"] * 0.8
        if hasattr(self.module, "between"):
            self.module.between(x, i)

    def seen(self) -> dict[str, Any]:
        """All that the step has."""
        return {**own_of(self.module), "os.environ['AUDIT_N']": self.variable}


@dataclass(frozen=True)
class Outcome:
    """word: "right", "refused", "crashed" (an error that spmd did not raise), or "wrong". text: why."""

    word: str
    text: str = ""


def outcome(drawn: Drawn) -> Outcome:
    return outcome_of(str(drawn), drawn.sharded)


def outcome_of(text: str, sharded: bool = False) -> Outcome:
    """What comes of the step of a module, which has `m`, `opt` and `step`, and may have `between` and `ARGUMENTS`."""
    install()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "audit_step.py"
        file.write_text(text)
        try:
            return _outcome(file, sharded)
        finally:
            sys.modules.pop(file.stem, None)
            os.environ.pop("AUDIT_N", None)


def _outcome(file: Path, sharded: bool) -> Outcome:
    one, other, mode = World.of(file), World.of(file), LocalTensorMode(4)
    with mode:
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        said = {"fully_shard": "dp"} if sharded else {}
        compiled = spmd.compile(other.module.step, mesh, inputs={"x": {"dp": Shard(0)}}, **said)
    for i, size in enumerate(OF_SIZES if "x.shape" in file.read_text() else SIZES):
        x = torch.linspace(-1.0, 2.0 + i, size * 2, dtype=torch.float64).reshape(size, 2)
        for world in (one, other):
            with world.entered():
                world.between(x, i)
        try:
            with other.entered(), mode:
                got = other.call(compiled, x.clone(), i)
        except Exception as error:
            return _after_error(error, i, one, other, mode)
        with one.entered():
            want = one.call(one.module.step, x.clone(), i)
        if found := _differs({"returned": want, **one.seen()}, {"returned": got, **other.seen()}, mode):
            return Outcome("wrong", f"after call {i}: {found}")
    return Outcome("right")


def _differs(want: dict, got: dict, mode: LocalTensorMode) -> str:
    with mode:
        try:
            return difference(described(want), described(got))
        except Left as found:
            return str(found)


def _after_error(error: Exception, i: int, one: World, other: World, mode: LocalTensorMode) -> Outcome:
    """A refusal leaves all as it was."""
    if found := _differs(one.seen(), other.seen(), mode):
        return Outcome("wrong", f"call {i} was refused and left: {found}")
    text = f"call {i}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Outcome("refused" if is_refusal(error) else "crashed", text)


def is_refusal(error: Exception) -> bool:
    """Whether spmd raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return last.startswith(str(Path(spmd.__file__).parent))


def install() -> None:
    """Load `installed.py` as a package that lies where installed ones do."""
    if "audit_installed" not in sys.modules:
        file = f"{sysconfig.get_paths()['purelib']}/audit_installed/__init__.py"
        module = types.ModuleType("audit_installed")
        module.__file__ = file
        sys.modules["audit_installed"] = module
        exec(compile(Path(installed.__file__).read_text(), file, "exec"), module.__dict__)


def smallest(drawn: Drawn) -> Drawn:
    """The simplest step that fails alike."""
    return next((each for each in drawn.smaller() if outcome(each).word == "wrong"), drawn)
