"""What the user says to `spmd.compile` beside the function and the mesh, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spmd.expand.own_arguments import OwnAxes, own_axes, without_own
from spmd.expand.passes.passes import Pass, checked_passes, usual_passes
from spmd.expand.pins import Pins, checked_pins, pin_of
from spmd.expand.places.fully_shard import FullyShard
from spmd.expand.places.table import PlacesTable, Sharding
from spmd.expand.precision import MixedPrecision
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.patterns import Patterns, Placed, check_patterns
from spmd.tensor.placement import Placement


@dataclass(frozen=True)
class Settings:
    """The arguments of `spmd.compile` under their names, with placements in the order of the mesh.

    own: of which inputs each rank gives its own block, and along which axes.
    """

    params: Mapping[str, tuple[Placement, ...] | None]
    stored: Placed
    fully_shard: Mapping[str, FullyShard | None]
    mixed_precision: MixedPrecision | None
    inputs: Placed
    outputs: Placed
    bucket_mb: float | None
    choose: str
    placements: Mapping[str, tuple[Placement | None, ...]]
    passes: tuple[Pass, ...] | None
    memory_budget: int | None = None
    offload: bool = False
    own: OwnAxes = field(default_factory=dict)

    @classmethod
    def of(
        cls, mesh: DeviceMesh, params: Patterns | None, stored: Patterns | None, fully_shard: Sharding,
        mixed_precision: MixedPrecision | None, inputs: Patterns | None, outputs: Patterns | None,
        bucket_mb: float | None, choose: str, placements: Patterns | None, passes: Sequence[Pass | str] | None = None,
        memory_budget: int | None = None, offload: bool = False,
    ) -> Settings:  # fmt: skip
        """The settings, with everything checked that can be checked without tensors."""
        if bucket_mb is not None and bucket_mb < 0:
            raise ValueError(f"compile: bucket_mb is {bucket_mb}; give megabytes, or None for no buckets")
        if choose not in ("op", "program"):
            raise ValueError(f'compile: choose is {choose!r}; give "program", or "op"')
        if memory_budget is not None and memory_budget <= 0:
            raise ValueError(f"compile: memory_budget is {memory_budget}; give bytes a rank, such as 8 << 30, or None")
        if offload and memory_budget is None:
            raise ValueError("compile: offload keeps within a memory_budget; give that too, such as 8 << 30 bytes")
        table = PlacesTable.of(mesh, params, stored, fully_shard, mixed_precision)
        placed = check_patterns(mesh, without_own(mesh, inputs or {}), "inputs")
        own = own_axes(mesh, inputs or {})
        outputs = check_patterns(mesh, outputs or {}, "outputs", may_be_partial=True)
        said = dict(table.params), dict(table.stored), dict(table.fully_shard), table.precision
        pins = {key: pin.placements for key, pin in checked_pins(mesh, placements).items()}
        checked = None if passes is None else checked_passes(passes)
        return cls(*said, placed, outputs, bucket_mb, choose, pins, checked, memory_budget, offload, own)

    def passes_on(self, device_type: str, keeps_memory: bool = False) -> tuple[Pass, ...]:
        """The passes over each program for this kind of device. keeps_memory: as in `usual_passes`."""
        return usual_passes(device_type, self.bucket_mb, keeps_memory) if self.passes is None else self.passes

    def table(self, mesh: DeviceMesh) -> PlacesTable:
        """Which places each parameter has on a mesh."""
        return PlacesTable(mesh, self.params, self.stored, self.fully_shard, self.mixed_precision)

    @property
    def pins(self) -> Pins:
        """What is said of values inside of the step."""
        return {key: pin_of(key, said) for key, said in self.placements.items()}
