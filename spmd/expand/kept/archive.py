"""A file with programs: a zip archive of texts and tensors.

    step.json             the settings of the step
    0/key.json            the key of a program: what it was made for
    0/program.txt         the program
    0/calling.txt         what its inputs and outputs are
    0/constants.pt        its constants, which torch loads as tensors alone

`unzip -p FILE 0/program.txt` shows a program. Nothing in the archive is pickled code. It is written beside its place
and then renamed, so a reader sees all of it or nothing; the archive has checksums of its parts.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from spmd import _torch
from spmd.expand.capture import Captured
from spmd.expand.collector import collector_off
from spmd.expand.kept.calling import calling_text, read_calling
from spmd.expand.kept.graphs import program_text, read_program
from spmd.expand.kept.key import Key
from spmd.expand.kept.notation import CannotKeep
from spmd.expand.program import Program
from spmd.mesh import DeviceMesh

FORMAT = "spmd step 1"


class UnreadableStep(ValueError):
    """A file that is no saved step, or a damaged one."""


@dataclass(frozen=True)
class Entry:
    """A program as text, with its key."""

    key: Key
    program: str
    calling: str
    constants: dict[str, torch.Tensor]

    @classmethod
    def of(
        cls, key: Key, captured: Captured, program: Program, modules: Mapping[str, nn.Module] | None = None
    ) -> Entry:
        """CannotKeep for a program that another process could not run. modules: those in which it changes something."""
        return cls(key, program_text(program), calling_text(captured, modules or {}), program.constants)

    def read(self, mesh: DeviceMesh, modules: Mapping[str, nn.Module]) -> tuple[Captured, Program]:
        """The program on a mesh, verified, and how it is called with these modules.

        torch is not asked again for shapes and dtypes: its version is in the key, and it was asked before writing.
        """
        with collector_off():
            program = read_program(self.program, self.constants, mesh)
            return read_calling(self.calling, mesh, modules), program.verify(ask_torch=False)


def all_kept(entries: Sequence[Entry | CannotKeep]) -> list[Entry]:
    """The entries. The first reason why there is none is raised."""
    reason = next((entry for entry in entries if isinstance(entry, CannotKeep)), None)
    if reason is not None:
        raise reason
    return list(entries)


def write(path: str | os.PathLike, settings: str, entries: Sequence[Entry]) -> None:
    """Write an archive in one go: whoever reads at the same time gets what was there before, or all of the new one."""
    parts = {"step.json": json.dumps({"format": FORMAT, "settings": settings, "programs": len(entries)})}
    for i, entry in enumerate(entries):
        parts |= {f"{i}/key.json": json.dumps(entry.key, indent=0), f"{i}/program.txt": entry.program}
        parts |= {f"{i}/calling.txt": entry.calling, f"{i}/constants.pt": _tensor_bytes(entry.constants)}
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for name, data in parts.items():
                    archive.writestr(name, data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def read(path: str | os.PathLike) -> tuple[str, list[Entry]]:
    """The settings and the entries of an archive. UnreadableStep for a file that is none; OSError for no file."""
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("step.json"))
            if about["format"] != FORMAT:
                raise UnreadableStep(f"{path} has the format {about['format']!r}; this spmd reads {FORMAT!r}")
            return about["settings"], [_entry(archive, i) for i in range(about["programs"])]
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, EOFError, RuntimeError, TypeError) as error:
        if isinstance(error, UnreadableStep):
            raise
        raise UnreadableStep(f"{path} is no saved step, or it is damaged: {error}") from error


def _entry(archive: zipfile.ZipFile, i: int) -> Entry:
    texts = [archive.read(f"{i}/{name}").decode() for name in ("key.json", "program.txt", "calling.txt")]
    file = io.BytesIO(archive.read(f"{i}/constants.pt"))
    with _torch.no_modes():  # also inside LocalTensorMode they are plain tensors, the same on all ranks
        constants = torch.load(file, weights_only=True, map_location="cpu")
    return Entry(json.loads(texts[0]), texts[1], texts[2], constants)


def _tensor_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save({name: x.detach().cpu() for name, x in tensors.items()}, file)
    return file.getvalue()
