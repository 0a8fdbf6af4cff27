"""Decompositions of ops that draw random numbers into the few that read nothing: uniform, normal, exponential, ...

These few fill a tensor, and their numbers depend on its shape alone (`spmd.tensor.recipes.random`). All other ops are
arithmetic on their results, which each rank does on its blocks. A dropout is a mask, made once, and a product with it.
So the backward uses the same mask as the forward.

    dropout(x, p)    ->  x * bernoulli(empty_like(x), 1 - p) / (1 - p)
    normal(m, s)     ->  normal(empty_like(m + s)) * s + m
    multinomial(p)   ->  argmax(p / exponential(empty_like(p)))        exponential clocks with rates p: the first wins
    randperm(n)      ->  argsort(uniform(empty(n)))

Each decomposition works for any tensors: real, fake, functional or distributed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from spmd import _torch
from spmd.tensor.rules.decomposition_table import Table, decomposition_registrar

aten = torch.ops.aten

RANDOM_FILLS: dict[_torch.OpOverload, Callable] = {
    op: _torch.quick_function(in_place)
    for in_place, functional in (
        (aten.uniform_.default, aten.uniform.default),
        (aten.normal_.default, aten.normal_functional.default),
        (aten.exponential_.default, aten.exponential.default),
        (aten.cauchy_.default, aten.cauchy.default),
        (aten.log_normal_.default, aten.log_normal.default),
        (aten.geometric_.default, aten.geometric.default),
        (aten.bernoulli_.float, aten.bernoulli.p),
        (aten.random_.default, aten.random.default),
        (aten.random_.to, aten.random.to),
        (getattr(aten.random_, "from"), None),
    )
    for op in (in_place, functional)
    if op is not None
}
"""The ops that draw and read nothing, each with torch's kernel that fills a tensor in place."""

RANDOM_LIKES: dict[_torch.OpOverload, _torch.OpOverload] = {
    aten.rand_like.default: aten.uniform_.default,
    aten.randn_like.default: aten.normal_.default,
}
"""The ops that make a random tensor like another tensor, each with the op of `RANDOM_FILLS` that fills it."""

random_decompositions: Table = {}
"""From each other op that draws to a function of the same arguments, made of the ops of `RANDOM_FILLS`."""

register_decomposition = decomposition_registrar(random_decompositions)


# ---- made like another tensor -----------------------------------------------------------------


@register_decomposition(aten.rand_like.default, aten.rand_like.generator)
def rand_like(self, *, generator=None, **options):
    return aten.uniform.default(aten.empty_like.default(self, **options), generator=generator)


@register_decomposition(aten.randn_like.default, aten.randn_like.generator)
def randn_like(self, *, generator=None, **options):
    return aten.normal_functional.default(aten.empty_like.default(self, **options), generator=generator)


@register_decomposition(aten.randint_like.default, aten.randint_like.generator)
def randint_like(self, high, *, generator=None, **options):
    return randint_like_from(self, 0, high, generator=generator, **options)


