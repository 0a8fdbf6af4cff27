"""Placements that users give for what a compiled step returns.

    outputs={"loss": [Replicate()], "rows.*": [Partial()]}     of a step that returns {"loss": ..., "rows": [..., ...]}

A result that is asked for as Partial is left as terms on the ranks; all others have their sums reduced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spmd._torch import pytree
from spmd.expand.captured import Captured
from spmd.expand.module_attributes import is_attribute, leaves_of
from spmd.expand.state import named_leaves
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.patterns import Placed, placed_spec, placements_for, require_matches
from spmd.tensor.spec import Spec


class Results:
    """The results of one capture, by number, with the placements that were asked for. One tensor has one number.

    attributes: the paths of those that are set as attributes of modules, by number. given: as in `Captured`, but for
    those that are asked for at other places.
    """

    def __init__(self, captured: Captured, outputs: Placed) -> None:
        tree = captured.tree
        result, changed, _ = pytree.tree_unflatten(list(range(tree.num_leaves)), tree)
        kept = {path: each for path, each in changed.items() if is_attribute(path)}
        one = captured.same
        inner = [(path, number) for at, each in kept.items() for path, number in leaves_of(at, each)]
        self.attributes = {one.get(number, number): path for path, number in reversed(inner)}
        named = [(path, one.get(number, number)) for path, number in named_leaves({"result": result})]
        made = [(path, number) for path, number in named if number in captured.outputs]
        shown = [(path, number) for path, number in named if number in captured.views and (path, number) not in made]
        require_matches(outputs, [path for path, _ in (*made, *shown)], "outputs")
        self.asked, self.paths = _asked(made, outputs)
        for path, number in shown:
            self._check_view(path, captured.views[number].of, placements_for(outputs, [path]))
        self.given = {number: where for number, where in captured.given.items() if number not in self.asked}
        for number in self.asked.keys() & self.attributes.keys():
            if any(placement.is_partial() for placement in self.asked[number]):
                raise ValueError(
                    f"outputs leaves {self.paths[number]} as terms of a sum, and it is one tensor with "
                    f"{self.attributes[number]}, which would be left so, too; let the step return a clone() of it"
                )

    def _check_view(self, path: str, base: Any, wanted: Any) -> None:
        """Refuse placements of a view, which lies as its base does; but replicas of it have views of replicas."""
        if wanted is None or (self.asked.get(base) == wanted and all(x.is_replicate() for x in wanted)):
            return
        name = self.paths.get(base) or self.attributes.get(base) or str(base)
        raise ValueError(
            f"outputs gives placements to {path}, which is a view of {name} and lies as that does; let the step return "
            "a clone() of it"
        )

    def spec(self, number: int, spec: Spec, mesh: DeviceMesh) -> Spec:
        """The spec that the result of this number is to have, which was asked for."""
        wanted = placed_spec(mesh, self.asked[number], spec, self.paths[number])
        return spec.with_layout(wanted.dims, wanted.units, wanted.partial)

    @property
    def owed(self) -> frozenset[str]:
        """The names, in a program, of the results that may be Partial."""
        return frozenset(f"result {number}" for number in self.asked)


def _asked(named: Iterable[tuple[str, int]], outputs: Placed) -> tuple[dict[int, Any], dict[int, str]]:
    """The placements that were asked for, by number, and the paths that they were asked for by, or the first ones."""
    asked: dict[int, Any] = {}
    paths: dict[int, str] = {}
    for path, number in named:
        wanted = placements_for(outputs, [path])
        if wanted is not None and asked.setdefault(number, wanted) != wanted:
            raise ValueError(
                f"outputs gives {paths[number]} and {path} other placements, and they are one tensor; let the step "
                "return a clone() of it for one of the two"
            )
        if wanted is not None or number not in paths:
            paths[number] = path
    return asked, paths
