"""Rules of the sources: which module may import which, and which may touch torch's private names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(set((ROOT / "spmd").rglob("*.py")) - set((ROOT / "spmd" / "_torch").rglob("*.py")))


def test_imports_point_down():
    """The layers of pyproject.toml hold; an import inside a function counts."""
    cli = "import sys; from importlinter.cli import lint_imports_command as lint; sys.exit(lint())"
    lint = subprocess.run([sys.executable, "-c", cli], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert lint.returncode == 0, lint.stdout + lint.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_one_package_touches_private_names_of_torch(path):
    """Names that torch may change without notice are in spmd/_torch alone, which shows what a new version may break."""
    assert private_names(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source, found",
    [
        ("import torch\ntorch._C", ["2: torch._C"]),
        ("import torch\ntorch.fx._x.y", ["2: torch.fx._x"]),
        ("import torch\nx = torch.ops._c10d_functional.all_reduce", ["2: torch.ops._c10d_functional"]),
        ("import torch._dynamo as d", ["1: torch._dynamo"]),
        ("from torch._subclasses import FakeTensorMode", ["1: torch._subclasses"]),
        ("from torch.utils import _pytree as p\np.tree_map", ["1: torch.utils._pytree"]),
        ("import torch.distributed as dist\ndist.x._get()", ["2: torch.distributed.x._get"]),
        ("from torch import Tensor\nTensor._make_subclass", ["2: torch.Tensor._make_subclass"]),
        ("import torch\ngetattr(torch, '_C')", ["2: torch._C"]),
        ("from spmd._torch import fake_mode", []),
        ("import torch\ntorch.ops.aten._to_copy.default", []),
        ("import torch\ntorch.__version__\nself._x", []),
    ],
)
def test_private_names_are_found(source, found):
    """The test above reads the syntax tree, and follows names through imports."""
    assert private_names(source) == found


def test_no_folder_of_tests_is_a_package():
    """pytest imports the files of a package under its bare name: one named `scripts` hid the project's own `scripts`
    from all tests behind it."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def private_names(source: str) -> list[str]:
    """``line: name`` for each private name of torch, at the first line that has it. aten operators are public."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [found for node in nodes for found in imported(node)]
    known = {here: name for _, here, name in imports}
    names = {(line, name) for line, _, name in imports}
    names |= {(node.lineno, full_name(node, known)) for node in nodes if isinstance(node, ast.Attribute | ast.Call)}
    first = {}
    for line, name in sorted(names):
        first.setdefault(private_part(name), line)
    return [f"{line}: {name}" for name, line in first.items() if name]


def imported(node: ast.AST) -> list[tuple[int, str, str]]:
    """(line, name in this file, full name) of everything that a statement imports."""
    if isinstance(node, ast.Import):
        return [(node.lineno, alias.asname or alias.name, alias.name) for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [(node.lineno, alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
    return []


def full_name(node: ast.expr, known: dict[str, str]) -> str:
    """The full name that an expression such as ``dist.x._get`` stands for; empty if it stands for a value."""
    match node:
        case ast.Name(name):
            return known.get(name, "torch" if name == "torch" else "")
        case ast.Attribute(value, name) | ast.Call(ast.Name("getattr"), [value, ast.Constant(str(name)), *_]):
            before = full_name(value, known)
            return before and f"{before}.{name}"
    return ""


def private_part(name: str) -> str:
    """``torch.a._b`` of ``torch.a._b.c``; empty if nothing in it is private to torch."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[:3] == ["torch", "ops", "aten"]:
        return ""
    private = [at for at, part in enumerate(parts) if part.startswith("_") and not part.endswith("__")]
    return ".".join(parts[: private[0] + 1]) if private else ""
