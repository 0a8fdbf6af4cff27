"""Traces of collectives: dispatcher ops with plain constants, written without a process group, right wherever they run.

This process has no process group; it plays ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import aot_function
from torch.fx.experimental.proxy_tensor import make_fx
from workers import Pool

from spmd.comm import AsyncTensor, all_gather_tensor, all_reduce, members, reduce_scatter_tensor, wait
from spmd.mesh import as_rank, init_device_mesh
from tests.comm.plain import (
    GRID,
    LINE,
    NOTATIONS,
    TURNED,
    WITHOUT_PROCESS_GROUP,
    Case,
    called,
    group_of,
    inputs,
    results,
    typical,
)

OPS = torch.ops._c10d_functional
PLAIN = (int, float, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format, slice, type(None))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# ---- what stands in a trace -------------------------------------------------------------------


def recorded(f: Callable, xs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The graph that Dynamo gives to a backend; nothing runs."""
    found = []

    def backend(gm: torch.fx.GraphModule, _: list) -> Callable:
        found.append(gm)
        metas = [node.meta["example_value"] for node in gm.graph.output_node().args[0]]
        return lambda *_: tuple(torch.empty(meta.shape, dtype=meta.dtype) for meta in metas)

    torch.compile(f, fullgraph=True, backend=backend)(*xs)
    return found[0]


def joint(f: Callable, xs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """The forward graph of AOTAutograd; nothing runs."""
    found = []

    def keep(gm: torch.fx.GraphModule, _: list) -> Callable:
        found.append(gm)
        outs = [node.meta["val"] for node in gm.graph.output_node().args[0]]
        return lambda *_: [torch.empty(tuple(out.shape), dtype=out.dtype) for out in outs]

    aot_function(lambda *xs: tuple(f(*xs)), fw_compiler=keep)(*xs)
    return found[0]


TRACERS: dict[str, Callable] = {
    "make_fx fake": lambda f, xs: make_fx(f, tracing_mode="fake")(*xs),
    "make_fx symbolic": lambda f, xs: make_fx(f, tracing_mode="symbolic")(*xs),
    "make_fx meta": lambda f, xs: make_fx(f)(*[x.to("meta") for x in xs]),
    "aot": joint,
    "dynamo": recorded,
}


def flaws(gm: torch.fx.GraphModule) -> list[str]:
    """The nodes that a trace must not contain."""
    found = [f"attribute {name}" for name, _ in (*gm.named_buffers(), *gm.named_parameters())]
    found += [str(node) for node in gm.graph.nodes if node.op in ("get_attr", "call_module")]
    for node in gm.graph.nodes:
        leaves = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
        found += [f"{leaf!r} in {node}" for leaf in leaves if not isinstance(leaf, (torch.fx.Node, *PLAIN))]
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, AsyncTensor):
            found.append(f"{node} is an AsyncTensor")
    launches = [node for node in gm.graph.nodes if "_c10d_functional" in str(node.target) and not is_wait(node)]
    for node in launches:
        users = [user for user in node.users if is_wait(user)] or [w for user in node.users for w in user.users]
        found += [f"{node} is not waited for"] if not users or not all(map(is_wait, users)) else []
    return found if launches else [*found, "no collective"]


def is_wait(node: torch.fx.Node) -> bool:
    return node.target is OPS.wait_tensor.default


def trace(case: Case, spelling: str, rank: int, how: str) -> torch.fx.GraphModule:
    with as_rank(rank):
        group, place, ranks = group_of(spelling, rank)
        xs = inputs(case, place, len(ranks))
        return TRACERS[how](lambda *xs: called(case, place, len(ranks), xs, group), xs)


@pytest.mark.parametrize("how", list(TRACERS))
def test_a_trace_has_ops_with_plain_constants_each_waited_for(how: str) -> None:
    """For every collective and every notation that needs no process group."""
    assert not dist.is_initialized()
    wrong = []
    for i, spelling in enumerate(WITHOUT_PROCESS_GROUP):
        cases = typical(len(group_of(spelling, 1)[2]))
        for case in cases[i % 5 :: 5]:
            torch.compiler.reset()
            wrong += [f"{case}, {spelling}: {flaw}" for flaw in flaws(trace(case, spelling, 1, how))]
    assert wrong == []


# ---- traced here, run there -------------------------------------------------------------------


def size(spelling: str, rank: int) -> int:
    return len(group_of(spelling, rank)[2])


