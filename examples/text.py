"""Load text as bytes, and cut it into batches. Every byte is a token, so the vocabulary is 256.

    data = load_text()                                     # uint8[bytes]
    for tokens, targets in batches(data, batch=16, block=64, seed=0):
        ...                                                # both int64[16, 64]; a target is the byte after its token
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

ENOUGH = 4 * 2**20
"""The most bytes of the default text that are read."""


def load_text(path: str | Path | None = None) -> Tensor:
    """The bytes of a file, or by default the sources of Python's standard library: uint8[bytes].

    Raises ValueError if there is no such text.

    >>> load_text().dtype
    torch.uint8
    """
    text = standard_library() if path is None else file_bytes(Path(path))
    if not text:
        raise ValueError(f"the text {path} is empty. Give a file with some text in it.")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def file_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"cannot read the text {path}: {error.strerror}. "
            "Give the path of a file that can be read, or none for the sources of Python's standard library."
        ) from error


def standard_library() -> bytes:
    """The top-level ``*.py`` files of the standard library, in order of name, cut after ``ENOUGH`` bytes."""
    home = Path(sysconfig.get_path("stdlib"))
    text = b"".join(source.read_bytes() for source in sorted(home.glob("*.py")))[:ENOUGH]
    if not text:
        raise ValueError(f"this Python keeps no sources of its standard library in {home}. Give a text file instead.")
    return text


def batches(data: Tensor, batch: int, block: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless iterator over batches of windows of ``data``: (tokens, targets), both int64[batch, block].

    A target is the byte after its token. The text is cut into windows of ``block`` bytes. Each epoch has the windows in
    a new order, and no batch has one window twice. The same arguments give the same batches on any machine.

    Raises ValueError if the text is too short for one batch.

    >>> tokens, targets = next(batches(torch.arange(13, dtype=torch.uint8), batch=3, block=4))
    >>> (targets - tokens).unique()
    tensor([1])
    """
    need = batch * block + 1
    if len(data) < need:
        raise ValueError(
            f"the text has {len(data)} bytes, and one batch of {batch} windows of {block} bytes needs "
            f"{batch} * {block} + 1 = {need}. Give a longer text, a smaller batch or a shorter block."
        )
    return draw(data, batch, block, torch.Generator().manual_seed(seed))


def draw(data: Tensor, batch: int, block: int, random: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    span = torch.arange(block)
    while True:
        order = torch.randperm((len(data) - 1) // block, generator=random)
        for chosen in order.split(batch):
            if len(chosen) == batch:  # windows that fill no batch are skipped in this epoch
                at = chosen[:, None] * block + span  # [batch, block]
                yield data[at].long(), data[at + 1].long()
