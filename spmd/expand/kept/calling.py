"""How a program is called, as text, and back: what its inputs and outputs are, and which numbers it is right for.

    inputs: [Slot('parameter', 'model.up.weight', '', ''), ..., Argument(path='x'), Draws(count=2)]
    outputs: [0, Slot('parameter', 'model.up.weight', '', ''), ...]
    tree: (Leaf(), {}, []), identities: {}
    same: {2: 0}, given: {3: Argument(path='model.mask')}, views: {4: View(of=0, steps=((aten.select.int, 0, 1),))}
    names: {'n0': 'lr'}, conditions: ('n0 > 0.5',)
    kept: {'optimizer.step[model.up.weight]': (Slot(...), Slot(...))}, shared: ('optimizer.step[model.up.weight]',)
    first: (), ignores_gradients: True, stepped: ('optimizer',)
    environment: {('os.environ.get', 'DEBUG'): ('1', 'train.py:31, in step')}
    changes: [('model', (), {'ready': True}, ())]

It is what is left of a capture (`spmd.expand.captured.Captured`) when its graph has become a program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx, nn

from spmd import _torch
from spmd.expand.captured import Captured
from spmd.expand.kept import changes
from spmd.expand.kept.notation import CannotKeep, Reader, lines_of, read_lines
from spmd.expand.kept.trees import as_tree, as_value
from spmd.expand.state import Slot
from spmd.mesh import DeviceMesh

FIELDS = (
    "inputs", "outputs", "leaves", "identities", "same", "given", "detached", "views", "fixed", "kept", "shared",
    "first", "ignores_gradients", "stepped", "first_kept", "environment",
    "new_options",
)  # fmt: skip


def calling_text(captured: Captured, modules: Mapping[str, nn.Module]) -> str:
    """What a call has to know of the program of a capture. modules: those that the step is given, by path."""
    if captured.writes:
        raise CannotKeep(f"the step changes {captured.writes[0].path}, a Python value outside of modules")
    conditions = _torch.Conditions.of(captured.symbols).at(captured.sizes)
    said = {name: getattr(captured, name) for name in FIELDS}
    names, texts = captured.assumed.conditions_at(captured.sizes)
    said |= {"names": conditions.names | names, "conditions": (*conditions.texts, *texts)}
    said |= {"tree": as_value(captured.tree)}
    return lines_of(said | {"changes": changes.as_value(captured.changes, modules)})


SLOT = r"Slot\('([^'\\]*)', '([^'\\]*)', '([^'\\]*)', '([^'\\]*)'\)"
"""A tensor of the state, as it is written."""

ITEM = re.compile(rf"(?:{SLOT}|(\d+)|((?:Argument|Draws)\([^()]*\))), ")
"""An item of a list of inputs or outputs, as most are."""


class _Reader(Reader):
    """Reads long lists of inputs and outputs without a syntax tree."""

    def value(self, text: str) -> Any:
        if not text.startswith("(") or not text.endswith(")") or "," not in text:
            return super().value(text)
        found, rest = [], text[1:-1].removesuffix(",") + ", "
        at = 0
        while at < len(rest):
            item = ITEM.match(rest, at)
            if item is None:
                return super().value(text)
            *slot, number, other = item.groups()
            found.append(Slot(*slot) if slot[0] is not None else int(number) if number else super().value(other))
            at = item.end()
        return tuple(found)


def read_calling(text: str, mesh: DeviceMesh, modules: Mapping[str, nn.Module]) -> Captured:
    """A capture without its graph, which is not needed to run the program. ValueError for other text."""
    said = read_lines(text, _Reader(mesh), (*FIELDS, "tree", "names", "conditions", "changes"))
    symbols = _torch.Conditions(said["names"], said["conditions"])
    made = changes.contents_of(said["changes"], modules)
    fields = {name: said[name] for name in FIELDS}
    return Captured(fx.Graph(), {}, tree=as_tree(said["tree"]), symbols=symbols, changes=made, **fields)
