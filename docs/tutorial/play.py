"""Run the code of the first chapters, and leave their names at the prompt.

python -i docs/tutorial/play.py 3
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHAPTERS = sorted(Path(__file__).parent.glob("[1-9]_*.md"))


def play(chapters: list[Path], names: dict) -> None:
    """Run the blocks of code of these pages in one namespace; errors have the lines of the page."""
    for page in chapters:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"(?ms)^```python\n(.*?)^```", text):
            above = "\n" * text.count("\n", 0, found.start(1))
            exec(compile(above + found[1], str(page), "exec", dont_inherit=True), names)


if __name__ == "__main__":
    play(CHAPTERS[: int(sys.argv[1]) if len(sys.argv) > 1 else None], globals())
