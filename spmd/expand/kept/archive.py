"""A file with programs: a zip archive of texts and tensors.

    step.json             the settings of the step, and a digest of all parts
    0/key.json            the key of a program: what it was made for
    0/program.txt         the program
    0/calling.txt         what its inputs and outputs are
    0/constants.pt        its constants, which torch loads as tensors alone
    0/code.txt            the code of the rank that has written it

`unzip -p FILE 0/program.txt` shows a program. Nothing in the archive is pickled code. It is written beside its place
and then renamed, so a reader sees all of it or nothing. The digest says that all is as it was written, when it was
verified: what somebody has edited since is no saved step.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from spmd import _torch
from spmd.expand.captured import Captured
from spmd.expand.collector import collector_off
from spmd.expand.kept.calling import calling_text, read_calling
from spmd.expand.kept.graphs import program_text, read_program
from spmd.expand.kept.key import Key
from spmd.expand.kept.notation import CannotKeep
from spmd.expand.kept.rank_code import read_code
from spmd.expand.program import Program
from spmd.mesh import DeviceMesh

FORMAT = "spmd step 4"


class UnreadableStep(ValueError):
    """A file that is no saved step, or a damaged one."""


@dataclass(frozen=True)
class Entry:
    """A program as text, with its key. code: what one rank runs of it, as text; empty where that is not kept."""

    key: Key
    program: str
    calling: str
    constants: dict[str, torch.Tensor]
    code: str = ""

    @classmethod
    def of(
        cls, key: Key, captured: Captured, program: Program, modules: Mapping[str, nn.Module] | None = None,
        code: str = "",
    ) -> Entry:  # fmt: skip
        """CannotKeep for a program that another process could not run. modules: those in which it changes something."""
        return cls(key, program_text(program), calling_text(captured, modules or {}), program.constants, code)

    def read(self, mesh: DeviceMesh, modules: Mapping[str, nn.Module], at: str | None = None) -> Kept:
        """The program on a mesh, and how it is called with these modules. at: the rank that is to run it, or None."""
        return Kept(self, mesh, modules, at)

    @property
    def texts(self) -> tuple[str, str, str]:
        """All but the key and the constants."""
        return self.program, self.calling, self.code


class Kept:
    """A program that was read. captured: how it is called. code: what the rank at hand runs of it, if that was kept."""

    def __init__(self, entry: Entry, mesh: DeviceMesh, modules: Mapping[str, nn.Module], at: str | None) -> None:
        self.entry, self._mesh = entry, mesh
        with collector_off():
            self.captured = read_calling(entry.calling, mesh, modules)
            self.code = read_code(entry.code, at, entry.constants, mesh) if at and entry.code else None
            self._read = None if self.code else self._verified()

    @cached_property
    def program(self) -> Program:
        """The program, verified; read only now where the code of the rank at hand was kept."""
        return self._read or self._verified()

    def _verified(self) -> Program:
        """The program.

        torch is not asked again for shapes and dtypes: its version is in the key, and it was asked before writing.
        """
        with collector_off():
            return read_program(self.entry.program, self.entry.constants, self._mesh).verify(ask_torch=False)

    @property
    def fingerprint(self) -> str:
        """That of the program."""
        return self.code.fingerprint if self.code else self.program.fingerprint


def all_kept(entries: Sequence[Entry | CannotKeep]) -> list[Entry]:
    """The entries. The first reason why there is none is raised."""
    reason = next((entry for entry in entries if isinstance(entry, CannotKeep)), None)
    if reason is not None:
        raise reason
    return list(entries)


ABOUT = "step.json"


def write(path: str | os.PathLike, settings: str, entries: Sequence[Entry]) -> None:
    """Write an archive in one go: whoever reads at the same time gets what was there before, or all of the new one."""
    parts = {f"{i}/{name}": data for i, entry in enumerate(entries) for name, data in _parts(entry).items()}
    about = {"format": FORMAT, "settings": settings, "programs": len(entries), "digest": _digest(settings, parts)}
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in {ABOUT: json.dumps(about).encode(), **parts}.items():
            archive.writestr(name, data)
    write_in_one_go(Path(path), whole.getvalue())


def _parts(entry: Entry) -> dict[str, bytes]:
    """The files of an entry."""
    texts = {"key.json": json.dumps(entry.key, indent=0), "program.txt": entry.program, "calling.txt": entry.calling}
    texts |= {"code.txt": entry.code} if entry.code else {}
    return {name: text.encode() for name, text in texts.items()} | {"constants.pt": _tensor_bytes(entry.constants)}


def _digest(settings: str, parts: Mapping[str, bytes]) -> str:
    """A digest of all that an archive says."""
    found = hashlib.sha256(settings.encode())
    for name, data in sorted(parts.items()):
        found.update(f"\0{name} {len(data)} ".encode())
        found.update(data)
    return found.hexdigest()


def write_in_one_go(target: Path, data: bytes) -> None:
    """Write a file. Whoever reads at the same time gets what was there before, or all of the new one."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:  # as readable as a file that a program writes in place
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike) -> tuple[str, list[Entry]]:
    """The settings and the entries of an archive. UnreadableStep for a file that is none; OSError for no file."""
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read(ABOUT))
            if about["format"] != FORMAT:
                raise UnreadableStep(f"{path} has the format {about['format']!r}; this spmd reads {FORMAT!r}")
            parts = {name: archive.read(name) for name in archive.namelist() if name != ABOUT}
        if _digest(about["settings"], parts) != about["digest"]:
            raise UnreadableStep(f"{path} was edited after it was written, so nobody has verified what it says")
        return about["settings"], [_entry(parts, i) for i in range(about["programs"])]
    except (zipfile.BadZipFile, zlib.error, LookupError, ValueError, EOFError, RuntimeError, TypeError) as error:
        if isinstance(error, UnreadableStep):
            raise
        raise UnreadableStep(f"{path} is no saved step, or it is damaged: {error}") from error


def _entry(parts: Mapping[str, bytes], i: int) -> Entry:
    key, program, calling = (parts[f"{i}/{name}"].decode() for name in ("key.json", "program.txt", "calling.txt"))
    file = io.BytesIO(parts[f"{i}/constants.pt"])
    with _torch.no_modes():  # also inside LocalTensorMode they are plain tensors, the same on all ranks
        constants = torch.load(file, weights_only=True, map_location="cpu")
    return Entry(json.loads(key), program, calling, constants, parts.get(f"{i}/code.txt", b"").decode())


def _tensor_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save({name: x.detach().cpu() for name, x in tensors.items()}, file)
    return file.getvalue()
