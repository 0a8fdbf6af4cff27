"""Tables of decompositions: from an op to a function of the same arguments that calls other ops.

    register_decomposition = decomposition_registrar(table)

    @register_decomposition(aten.addmm.default)
    def addmm(self, mat1, mat2, *, beta=1, alpha=1): ...

Each module of decompositions has a table of its own, and registers its functions in it with a decorator of this name.
"""

from __future__ import annotations

from collections.abc import Callable

from spmd import _torch

Table = dict[_torch.OpOverload, Callable]


def decomposition_registrar(table: Table) -> Callable[..., Callable[[Callable], Callable]]:
    """Make the decorator that registers a function in the table for each op that the decorator is given.

    >>> table = {}
    >>> register_decomposition = decomposition_registrar(table)
    >>> @register_decomposition("mean", "mean.dim")
    ... def mean(x): ...
    >>> list(table)
    ['mean', 'mean.dim']
    """

    def register_decomposition(*ops: _torch.OpOverload) -> Callable[[Callable], Callable]:
        def register(function: Callable) -> Callable:
            registered_twice = [op for op in ops if op in table]
            assert not registered_twice, registered_twice
            table.update(dict.fromkeys(ops, function))
            return function

        return register

    return register_decomposition