def run_twice(rank: int, graphs: list[list[bytes]], cases: list[tuple[int, str]]) -> list[str]:
    wrong = []
    for pickled, (i, spelling) in zip(graphs[rank], cases, strict=True):
        group, place, ranks = group_of(spelling, rank)
        case = typical(len(ranks))[i]
        members(group)  # this process has not heard of the group yet
        gm = pickle.loads(pickled)
        for seed in (1, 2):
            given = [inputs(case, at, len(ranks), seed) for at in range(len(ranks))]
            for y, z in zip(gm(*given[place]), results(case, given)[place], strict=True):
                if y.dtype != z.dtype or not torch.equal(y, z):
                    wrong.append(f"rank {rank}, {case}, {spelling}: {y} and not {z}")
    return wrong


@pytest.mark.parametrize("how", ["make_fx fake", "aot"])
def test_a_program_traced_without_a_process_group_runs_where_there_is_one(gloo4: Pool, how: str) -> None:
    cases = [((5 * i + k) % 17, spelling) for i, spelling in enumerate(WITHOUT_PROCESS_GROUP) for k in (0, 8)]
    graphs = [[pickle.dumps(trace(typical(size(s, rank))[i], s, rank, how)) for i, s in cases] for rank in range(4)]
    assert [line for lines in gloo4.run(run_twice, graphs, cases) for line in lines] == []


# ---- another group, another program -----------------------------------------------------------


def other_groups(rank: int) -> dict[str, list]:
    """Groups one after the other; Dynamo cannot tell each from the previous one by its type."""
    mutable = [0, 1, 2, 3]
    turned = [[0, 1], [2, 3]]

    def swap() -> list[int]:
        mutable[0], mutable[3] = mutable[3], mutable[0]
        return mutable

    def cross() -> list[list[int]]:
        turned[0][1], turned[1][1] = turned[1][1], turned[0][1]
        return turned

    pair = [rank, rank ^ 1] if rank % 2 == 0 else [rank ^ 1, rank]
    return {
        "lists": [lambda: [0, 1, 2, 3], lambda: [3, 1, 0, 2], lambda: pair, lambda: [0, 1, 2, 3]],
        "a list changed in place": [lambda: mutable, swap, swap],
        "lists of lists": [lambda: [[0, 1], [2, 3]], lambda: [[0, 2], [1, 3]], lambda: [[0], [1], [2, 3]]],
        "lists of lists changed in place": [lambda: turned, cross, cross],
        "meshes": [lambda: LINE, lambda: GRID["tp"], lambda: GRID["dp"], lambda: TURNED["tp"], lambda: LINE],
        "meshes that live for a call": [
            *[lambda shape=shape: (init_device_mesh("cpu", shape), 1) for shape in [(1, 4), (2, 2), (4, 1), (1, 4)]],
            *[lambda shape=shape: (init_device_mesh("cpu", shape), 1) for shape in [(2, 2), (4, 1), (2, 2)] * 4],
        ],
        "axes": [lambda: (GRID, "dp"), lambda: (GRID, "tp"), lambda: (GRID, 0), lambda: (GRID, -1), lambda: (GRID, 1)],
        "names": [lambda: "ranks:0-3", lambda: "ranks:3,1,0,2", lambda: "ranks:0-3"],
        "process groups": [lambda: dist.group.WORLD, lambda: GRID.get_group("tp"), lambda: GRID.get_group("dp")],
        "spellings": [lambda: [0, 1, 2, 3], lambda: LINE, lambda: (GRID, "tp"), lambda: "ranks:0-3", lambda: [[*pair]]],
    }


def stale(rank: int, kind: str) -> list[str]:
    x = torch.full((1, 2), float(rank))
    torch.compiler.reset()
    f = torch.compile(lambda x, group: all_gather_tensor(x, 0, group) * 1, fullgraph=True, backend="aot_eager")
    wrong = []
    for i, say in enumerate(other_groups(rank)[kind]):
        group = say()
        found, expected = f(x, group), all_gather_tensor(x, 0, group)
        if not torch.equal(found, expected):
            wrong.append(f"rank {rank}, call {i}, {group}: {found.tolist()} and not {wait(expected).tolist()}")
    return wrong


@pytest.mark.parametrize(
    "kind",
    ["lists", "a list changed in place", "lists of lists", "lists of lists changed in place", "meshes",
     "meshes that live for a call", "axes", "names", "process groups", "spellings"],
)  # fmt: skip
def test_a_compiled_function_notices_another_group(gloo4: Pool, kind: str) -> None:
    assert [line for lines in gloo4.run(stale, kind) for line in lines] == []


