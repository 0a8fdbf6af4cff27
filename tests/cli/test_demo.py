"""``python -m spmd demo`` as a user runs it: real processes, real input, bad input, a rank that dies."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd.cli import main
from spmd.cli.args import UsageError
from spmd.cli.launch import launched

ROOT = Path(__file__).parents[2]
RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SMALL = "--steps 3 --layers 1 --heads 2 --width 16 --block 8 --batch 4".split()


def python(*argv, seconds=120, **env):
    """Runs ``python *argv`` in the checkout, as a user without a launcher (unless ``env`` says otherwise)."""
    plain = {name: value for name, value in os.environ.items() if name not in RANK}
    return subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        env={**plain, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def demo(*options, **env):
    return python("-m", "spmd", "demo", *options, **env)


def check_losses(job):
    """The last line gives the difference of the losses, once."""
    assert job.returncode == 0, job.stderr
    last = job.stdout.splitlines()[-1]
    difference = re.fullmatch(r"largest relative loss difference to one device: (\S+)", last)
    assert difference and job.stdout.count("largest relative loss difference") == 1, job.stdout
    assert float(difference[1]) < 1e-4
    assert "modelled communication time" in job.stdout


def test_the_ranks_lose_what_one_device_loses():
    check_losses(demo(*SMALL, *"--mesh 1x2 --untied".split()))


def test_a_rank_of_a_launcher_is_used():
    """Under torchrun the demo runs the rank that it is given, here with batches that do not divide."""
    torchrun = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0".split()
    options = [*SMALL, *"--mesh 2x1 --batch 3".split()]
    check_losses(python(*torchrun, "--local-addr", "127.0.0.1", "-m", "spmd", "demo", *options))


def test_one_rank_is_a_mesh_too():
    """Here the test is the launcher. The port may be any, for nobody else comes."""
    job = demo(*SMALL, *"--mesh 1x1 --print-program".split(), **rank(0, 1) | {"MASTER_PORT": "0"})
    check_losses(job)
    assert "aten.embedding" in job.stdout


@pytest.mark.parametrize(
    "options, message",
    [
        ("--mesh 2by2", "'2by2' is not a mesh. A mesh is DPxTP"),
        ("--mesh 0x2", "'0x2' is not a mesh"),
        ("--mesh 2x2x2", "'2x2x2' is not a mesh"),
        ("--text no/such/file --steps 1", "cannot read the text no/such/file: No such file or directory"),
        ("--text SHORT --block 4096", "one batch of 16 windows of 4096 bytes needs 16 * 4096 + 1 = 65537"),
        ("--heads 3", "3 does not divide 128. A width of 129 fits."),
        ("--steps 0", "'0' is not a whole number of at least 1"),
        ("--lr inf", "'inf' is not a finite number above 0"),
        ("--seed -1", "'-1' is not a whole number from 0"),
    ],
)
def test_bad_input_is_told_before_any_rank_starts(options, message, monkeypatch, capsys):
    """One clear message and exit code 2; nothing is launched."""
    monkeypatch.setattr("spmd.cli.demo.launch", None)
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    argv = [__file__ if option == "SHORT" else option for option in options.split()]
    assert code_of(main, ["demo", *argv]) == 2
    said = capsys.readouterr()
    assert said.err.endswith("\n") and message in said.err.splitlines()[-1]
    assert said.out == ""


def code_of(main, argv):
    """The exit code of a command, whether returned or raised."""
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


def test_bad_input_gives_no_traceback():
    """The same from outside: only a message, and exit code 2."""
    job = demo("--text", "no/such/file")
    assert job.returncode == 2
    assert job.stderr.count("\n") == 1 and "cannot read the text no/such/file" in job.stderr
    assert job.stdout == ""


def rank(rank, world):
    values = str(rank), str(world), str(rank), "127.0.0.1", "1"
    return dict(zip(RANK, values, strict=True))


def test_a_mesh_must_fit_the_ranks_of_the_launcher():
    """Every rank ends by itself before it connects to the others. Rank 0 prints the reason."""
    first, second = demo("--mesh", "2x2", **rank(0, 3)), demo("--mesh", "2x2", **rank(1, 3))
    assert first.returncode == second.returncode == 2
    assert "a mesh of 2x2 has 4 ranks, and the launcher started 3" in first.stderr
    assert "--mesh 3x1" in first.stderr
    assert second.stderr == ""


def test_half_a_launcher_is_none(monkeypatch):
    """A rank with only some launcher variables is refused: it would wait for ever."""
    for name in RANK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="has RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        launched()


DYING = str(Path(__file__).with_name("dying_job.py"))


DEATHS = {
    "leave": (1, "rank 1 of 2 died (exit code 3), and the other ranks were stopped."),
    "be_killed": (1, "rank 1 of 2 died (SIGKILL), and the other ranks were stopped."),
    "complain": (1, "ArithmeticError: a rank that raises alone"),
    "misread": (2, "a rank that was told nonsense"),
}


@pytest.fixture(scope="module")
def deaths():
    """For each death what the job printed: stdout and stderr. One launcher runs one job after the other."""
    job = python(DYING, *DEATHS)
    return {how: (part(job.stdout, how), part(job.stderr, how)) for how in DEATHS}


def part(text, how):
    return text.partition(f"job {how}\n")[2].partition("job ")[0]


@pytest.mark.parametrize("how", DEATHS)
def test_a_rank_that_dies_ends_the_job(how, deaths):
    """The job ends within seconds, with a message about the rank that died only, and no process remains."""
    out, err = deaths[how]
    code, message = DEATHS[how]
    assert out.splitlines()[-1] == f"exit code {code}"
    assert err.splitlines()[-1].endswith(message)
    assert "Connection closed" not in err
    assert len(re.findall("pid", out)) == 2 and not running(out)


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_stopped_takes_its_ranks_along(by, tmp_path):
    """However the launcher ends, its ranks end too."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, DYING, "wait"], env=env, stdout=subprocess.PIPE, text=True) as job:
        pids = "".join(job.stdout.readline() for _ in range(3))  # a title, and two ranks
        job.send_signal(by)
        assert job.wait(30) != 0
        until = time.monotonic() + 30
        while running(pids) and time.monotonic() < until:
            time.sleep(0.1)
        assert not running(pids)


def running(pids):
    """The processes of the ``pid N`` lines that are still running."""
    return [pid for pid in map(int, re.findall(r"pid (\d+)", pids)) if is_running(pid)]


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
