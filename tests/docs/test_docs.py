"""The README and the pages under docs/ tell the truth: their code runs, and prints what they say."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from scripts import picture
from tests.docs.blocks import ROOT, Page, PageError, blocks_of, matches, name_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
names = pytest.mark.parametrize("page", PAGES, ids=name_of)

FOLDERS = dict.fromkeys(("spmd", "tests", "benchmarks", "docs", "examples", "scripts"), "**/*") | {".": "*"}
FILE = re.compile(r"`((?:spmd|tests|benchmarks|docs|examples|scripts)/[\w./-]*|[\w./-]+\.(?:py|md|sh|toml))`")
"""Paths in backquotes."""

NOT_RUN: dict[str, list[str]] = {}
"""By page, why its blocks marked `not run` cannot run. There should be next to none."""


@names
def test_a_page_does_what_it_says(page, tmp_path, monkeypatch):
    """Every block of code, in order, in one namespace."""
    for name in ("SPMD_TOPOLOGY", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with Page(page, tmp_path) as running:
        running.run_all()


def test_blocks_that_do_not_run_are_listed():
    reasons = {name_of(page): [b.marks["not run"] for b in blocks_of(page) if "not run" in b.marks] for page in PAGES}
    assert {page: why for page, why in reasons.items() if why} == NOT_RUN


@names
def test_links_lead_somewhere(page):
    """Links to files and to headings of them; addresses of the web are not asked."""
    text = _without_code(page)
    for link in re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text):
        path, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{name_of(page)}: {link}"
        assert not heading or heading in _headings(target), f"{name_of(page)}: {link}"


@names
def test_a_page_is_of_no_one_machine(page):
    assert re.findall(r"(?:/home|/root|/work|/tmp|/usr)/\S*", page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_that_are_named_are_there(folder):
    """Paths of modules, tests and pages, in pages and in comments: the whole of a path, or its end."""
    missing = {}
    for path in sorted(p for p in (ROOT / folder).glob(FOLDERS[folder]) if p.suffix in (".md", ".py", ".sh")):
        named = set(FILE.findall(path.read_text(encoding="utf-8")))
        missing[name_of(path)] = sorted(name for name in named if not _ends_of_paths() & {name.rstrip("/")})
    assert {path: names for path, names in missing.items() if names} == {}


@functools.cache
def _ends_of_paths() -> set[str]:
    """Of each file and folder its path, and what remains of that where folders are left out at its beginning."""
    paths = [path.relative_to(ROOT).parts for folder, files in FOLDERS.items() for path in (ROOT / folder).glob(files)]
    return {"/".join(parts[i:]) for parts in paths for i in range(len(parts))}


def test_every_page_is_in_the_index():
    """A page is linked from docs/README.md, or from the index of its own folder."""
    docs = ROOT / "docs"
    for page in sorted(docs.rglob("*.md")):
        indices = {docs / "README.md", page.parent / "README.md"} - {page}
        linked = {
            (index.parent / link).resolve()
            for index in indices
            if index.exists()
            for link in re.findall(r"\]\(([^)#]+)", index.read_text(encoding="utf-8"))
        }
        assert page == docs / "README.md" or {page, page.parent} & linked, f"{name_of(page)} is in no index"


def test_the_picture_is_of_the_program_as_it_is_now():
    """Else: python scripts/picture.py"""
    assert (ROOT / "docs" / "picture.svg").read_text(encoding="utf-8") == picture.draw()


def _without_code(page: Path) -> str:
    return re.sub(r"(?ms)^ *```.*?^ *```|`[^`\n]*`", "", page.read_text(encoding="utf-8"))


def _headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.+)$", _without_code(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# ---- the harness itself -----------------------------------------------------------------------


def play(tmp_path: Path, text: str) -> None:
    path = tmp_path / "page.md"
    path.write_text(text, encoding="utf-8")
    with Page(path, tmp_path) as page:
        page.run_all()


RIGHT = {
    "one namespace": "```python\nx = 1\n```\nthen\n```python\nprint(x)\n```\n```text\n1\n```",
    "errors": "```python\nprint(1)\n[].pop()\n```\n\n```text\n1\nIndexError: pop from empty list\n```",
    "doctest": "```python\n>>> 1 + 1\n2\n```",
    "notation": "```text\nanything\n```\nand\n```\nmore\n```",
    "parts": "```python\nfor i in range(9):\n    print(i)\n```\n```text\n0\n...\n8\n```",
    "loosely": "```python\nprint('3.5 ms')\n```\n<!-- loosely -->\n```text\n1,200 ms\n```",
    "ranks": "<!-- ranks: 4 -->\n```python\nfrom spmd.comm import all_reduce\nimport torch\n"
    "print(all_reduce(torch.ones(1), 'sum', [0, 1, 2, 3]) + 0)\n```\n```text\ntensor([4.])\n```",
    "file": "<!-- file: a.py -->\n```python\nprint('hi')\n```\n```bash\npython a.py\n```\n```text\nhi\n```",
    "checked": "```bash\nbash scripts/demo.sh --mesh 1x4\ntorchrun --nproc-per-node 4 -m spmd demo\n```",
    "quoted": "<!-- quoted from: pyproject.toml -->\n```text\n[build-system]\nrequires = ...\n```",
    "not run": "<!-- not run: it is of another world -->\n```python\nimport nothing_of_this_name\n```",
}

WRONG = {
    "output": ("```python\nprint(1)\n```\n```text\n2\n```", "page.md:2: this is printed:\n1\n"),
    "no output": ("```python\nprint(1)\n```", "on the page:\nnothing"),
    "error": ("```python\n\n1 / 0\n```", "page.md:2: ZeroDivisionError"),
    "language": ("```pyton\n1\n```", "page.md:2: a fence says '```pyton'; use python, bash or text"),
    "open": ("```python\n1\n", "page.md:1: this fence is never closed"),
    "mark": ("<!-- losely -->\n```text\n1\n```", "page.md:1: 'losely' is no mark"),
    "mark of nothing": ("<!-- loosely -->\nwords", "page.md:2: loosely stands in front of no block"),
    "doctest": ("```python\n>>> 1 + 1\n3\n```", r"(?s)Expected:.*3.*Got:.*2"),
    "option": ("```bash\npython -m spmd demo --mash 2x2\n```", "unrecognized arguments: --mash"),
    "command": ("```bash\npython -m spmd dance\n```", "python -m spmd has the commands"),
    "script": ("```bash\nbash scripts/nothing.sh\n```", "there is no scripts/nothing.sh"),
    "program": ("```bash\nrm -r x\n```", "do not know 'rm'"),
    "failing": ("<!-- file: a.py -->\n```python\n1 / 0\n```\n```bash\npython a.py\n```\n```\n```", "ends with 1"),
    "quote": ("<!-- quoted from: pyproject.toml -->\n```text\nno such line\n```", "toml has no 'no such line'"),
}


def test_a_page_goes_on_where_another_ends(tmp_path):
    (tmp_path / "first.md").write_text("```python\nx = 1\n```\n", encoding="utf-8")
    play(tmp_path, "<!-- after: first.md -->\n# Second\n```python\nprint(x)\n```\n```text\n1\n```\n")


def test_what_is_printed_can_be_accepted(tmp_path, monkeypatch):
    """Outputs of other lengths, one behind the other."""
    monkeypatch.setenv("EXPECTTEST_ACCEPT", "1")
    right = "```python\nprint(1)\nprint(2)\n```\n```text\n1\n2\n```\n```python\nprint(3)\n```\n```text\n3\n```\n"
    play(tmp_path, right.replace("1\n2\n```\n```python", "7\n```\n```python").replace("text\n3", "text\n3\n4\n5"))
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == right


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_pages_that_are_right(text, tmp_path):
    play(tmp_path, text)


@pytest.mark.parametrize("text, message", WRONG.values(), ids=WRONG)
def test_pages_that_are_wrong(text, message, tmp_path, monkeypatch):
    monkeypatch.delenv("EXPECTTEST_ACCEPT", raising=False)
    with pytest.raises(PageError, match=message):
        play(tmp_path, text)


@pytest.mark.parametrize(
    "said, printed, loosely, right",
    [
        ("a  \n", "a\n", False, True),
        ("a\n...\n", "a\n", False, True),
        ("...\nb\n", "a\nc\n", False, False),
        ("1.5 us\n", "1.6 us\n", False, False),
        ("loss 3.25 │   12 ms │\n", "loss 1e-05 │ 1,200 ms │\n", True, True),
        ("loss 3.25\n", "gain 3.25\n", True, False),
    ],
)
def test_outputs_are_compared(said, printed, loosely, right):
    assert matches(said, printed, loosely) is right