@pytest.mark.parametrize("spelling", ["list", "lists", "axis by name", "1-D mesh", "spmd's name"])
def test_a_compiled_function_notices_that_another_rank_is_played(spelling: str) -> None:
    say, groups = NOTATIONS[spelling]
    found: list = []

    def backend(gm: torch.fx.GraphModule, _: list) -> Callable:
        found.append([node.args[1:] for node in gm.graph.nodes if node.target is OPS.all_to_all_single.default])
        return lambda *_: (torch.empty(1),)

    group = say(0)
    case = Case("permute_tensor", (tuple((i + 1) % len(groups[0]) for i in range(len(groups[0]))),), ((2,),))
    f = torch.compile(lambda x: called(case, 0, 0, [x], group)[0], fullgraph=True, backend=backend)
    for rank in (0, 1, 2, 3, 0, 3):
        with as_rank(rank):
            f(torch.ones(2))
    assert len(found) == 4
    assert len({str(calls) for calls in found}) == 4


# ---- AsyncTensors as inputs of traces ---------------------------------------------------------


def taken(rank: int) -> list[str]:
    """An AsyncTensor into every kind of trace, and the trace again with other values."""
    wrong = []

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_tensor(a, "sum", 0, LINE) * 2 + wait(a)[:1] + b.sum() + all_reduce(b, "max", [0, 1, 2, 3])

    def sent(seed: int) -> list[torch.Tensor]:
        x = torch.full((4, 2), float(rank * seed))
        return [all_reduce(x, "sum", LINE), all_reduce(x[:1], "max", LINE)]

    made = {
        **{m: lambda m=m: make_fx(f, tracing_mode=m)(*sent(1)) for m in ("real", "fake", "symbolic")},
        "aot": lambda: aot_function(f, fw_compiler=lambda gm, _: gm),
        "compile": lambda: torch.compile(f, fullgraph=True, backend="aot_eager"),
    }
    for how, make in made.items():
        torch.compiler.reset()
        g = make()
        for seed in (1, 2, 3):
            expected, found = f(*sent(seed)), g(*sent(seed))
            plain = g(*map(wait, sent(seed))) if how != "aot" else found  # which wants the types it was traced with
            if not (torch.equal(found, expected) and torch.equal(plain, expected)):
                wrong.append(f"rank {rank}, {how}: {found} and {plain} and not {wait(expected)}")
    return wrong


def test_a_trace_takes_async_tensors_for_inputs_and_not_for_constants(gloo4: Pool) -> None:
    assert [line for lines in gloo4.run(taken) for line in lines] == []


def written(rank: int) -> list[float]:
    """A compiled function writes into an AsyncTensor, and uses one that it closes over."""
    y, z = all_reduce(torch.ones(2), "sum", LINE), all_reduce(torch.ones(2), "sum", LINE)

    def f(a: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return a + z

    return [*torch.compile(f, fullgraph=True, backend="aot_eager")(y).tolist(), *y.tolist(), *z.tolist()]


def test_a_compiled_function_writes_into_async_tensors(gloo4: Pool) -> None:
    assert gloo4.run(written) == [[12.0, 12.0, 8.0, 8.0, 4.0, 4.0]] * 4


def untouched(rank: int) -> list[bool]:
    """Traced with fake tensors only: the AsyncTensor outside keeps real data."""
    y = all_reduce(torch.ones(2), "sum", LINE)
    make_fx(lambda x: x + y, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.ones(2))
    return y.tolist() == [4.0, 4.0]


def test_a_trace_leaves_an_async_tensor_that_it_closes_over_alone(gloo4: Pool) -> None:
    assert all(gloo4.run(untouched))


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_meta_and_fake_tensors_go_through(device: str) -> None:
    mode = torch._subclasses.FakeTensorMode()
    for case in typical(4):
        xs = [x.to("meta") if device == "meta" else mode.from_tensor(x) for x in inputs(case, 2, 4)]
        with as_rank(2):
            found = called(case, 2, 4, xs, LINE)
        expected = results(case, [inputs(case, i, 4) for i in range(4)])[2]
        assert [(y.shape, y.dtype, type(y)) for y in found] == [
            (z.shape, z.dtype, type(x)) for z, x in zip(expected, xs[:1] * len(expected), strict=True)
        ]
