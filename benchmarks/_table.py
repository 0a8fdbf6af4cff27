"""Tables as Markdown: readable on a terminal, pasted into RESULTS.md as they are."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table with its columns aligned; the first ``left`` to the left, the others to the right.

    >>> print(table(["step", "ms"], [["ours", "12.0"], ["theirs", "8.5"]]))
    | step   |   ms |
    | ------ | ---: |
    | ours   | 12.0 |
    | theirs |  8.5 |
    """
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return f"| {' | '.join(padded)} |"

    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *map(line, rows)])
