"""Start the ranks of a job on this machine, and stop all of them when one dies.

    launch(["-m", "spmd", "demo", "--mesh", "2x2"], ranks=4)

starts ``python -m spmd demo --mesh 2x2`` four times through torch's elastic launcher. Each process gets the environment
that torchrun would give it, so a program runs in the same way whether torchrun or this module started it. No host name
is needed, no port has to be chosen, and only the loopback network is used.

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

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""The variables that a launcher such as torchrun sets for a rank."""

LAST_LINES = 40
"""How many of the last lines that a dead rank wrote are shown."""


class JobFailed(Exception):
    """A rank of the job died, and all others have been stopped. ``code``: the exit code for this process."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def launched() -> bool:
    """Whether a launcher started this process as a rank of a job.

    Raises UsageError if only some of a launcher's variables are set.
    """
    found = [name for name in LAUNCHER_VARIABLES if name in os.environ]
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing and set(found) & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}:
        raise UsageError(
            f"the environment has {', '.join(found)} but not {', '.join(missing)}. Start the ranks with torchrun, "
            f"which sets them all, or unset {', '.join(found)} to have the ranks started for you."
        )
    return not missing


def this_rank() -> int:
    """The rank that a launcher gave this process; 0 if there was no launcher."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def cores() -> int:
    """The processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(argv: Sequence[str], ranks: int) -> None:
    """Runs ``python *argv`` as the ranks of one job on this machine, until all have ended without an error.

    The ranks share this process's stdout. The stderr of rank 0 is printed when the job has ended. If a rank dies, the
    stderr of that rank is printed, and not that of the others, which only report that they lost it.

    Raises JobFailed within seconds after a rank dies or this process gets a signal; no rank is left then. Raises
    UsageError if the rank died of one.
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
            raise job_error(error.failures, ranks, Path(logs)) from None
        except SignalException as error:
            message = f"{error.sigval.name} came: all ranks were stopped."
            raise JobFailed(message, 128 + error.sigval) from None
        sys.stderr.write(stderr_of(0, Path(logs)))


def run_launched(part: Callable[..., None], *args) -> None:
    """Runs this process's part of a launched job. If it raises, the launcher gets the error at once."""
    launcher = int(os.environ.get("SPMD_LAUNCHER", os.getppid()))
    threading.Thread(target=exit_with_launcher, args=(launcher,), daemon=True).start()
    try:
        record(part)(*args)
    except UsageError:
        raise
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a normal exit may abort or hang while a process group is in use


def check_device(kind: str) -> None:
    """Raises UsageError if this machine has no such device."""
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here. --device cpu works everywhere.")


def join(kind: str, patience: timedelta) -> torch.device:
    """Joins the process group and returns this rank's device. patience: how long a rank waits for another."""
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
    """Environment variables for the ranks of one machine, except those that the user has set."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    wanted = {
        "OMP_NUM_THREADS": str(max(1, cores() // ranks)),
        "GOMP_SPINCOUNT": "30000",  # a waiting thread of a rank soon gives its core to other ranks
        "GLOO_SOCKET_IFNAME": (loopback or ["lo"])[0],  # gloo would look up the host's name instead
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",  # seconds from SIGTERM to SIGKILL for the ranks that are left
        "SPMD_LAUNCHER": str(os.getpid()),
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextlib.contextmanager
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """Inside, these variables are added to the environment."""
    os.environ.update(more)
    try:
        yield
    finally:
        for name in more:
            os.environ.pop(name, None)


@contextlib.contextmanager
def quiet_launcher() -> Iterator[None]:
    """Inside, the elastic launcher does not log: ``launch`` itself reports errors."""
    logger, silent = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    before = logger.propagate
    logger.addHandler(silent)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.propagate = before


def exit_with_launcher(launcher: int) -> None:
    """Ends this process when its launcher has died without stopping it: otherwise it would run on, unnoticed."""
    while os.getppid() == launcher:
        time.sleep(1)
    os._exit(1)


def job_error(failures: Mapping[int, ProcessFailure], ranks: int, logs: Path) -> Exception:
    """The error of a failed job: which rank died first, how, and the last lines that it wrote."""
    rank = first_to_die(failures)
    failure = failures[rank]
    usage = usage_error(failure)
    if usage:
        return UsageError(usage)
    how = failure.signal_name() if failure.exitcode < 0 else f"exit code {failure.exitcode}"
    others = ", and the other ranks were stopped" if ranks > 1 else ""
    lines = stderr_of(rank, logs).strip().splitlines()[-LAST_LINES:]
    report = f"rank {rank} of {ranks} died ({how}){others}."
    return JobFailed("\n".join([f"{report} The last lines that it wrote:", *lines]) if lines else report)


def first_to_die(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank whose report brought the others down.

    A rank that dies without an error file (by a signal or by ``os._exit``) breaks the connections of the others. They
    may report errors before the launcher sees its death. So ranks without an error file come first, then the rank with
    the oldest error file. Ranks that ended by SIGTERM come last: the launcher stops the remaining ranks with it.
    """

    def order(rank: int) -> tuple[int, int]:
        failure = failures[rank]
        if os.path.isfile(failure.error_file):
            return 1, os.stat(failure.error_file).st_mtime_ns
        return (2 if failure.exitcode == -signal.SIGTERM else 0), rank

    return min(failures, key=order)


def usage_error(failure: ProcessFailure) -> str:
    """The text of the UsageError that a rank died of; empty if it died of another error."""
    message = failure.message["message"] if isinstance(failure.message, dict) else ""
    kind = f"{UsageError.__name__}: "
    return message[len(kind) :] if message.startswith(kind) else ""


def stderr_of(rank: int, logs: Path) -> str:
    """The text that a rank wrote to stderr."""
    return "".join(log.read_text(errors="replace") for log in logs.glob(f"*/attempt_0/{rank}/stderr.log"))
