"""Test the rule book: every row of every rule, on all ops that torch's own op database calls.

    python benchmarks/oracle.py [--per-op 3] [--every 1]
    python benchmarks/oracle.py --missing [--op mm]

CI tests a part of it (`tests/tensor/test_oracle.py`). Prints a line for each dtype, and exits 1 if a row is wrong.

`--missing` searches for rows that would be right and that no rule offers: on the samples of the tests and on those of
the database, in float64. Not every such row is worth having. A row that is right only for some samples depends on an
argument or on the values.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from spmd.tensor.call import base_name
from tests.tensor.missing import missing
from tests.tensor.oracle import captured, sweep
from tests.tensor.samples import table

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


def print_missing(args: argparse.Namespace) -> int:
    """Print a line for each row, first those that are right for all samples they were tested on."""
    torch.manual_seed(1)
    by_op = defaultdict(list)
    for sample in (*table(), *captured(torch.float64, args.per_op, every=args.every)):
        by_op[base_name(sample.op)].append(sample)
    asked = [args.op] if args.op else sorted(by_op)
    found = []
    for op in asked:
        rows = in_a_process(lambda op=op: [(str(m), m.right, m.asked) for m in missing(by_op[op])])
        if rows is None:
            print(f"{op}: the kernel died of operands that no rule offers", flush=True)
        found += rows or []
    found.sort(key=lambda row: (-row[1] / row[2], -row[1], row[0]))
    surely = [text for text, right, of in found if right == of]
    print(f"{date.today()}: {len(found)} rows that no rule offers, {len(surely)} of them right wherever asked")
    print("\n".join(text for text, _, _ in found))
    return 0


def in_a_process(fn: Callable[[], Any]) -> Any:
    """The result of fn, run in a process of its own; None if the process died, as kernels may on bad operands."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(fn()))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return None
    finally:
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-op", type=int, default=3, help="samples an overload (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="take only every n-th entry (default: %(default)s)")
    parser.add_argument("--missing", action="store_true", help="look for rows that no rule offers")
    parser.add_argument("--op", help="with --missing: only this op")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # torch warns of what its own samples do
    if args.missing:
        return print_missing(args)
    wrong = 0
    for dtype in DTYPES:
        torch.manual_seed(1)
        start = time.perf_counter()
        tally = sweep(captured(dtype, args.per_op, every=args.every))
        print(f"{dtype!s:<16} {tally}   {time.perf_counter() - start:.0f} s", flush=True)
        for failure in tally.wrong:
            print(f"    {failure}")
        wrong += len(tally.wrong)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
