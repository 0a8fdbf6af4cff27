"""Placements that users give for what a compiled step returns.

    outputs={"loss": [Replicate()], "rows.*": [Partial()]}     of a step that returns {"loss": ..., "rows": [..., ...]}

A result that is asked for as Partial is left as terms on the ranks; all others have their sums reduced.
"""

from __future__ import annotations

from spmd._torch import pytree
from spmd.expand.capture import Captured
from spmd.expand.module_attributes import is_attribute, leaves_of
from spmd.expand.state import named_leaves
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.patterns import Placed, placed_spec, placements_for, require_matches
from spmd.tensor.spec import Spec


class Results:
    """The results of one capture, by number, with the placements that were asked for.

    attributes: the paths of those that are set as attributes of modules, by number.
    """

    def __init__(self, captured: Captured, outputs: Placed) -> None:
        tree = captured.tree
        result, changed = pytree.tree_unflatten(list(range(tree.num_leaves)), tree)
        kept = {path: each for path, each in changed.items() if is_attribute(path)}
        self.attributes = {number: inner for path, each in kept.items() for inner, number in leaves_of(path, each)}
        paths = {number: path for path, number in named_leaves({"result": result})}
        self.paths = {number: path for number, path in paths.items() if number in captured.outputs}
        require_matches(outputs, list(self.paths.values()), "outputs")
        asked = {number: placements_for(outputs, [path]) for number, path in self.paths.items()}
        self.asked = {number: placements for number, placements in asked.items() if placements is not None}

    def spec(self, number: int, spec: Spec, mesh: DeviceMesh) -> Spec:
        """The spec that the result of this number is to have, which was asked for."""
        wanted = placed_spec(mesh, self.asked[number], spec, self.paths[number])
        return spec.with_layout(wanted.dims, wanted.units, wanted.partial)

    @property
    def owed(self) -> frozenset[str]:
        """The names, in a program, of the results that may be Partial."""
        return frozenset(f"result {number}" for number in self.asked)
