"""Cross-entropy of a linear layer's output, without the output: logits are computed for a few tokens at a time.

    loss = linear_cross_entropy(hidden, head.weight, targets, ignore_index=-100, z_loss=1e-4)

gives what `F.cross_entropy(F.linear(hidden, weight), targets)` gives, and never holds the logits of all tokens. Rows of
the weight may be sharded over any axes, as those of an embedding that is tied to it, and tokens over others.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from spmd.comm import transport, wait
from spmd.comm.functional import all_reduce
from spmd.mesh import DeviceMesh, per_rank
from spmd.parallel.losses.token_losses import Classes, TokenLosses
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import REPLICATE, Partial, Placement, Shard


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int = 1024,
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """The cross-entropy of `input @ linear_weight.T + linear_bias` and the targets. Names are torch's.

    input: [..., features]. linear_weight: [classes, features]. target: classes [...], or probabilities [..., classes].
    weight: of each class. reduction: "mean", over what is not ignored, by the weights of its classes; "sum"; "none".
    z_loss: this times the square of each token's log-sum-exp is added. chunk_size: of how many tokens logits are held.

    Of DTensors the result is a DTensor, equal to that of one device. Tokens and classes may be sharded; plain tensors
    beside them are taken as equal on all ranks. Each chunk sends a maximum and three sums a token over the axes of the
    classes; the backward sends none. mesh: the ranks that share out the batch as plain tensors, none of
    which a DTensor is on, such as mesh["dp"] beside a weight on mesh["tp"]: a mean is then over their average count, so
    that the average of their losses, and of their gradients, is that of all.

    Raises ValueError for shapes that do not fit, and IndexError for a target that is no class.

    >>> loss = linear_cross_entropy(torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([1, -100]))
    >>> loss
    tensor(1.3863)
    """
    _check(input, linear_weight, target, reduction)
    found = next((x for x in (input, linear_weight) if isinstance(x, DTensor)), None)
    if found is not None:
        mesh = _of_parts(mesh, found, input, target)
        given = _Distributed(found.device_mesh, input, linear_weight, target, linear_bias)
    else:
        given = _Plain(input, linear_weight, target, linear_bias)
    plain_weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
    losses, lse = given.losses(plain_weight, label_smoothing, ignore_index, chunk_size)
    counts = _counts(given.target, given.placed(plain_weight), ignore_index, losses.dtype)
    if z_loss:
        squares = z_loss * lse.square() * counts.tokens
    if reduction == "none":
        return losses + squares if z_loss else losses
    if reduction == "sum":
        return losses.sum() + squares.sum() if z_loss else losses.sum()
    loss = losses.sum() / _average(counts.weights.sum(), mesh)
    return loss + squares.sum() / _average(counts.tokens.sum(), mesh) if z_loss else loss


def _of_parts(
    mesh: DeviceMesh | None, found: DTensor, input: torch.Tensor, target: torch.Tensor
) -> DeviceMesh | None:
    """The ranks that share out the batch, beside those of a DTensor. ValueError where they are the same."""
    if mesh is None or not _have_ranks_in_common(mesh, found.device_mesh):
        return mesh
    if not (isinstance(input, DTensor) and isinstance(target, DTensor)):
        raise ValueError(
            f"linear_cross_entropy: mesh says that plain tokens are parts of a batch, and beside {found._spec} "
            "they would be taken as equal on all ranks. Give the whole weight, as it is in the forward of a module of "
            "fully_shard (or kept by reshard_after_forward=False), or tokens that are DTensors, too, without mesh"
        )
    return None


@per_rank
def _have_ranks_in_common(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether there are more than this one."""
    return len(set(mesh.ranks) & set(other.ranks)) > 1


