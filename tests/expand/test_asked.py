"""What a step asks of the process: it may be shown, and no program depends on it in silence."""

from __future__ import annotations

import builtins
import contextlib
import datetime
import io
import logging
import math
import os
import random
import subprocess
import time
import uuid
import warnings
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch
from torch import nn

import spmd

LINE = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
X = torch.ones(2, 3)
GENERATOR, NUMPY = random.Random(0), np.random.default_rng(0)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def test_a_clock_may_be_shown():
    """By each way to write a number; the program is as without, and the process has its functions back."""

    def step(model, x, show=print):
        begin, at = time.time(), perf_counter()
        y = model(x).sum()
        show(f"{time.time() - begin:.3f} s, {1e3 * (perf_counter() - at)} ms")
        show("%.2f of %d" % (time.time() - begin, round(time.monotonic_ns() // 1000)))  # noqa: UP031
        show(f"{datetime.datetime.now():%H} {datetime.datetime.now() - datetime.datetime.now()} {os.getpid()}")
        show(f"{uuid.uuid4().hex} {datetime.datetime.fromtimestamp(0).year}")
        return y

    def plain(model, x):
        return model(x).sum()

    with contextlib.redirect_stdout(io.StringIO()) as shown:
        found, want = (spmd.compile(fn, LINE).program_for(net(), X) for fn in (step, plain))
    assert str(found).partition("(")[2] == str(want).partition("(")[2]
    lines = shown.getvalue().splitlines()
    assert len(lines) >= 4 and f" {os.getpid()}" in lines[2] and lines[3].endswith(" 1970")
    assert time.time is vars(time)["time"] and type(time.time()) is float and perf_counter is time.perf_counter
    assert isinstance(datetime.datetime.now(), datetime.datetime) and type(os.environ._data) is dict


# ---- what would be frozen ---------------------------------------------------------------------


def scales(model, x):
    return model(x) * time.time()


def scales_from_the_left(model, x):
    return perf_counter() * model(x)


def fills(model, x):
    return torch.full((2,), time.monotonic())


def makes_a_tensor(model, x):
    return torch.tensor([1.0, time.time()]) * x.sum()


def writes(model, x):
    y = x.clone()
    y[0] = time.time()
    return y


def makes_an_int(model, x):
    return x * (int(time.time()) % 7)


def takes_a_root(model, x):
    return x * math.sqrt(time.time())


def by_numpy(model, x):
    return x * np.sqrt(time.time())


def decides(model, x):
    return x if time.time() > 5 else x * 2


def seeds(model, x):
    torch.manual_seed(time.time_ns() % 2**32)
    return x * 2


def returns(model, x):
    return x * 2, time.time()


def by_the_hour(model, x):
    return x * datetime.datetime.now().hour


def by_the_process(model, x):
    return x * os.getpid()


def by_an_identity(model, x):
    return x * (uuid.uuid4().int % 7)


def keeps(model, x):
    model.last = time.time()
    return model(x)


def asks_the_user(model, x):
    return x * float(input())


def draws_from_a_generator(model, x):
    return x * GENERATOR.random()


def draws_from_a_generator_of_numpy(model, x):
    return x * NUMPY.normal()


def draws_further_down(model, x):
    y = model(x)
    return y * random.random()


def by_the_seed(model, x):
    return x * (torch.initial_seed() % 7)


def reads_a_file(model, x):
    return x * len(open(__file__).read())


def reads_a_file_if_it_can(model, x):
    try:
        return x * len(Path(__file__).read_text())
    except Exception:
        return x


def loads(model, x):
    return x * float(np.load(open(__file__, "rb")))


def lists_a_folder(model, x):
    return x * len(os.listdir("."))


def asks_for_a_size(model, x):
    return x * os.path.getsize(__file__)


def runs_a_program(model, x):
    return x * len(subprocess.check_output(["true"]))


FROZEN = [
    *[(step, "time.") for step in (
        scales, fills, makes_a_tensor, writes, makes_an_int, takes_a_root, by_numpy, decides, seeds, returns, keeps,
    )],
    (scales_from_the_left, "time.perf_counter"), (by_the_hour, "datetime.now"), (by_the_process, "os.getpid"),
    (by_an_identity, "uuid.uuid4"), (by_the_seed, "torch.initial_seed"), (reads_a_file, "opens '.*test_asked.py'"),
    (reads_a_file_if_it_can, "opens"), (loads, "opens"), (lists_a_folder, r"lists '\.'"),
    (asks_for_a_size, "os.stat of"),
    (runs_a_program, "runs 'true'"), (asks_the_user, r"input\(\)"), (draws_from_a_generator, "from GENERATOR"),
    (draws_from_a_generator_of_numpy, "from NUMPY"),
    (draws_further_down, "from random"),
]  # fmt: skip


@pytest.mark.parametrize("step, what", FROZEN, ids=lambda x: getattr(x, "__name__", ""))
def test_what_would_be_frozen_is_an_error(step, what):
    """It names the line; generators, module and process are as before."""
    model, states = net(), (GENERATOR.getstate(), NUMPY.bit_generator.state, random.getstate())
    with pytest.raises(RuntimeError, match=rf"(?s){what}.*test_asked.py:\d+, in {step.__name__}"):
        spmd.compile(step, LINE).program_for(model, X)
    assert (GENERATOR.getstate(), NUMPY.bit_generator.state, random.getstate()) == states
    assert not hasattr(model, "last") and type(time.time()) is float and builtins.input is input


def test_the_error_names_the_line_of_the_draw():
    first = draws_further_down.__code__.co_firstlineno
    with pytest.raises(RuntimeError, match=rf"test_asked.py:{first + 2}, in draws_further_down"):
        spmd.compile(draws_further_down, LINE).program_for(net(), X)


class Augmented(nn.Module):
    """Has a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x):
        return x * self.generator.normal()


def test_a_generator_of_a_module():
    with pytest.raises(RuntimeError, match=r"from Augmented.generator, which the program would freeze"):
        spmd.compile(lambda model, x: model(x), LINE).program_for(Augmented(), X)


def test_a_generator_that_the_step_seeds_gives_the_same_numbers_each_time():
    def step(x):
        return x * random.Random(3).random()

    spmd.compile(step, LINE).program_for(X)


# ---- the environment --------------------------------------------------------------------------


def by_the_environment(x):
    return x * float(os.environ.get("SPMD_TEST_SCALE", "2")) * len(os.getenv("SPMD_TEST_NAME", "abc"))


def test_the_environment_is_a_guard(monkeypatch, caplog, tmp_path):
    """Another value makes another capture, and a line says why; the old value finds the old one. So with kept steps."""
    monkeypatch.delenv("SPMD_TEST_SCALE", raising=False)
    mesh = spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    step = spmd.compile(by_the_environment, mesh)

    def value(step) -> float:
        return [step(X).full_tensor()[0, 0].item() for _ in range(3)][-1]

    assert value(step) == 6 and len(step.programs) == 1
    monkeypatch.setenv("SPMD_TEST_SCALE", "5")
    with caplog.at_level(logging.WARNING, "spmd"):
        assert value(step) == 15 and len(step.programs) == 2
    assert "os.environ['SPMD_TEST_SCALE'] was None and is '5', read at " in caplog.text
    monkeypatch.delenv("SPMD_TEST_SCALE")
    assert value(step) == 6 and len(step.programs) == 2
    step.save(tmp_path / "step")
    monkeypatch.setenv("SPMD_TEST_SCALE", "5")
    assert value(spmd.load_step(tmp_path / "step", by_the_environment, mesh)) == 15
    monkeypatch.setenv("SPMD_TEST_SCALE", "7")
    with pytest.raises(spmd.StaleStep, match=r"os.environ\['SPMD_TEST_SCALE'\] was .* and is '7'"):
        value(spmd.load_step(tmp_path / "step", by_the_environment, mesh))


def test_what_an_import_asks_is_not_asked_by_the_step(tmp_path, monkeypatch, caplog):
    """Some packages import their parts when these are first named, and look at clocks and the environment then."""
    text = "import os, time\nBEGIN = time.time()\nif os.getpid() < 0 or os.environ.get('FIRST'):\n    raise OSError\n"
    (tmp_path / "named_first_in_a_step.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def step(model, x):
        import named_first_in_a_step

        return model(x).sum() if named_first_in_a_step.BEGIN else x

    compiled = spmd.compile(step, LINE)
    program = compiled.program_for(net(), X)
    assert [str(n.target) for n in program.graph.nodes if n.op == "call_function"][-1].startswith("aten.sum")
    monkeypatch.setenv("FIRST", "1")
    compiled.program_for(net(), X)
    assert "captured anew" not in caplog.text


def test_what_is_read_of_code_is_not_the_steps():
    """The line of a warning, a module that is imported, a file that is written."""

    def step(x):
        import tabnanny  # noqa: F401, which nothing else imports

        warnings.warn("the line of this one is read", stacklevel=1)
        open(os.devnull, "w").close()
        return x * 2

    with pytest.warns(UserWarning, match="is read"):
        spmd.compile(step, LINE).program_for(X)


def test_what_is_asked_is_asked_again(alone, tmp_path, monkeypatch):
    """A path that is there, and the working directory: another answer is another program."""
    there = tmp_path / "there"

    def step(x):
        return x * (2 if os.path.exists(there) else 3) + len(os.getcwd())

    compiled = spmd.compile(step, spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    for change in (lambda: None, there.touch, lambda: monkeypatch.chdir("/"), there.unlink):
        change()
        for _ in range(3):
            torch.testing.assert_close(compiled(X).full_tensor(), step(X))
    assert len(compiled.programs) == 4
