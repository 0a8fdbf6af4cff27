"""How functions are entered in a table of decompositions, from an op to a function of the same arguments."""

from __future__ import annotations

from collections.abc import Callable

from spmd import _torch

Table = dict[_torch.OpOverload, Callable]


def entering(table: Table) -> Callable[..., Callable[[Callable], Callable]]:
    """The decorator that enters a function in the table, for each of the ops that it is given.

    >>> table = {}
    >>> instead_of = entering(table)
    >>> @instead_of("mean", "mean.dim")
    ... def mean(x): ...
    >>> list(table)
    ['mean', 'mean.dim']
    """

    def instead_of(*ops: _torch.OpOverload) -> Callable[[Callable], Callable]:
        def enter(function: Callable) -> Callable:
            twice = [op for op in ops if op in table]
            assert not twice, twice
            table.update(dict.fromkeys(ops, function))
            return function

        return enter

    return instead_of
