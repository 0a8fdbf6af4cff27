"""How far the rule book is proved: every row of every rule, on all that torch's own op database calls.

    python benchmarks/oracle.py [--per-op 3] [--every 1]

CI asks a part of it (`tests/tensor/test_oracle.py`). Prints a line a dtype, and exits 1 if a row is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tensor.oracle import captured, sweep

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--per-op", type=int, default=3, help="samples an overload (default: %(default)s)")
    parser.add_argument("--every", type=int, default=1, help="take every so manieth entry (default: %(default)s)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # torch warns of what its own samples do
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
