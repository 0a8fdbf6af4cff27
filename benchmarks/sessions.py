"""Random sessions: do trainings give on a mesh what they give on one device, whatever changes between their calls?

    python benchmarks/sessions.py                         # 20 sessions, from seed 0
    python benchmarks/sessions.py --seed 200 --number 100

A session (`tests/expand/random_sessions.py`) is a random training of six calls, between which parameters are frozen,
layers replaced, states loaded, rates and hooks changed, the step saved and loaded. One that differs is printed as
Python. Exits 1 if one differs.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.expand.random_sessions import Session, differences


def asked(session: Session) -> list[str]:
    """What differs, as text. A session that is refused differs."""
    try:
        return differences(session)
    except Exception:
        return [traceback.format_exc()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow it")
    parser.add_argument("--number", type=int, default=20, help="how many sessions")
    args = parser.parse_args()
    wrong = 0
    for seed in range(args.seed, args.seed + args.number):
        session = Session.of(seed)
        if found := asked(session):
            wrong += 1
            print(f"# seed {seed}\n{session}", *found[:4], sep="\n", flush=True)
    print(f"{args.number} sessions, {wrong} differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
