"""How a program is called, as text, and back: what its inputs and outputs are, and which numbers it is right for.

    inputs: [Slot('parameter', 'model.up.weight', '', ''), ..., Argument(path='x'), Draws(count=2)]
    outputs: [0, Slot('parameter', 'model.up.weight', '', ''), ...]
    tree: (Leaf(), {})
    names: {'n0': 'lr'}, conditions: ('n0 > 0.5',)
    kept: {}
    first: (), ignores_gradients: True, stepped: ('optimizer',)
    changes: [('model', (), {'ready': True}, ())]

It is what is left of a capture (`spmd.expand.capture.Captured`) when its graph has become a program.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx, nn

from spmd import _torch
from spmd.expand.capture import Captured
from spmd.expand.kept import changes
from spmd.expand.kept.notation import Reader, lines_of, read_lines
from spmd.expand.kept.trees import as_tree, as_value
from spmd.mesh import DeviceMesh

FIELDS = ("inputs", "outputs", "leaves", "fixed", "kept", "first", "ignores_gradients", "stepped")


def calling_text(captured: Captured, modules: Mapping[str, nn.Module]) -> str:
    """What a call has to know of the program of a capture. modules: those that the step is given, by path."""
    conditions = _torch.Conditions.of(captured.symbols)
    said = {name: getattr(captured, name) for name in FIELDS}
    names, texts = captured.assumed.conditions_at(captured.sizes)
    said |= {"names": conditions.names | names, "conditions": (*conditions.texts, *texts)}
    said |= {"tree": as_value(captured.tree)}
    return lines_of(said | {"changes": changes.as_value(captured.changes, modules)})


def read_calling(text: str, mesh: DeviceMesh, modules: Mapping[str, nn.Module]) -> Captured:
    """A capture without its graph, which is not needed to run the program. ValueError for other text."""
    said = read_lines(text, Reader(mesh), (*FIELDS, "tree", "names", "conditions", "changes"))
    symbols = _torch.Conditions(said["names"], said["conditions"])
    made = changes.contents_of(said["changes"], modules)
    fields = {name: said[name] for name in FIELDS}
    return Captured(fx.Graph(), {}, tree=as_tree(said["tree"]), symbols=symbols, changes=made, **fields)
