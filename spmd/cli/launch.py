"""Starting the ranks of a job on this machine, and ending all of them when one dies.

    launch(["-m", "spmd", "demo", "--mesh", "2x2"], ranks=4)

starts ``python -m spmd demo --mesh 2x2`` four times through torch's elastic launcher, each with the environment
that torchrun would give it. So a program has one way to be a rank, whoever started it. This needs no host name,
no port chosen beforehand and no network but the loopback.

Left out: several machines and restarts. torchrun does both.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spmd.cli.args import UsageError

RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher such as torchrun puts into the environment of a rank."""


LAST_WORDS = 40
"""How many lines of what a dead rank wrote are shown."""


class JobFailed(Exception):
    """A rank of the job died, and no rank is left. ``code``: what this process should exit with."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def launched() -> bool:
    """Whether a launcher started this process as a rank of a job.

    Raises UsageError where only a part of what a launcher sets is there.
    """
    found = [name for name in RANK if name in os.environ]
    missing = [name for name in RANK if name not in os.environ]
    if missing and set(found) & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        raise UsageError(
            f"the environment has {', '.join(found)} but not {', '.join(missing)}. Start the ranks with torchrun, "
            f"which sets them all, or unset {', '.join(found)} to have the ranks started for you."
        )
    return not missing


def this_rank() -> int:
    """The rank that a launcher gave this process; 0 where there was none."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(argv: Sequence[str], ranks: int) -> None:
    """Runs ``python *argv`` as the ranks of one job on this machine, until all have ended well.

    The ranks share this process's stdout. What rank 0 writes to stderr comes out when the job has ended; when a rank
    dies, what that rank wrote does, and not the complaints of those it left.

    Raises JobFailed within seconds of a rank's death or of a signal to this process, when no rank is left, and
    UsageError where that is what the rank died of.
    """
    with tempfile.TemporaryDirectory(prefix="spmd-") as logs, quiet_launcher(), environment(defaults(ranks)):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="spmd",
            role="spmd",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            rdzv_configs={"is_host": True},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(logs, redirects=Std.ERR),
        )
        try:
            elastic_launch(config, sys.executable)(*argv)
        except ChildFailedError as error:
            raise obituary(error.failures, ranks, Path(logs)) from None
        except SignalException as error:
            message = f"{error.sigval.name} came: all ranks were stopped."
            raise JobFailed(message, 128 + error.sigval) from None
        sys.stderr.write(stderr_of(0, Path(logs)))


def play_rank(part: Callable[..., None], *args) -> None:
    """This process's part in a launched job. If it dies, the launcher learns of what, and at once."""
    launcher = int(os.environ.get("SPMD_LAUNCHER", os.getppid()))
    threading.Thread(target=outlive_no_launcher, args=(launcher,), daemon=True).start()
    try:
        record(part)(*args)
    except UsageError:
        raise
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a process group that is still in use may abort or hang an orderly exit


def check_device(kind: str) -> None:
    """Raises UsageError where this machine has no such device."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here. --device cpu works everywhere.")


def join(kind: str, patience: timedelta) -> torch.device:
    """Joins the process group, in which a rank waits so long for another; returns this rank's device."""
    if kind == "cpu":
        dist.init_process_group("gloo", timeout=patience)
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    own = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) <= gpus
    dist.init_process_group("cpu:gloo,cuda:nccl" if own else "gloo", timeout=patience)  # NCCL shares no GPU
    return device


def defaults(ranks: int) -> dict[str, str]:
    """What the ranks of one machine find in their environment unless the user says otherwise."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
        "GOMP_SPINCOUNT": "30000",  # threads of a rank that wait for one another soon let others have the core
        "GLOO_SOCKET_IFNAME": (loopback or ["lo"])[0],  # gloo would look up the host's name instead
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",  # seconds from SIGTERM to SIGKILL for the ranks that are left
        "SPMD_LAUNCHER": str(os.getpid()),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextlib.contextmanager
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """The environment with more in it, for a while."""
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            os.environ.pop(name, None)


@contextlib.contextmanager
def quiet_launcher() -> Iterator[None]:
    """The elastic launcher without its log: ``launch`` itself says what went wrong."""
    logger, deaf = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    before = logger.propagate
    logger.addHandler(deaf)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(deaf)
        logger.propagate = before


def outlive_no_launcher(launcher: int) -> None:
    """Ends this process when its launcher is gone without having stopped it: nobody would see it, or end it."""
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)


def obituary(failures: Mapping[int, ProcessFailure], ranks: int, logs: Path) -> Exception:
    """Who died first, how, and its last words."""
    rank = first_to_die(failures)
    failure = failures[rank]
    usage = usage_error(failure)
    if usage:
        return UsageError(usage)
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    others = ", and the other ranks were stopped" if ranks > 1 else ""
    words = stderr_of(rank, logs).strip().splitlines()[-LAST_WORDS:]
    death = f"rank {rank} of {ranks} died ({how}){others}."
    return JobFailed("\n".join([f"{death} Its last words:", *words]) if words else death)


def first_to_die(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank whose death brought the others down.

    A rank that dies without a word (by a signal, by ``os._exit``) breaks the connections of the others, and they
    may complain before its death is seen: so the silent are suspected first, then whoever complained first.
    SIGTERM is how the launcher stops the rest.
    """

    def innocence(rank: int) -> tuple[int, int]:
        failure = failures[rank]
        if os.path.isfile(failure.error_file):
            return 1, os.stat(failure.error_file).st_mtime_ns
        return (2 if failure.exitcode == -signal.SIGTERM else 0), rank

    return min(failures, key=innocence)


def usage_error(failure: ProcessFailure) -> str:
    """The text of the UsageError that a rank died of; empty if it died of something else."""
    message = failure.message["message"] if isinstance(failure.message, dict) else ""
    kind = f"{UsageError.__name__}: "
    return message[len(kind) :] if message.startswith(kind) else ""


def stderr_of(rank: int, logs: Path) -> str:
    """What a rank wrote to stderr."""
    return "".join(log.read_text(errors="replace") for log in logs.glob(f"*/attempt_0/{rank}/stderr.log"))
