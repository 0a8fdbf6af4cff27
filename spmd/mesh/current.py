"""The mesh of a `with mesh:` block, for functions that are given none.

>>> from spmd.mesh import init_device_mesh
>>> with init_device_mesh("cpu", (2,)) as mesh:
...     current_mesh() is mesh
True
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from spmd.mesh.device_mesh import DeviceMesh

_entered: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("spmd_current_mesh", default=())


def enter(mesh: DeviceMesh) -> None:
    """Begin a block of this mesh, in this thread."""
    _entered.set((*_entered.get(), mesh))


def leave() -> None:
    """End the innermost block."""
    _entered.set(_entered.get()[:-1])


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost `with mesh:` block around the caller; None outside of all."""
    entered = _entered.get()
    return entered[-1] if entered else None


GivenMesh = TypeVar("GivenMesh")


def or_current(mesh: GivenMesh | None, asked: str) -> GivenMesh | DeviceMesh:
    """The mesh that was given, or that of the block. TypeError where there is neither."""
    found = current_mesh() if mesh is None else mesh
    if found is None:
        raise TypeError(f"{asked}: device_mesh is None; give the mesh of the tensor, or call it inside of `with mesh:`")
    return found
