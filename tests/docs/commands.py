"""Commands of the docs: whether a user who types them would get what the page promises, without running them."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch.distributed.run import get_args_parser

from spmd.cli import COMMANDS

Command = list[str]


def commands(text: str) -> Iterator[Command]:
    """The commands of a block, in words, without comments.

    >>> list(commands("ls -l  # all\\nA=1 torchrun \\\\\\n  x.py"))
    [['ls', '-l'], ['A=1', 'torchrun', 'x.py']]
    """
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def check_command(words: Command, root: Path, files: set[str]) -> str:
    """What is wrong with a command; empty where nothing is. files: those that the page has written."""
    words = words[1:] if words[0] == "export" else words
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words:
        return ""
    name, *rest = words
    if name == "bash":
        return _check_script(rest, root)
    if name == "python":
        return _check_python(rest, root, files)
    if name == "torchrun":
        return _check_torchrun(rest, root, files)
    return f"the docs' tests do not know {name!r}; use bash, python or torchrun, or mark the block"


def _check_script(words: Command, root: Path) -> str:
    path, *rest = words
    if not (root / path).is_file():
        return f"there is no {path}"
    return _check_spmd(["demo", *rest]) if Path(path).name == "demo.sh" else ""


def _check_python(words: Command, root: Path, files: set[str]) -> str:
    if words[:2] == ["-m", "spmd"]:
        return _check_spmd(words[2:])
    path = words[0]
    return "" if path in files or (root / path).is_file() else f"there is no {path}"


def _check_torchrun(words: Command, root: Path, files: set[str]) -> str:
    problem, given = _parsed(get_args_parser(), words)
    if problem:
        return problem
    if given.module:
        return _check_python(["-m", given.training_script, *given.training_script_args], root, files)
    return _check_python([given.training_script], root, files)


def _check_spmd(words: Command) -> str:
    if not words or words[0] not in COMMANDS:
        return f"python -m spmd has the commands {', '.join(COMMANDS)}"
    parser = argparse.ArgumentParser()
    COMMANDS[words[0]].add_arguments(parser)
    return "" if words[1:] == ["--help"] else _parsed(parser, words[1:])[0]


def _parsed(parser: argparse.ArgumentParser, words: Command) -> tuple[str, argparse.Namespace]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return "", parser.parse_args(words)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1], argparse.Namespace()


def environment(root: Path) -> Mapping[str, str]:
    """What commands run in: this Python first, this spmd, the loopback, and no launcher around."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SPMD_TOPOLOGY")
    found = {name: value for name, value in os.environ.items() if name not in outer}
    path = os.pathsep.join([str(Path(sys.executable).parent), found.get("PATH", "")])
    return found | {"PATH": path, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
