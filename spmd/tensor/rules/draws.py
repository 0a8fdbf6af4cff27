"""Ops that draw random numbers, in terms of the few that read nothing: uniform, normal, exponential, ...

Those fill a tensor, and their numbers are a matter of its shape alone (`spmd.tensor.random`). All else is arithmetic on
what they give, which ranks do on their blocks: a dropout is a mask, made once, and a product with it, so that the
backward meets the mask of the forward.

    dropout(x, p)    ->  x * bernoulli(empty_like(x), 1 - p) / (1 - p)
    normal(m, s)     ->  normal(empty_like(m + s)) * s + m
    multinomial(p)   ->  argmax(p / exponential(empty_like(p)))        the fastest of racing clocks wins
    randperm(n)      ->  argsort(uniform(empty(n)))

Each is written for whatever tensors come: real, fake, functional or distributed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from spmd import _torch
from spmd.tensor.rules.enter import Table, entering

aten = torch.ops.aten

FILLS: dict[_torch.OpOverload, Callable] = {
    op: _torch.direct(in_place)
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
"""The ops that draw and read nothing, each with torch's kernel that does it in place."""

LIKES: dict[_torch.OpOverload, _torch.OpOverload] = {
    aten.rand_like.default: aten.uniform_.default,
    aten.randn_like.default: aten.normal_.default,
}
"""The ops that make a tensor like another one, each with the op of `FILLS` that fills it."""

random_decompositions: Table = {}
"""The others, by what they are made of."""

instead_of = entering(random_decompositions)


# ---- made like another tensor -----------------------------------------------------------------


@instead_of(aten.rand_like.default, aten.rand_like.generator)
def rand_like(self, *, generator=None, **options):
    return aten.uniform.default(aten.empty_like.default(self, **options), generator=generator)


@instead_of(aten.randn_like.default, aten.randn_like.generator)
def randn_like(self, *, generator=None, **options):
    return aten.normal_functional.default(aten.empty_like.default(self, **options), generator=generator)


@instead_of(aten.randint_like.default, aten.randint_like.generator)
def randint_like(self, high, *, generator=None, **options):
    return randint_like_from(self, 0, high, generator=generator, **options)


@instead_of(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype)
def randint_like_from(self, low, high, *, generator=None, **options):
    return random_from(aten.empty_like.default(self, **options), low, high, generator=generator)


