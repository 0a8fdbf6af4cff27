"""The command line, ``python -m spmd``. Each command is a module, listed in ``COMMANDS``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from spmd.cli import calibrate, demo
from spmd.cli.args import UsageError
from spmd.cli.launch import JobFailed, this_rank

COMMANDS = {"calibrate": calibrate, "demo": demo}
"""Each module has ``ABOUT`` (one line of help), ``add_arguments(parser)`` and ``run(args, argv)``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``python -m spmd *argv``. Returns its exit code: 2 for input that cannot be used."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m spmd", description="One-device training steps on many ranks.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.ABOUT, description=command.ABOUT))
    args = parser.parse_args(argv)
    try:
        COMMANDS[args.command].run(args, argv)
    except (UsageError, JobFailed) as error:
        if str(error) and this_rank() == 0:
            print(f"{parser.prog} {args.command}: error: {error}", file=sys.stderr, flush=True)
        return error.code
    return 0
