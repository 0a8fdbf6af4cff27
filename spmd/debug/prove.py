"""prove_rule: test a rule by running its op on samples that the user gives.

    spmd.debug.prove_rule(scaled_mm, [(torch.randn(5, 4), torch.randn(4, 3), 2.0)])

This is the oracle that tests spmd's own rules (`spmd.debug.oracle`). The operands are split as a row says, for 2 ranks,
for 3 ranks and for a 2 x 2 mesh. The op runs on the parts, and the joined results must equal the op's own results.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.debug.oracle import Case, Sample, Tally
from spmd.tensor.call import TensorMeta
from spmd.tensor.rules.meta import out_metas
from spmd.tensor.rules.rule import rows

PAIRS = 8


class WrongRow(AssertionError):
    """A row of a rule gives other results than the op. tally: the counts of all tested rows."""

    def __init__(self, text: str, tally: Tally):
        super().__init__(text)
        self.tally = tally


def prove_rule(op: Any, samples: Iterable[tuple | dict[str, Any]]) -> Tally:
    """Run every row of an op's rule against the op itself. Returns the tally of the tested rows.

    op: as for `spmd.register_rule`. samples: calls of the op, each a tuple of its arguments, or a dict of them by
    name. Small tensors are enough. Sizes that 2 and 3 do not divide, and a size below 3, test uneven and empty shards.

    >>> import spmd
    >>> def double(x: torch.Tensor) -> torch.Tensor:
    ...     return 2 * x
    >>> double = torch.library.custom_op("docs::double", double, mutates_args=())
    >>> _ = double.register_fake(torch.empty_like)
    >>> rule = spmd.register_rule(double, "... -> ...", laws=["sum: p -> p"])
    >>> print(prove_rule(double, [(torch.randn(5, 2),)]))
    16 rows right, 0 skipped, 0 wrong, of 1 ops

    Raises `WrongRow` with the row, the sample and both results. Raises ValueError if there is nothing to test: no rule,
    no sample, or no sample that a row would shard. Raises ValueError too if the op's fake kernel gives other shapes
    than the op.
    """
    overload = _overload(op)
    tally, rng, tested = Tally(), random.Random(0), 0
    for given in samples:
        sample = _sample(overload, given)
        case = Case(sample)
        _check_shapes(sample, case)
        if case.rule is None:
            raise ValueError(f"prove_rule: {overload} has no rule for {sample}; see spmd.register_rule")
        tested += len(rows(case.rule)) - 1
        case.check_each_row((2, 3), tally)
        case.check_pairs(PAIRS, rng, tally)
    if not tested:
        raise ValueError(
            f"prove_rule: nothing was tested of {overload}: give samples that its rule can shard, such as "
            "[(torch.randn(5, 4), ...)]"
        )
    if tally.wrong:
        raise WrongRow(f"the rule of {overload} is wrong.\n{tally.report()}", tally)
    return tally


def _overload(op: Any):
    found = _torch.overloads_of(op)
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none that torch knows"
        raise ValueError(
            f"prove_rule: {op!r} is not one op but {names}; give one overload, such as torch.ops.lib.op.default"
        )
    return found[0]


def _sample(op, given: tuple | dict[str, Any]) -> Sample:
    if not isinstance(given, (tuple, dict)):
        raise TypeError(
            f"prove_rule: a sample is a tuple of an op's arguments, or a dict of them, not {type(given).__name__}; "
            "for one argument write (x,)"
        )
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    return Sample(op, args, kwargs)


def _check_shapes(sample: Sample, case: Case) -> None:
    """Check that the op's fake kernel gives the op's shapes: DTensors take their shapes from it."""
    want = tuple(TensorMeta.of(t) if isinstance(t, torch.Tensor) else None for t in case.want)
    try:
        found = out_metas(sample.op, case.call.args, case.call.kwargs, torch.device("cpu"))
    except _torch.UNKNOWN_SHAPE as error:
        raise ValueError(
            f"prove_rule: {sample.op} has no fake kernel that gives the shapes of its results, so it runs on "
            "replicated tensors whatever its rule; add one with register_fake"
        ) from error
    if found != want:
        raise ValueError(
            f"prove_rule: for {sample} the fake kernel gives {_brief(found)}, but the op gives {_brief(want)}; correct "
            "the function that register_fake was given"
        )


def _brief(metas) -> str:
    return ", ".join(f"{o.dtype}{list(o.shape)} of strides {list(o.stride)}" if o else "no tensor" for o in metas)
