"""Programs traced with CommTensor do on four real ranks what the collectives do."""

from __future__ import annotations

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from versions import GLOO_HAS_ALL_TO_ALL_OF_LISTS
from workers import Pool

from spmd import _torch
from spmd.comm.comm_tensor import CommTensor, comm_tensors
from spmd.comm.comm_tensor_ops import COLLECTIVES, leaves, pair
from spmd.comm.place_waits import WAIT
from spmd.mesh import groups

N = 4
MODES = ["real", "fake", "symbolic"]
Tensors = list[torch.Tensor]


def data(rank: int, seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: every order of summing gives the same bits."""
    source = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-3, 4, shape, generator=source).to(dtype)


def finish(call: Callable, *args: Any, how: str, **kwargs: Any) -> None:
    """Call the collective "sync", "async", or "async and wait"."""
    work = call(*args, **kwargs, async_op=how != "sync")
    if how == "async and wait":
        work.wait()


# ---- one case a collective --------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A step on this rank's tensors, and its expected result, computed from the tensors of all ranks, no network."""

    step: Callable[..., Any]  # (rank, how, *tensors) -> tensors
    truth: Callable[..., Any]  # (rank, every: the tensors of each rank) -> tensors
    shapes: tuple = ((4, 3),)
    dtype: torch.dtype = torch.float32

    def inputs(self, rank: int, seed: int) -> Tensors:
        return [data(rank, 10 * seed + i, *shape, dtype=self.dtype) for i, shape in enumerate(self.shapes)]

    def expected(self, rank: int, seed: int) -> Any:
        return self.truth(rank, [self.inputs(r, seed) for r in range(N)])


def total(every: list[Tensors], i: int = 0) -> torch.Tensor:
    return sum(xs[i] for xs in every)


def all_reduce(op: Any = dist.ReduceOp.SUM) -> Callable:
    def step(rank: int, how: str, x: torch.Tensor) -> Any:
        finish(dist.all_reduce, CommTensor(x), op, how=how)
        return x * 2, x

    return step


def reduced(fold: Callable) -> Callable:
    def truth(rank: int, every: list[Tensors]) -> Any:
        y = fold(torch.stack([xs[0] for xs in every]))
        return y * 2, y

    return truth


def all_gather(rank: int, how: str, x: torch.Tensor) -> Any:
    outs = [torch.zeros_like(x) for _ in range(N)]
    finish(dist.all_gather, [CommTensor(out) for out in outs], CommTensor(x), how=how)
    return outs[2] + 1, outs


def all_gather_into(rank: int, how: str, x: torch.Tensor) -> Any:
    out = x.new_zeros(N * x.shape[0], *x.shape[1:])
    finish(dist.all_gather_into_tensor, CommTensor(out), x, how=how)
    return out.sum(0), out


def gathered(rank: int, every: list[Tensors]) -> Any:
    xs = [xs[0] for xs in every]
    return xs[2] + 1, xs


def gathered_into(rank: int, every: list[Tensors]) -> Any:
    out = torch.cat([xs[0] for xs in every])
    return out.sum(0), out


def reduce_scatter(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x[0])
    finish(dist.reduce_scatter, CommTensor(out), comm_tensors(list(x.unbind())), how=how)
    return out + 1


def reduce_scatter_tensor(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x[:1])
    finish(dist.reduce_scatter_tensor, CommTensor(out), CommTensor(x), how=how)
    return out + 1


def broadcast(rank: int, how: str, x: torch.Tensor) -> Any:
    finish(dist.broadcast, CommTensor(x), 2, how=how)
    return x - 1, x


def scatter(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x[0])
    finish(dist.scatter, CommTensor(out), comm_tensors(list(x.unbind())) if rank == 1 else None, 1, how=how)
    return out * 3


def gather(rank: int, how: str, x: torch.Tensor) -> Any:
    outs = [torch.zeros_like(x) for _ in range(N)] if rank == 3 else None
    finish(dist.gather, CommTensor(x), outs, 3, how=how)
    x.add_(1)  # only after x was sent
    return x, torch.stack(outs) if outs else None


def reduce(rank: int, how: str, x: torch.Tensor) -> Any:
    finish(dist.reduce, CommTensor(x), 1, how=how)
    return x + 1 if rank == 1 else None


def all_to_all(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    outs = list(torch.zeros_like(x).unbind())
    finish(dist.all_to_all, comm_tensors(outs), list(x.unbind()), how=how)
    return torch.stack(outs)


def all_to_all_single(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    finish(dist.all_to_all_single, CommTensor(out), CommTensor(x), how=how)
    return out + 1


def all_to_all_uneven(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(N * rank, 3)  # every rank sends j rows to rank j
    finish(dist.all_to_all_single, CommTensor(out), x, [rank] * N, [0, 1, 2, 3], how=how)
    return out + 1


def all_reduce_coalesced(rank: int, how: str, x: torch.Tensor, y: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        finish(dist.all_reduce_coalesced, comm_tensors([x, y]), how=how)
    return y + 1, x


def all_gather_coalesced(rank: int, how: str, x: torch.Tensor, y: torch.Tensor) -> Any:
    lists = [[torch.zeros_like(t) for t in (x, y)] for _ in range(N)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        finish(dist.all_gather_coalesced, comm_tensors(lists), [x, y], how=how)
    return [[t + 1 for t in pair] for pair in lists]


def ring(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(CommTensor(x))
    works = [dist.isend(x, (rank + 1) % N), dist.irecv(out, (rank - 1) % N)]
    if how != "async":
        [work.wait() for work in works]
    return out + 1


def two_in_flight(rank: int, how: str, x: torch.Tensor, y: torch.Tensor) -> Any:
    finish(dist.all_reduce, CommTensor(x), how=how)
    finish(dist.broadcast, CommTensor(y), 0, how=how)
    return x + y


def one_after_another(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    finish(dist.all_reduce, CommTensor(x), how=how)
    finish(dist.all_reduce, CommTensor(CommTensor(x)), how=how)
    finish(dist.broadcast, CommTensor(x), 1, how=how)
    return x


def part_of_a_tensor(rank: int, how: str, x: torch.Tensor) -> Any:
    before = x.view(-1)
    finish(dist.all_reduce, CommTensor(x[1]), how=how)
    finish(dist.all_reduce, CommTensor(x)[2], how=how)
    return before * 1, x.t()[0] + 1


def transposed(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    finish(dist.all_reduce, CommTensor(x.t()), how=how)
    return x + 0


def written_after(rank: int, how: str, x: torch.Tensor) -> Any:
    outs = [torch.zeros_like(x) for _ in range(N)]
    finish(dist.all_gather, comm_tensors(outs), x, how="sync")
    x.zero_()  # only after x was sent
    finish(dist.all_reduce, CommTensor(outs[0]), how=how)
    outs[0].add_(1)
    return x, outs


def nothing_read(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    finish(dist.all_reduce, CommTensor(x.clone()), how=how)
    finish(dist.all_reduce, CommTensor(x), how=how)
    return CommTensor(x)


def coalesced(rank: int, how: str, x: torch.Tensor, y: torch.Tensor) -> Any:
    xs, ys = x.new_zeros(N * 4), torch.zeros_like(y[:1])
    with dist._coalescing_manager(async_ops=how != "sync") as works:
        dist.all_gather_into_tensor(CommTensor(xs), x)
    if how == "async and wait":
        works.wait()
    with dist._coalescing_manager(async_ops=how != "sync"):
        dist.reduce_scatter_tensor(ys, y)
    return xs + 1, ys


def number(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    one = torch.tensor(1.0)
    finish(dist.all_reduce, CommTensor(one), how=how)
    return x * one


def with_barrier(rank: int, how: str, x: torch.Tensor) -> torch.Tensor:
    finish(dist.all_reduce, CommTensor(x), how=how)
    dist.barrier()
    return x + 1


def split_and_joined(rank: int, how: str, x: torch.Tensor) -> Any:
    """Reads and writes through views taken after the launch, and memory that is shared by `set_`."""
    other = x.new_empty(0).set_(x)
    finish(dist.all_reduce, CommTensor(x), how=how)
    first, second = x.split(2)
    torch._foreach_add_([first], [second])
    finish(dist.all_reduce, CommTensor(x), how=how)
    return other + 1


def rows(rank: int, every: list[Tensors], row: int) -> torch.Tensor:
    return torch.stack([xs[0][row] for xs in every])


def parts_reduced(rank: int, every: list[Tensors]) -> Any:
    x = every[rank][0].clone()
    x[1], x[2] = total(every)[1], total(every)[2]
    return x.view(-1), x.t()[0] + 1


def split_then_reduced(rank: int, every: list[Tensors]) -> torch.Tensor:
    x = total(every)
    x[:2] += x[2:]
    return N * x + 1


def gathered_then_written(rank: int, every: list[Tensors]) -> Any:
    xs = [xs[0] for xs in every]
    return torch.zeros_like(xs[0]), [4 * xs[0] + 1, *xs[1:]]


CASES = {
    **{f"all_reduce {name}": Case(all_reduce(getattr(dist.ReduceOp, name)), reduced(fold)) for name, fold in {
        "SUM": lambda s: s.sum(0), "PRODUCT": lambda s: s.prod(0), "MAX": lambda s: s.amax(0),
        "MIN": lambda s: s.amin(0),
    }.items()},
    **{f"all_reduce {dtype}": Case(all_reduce(), reduced(lambda s: s.sum(0, dtype=s.dtype)), dtype=dtype)
       for dtype in (torch.int64, torch.bfloat16, torch.float64, torch.complex64)},
    **{f"all_reduce {shape}": Case(all_reduce(), reduced(lambda s: s.sum(0)), (shape,))
       for shape in ((), (0,), (2, 0))},
    "all_gather": Case(all_gather, gathered),
    "all_gather bool": Case(all_gather, gathered, dtype=torch.bool),
    "all_gather complex": Case(all_gather, gathered, dtype=torch.complex64),
    "all_gather 0-dim": Case(all_gather, gathered, ((),)),
    "all_gather_into_tensor": Case(all_gather_into, gathered_into),
    "reduce_scatter": Case(reduce_scatter, lambda r, every: total(every)[r] + 1),
    "reduce_scatter_tensor": Case(reduce_scatter_tensor, lambda r, every: total(every)[r : r + 1] + 1),
    "broadcast": Case(broadcast, lambda r, every: (every[2][0] - 1, every[2][0])),
    "scatter": Case(scatter, lambda r, every: every[1][0][r] * 3),
    "gather": Case(gather, lambda r, every: (
        every[r][0] + 1, torch.stack([xs[0] for xs in every]) if r == 3 else None)),
    "reduce": Case(reduce, lambda r, every: total(every) + 1 if r == 1 else None),
    "all_to_all": Case(all_to_all, lambda r, every: rows(r, every, r)),
    "all_to_all_single": Case(all_to_all_single, lambda r, every: rows(r, every, r) + 1),
    "all_to_all_single uneven": Case(
        all_to_all_uneven,
        lambda r, every: torch.cat([xs[0][sum(range(r)) : sum(range(r)) + r] for xs in every]) + 1, ((6, 3),)),
    "all_reduce_coalesced": Case(
        all_reduce_coalesced, lambda r, every: (total(every, 1) + 1, total(every)), ((4, 3), (2,))),
    "all_gather_coalesced": Case(
        all_gather_coalesced, lambda r, every: [[x + 1 for x in xs] for xs in every], ((4, 3), (2,))),
    "all_gather_into_tensor_coalesced reduce_scatter_tensor_coalesced": Case(
        coalesced, lambda r, every: (torch.cat([xs[0] for xs in every]) + 1, total(every, 1)[r : r + 1]),
        ((4,), (4, 3))),
    "send and recv": Case(ring, lambda r, every: every[(r - 1) % N][0] + 1),
    "two in flight": Case(two_in_flight, lambda r, every: total(every) + every[0][1], ((4,), (4,))),
    "one after another": Case(one_after_another, lambda r, every: N * total(every)),
    "part of a tensor": Case(part_of_a_tensor, parts_reduced),
    "transposed": Case(transposed, lambda r, every: total(every)),
    "written after": Case(written_after, gathered_then_written),
    "nothing read": Case(nothing_read, lambda r, every: total(every)),
    "split and joined": Case(split_and_joined, split_then_reduced),
    "a number": Case(number, lambda r, every: 4 * every[r][0]),
    "barrier": Case(with_barrier, lambda r, every: total(every) + 1),
}  # fmt: skip


UNPICKLABLE = {"a number", "barrier"}
"""Collectives on constants alone, which torch.fx would run when it unpickles the graph."""


def same(a: Any, b: Any) -> bool:
    a, b = list(leaves(a)), list(leaves(b))
    equal = lambda x, y: x is y or (x.dtype == y.dtype and torch.equal(x, y))  # noqa: E731
    return len(a) == len(b) and all(map(equal, a, b))


PLAIN = (str, int, float, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


def foreign(gm: torch.fx.GraphModule) -> list:
    """The arguments in the graph that are not nodes, plain data or plain tensors."""
    held = [value for node in gm.graph.nodes for value in _torch.pytree.tree_leaves((node.args, node.kwargs))]
    held = [value for value in held if not isinstance(value, (torch.fx.Node, *PLAIN))]
    named = [getattr(gm, node.target) for node in gm.graph.nodes if node.op == "get_attr"]
    metas = [value for node in gm.graph.nodes for value in leaves(node.meta.get("val"))]
    kinds = (dist.ProcessGroup, dist.Work, torch.ScriptObject)
    return held + [x for x in named if type(x) is not torch.Tensor] + [x for x in metas if isinstance(x, kinds)]


def wrong(rank: int, name: str, mode: str, how: str) -> list[str]:
    """The failures of a traced program: run as traced, without dead code, copied, pickled and traced again."""
    case, in_flight = CASES[name], _torch.works_in_flight()  # those that other tests left
    gm = make_fx(lambda *xs: case.step(rank, how, *xs), tracing_mode=mode)(*case.inputs(rank, 0))
    bad = [f"holds {foreign(gm)}"] if foreign(gm) else []
    bad += [f"run {seed}" for seed in (1, 2) if not same(gm(*case.inputs(rank, seed)), case.expected(rank, seed))]
    if how == "async" and mode != "symbolic":
        again = make_fx(gm, tracing_mode=mode)(*case.inputs(rank, 0))
        lean = copy.deepcopy(gm)
        lean.graph.eliminate_dead_code()
        lean.recompile()
        programs = {"without dead code": lean, "traced again": again}
        if name not in UNPICKLABLE:
            programs["pickled"] = pickle.loads(pickle.dumps(gm))
        bad += [k for k, p in programs.items() if not same(p(*case.inputs(rank, 3)), case.expected(rank, 3))]
        bad += [k for k, p in programs.items() if waits(p) != waits(gm)]
    if _torch.works_in_flight() > in_flight:
        bad.append(f"{_torch.works_in_flight() - in_flight} not waited for")
    return [f"rank {rank}, {name}, {mode}, {how}: {text}" for text in bad]


def waits(gm: torch.fx.GraphModule) -> int:
    return [node.target for node in gm.graph.nodes].count(WAIT)


def all_wrong(rank: int, mode: str, how: str) -> list[str]:
    names = [name for name in CASES if name != "all_to_all" or GLOO_HAS_ALL_TO_ALL_OF_LISTS]
    return [text for name in names for text in wrong(rank, name, mode, how)]


@pytest.mark.parametrize(
    "mode, how", [("fake", "async and wait"), *itertools.product(MODES, ("sync", "async"))]
)
def test_a_traced_collective_does_what_it_says_on_fresh_inputs(gloo4: Pool, mode: str, how: str) -> None:
    """Every collective; the failures on all ranks."""
    assert list(itertools.chain(*gloo4.run(all_wrong, mode, how))) == []


def test_the_table_has_every_collective() -> None:
    assert {c.launch.__name__ for c in COLLECTIVES.values()} <= set(" ".join(CASES).split())


# ---- where a program launches and waits -------------------------------------------------------


def overlap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(CommTensor(x), async_op=True)
    z = y * 2
    return x + z - x.view(-1)


def second_of_two(x: torch.Tensor) -> Tensors:
    outs = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_gather(comm_tensors(outs), CommTensor(x), group=pair_of_ranks())
    return [outs[1] + 1, outs[0]]


def written_input(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(2)
    dist.reduce_scatter_tensor(CommTensor(out), CommTensor(x), dist.ReduceOp.MAX, async_op=True)
    y = x + 1
    x.zero_()
    return y


def aliased_inputs(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    dist.broadcast(CommTensor(x), 3)
    return part + 1


def pair_of_ranks() -> dist.ProcessGroup:
    ranks = (0, 1) if dist.get_rank() < 2 else (2, 3)
    return groups.group_of(ranks)


PROGRAMS = {
    overlap: """\
all_reduce([x_1], 'sum', 'ranks:0-3') -> all_reduce
pair([x_1], all_reduce) -> pair
pair[0] -> getitem
mul(y_1, 2) -> mul
wait_tensor(getitem) -> wait_tensor
add(wait_tensor, mul) -> add
view(wait_tensor, [-1]) -> view
sub(add, view) -> sub
return sub""",
    second_of_two: """\
empty_like(x_1) -> empty_like
empty_like(x_1) -> empty_like_1
all_gather([[empty_like, empty_like_1]], [x_1], 'ranks:0,1') -> all_gather
pair([empty_like, empty_like_1], all_gather) -> pair
pair[0] -> getitem
pair[1] -> getitem_1
wait_tensor(getitem_1) -> wait_tensor
add(wait_tensor, 1) -> add
wait_tensor(getitem) -> wait_tensor_1
return [add, wait_tensor_1]""",
    written_input: """\
empty([2]) -> empty
reduce_scatter_tensor(empty, x_1, 'max', 'ranks:0-3') -> reduce_scatter_tensor
pair([empty], reduce_scatter_tensor) -> pair
pair[0] -> getitem
add(x_1, 1) -> add
wait_tensor(getitem) -> wait_tensor
zero_(x_1) -> zero_
return add""",
    aliased_inputs: """\
broadcast([x_1], 3, 'ranks:0-3') -> broadcast
pair([x_1], broadcast) -> pair
pair[0] -> getitem
wait_tensor(getitem) -> wait_tensor
add(part_1, 1) -> add
return add""",
}


def text(gm: torch.fx.GraphModule) -> str:
    """The program, one node a line."""
    lines = []
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
        elif node.op == "call_function":
            name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
            args = ", ".join(map(repr, node.args))
            call = f"{node.args[0]}[{node.args[1]}]" if name == "getitem" else f"{name}({args})"
            lines.append(f"{call} -> {node}")
    return "\n".join(lines)


def program(rank: int, name: str, mode: str) -> str:
    step, x = globals()[name], torch.ones(8)
    inputs = {overlap: (x, x.clone()), aliased_inputs: (x, x[1:])}.get(step, (x,))
    return text(make_fx(step, tracing_mode=mode)(*inputs))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", PROGRAMS)
def test_a_program_waits_before_the_first_reader(gloo4: Pool, step: Callable, mode: str) -> None:
    assert gloo4.run(program, step.__name__, mode)[0] == PROGRAMS[step]


def sends_nothing(rank: int, mode: str) -> str:
    """Only one rank traces: a message would have no partner, and the next message would be off by one."""
    case = CASES["all_reduce SUM"]
    gm = make_fx(lambda x: case.step(rank, "sync", x), tracing_mode=mode)(*case.inputs(rank, 0)) if rank == 0 else None
    dist.all_reduce(x := torch.ones(1))
    return f"{x.item()} {waits(gm) if gm else 1}"


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_trace_on_fakes_sends_nothing(gloo4: Pool, mode: str) -> None:
    assert gloo4.run(sends_nothing, mode) == ["4.0 1"] * 4


def traced_values(rank: int) -> Tensors:
    """The values that the ops of a trace on real tensors read."""
    seen = []

    def step(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(CommTensor(x), async_op=True)
        y = x + 1
        seen.append(y)
        return y

    x = torch.ones(2)
    make_fx(step)(x)
    return [x, *seen]


def test_a_trace_on_real_tensors_computes_with_what_arrived(gloo4: Pool) -> None:
    assert gloo4.run(traced_values)[0][0].tolist() == [4, 4] and gloo4.run(traced_values)[3][1].tolist() == [5, 5]


def read_a_number(x: torch.Tensor) -> torch.Tensor:
    one = torch.tensor(1.0)  # whose value a trace on fakes knows
    view = one.view(1)
    dist.all_reduce(CommTensor(one))
    return x * view.item()


def number_read(rank: int, mode: str) -> float:
    return make_fx(read_a_number, tracing_mode=mode)(torch.ones(1))(torch.ones(1)).item()


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_number_that_was_reduced_is_no_constant_any_more(gloo4: Pool, mode: str) -> None:
    assert gloo4.run(number_read, mode) == [4.0] * 4


# ---- groups -----------------------------------------------------------------------------------


def reduce_over(group: dist.ProcessGroup | None) -> Callable:
    def step(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(CommTensor(x), group=group)
        return x

    return step


def groups_of_ones_own(rank: int) -> list:
    """Whether the names lead to the groups, names, and sums.

    Over a group of torch's of all ranks, one of half of them, spmd's of the same half, and the default one.
    """
    half = [0, 1] if rank < 2 else [2, 3]
    every = dist.new_group([0, 1, 2, 3])
    mine = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    found = []
    for group in (every, mine, groups.group_of(tuple(half)), None):
        gm = make_fx(reduce_over(group), tracing_mode="fake")(torch.ones(1))
        name = next(node.args[-1] for node in gm.graph.nodes if node.name == "all_reduce")
        leads = group is not None and groups.find_group(name) is group
        found.append((leads, name, gm(torch.tensor([1.0 + rank])).item()))
    return found


def test_a_program_talks_over_the_very_group_it_was_given(gloo4: Pool) -> None:
    every, mine, ours, world = gloo4.run(groups_of_ones_own)[2]
    assert every[0] and not every[1].startswith("ranks:") and every[2] == 10
    assert mine[0] and not mine[1].startswith("ranks:") and mine[2] == 7
    assert ours == (True, "ranks:2,3", 7)
    assert world == (False, "ranks:0-3", 10)


# ---- one rank ---------------------------------------------------------------------------------


def test_outside_a_trace_wrapping_gives_the_tensor_itself() -> None:
    x = torch.ones(2)
    assert CommTensor(CommTensor(x)) is x
    assert comm_tensors([x, (x, [x])])[1][1][0] is x


def test_what_came_from_outside_is_a_constant_that_the_program_writes(alone: None) -> None:
    state = torch.ones(2)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        dist.all_reduce(CommTensor(state))
        return state * 1

    gm = make_fx(step)(torch.ones(2))
    assert state.tolist() == [2, 2] and gm(torch.ones(2)).tolist() == [3, 3] and gm(torch.ones(2)).tolist() == [4, 4]
    assert state.tolist() == [4, 4]


def test_a_coalescing_block_is_one_collective(alone: None) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with dist._coalescing_manager():
            dist.all_reduce(CommTensor(x))
            dist.all_reduce(CommTensor(y))
        return x + y

    gm = make_fx(step, tracing_mode="fake")(torch.ones(2), torch.ones(2))
    assert [node.name for node in gm.graph.nodes if node.name.startswith("all_")] == ["all_reduce_coalesced"]
    assert waits(gm) == 2 and gm(torch.ones(2), torch.ones(2)).tolist() == [2, 2]


def test_parameters_are_reduced_without_grad_and_gradients_after_backward(alone: None) -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        (w * x).sum().backward()
        dist.all_reduce(CommTensor(w.grad), async_op=True)
        with torch.no_grad():
            dist.broadcast(CommTensor(w), 0)
            return w - w.grad

    gm = make_fx(step, tracing_mode="fake")(torch.ones(2), torch.ones(2))
    assert waits(gm) == 2 and gm(torch.full((2,), 3.0), torch.ones(2)).tolist() == [2, 2]


def test_before_autograd_views_are_waited_for_as_well(alone: None) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(CommTensor(x), async_op=True)
        return x.reshape(2, 2).contiguous() + 1

    gm = make_fx(step, tracing_mode="fake", pre_dispatch=True)(torch.ones(4))
    assert waits(gm) == 1 and gm(torch.ones(4)).tolist() == [[2, 2], [2, 2]]


def reduce_with(op: Any) -> Callable:
    return lambda x: dist.all_reduce(CommTensor(x), op)


def receive(x: torch.Tensor) -> None:
    dist.recv(CommTensor(x))


def late(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return CommTensor(x)


@pytest.mark.parametrize(
    "step, error, message",
    [
        (lambda x: dist.all_reduce(CommTensor(x.requires_grad_())), RuntimeError, "all_reduce is not differentiable"),
        (lambda x: CommTensor([x]), TypeError, r"CommTensor takes a tensor, not list.*comm_tensors\(\[...\]\)"),
        (reduce_with(dist._make_nccl_premul_sum(2.0)), NotImplementedError, "Multiply first, x.mul_"),
        (lambda x: dist.all_reduce(CommTensor(x.to_sparse())), NotImplementedError, "give x.to_dense"),
        (receive, NotImplementedError, "recv_any_source_ cannot be traced.*all_to_all_single.*names its source"),
        (late, RuntimeError, r"allreduce: traced before the first CommTensor.*Wrap what it is given"),
        (torch.func.vmap(lambda x: CommTensor(x)), RuntimeError, "torch.func.*functional collectives of spmd.comm"),
        (torch.func.functionalize(lambda x: CommTensor(x)), RuntimeError, "functional collectives of spmd.comm"),
    ],
)
def test_wrong_use_is_an_error_that_says_what_works(
    alone: None, step: Callable, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_fx(step, tracing_mode="fake")(torch.ones(2))


def test_unpickling_sends_nothing(alone: None) -> None:
    gm = make_fx(lambda x: number(0, "sync", x), tracing_mode="fake")(torch.ones(2))
    saved = pickle.dumps(gm)
    with pytest.raises(RuntimeError, match=r"all_reduce: all that it is given is constant.*an input of the program"):
        pickle.loads(saved)


def test_an_unknown_group_is_named_when_the_program_runs(alone: None) -> None:
    gm = make_fx(lambda x: dist.all_reduce(CommTensor(x)), tracing_mode="fake")(torch.ones(2))
    node = next(node for node in gm.graph.nodes if node.name == "all_reduce")
    node.args = (*node.args[:-1], "gone")
    gm.recompile()
    with pytest.raises(ValueError, match="no process group of name 'gone'"):
        gm(torch.ones(2))


def test_a_program_outlives_the_process_group_it_was_traced_under() -> None:
    programs = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        programs.append(make_fx(lambda x: dist.all_reduce(CommTensor(x)) or x, tracing_mode="fake")(torch.ones(2)))
        assert all(gm(torch.ones(2)).tolist() == [1, 1] for gm in programs)
        dist.destroy_process_group()


def test_pairing_is_a_step_of_its_own_that_stays(alone: None) -> None:
    gm = make_fx(lambda x: dist.all_reduce(CommTensor(x)), tracing_mode="fake")(torch.ones(2))
    assert all(node.is_impure() for node in gm.graph.nodes if node.target in (pair, WAIT))
