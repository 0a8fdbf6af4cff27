"""How many ops distributed tensors support: spmd's DTensor and torch's DTensor, over all of torch's op database.

    python benchmarks/coverage.py                    # all of it, about 20 minutes
    python benchmarks/coverage.py --short            # every 12th entry, one sample each, under a minute
    python benchmarks/coverage.py --samples 1 --placings 2   # every entry, in two ways
    python benchmarks/coverage.py --op conv2d        # one entry, and every case that is not right
    python benchmarks/coverage.py --side spmd        # spmd alone
    python benchmarks/coverage.py --side threads     # spmd alone, with a thread for each rank
    python benchmarks/coverage.py --part 0/4         # a fourth of the entries, for several processes

Each entry of `op_db` that supports CPU and float32 is run on simulated ranks of the meshes (4,) and (2, 2): forward and
backward, and in place and with `out=` if it has these variants. Its tensors are replicated, sharded on every dim (most
sizes are not divisible), partial sums and maxima, and placed at random. Results and gradients must be those of one
device (`tests/tensor/sweep.py`). The table counts

    right         right on every rank
    wrong         another number, shape or dtype, without an error
    crashed       an error that one device does not raise, or a process that died or hangs
    unsupported   NotImplementedError
    shared        the percentage of the right cases in which some result or gradient is sharded, among those in which an
                  operand was sharded and some result or gradient has a dim to shard
    kept          the same for the results alone, gradients aside
    gathered      the percentage of the right cases in which some op ran on replicated tensors, among those in which an
                  operand was sharded; for torch it is not known
    always        the entries that were gathered in every such case

Ops that draw random numbers are counted separately and not judged here. torch's DTensor runs under torch's own
LocalTensorMode. The cases run in a process of their own. If a case kills it, a new process starts with the next case.
Exits 1 if spmd is not right in some case.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _table import table

from spmd.tensor.placement import Partial, Shard
from tests.tensor.sweep import Case, InOneThread, OnThreads, Ours, Verdict, ask, cases, entries, name_of

SILENCE = 60.0  # seconds after which a case counts as hanging
KINDS = ("right", "wrong", "crashed", "unsupported")


class Torchs(InOneThread):
    """torch's DTensor in torch's LocalTensorMode."""

    def __init__(self, mesh: tuple[int, ...]):
        import torch.distributed as dist
        from torch.distributed import _local_tensor, tensor
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        self.tensor, self.local = tensor, _local_tensor.LocalTensor
        self.make = lambda: _local_tensor.LocalTensorMode(math.prod(mesh))
        self.shape = mesh
        with self.make():
            self.mesh = init_device_mesh("cpu", mesh)

    def __enter__(self):
        self.mode = self.make()
        self.mode.__enter__()
        return self

    def __exit__(self, *exc):
        self.mode.__exit__(*exc)

    def place(self, parts, placing, like):
        ranks = {int(self.mesh.mesh[at]): x for at, x in parts.items()}
        made = self.tensor.DTensor.from_local(
            self.local(ranks), self.mesh, [self._placement(p) for p in placing],
            run_check=False, shape=like.shape, stride=torch.empty(like.shape).stride(),
        )  # fmt: skip
        return made.detach().requires_grad_(like.requires_grad)

    def _placement(self, p):
        if isinstance(p, Shard):
            return self.tensor.Shard(p.dim)
        return self.tensor.Partial(p.reduce_op) if isinstance(p, Partial) else self.tensor.Replicate()

    def whole(self, x):
        full = x.detach().full_tensor() if isinstance(x, self.tensor.DTensor) else x.detach()
        return full._local_tensors if isinstance(full, self.local) else {0: full}

    def is_shared(self, x):
        return isinstance(x, self.tensor.DTensor) and not all(p.is_replicate() for p in x.placements)


SIDES = {"spmd": Ours, "threads": OnThreads, "torch": Torchs}


@dataclass(frozen=True)
class Part:
    """Every n-th entry, beginning with the k-th: `k/n`."""

    k: int
    n: int

    @staticmethod
    def parse(text: str) -> Part:
        k, n = map(int, text.split("/"))
        if not 0 <= k < n:
            raise argparse.ArgumentTypeError(f"{text!r} is no part; the parts of 4 are 0/4, 1/4, 2/4 and 3/4")
        return Part(k, n)

    def of(self, things: list) -> list:
        return things[self.k :: self.n]

    def __str__(self):
        return f"{self.k}/{self.n}"


# ---- the process that runs cases --------------------------------------------------------------


def all_cases(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, in the same order in every process."""
    chosen = args.part.of(entries())
    if args.op:
        chosen = [e for e in chosen if args.op in (e.name, name_of(e))]
    elif args.short:
        chosen = chosen[:: args.every]
    for entry in chosen:
        yield from list(cases(entry, 1, 2) if args.short else cases(entry, args.samples, args.placings))


