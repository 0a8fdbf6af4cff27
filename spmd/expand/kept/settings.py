"""The settings of a step as text, and back."""

from __future__ import annotations

import dataclasses

from spmd.expand.kept.notation import Reader, lines_of, read_lines
from spmd.expand.settings import Settings
from spmd.mesh import DeviceMesh

NAMES = [f.name for f in dataclasses.fields(Settings)]


def settings_text(settings: Settings) -> str:
    """The settings, a line each."""
    return lines_of({name: getattr(settings, name) for name in NAMES})


def read_settings(text: str, mesh: DeviceMesh) -> Settings:
    """The settings of a text. ValueError for a text that lacks some."""
    return Settings(**read_lines(text, Reader(mesh), NAMES))
