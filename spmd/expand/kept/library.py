"""Where the programs of a step are looked for before it is captured, and where they are put afterwards.

    NOWHERE        nothing is kept
    Folder         a cache folder: a program that is not there, or is damaged, is made anew and put there
    Saved          a file of `step.save`: a call for which it has no program is an error that names what differs
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import nn

from spmd.expand.asked import environment_differs
from spmd.expand.captured import Captured
from spmd.expand.kept import archive
from spmd.expand.kept.archive import Entry, Kept
from spmd.expand.kept.graphs import made_for_ranks
from spmd.expand.kept.key import LINKS, MESH, Key, differences, name_of, named
from spmd.expand.kept.notation import CannotKeep
from spmd.expand.program import Program
from spmd.expand.verify import ProgramFault
from spmd.mesh import DeviceMesh

Found = Kept | None

Make = Callable[["Wanted"], Entry]
"""Makes the entry of a program for a call; CannotKeep where it has none."""


class StaleStep(RuntimeError):
    """A saved step that was made for another step, or for another call, than it is used for."""


class Wanted(NamedTuple):
    """The call that a program is looked for: the title of the step, its key or why it has none, its numbers, its mesh,
    the modules by path, and the rank, if its code may be kept (`place_of_code`)."""

    title: str
    key: Key | CannotKeep
    numbers: dict[str, float]
    mesh: DeviceMesh
    modules: Mapping[str, nn.Module]
    at: str | None = None

    def read(self, entry: Entry) -> Kept:
        """The program of an entry, for this call."""
        return entry.read(self.mesh, self.modules, self.at)

    def entry(self, captured: Captured, program: Program, code: str = "") -> Entry:
        """The entry of a program that was made for this call."""
        return Entry.of(self.known_key(), captured, program, self.modules, code)

    def known_key(self) -> Key:
        """The key. CannotKeep where there is none."""
        if isinstance(self.key, CannotKeep):
            raise self.key
        return self.key


def entry_or_reason(wanted: Wanted, make: Make) -> Entry | CannotKeep:
    """The entry of a program, or why it has none."""
    try:
        return make(wanted)
    except CannotKeep as error:
        return error


class Library:
    """Keeps nothing; the base of those that do."""

    is_cache = True
    """Whether a program that was found may be made anew."""

    def find(self, wanted: Wanted) -> Found:
        """The program that is wanted, and how it is called; None where a capture has to make it."""
        return None

    def add(self, wanted: Wanted, make: Make) -> None:
        """Keep a program that was made."""

    def counted(self, wanted: Wanted) -> list[str]:
        """The numbers that a capture for this call once found to change, by the names of their guards."""
        return []

    def note_counted(self, wanted: Wanted, names: list[str]) -> None:
        """Note that a capture for this call has found that these numbers change."""


NOWHERE = Library()


def library_at(path: str | os.PathLike | None) -> Library:
    """The cache folder at a path, by default that of $SPMD_CACHE; NOWHERE for an empty path."""
    path = os.environ.get("SPMD_CACHE", "") if path is None else path
    return Folder(Path(path)) if path else NOWHERE


# ---- a cache folder ---------------------------------------------------------------------------

MOST_BYTES = 1 << 30
"""How large a cache folder may become. The files that were not used for the longest time are removed."""

SUFFIX, NOTE = ".spmd", ".counted"
"""Of a file with programs, and of one that names what a capture has found to change."""


class Folder(Library):
    """A folder with a file for each key, and for each rank whose code is kept. Many processes may use it at once."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES):
        self.path, self.most_bytes = path, most_bytes

    def find(self, wanted: Wanted) -> Found:
        if isinstance(wanted.key, CannotKeep):
            return None
        for at in dict.fromkeys((wanted.at, None)):
            file = self._file(wanted.key, at)
            for entry in self._entries(file, wanted.key):
                try:
                    kept = wanted.read(entry)
                except (ValueError, ProgramFault) as error:
                    self._warn(f"{file} is not used, and will be replaced: {error}")
                    return None
                if kept.captured.holds(wanted.numbers):
                    with contextlib.suppress(OSError):  # of others, who let us read it; or another has removed it
                        os.utime(file)
                    return kept
        return None

    def add(self, wanted: Wanted, make: Make) -> None:
        entry = entry_or_reason(wanted, make)
        if isinstance(entry, CannotKeep):
            self._warn(f"{wanted.title} is not kept in {self.path}: {entry}")
            return
        file = self._file(entry.key, wanted.at)
        others = self._entries(file, entry.key, silent=True)
        if any(other.texts == entry.texts for other in others):
            return
        others = [other for other in others if _is_sound(other, wanted)]
        if any(other.calling == entry.calling for other in others):
            return  # another rank was faster
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            archive.write(file, "", [*others, entry])
            self._trim(keep=file)
        except OSError as error:
            self._warn(f"{wanted.title} is not kept in {self.path}: {error}")

    def counted(self, wanted: Wanted) -> list[str]:
        if isinstance(wanted.key, CannotKeep):
            return []
        try:
            names = json.loads(self._note(wanted.key).read_text())
        except (OSError, ValueError):  # a capture finds them again
            return []
        return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []

    def note_counted(self, wanted: Wanted, names: list[str]) -> None:
        if isinstance(wanted.key, CannotKeep):
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            archive.write_in_one_go(self._note(wanted.key), json.dumps(names).encode())
        except OSError as error:
            self._warn(f"what {wanted.title} counts is not kept in {self.path}: {error}")

    def _note(self, key: Key) -> Path:
        return self.path / f"{name_of(key)}{NOTE}"

    def _file(self, key: Key, at: str | None) -> Path:
        return self.path / f"{name_of(key | {'rank': at} if at else key)}{SUFFIX}"

    def _entries(self, file: Path, key: Key, silent: bool = False) -> list[Entry]:
        """The entries of a file with this key; none where it is not there, and none of a damaged file."""
        try:
            return [entry for entry in archive.read(file)[1] if entry.key == key]
        except FileNotFoundError:
            return []
        except (archive.UnreadableStep, OSError) as error:
            if not silent:
                self._warn(f"{error}; it is not used, and will be replaced")
            return []

    def _trim(self, keep: Path) -> None:
        """Remove what was not used for the longest time, until the folder is small enough."""
        files = [file for suffix in (SUFFIX, NOTE) for file in self.path.glob(f"*{suffix}")]
        files = sorted((f for f in map(_stat, files) if f), key=lambda f: f[0], reverse=True)
        total = 0
        for _, size, file in files:
            total += size
            if total > self.most_bytes and file != keep:
                file.unlink(missing_ok=True)

    @staticmethod
    def _warn(text: str) -> None:
        warnings.warn(text, stacklevel=7)


