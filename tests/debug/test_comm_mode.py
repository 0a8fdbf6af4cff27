"""CommDebugMode counts the same on real ranks, on threads and simulated: eager and compiled, forward and backward."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import ways
from torch import nn

import spmd
from spmd import DTensor, LocalTensorMode, Replicate, Shard, distribute_module, distribute_tensor, init_device_mesh
from spmd.comm import all_reduce, wait
from spmd.debug import CommDebugMode

ops = torch.ops.c10d_functional


def _net(mesh):
    def place(name, module, mesh):
        if isinstance(module, nn.Linear):
            dim = 0 if name == "0" else 1  # column-parallel, then row-parallel
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(dim)]))

    return distribute_module(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), mesh, place)


def counted():
    """Counts of three blocks - eager ops, the collectives of spmd.comm, a compiled step - as plain data."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model, found = _net(mesh), []
    x = DTensor.from_local(torch.ones(4, 8, requires_grad=True), mesh, [Replicate()])
    with CommDebugMode() as comm:
        y = model(x).redistribute(placements=[Replicate()])
        y.sum().backward()
        torch.softmax(distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)], src_data_rank=None), 0)
    found += [comm.get_total_counts(), _plain(comm.get_comm_counts())]
    found.append({name: {p: _plain(c) for p, c in of.items()} for name, of in comm.get_module_counts().items()})
    found.append({name: _plain(of) for name, of in comm.get_op_counts().items()})
    found += [comm.get_sharding_info(), repr(comm), comm.generate_comm_debug_tracing_table()]
    with comm:
        wait(all_reduce(torch.ones(3), "sum", mesh))
    found.append(_plain(comm.get_comm_counts()))
    evaluate = spmd.compile(lambda x, w, v: x @ w @ v, mesh=mesh, inputs={"w": [Shard(1)], "v": [Shard(0)]})
    given = torch.ones(4, 8), torch.ones(8, 8), torch.ones(8, 8)
    evaluate(*given)  # compiled before anybody listens
    with comm:
        result = evaluate(*given)
        result.full_tensor() if isinstance(result, DTensor) else result
    return [*found, _plain(comm.get_comm_counts())]


def _plain(counts):
    return {str(op).split(".")[-1]: n for op, n in counts.items()}


@pytest.mark.parametrize("way", ways.WAYS)
def test_counts(way, gloo4):
    for total, kinds, modules, by_op, sharding, text, table, user, compiled in ways.run(way, gloo4, counted):
        assert total == sum(kinds.values()) == 4 and kinds == {"all_reduce": 4}  # forward, backward, two in softmax
        assert modules["Global"] == {"forward": {"all_reduce": 3}, "backward": {"all_reduce": 1}}
        assert by_op["aten._softmax.default(f32[8@tp, 2])"] == {"all_reduce": 2}
        assert sharding == {"Sequential.0.weight": (Shard(0),), "Sequential.1.weight": (Shard(1),)}
        assert "4 collectives: all_reduce 4" in text and "Sequential.1.weight: [Shard(1)]" in text
        assert "weight f32[8, 8@tp]" in table and "aten._softmax.default(f32[8@tp, 2]) at test_comm_mode.py:" in table
        assert user == {"all_reduce": 1} and sum(compiled.values()) == 1


def test_table_to_file(tmp_path):
    with LocalTensorMode(4), CommDebugMode() as comm:
        distribute_tensor(torch.ones(8), init_device_mesh("cpu", (4,)), [Shard(0)]).full_tensor()
    comm.log_comm_debug_tracing_table_to_file(str(tmp_path / "log.txt"), noise_level=0)
    last = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert last.split(maxsplit=1) == ["Global", "broadcast 1, all_gather_into_tensor 1"]


def refused():
    from torch.distributed.tensor.debug import CommDebugMode as Theirs

    x = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None)
    with Theirs(), pytest.raises(RuntimeError, match=r"use spmd\.debug\.CommDebugMode"):
        torch.softmax(x, 0)
    return True


@pytest.mark.parametrize("way", ways.WAYS)
def test_torchs_mode_is_refused(way, gloo4):
    """It would count nothing where a softmax sends two all-reduces."""
    assert all(ways.run(way, gloo4, refused))


def test_what_another_thread_runs_is_not_this_ones():
    """torch's hooks of modules are the process's; ranks may be threads."""
    with CommDebugMode() as comm, ThreadPoolExecutor(1) as other:
        nn.Sequential(other.submit(_ran_there).result())(torch.ones(1, 2))
    assert list(comm.get_parameter_info()) == ["Sequential.0"]


def _ran_there():
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2))
    return layer


@pytest.mark.parametrize("leaf", [True, False])
def test_gradients_that_are_asked_for(leaf):
    """`autograd.grad`, as pipelines call it, of a stage whose inputs may be leaves."""
    x = torch.ones(4, 8, requires_grad=True)
    with CommDebugMode() as sent:
        y = nn.ReLU()(x if leaf else x * 2)
        (grad,) = torch.autograd.grad([y], [x], [torch.ones_like(y)])
    assert torch.equal(grad, torch.full_like(grad, 1.0 if leaf else 2.0)) and sent.get_total_counts() == 0
