"""The plain values that a step's code names besides its arguments: globals, variables around it, attributes of objects.

    SCALE = 0.5
    def step(model, x):
        return model(x) * SCALE * config.rates["loss"]      # SCALE, config.rates["loss"]

A trace reads them once, so they are guards, like the attributes of modules. What the code names is read off its
bytecode: a variable, and the attributes and constant keys that follow it. So an attribute counts where it is read of
this object, and not where another object has one of the same name. Where that ends at a list, a dict, a small array or
an object that is a record, all plain values in it count: a loop or a function may read any. So do values of default
arguments. Left out: values that are found in other ways, attributes of other objects that are passed on, and containers
of more than a hundred items, which are data.
"""

from __future__ import annotations

import argparse
import contextvars
import dataclasses
import enum
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from spmd.expand.bytecode import instructions
from spmd.expand.closed_over import MOST_ITEMS, is_installed, package_of
from spmd.expand.guards import guard_key
from spmd.expand.python_state import is_set
from spmd.expand.reads import Reads

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)

Chain = tuple[tuple[str, Any], ...]
"""A variable and what follows it: ("global", "config"), ("attribute", "rates"), ("key", "loss")."""

_VARIABLES = {"LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_DEREF": "around", "LOAD_FAST": "local"}


@functools.lru_cache(maxsize=1024)
def chains_in(code: types.CodeType) -> tuple[Chain, ...]:
    """The chains in the code of a function and of the functions inside it, in order.

    >>> chains_in((lambda: math.inf + sizes["x"]).__code__)
    ((('global', 'math'), ('attribute', 'inf')), (('global', 'sizes'), ('key', 'x')))
    """
    found: dict[Chain, None] = {}
    chain: Chain = ()
    key: Chain = ()
    for name, value, _ in instructions(code):
        if name == "LOAD_CONST" and chain and not key:
            key = (("key", value),)
            continue
        if name == "LOAD_ATTR" and chain and not key:
            chain += (("attribute", value),)
        elif name == "BINARY_SUBSCR" and key:
            chain += key
        else:
            found[chain] = None
            chain = ((_VARIABLES[name], value),) if name in _VARIABLES else ()
        key = ()
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= dict.fromkeys(chains_in(inner))
    return tuple(each for each in found if each)


def named_values(
    functions: Iterable[tuple[types.FunctionType, Any]], classes: Mapping[type, Iterable[str]], reads: Reads
) -> dict[str, Any]:
    """The plain values that functions name, by the text that names them, and those of classes.

    functions: each with the object that it is a method of, its class, or None. classes: each with the names of
    attributes that code may read of it. reads: where to note what was looked at.
    """
    found = _Found()
    for kind, names in classes.items():
        for name in sorted(names):
            found.add(f"{kind.__qualname__}.{name}", kind, plain_values(_attribute(kind, name, reads), reads))
    for fn, owner in functions:
        for (kind, name), *rest in chains_in(fn.__code__):
            text, value, place = name, *_variable(fn, owner, kind, name, reads)
            for kind, part in rest:
                is_method = kind == "attribute" and (type(value) in CONTAINERS or isinstance(value, CONTEXT))
                if is_method or isinstance(value, np.ndarray):
                    break  # an element, or a method that may read all of it
                text += f".{part}" if kind == "attribute" else f"[{part!r}]"
                value = _attribute(value, part, reads) if kind == "attribute" else _item(value, part, reads)
            if value is not owner:
                found.add(text if owner is None else f"{name_of(owner)}: {text}", place, plain_values(value, reads))
        for name, value in _defaults(fn):
            found.add(f"{fn.__qualname__}: default {name}", fn, plain_values(value, reads))
        found.add(f"{fn.__qualname__}: code", fn, fn.__code__)
    return found.values


class _Found:
    """Values by text. Where two places have values of one text, the later ones are numbered."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._places: dict[str, list[Any]] = {}

    def add(self, text: str, place: Any, plain: Any) -> None:
        if plain is NOTHING:
            return
        places = self._places.setdefault(text, [])
        at = next((i for i, each in enumerate(places) if each is place), len(places))
        if at == len(places):
            places.append(place)
            self.values[f"{text} ({at + 1})" if at else text] = plain


def _defaults(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The arguments of a function that have a value by default, with the value."""
    names, values = fn.__code__.co_varnames[: fn.__code__.co_argcount], fn.__defaults__ or ()
    yield from zip(names[len(names) - len(values) :], values, strict=True)
    yield from (fn.__kwdefaults__ or {}).items()


def name_of(owner: Any) -> str:
    return (owner if isinstance(owner, type) else type(owner)).__qualname__


# ---- what a part of a chain is ----------------------------------------------------------------

NOTHING = object()


