"""Is it true what a program says of its alternatives? Each that `explain` names is pinned, and the program made of it.

    python benchmarks/explain.py                     # the models of choose.py, by op and for the program: long
    python benchmarks/explain.py --only gpt --plans "dp x tp" --choose program --options 3

Asked is each model for a linear layer of all its blocks, by a pattern of paths, and for a line of the code that makes a
value. Of each alternative the best options, and the pin to where the value lies, are given to `spmd.compile` as
they are printed: the cost in sum, the time of a step, the bytes and the number of collectives have to be those that
were said. Nothing is run. The table has the next best of each value; "better" counts the values that have an option
which costs less in sum, and makes no step longer. Exits 1 if anything was said that is not so.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _table import table
from choose import CASES, MESHES, PLANNED, Row, cases, plans, row_of

import spmd
from spmd.expand.explain.explanation import Alternative, Option
from spmd.expand.origins import SITES
from spmd.expand.pins import sites_of

LINEAR = re.compile(r"(^|\.)(up|c_fc|fc1|q_proj|up_proj|wi|dense|b)$")
"""Layers of the models, by the end of their path: the first that is there is asked for."""


def program_of(row: Row, choose: str, **more: dict) -> spmd.Program:
    """The program of a row with more pins, which come first."""
    said = {**row.said, **{k: {**v, **row.said.get(k, {})} for k, v in more.items()}}
    step = spmd.compile(row.step, row.mesh, choose=choose, bucket_mb=None, **said)
    return step.program_for(row.model, row.optimizer, row.x, row.y)


def asked(row: Row, program: spmd.Program) -> Iterator[str]:
    """A pattern of a layer, and a line: of the model, if its code is the user's, else of the step."""
    path = next(name for name, _ in row.model.named_modules() if LINEAR.search(name))
    yield re.sub(r"\.\d+\.", ".*.", path)
    lines = [str(site.line) for _, site in sites_of(program.reasons.given.graph, SITES) if site.line is not None]
    yield from sorted(set(lines), key=lambda line: (line.startswith("choose.py"), lines.index(line)))[:1]


def wrong(row: Row, choose: str, program: spmd.Program, option: Option) -> str:
    """What is not as an option says, if it is done as it says; empty if nothing."""
    argument = option.said.partition("=")[0]
    given = {axis: p for axis, p in option.placements.items() if p != spmd.Replicate()}
    if option.said != f"{argument}={ {option.key: given} }":
        return f"it prints {option.said}"
    other = program_of(row, choose, **{argument: {option.key: given}})
    price = program.reasons.way.price(other)
    return "" if price.is_like(option.price) else f"{option.said}: {price} for {option.price}"


def rows_of(row: Row, model: str, plan: str, choose: str, options: int) -> Iterator[tuple[list[str], list[str]]]:
    """The cells of each value that is asked for, and what was said of it that is not so."""
    program = program_of(row, choose)
    for of in asked(row, program):
        for found in program.explain(of).alternatives:
            tried = [*found.options[:options], *([found.stays] if found.stays else [])]
            untrue = [text for option in tried if (text := wrong(row, choose, program, option))]
            yield cells(found, model, plan, choose, len(tried)), untrue


def cells(found: Alternative, model: str, plan: str, choose: str, tried: int) -> list[str]:
    best = found.next_best
    better = sum(option.worse < -1e-6 for option in found.options)
    said = [f"{best.rise:,.1f}", f"{best.longer:,.1f}", f"{best.price.nbytes / 1e6:.3f}", str(best.price.collectives)]
    return [model, plan, choose, found.value, *said, "yes" if found.stays else "", str(better), str(tried)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these models")
    parser.add_argument("--plans", nargs="+", default=["nothing", "dp x tp", "zero 3"], help="these plans")
    parser.add_argument("--choose", nargs="+", choices=("op", "program"), default=["op", "program"])
    parser.add_argument("--mesh", choices=MESHES, default="2x2")
    parser.add_argument("--layers", type=int, default=2, help="of each model")
    parser.add_argument("--options", type=int, default=2, help="how many of each value are tried")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    every, table_rows, untrue = cases(replace(PLANNED, layers=args.layers)), [], []
    for name in args.only:
        for plan, said in plans(every[name]):
            for choose in args.choose if plan in args.plans else ():
                row = row_of(every[name], said, args.mesh)
                for found, wrongs in rows_of(row, name, plan, choose, args.options):
                    print(*found, *wrongs, sep="  ", flush=True)
                    table_rows.append(found)
                    untrue += wrongs
    print(table(["model", "plan", "chosen by", "value", "next best, us in sum", "step, us", "MB", "collectives",
                 "stays", "better", "tried"], table_rows, left=4))  # fmt: skip
    print(f"\n{sum(int(r[-1]) for r in table_rows)} options tried, {len(untrue)} not as they were said")
    return int(bool(untrue))


if __name__ == "__main__":
    sys.exit(main())
