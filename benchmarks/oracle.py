"""How far the rule book is proved: every row of every rule, on all that torch's own op database calls.

    python benchmarks/oracle.py [--per-op 3] [--every 1]
    python benchmarks/oracle.py --missing [--op mm]

CI asks a part of it (`tests/tensor/test_oracle.py`). Prints a line a dtype, and exits 1 if a row is wrong.

`--missing` looks for rows that would be right and that no rule offers: on the samples of the tests and on those of the
database, in float64. Not each is worth having; those that are right for some samples only hang on an argument or on the
values.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from spmd.tensor.call import base_name
from tests.tensor.missing import missing
from tests.tensor.oracle import captured, sweep
from tests.tensor.samples import table

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def print_missing(args: argparse.Namespace) -> int:
    """A line a row, those first that are right for all samples they were asked of."""
    torch.manual_seed(1)
    samples = [*table(), *captured(torch.float64, args.per_op, every=args.every)]
    found = missing(s for s in samples if args.op in (None, base_name(s.op)))
    surely = [m for m in found if m.right == m.asked > 1]
    print(f"{date.today()}: {len(found)} rows that no rule offers, {len(surely)} of them right wherever asked")
    print("\n".join(map(str, found)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-op", type=int, default=3, help="samples an overload (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="take every so manieth entry (default: %(default)s)")
    parser.add_argument("--missing", action="store_true", help="look for rows that no rule offers")
    parser.add_argument("--op", help="of --missing: of this op only")
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
