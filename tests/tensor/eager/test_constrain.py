"""`spmd.constrain` of DTensors and of plain tensors: the identity, with gradients, tangents and under transforms."""

from __future__ import annotations

import pytest
import torch

import spmd
from spmd import Partial, Replicate, Shard, distribute_tensor
from spmd.tensor.spec import spec_of

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
OPEN = None
GIVEN = [[Shard(0), Replicate()], [Replicate(), Replicate()], [Shard(1), Shard(0)], [Partial(), Shard(1)]]
WANTED = [{"tp": Shard(1)}, {"dp": OPEN, "tp": Shard(0)}, [Shard(1), OPEN], [Replicate(), Replicate()], [OPEN, OPEN]]


@pytest.fixture
def mesh():
    with spmd.LocalTensorMode(4):
        yield spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tensor(mesh, placements, requires_grad=True) -> spmd.DTensor:
    x = torch.arange(15.0, dtype=torch.float64).view(5, 3) + 1
    whole = distribute_tensor(x, mesh, [Replicate(), Replicate()])
    return whole.redistribute(placements=placements).detach().requires_grad_(requires_grad)


def holds(spec, wanted) -> bool:
    """Whether a spec is as wanted on each axis that is said."""
    said = [wanted.get(axis, Replicate()) for axis in ("dp", "tp")] if isinstance(wanted, dict) else wanted
    return all(p is OPEN or spec.on(axis) == p for axis, p in enumerate(said))


@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_it_is_the_identity_of_the_global_tensor(given, wanted, mesh):
    """The value, its gradient and its tangent; the placements that were said, and its own where nothing was."""
    x = tensor(mesh, given)
    y = spmd.constrain(x, wanted)
    assert holds(y._spec, wanted)
    if isinstance(wanted, list):
        assert all(p is not OPEN or y._spec.on(axis) == x._spec.on(axis) for axis, p in enumerate(wanted))
    assert torch.equal(y.full_tensor().reconcile(), x.full_tensor().reconcile())
    (gradient,) = torch.autograd.grad((y * y).sum(), x)
    assert torch.equal(gradient.full_tensor().reconcile(), 2 * x.full_tensor().reconcile())
    _, tangent = torch.func.jvp(lambda x: spmd.constrain(x, wanted), (x.detach(),), (x.detach(),))
    assert torch.equal(tangent.full_tensor().reconcile(), x.full_tensor().reconcile())


def test_its_gradient_is_constrained_alike(mesh):
    """Also the gradient of the gradient."""
    x = tensor(mesh, [Replicate(), Replicate()])
    y = spmd.constrain(x, {"dp": OPEN, "tp": Shard(1)})
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first._spec.on(1) == second._spec.on(1) == Shard(1)
    assert torch.equal(second.full_tensor().reconcile(), 6 * x.full_tensor().reconcile())


@pytest.mark.parametrize("batch", [0, 1])
def test_under_vmap_dims_are_those_inside(batch, mesh):
    """The dim that is mapped over is on top of them, wherever it is."""
    x = tensor(mesh, [Replicate(), Replicate()], requires_grad=False)
    out = torch.func.vmap(lambda row: spmd.constrain(row, {"tp": Shard(0)}), batch, batch)(x)
    assert out._spec is spec_of(mesh, [Replicate(), Shard(1 - batch)], x.shape, x.dtype)


def test_plain_tensors_are_returned_as_they_are():
    """On one device there is nothing to place: the very object, also in code that torch compiles, and transformed."""
    x = torch.ones(3, requires_grad=True)
    assert spmd.constrain(x, {"tp": Shard(0)}) is x
    assert torch.equal(torch.func.grad(lambda x: spmd.constrain(x, {"tp": Shard(0)}).sum())(x), torch.ones(3))
    compiled = torch.compile(lambda x: spmd.constrain(x * 2, {"tp": Shard(0)}), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), 2 * x)


def test_torch_compiles_it_in_one_graph():
    """Of a DTensor, by axis and in mesh order, with its gradient."""
    x = tensor(spmd.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")), [Replicate(), Replicate()])
    for wanted in ({"dp": OPEN, "tp": Shard(1)}, [Shard(0), OPEN]):
        fn = torch.compile(lambda x, to=wanted: spmd.constrain(x.sin(), to), backend="aot_eager", fullgraph=True)
        (gradient,) = torch.autograd.grad(fn(x).sum(), x)
        assert torch.equal(gradient.to_local(), x.to_local().cos())


WRONG = {
    "no axis 'pp'": {"pp": Shard(0)},
    "allowed dims are -2 to 1": {"tp": Shard(2)},
    "cannot be asked for": {"tp": Partial()},
    "are one axis": {"tp": Shard(0), -1: Shard(1)},
    "give a dict by axis name": [Shard(0)],
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_say_what_is_wrong(message, mesh):
    """Before anything is sent."""
    with pytest.raises(ValueError, match=message):
        spmd.constrain(tensor(mesh, GIVEN[0]), WRONG[message])


def test_only_tensors_are_constrained(mesh):
    """What holds tensors is no tensor."""
    with pytest.raises(TypeError, match="tuple is no tensor"):
        spmd.constrain((tensor(mesh, GIVEN[0]),), {})
