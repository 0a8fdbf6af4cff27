"""Folders of safetensors, as `save_pretrained` of transformers writes them, read and written by ranks that have blocks.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)             # shapes, no memory
    plan_for(model, mesh).apply(model, init=False)                   # or styles, or fully_shard
    load_pretrained(model, folder)                                   # each rank reads its blocks
    save_pretrained(model, folder)                                   # a folder that stock transformers reads

Reading takes one file after the other, and of each tensor the slices that this rank has: no rank has a whole tensor
that is sharded, and nothing is sent. Writing gathers one tensor after the other; the rank whose turn it is keeps those
of one file, writes it, and forgets them.

Names are those of the model. As transformers does, a file may have the names with the prefix of the base model or
without, tied weights under one of their names, and lacks buffers that are not persistent. What is left out: files whose
tensors transformers splits, merges or renames while it reads, such as experts one by one; `save_pretrained(...,
save_original_format=False)` of transformers writes them as the model has them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spmd import _torch
from spmd.mesh import per_rank
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.eager.meta_models import initialise, made_empty
from spmd.tensor.redistribute.boxes import narrowed, relative_to, simple, volume
from spmd.tensor.spec import Spec

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class LoadedKeys:
    """What a folder did not have, and what a model does not have, in order: the names that transformers reports."""

    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]


def load_pretrained(model: nn.Module, folder: str | Path, *, strict: bool = True) -> LoadedKeys:
    """Read the tensors of a folder of safetensors into a model whose parameters may be DTensors, in place.

    folder: with model.safetensors, or with several files and model.safetensors.index.json. Tensors of the model keep
    their dtype, and stay the objects that they are. Those on the meta device get memory: each rank's block. Those that
    the files do not have keep their numbers, or, from the meta device, get those of the modules' own initialisers, as
    rotary tables do, for which DTensors need `spmd.manual_seed`. All ranks that have a part of the model must call it.

    strict: names that are missing or not expected are an error, but for those that the model's class says to ignore.
    Raises ValueError for them and for other shapes, and FileNotFoundError, before anything is changed.

    >>> import tempfile
    >>> from spmd.checkpoint import save_pretrained
    >>> folder = tempfile.mkdtemp()
    >>> save_pretrained(nn.Linear(2, 2), folder)
    >>> load_pretrained(nn.Linear(2, 2), folder)
    LoadedKeys(missing_keys=(), unexpected_keys=())
    """
    own = {k: x for k, x in model.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)}
    files = _files_in(Path(folder))
    names = {key: _name_in(model, own, key) for keys in files.values() for key in keys}
    keys = _compared(model, own, names)
    if strict and (keys.missing_keys or keys.unexpected_keys):
        raise ValueError(_said_of(keys, folder))
    _check_shapes(own, names, files)
    for file, inside in files.items():
        with safetensors().safe_open(file, "pt") as opened:
            for key in inside:
                if names[key] is not None:
                    _read_into(own[names[key]], opened, key)
    _make_the_rest(model)
    return keys


# ---- names --------------------------------------------------------------------------------------


def _files_in(folder: Path) -> dict[Path, list[str]]:
    """The files of a folder, and the names in each."""
    if (folder / INDEX).is_file():
        found: dict[Path, list[str]] = {}
        for key, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
            found.setdefault(folder / file, []).append(key)
        lacking = [file.name for file in found if not file.is_file()]
        if lacking:
            raise FileNotFoundError(f"load_pretrained: {folder} has no {lacking[0]}, which its {INDEX} names")
        return found
    if not (folder / WEIGHTS).is_file():
        raise FileNotFoundError(
            f"load_pretrained: {folder} has neither {WEIGHTS} nor {INDEX}; give a folder that save_pretrained has "
            "written, on this host"
        )
    with safetensors().safe_open(folder / WEIGHTS, "pt") as opened:
        return {folder / WEIGHTS: list(opened.keys())}


def _name_in(model: nn.Module, own: Mapping[str, Any], key: str) -> str | None:
    """The model's name for what a file calls so: with the prefix of the base model, or without."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    return next((name for name in (key, prefix + key, key.removeprefix(prefix)) if name in own), None)