def _stat(file: Path) -> tuple[float, int, Path] | None:
    """When a file was used, its size and its path; None where another process has removed it."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime, found.st_size, file


def _is_sound(entry: Entry, wanted: Wanted) -> bool:
    """Whether an entry can be read, and is for other numbers than those wanted."""
    try:
        return not wanted.read(entry).captured.holds(wanted.numbers)
    except (ValueError, ProgramFault):
        return False


# ---- a saved step -----------------------------------------------------------------------------


class Saved(Library):
    """The programs of a file that `step.save` has written."""

    is_cache = False

    def __init__(self, path: str | os.PathLike, entries: Sequence[Entry]):
        self.path, self.entries = path, entries

    def check(self, known: Key) -> None:
        """StaleStep if the file was made for other versions, settings or axes than those known so far."""
        for entry in self.entries[:1]:
            saved = {name: text for name, text in entry.key.items() if name in known or name.startswith(MESH)}
            self._refuse(differences(saved, known | _sizes(entry.key, known), (LINKS,)))

    def find(self, wanted: Wanted) -> Found:
        if isinstance(wanted.key, CannotKeep):
            raise StaleStep(f"{self.path}: {wanted.title} cannot be compared with what was saved: {wanted.key}")
        nearest: list[str] | None = None
        for entry in self.entries:
            found = differences(entry.key, wanted.key | _sizes(entry.key, wanted.key), (LINKS,))
            if not found:
                kept = self._read(entry, wanted)
                if kept.captured.holds(wanted.numbers):
                    return kept
                known = environment_differs(kept.captured.environment) or kept.captured.parted(wanted.numbers)
                found = [known or f"numbers: {wanted.numbers} take other branches of the step's code"]
            nearest = found if nearest is None or len(found) < len(nearest) else nearest
        self._refuse(nearest or ["it has no program"])
        return None

    def _read(self, entry: Entry, wanted: Wanted) -> Kept:
        """The program of an entry on the mesh, which may have other numbers of ranks along its axes."""
        others = {name: text for name, text in _sizes(entry.key, wanted.key).items() if wanted.key[name] != text}
        if not others:
            return wanted.read(entry)
        changed = ", ".join(f"{name.removeprefix(MESH)} from {n} to {wanted.key[name]}" for name, n in others.items())
        try:
            kept = wanted.read(entry)
            node = made_for_ranks(kept.program)
        except (ValueError, ProgramFault) as error:
            raise StaleStep(f"{self.path} does not fit other numbers of ranks, {changed}: {error}") from error
        if node is not None:
            raise StaleStep(
                f"{self.path} does not fit other numbers of ranks, {changed}: {node.name} was made for these; compile "
                "the step on this mesh"
            )
        return kept

    def _refuse(self, found: list[str]) -> None:
        if found:
            raise StaleStep(f"{self.path} is for something else:{named(found)}\nCompile the step, and save it again.")


def _sizes(saved: Key, now: Key) -> Key:
    """The saved numbers of ranks of the axes that both keys have."""
    return {name: text for name, text in saved.items() if name.startswith(MESH) and name in now}
