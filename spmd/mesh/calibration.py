"""Files of machines: writes the machine that a calibration measured as JSON, and reads it again.

    >>> import pathlib, tempfile
    >>> from spmd.mesh.presets import TEXTBOOK
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "machine.json"
    >>> save(TEXTBOOK, path)
    >>> load(path) == TEXTBOOK
    True

A file looks like this. `ways` gives the times of any group, `measured` those of groups that were timed, and
`local_ops` those of what a rank computes.
`nics_per_host`, `ranks_per_host`, `memory`, `compute`, `host`, `protocol`, `measured`, `local_ops`, `us_per_byte`,
`sharing` and `residual` may be left out. The fields are those of `machine.py`, in microseconds and 1e9 bytes a second.

    {"spmd_topology": 1, "name": "node 17", "nics_per_host": 8, "ranks_per_host": 8,
     "memory": {"hop_us": 2.0, "gb_per_s": 866.6},
     "compute": {"gb_per_s": 1733.2, "gflop_per_s": [["bfloat16", 312000.0], ["float32", 19500.0]]},
     "host": {"hop_us": 5.0, "gb_per_s": 27.2},
     "ways": [{"algorithm": "ring", "protocol": "LL", "base_us": 6.6,
               "links": [{"hop_us": 0.6, "gb_per_s": 87.7}, {"hop_us": 2.7, "gb_per_s": 19.3}]}],
     "measured": [{"collective": "all_reduce", "ranks_per_host": 8, "hosts": 1, "sharing": 1, "residual": 0.04,
                   "lines": [[25.0, 0.0], [18.0, 1e-5]]}],
     "local_ops": [{"kind": "pointwise", "dtype": "float32", "lines": [[2.0, 0.0], [1.5, 1e-4]]},
                   {"kind": "product", "dtype": "float32", "lines": [[2.0, 1e-5]], "us_per_byte": 1e-4}]}

`$SPMD_TOPOLOGY` names such a file, or a preset.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

from spmd.mesh.machine import Compute, Link, LocalOp, Machine, Measured, Way
from spmd.mesh.presets import PRESETS, TEXTBOOK

VARIABLE = "SPMD_TOPOLOGY"
VERSION = 1


def machine_from_environment() -> Machine:
    """The machine that $SPMD_TOPOLOGY names, as a preset or a file; the textbook where it is unset."""
    said = os.environ.get(VARIABLE)
    return machine_named(said, f"${VARIABLE}") if said else TEXTBOOK


def machine_named(name: str, source: str = "topology") -> Machine:
    """A preset by its name, or the machine in a file. `source`: where the name comes from, for the error.

    >>> machine_named("hopper").name
    'hopper'
    """
    if name in PRESETS:
        return PRESETS[name]
    if not Path(name).is_file():
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{source} is {name!r}, which is no file and none of {', '.join(PRESETS)}.{hint}")
    return load(name)


def save(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Write a machine as JSON; another process sees all of the file or none."""
    beside = Path(f"{os.fspath(path)}.{os.getpid()}.part")
    beside.write_text(json.dumps({"spmd_topology": VERSION, **asdict(machine)}, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def load(path: str | os.PathLike[str]) -> Machine:
    """The machine in a file that `save`, or a person, wrote. ValueError names the mistake in the file."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        _expect(isinstance(content, dict), content, "the file", "an object")
        version = content.pop("spmd_topology", None)
        _expect(version == VERSION, version, "spmd_topology", f"{VERSION}, the version of the form")
        return _value(Machine, content, "the machine")
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}. The docs of spmd.mesh.calibration show the form.") from None


def _value(kind: type, content: Any, where: str) -> Any:
    """An object in the file as a value of the dataclass `kind`, whose fields it has."""
    known = [field.name for field in fields(kind)]
    _expect(isinstance(content, dict), content, where, f"an object with {', '.join(known)}")
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in content]
    unknown = [name for name in content if name not in known]
    if missing or unknown:
        wrong = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}, which is unknown"
        raise ValueError(f"{where} {wrong}; its fields are {', '.join(known)}")
    return kind(**{name: _READ[name](value, name) for name, value in content.items()})


def _expect(holds: bool, content: Any, where: str, what: str) -> None:
    if not holds:
        raise ValueError(f"{where} is {content!r:.80}; it must be {what}")


def _text(content: Any, where: str) -> str:
    _expect(isinstance(content, str), content, where, "a text")
    return content


def _number(content: Any, where: str) -> float:
    _expect(isinstance(content, (int, float)) and not isinstance(content, bool), content, where, "a number")
    return content


def _count(content: Any, where: str) -> int:
    _expect(isinstance(content, int) and not isinstance(content, bool), content, where, "an integer")
    return content


def _count_or_none(content: Any, where: str) -> int | None:
    return None if content is None else _count(content, where)


def _line(content: Any, where: str) -> tuple[float, float]:
    _expect(isinstance(content, list) and len(content) == 2, content, where, "[us, us_per_byte]")
    return _number(content[0], where), _number(content[1], where)


def _rate(content: Any, where: str) -> tuple[str, float]:
    _expect(isinstance(content, list) and len(content) == 2, content, where, "[dtype, gflop_per_s]")
    return _text(content[0], where), _number(content[1], where)


def _list_of(read: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple]:
    def items(content: Any, where: str) -> tuple:
        _expect(isinstance(content, list), content, where, "a list")
        return tuple(read(item, f"{where}[{i}]") for i, item in enumerate(content))

    return items


_READ: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("algorithm", "collective", "dtype", "kind", "name", "protocol"), _text),
    **dict.fromkeys(("base_us", "gb_per_s", "hop_us", "residual", "us_per_byte"), _number),
    **dict.fromkeys(("hosts", "sharing"), _count),
    **dict.fromkeys(("nics_per_host", "ranks_per_host"), _count_or_none),
    "compute": lambda content, name: None if content is None else _value(Compute, content, name),
    "gflop_per_s": _list_of(_rate),
    "lines": _list_of(_line),
    "links": _list_of(partial(_value, Link)),
    "local_ops": _list_of(partial(_value, LocalOp)),
    "measured": _list_of(partial(_value, Measured)),
    **dict.fromkeys(("host", "memory"), lambda content, name: None if content is None else _value(Link, content, name)),
    "ways": _list_of(partial(_value, Way)),
}
