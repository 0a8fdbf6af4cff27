"""Parts of a graph that can be written again with other inputs.

    mul_3 = mul(m, 0.9)           a part, from the inputs (m, g) to the output add_3
    add_3 = add(mul_3, g)
    stamp(part, {m: n, g: h})   ->   mul_7 = mul(n, 0.9); add_7 = add(mul_7, h)

`parts_of` divides what was traced for several parameters into one part for each, and raises `Coupled` where a node
reads two of them. `differing` compares two parts node by node. Nodes that read no input and lead to several parts are
in none: all of them read the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from spmd import _torch

Env = dict[fx.Node, fx.Node]


class Coupled(Exception):
    """What was to be stamped does not fall into equal, independent parts."""


@dataclass(frozen=True)
class Part:
    """The nodes, in order, that lead from the inputs to the outputs. An output may be an input, or be outside."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


Sides = tuple[Sequence[fx.Node], Sequence[fx.Node]]
"""The inputs and the outputs of a part."""


def parts_of(nodes: Sequence[fx.Node], sides: Sequence[Sides]) -> list[Part]:
    """The parts with these inputs and outputs among nodes at the end of a graph.

    Raises Coupled if a node reads inputs of two parts, or an output of one reads inputs of another.
    """
    reads = _reads(nodes, sides)
    leads = _leads(nodes, sides)
    for i, (_, outputs) in enumerate(sides):
        if any(reads.get(n, 0) & ~(1 << i) for n in outputs):
            raise Coupled(f"an output of part {i} reads inputs of another part")
    members: list[list[fx.Node]] = [[] for _ in sides]
    for n in nodes:
        owner = (reads[n] or leads[n]) if leads[n] else 0
        if owner and not owner & (owner - 1):
            members[owner.bit_length() - 1].append(n)
    return [Part(tuple(m), tuple(ins), tuple(outs)) for m, (ins, outs) in zip(members, sides, strict=True)]


def _reads(nodes: Sequence[fx.Node], sides: Sequence[Sides]) -> dict[fx.Node, int]:
    """For each node, the parts of whose inputs it is made, a bit for each. Raises Coupled for two parts."""
    reads: dict[fx.Node, int] = {}
    for i, (inputs, _) in enumerate(sides):
        for n in set(inputs):
            if n in reads:
                raise Coupled(f"{n} is an input of two parts")
            reads[n] = 1 << i
    for n in nodes:
        found = 0
        for m in n.all_input_nodes:
            found |= reads.get(m, 0)
        if found & (found - 1):
            raise Coupled(f"{n.format_node()} reads inputs of two parts")
        reads[n] = found
    return reads


def _leads(nodes: Sequence[fx.Node], sides: Sequence[Sides]) -> dict[fx.Node, int]:
    """For each node, the parts to whose outputs it leads, a bit for each."""
    leads = dict.fromkeys(nodes, 0)
    for i, (_, outputs) in enumerate(sides):
        for n in outputs:
            if n in leads:
                leads[n] |= 1 << i
    for n in reversed(nodes):
        for m in n.all_input_nodes:
            if m in leads:
                leads[m] |= leads[n]
    return leads


def differing(
    one: Part, other: Part, constant: Callable[[str], torch.Tensor], compared: Callable[[Any], Any] | None = None
) -> str:  # fmt: skip
    """Where two parts differ, as text; empty if the one is the other with other inputs.

    constant: by its name. compared: what is compared of the values of two nodes, by default their metadata.
    """
    described = metadata if compared is None else compared
    if len(one.nodes) != len(other.nodes):
        return f"{len(one.nodes)} nodes and {len(other.nodes)}"
    env: Env = dict(zip(one.inputs, other.inputs, strict=True))
    for a, b in zip(one.nodes, other.nodes, strict=True):
        env[a] = b
        if a.op == "get_attr":
            alike = b.op == a.op and _same_tensor(constant(a.target), constant(b.target))
        else:
            alike = (a.op, a.target) == (b.op, b.target) and _same((a.args, a.kwargs), (b.args, b.kwargs), env)
        if not alike or described(a.meta.get("val")) != described(b.meta.get("val")):
            return f"{a.format_node()} and {b.format_node()}"
    outputs = [env.get(n, n) for n in one.outputs]
    return "" if outputs == list(other.outputs) else "the nodes that are outputs"


def _same(a: Any, b: Any, env: Env) -> bool:
    if isinstance(a, fx.Node):
        return env.get(a, a) is b
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b, [env] * len(a)))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same(a[k], b[k], env) for k in a)
    return type(a) is type(b) and repr(a) == repr(b)  # NaN equals NaN, and 0.0 does not equal -0.0


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    return metadata(a) == metadata(b) and a.tolist().__repr__() == b.tolist().__repr__()


def metadata(value: Any) -> Any:
    """What is compared of two values of a trace: tensors without data, or several."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, *map(str, value.shape), *_torch.strides_text(value)
    return [metadata(v) for v in value] if isinstance(value, (list, tuple)) else type(value)


def stamp(part: Part, env: Env, metas: Iterable[dict[str, Any]] | None = None) -> None:
    """Write the nodes of the part again at the end of their graph, with the inputs that `env` has; adds them to it.

    metas: the metadata of the new nodes, by default those of the part's.
    """

    def given(n: fx.Node) -> fx.Node:
        return env.get(n, n)

    for n, meta in zip(part.nodes, metas or (n.meta for n in part.nodes), strict=True):
        new = env[n] = _torch.node_again(n, *fx.map_arg((n.args, n.kwargs), given))
        new.meta.update(meta)
