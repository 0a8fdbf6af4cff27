"""Errors of a trace in the user's words: what the step does that no program can, where, and what to write instead."""

from __future__ import annotations

import torch

from spmd import _torch
from spmd.expand.user_code import in_user_code


def explained(name: str, error: Exception) -> Exception | None:
    """The error to raise in the place of this one, which the trace of a step of this name ended with; None to leave it.
    """
    found = _meaning(error)
    if found is None:
        return None
    kind, text = found
    return kind(f"{name} {text}{in_user_code(error)}")


def _meaning(error: Exception) -> tuple[type[Exception], str] | None:
    text = str(error)
    if isinstance(error, _torch.unknown_value_errors()):
        return RuntimeError, (
            "decides by a value in a tensor, which only the run knows; write it with ops on tensors, such as "
            "torch.where, with x.item() in the place of float(x) or int(x), or move it out of the step"
        )
    if isinstance(error, _torch.ErrorOfRun):
        return RuntimeError, (
            f"catches the error of a {error}, which only the run knows: its program would raise it; return the number, "
            "and compute with it after the step"
        )
    if isinstance(error, AssertionError) and "token for effect" in text:
        return NotImplementedError, ONLY_ACTS
    simulated = isinstance(error, TypeError) and "LocalTensor" in text  # it meets no traced tensor
    if simulated or (isinstance(error, AssertionError) and "FakeTensor" in text):
        return RuntimeError, (
            "uses a tensor that is not among its arguments, nor in a module or optimiser among them; pass it as an "
            "argument, or keep it where a module finds it: parameters in an nn.ParameterList, and no list"
        )
    reads = isinstance(error, TypeError | RuntimeError) and any(part in text for part in READS_A_VALUE)
    if isinstance(error, _torch.ValueRead) or reads:
        return RuntimeError, (
            f"reads the value of a tensor in Python ({text.splitlines()[0]}), which only the run knows; return the "
            "tensor, and read it after the step"
        )
    if isinstance(error, NotImplementedError) and "auto_functionalized" in text:
        return NotImplementedError, (
            "calls a custom op that writes into its arguments (mutates_args), which no program can hold; let the op "
            "return the new values, and write them with x.copy_(...)"
        )
    if isinstance(error, RuntimeError) and any(part in text for part in ASKS_FOR_MEMORY):
        return RuntimeError, (
            "needs the memory of a tensor, as torch.save and pointers do, and a traced one has none; copy with "
            "x.clone(), and save after the step"
        )
    return None


ONLY_ACTS = (
    "calls an op that only prints or communicates, which has no place in a program; call it after the step, and leave "
    "collectives to the compiler: a step computes with global tensors"
)

READS_A_VALUE = ".numpy() is not supported", "passed to FunctionalTensor.__format__", "but got FunctionalTensor"
"""What torch says where Python code wants numbers of a traced tensor; the last, where a size should be an int."""

ASKS_FOR_MEMORY = "Cannot access data pointer of Tensor", "data pointer on an invalid python storage"
"""What torch says where code wants the memory of a traced tensor."""


def of_dtensor(error: AttributeError, kind: type) -> AttributeError:
    """The error, with an explanation if a method of DTensors, which are of this kind, was called on a traced tensor."""
    if not isinstance(error.obj, torch.Tensor) or not hasattr(kind, str(error.name)):
        return error
    return AttributeError(
        f"tensors in a compiled step are plain global tensors and have no {error.name}: place the arguments by inputs= "
        "and params=, and leave the rest to the compiler; move between meshes before the step or after it"
    )
