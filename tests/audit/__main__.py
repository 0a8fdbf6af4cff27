"""Run random steps beside one device, and print what came of each place and kind.

python -m tests.audit --seeds 0 2000
python -m tests.audit --place slots --kind flip --show
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter

import torch

from tests.audit.places import KINDS, PLACES
from tests.audit.random_steps import Drawn, outcome, smallest

WORDS = "right", "refused", "crashed", "wrong"


def table(found: dict[Drawn, str], by: str) -> str:
    """How often each word came of each place or kind."""
    counts = Counter((getattr(drawn, by), word) for drawn, word in found.items())
    names = sorted({name for name, _ in counts})
    lines = [f"{by:28}" + "".join(f"{word:>9}" for word in WORDS)]
    lines += [f"{name:28}" + "".join(f"{counts[name, word] or '':>9}" for word in WORDS) for name in names]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs=2, type=int, default=(0, 100))
    parser.add_argument("--all", action="store_true", help="every place with every kind, in the simplest step")
    parser.add_argument("--place", choices=PLACES)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--show", action="store_true", help="print the steps")
    parser.add_argument("--smaller", action="store_true", help="print the simplest step that is wrong, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    drawn = [Drawn.of(seed) for seed in range(*args.seeds)]
    if args.all or args.place or args.kind:
        drawn = [Drawn(place, kind) for place in PLACES for kind in PLACES[place].fits]
        drawn = [each for each in drawn if each.place == (args.place or each.place)]
        drawn = [each for each in drawn if each.kind == (args.kind or each.kind)]
    begin, found = time.perf_counter(), {}
    for each in drawn:
        if args.show:
            print(each)
        result = outcome(each)
        found[each] = result.word
        if result.word in ("wrong", "crashed") or args.show:
            print(f"{result.word}: {each!r}\n    {result.text}", flush=True)
            if args.smaller and result.word == "wrong" and (small := smallest(each)) != each:
                print(f"    {small!r}")
    print(table(found, "place"), table(found, "kind"), sep="\n\n")
    print(f"\n{len(found)} steps in {time.perf_counter() - begin:.0f} s: {dict(Counter(found.values()))}")


if __name__ == "__main__":
    main()
