"""Random cases by seed: each is made, asked, and printed as Python where it differs."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

Case = TypeVar("Case")


def seeds(title: str, number: int, cases: str) -> range:
    """The seeds that the command line asks for. number: how many by default. cases: what they are called."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow it")
    parser.add_argument("--number", type=int, default=number, help=f"how many {cases}")
    args = parser.parse_args()
    return range(args.seed, args.seed + args.number)


def asked(
    every: range, make: Callable[[int], Case], differences: Callable[[Case], list[str]]
) -> Iterator[tuple[Case, bool]]:
    """Each case, and whether it differs, with what differs printed. A case that is refused differs."""
    for seed in every:
        case = make(seed)
        try:
            found = differences(case)
        except Exception:
            found = [traceback.format_exc()]
        if found:
            print(f"# seed {seed}\n{case}", *found[:4], sep="\n", flush=True)
        yield case, bool(found)
