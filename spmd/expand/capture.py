"""Capture: record the single-device function as one functional graph on global shapes.

    graph(model.w, optimizer.step[model.w], ..., tokens, lr) -> loss, new model.w, ...

The function runs once under make_fx, on fake tensors of the *global* sizes: forward, backward and optimiser step, as
the user wrote them. Parameters, buffers, gradients and optimiser state are inputs and outputs of the graph. In-place
writes are made functional. Floats, such as the learning rate, are symbols, and so are the sizes of tensor arguments
(`sizes`). The step count is read from its tensor. The mesh plays no role here, except for functions of blocks
(`local_map`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from spmd import _torch
from spmd.expand.arithmetic import only_arithmetic
from spmd.expand.asked import Answers, asked
from spmd.expand.captured import Argument, Captured
from spmd.expand.caught import NotTheOps
from spmd.expand.cleaning import remove_inputs, remove_noops, unread_inputs
from spmd.expand.closed_over import Search, search_of
from spmd.expand.constraints import capture_constraints
from spmd.expand.containers import Containers
from spmd.expand.cut_views import write_slices
from spmd.expand.dense_views import DENSE_VIEWS
from spmd.expand.draws import Draws, number_draws
from spmd.expand.equal_counts import EqualCounts
from spmd.expand.first_state import FirstState
from spmd.expand.keep_products import KeepProducts, restore_torch_ops
from spmd.expand.kept_numbers import Apart, Kept, kept_numbers
from spmd.expand.late_items import read_late
from spmd.expand.local_map import capture_local_maps, tracing_lock
from spmd.expand.loops.roll import rolled
from spmd.expand.module_attributes import Attributes, check_read
from spmd.expand.objects import with_containers
from spmd.expand.outside import changed_outside
from spmd.expand.phases import fill_phases
from spmd.expand.sizes.lift import lift_sizes
from spmd.expand.sizes.sources import Sizes
from spmd.expand.sources.writes import undone
from spmd.expand.stamp.attempts import with_stamps
from spmd.expand.stamp.blocks import CoupledBlocks
from spmd.expand.stamp.repeats import Structure
from spmd.expand.state import Slot, State, Tensors, in_order, named_leaves
from spmd.expand.trace_errors import explained
from spmd.expand.traced_function import TracedFunction
from spmd.expand.user_code import ended_in_user_code, in_user_code
from spmd.mesh import DeviceMesh
from spmd.tensor.rules.decompositions import decompositions


def capture(
    fn: Callable,
    args: dict[str, Any],
    call: Callable[[dict[str, Any]], Any],
    state: State,
    mesh: DeviceMesh | None = None,
    first: FirstState | None = None,
    stamp_blocks: bool = True,
    apart: Apart | None = None,
    containers: Containers | None = None,
) -> Captured:
    """Trace `call(args)`, which calls fn with the named arguments. mesh: the mesh of the functions of blocks in fn.

    first: the state that optimisers would make, if they made it now: where they do, it is an input of the graph.
    stamp_blocks: as in `spmd.compile`. apart: tensors of the state that are not one number, though they may be equal.
    containers: those in each argument, of which args are copies, and those that are found around the step.

    The arguments, and the modules and optimisers among them, are unchanged afterwards.

    A step may change the Python state of a module or of an object, such as a flag that says that something was done
    once. Such `changes` and `writes` are to be made after the graph has run, and the graph is right for one call alone.

    Raises RuntimeError if fn uses a tensor that is neither an argument nor inside one, or if it branches on a value
    that is known only when the program runs.
    Raises NotImplementedError if fn draws random numbers that cannot be numbered, or if it makes tensors whose sizes
    are known only when the program runs.
    """
    if containers is None:
        containers = {name: with_containers(x)[1] for name, x in args.items()}
    captured = _capture_first(fn, args, call, state, mesh, apart, containers, first or {}, stamp_blocks)
    for path in captured.grown:
        if path.rpartition(".")[0] in state.objects:
            raise changed_outside(search_of(fn, state.holders), path)
    return captured


def _capture_first(fn: Callable, *given: Any) -> Captured:
    """With the state that optimisers make first as inputs, or, if that fails, as values that the graph computes."""
    *rest, first, stamp_blocks = given
    try:
        return _capture_once(fn, *rest, first, stamp_blocks)
    except Exception:
        if not first:
            raise
    return _capture_once(fn, *rest, {}, stamp_blocks)


def _capture_once(
    fn: Callable, args: dict[str, Any], call: Callable, state: State, mesh: DeviceMesh | None, apart: Apart | None,
    containers: Containers, first: FirstState, stamp_blocks: bool,
) -> Captured:  # fmt: skip
    """A trace with sizes and floats as symbols. What cannot be one is a plain number."""
    leaves = [*named_leaves(args), *((path, place.value) for path, place in state.counters.items())]
    to_fix = [
        numbers for kind in (int, float) if (numbers := {path: x for path, x in leaves if type(x) is kind})
    ]  # fmt: skip
    fixed: dict[str, float] = {}
    static = ""
    while True:
        try:
            trace = functools.partial(_traced, fn, args, call, state, fixed, mesh, apart, containers, first, static)
            captured = with_stamps(trace, fn, state, stamp_blocks)
        except Exception as error:
            if not static and not _ints(to_fix):
                static = f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            if not to_fix:
                raise
        else:
            if not to_fix or only_arithmetic(captured.graph):
                return captured
        fixed = fixed | to_fix.pop(0)


def _ints(numbers: list[dict[str, float]]) -> bool:
    """Whether the first of these are ints: they are the first that are symbols no more."""
    return bool(numbers) and type(next(iter(numbers[0].values()))) is int


def _traced(
    fn: Callable, args: dict[str, Any], call: Callable, state: State, fixed: dict[str, float], mesh: DeviceMesh | None,
    apart: Apart | None, containers: Containers, first: FirstState, static: str,
    stamped: Callable[[EqualCounts], contextlib.AbstractContextManager], blocks: Mapping[int, Structure],
) -> Captured:  # fmt: skip
    """fixed: floats that are no symbols. static: why sizes are none; empty where they are symbols. blocks: the equal
    modules whose calls are stamped."""
    symbols = _torch.Symbols()
    sizes = Sizes(symbols, mesh, is_symbolic=not static)
    slots = in_order(state.tensors() | first)
    attributes = Attributes.of(state)
    inputs = _inputs(slots, dict(named_leaves(args)), attributes, state, fixed, symbols, sizes)
    kept, known = kept_numbers(slots, apart)
    note = {slot: symbols.noting(number, known[number]) for number, several in kept.items() for slot in several}
    values = list(inputs.values())
    begin, more = [*values[:1], *values[len(slots) :]] if slots else values, values[1 : len(slots)]
    names = {slot: name for name, several in kept.items() for slot in several}
    flat = TracedFunction(
        fn, call, args, containers, state, attributes, slots, tuple(inputs), note, names, tuple(first), stamped, blocks,
        sizes.symbols, more,
    )  # fmt: skip
    search = search_of(fn, state.holders)
    with undone(fn, args, containers, state, search) as found:
        gm, environment = _complete_trace(fn, flat, begin, mesh, symbols, search, bool(static))
        found.check_elsewhere(flat.written)
    read = _read_numbers(gm.graph, flat.inputs, kept), tuple(sorted(flat.counts.used))
    constants, inputs = _constants(gm), _cleaned(gm.graph, flat)
    found.check_constants(constants)
    made_of, shared = (flat.outputs, flat.leaves, flat.tree), flat.shared
    one = flat.identities, shared.same, shared.given, tuple(shared.detached), flat.views
    made = tuple(i for i in inputs if i in first)
    used = (*inputs, *flat.outputs)
    sizes.forget(attributes.tensors.keys() - {i.path for i in used if isinstance(i, Argument)})
    known = *read, sizes.assumed(static), made, flat.ignores_gradients, flat.stepped, flat.first_kept
    rest = bool(flat.blocks.kinds), environment, flat.set_attributes, flat.grown
    looped = with_loops if (with_loops := rolled(gm.graph)) is not gm.graph else None
    last = *one, flat.changes, *known, *rest
    named = {"looped": looped, "new_options": flat.new_options, "writes": found.writes}
    return Captured(gm.graph, constants, inputs, *made_of, symbols, fixed, *last, **named)


def _inputs(
    slots: Tensors, leaves: dict[str, Any], attributes: Attributes, state: State, fixed: dict[str, float],
    symbols: _torch.Symbols, sizes: Sizes,
) -> dict[Slot | Argument, Any]:
    """What stands for the tensors of the state and for the arguments: fake tensors, and symbols for numbers."""
    given = {path: x for path, x in (leaves | state.numbers()).items() if path not in fixed}
    numbers = {path: float(x) for path, x in given.items() if isinstance(x, float)}
    inputs: dict[Slot | Argument, Any] = dict(zip(slots, sizes.states(list(slots.values())), strict=True))
    inputs |= {Argument(path): sizes.argument(path, x) for path, x in leaves.items() if isinstance(x, torch.Tensor)}
    inputs |= {Argument(path): sizes.attribute(path, x) for path, x in attributes.tensors.items()}
    inputs |= {Argument(path): symbols.number(path, x) for path, x in numbers.items()}
    return inputs | {Argument(path): sizes.integer(path, x) for path, x in given.items() if type(x) is int}


def _complete_trace(
    fn: Callable, flat: TracedFunction, begin: list[Any], mesh: DeviceMesh | None, symbols: _torch.Symbols,
    search: Search, is_exact: bool,
) -> tuple[fx.GraphModule, Answers]:  # fmt: skip
    """The trace of a function, and what it has read of the environment. An error is explained in words of the step.
    search: of the step. is_exact: whether sizes are numbers."""
    table = decompositions | DENSE_VIEWS
    flat.watch_errors(search.functions, is_exact)
    try:
        with (
            tracing_lock, capture_local_maps(mesh) as insert_calls, capture_constraints(mesh) as insert_constraints,
            _torch.backward_under(KeepProducts), asked(search) as process,
        ):  # fmt: skip
            # Its code is never asked for: its graph alone is read, and cleaned later.
            with _torch.code_when_called(), _torch.without_layouts(), _torch.without_cleaning():
                gm = make_fx(flat, decomposition_table=table, tracing_mode="fake")(begin)
            flat.finish(gm.graph)
            insert_calls(gm.graph)
            insert_constraints(gm.graph)
            flat.counts.finish(gm.graph)
            flat.caught.check(gm.graph)
            symbols.forget_ops()
        for error in symbols.refused:
            if ended_in_user_code(error):
                raise error
    except NotTheOps as error:
        in_words = explained(getattr(fn, "__name__", str(fn)), error.__cause__)
        raise in_words or RuntimeError(f"{error}{in_user_code(error)}") from error
    except Exception as error:
        if flat.blocks.kinds:  # a step that is wrong is so without stamps, too, and says it in its own words
            raise CoupledBlocks(f"{type(error).__name__}: {error}") from error
        if (in_words := explained(getattr(fn, "__name__", str(fn)), error)) is None:
            raise
        raise in_words from error
    return gm, process.environment


def _cleaned(graph: fx.Graph, flat: TracedFunction) -> tuple[Slot | Argument | Draws, ...]:
    """Clean the graph of a complete trace. Returns its inputs."""
    inputs = remove_inputs(graph, flat.inputs, flat.unmade)
    restore_torch_ops(graph)
    lift_sizes(graph, flat.sizes)
    flat.take_views(graph, inputs)
    remove_noops(graph)
    attributes = {Argument(path) for path in flat.attributes.tensors}
    gradients = {i for i in inputs if isinstance(i, Slot) and i.kind == "grad"} if flat.ignores_gradients else set()
    inputs = remove_inputs(graph, inputs, (attributes | gradients) & unread_inputs(graph, inputs))
    check_read(flat.attributes, [i.path for i in inputs if i in attributes])
    for number, node in enumerate(graph.find_nodes(op="placeholder"), start=1):
        node.name = f"arg0_{number}"  # whatever there was that the graph does not read: one program has one text
    fill_phases(graph)
    write_slices(graph)
    read_late(graph)
    return (*inputs, *number_draws(graph))


def _read_numbers(graph: fx.Graph, inputs: tuple[Slot | Argument, ...], kept: Kept) -> Kept:
    """The tensors that hold the numbers, but for those that the graph does not read: they may be what they like."""
    output = graph.output_node()
    nodes = zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
    read = {i for n, i in nodes if n.users.keys() - {output}}
    found = {name: tuple(slot for slot in several if slot in read) for name, several in kept.items()}
    return {name: several for name, several in found.items() if several}


def _constants(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    return {n.target: getattr(gm, n.target) for n in gm.graph.nodes if n.op == "get_attr"}
