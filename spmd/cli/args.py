"""Types of command-line arguments, and the error for input that a command cannot use."""

from __future__ import annotations

import argparse
import re


class UsageError(Exception):
    """The input cannot be used. The user sees only its text: the value that was given, and values that would work."""

    code = 2  # the exit code of the process, the same as argparse's


def mesh_shape(text: str) -> tuple[int, int]:
    """The sizes of a mesh with the axes dp and tp.

    >>> mesh_shape("2x4")
    (2, 4)
    """
    sizes = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if not sizes:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh. A mesh is DPxTP, two whole numbers of at least 1: "
            "2x2 is four ranks, 1x4 four ranks that share each matrix, 4x1 four ranks that share each batch."
        )
    return int(sizes[1]), int(sizes[2])


def axis_sizes(text: str) -> tuple[int, ...]:
    """The sizes of a mesh with any number of axes.

    >>> axis_sizes("2x2x3")
    (2, 2, 3)
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh. A mesh is whole numbers of at least 1 with x between: 2x4."
        )
    return tuple(map(int, text.split("x")))


def byte_count(text: str) -> int:
    """A number of bytes, such as 4096, 64K, 16M or 1G.

    >>> byte_count("64K")
    65536
    """
    size = re.fullmatch(r"([1-9]\d*)([KMG]?)", text)
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes. Give one such as 4096, 64K, 16M or 1G.")
    return int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1.")
    return int(text)


def seed(text: str) -> int:
    """A whole number that torch accepts as a seed."""
    if not re.fullmatch(r"\d+", text) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2**63 - 1.")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0.")
    return value
