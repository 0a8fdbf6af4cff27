"""What a rank runs of a program, as text: kept beside the program, so that the same rank need not bind it again.

    at: 'rank 0 of 0-3, cpu, 2 x 2'
    op0: aten.mm.default
    value1: 'ranks:0-1'
    constant2: constant('table')

    def run(w, x):
        mm = op0(x, w)
        sum_1 = op3(mm, value4, value1)
        del mm
        return (sum_1,)

The lines are those of `spmd.expand.function`, in a notation of their own: each calls one of the values above, or a
method, on variables and numbers. What else a text may have is refused before it is compiled, and Python's builtins are
not there. The code was verified when it was bound; the digest of the archive says that it is still what was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from spmd.comm import C10dTransport, transport
from spmd.expand.function import Function
from spmd.expand.given_specs import inputs_given_back, unread_inputs
from spmd.expand.kept.notation import CannotKeep, Reader, spec_text, written
from spmd.expand.loops.bound import BoundLoop
from spmd.expand.loops.loop import Loop
from spmd.expand.regions import EAGER, Backend
from spmd.mesh import DeviceMesh, groups
from spmd.tensor.spec import Spec

if TYPE_CHECKING:
    from spmd.expand.program import Program

Named = Sequence[tuple[str, Spec | None]]

_WORDS = r"[A-Za-z_]\w*"
_GIVEN = r"[\w ,=\[\])-]*(?:(?<![\w\])])\([\w ,=\[\])-]*)*"
"""Names, numbers, lists and tuples; nothing that is called."""
LINE = re.compile(
    rf"    (?:{_WORDS} = {_WORDS}(?:\.[a-z]\w*)?(?:\({_GIVEN}\))?|{_WORDS} = {_WORDS}\[[\w ]*\]|del [\w, ]+"
    rf"|return {_GIVEN})\n"
)
HEAD = re.compile(r"def run\([\w, ]*\):\n")
CONSTANT = re.compile(r"constant\('([^'\\]*)'\)")


@dataclass(frozen=True)
class RankCode:
    """The code of one rank, with what a call has to know of the program that it was bound from.

    at: the rank, as `place_of_code` says it. fingerprint: that of the program. inputs, outputs: as those of a
    `Program`. unread: the places of the inputs that the program does not read. kept: the places of the outputs that
    are inputs. function: what runs.
    """

    at: str
    fingerprint: str
    inputs: Named
    outputs: Named
    unread: frozenset[int]
    kept: frozenset[int]
    function: Function

    @classmethod
    def of(cls, at: str, program: Program, function: Function) -> RankCode:
        """The code that was bound of a program."""
        unread, kept = unread_inputs(program.graph), inputs_given_back(program.graph)
        return cls(at, program.fingerprint, program.inputs, program.outputs, unread, kept, function)

    @cached_property
    def text(self) -> str:
        """The code as text. CannotKeep for code with something that another process could not find."""
        about = {
            "at": self.at, "fingerprint": self.fingerprint, "inputs": _named(self.inputs),
            "outputs": _named(self.outputs), "unread": sorted(self.unread), "kept": sorted(self.kept),
        }  # fmt: skip
        return f"{json.dumps(about)}\n{_function_text(self.function)}"


def _function_text(function: Function) -> str:
    """What the lines of a function name, a line each, and its lines."""
    body = f"{function.text}\n"
    if not _is_plain(body):
        raise CannotKeep("the code of this rank has a line that its notation has not")
    return "".join([*[f"{name}: {_value_text(function, name, x)}\n" for name, x in function.names.items()], "\n", body])


def _value_text(function: Function, name: str, x: Any) -> str:
    if name in function.constants:
        return f"constant({function.constants[name]!r})"
    if isinstance(x, str) and x.startswith(groups.PREFIX) and groups.OWN in x:
        raise CannotKeep(f"the group {x} is one of a thread's own")
    if isinstance(x, BoundLoop):
        if x.code.constants:
            raise CannotKeep("the body of a loop has a constant of its own")
        return f"loop{written((*x.loop.counts, _function_text(x.code)))}"
    return written(x)


def place_of_code(mesh: DeviceMesh, backend: Backend) -> str | None:
    """What the code of this rank depends on beside the program; None where it is not kept: where ranks are simulated or
    listened to, and where a compiler makes it."""
    coordinate = mesh.get_coordinate() if type(transport()) is C10dTransport and backend == EAGER else None
    if coordinate is None:
        return None
    ranks = groups.name_of(tuple(mesh.ranks))
    return f"{mesh.device_type}, {coordinate} of {dict(zip(mesh.axis_names, mesh.shape, strict=True))}, {ranks}"


def read_code(text: str, at: str, constants: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> RankCode | None:
    """The code of a text; None where it is for another rank, or on other ranks. ValueError for other text."""
    first, _, rest = text.partition("\n")
    about = json.loads(first)
    if about["at"] != at:
        return None
    reader = Reader(mesh)
    inputs, outputs = (_read_named(about[name], reader) for name in ("inputs", "outputs"))
    function = _read_function(rest, constants, reader)
    unread, kept = frozenset(about["unread"]), frozenset(about["kept"])
    return RankCode(at, about["fingerprint"], inputs, outputs, unread, kept, function)


def _read_function(text: str, constants: Mapping[str, torch.Tensor], reader: Reader) -> Function:
    head, _, body = text.partition("\n\n")
    if not _is_plain(body):
        raise ValueError("the code of a rank has a line that its notation has not")
    names, of_module = {"__builtins__": {}}, {}
    for line in head.splitlines():
        name, _, value = line.partition(": ")
        if found := CONSTANT.fullmatch(value):
            of_module[name] = found[1]
            names[name] = constants[found[1]]
            continue
        if value.startswith("loop("):
            *counts, inner = reader.value(value.removeprefix("loop"))
            names[name] = BoundLoop(Loop(None, *counts), kept=_read_function(inner, constants, reader))
            continue
        names[name] = x = reader.value(value)
        if isinstance(x, str) and x.startswith(groups.PREFIX):
            names[name] = groups.registered(x)
    return Function(body, names, of_module)


def _is_plain(body: str) -> bool:
    """Whether all lines are of the notation."""
    head = HEAD.match(body)
    at = head.end() if head else -1
    while 0 <= at < len(body):
        found = LINE.match(body, at)
        at = found.end() if found else -1
    return at == len(body)


def _named(named: Named) -> list[list[str | None]]:
    return [[name, None if spec is None else spec_text(spec)] for name, spec in named]


def _read_named(said: list[list[str | None]], reader: Reader) -> tuple[tuple[str, Spec | None], ...]:
    return tuple([(name, None if text is None else reader.spec(text)) for name, text in said])


__all__ = ["RankCode", "place_of_code", "read_code"]
