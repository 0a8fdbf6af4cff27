"""The key of a saved program: everything that it was made for, as entries of text.

    torch                           2.13.0
    mesh dp                         2
    flag gradients                  True
    setting params                  {'*.up.weight': (Replicate(), Shard(0))}
    code of train                   9a1f03c2b7d1e655
    argument x                      f32[8@dp, 4]
    parameter model.up.weight       f32[8@tp, 4], requires gradient
    model.drop.p                    0.1

A capture is not needed to know it. Where a saved program has another entry, it is stale, and `differences` names what
differs.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from spmd.expand.guards import FLAGS
from spmd.expand.kept.code import code_entries, version_of_spmd
from spmd.expand.kept.described import described, digest, shortened
from spmd.expand.kept.notation import CannotKeep
from spmd.expand.sizes.saying import is_of_module

if TYPE_CHECKING:
    from spmd.expand.compile import CompiledStep

Key = dict[str, str]

MESH = "mesh "
LINKS = "links of the mesh"
MOST_NAMED = 8
"""How many differences an error names."""


def step_key(step: CompiledStep) -> Key:
    """What is known of a step before it is called: versions, mesh, flags, settings."""
    entries = {"torch": torch.__version__, "spmd": version_of_spmd()}
    entries |= {f"{MESH}{name}": str(n) for name, n in zip(step.mesh.axis_names, step.mesh.shape, strict=True)}
    topology = step.mesh.topology
    entries |= {"device": _device(step.mesh.device_type), LINKS: digest(repr((topology.layout, topology.machine)))}
    return entries | {f"setting {name}": shortened(described(x)) for name, x in vars(step.settings).items()}


def key_of_call(step: CompiledStep, call: Any) -> Key | CannotKeep:
    """The key of the program of a call, or why it has none."""
    try:
        return _key_of_call(step, call)
    except CannotKeep as error:
        return error
    except Exception as error:  # an object of the user cannot be looked into
        return CannotKeep(f"{type(error).__name__}: {error}")


def _key_of_call(step: CompiledStep, call: Any) -> Key:
    tree, flags, deterministic, arguments, constants, *layouts = call.key
    structure = shortened(_ADDRESS.sub("", tree))
    entries = step_key(step) | _flags(flags, deterministic) | {"structure of the arguments": structure}
    layout = itertools.chain(*layouts)
    entries |= {_of_slot(slot): f"{described(spec)}{', requires gradient' * wants}" for slot, spec, wants in layout}
    entries |= {f"argument {path}": shortened(described(x)) for path, x in arguments}
    for path, x in constants:
        entries |= _of_constant(path, x)
    entries["order of the modules"] = digest(*(path for path, x in constants if is_of_module(x)))
    held, known = call.state, call.search
    objects = *held.modules.values(), *held.optimizers.values()
    return entries | code_entries(step.fn, objects, (*known.functions, *known.classes))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In the text of a `defaultdict(function)`: another process has the function elsewhere."""


def _of_slot(slot: Any) -> str:
    return f"{slot.kind} {slot}"


def _of_constant(path: str, x: Any) -> Key:
    """The entries of a constant: the attributes of a module each by itself."""
    if is_of_module(x):
        return {path: described(x[0])} | {f"{path}.{name}": _of_guard(y) for name, y in x[1]}
    return {path: _of_guard(x)}


def _of_guard(x: Any) -> str:
    """The text of a guard's key; of a plain value, which has its type beside it, the value alone."""
    if isinstance(x, tuple) and len(x) == 2 and x[0] is float:
        return str(x[1])
    return shortened(described(x[1] if isinstance(x, tuple) and len(x) == 2 and type(x[1]) is x[0] else x))


def _flags(flags: tuple, deterministic: bool) -> Key:
    entries = {f"flag {name}": described(x) for name, x in zip(FLAGS, flags, strict=True) if name not in OF_THE_MACHINE}
    return entries | {"flag deterministic": str(deterministic)}


OF_THE_MACHINE = ("number of threads",)
"""Flags that differ between machines, and with which no program computes otherwise."""


@functools.lru_cache(maxsize=8)
def _device(kind: str) -> str:
    """The kind of device; of a GPU also what it can do, for torch chooses ops by it."""
    return f"{kind} {torch.cuda.get_device_capability()}" if kind == "cuda" else kind


def name_of(key: Key) -> str:
    """A name for a file that has the programs of this key."""
    return digest(*(part for entry in sorted(key.items()) for part in entry))


def differences(saved: Mapping[str, str], now: Mapping[str, str], ignoring: tuple[str, ...] = ()) -> list[str]:
    """What differs, in words, the most telling first.

    >>> differences({"torch": "2.12.0", "model.p": "0.1"}, {"torch": "2.13.0", "model.p": "0.1"})
    ["torch: '2.12.0' was saved, and here it is '2.13.0'"]
    """
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name) and not name.startswith(ignoring)]
    return [_difference(name, saved.get(name), now.get(name)) for name in names]


def _difference(name: str, saved: str | None, now: str | None) -> str:
    if name.startswith("code of ") and None not in (saved, now):
        return f"{name}: it has changed"
    if saved is None:
        return f"{name}: it is new, {now!r}"
    if now is None:
        return f"{name}: {saved!r} was saved, and here there is none"
    return f"{name}: {saved!r} was saved, and here it is {now!r}"


def named(found: list[str]) -> str:
    """Differences for an error, one a line."""
    more = [f"and {len(found) - MOST_NAMED} more"] if len(found) > MOST_NAMED else []
    return "".join(f"\n  {each}" for each in [*found[:MOST_NAMED], *more])
