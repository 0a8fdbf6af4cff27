"""The tutorial builds what it says: its code runs, prints what the pages say, and trains as one device does."""

from __future__ import annotations

import ast
import io
import itertools
import random
import re
import runpy
import tokenize
from types import SimpleNamespace

import pytest
import torch

from tests.docs.blocks import ROOT, Page, blocks_of

TUTORIAL = ROOT / "docs" / "tutorial"
CHAPTERS = sorted(TUTORIAL.glob("[1-9]_*.md"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The names of all chapters, which run in one namespace; each block prints what its page says."""
    with Page(TUTORIAL, tmp_path_factory.mktemp("tutorial")) as run:
        for chapter in CHAPTERS:
            for block in blocks_of(chapter):
                run.run(block)
        return SimpleNamespace(**run.names)


def test_all_chapters_are_there_and_end_alike(small):
    assert [chapter.name[0] for chapter in CHAPTERS] == list("12345")
    for chapter in CHAPTERS:
        headings = [line for line in chapter.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
        assert headings[-1] == "## Where the real one differs", chapter.name


# ---- chapter 1 --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 5, 8, 9])
def test_blocks_are_those_of_torch_chunk(small, size, n):
    x = torch.arange(size)
    blocks = [small.cut(x, 0, n, i).tolist() for i in range(n)]
    chunks = [chunk.tolist() for chunk in x.chunk(n)]
    assert blocks == chunks + [[]] * (n - len(chunks))


@pytest.mark.parametrize(
    "text", ["f32[]", "f64[] +sum@dp", "f64[8@dp, 6@tp]", "f32[5@dp,tp, 6]", "f64[3] +sum@dp +sum@tp"]
)
def test_a_spec_prints_as_it_is_read(small, text):
    assert str(small.parse(text, small.mesh)) == text


@pytest.mark.parametrize("text", ["f64[8@pp]", "f64[8@tp,dp]", "f64[8@dp, 6@dp]", "f64[8@dp] +sum@dp"])
def test_what_is_no_layout_is_refused(small, text):
    with pytest.raises(AssertionError, match="is no layout on the axes"):
        small.parse(text, small.mesh)


def test_join_refuses_what_split_does_not_make(small):
    a = torch.ones(2)
    with pytest.raises(AssertionError, match="ranks differ"):
        small.join([a, 2 * a], small.Replicate())
    with pytest.raises(AssertionError, match="blocks of these sizes"):
        small.join([torch.ones(1), a], small.Shard(0))
    with pytest.raises(AssertionError, match="blocks of these sizes"):
        small.join([a, torch.ones(1)], small.Partial())


# ---- chapter 2 --------------------------------------------------------------------------------

WRONG = {
    "a law for what is not linear": ("relu", "b a -> b a", ("p -> p",)),
    "a sum that is no sum": ("cumsum", "b a -> a", ()),
    "a dim that has to be whole": ("cumsum", "b a -> b a", ()),
    "dims the wrong way round": ("t", "b a -> b a", ()),
    "a replicated term": ("exp", "b a -> b a", ("r -> p",)),
}


@pytest.mark.parametrize("op, equation, laws", WRONG.values(), ids=WRONG)
def test_the_oracle_finds_rules_that_are_wrong(small, op, equation, laws):
    args = (small.normal(5, 3), 0) if op == "cumsum" else (small.normal(5, 3),)
    rows = small.rows(small.Rule(equation, laws))
    assert not all(small.holds((row,), small.line, getattr(small.aten, op), *args) for row in rows)


def test_each_row_of_the_book_holds_on_meshes_of_one_to_three_axes(small):
    for sizes in ((2,), (4,), (2, 2, 2)):
        mesh = small.Mesh(tuple("xyz"[: len(sizes)]), sizes)
        for op, *args in small.samples:
            rows = small.rows(small.book[op](*args))
            choices = list(itertools.product(rows, repeat=len(sizes)))
            for chosen in random.Random(0).sample(choices, min(len(choices), 40)):
                assert small.holds(chosen, mesh, op, *args), (sizes, op, list(map(str, chosen)))


# ---- chapters 3 and 4 -------------------------------------------------------------------------


def test_an_op_without_a_rule_sees_whole_tensors(small):
    lowering = small.lower(small.aten.cumsum, small.parse("f64[8@dp, 6] +sum@tp", small.mesh), 0)
    assert str(lowering) == "f64[8, 6] -> f64[8, 6]"


def test_no_plan_makes_a_partial(small):
    with pytest.raises(ValueError, match="nothing is made partial"):
        small.plan(small.parse("f64[8]", small.mesh), small.parse("f64[8] +sum@dp", small.mesh))


@pytest.mark.parametrize("kind", ["slice", "all_gather", "all_to_all", "reduce_scatter", "all_reduce"])
def test_each_move_keeps_the_tensor(small, kind):
    x = small.normal(7, 3)
    placements = small.Replicate(), small.Shard(0), small.Shard(1), small.Partial()
    for n, src, dst in itertools.product([1, 2, 4], placements, placements[:3]):
        move = small.Move(0, src, dst)
        if src != dst and move.name == kind:
            spec = small.Spec(small.Mesh(("x",), (n,)), (7, 3), (src,), torch.float64)
            assert small.same(small.gather(move.run(small.scatter(x, spec)), move.after(spec)), x)


# ---- chapter 5 --------------------------------------------------------------------------------

LAYOUTS = {
    "replicated": ["6, H", "1, H", "H, 3", "B, 6", "B, 3"],
    "data": ["6, H", "1, H", "H, 3", "B@dp, 6", "B@dp, 3"],
    "tensor": ["6, H@tp", "1, H@tp", "H@tp, 3", "B, 6", "B, 3"],
    "both": ["6, H@tp", "1, H@tp", "H@tp, 3", "B@dp, 6", "B@dp, 3"],
    "sharded": ["6@dp, H", "1, H@dp", "H@dp, 3", "B@dp, 6", "B@dp, 3"],
    "sharded and tensor": ["6@dp, H@tp", "1, H@dp,tp", "H@dp,tp, 3", "B@dp, 6", "B@dp, 3"],
    "odd": ["6, H@dp", "1@tp, H", "H, 3@dp", "B, 6@tp", "B@dp,tp, 3"],
}
MESHES = {"2": (2, 1), "4": (4, 1), "1x4": (1, 4), "2x2": (2, 2)}
SIZES = {"even": (8, 12), "uneven": (7, 5), "empty": (5, 3)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_the_compiled_step_is_one_device(small, sizes, layout):
    """Losses and parameters, after each of three steps."""
    mesh = small.Mesh(("dp", "tp"), sizes)
    for batch, hidden in SIZES.values():
        texts = [f"f64[{dims}]".replace("B", str(batch)).replace("H", str(hidden)) for dims in layout]
        assert small.greatest_difference(mesh, texts) <= 1e-12, texts


@pytest.mark.parametrize("n", [2, 4])
def test_the_compiled_step_is_one_device_on_a_mesh_of_one_axis(small, n):
    mesh = small.Mesh(("dp",), (n,))
    texts = ["f64[6, 10]", "f64[1, 10]", "f64[10, 3]", "f64[7@dp, 6]", "f64[7@dp, 3]"]
    assert small.greatest_difference(mesh, texts) <= 1e-12


def test_training_on_shards_reduces_gradients_into_them(small):
    """What the last chapter says of ZeRO: weights are gathered, gradients reduced into shards, and the loss."""
    program = small.expand(small.train_step, small.line_of_4, small.sharded)
    moves = [line.code.name for line in program.lines if isinstance(line.code, small.Move)]
    assert [moves.count(kind) for kind in ("reduce_scatter", "all_gather", "all_reduce")] == [3, 4, 1]


def test_the_files_of_the_real_one_are_there():
    """Named in full, or by the end of their path."""
    files = [f"/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "spmd").rglob("*.py")]
    for chapter in CHAPTERS:
        for name in re.findall(r"`((?:\w+/)*\w+\.py)`", chapter.read_text(encoding="utf-8")):
            assert any(file.endswith(f"/{name}") for file in files), f"{chapter.name}: {name}"


# ---- its size ---------------------------------------------------------------------------------


def test_it_is_small_and_stands_alone():
    """Without blank lines, comments and docstrings; and of torch and the standard library only."""
    codes = ["".join(b.text for b in blocks_of(page) if b.language == "python") for page in CHAPTERS]
    assert sum(map(lines_of_code, codes)) <= 450
    imported = {name.split(".")[0] for code in codes for name in imports(code)}
    assert imported <= {"dataclasses", "heapq", "itertools", "math", "re", "torch", "typing"}


def lines_of_code(code: str) -> int:
    """
    >>> lines_of_code('def f():\\n    "What for."\\n\\n    return 1  # why\\n')
    2
    """
    expressions = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Expr)]
    texts = [e for e in expressions if isinstance(e.value, ast.Constant) and isinstance(e.value.value, str)]
    docstrings = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(code).readline) if t.type not in blank]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - docstrings)


def imports(code: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(code)))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return plain + [node.module for node in nodes if isinstance(node, ast.ImportFrom)]


def test_the_first_chapters_can_be_played_with(capsys):
    play = runpy.run_path(str(TUTORIAL / "play.py"))
    names = {"__name__": "played"}
    play["play"](play["CHAPTERS"][:1], names)
    assert capsys.readouterr().out.startswith("[(0, 0), (0, 1), (1, 0), (1, 1)]\n")
    assert names["mesh"].sizes == (2, 2)
