"""The state of a train step: the parameters, buffers, gradients and optimiser state that it reads and writes.

`State.of(args)` finds the modules and optimisers among the arguments of a call. Each tensor in them has a `Slot`. A
tied tensor has several names and one slot:

    model.blocks.0.attn.q.weight                        a parameter, under its first name
    model.blocks.0.attn.q.weight.grad                   its gradient, where there is one
    optimizer.exp_avg[model.blocks.0.attn.q.weight]     optimiser state of this parameter
    optimizer.param_groups.0.lr                         a hyper-parameter, where it is a tensor

`install` puts other tensors into the slots. `swap` does so for the length of a `with` block.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.attributes import ATTRIBUTE, attribute_guards
from spmd.expand.closed_over import Search
from spmd.expand.guards import NOTHING, guard_key, in_order_of_hooks, module_guard
from spmd.expand.hooks import hooks_of, note_hooks
from spmd.expand.modules import (
    OF_ALL_MODULES,
    modules_of,
    named_buffers,
    named_parameters,
    named_within,
    names_of_one,
)
from spmd.expand.objects import NAMED, PLAIN
from spmd.expand.reads import Reads
from spmd.expand.variables import Place


class Slot(NamedTuple):
    """The place of a tensor in the arguments of a step.

    kind: parameter, buffer, grad, hyper (a hyper-parameter), or optimizer (state of the optimiser `owner` for the
    parameter `path`, under `key`). Of outputs also number (a hyper-parameter that is a float) and skipped (whether the
    first step of the optimiser `owner` was skipped).
    """

    kind: str
    path: str
    owner: str = ""
    key: str = ""

    def __str__(self):
        if self.kind == "optimizer":
            return f"{self.owner}.{self.key}[{self.path}]"
        return self.path + (".grad" if self.kind == "grad" else "")


Tensors = dict[Slot, torch.Tensor]

KINDS = ("parameter", "buffer", "grad", "optimizer", "hyper")
"""The kinds of slots, in the order of `State.tensors`."""


def in_order(tensors: Tensors) -> Tensors:
    """The tensors with their kinds in the order of `State.tensors`."""
    return dict(sorted(tensors.items(), key=lambda each: KINDS.index(each[0].kind)))


@dataclass
class State:
    """The modules and optimisers of a call, each under the path of its argument.

    objects: those of the user that the step's code finds, and names: of attributes, that it has. libraries: those of
    classes whose code is not looked through, of which every attribute counts. counters: the numbers
    that the step keeps in Python.

    Every method looks the tensors up anew, because a step may replace them.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    libraries: dict[str, Any] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    counters: dict[str, Place] = field(default_factory=dict)

    @classmethod
    def of(cls, args: dict[str, Any], around: Search | None = None) -> State:
        """The state held by the arguments, given by name, and by what the step uses without being given it (`around`).

        TypeError for an argument that cannot be traced through.
        """
        around = around or Search("", Reads())
        state = cls(objects=around.objects, libraries=around.libraries, names=around.attributes_named)
        for path, leaf in named_leaves(args):
            if isinstance(leaf, nn.Module):
                state.modules[path] = leaf
            elif isinstance(leaf, Optimizer):
                state.optimizers[path] = leaf
            elif not isinstance(leaf, (*PLAIN, *NAMED)) and path not in around.holding:
                raise TypeError(
                    f"argument {path} is a {type(leaf).__name__}: a compiled step takes modules, optimisers, tensors, "
                    "numbers, strings and lists, tuples, dicts or objects of them. Keep anything else, such as a "
                    "learning-rate scheduler, outside the step."
                )
        given = {id(x) for x in (*state.modules.values(), *state.optimizers.values())}
        for path, held in around.found.items():
            if id(held) not in given:
                (state.modules if isinstance(held, nn.Module) else state.optimizers)[path] = held
        state.optimizers = _with_inner(state.optimizers)
        return state

    # ---- reading ----------------------------------------------------------------------------
    def tensors(self) -> Tensors:
        """Every tensor of the state, in an order that depends only on names."""
        params = self.parameters()
        found: Tensors = {Slot("parameter", path): p for path, p in params.items()}
        found |= {Slot("buffer", path): b for path, b in self.buffers().items()}
        found |= {Slot("grad", path): p.grad for path, p in params.items() if p.grad is not None}
        for root, optimizer in self._keepers():
            for path, p in params.items():
                entries = optimizer.state.get(p, {})  # a defaultdict: [] would make an entry
                kept = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor)}
                found |= {Slot("optimizer", path, root, k): v for k, v in kept.items()}
        hyper = _by_first_name((path, v) for path, v in self.hyper_parameters() if isinstance(v, torch.Tensor))
        return found | {Slot("hyper", path): v for path, v in hyper.items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter once, under its first name."""
        return _by_first_name(self._all_parameters())

    def parameter_names(self) -> dict[str, list[str]]:
        """All names of each parameter, by its first name. Tied parameters have several names."""
        names: dict[int, list[str]] = {}
        for path, p in self._all_parameters():
            names.setdefault(id(p), []).append(path)
        return {several[0]: several for several in names.values()}

    def _all_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for root, module in self.modules.items():
            for name, p in named_parameters(module):
                yield f"{root}.{name}", p
        for path, group in self.groups():
            for i, p in enumerate(group["params"]):
                yield f"{path}.params.{i}", p

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer once, under its first name."""
        return _by_first_name(
            (f"{root}.{name}", b)
            for root, module in self.modules.items()
            for name, b in named_buffers(module)
        )

    def numbers(self) -> dict[str, float]:
        """The numbers that may change from call to call, by path: the floats among the hyper-parameters, such as
        learning rate, weight decay and each beta, and the counters."""
        added = self._added_options()
        hyper = {path: float(v) for path, v in self.hyper_parameters() if isinstance(v, float) and path not in added}
        return hyper | {path: place.value for path, place in self.counters.items()}

    def constants(
        self, reads: Reads | None = None, of_tensors: Mapping[int, Mapping[str, Hashable]] | None = None,
        unread: Mapping[str, Collection[str]] = NOTHING,
    ) -> dict[str, Hashable]:  # fmt: skip
        """Guard keys by path: of the other hyper-parameters, of attributes of modules, of `requires_grad`, and of what
        is one under several names.

        Also of hooks on parameters and of attributes of tensors. A trace reads these values, and the program is right
        for no others. reads: where to note what else than tensors and floats the state was found in. of_tensors: by
        module and name, the guards of attributes that hold tensors (`module_guard`). unread: names of attributes that
        are no guards, by the path of the module.
        """
        hyper = self.hyper_parameters()
        added = self._added_options()
        apart_from = added | self.counters.keys()
        constant = ((path, v) for path, v in hyper if not isinstance(v, torch.Tensor) and path not in apart_from)
        found = {path: _constant_of(v, reads) for path, v in constant}
        of, counted, apart = of_tensors or {}, self.counted(), self.apart
        found |= {
            path: module_guard(
                m, reads, of.get(id(m), NOTHING), (*unread.get(path, ()), *counted.get(id(m), ())), apart
            )
            for path, m in self.wholes().items()
        }
        if several := names_of_one(self.modules):
            found["what has several names"] = several
        found |= {f"{path}{IS_COUNTER}": guard_key(type(place.value)) for path, place in self.counters.items()}
        for path, owner in (self.optimizers | self.objects).items() if of else ():
            for name, guard in of.get(id(owner), NOTHING).items():
                found[f"{path}.{name}"] = guard
                if reads is not None:
                    guard_key(vars(owner)[name], reads, apart)
        path_of, parameters = {}, self.parameters()
        for path, p in parameters.items():
            path_of[id(p)] = path
            found[f"{path}.requires_grad"] = p.requires_grad
            found[f"{path} hooks"] = guard_key(hooks_of([p]), apart=apart)
            if reads is not None:
                note_hooks(p, reads)
        found |= attribute_guards({**self.buffers(), **parameters}, reads)
        for root, optimizer in self.optimizers.items():
            found[root] = guard_key(type(optimizer))  # options that are no floats may be those of another class
            found[f"{root}.defaults"] = guard_key(_without_tensors(optimizer.defaults))
            own = {name: v for name, v in own_attributes(optimizer) if name not in counted.get(id(optimizer), ())}
            held = of.get(id(optimizer), NOTHING)
            own = {name: in_order_of_hooks(v) if name in HOOKS_OF_STEPS else v for name, v in own.items()}
            found |= {f"{root}.{name}": guard_key(v, reads, apart) for name, v in own.items() if name not in held}
            if reads is not None:
                note_optimizer(optimizer, reads, counted.get(id(optimizer), ()))
        for path, group in self.groups():
            found[f"{path}.params"] = tuple([path_of[id(p)] for p in group["params"]])
        kept = self.kept_by_optimizers().items()
        named = ((f"{root}.state.{i}.{key}", v) for (root, i, key), v in kept)
        return found | {path: guard_key(v, reads=reads) for path, v in named if path not in self.counters}

    def counted(self) -> dict[int, list[str]]:
        """By object the names of its attributes that are counters."""
        found: dict[int, list[str]] = {}
        for place in self.counters.values():
            found.setdefault(id(place.of), []).append(place.name)
        return found

    @property
    def apart(self) -> frozenset[tuple[int, Any]]:
        """The places of the counters, which are no part of guards, by their keys."""
        return frozenset([place.key for place in self.counters.values()])

    @property
    def holders(self) -> dict[str, Any]:
        """The modules, the optimisers and the objects around them, by path."""
        return self.modules | self.optimizers | self.objects | self.libraries

    def owners(self) -> dict[str, Any]:
        """All that has attributes, by path: every module, with all that are in it, the optimisers and the objects."""
        return self.wholes() | self.optimizers | self.objects

    def wholes(self) -> dict[str, Any]:
        """All of which every attribute counts, by path: every module, and objects of libraries."""
        return self.named_submodules() | self.libraries

    def attributes_of(self, owner: Any) -> dict[str, Any]:
        """The plain attributes of one of these; of an object, those that code names."""
        if isinstance(owner, nn.Module):
            return {name: x for name, x in vars(owner).items() if name not in OF_ALL_MODULES}
        if isinstance(owner, Optimizer):
            return dict(own_attributes(owner))
        if any(owner is x for x in self.libraries.values()):
            return vars(owner)
        return {name: x for name, x in vars(owner).items() if name in self.names}

    def submodules(self) -> list[nn.Module]:
        """Every module, with all that are in it, once."""
        return list({id(m): m for root in self.modules.values() for m in modules_of(root)}.values())

    def named_submodules(self) -> dict[str, nn.Module]:
        """Every module by path, with all that are in it."""
        return dict(named_within(self.modules))

    def is_of_module(self, path: str) -> bool:
        """Whether a path of `constants` names the attributes of a module, not an optimiser's values."""
        of_optimizer = any(path.startswith(f"{root}.") for root in self.optimizers)
        return not of_optimizer and not path.startswith(ATTRIBUTE) and not path.endswith(".requires_grad")

    def hyper_parameters(self) -> Iterator[tuple[str, Any]]:
        """The options of every parameter group, by path: numbers, tensors, flags and anything else."""
        for of, group in self.groups():
            for path, v in named_leaves({k: v for k, v in group.items() if k != "params"}):
                yield f"{of}.{path}", v

    def floats_of_groups(self) -> Iterator[tuple[str, dict, str]]:
        """Where the options of parameter groups are floats: the path, the group and the key."""
        for path, group in self.groups():
            for key, value in group.items():
                if type(value) is float:
                    yield f"{path}.{_key_text(key)}", group, key

    def _added_options(self) -> set[str]:
        """The floats that were put into groups of torch's optimisers besides their options, as learning-rate schedulers
        do. Their steps do not read them, so nothing does where no code of the user's names groups."""
        if not GROUPS.isdisjoint(self.names):
            return set()
        of_users = [o for o in self.optimizers.values() if not _torch.is_torchs_own(o)]
        apart = {id(group) for o in of_users for group in o.param_groups}
        options = {name for o in self.optimizers.values() for name in o.defaults}
        floats = ((path, key) for path, group, key in self.floats_of_groups() if id(group) not in apart)
        return {path for path, key in floats if key not in options}

    def groups(self) -> Iterator[tuple[str, dict]]:
        """The parameter groups by path, each once: an optimiser around another one may share its groups."""
        seen: set[int] = set()
        for root, optimizer in self.optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                if id(group) not in seen:
                    seen.add(id(group))
                    yield f"{root}.param_groups.{g}", group

    def _keepers(self) -> list[tuple[str, Optimizer]]:
        """The optimisers by path, without those around another one whose state they share."""
        last = {id(optimizer.state): root for root, optimizer in self.optimizers.items()}
        return [(root, self.optimizers[root]) for root in self.optimizers if root in last.values()]

    def kept_by_optimizers(self) -> dict[tuple[str, Any, Any], Any]:
        """What optimisers keep besides tensors, such as a count of steps: by the optimiser, the number of the
        parameter, as in torch's state dicts, and key. What is kept for no parameter is numbered by its place."""
        found = {}
        for root, optimizer in self._keepers():
            params = {id(p): i for i, p in enumerate(_params_of(optimizer))}
            for at, (p, kept) in enumerate(optimizer.state.items()):
                i = params.get(id(p), f"other {at}")
                found |= {(root, i, key): x for key, x in kept.items() if not isinstance(x, torch.Tensor)}
        return found

    # ---- putting other tensors in place -----------------------------------------------------
    def install(self, new: Tensors) -> None:
        """Put these tensors into their slots; parameters must be given as parameters.

        Each parameter gets the gradient and the optimiser state that are given for it, and no other.
        """
        path_of = {id(p): path for path, p in self.parameters().items()}
        by_id = {number: new[Slot("parameter", path)] for number, path in path_of.items()}
        by_id |= {id(b): new[Slot("buffer", path)] for path, b in self.buffers().items()}
        for m in self.submodules():
            for places in (m._parameters, m._buffers):
                places.update({k: by_id[id(t)] for k, t in places.items() if t is not None})
        for _, group in self.groups():
            group["params"] = [by_id[id(p)] for p in group["params"]]
        for root, optimizer in self._keepers():
            _install_optimizer_state(root, optimizer, by_id, path_of, new)
        for path in path_of.values():
            new[Slot("parameter", path)].grad = new.get(Slot("grad", path))
        self.set_hyper_parameters({slot.path: t for slot, t in new.items() if slot.kind == "hyper"})

    @contextlib.contextmanager
    def swap(self, new: Tensors, numbers: dict[str, Any]) -> Iterator[None]:
        """Put other tensors and numbers in place; on leaving, even by an error, put the old ones back."""
        undo = self._snapshot()
        try:
            self.install(new)
            self.set_hyper_parameters(numbers)
            self.set_counters(numbers)
            yield
        finally:
            for put_back in undo:
                put_back()

    def set_counters(self, new: Mapping[str, Any]) -> None:
        """Give those of the counters that have one of these paths another value."""
        for path, place in self.counters.items():
            if path in new:
                place.set(new[path])

    def set_kept_by_optimizers(self, new: Mapping[tuple[str, Any, Any], Any]) -> None:
        """Let optimisers keep what `kept_by_optimizers` has named so, for parameters."""
        params = {root: _params_of(self.optimizers[root]) for root, _, _ in new}
        for (root, i, key), value in new.items():
            self.optimizers[root].state[params[root][i]][key] = value

    def places_of_buffers(self, paths: Collection[str]) -> dict[str, list[tuple[dict, str]]]:
        """Where modules have the buffers of these paths: several may have one."""
        named, found = self.buffers() if paths else {}, {path: [] for path in paths}
        path_of = {id(named[path]): path for path in paths}
        for m in self.submodules() if paths else ():
            for name, x in m._buffers.items():
                if id(x) in path_of:
                    found[path_of[id(x)]].append((m._buffers, name))
        return found

    def set_hyper_parameters(self, new: dict[str, Any]) -> None:
        """Set the hyper-parameters of these paths to other values. Several groups may have one tensor, as torch gives
        it to them: where its first name gets another value, they all do."""
        held = [(path, v) for path, v in self.hyper_parameters() if isinstance(v, torch.Tensor)] if new else []
        first = {id(v): path for path, v in _by_first_name(iter(held)).items()}
        new = new | {path: new[first[id(v)]] for path, v in held if first[id(v)] in new}
        for path, group in self.groups() if new else ():
            for key, value in list(group.items()):
                if key != "params":
                    group[key] = _with_values(value, option_path(path, key), new)

    def options(self) -> dict[tuple[str, Any], Any]:
        """What the parameter groups have besides parameters, by the path of the group and by key."""
        return {(path, key): x for path, group in self.groups() for key, x in group.items() if key != "params"}

    def add_options(self, new: Mapping[tuple[str, Any], Any], values: Mapping[Slot, Any]) -> None:
        """Give groups options that they have not had, as `options` names them. values: what takes the place of slots
        in them. Each gets containers of its own."""
        groups = dict(self.groups()) if new else {}
        for (path, key), option in new.items():
            groups[path][key] = pytree.tree_map_only(Slot, values.__getitem__, option, is_leaf=_is_slot)

    def _snapshot(self) -> list[Callable[[], None]]:
        dicts: list[dict] = []
        for module in self.modules.values():
            for m in modules_of(module):
                dicts += [vars(m), m._parameters, m._buffers, m._modules]
        for optimizer in self.optimizers.values():
            dicts += [optimizer.state, *optimizer.param_groups, *optimizer.state.values()]
        dicts += [box for option in self.options().values() for box in _boxes(option)]
        counters = [partial(place.set, place.value) for place in self.counters.values()]
        return [*map(_restore_later, dicts), *counters]


GROUPS = frozenset({"param_groups", "state_dict", "__getstate__", "__dict__"})
"""Attributes of an optimiser that have its groups."""


def _constant_of(option: Any, reads: Reads | None) -> Hashable:
    """What is constant of an option that is no tensor: of a float that it is one, for it is a number of the program."""
    return float if isinstance(option, (float, torch.SymFloat)) else guard_key(option, reads=reads)


def _without_tensors(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: x for key, x in options.items() if not isinstance(x, torch.Tensor)}


IS_COUNTER = " is a counter"
"""Behind the path of a number that the step keeps."""


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of nested arguments with dotted paths.

    >>> named_leaves({"a": [1, {"b": 2}]})
    [('a.0', 1), ('a.1.b', 2)]
    """
    found, _ = pytree.tree_flatten_with_path(tree)
    return [(".".join(_key_text(k) for k in path), leaf) for path, leaf in found]


def _with_inner(optimizers: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    """The optimisers, each with those that it has in attributes, or in lists and dicts of these, as `Lookahead` has."""
    found: dict[str, Optimizer] = {}
    left = list(optimizers.items())
    while left:
        root, optimizer = left.pop(0)
        if all(optimizer is not other for other in found.values()):
            found[root] = optimizer
            own = ((f"{root}.{path}", x) for path, x in named_leaves(dict(own_attributes(optimizer))))
            left += [each for each in own if isinstance(each[1], Optimizer)]
    return found


def own_attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """What the class of an optimiser, or a user, keeps in it besides groups and state: attributes, and hooks on its
    steps, if there are any, and a step of its own, but for one that only counts."""
    for name, value in vars(optimizer).items():
        if name in HOOKS_OF_STEPS or name == "step":
            if value and not _torch.only_counts(value):
                yield name, value
        elif name not in OF_ALL_OPTIMIZERS:
            yield name, value


OF_ALL_OPTIMIZERS = {"defaults", "param_groups", "state"} | _torch.NOTED_IN_OPTIMIZERS
"""Attributes that torch gives optimisers: these have guards of their own, and no step computes with the others."""

HOOKS_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def note_optimizer(optimizer: Optimizer, reads: Reads, counted: Collection[str] = ()) -> None:
    """Note where the options and the state of an optimiser are, but for options that are floats, and for counters."""
    own = vars(optimizer)
    reads.keys(own)
    for name, value in own.items():
        if name == "step":  # it may refer to the optimiser
            reads.keyed(own, _step_of)
        elif name not in _torch.NOTED_IN_OPTIMIZERS and name not in counted:
            reads.item(own, name)
            if name in HOOKS_OF_STEPS:
                reads.box(value)
    reads.box(optimizer.defaults)
    reads.box(optimizer.param_groups)
    for group in optimizer.param_groups:
        reads.keys(group)
        reads.box(group["params"])
        for key, value in group.items():
            if type(value) is not float:
                reads.item(group, key)
                guard_key(value, reads=reads)
    reads.box(optimizer.state)
    for kept in optimizer.state.values():
        if any(reads.is_changing(kept, key) for key in kept):
            reads.keys(kept)
            for key in kept:
                reads.item(kept, key)
        else:
            reads.box(kept)


def _params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def held_by(owner: Any) -> dict[str, Any]:
    """The attributes of an object; of an optimiser with its state by the numbers of the parameters, and not by these,
    which have stand-ins in a capture."""
    own = vars(owner)
    if not isinstance(owner, Optimizer):
        return own
    kept = {i: owner.state[p] for i, p in enumerate(_params_of(owner)) if p in owner.state}
    return own | {"state": kept}


def _step_of(own: dict[str, Any]) -> Any:
    """The step among the attributes of an optimiser, which shall not be kept alive."""
    step = own["step"]
    return weakref.ref(getattr(step, "__func__", step))


def _key_text(key: Any) -> str:
    text = getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))
    return repr(text) if isinstance(text, str) and not text.isidentifier() else str(text)


def _by_first_name(named: Iterator[tuple[str, Any]]) -> dict[str, Any]:
    found, seen = {}, set()
    for path, value in named:
        if id(value) not in seen:
            seen.add(id(value))
            found[path] = value
    return found


def _is_slot(x: Any) -> bool:
    return type(x) is Slot


def option_path(group: str, key: Any) -> str:
    """The path of an option of a parameter group, as `named_leaves` has it."""
    return f"{group}.{_key_text(key)}"


def _with_values(value: Any, path: str, new: dict[str, Any]) -> Any:
    """The value at a path with others at these paths: dicts and lists stay the objects that they are."""
    if path in new:
        return new[path]
    if type(value) in BOXES:
        for key, x in list(value.items() if type(value) is dict else enumerate(value)):
            value[key] = _with_values(x, option_path(path, key), new)
    elif type(value) is tuple:
        return tuple([_with_values(x, f"{path}.{i}", new) for i, x in enumerate(value)])
    return value


BOXES = dict, list
"""The containers in options of parameter groups that can be given other contents."""


def _boxes(option: Any) -> Iterator[Any]:
    """The dicts and lists in an option."""
    if type(option) in BOXES:
        yield option
    for x in option.values() if type(option) is dict else option if type(option) in (list, tuple) else ():
        yield from _boxes(x)


def _install_optimizer_state(
    root: str, optimizer: Optimizer, by_id: dict[int, Any], path_of: dict[int, str], new: Tensors
) -> None:
    """Key the state of the optimiser by the new parameters."""
    entries = {path_of[id(p)]: kept for p, kept in optimizer.state.items() if id(p) in path_of}
    others = {path: _without_tensors(kept) for path, kept in entries.items()}
    of_none = {key: kept for key, kept in optimizer.state.items() if id(key) not in path_of}
    given: dict[str, dict[str, Any]] = {}
    for slot, t in new.items():
        if slot.kind == "optimizer" and slot.owner == root:
            given.setdefault(slot.path, {})[slot.key] = t
    optimizer.state.clear()
    for pid, path in path_of.items():
        if path in given or path in others:
            entry = optimizer.state[by_id[pid]] = entries.get(path, {})  # the dict that it was: it may have counters
            entry.clear()
            entry.update({**given.get(path, {}), **others.get(path, {})})
    optimizer.state.update(of_none)


def _restore_later(box: dict | list) -> Callable[[], None]:
    kept = box.copy()

    def restore() -> None:
        box.clear()
        box.update(kept) if isinstance(box, dict) else box.extend(kept)

    return restore
