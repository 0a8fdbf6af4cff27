"""How a gradient travels to its place: with others, in buckets, where bytes count and not latencies.

    f32[256, 256] +sum@dp -> f32[256, 256]      one all-reduce, of ten gradients one bucket
                                                and not a reduce-scatter and an exchange, each alone

Where an all-reduce takes long to begin, as on gloo with more ranks than cores, a reduce-scatter and an exchange of one
small tensor are faster. But a whole model's gradients are one or two all-reduces in buckets, and an exchange of what
was only just reduced is in none.
"""

from __future__ import annotations

from collections.abc import Iterator

from spmd.expand.places.roles import scattered_first
from spmd.tensor.redistribute import legal
from spmd.tensor.redistribute.bucket import bucket_key
from spmd.tensor.redistribute.collective_moves import AllGather, AllReduce
from spmd.tensor.redistribute.plan import Plan, Step, plan
from spmd.tensor.spec import Spec


def gradient_plans(spec: Spec, final: Spec) -> Iterator[Plan]:
    """The plans, one after the other, that take a gradient from where it is made to its place.

    >>> from spmd.mesh import DeviceMesh
    >>> from spmd.tensor.spec import parse_spec
    >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("rep", "dp"))
    >>> made, place = parse_spec("f32[8, 8] +sum@rep +sum@dp", mesh), parse_spec("f32[8@dp, 8]", mesh)
    >>> [str(step) for p in gradient_plans(made, place) for step in p.steps]
    ['reduce_scatter(dp, 0)', 'all_reduce(rep)']
    """
    for goal in scattered_first(spec, final):
        yield _among_others(spec, goal)
        spec = goal


def _among_others(spec: Spec, goal: Spec) -> Plan:
    """The cheapest plan, or one all-reduce where that is quicker beside others."""
    cheapest = plan(spec, goal)
    owed = tuple([axis for axis, _ in spec.partial])
    if len(cheapest.steps) < 2 or not owed:
        return cheapest
    step = Step(AllReduce(owed), spec, goal)
    at_once = Plan(spec, goal, (step,))
    return cheapest if legal.fault(step) or _us_among_others(cheapest) <= _us_among_others(at_once) else at_once


def _us_among_others(of: Plan) -> float:
    """Modelled microseconds without what moves take to begin that wait for others of their kind. A gather, or an
    exchange, of what was only just reduced waits for none."""
    return sum([step.cost - (step.latency_us if _waits(step) else 0.0) for step in of.steps])


def _waits(step: Step) -> bool:
    return bucket_key(step) is not None and not isinstance(step.move, AllGather)