@instead_of(aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
def randint_like_below(self, high, *, generator=None, **options):
    return randint_like_from(self, 0, high.item(), generator=generator, **options)


@instead_of(getattr(aten.random, "from"))
def random_from(self, low, high, *, generator=None):
    """As one that begins at 0, for a graph cannot be printed with an op that is called `from`."""
    if high is None:
        raise NotImplementedError("random_(low, None): say where it ends")
    drawn = aten.random.to(aten.empty_like.default(self, dtype=torch.int64), high - low, generator=generator)
    return aten._to_copy.default(aten.add.Scalar(drawn, low), dtype=self.dtype)


# ---- from nothing: in a program they are made of the program's numbers ------------------------


@instead_of(aten.rand.default, aten.rand.generator)
def rand(size, *, generator=None, **options):
    return aten.uniform.default(aten.empty.memory_format(size, **options), generator=generator)


@instead_of(aten.randn.default, aten.randn.generator)
def randn(size, *, generator=None, **options):
    return aten.normal_functional.default(aten.empty.memory_format(size, **options), generator=generator)


@instead_of(aten.normal.float_float)
def normal_of_size(mean, std, size, *, generator=None, **options):
    return aten.normal_functional.default(aten.empty.memory_format(size, **options), mean, std, generator=generator)


@instead_of(aten.randint.default, aten.randint.generator)
def randint(high, size, *, generator=None, dtype=torch.int64, **options):
    return randint_from(0, high, size, generator=generator, dtype=dtype, **options)


@instead_of(aten.randint.low, aten.randint.low_generator)
def randint_from(low, high, size, *, generator=None, dtype=torch.int64, **options):
    space = aten.empty.memory_format(size, dtype=torch.int64, **options)
    drawn = aten.random.to(space, high - low, generator=generator)
    return aten._to_copy.default(aten.add.Scalar(drawn, low), dtype=dtype)


@instead_of(aten.randperm.default, aten.randperm.generator)
def randperm(n, *, generator=None, dtype=torch.int64, **options):
    order = aten.argsort.default(rand([n], generator=generator, dtype=torch.float64, **options))
    return aten._to_copy.default(order, dtype=dtype)


# ---- with parameters that are tensors ---------------------------------------------------------


@instead_of(aten.bernoulli.default)
def bernoulli(self, *, generator=None):
    return aten._to_copy.default(_happens(self, self, generator), dtype=self.dtype)


@instead_of(aten.bernoulli.Tensor)
def bernoulli_by(self, p, *, generator=None):
    return aten._to_copy.default(_happens(self, p, generator), dtype=self.dtype)


@instead_of(aten.bernoulli_.Tensor)
def bernoulli_by_(self, p, *, generator=None):
    return aten.copy_.default(self, _happens(self, p, generator))


def _happens(like, p, generator):
    """Whether what has the chance p happens. Numbers of 24 bits at least, for half precision has few below 1."""
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    return aten.lt.Tensor(rand_like(like, dtype=dtype, generator=generator), p)


@instead_of(aten.normal.Tensor_float, aten.normal.Tensor_Tensor)
def normal_around(mean, std=1.0, *, generator=None):
    like = aten.add.Tensor(mean, std) if isinstance(std, torch.Tensor) else mean
    drawn = randn_like(like, dtype=mean.dtype, generator=generator)
    return aten.add.Tensor(_times(drawn, std), mean)


@instead_of(aten.normal.float_Tensor)
def normal_spread(mean, std, *, generator=None):
    return aten.add.Scalar(aten.mul.Tensor(randn_like(std, generator=generator), std), mean)


def _times(x, factor):
    return aten.mul.Tensor(x, factor) if isinstance(factor, torch.Tensor) else aten.mul.Scalar(x, factor)


# ---- networks ---------------------------------------------------------------------------------


@instead_of(aten.native_dropout.default)
def native_dropout(input, p, train):
    if train is False or p == 0:
        return aten.clone.default(input), aten.full_like.default(input, True, dtype=torch.bool)
    mask = aten.bernoulli.p(aten.empty_like.default(input, dtype=torch.bool), 1 - p)
    kept = aten.mul.Tensor(input, mask)
    return aten.mul.Scalar(kept, 0.0 if p == 1 else 1 / (1 - p)), mask


@instead_of(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise_functional(self, noise, lower=1 / 8, upper=1 / 3, training=False, generator=None):
    if not training:
        return aten.leaky_relu.default(self, (lower + upper) / 2), aten.clone.default(noise)
    slope = aten.uniform.default(aten.empty_like.default(self), lower, upper, generator=generator)
    slope = aten.where.self(aten.gt.Scalar(self, 0), aten.ones_like.default(slope), slope)
    return aten.mul.Tensor(self, slope), slope


@instead_of(aten.rrelu_with_noise.default)
def rrelu_with_noise(self, noise, *args, **kwargs):
    out, slope = rrelu_with_noise_functional(self, noise, *args, **kwargs)
    aten.copy_.default(noise, slope)
    return out


@instead_of(aten.rrelu_with_noise_.default)
def rrelu_with_noise_(self, noise, *args, **kwargs):
    return aten.copy_.default(self, rrelu_with_noise(self, noise, *args, **kwargs))


@instead_of(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(grad_output, self, noise, lower, upper, training, self_is_result):
    if training:
        return aten.mul.Tensor(grad_output, noise)
    return aten.leaky_relu_backward.default(grad_output, self, (lower + upper) / 2, self_is_result)


# ---- picking ----------------------------------------------------------------------------------


@instead_of(aten.multinomial.default)
def multinomial(self, num_samples, replacement=False, *, generator=None):
    """Without replacement the first of clocks that run at these rates; with it, where a number falls among the sums.

    Rates are taken as they come: that none is negative and not all are zero is not looked for.
    """
    n = self.shape[-1]
    if num_samples <= 0 or (not replacement and num_samples > n):
        raise RuntimeError(f"multinomial: cannot draw {num_samples} of {n} without putting back; at least 1 is drawn")
    rates = self if self.dtype == torch.float64 else aten._to_copy.default(self, dtype=torch.float32)
    if replacement and num_samples > 1:
        return _put_back(rates, num_samples, generator)
    clocks = aten.exponential.default(aten.empty_like.default(rates), generator=generator)
    return aten.topk.default(aten.div.Tensor(rates, clocks), num_samples, -1)[1]


def _put_back(rates, num_samples, generator):
    upto = aten.cumsum.default(rates, -1)
    total = aten.slice.Tensor(upto, -1, rates.shape[-1] - 1)
    at = aten.uniform.default(aten.new_empty.default(rates, [*rates.shape[:-1], num_samples]), generator=generator)
    found = aten.searchsorted.Tensor(upto, aten.mul.Tensor(at, total), right=True)
    return aten.clamp_max.default(found, rates.shape[-1] - 1)  # a number just below 1 may be rounded up to it
