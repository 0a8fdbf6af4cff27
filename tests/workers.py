"""Four real processes on gloo, started once and reused by every test that is about the network.

    def total(rank, factor):
        x = torch.tensor([rank * factor])
        dist.all_reduce(x)
        return x.item()

    def test_sum(gloo4):
        assert gloo4.run(total, 10) == [60, 60, 60, 60]

A call never hangs: a worker that dies, an error that leaves the others waiting, and a call that takes too long all end
in an error that says which rank did what; the pool then starts anew for the next call.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

HOST = "127.0.0.1"
START_S, CALL_S, GRACE_S = 120.0, 120.0, 5.0

PRELOADED = [
    "torch.distributed", "torch._dynamo", "torch._functorch.aot_autograd", "pytest",
    "spmd", "spmd.expand.compile", "spmd.parallel", "spmd.checkpoint", "spmd.debug",
]  # fmt: skip
"""Modules that are imported once, and not once a worker."""


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of a call."""


class WorkersTimedOut(RuntimeError):
    """Some workers did not answer in time."""


class Pool:
    """`size` processes that share an initialised gloo group over loopback; see the module's example."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[mp.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: Any = None

    def run(self, fn: Callable, *args: Any, timeout: float = CALL_S) -> list:
        """`fn(rank, *args)` on every worker; their results in rank order.

        `fn` is a function of a module, since it travels by its name. The first error of a worker is raised with that
        rank's traceback as a note.
        """
        # Results of the same call only: a pool that has lost a worker or its rhythm is replaced before the next one.
        if not self._processes:
            self._start()
        task = pickle.dumps((list(sys.path), pickle.dumps((fn, args))))
        for rank in range(self.size):
            self._send(rank, task, fn.__name__)
        answers, late = self._answers(fn.__name__, timeout)
        failed = [answer for answer in answers.values() if answer[0] == "error"]
        if late:
            self.kill()
        if failed:
            _raise(failed[0][1], late)
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the workers in good order; kill those that do not come."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End the workers at once; the next call starts others."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes, self._store = [], [], None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        # Held here on a port that the system picks: no worker has to guess a free one.
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, self.size, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()  # so that a worker's death reads as the end of its pipe
            self._processes.append(process)
            self._pipes.append(ours)
        self._answers("start", START_S)

    def _answers(self, name: str, timeout: float) -> tuple[dict[int, tuple], list[int]]:
        """(answers by rank, in order of arrival; ranks that still wait for one that failed)."""
        answers: dict[int, tuple] = {}
        end = time.monotonic() + timeout
        while len(answers) < self.size:
            missing = [rank for rank in range(self.size) if rank not in answers]
            ready = wait([self._pipes[rank] for rank in missing], max(0.0, end - time.monotonic()))
            for rank in [rank for rank in missing if self._pipes[rank] in ready]:
                answers[rank] = self._receive(rank, name)
                if answers[rank][0] == "error":
                    end = min(end, time.monotonic() + GRACE_S)  # the others may wait for this rank in a collective
            if not ready and any(kind == "error" for kind, _ in answers.values()):
                return answers, missing
            if not ready:
                self.kill()
                raise WorkersTimedOut(f"{name}: ranks {missing} of {self.size} did not answer within {timeout} s")
        return answers, []

    def _send(self, rank: int, task: bytes, name: str) -> None:
        try:
            self._pipes[rank].send_bytes(task)
        except ConnectionError:
            raise self._death(rank, f"before {name}") from None

    def _receive(self, rank: int, name: str) -> tuple:
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionError):
            raise self._death(rank, name) from None

    def _death(self, rank: int, name: str) -> WorkerDied:
        self._processes[rank].join(GRACE_S)
        code = self._processes[rank].exitcode
        self.kill()
        return WorkerDied(f"{name}: rank {rank} of {self.size} died with exit code {code}")


def _raise(failure: tuple[BaseException | None, str], late: list[int]) -> None:
    error, text = failure
    error = error if error is not None else RuntimeError(text.splitlines()[-1])
    error.__notes__ = [text + (f"(ranks {late} were still waiting and have been ended)" if late else "")]
    raise error


def _work(rank: int, size: int, port: int, pipe: Connection) -> None:
    """The life of a worker: join the group, then answer calls until told to stop."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.enable()  # a crash in C++ says where each thread was
    import torch
    import torch.distributed as dist

    gc.freeze()  # of what torch consists of, nothing will be garbage
    gc.set_threshold(20_000, 20, 20)
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    pipe.send_bytes(pickle.dumps(("ok", None)))
    while (task := pickle.loads(pipe.recv_bytes())) is not None:
        pipe.send_bytes(_answer(rank, task))
    dist.destroy_process_group()


def _answer(rank: int, task: tuple) -> bytes:
    path, call = task
    sys.path[:] = path  # test modules are found where pytest found them
    try:
        fn, args = pickle.loads(call)
        return pickle.dumps(("ok", fn(rank, *args)))
    except Exception as error:
        text = f"on rank {rank}:\n{traceback.format_exc()}"
        return pickle.dumps(("error", (_picklable(error), text)))


def _picklable(error: Exception) -> Exception | None:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return None
