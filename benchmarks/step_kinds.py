"""The kinds of train steps that people have, each small: what `steps.py` compiles and compares with one device.

    KINDS["clip_grad_norm_"]      Kind(step=clipping_step)

A kind makes what its step is given - models, optimisers, whatever is between them - and batches; the steps are plain
Python for one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import step_models as models
import step_parts as parts
import torch
from torch import nn


@dataclass(frozen=True)
class Kind:
    """A kind of train step.

    step: the step, or several that are called in turn. begin: makes what it gets before the batch. between: called with
    the number of the step and what `begin` made, before each step. inputs: patterns of the arguments that are sharded
    over dp. reference: another kind that has to have the same numbers. precision: the relative difference that the
    step's own rounding allows, where that is more than its dtype's. draws: whether it draws random numbers.
    """

    step: Callable | Sequence[Callable] = parts.train_step
    begin: Callable[[], tuple] = field(default_factory=parts.with_optimizer)
    between: Callable[..., None] | None = None
    batches: Callable[[], list[tuple]] = parts.rows
    inputs: tuple[str, ...] = ("x", "y")
    reference: str = ""
    precision: float = 0.0
    draws: bool = False

    def steps(self) -> list[Callable]:
        return [self.step] if callable(self.step) else list(self.step)


IN_BFLOAT16 = 2e-2
"""What sums in another order may change where the step itself computes in bfloat16, as Muon does."""

NORM, VALUE = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_


def kinds() -> dict[str, Kind]:
    """All kinds of steps, by name."""
    of_steps = of_passes() | of_optimizers() | of_clipping() | of_schedules()
    return of_steps | of_models() | of_scalers_and_hooks() | of_layers() | of_arguments()


def of_passes() -> dict[str, Kind]:
    """Forward and backward passes without an optimiser."""
    return {
        "forward": Kind(parts.forward),
        "no_grad": Kind(parts.forward_no_grad),
        "inference_mode": Kind(parts.forward_inference),
        "forward + backward": Kind(parts.forward_backward),
        "autograd.grad": Kind(parts.gradients),
        "second derivative": Kind(parts.second_derivative),
    }


def of_optimizers() -> dict[str, Kind]:
    """Each optimiser of torch, in each way that it has."""
    found: dict[str, Kind] = {}
    for name in parts.OPTIMIZERS:
        for way in ("for-loop", "foreach", *(["fused"] if name in parts.FUSED else [])):
            options = {"foreach": way == "foreach"} if way != "fused" else {"fused": True}
            found[f"{name}, {way}"] = Kind(begin=parts.with_optimizer(parts.Net, parts.optimizer_of(name, **options)))
    return found | {
        "Muon": Kind(parts.two_optimizers_step, parts.muon, precision=IN_BFLOAT16),
        "parameter groups": Kind(begin=parts.with_optimizer(parts.Net, parts.grouped)),
    }


def of_clipping() -> dict[str, Kind]:
    found: dict[str, Kind] = {}
    for foreach in (None, True, False):
        found[f"clip_grad_norm_, foreach={foreach}"] = Kind(parts.clipping(NORM, 0.1, foreach=foreach))
        largest = parts.clipping(NORM, 0.1, norm_type=math.inf, foreach=foreach)
        found[f"clip_grad_norm_ inf, foreach={foreach}"] = Kind(largest)
        found[f"clip_grad_value_, foreach={foreach}"] = Kind(parts.clipping(VALUE, 0.01, foreach=foreach))
    return found


def of_schedules() -> dict[str, Kind]:
    """Several batches in a step, several calls for a step, rates that change, averages."""
    schedules = {"between": parts.step_schedule}
    twice = tuple(parts.train_step for _ in range(2))
    return {
        "micro-batches in the step": Kind(parts.micro_batches),
        "accumulation over calls": Kind((parts.accumulate, parts.accumulate_and_update)),
        "two steps in one program": Kind(lambda m, o, x, y: [each(m, o, x, y) for each in twice]),
        "schedule of a float": Kind(begin=parts.scheduled(1e-2), **schedules),
        "schedule of a tensor": Kind(begin=parts.scheduled(torch.tensor(1e-2)), **schedules),
        "schedule of a tensor, fused": Kind(begin=parts.scheduled(torch.tensor(1e-2), fused=True), **schedules),
        "rate as an argument": Kind(parts.rate_as_argument, batches=parts.rows_and_rates),
        "schedule in the step": Kind(parts.decaying_step),
        "count as an argument": Kind(parts.scheduled_by_count, batches=parts.rows_and_counts),
        "average of parameters": Kind(parts.averaging_step, parts.with_average()),
        "average, foreach": Kind(parts.foreach_averaging_step, parts.with_average()),
        "AveragedModel": Kind(parts.averaged_model_step, parts.averaged_model),
    }


def of_models() -> dict[str, Kind]:
    """Several models, dropout, checkpoints, and what parameters and buffers may be."""
    return {
        "GAN": Kind(parts.adversarial_step, parts.adversaries),
        "teacher and student": Kind(parts.distilling_step, parts.pupils),
        "dropout": Kind(begin=parts.with_optimizer(models.Dropping), draws=True),
        "checkpoint": Kind(begin=parts.with_optimizer(lambda: models.Dropping(0.0, False))),
        "checkpoint, reentrant": Kind(begin=parts.with_optimizer(lambda: models.Dropping(0.0, True))),
        "checkpoint with dropout": Kind(
            begin=parts.with_optimizer(lambda: models.Dropping(0.3, False)), reference="dropout", draws=True
        ),
        "checkpoint with dropout, reentrant": Kind(
            begin=parts.with_optimizer(lambda: models.Dropping(0.3, True)), reference="dropout", draws=True
        ),
        "BatchNorm": Kind(begin=parts.with_optimizer(models.Normed)),
        "BatchNorm, average of all": Kind(begin=parts.with_optimizer(lambda: models.Normed(momentum=None))),
        "tied": Kind(begin=parts.with_optimizer(models.Tied), batches=models.words),
        "frozen": Kind(begin=parts.with_optimizer(models.Frozen)),
        "unused": Kind(begin=parts.with_optimizer(models.Unused)),
        "buffers": Kind(begin=parts.with_optimizer(models.Buffers)),
    }


def of_scalers_and_hooks() -> dict[str, Kind]:
    return {
        "autocast": Kind(models.autocast_step, precision=IN_BFLOAT16),
        "GradScaler": Kind(models.scaled_step, models.scaler_of(growth_interval=2)),
        "GradScaler, clipping": Kind(models.scaled_clipping_step, models.scaler_of()),
        "GradScaler, overflow": Kind(models.scaled_step, models.scaler_of(), batches=models.rows_with_overflow(2)),
        "GradScaler, first overflow": Kind(
            models.scaled_step, models.scaler_of(), batches=models.rows_with_overflow(0, 3)
        ),
        "GradScaler, off": Kind(models.scaled_step, models.scaler_of(enabled=False)),
        "module hooks": Kind(begin=models.hooked(models.module_hooks)),
        "gradient hooks": Kind(begin=models.hooked(models.gradient_hooks)),
        "norms in gradient hooks": Kind(models.norms_step),
        "post-accumulate hooks": Kind(begin=models.hooked(models.accumulate_hooks)),
        "update in backward": Kind(models.backward_step, models.update_in_backward),
        "hook of an activation": Kind(models.activation_hook_step),
    }


def of_layers() -> dict[str, Kind]:
    """Functions and ops of the user, and recurrent layers."""
    return {
        "autograd.Function": Kind(begin=parts.with_optimizer(models.OfFunctions)),
        "custom op": Kind(begin=parts.with_optimizer(models.OfCustomOps)),
        "LSTM": Kind(begin=parts.with_optimizer(lambda: models.Recurrent(nn.LSTM))),
        "LSTM, both ways": Kind(begin=parts.with_optimizer(lambda: models.Recurrent(nn.LSTM, bidirectional=True))),
        "GRU of two layers": Kind(begin=parts.with_optimizer(lambda: models.Recurrent(nn.GRU, num_layers=2))),
        "RNN": Kind(begin=parts.with_optimizer(lambda: models.Recurrent(nn.RNN))),
        "LSTMCell": Kind(begin=parts.with_optimizer(models.Cell)),
    }


def of_arguments() -> dict[str, Kind]:
    """Objects as arguments and results."""
    return {
        "dict": Kind(models.dict_step, batches=models.wrapped(dict), inputs=("batch.*",)),
        "dataclass": Kind(models.dataclass_step, batches=models.wrapped(models.Batch), inputs=("batch.*",)),
        "ModelOutput": Kind(models.model_output_step, batches=models.wrapped(dict), inputs=("batch.*",)),
        "cache that grows": Kind(models.decode_step, lambda: (parts.Net(), models.KeyValueCache())),
        "cache of a fixed size": Kind(
            models.static_cache_step, lambda: (parts.Net(), models.StaticCache()), batches=models.rows_and_places
        ),
    }


KINDS = kinds()
