"""Add the bias in the product: `y = linear(x, w); z = add(y, b)` becomes `z = linear(x, w, b)`.

A program adds a bias apart, for the product may be a sum over ranks to which the bias is added once. Where a rank's
product is complete, the kernel that one device uses adds the bias while it writes the product. That saves a pass over
the memory, and the rounding is one device's.

The rewrite is legal when nothing else reads the product, when the bias is one number for each column, of its dtype, and
there before the product. Deterministic mode keeps the ops apart: there a product that is made again rounds like the
first, whoever else reads the first.
"""

from __future__ import annotations

import torch
from torch import fx

from spmd.tensor.modes import deterministic
from spmd.tensor.spec import Spec

aten = torch.ops.aten


def join_biases(graph: fx.Graph) -> int:
    """Rewrite a bound graph in place. Returns the number of biases that were joined."""
    if deterministic.is_on():
        return 0
    places = {node: i for i, node in enumerate(graph.nodes)}
    joined = [node for node in graph.nodes if node.target is aten.add.Tensor and _adds_bias(node, places)]
    for node in joined:
        product, bias = node.args
        product.args = (*product.args, bias)
        product.meta["spec"] = node.meta["spec"]
        node.replace_all_uses_with(product)
        graph.erase_node(node)
    return len(joined)


def _adds_bias(node: fx.Node, places: dict[fx.Node, int]) -> bool:
    product, bias = node.args
    if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node) or node.kwargs:
        return False
    if product.target is not aten.linear.default or len(product.args) != 2 or list(product.users) != [node]:
        return False
    specs = [n.meta.get("spec") for n in (node, product, bias)]
    if places[bias] > places[product] or not all(isinstance(spec, Spec) for spec in specs):
        return False
    total, alone, added = specs
    return total.shape == alone.shape and added.shape == alone.shape[-1:] and total.dtype == alone.dtype == added.dtype
