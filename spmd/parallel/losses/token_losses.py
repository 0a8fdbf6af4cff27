"""The cross-entropy of each token, from hidden features, where ranks have parts of the vocabulary. Blocks alone.

    logits = hidden @ weight.T + bias                       [tokens, classes@vocabulary], a few tokens at a time
    loss[t] = sum over c of wanted[t, c] * (lse[t] - logits[t, c])
    lse[t]  = log of the sum over c of exp(logits[t, c])

`wanted` says how much of each class a token is to be: 1 for its target, less where labels are smoothed, a probability,
zero for a token that is ignored, all times the weight of the class. So all kinds of targets are one formula. Of the
logits nothing is kept: the backward computes them again, and sends nothing.

    d logits[t, c] = (g_loss[t] * sum of wanted[t] + g_lse[t]) * softmax[t, c] - g_loss[t] * wanted[t, c]

The exchange of maxima and sums is that of M. Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spmd.comm import wait
from spmd.comm.functional import all_reduce
from spmd.mesh import per_rank
from spmd.tensor.spec import Spec


class Classes(NamedTuple):
    """The classes, and what is said of them.

    table: the spec of the weight, whose dim 0 are the classes; None where this rank has all. group: the ranks among
    which they are shared out. weight: of each class, of all classes.
    """

    count: int
    table: Spec | None
    group: str | None
    weight: torch.Tensor | None
    smoothing: float
    ignored: int
    chunk: int

    def here(self) -> tuple[int, int]:
        """The first class of this rank, and how many it has."""
        return (0, self.count) if self.table is None else self.table.block(0, self.table.mesh.get_coordinate())


class TokenLosses(torch.autograd.Function):
    """hidden [tokens, features], weight [own classes, features], target [tokens (, own classes)] -> loss, lse [tokens].

    rows: the largest number of tokens that a rank has, so that all ranks take as many chunks.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, classes, rows):
        found = [
            _chunk(hidden, weight, bias, target, classes, i) for i in range(0, max(rows, 1), classes.chunk)
        ]  # fmt: skip
        loss, lse, wanted = (_joined([each[i] for each in found]) for i in range(3))
        ctx.save_for_backward(hidden, weight, bias, target, lse, wanted)
        ctx.classes, ctx.needed = classes, ctx.needs_input_grad[:3]
        return loss, lse

    @staticmethod
    def backward(ctx, g_loss, g_lse):
        return (*_gradients(*ctx.saved_tensors, g_loss, g_lse, ctx.classes, ctx.needed), None, None, None)


def _chunk(hidden, weight, bias, target, classes: Classes, start: int):
    """Of a few tokens: the loss, the logarithm of the sum of exponentials, and how much is wanted of all classes."""
    logits, most = _logits(hidden, weight, bias, classes, start)
    most = most if classes.group is None else wait(all_reduce(most, "max", classes.group))
    sums = _sums(logits, most, target, classes, start)
    sums = sums if classes.group is None else wait(all_reduce(sums, "sum", classes.group))
    return _finished(most, sums)


@per_rank
def _logits(hidden, weight, bias, classes: Classes, start: int):
    """The logits of a few tokens, and the largest of each; behind them a zero, for a rank without tokens sends, too."""
    logits = _product(_rows(hidden, start, classes.chunk), weight, bias)
    most = logits.amax(1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    return logits, torch.cat([most, most.new_zeros(1)])


@per_rank
def _sums(logits, most, target, classes: Classes, start: int):
    """[3, tokens + 1]: sums over this rank's classes of exponentials, of wanted logits, and of what is wanted."""
    wanted = _wanted(_rows(target, start, classes.chunk), classes, logits)
    sums = [(logits - most[:-1, None]).exp().sum(1), (wanted * logits).sum(1), wanted.sum(1)]
    return torch.nn.functional.pad(torch.stack(sums), (0, 1))


@per_rank
def _finished(most, sums):
    most, (total, wanted_logits, wanted) = most[:-1], sums[:, :-1]
    lse = most + total.log()
    return wanted * lse - wanted_logits, lse, wanted


@per_rank
def _joined(parts):
    return torch.cat(parts)


@per_rank
def _gradients(hidden, weight, bias, target, lse, wanted_sum, g_loss, g_lse, classes: Classes, needed):
    """The gradients of hidden features, weight and bias, as this rank's classes contribute to them."""
    wide = lse.dtype
    of_hidden = torch.empty_like(hidden) if needed[0] else None
    of_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
    of_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None
    for start in range(0, len(hidden), classes.chunk):
        rows = slice(start, start + classes.chunk)
        logits = _product(hidden[rows], weight, bias)
        softmax = (logits - lse[rows, None]).exp_()
        scale = g_loss[rows] * wanted_sum[rows] + g_lse[rows]
        g = softmax.mul_(scale[:, None]).sub_(_wanted(target[rows], classes, logits).mul_(g_loss[rows, None]))
        if of_hidden is not None:
            of_hidden[rows] = g.to(weight.dtype) @ weight
        if of_weight is not None:
            of_weight.addmm_(g.T, hidden[rows].to(wide))
        if of_bias is not None:
            of_bias += g.sum(0)
    return of_hidden, _as(of_weight, weight), _as(of_bias, bias)


def _product(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Logits, in a dtype in which exponentials can be added."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return logits.float() if logits.dtype.itemsize < 4 else logits


def _wanted(target: torch.Tensor, classes: Classes, like: torch.Tensor) -> torch.Tensor:
    """[tokens, own classes]: how much of each class is wanted."""
    first, n = classes.here()
    weight = None if classes.weight is None else classes.weight[first : first + n].to(like.dtype)
    rest = classes.smoothing / classes.count
    if target.is_floating_point():
        wanted = target.to(like.dtype) * (1 - classes.smoothing) + rest
        return wanted if weight is None else wanted * weight
    wanted = torch.full_like(like, rest)
    place = target - first
    rows = ((place >= 0) & (place < n)).nonzero()[:, 0]
    wanted[rows, place[rows]] += 1 - classes.smoothing
    wanted = wanted if weight is None else wanted * weight
    return wanted.mul_((target != classes.ignored)[:, None])


def _rows(x: torch.Tensor, start: int, n: int) -> torch.Tensor:
    return x[min(start, len(x)) : start + n]


def _as(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if gradient is None else gradient.to(like.dtype)