def _compared(model: nn.Module, own: Mapping[str, torch.Tensor], names: Mapping[str, str | None]) -> LoadedKeys:
    have = {id(own[name]) for name in names.values() if name is not None}
    missing = [name for name, x in own.items() if id(x) not in have]
    unexpected = [key for key, name in names.items() if name is None]
    return LoadedKeys(
        tuple(_not_ignored(model, missing, "_keys_to_ignore_on_load_missing")),
        tuple(_not_ignored(model, unexpected, "_keys_to_ignore_on_load_unexpected")),
    )


def _not_ignored(model: nn.Module, names: Iterable[str], attribute: str) -> list[str]:
    """Without those that the model's class has a pattern for."""
    patterns = getattr(model, attribute, None) or ()
    return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]


def _said_of(keys: LoadedKeys, folder: str | Path) -> str:
    missing, more = keys.missing_keys, keys.unexpected_keys
    text = f"load_pretrained: {folder} does not fit the model."
    if missing:
        text += f" Missing {len(missing)}: {', '.join(missing[:4])}."
    if more:
        text += f" Not expected {len(more)}: {', '.join(more[:4])}."
    return text + (
        " Pass strict=False to leave them out. Files whose tensors transformers converts while it reads are written as "
        "the model has them by its save_pretrained(..., save_original_format=False)"
    )


def _check_shapes(own: Mapping[str, torch.Tensor], names: Mapping[str, str | None], files: Mapping[Path, list]) -> None:
    for file, inside in files.items():
        with safetensors().safe_open(file, "pt") as opened:
            for key in inside:
                shape = opened.get_slice(key).get_shape() if names[key] is not None else None
                if shape is not None and list(own[names[key]].shape) != shape:
                    raise ValueError(
                        f"load_pretrained: {key} is {shape} in {file.name} and {list(own[names[key]].shape)} in the "
                        "model; make the model with the configuration that is in the folder"
                    )


# ---- blocks -------------------------------------------------------------------------------------


@torch.no_grad()
def _read_into(x: torch.Tensor, opened: Any, key: str) -> None:
    """Read this rank's block of a tensor."""
    if not isinstance(x, DTensor):
        found = opened.get_tensor(key)
        _torch.become(x, _leaf(found.to(x.dtype), x)) if x.is_meta else x.copy_(found)
        return
    if x._spec.partial:
        raise ValueError(f"load_pretrained: {key} is {x._spec}, which is still to be reduced, and cannot be loaded")
    if x.is_meta:
        _torch.become(x, made_empty(x, x._spec))
    x.detach().copy_(DTensor(_block(x._spec, opened, key), x._spec))


@per_rank
def _block(spec: Spec, opened: Any, key: str) -> torch.Tensor:
    """The elements that this rank has, of all others nothing."""
    at = spec.mesh.get_coordinate()
    if at is None:
        return torch.empty(0, dtype=spec.dtype, device=spec.mesh.device_type)
    if not spec.shape:
        return opened.get_tensor(key).to(spec.mesh.device_type, spec.dtype)
    box, source = spec.box(at), opened.get_slice(key)
    block = torch.empty(spec.local_shape(at), dtype=spec.dtype, device=spec.mesh.device_type)
    for part in simple(box):
        if volume(part):
            read = source[tuple(slice(start, stop) for start, stop in part)]
            narrowed(block, relative_to(part, box), block.shape).copy_(read)
    return block


def _leaf(new: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return nn.Parameter(new, like.requires_grad) if isinstance(like, nn.Parameter) else new


def _make_the_rest(model: nn.Module) -> None:
    """Memory and numbers for what is on the meta device still."""
    devices = [x._spec.mesh.device_type for x in model.parameters() if isinstance(x, DTensor)]
    device, fresh = next(iter(devices), "cpu"), []
    for x in dict.fromkeys([*model.parameters(), *model.buffers()]):
        if x.is_meta and device != "meta":
            is_placed = isinstance(x, DTensor)
            _torch.become(x, made_empty(x, x._spec) if is_placed else _leaf(torch.empty_like(x, device=device), x))
            fresh.append(x)
    initialise({"": model}, fresh)


# ---- files --------------------------------------------------------------------------------------


def safetensors(part: str = "") -> Any:
    """The package, or a part of it, which are not needed for anything else."""
    try:
        return importlib.import_module(f"safetensors.{part}".rstrip("."))
    except ImportError as error:
        raise ImportError(
            "spmd.checkpoint: folders of safetensors need that package; pip install safetensors"
        ) from error
