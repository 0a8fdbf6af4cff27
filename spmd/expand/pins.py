"""`placements=` of `spmd.compile`: where values lie, by the module that makes them or by a line of code.

    {"blocks.*.mlp.up": {"tp": Shard(2)}}        what these modules give
    {"blocks.*.mlp.input": {"dp": Shard(0)}}     what they are given
    {"model.py:31": [None, Shard(1)]}            what this line makes and other lines read; dp is left open

Each becomes a constraint in the captured graph (`constraints.py`), for the value and for its gradient. The first
pattern that matches a value decides. Where another says of a module that it is given the value in another way, what the
module computes reads it so: a norm gives shards of the sequence, and the layer behind it gathers them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import fx

from spmd.expand.constraints import constrain_node
from spmd.expand.origins import GRADIENT_OF, ORIGIN, SITES, Site, handed_on
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.constraint import Constraint
from spmd.tensor.annotations.patterns import Patterns, matches, what_there_is
from spmd.tensor.placement import Placement
from spmd.tensor.spec import Spec

Pins = Mapping[str, Constraint]
"""Constraints by pattern of a module's path, or by line."""


def checked_pins(mesh: DeviceMesh, placements: Patterns | None) -> dict[str, Constraint]:
    """The pins of `placements=`, with all checked that can be checked without a step."""
    if placements is None:
        return {}
    if not isinstance(placements, Mapping):
        raise TypeError(
            f"placements is a {type(placements).__name__}; give a dict from paths of modules, or lines, to placements"
        )
    return {key: Constraint.of(mesh, said, _words(key)) for key, said in placements.items()}


def pin_of(key: str, placements: tuple[Placement | None, ...]) -> Constraint:
    """The pin of a key, with placements that were checked."""
    return Constraint(placements, _words(key))


def _words(key: str) -> str:
    return f"placements {key!r}"


def pinned(graph: fx.Graph, pins: Pins, mesh: DeviceMesh) -> fx.Graph:
    """The graph with a constraint behind each value that a pin names, and behind its gradient. It is changed in place.

    ValueError for a pin that names nothing, or that cannot hold.
    """
    if not pins:
        return graph
    values = list(sites_of(graph, SITES))
    by_site = {_known_by(site): _pin_of(site, pins) for _, site in values}
    _require_matches(pins, [site for _, site in values])
    found: dict[fx.Node, Constraint] = {}
    for key in (SITES, GRADIENT_OF):
        for node, site in list(sites_of(graph, key)):
            pin = by_site.get(_known_by(site))
            if pin is not None and node not in found:
                found[node] = _checked(pin, node, site, mesh)
    given = {node: inputs for node in found if (inputs := _given(node, by_site, mesh))}
    for node, constraint in found.items():
        new = constrain_node(node, constraint)
        if node in given:
            _constrain_inside(new, given[node])
    return graph


def _given(node: fx.Node, by_site: Mapping[object, Constraint | None], mesh: DeviceMesh) -> dict[str, Constraint]:
    """How modules are to be given a value, by their paths."""
    sites = [site for site in node.meta.get(SITES, ()) if site.is_input]
    return {s.path: _checked(pin, node, s, mesh) for s in sites if (pin := by_site.get(_known_by(s))) is not None}


def _constrain_inside(node: fx.Node, given: Mapping[str, Constraint]) -> None:
    """Let what each module computes read a constrained value as it is to be given to the module."""
    made = {node.target.constraint.placements: node}
    for user in list(node.users):
        path = f"{user.meta[ORIGIN].module}." if ORIGIN in user.meta else ""
        inside = max((p for p in given if path.startswith(f"{p}.")), key=len, default=None)
        if inside is None:
            continue
        wanted = given[inside]
        if wanted.placements not in made:
            made[wanted.placements] = constrain_node(node, wanted, users=())
        user.replace_input_with(node, made[wanted.placements])


def sites_of(graph: fx.Graph, key: str) -> Iterator[tuple[fx.Node, Site]]:
    """The values of a graph that have names, or the gradients of such values. Of lines those that other lines read."""
    chosen = None if key == SITES else {_known_by(site) for _, site in sites_of(graph, SITES)}
    for node in graph.nodes:
        for site in node.meta.get(key, ()):
            if _known_by(site) in chosen if chosen is not None else site.line is None or handed_on(node, site.line):
                yield node, site


def _known_by(site: Site) -> object:
    """What a value and its gradient have in common. Blocks that are written again have sites of their own in each
    pass, with the same names; a line has several values, of which some are handed on."""
    return site.names if site.line is None else site


def names_match(pattern: str, site: Site) -> bool:
    """Whether a pattern names a site. What a module is given is named by patterns that say so alone."""
    if site.line is not None:
        return site.line.is_at(pattern)
    if site.is_input and not _SAYS_INPUT(pattern):
        return False
    return any(matches(pattern, name) for name in site.names)


_SAYS_INPUT = re.compile(r"\.input(\.|$)").search
"""Of a pattern: `up.input`, `up.input.0`, but not `blocks.*.input_norm`."""


def _pin_of(site: Site, pins: Pins) -> Constraint | None:
    return next((constraint for pattern, constraint in pins.items() if names_match(pattern, site)), None)


def _checked(constraint: Constraint, node: fx.Node, site: Site, mesh: DeviceMesh) -> Constraint:
    value = node.meta["val"]
    here = replace(constraint, said=f"{constraint.said}, of {site.names[0]}")
    here.spec(Spec.of(mesh, tuple(value.shape), value.dtype))
    return constraint.of_tensor(value.ndim)


def _require_matches(pins: Pins, sites: Sequence[Site]) -> None:
    for pattern in pins:
        if not any(names_match(pattern, site) for site in sites):
            raise ValueError(f"placements {pattern!r} matches nothing. {near_names(pattern, sites)}")


def near_names(pattern: str, sites: Sequence[Site]) -> str:
    """What is there, for an error: the nearest names to a pattern, or the first."""
    names = [site.names[0] for site in sites]
    if ":" in pattern:
        names = [name for name in names if ":" in name] or names
    return what_there_is(pattern, names)
