"""The places of a parameter: where it is kept, where it is computed with, where its gradient and its state end.

    data parallel                 stored, computed, gradient and state are replicated over dp
    ZeRO-1, level 1               the state is sharded; a step updates shards and gathers the new parameter
    ZeRO-2, level 2               and each gradient goes to its shards as soon as it is made
    ZeRO-3, level 3               and the parameter is kept in shards, and gathered for its readers
    hybrid sharding               the same over one axis of the data, and replicated over the other
    tensor parallelism            all four are sharded alike over tp, beside any of these over dp

All of them are values of one type, and the expander knows nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from spmd.tensor.spec import Spec

Reshard = bool | str
"""True, False or "cost": whether what was gathered for the forward is freed, and gathered again for the backward."""


@dataclass(frozen=True)
class Places:
    """Where the values of one parameter are.

    stored: the parameter between steps, which is what `model.parameters()` holds. computed: what forward and backward
    read; None where every op may choose. gradient: `.grad`. state: the optimiser's tensors of the parameter's shape,
    and the parameter while it is updated. reduces_each: whether the gradient of each backward pass goes to its place
    as soon as it is made; else the terms of several passes are added first. reshard: see `Reshard`.
    """

    stored: Spec
    computed: Spec | None
    gradient: Spec
    state: Spec
    reduces_each: bool = False
    reshard: Reshard = False

    @classmethod
    def same(cls, spec: Spec) -> Places:
        """Everything in one place: data or tensor parallelism."""
        return cls(spec, spec, spec, spec)

    @property
    def is_one(self) -> bool:
        """Whether no reader moves the parameter: it is computed with and updated where it is stored."""
        return self.computed in (None, self.stored) and self.state is self.stored

    def __str__(self):
        if self.is_one and self.gradient is self.stored:
            return str(self.stored)
        computed = "open" if self.computed is None else self.computed
        return f"{self.stored}, computed {computed}, gradient {self.gradient}, state {self.state}"
