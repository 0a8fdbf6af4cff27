"""`spmd.load_step`: a step that was compiled and saved by another process."""

from __future__ import annotations

import os
from collections.abc import Callable

from spmd.expand.compile import CompiledStep
from spmd.expand.counters import names_of
from spmd.expand.kept import archive
from spmd.expand.kept.key import step_key
from spmd.expand.kept.library import Saved
from spmd.expand.kept.settings import read_settings
from spmd.expand.regions import EAGER, Backend, check_backend
from spmd.mesh import DeviceMesh


def load_step(
    path: str | os.PathLike, fn: Callable, mesh: DeviceMesh, *, init: Callable | bool = True, backend: Backend = EAGER
) -> CompiledStep:
    """A compiled step with the programs that `CompiledStep.save` wrote, so that nothing is captured.

    fn: the function that was compiled. It says what the arguments are called, and which modules and optimisers belong
    to the state; its code is compared with the code that was saved, and is not run. mesh: a mesh with the axes of the
    one that the step was compiled for. The placements are those that the step was compiled with. init, backend: as in
    `spmd.compile`.

    An axis may have another number of ranks than the saved one, as long as nothing in the program was made for that
    number, such as halos and functions of blocks. The program is then right, but perhaps not the cheapest.

    Raises UnreadableStep for a file that is no saved step, and StaleStep if it was saved by other versions, for other
    axes or another function; at a call, if the file has no program for it: where the code of the step or of its modules
    has changed, or shapes, placements, flags or attributes differ. The error names what differs.

        step = spmd.load_step("step.spmd", train_step, mesh)
        loss = step(model, optimizer, x, y)
    """
    settings, entries = archive.read(path)
    saved = Saved(path, entries)
    check_backend(backend, mesh.device_type)
    step = CompiledStep(fn, mesh, read_settings(settings, mesh), saved, init, backend)
    for entry in entries:
        step.count(names_of(entry.key))
    saved.check(step_key(step))
    return step
