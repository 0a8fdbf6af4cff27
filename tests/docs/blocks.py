"""Pages in Markdown as tests: the code in them runs, and what it prints is what the page says.

A page is a list of fenced blocks, in order. The word behind a fence says what a block is:

    python      runs, in the one namespace of the page; with `>>>` it is a doctest
    text        right behind a block of code it is all that the code prints; elsewhere it is a picture or a notation
    bash        where an output follows it runs; else each command is checked: its script is there, its options exist
    (none)      the same as text

A line of `...` in an output stands for any lines. An error that a block ends in is its output's end, as Python prints
it: `ValueError: what is wrong`. What is printed and not on the page is an error, too.

Comments of HTML, which a reader does not see, say the rest. In front of a block, one or several:

    <!-- loosely -->             numbers in this output are not compared: it has times or speeds
    <!-- file: train.py -->      a file that commands of the page may run; the block does not run by itself
    <!-- quoted from: PATH -->   lines of a file of this project; the block does not run, and its lines are there
    <!-- not run: REASON -->     neither run nor checked; a test lists all of these

And anywhere, for all blocks behind it:

    <!-- ranks: 4 -->            they run on so many simulated ranks, and print what rank 0 prints
    <!-- after: other.md -->     they go on in the namespace of another page, whose blocks run first

EXPECTTEST_ACCEPT=1 writes what is printed into the pages, where an output has no line of `...` and is compared to the
letter.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import linecache
import os
import re
import subprocess
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import spmd
from spmd import DTensor, LocalTensor, LocalTensorMode
from tests.docs.commands import check_command, commands, environment

ROOT = Path(__file__).parents[2]
LANGUAGES = ("python", "bash", "text", "")
MARKS = ("loosely", "file", "quoted from", "not run")
PAGE_MARKS = ("ranks", "after")
SECONDS = 180


class PageError(AssertionError):
    """A page is not what it says, or not a page that can be read."""


# ---- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One fenced block: the line of its first line of text, its language, its text, and the marks in front of it.

    `ranks`: on how many it runs, 0 where the page does not say. `output`: the block that says what it prints.
    """

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)
    ranks: int = 0
    output: Block | None = None

    @property
    def place(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    def error(self, what: str) -> PageError:
        return PageError(f"{self.place}: {what}")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page that are to run or to be checked, each with its output; notations are left out."""
    found = list(_fenced(page))
    texts = {i for i, (block, _) in enumerate(found) if block.language in ("text", "")}
    outputs = {i - 1: found[i][0] for i in texts if i and found[i][1] and i - 1 not in texts}
    return [
        Block(b.page, b.line, b.language, b.text, b.marks, b.ranks, outputs.get(i))
        for i, (b, _) in enumerate(found)
        if i not in texts or "quoted from" in b.marks
    ]


_FENCE = re.compile(r"( *)(`{3,})([\w-]*)(.*)")
_COMMENT = re.compile(r"\s*<!-- ([\w ]+?)(?:: (.+?))? -->\s*")


def _fenced(page: Path) -> Iterator[tuple[Block, bool]]:
    """Each fenced block, and whether it stands right behind another: nothing but marks between."""
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    marks: dict[str, str] = {}
    ranks, behind = 0, False
    for number, line in lines:
        comment, fence = _COMMENT.fullmatch(line), _FENCE.fullmatch(line)
        if comment:
            name, value = comment[1], comment[2] or ""
            if name not in MARKS + PAGE_MARKS:
                known = ", ".join(MARKS + PAGE_MARKS)
                raise PageError(f"{name_of(page)}:{number}: {name!r} is no mark; use one of {known}")
            ranks = int(value) if name == "ranks" else ranks
            marks |= {name: value} if name in MARKS else {}
        elif fence:
            text = _until(fence[2], fence[1], lines, f"{name_of(page)}:{number}")
            block = Block(page, number + 1, fence[3], text, marks, ranks)
            if block.language not in LANGUAGES or fence[4].strip():
                raise block.error(f"a fence says {line.strip()!r}; use python, bash or text")
            yield block, behind
            marks, behind = {}, True
        elif line.strip():
            if marks:
                raise PageError(f"{name_of(page)}:{number}: {', '.join(marks)} stands in front of no block")
            behind = False


def _until(fence: str, indent: str, lines: Iterator[tuple[int, str]], place: str) -> str:
    text = []
    for _, line in lines:
        if line.strip() == fence:
            return "".join(f"{one.removeprefix(indent)}\n" for one in text)
        text.append(line)
    raise PageError(f"{place}: this fence is never closed")


def pages_before(page: Path) -> list[Path]:
    """The pages in whose namespace this one goes on, the first first."""
    found = re.search(r"(?m)^<!-- after: (.+) -->$", page.read_text(encoding="utf-8"))
    if not found:
        return []
    before = page.parent / found[1]
    return [*pages_before(before), before]


# ---- running ----------------------------------------------------------------------------------


class Page:
    """A page while it runs: its namespace, the files it has written, the simulated ranks it is on.

        with Page(path, folder) as page:
            page.run_all()
    """

    def __init__(self, path: Path, folder: Path):
        self.path, self.folder = path, folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.mode: LocalTensorMode | None = None
        self.on = 0
        self._ranks = contextlib.ExitStack()
        self._count = 0
        self._accepted: list[tuple[Block, str]] = []

    def __enter__(self) -> Page:
        torch.manual_seed(0)
        spmd.set_rng_state(None)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._ranks.__exit__(*exc)
        for output, printed in reversed(self._accepted):
            lines = output.page.read_text(encoding="utf-8").splitlines(keepends=True)
            lines[output.line - 1 : output.line - 1 + output.text.count("\n")] = printed
            output.page.write_text("".join(lines), encoding="utf-8")

    def run_all(self) -> None:
        """Every block of the page, in order, behind those of the pages that it follows."""
        for path in (*pages_before(self.path), self.path):
            for block in blocks_of(path):
                self.run(block)

    def run(self, block: Block) -> None:
        """Run or check a block. PageError says where the page is wrong."""
        self._enter_ranks(block.ranks)
        if "not run" in block.marks:
            return
        if "quoted from" in block.marks:
            _check_quoted(block)
        elif "file" in block.marks:
            (self.folder / block.marks["file"]).write_text(block.text, encoding="utf-8")
        elif block.language == "bash":
            self._bash(block)
        elif ">>> " in block.text:
            self._doctest(block)
        else:
            self._compare(block, self._python(block))

    def _enter_ranks(self, ranks: int) -> None:
        if ranks == self.on:
            return
        self._ranks.close()
        self.on = ranks
        self.mode = self._ranks.enter_context(LocalTensorMode(ranks)) if ranks else None

    def _python(self, block: Block) -> str:
        """What a block prints; lines in its errors and reports are counted from the block's own first."""
        out = io.StringIO()
        name = str(self.folder / str(self._count) / "example.py")
        self._count += 1
        linecache.cache[name] = len(block.text), None, block.text.splitlines(keepends=True), name
        self.names["print"] = _printer(out) if self.on else print
        try:
            with contextlib.redirect_stdout(out):
                exec(compile(block.text, name, "exec", dont_inherit=True), self.names)
        except Exception as error:
            last = f"{type(error).__name__}: {error}"
            if block.output is None or last.split(": ")[0] + ": " not in block.output.text:
                raise block.error(f"{last}\n{traceback.format_exc()}") from error
            out.write(last + "\n")
        return out.getvalue()

    def _doctest(self, block: Block) -> None:
        test = doctest.DocTestParser().get_doctest(block.text, self.names, block.place, str(block.page), block.line - 1)
        out = io.StringIO()
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(test, out=out.write, clear_globs=False)
        self.names.update(test.globs)
        if runner.failures:
            raise block.error(out.getvalue())

    def _bash(self, block: Block) -> None:
        files = {path.name for path in self.folder.iterdir()}
        for command in commands(block.text):
            problem = check_command(command, ROOT, files)
            if problem:
                raise block.error(f"{' '.join(command)}: {problem}")
        if block.output is not None:
            self._compare(block, run_bash(block.text, self.folder))

    def _compare(self, block: Block, printed: str) -> None:
        said = block.output or Block(block.page, 0, "text", "")
        if matches(said.text, printed, "loosely" in said.marks):
            return
        if "EXPECTTEST_ACCEPT" in os.environ and said.line and not said.marks and "...\n" not in said.text:
            self._accepted.append((said, printed))
            return
        raise block.error(f"this is printed:\n{printed}\nand this is on the page:\n{said.text or 'nothing'}")


def run_bash(text: str, folder: Path) -> str:
    """What commands print to stdout, run where the files of the page are."""
    done = subprocess.run(
        ["bash", "-euc", text], cwd=folder, env=environment(ROOT), capture_output=True, text=True, timeout=SECONDS
    )
    if done.returncode:
        raise PageError(f"{text}ends with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _printer(out: io.StringIO):
    """`print` of rank 0, for a page whose code plays all ranks."""

    def print_of_rank_0(*values: Any, **options: Any) -> None:
        print(*map(_on_rank_0, values), **{"file": out, **options})

    return print_of_rank_0


def _on_rank_0(value: Any) -> Any:
    if type(value) is LocalTensor:
        return value.local[0]
    if type(value) is DTensor and type(value._local_tensor) is LocalTensor:
        return repr(value).replace(repr(value._local_tensor.detach()), repr(value._local_tensor.detach().local[0]))
    return value


# ---- comparing --------------------------------------------------------------------------------


def matches(said: str, printed: str, loosely: bool = False) -> bool:
    """Whether a page says what was printed, but for spaces at the ends of lines.

    >>> matches("a\\n...\\nd", "a\\nb\\nc\\nd"), matches("1.5 ms", "17 ms"), matches("1.5 ms", "17 ms", True)
    (True, False, True)
    """
    read = _without_numbers if loosely else (lambda line: line.rstrip())
    parts = [re.escape(read(line)) if line.strip() != "..." else None for line in said.strip("\n").splitlines()]
    pattern = "".join(r"(?:[^\n]*\n)*" if part is None else f"{part}\n" for part in parts)
    lines = "".join(f"{read(line)}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, lines) is not None


def _without_numbers(line: str) -> str:
    """The line with # for each number, and one space or rule for several: columns are as wide as their numbers.

    >>> _without_numbers("took  1,024.5 us (3%)  ━━━")
    'took # us (#%) ━'
    """
    line = re.sub(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?", "#", line)
    return re.sub(r"([━─ ])\1+", r"\1", line).rstrip()


def _check_quoted(block: Block) -> None:
    path = ROOT / block.marks["quoted from"]
    if not path.is_file():
        raise block.error(f"there is no {block.marks['quoted from']} to quote from")
    source = _spaced_once(path.read_text(encoding="utf-8"))
    for part in re.split(r"\.\.\.|\n", block.text):
        if _spaced_once(part) not in source:
            raise block.error(f"{path.name} has no {part.strip()!r}")


def _spaced_once(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