def work(args: argparse.Namespace) -> None:
    """Run one case after the other and print a line of JSON for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sides = {}
    for number, case in enumerate(all_cases(args)):
        if number < args.start:
            continue
        if case.mesh not in sides:
            sides[case.mesh] = SIDES[args.worker](case.mesh)
        say(number=number, op=case.op + case.variant, case=str(case))
        verdict = ask(case, sides[case.mesh])
        say(number=number, verdict=verdict and asdict(verdict))


def say(**what) -> None:
    print("::" + json.dumps(what), flush=True)


# ---- the process that counts ------------------------------------------------------------------


@dataclass
class Share:
    """How many of the cases that were asked are so."""

    true: int = 0
    asked: int = 0

    def add(self, answer: bool | None) -> None:
        if answer is not None:
            self.true += answer
            self.asked += 1

    def __str__(self) -> str:
        return f"{100 * self.true / self.asked:.1f} %" if self.asked else ""


@dataclass
class Count:
    """The counts of verdicts on one side."""

    kinds: Counter = field(default_factory=Counter)
    shared: Share = field(default_factory=Share)
    kept: Share = field(default_factory=Share)
    gathered: Share = field(default_factory=Share)
    by_entry: dict[str, Share] = field(default_factory=lambda: defaultdict(Share))
    causes: Counter = field(default_factory=Counter)
    by_op: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    example: dict[str, str] = field(default_factory=dict)
    replicated: Counter = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)

    def add(self, op: str, case: str, verdict: Verdict) -> None:
        self.kinds[verdict.kind] += 1
        self.by_op[op][verdict.kind] += 1
        self.shared.add(verdict.shared)
        self.kept.add(verdict.kept)
        if verdict.gathered is not None:
            self.gathered.add(bool(verdict.gathered))
            self.by_entry[op].add(bool(verdict.gathered))
            self.causes.update(f"{op} by {cause}" for cause in verdict.gathered)
        if verdict.shared is not None:
            self.replicated[op] += not verdict.shared
        if verdict.kind not in ("right", "random"):
            self.lines.append(f"{verdict.kind}: {case}: {verdict.why}")
            print(self.lines[-1], file=sys.stderr, flush=True)
            self.example.setdefault(op, self.lines[-1])

    @property
    def always(self) -> str:
        """The entries that were gathered in every case with a sharded operand, of all that had such a case."""
        return f"{sum(share.true == share.asked for share in self.by_entry.values())} of {len(self.by_entry)}"

    @property
    def failing(self) -> int:
        return sum(self.kinds[k] for k in KINDS[1:])


def count(side: str, args: argparse.Namespace) -> Count:
    """Run all cases on one side, in as many processes as needed."""
    found, start = Count(), 0
    while start is not None:
        start = _count_from(start, side, args, found)
    return found


def _count_from(start: int, side: str, args: argparse.Namespace, found: Count) -> int | None:
    """Run a process and count its verdicts. If a case killed it, return the number of the next case."""
    given = [f"--samples={args.samples}", f"--every={args.every}", f"--part={args.part}"]
    given += ["--short"] if args.short else []
    given += [f"--placings={args.placings}"] if args.placings else []
    given += [f"--op={args.op}"] if args.op else []
    command = [sys.executable, __file__, f"--worker={side}", f"--start={start}", *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines: queue.Queue = queue.Queue()
    threading.Thread(target=_hand_on, args=(process.stdout, lines), daemon=True).start()
    asked: dict = {}
    try:
        for said in _said(process, lines):
            if "case" in said:
                asked = said
                continue
            if said["verdict"] is not None:
                found.add(asked["op"], asked["case"], Verdict(**said["verdict"]))
            asked = {}
        how = f"exit status {process.wait()}"
    except queue.Empty:
        how = f"no answer for {SILENCE:.0f} s"
    finally:
        process.kill()
        process.wait()
    if not asked:
        if process.returncode:
            raise RuntimeError(f"the worker failed between cases, {how}: {' '.join(command)}")
        return None
    found.add(asked["op"], asked["case"], Verdict("crashed", f"the process: {how}"))
    return asked["number"] + 1


def _hand_on(stream, lines: queue.Queue) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _said(process, lines: queue.Queue) -> Iterator[dict]:
    while (line := lines.get(timeout=SILENCE)) is not None:
        if line.startswith("::"):
            yield json.loads(line[2:])


def report(counts: dict[str, Count], args: argparse.Namespace) -> None:
    """Print the table, an example of each op that is not right, and the details that options ask for."""
    rows = []
    for side, c in counts.items():
        asked = sum(c.kinds[k] for k in KINDS)
        ops = sum(1 for of in c.by_op.values() if any(of[k] for k in KINDS[1:]))
        kinds = [str(c.kinds[k]) for k in KINDS]
        shares = [str(c.shared), str(c.kept), *(["", ""] if side == "torch" else [str(c.gathered), c.always])]
        rows.append([side, str(asked), *kinds, *shares, f"{ops} of {len(c.by_op)}", str(c.kinds["random"])])
    header = ["DTensor", "cases", *KINDS, "shared", "kept", "gathered", "always", "ops not right", "random"]
    print(table(header, rows))
    for side, c in counts.items():
        if side == "torch" and not args.verbose and not args.op:
            continue
        for op, of in sorted(c.by_op.items()):
            if any(of[k] for k in KINDS[1:]):
                print(f"\n{side} {op}: {', '.join(f'{of[k]} {k}' for k in KINDS if of[k])}\n    {c.example[op]}")
        if args.op:
            print("\n".join(["", *c.lines]))
        if args.verbose:
            print(f"\n{side}, replicated though they could be sharded:", dict(c.replicated.most_common(200)))
            print(f"\n{side}, gathered:", dict(c.causes.most_common(200)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a sample, for CI")
    parser.add_argument("--op", help="one entry of the database, by its name")
    parser.add_argument("--side", choices=SIDES, help="one only; spmd and torch by default")
    parser.add_argument("--samples", type=int, default=3, help="of each entry (default: %(default)s)")
    parser.add_argument("--placings", type=int, help="of each sample, this many at random (default: all, about ten)")
    parser.add_argument("--every", type=int, default=12, help="with --short: run only every n-th entry")
    parser.add_argument("--part", type=Part.parse, default=Part(0, 1), metavar="k/n", help="every n-th entry")
    parser.add_argument("--verbose", action="store_true", help="torch's failing ops too, and replicated results")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    counts = {}
    for side in [args.side] if args.side else ("spmd", "torch"):
        began = time.perf_counter()
        counts[side] = count(side, args)
        print(f"{side}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"{date.today()}, torch {torch.__version__}\n")
    report(counts, args)
    return int("spmd" in counts and counts["spmd"].failing > 0)


if __name__ == "__main__":
    sys.exit(main())
