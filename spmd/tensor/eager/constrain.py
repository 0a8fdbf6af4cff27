"""`spmd.constrain`: say in the code of a step how a value is to lie.

    h = spmd.constrain(self.up(x), {"dp": Shard(0), "tp": Shard(2)})

On one device nothing happens. In a compiled step it is a pin of the program: the choice of placements has to respect
it. Of a DTensor it is a redistribute. The gradient of the result is constrained alike, as GSPMD's
`with_sharding_constraint` does it: it is the identity of the global tensor, and so is its transpose.
"""

from __future__ import annotations

import torch

from spmd import _torch
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.constraint import Constraint, capturing
from spmd.tensor.annotations.patterns import PlacementsByAxis
from spmd.tensor.eager.conversions import redistributed
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.eager.traced_from_local import placement_of, plain
from spmd.tensor.spec import Spec


def constrain(x: torch.Tensor, placements: PlacementsByAxis) -> torch.Tensor:
    """The same tensor, placed so. The mesh is that of the compiled step, or of the DTensor.

    placements: by axis name, `{"tp": Shard(2)}`, where an axis that is left out replicates, or a list in mesh order.
    None leaves an axis open: in a compiled step to the choice, of a DTensor as it is. A reduction that is owed on an
    axis that is said is done.

    A tensor that is no DTensor, outside of a compiled step, is returned as it is: on one device there is nothing to
    place. On a mesh the result is a value of its own: what is written into it in place, or into x afterwards, the other
    one does not see; a compiled step in which that shows is an error. So go on with the result alone. Differentiable to
    any order, forward and backward; under `torch.func.vmap` dims are those inside.

    >>> constrain(torch.ones(2), {"tp": None})
    tensor([1., 1.])

    Raises ValueError for an axis that the mesh does not have, a dim that the tensor does not have, and Partial.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"constrain: {type(x).__name__} is no tensor; constrain the tensors in it one by one")
    if torch.compiler.is_dynamo_compiling():
        return _in_dynamo(x, placements) if isinstance(x, DTensor) else x
    mesh = _mesh_of(x)
    if mesh is None:
        return x
    constraint = Constraint.of(mesh, placements, "constrain")
    constraint.spec(Spec.of(mesh, tuple(x.shape), x.dtype))  # raises before anything is sent
    return _Constrained.apply(x, constraint)


def _mesh_of(x: torch.Tensor) -> DeviceMesh | None:
    """The mesh that x is on, or that the step which is captured is for; None on one device."""
    inner = _torch.unwrapped(x)
    if isinstance(inner, DTensor):
        return inner.device_mesh
    capture = capturing()
    return None if capture is None else capture.mesh


class _Constrained(torch.autograd.Function):
    """The identity of the global tensor. The cotangent and the tangent are constrained alike."""

    @staticmethod
    def forward(x, constraint):
        if isinstance(x, DTensor):
            return redistributed(x, constraint.spec(x._spec))
        capture = capturing()
        return x.view_as(x) if capture is None else capture.write(x, constraint)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.constraint = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return _Constrained.apply(grad, ctx.constraint), None

    @staticmethod
    def jvp(ctx, tangent, _):
        return _Constrained.apply(tangent, ctx.constraint)

    @staticmethod
    def vmap(info, in_dims, x, constraint):
        return _Constrained.apply(x, constraint.with_dim(in_dims[0], x.ndim)), in_dims[0]


# ---- in code that Dynamo traces ---------------------------------------------------------------

_numbered: list[PlacementsByAxis] = []
"""By number: placements in code that was traced. Dynamo bounds how often code is traced."""


def _in_dynamo(x: DTensor, placements: PlacementsByAxis) -> torch.Tensor:
    """A call of `constrain`, as one node of the graph: Dynamo passes no placements on, and makes no plans."""
    by_axis = isinstance(placements, dict)
    axes = tuple(placements) if by_axis else None
    values = placements.values() if by_axis else placements
    return _constrained_by_number(x, _number(axes, tuple([None if p is None else plain(p) for p in values])))


@_torch.constant_in_dynamo
def _number(axes: tuple | None, values: tuple) -> int:
    _torch.kept_whole_in_dynamo(_constrained_by_number)
    found = [None if fields is None else placement_of(fields) for fields in values]
    _numbered.append(found if axes is None else dict(zip(axes, found, strict=True)))
    return len(_numbered) - 1


def _constrained_by_number(x: DTensor, number: int) -> torch.Tensor:
    """Dynamo keeps a call of this as one node."""
    return constrain(x, _numbered[number])
