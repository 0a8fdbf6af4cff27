"""A program that another process traced runs here once its groups are known."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from workers import Pool

from spmd.comm import all_reduce, use_groups
from spmd.mesh import as_rank

GROUP = [1, 3, 2]


def run_pickled(rank: int, program: bytes) -> list[float]:
    import torch._dynamo  # torch 2.13 cannot unpickle a graph before

    if rank == 0:
        return []
    graph = use_groups(pickle.loads(program))
    return [graph(torch.full((1,), float(rank + step))).item() for step in (0, 10)]


def test_a_pickled_program_runs_in_a_process_that_never_spelled_its_group(gloo4: Pool) -> None:
    with as_rank(1, 4):
        program = make_fx(lambda x: all_reduce(x, "sum", GROUP), tracing_mode="fake")(torch.ones(1))
    assert gloo4.run(run_pickled, pickle.dumps(program)) == [[], [6, 36], [6, 36], [6, 36]]


def test_a_name_that_spells_no_group_is_an_error() -> None:
    graph = torch.fx.Graph()
    op, x = torch.ops._c10d_functional.all_reduce.default, graph.placeholder("x")
    graph.output(graph.call_function(op, (x, "sum", "ranks:x")))
    with pytest.raises(ValueError, match="names no group"):
        use_groups(torch.fx.GraphModule(torch.nn.Module(), graph))