def _check(input: torch.Tensor, table: torch.Tensor, target: torch.Tensor, reduction: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; give 'mean', 'sum' or 'none'")
    if table.ndim != 2 or input.shape[-1] != table.shape[1]:
        raise ValueError(f"linear_weight has shape {list(table.shape)}; it has to be [classes, {input.shape[-1]}]")
    if target.requires_grad:
        raise ValueError("the target requires a gradient, and gets none here; use F.cross_entropy, or target.detach()")


class _Counts(NamedTuple):
    """By how much each token counts: for the mean, and for the z-loss."""

    weights: torch.Tensor
    tokens: torch.Tensor


def _counts(target: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype) -> _Counts:
    if target.is_floating_point():
        ones = torch.ones_like(target.select(-1, 0), dtype=dtype) if target.shape[-1] else target.sum(-1).to(dtype)
        return _Counts(ones, ones)
    tokens = (target != ignored).to(dtype)
    if weight is None:
        return _Counts(tokens, tokens)
    return _Counts(weight.to(dtype)[target.clamp(min=0)] * tokens, tokens)


def _average(count: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    if mesh is None or mesh.size() == 1:
        return count
    count = count.full_tensor() if isinstance(count, DTensor) else count
    group = transport().group(mesh, tuple(range(mesh.ndim)))
    return wait(all_reduce(count.detach(), "sum", group)) / mesh.size()


class _Plain:
    """All of it on this rank."""

    def __init__(self, input, table, target, bias):
        self.input, self.table, self.target, self.bias = input, table, target, bias

    def placed(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return x

    def losses(self, weight, smoothing: float, ignored: int, chunk: int):
        _check_classes(self.target, len(self.table), ignored)
        classes = Classes(len(self.table), None, None, weight, smoothing, ignored, chunk)
        shape = self.input.shape[:-1]
        rows, target = _flat(self.input), _flat_target(self.target)
        found = TokenLosses.apply(rows, self.table, self.bias, target, classes, len(rows))
        return tuple(x.view(shape) for x in found)


class _Distributed:
    """Blocks of it: tokens over some axes, classes over others."""

    def __init__(self, mesh: DeviceMesh, input, table, target, bias):
        self.mesh = mesh
        table, input, target = (self.placed(x) for x in (table, input, target))
        self.over = table._spec.dims[0]  # the axes of the classes
        self.tokens = [self._of_tokens(p, axis, input.ndim - 1) for axis, p in enumerate(input.placements)]
        of_table = [Shard(0) if axis in self.over else REPLICATE for axis in range(mesh.ndim)]
        self.input, self.table = input.redistribute(placements=self.tokens), table.redistribute(placements=of_table)
        self.bias = None if bias is None else self.placed(bias).redistribute(placements=of_table)
        of_target = self._with_classes(target.ndim - 1) if target.is_floating_point() else self.tokens
        self.target = target.redistribute(placements=of_target)

    def placed(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """A tensor that is equal on all ranks, or lies on the mesh already."""
        return x if x is None or isinstance(x, DTensor) else DTensor.from_local(x, self.mesh)

    def _of_tokens(self, p: Placement, axis: int, features: int) -> Placement:
        return p if p.is_shard() and p.dim != features and axis not in self.over else REPLICATE

    def _with_classes(self, dim: int) -> list[Placement]:
        return [Shard(dim) if axis in self.over else p for axis, p in enumerate(self.tokens)]

    def losses(self, weight, smoothing: float, ignored: int, chunk: int):
        count = self.table.shape[0]
        _check_classes(self.target.to_local(), count, ignored)
        group = transport().group(self.mesh, self.over) if self.over else None
        classes = Classes(count, self.table._spec, group, weight, smoothing, ignored, chunk)
        sums = [Partial() if axis in self.over else p for axis, p in enumerate(self.tokens)]
        shared = [Shard(0) if axis in self.over else Partial() if p.is_shard() else REPLICATE
                  for axis, p in enumerate(self.tokens)]  # fmt: skip
        hidden = _flat(self.input.to_local(grad_placements=sums))
        blocks = [x if x is None else x.to_local(grad_placements=shared) for x in (self.table, self.bias)]
        rows = prod(self.input._spec.local_shape((0,) * self.mesh.ndim)[:-1])
        found = TokenLosses.apply(hidden, *blocks, _flat_target(self.target.to_local()), classes, rows)
        shape = self.input.shape[:-1]
        return tuple(self._joined(x, shape) for x in found)

    def _joined(self, x: torch.Tensor, shape: torch.Size) -> DTensor:
        block = self.input._local_tensor.shape[:-1]
        return DTensor.from_local(x.reshape(block), self.mesh, self.tokens, shape=shape)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.unsqueeze(0) if x.ndim == 1 else x.flatten(0, -2)


def _flat_target(target: torch.Tensor) -> torch.Tensor:
    return _flat(target) if target.is_floating_point() else target.reshape(-1)


def _check_classes(target: torch.Tensor, count: int, ignored: int) -> None:
    if not target.is_floating_point():
        inside = ((target >= 0) & (target < count)) | (target == ignored)
        torch.ops.aten._assert_async.msg(inside.all(), f"linear_cross_entropy: a target is not in 0..{count - 1}")
