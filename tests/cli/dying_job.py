"""Jobs of two ranks, one of which dies. ``python dying_job.py HOW...`` runs them one by one, by the demo's launcher.

The rank dies after a collective of all ranks, while the other waits for it in the next one. Each rank prints its pid.
Before each job the launcher prints its name, and after it the exit code; on stderr the name and the error.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from spmd.cli.args import UsageError
from spmd.cli.launch import JobFailed, launch, launched, run_launched

RANKS, DYING = 2, 1


def leave():
    os._exit(3)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def complain():
    raise ArithmeticError("a rank that raises alone")


def misread():
    raise UsageError("a rank that was told nonsense")


def wait():
    time.sleep(600)


DEATHS = {death.__name__: death for death in (leave, be_killed, complain, misread, wait)}


def play(death):
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == DYING:
        death()
    dist.all_reduce(torch.ones(1))
    raise AssertionError("the dead cannot have answered")


def main(*hows):
    if launched():
        print(f"pid {os.getpid()}", flush=True)
        return run_launched(play, DEATHS[hows[0]])
    for how in hows:
        print(f"job {how}", flush=True)
        print(f"job {how}", file=sys.stderr, flush=True)
        try:
            launch([__file__, how], RANKS)
            code = 0
        except (JobFailed, UsageError) as error:
            print(f"dying_job: {error}", file=sys.stderr)
            code = error.code
        print(f"exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
