"""torch.compile of functions of DTensors: memory that arguments and results share, and numbers that change."""

from __future__ import annotations

import pytest
import torch

from spmd import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from spmd.mesh import as_rank


def _compiled(fn):
    torch.compiler.reset()
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


def _numbers():
    return torch.arange(24.0).reshape(8, 3)


def _whole(*tensors):
    return [x.full_tensor().clone() if isinstance(x, DTensor) else x.clone() for x in tensors]


def _doubled_view(q):
    v = q[1:]
    q.mul_(2)
    return v


def _results_that_are_views(run, q):
    """The result and the argument show each other's writes; the copy that was there shows those of the graph."""
    before = q[2:]
    v = run(q)
    seen = _whole(v, q, before)
    v.add_(1)
    seen += _whole(v, q, before)
    q.sub_(2)
    return seen + _whole(v, q, before)


def on_rank(rank):
    q = distribute_tensor(_numbers(), init_device_mesh("cpu", (4,)), [Shard(0)])
    return _results_that_are_views(_compiled(_doubled_view), q)


def test_shared_memory(gloo4):
    """Views that compiled code returns are views, and copies see what it writes."""
    want = _results_that_are_views(_doubled_view, _numbers())
    for seen in gloo4.run(on_rank, timeout=120):
        assert all(torch.equal(a, b) for a, b in zip(seen, want, strict=True))


def _add_to_first(a, b):
    b.mul_(2)
    return a + 1


def test_arguments_that_alias():
    """Compiled code that writes arguments of one memory is an error, and not half a write."""
    with as_rank(0, 1):
        q = distribute_tensor(_numbers(), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(Exception, match="aliased inputs that are mutated"):
            _compiled(_add_to_first)(q, q.view(24))
        assert torch.equal(q.to_local(), _numbers())


def test_a_number_that_changes():
    """A float argument is a symbol from its second value on; where a rule has to know it, it is a constant."""

    def fn(q, scale):
        return torch.clamp((q + scale) * scale, max=scale)

    with as_rank(0, 1):
        q = distribute_tensor(_numbers(), init_device_mesh("cpu", (1,)), [Shard(0)])
        run = _compiled(fn)
        for scale in (0.5, 0.25, 0.125, 0.0, float("inf")):
            assert torch.equal(run(q, scale).to_local(), fn(_numbers(), scale))


def _meets_the_mesh(x, mesh, placements):
    """Code around DTensors: makes them, asks where it is, takes a mesh and placements as arguments."""
    d = DTensor.from_local(x * 2, mesh, placements) + mesh.get_coordinate()[0] + mesh.get_local_rank("dp")
    whole = d.redistribute(d.device_mesh, [Replicate()]) * mesh.size()
    return whole.to_local() + distribute_tensor(torch.ones(8, 3), mesh, placements).full_tensor()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo, of what it takes up after a break
def test_code_around_dtensors():
    """What Dynamo cannot trace runs between two graphs; gradients pass through."""
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        torch.compiler.reset()
        run = torch.compile(_meets_the_mesh, backend="aot_eager")
        for _ in range(2):
            x = _numbers().requires_grad_()
            out = run(x, mesh, [Shard(0)])
            assert torch.equal(out, x * 2 + 1)
            out.sum().backward()
            assert torch.equal(x.grad, torch.full((8, 3), 2.0))


def _from_blocks(x, bias, mesh, placements):
    """DTensors of blocks that the code computes, of its arguments, and of a term of a sum."""
    rows = DTensor.from_local(x * 2, mesh, placements)
    term = DTensor.from_local(bias, mesh, [Partial()])
    given = DTensor.from_local(x, mesh, placements, shape=(x.shape[0] * mesh.size(), 3), stride=(3, 1))
    return ((rows + term) * given).redistribute(placements=[Replicate()]).to_local()


def _compiled_from_blocks(rank, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (4,))
    run, found = _compiled(_from_blocks), []
    for rows in (2, 3):  # the second number of rows is where Dynamo would make it a symbol
        x, bias = torch.arange(rows * 3.0).reshape(rows, 3) + rank, torch.ones(3)
        for fn in (run, _from_blocks):
            given = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
            out = fn(*given, mesh, [Shard(0)])
            out.sum().backward()
            found.append([out.detach(), *[each.grad for each in given]])
    return found


def test_from_local_is_part_of_the_graph(gloo4):
    """Without a break, with gradients, and traced again for blocks of other shapes."""
    for found in gloo4.run(_compiled_from_blocks, timeout=120):
        for compiled, eager in zip(found[::2], found[1::2], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(compiled, eager, strict=True))


def test_from_local_in_the_graph_says_what_is_wrong():
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(Exception, match=r"has shape \[4\], but a tensor of \[8\] was given"):
            _compiled(lambda x: DTensor.from_local(x, mesh, [Shard(0)], shape=[4]))(torch.ones(8))


def _distributed_inside(x):
    rows, columns, whole = (distribute_tensor(x, _MESH, p) for p in ([Shard(0)], [Shard(1)], None))
    return rows * 2, (rows + columns).relu(), whole.sum(), rows.redistribute(placements=[Shard(1)])


_MESH = init_device_mesh("cpu", (4,))


def distributes_in_a_graph(rank):
    x = _numbers() - 4 if rank == 0 else _numbers() * 0  # the data of the first rank counts
    return _whole(*_compiled(_distributed_inside)(x))


def test_distribute_tensor_is_traced_whole(gloo4):
    """Also with sizes that do not divide, and what the other ranks hold does not matter."""
    x = _numbers() - 4
    want = [x * 2, (x + x).relu(), x.sum(), x]
    for found in gloo4.run(distributes_in_a_graph, timeout=120):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_compiled_code_cannot_make_a_leaf():
    mesh = init_device_mesh("cpu", (1,))
    with as_rank(0, 1), pytest.raises(Exception, match="compiled code cannot make one"):
        _compiled(lambda x: distribute_tensor(x, mesh))(_numbers().requires_grad_())