def _variable(fn: types.FunctionType, owner: Any, kind: str, name: str, reads: Reads) -> tuple[Any, Any]:
    """The value of a variable, and what has it."""
    code = fn.__code__
    if kind == "local" or name in code.co_cellvars:  # which lambdas, and loops in brackets, share
        is_self = owner is not None and code.co_argcount and code.co_varnames[0] == name
        return (owner if is_self else NOTHING), owner
    if kind == "global":
        if reads.is_changing(fn.__globals__, name):
            return NOTHING, None
        reads.item(fn.__globals__, name)
        return fn.__globals__.get(name, NOTHING), fn.__globals__
    if name not in code.co_freevars:
        return NOTHING, None
    cell = fn.__closure__[code.co_freevars.index(name)]
    if reads.is_changing(cell, ""):
        return NOTHING, None
    reads.cell(cell)
    return (cell.cell_contents if is_set(cell) else NOTHING), cell


def _attribute(x: Any, name: str, reads: Reads) -> Any:
    """An attribute of an object, of its class, or of a Python module of the user."""
    if isinstance(x, types.ModuleType) and is_installed(package_of(x.__name__)):
        return NOTHING
    if isinstance(x, (torch.Tensor, nn.Module, Optimizer)) or not hasattr(x, "__dict__"):
        return NOTHING
    owners = x.__mro__ if isinstance(x, type) else (x, *type(x).__mro__)
    if not isinstance(x, type):
        reads.place(x)
    for owner in owners:
        own = vars(owner)
        if reads.is_changing(owner if isinstance(owner, type) else own, name):
            return NOTHING
        reads.item(own, name)
        if name in own:
            return own[name]
    return NOTHING


CONTAINERS, CONTEXT = {dict, list, set, tuple, frozenset}, contextvars.ContextVar
MOST_NUMBERS = 64
"""An array with more is data."""
MOST_NESTED = 6

RECORDS = types.SimpleNamespace, argparse.Namespace
"""Classes whose objects are their attributes; so are those of dataclasses."""


def plain_values(x: Any, reads: Reads, depth: int = MOST_NESTED) -> Any:
    """The plain values in a value, as a copy that later changes do not reach; of others the class. NOTHING for a value
    that is neither plain nor holds any.

    >>> plain_values({"rates": [0.5, print]}, Reads())
    {'rates': [0.5, <class 'builtin_function_or_method'>]}
    """
    if isinstance(x, (*PLAIN, np.generic)):
        return x
    if isinstance(x, np.ndarray):
        few = x.size <= MOST_NUMBERS and x.dtype != object
        if few:
            reads.keyed(x, guard_key)
        return (x.dtype.str, x.shape, x.tobytes()) if few else NOTHING
    if isinstance(x, CONTEXT):
        reads.look_ups.append((_value_in_context, x))
        return plain_values(_value_in_context(x, NOTHING), reads, depth)
    if type(x) in CONTAINERS:
        return _plain_items(x, reads, depth)
    if depth and (isinstance(x, RECORDS) or (dataclasses.is_dataclass(x) and not isinstance(x, type))):
        if not hasattr(x, "__dict__"):
            return NOTHING
        changing = [name for name in vars(x) if reads.is_changing(vars(x), name)]
        reads.object(x, without=changing)
        return {name: _or_class(value, reads, depth - 1) for name, value in vars(x).items() if name not in changing}
    return NOTHING


def _value_in_context(variable: contextvars.ContextVar, otherwise: Any) -> Any:
    return variable.get(otherwise)


def _plain_items(x: Any, reads: Reads, depth: int) -> Any:
    if len(x) > MOST_ITEMS or not depth:
        return NOTHING
    if not isinstance(x, (tuple, frozenset)):
        reads.box(x)
    if isinstance(x, dict):
        return {_key(k): _or_class(v, reads, depth - 1) for k, v in x.items()}
    return type(x)([_key(v) if isinstance(x, (set, frozenset)) else _or_class(v, reads, depth - 1) for v in x])


def _key(x: Any) -> Any:
    """A key of a dict, or an item of a set."""
    if isinstance(x, (*PLAIN, np.generic)):
        return x
    return type(x)(map(_key, x)) if type(x) in (tuple, frozenset) else type(x)


def _or_class(x: Any, reads: Reads, depth: int) -> Any:
    plain = plain_values(x, reads, depth)
    if plain is not NOTHING:
        return plain
    return torch.Tensor if isinstance(x, torch.Tensor) else type(x)  # a call may place it


def _item(x: Any, key: Any, reads: Reads) -> Any:
    if type(x) is dict:
        reads.item(x, key)
        return x.get(key, NOTHING)
    if type(x) not in (list, tuple) or type(key) is not int or not -len(x) <= key < len(x):
        return NOTHING
    if type(x) is list:
        reads.box(x)
    return x[key]