@register_decomposition(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def randint_like_from(self, low, high, *, generator=None, **options):
    return random_from(aten.empty_like.default(self, **options), low, high, generator=generator)


@register_decomposition(aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
def randint_like_below(self, high, *, generator=None, **options):
    return randint_like_from(self, 0, high.item(), generator=generator, **options)


@register_decomposition(getattr(aten.random, "from"))
def random_from(self, low, high, *, generator=None):
    """Drawn from 0 on and shifted, because a graph with an op that is called `from` cannot be printed."""
    if high is None:
        raise NotImplementedError("random_(low, None): give the end of the range, as in random_(low, high)")
    drawn = aten.random.to(aten.empty_like.default(self, dtype=torch.int64), high - low, generator=generator)
    return aten._to_copy.default(aten.add.Scalar(drawn, low), dtype=self.dtype)


# ---- new tensors ------------------------------------------------------------------------------


@register_decomposition(aten.rand.default, aten.rand.generator)
def rand(size, *, generator=None, **options):
    return aten.uniform.default(aten.empty.memory_format(size, **options), generator=generator)


@register_decomposition(aten.randn.default, aten.randn.generator)
def randn(size, *, generator=None, **options):
    return aten.normal_functional.default(aten.empty.memory_format(size, **options), generator=generator)


@register_decomposition(aten.normal.float_float)
def normal_of_size(mean, std, size, *, generator=None, **options):
    return aten.normal_functional.default(aten.empty.memory_format(size, **options), mean, std, generator=generator)


@register_decomposition(aten.randint.default, aten.randint.generator)
def randint(high, size, *, generator=None, dtype=torch.int64, **options):
    return randint_from(0, high, size, generator=generator, dtype=dtype, **options)


@register_decomposition(aten.randint.low, aten.randint.low_generator)
def randint_from(low, high, size, *, generator=None, dtype=torch.int64, **options):
    space = aten.empty.memory_format(size, dtype=torch.int64, **options)
    drawn = aten.random.to(space, high - low, generator=generator)
    return aten._to_copy.default(aten.add.Scalar(drawn, low), dtype=dtype)


@register_decomposition(aten.randperm.default, aten.randperm.generator)
def randperm(n, *, generator=None, dtype=torch.int64, **options):
    order = aten.argsort.default(rand([n], generator=generator, dtype=torch.float64, **options))
    return aten._to_copy.default(order, dtype=dtype)


# ---- with parameters that are tensors ---------------------------------------------------------


@register_decomposition(aten.bernoulli.default)
def bernoulli(self, *, generator=None):
    return aten._to_copy.default(_bernoulli_mask(self, self, generator), dtype=self.dtype)


@register_decomposition(aten.bernoulli.Tensor)
def bernoulli_by(self, p, *, generator=None):
    return aten._to_copy.default(_bernoulli_mask(self, p, generator), dtype=self.dtype)


@register_decomposition(aten.bernoulli_.Tensor)
def bernoulli_by_(self, p, *, generator=None):
    return aten.copy_.default(self, _bernoulli_mask(self, p, generator))


def _bernoulli_mask(like, p, generator):
    """True with the chance p. The numbers have 24 bits at least, because half precision has few numbers below 1."""
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    return aten.lt.Tensor(rand_like(like, dtype=dtype, generator=generator), p)


@register_decomposition(aten.normal.Tensor_float, aten.normal.Tensor_Tensor)
def normal_around(mean, std=1.0, *, generator=None):
    like = aten.add.Tensor(mean, std) if isinstance(std, torch.Tensor) else mean
    drawn = randn_like(like, dtype=mean.dtype, generator=generator)
    return aten.add.Tensor(_times(drawn, std), mean)


@register_decomposition(aten.normal.float_Tensor)
def normal_spread(mean, std, *, generator=None):
    return aten.add.Scalar(aten.mul.Tensor(randn_like(std, generator=generator), std), mean)


def _times(x, factor):
    return aten.mul.Tensor(x, factor) if isinstance(factor, torch.Tensor) else aten.mul.Scalar(x, factor)


# ---- networks ---------------------------------------------------------------------------------


@register_decomposition(aten.native_dropout.default)
def native_dropout(input, p, train):
    if train is False or p == 0:
        return aten.clone.default(input), aten.full_like.default(input, True, dtype=torch.bool)
    mask = aten.bernoulli.p(aten.empty_like.default(input, dtype=torch.bool), 1 - p)
    kept = aten.mul.Tensor(input, mask)
    return aten.mul.Scalar(kept, 0.0 if p == 1 else 1 / (1 - p)), mask


@register_decomposition(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise_functional(self, noise, lower=1 / 8, upper=1 / 3, training=False, generator=None):
    if not training:
        return aten.leaky_relu.default(self, (lower + upper) / 2), aten.clone.default(noise)
    slope = aten.uniform.default(aten.empty_like.default(self), lower, upper, generator=generator)
    slope = aten.where.self(aten.gt.Scalar(self, 0), aten.ones_like.default(slope), slope)
    return aten.mul.Tensor(self, slope), slope


@register_decomposition(aten.rrelu_with_noise.default)
def rrelu_with_noise(self, noise, *args, **kwargs):
    out, slope = rrelu_with_noise_functional(self, noise, *args, **kwargs)
    aten.copy_.default(noise, slope)
    return out


@register_decomposition(aten.rrelu_with_noise_.default)
def rrelu_with_noise_(self, noise, *args, **kwargs):
    return aten.copy_.default(self, rrelu_with_noise(self, noise, *args, **kwargs))


@register_decomposition(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result):
    if training:
        return aten.mul.Tensor(grad_output, noise)
    return aten.leaky_relu_backward.default(grad_output, self, (lower + upper) / 2, self_is_result)


# ---- multinomial ------------------------------------------------------------------------------


@register_decomposition(aten.multinomial.default)
def multinomial(self, num_samples, replacement=False, *, generator=None):
    """Draw indices with the chances that `self` gives.

    Without replacement: exponential clocks run at these rates, and the first `num_samples` of them win. With
    replacement: a uniform number is looked up in the running sums of the rates. It is not checked that no rate is
    negative and that not all rates are zero.
    """
    n = self.shape[-1]
    if num_samples <= 0 or (not replacement and num_samples > n):
        raise RuntimeError(f"multinomial: cannot draw {num_samples} of {n} without putting back; at least 1 is drawn")
    rates = self if self.dtype == torch.float64 else aten._to_copy.default(self, dtype=torch.float32)
    if replacement and num_samples > 1:
        return _draw_with_replacement(rates, num_samples, generator)
    clocks = aten.exponential.default(aten.empty_like.default(rates), generator=generator)
    return aten.topk.default(aten.div.Tensor(rates, clocks), num_samples, -1)[1]


def _draw_with_replacement(rates, num_samples, generator):
    sums = aten.cumsum.default(rates, -1)
    total = aten.slice.Tensor(sums, -1, rates.shape[-1] - 1)
    space = aten.new_empty.default(rates, [*rates.shape[:-1], num_samples])
    drawn = aten.mul.Tensor(aten.uniform.default(space, generator=generator), total)
    found = aten.searchsorted.Tensor(sums, drawn, right=True)
    return aten.clamp_max.default(found, rates.shape[-1] - 1)  # a number just below 1 may have been rounded up to 1
