"""Random sessions: do trainings give on a mesh what they give on one device, whatever changes between their calls?

    python benchmarks/sessions.py                         # 20 sessions, from seed 0
    python benchmarks/sessions.py --seed 200 --number 100

A session (`tests/expand/random_sessions.py`) is a random training of six calls, between which parameters are frozen,
layers replaced, states loaded, rates and hooks changed, the step saved and loaded. One that differs is printed as
Python. Exits 1 if one differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _seeds import asked, seeds

from tests.expand.random_sessions import Session, differences


def main() -> int:
    every = seeds(__doc__.splitlines()[0], 20, "sessions")
    wrong = sum([differs for _, differs in asked(every, Session.of, differences)])
    print(f"{len(every)} sessions, {wrong} differ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
