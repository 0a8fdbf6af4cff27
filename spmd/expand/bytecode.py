"""What Python code does, instruction by instruction, under the same names in all versions of Python.

    f(x, self.rate)      3.11: LOAD_FAST x, LOAD_FAST self, LOAD_ATTR rate     3.13: LOAD_FAST_LOAD_FAST (x, self), ...

Newer versions write two instructions as one, and have some that say more. Who looks for what code names reads these.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple


class Instruction(NamedTuple):
    """name: of the instruction. value: what it is about, such as the name of a variable. line: in the source."""

    name: str
    value: Any
    line: int


@functools.lru_cache(maxsize=1024)
def instructions(code: types.CodeType) -> tuple[Instruction, ...]:
    """The instructions of a function, without those of the functions inside it. Several look for one thing each.

    >>> [(i.name, i.value) for i in instructions((lambda x, y: y.real).__code__)][-3:-1]
    [('LOAD_FAST', 'y'), ('LOAD_ATTR', 'real')]
    """
    return tuple(_instructions(code))


def _instructions(code: types.CodeType) -> Iterator[Instruction]:
    starts, line = dict(dis.findlinestarts(code)), code.co_firstlineno
    for i in dis.get_instructions(code):
        line = starts.get(i.offset) or line
        if i.opname in _SEVERAL:
            names = _SEVERAL[i.opname]
            values = i.argval if isinstance(i.argval, tuple) else [None] * (len(names) - 1) + [i.argval]
            yield from (Instruction(name, value, line) for name, value in zip(names, values, strict=True))
        else:
            is_item = i.opname == "BINARY_OP" and i.argrepr == "[]"
            yield Instruction("BINARY_SUBSCR" if is_item else _SAME.get(i.opname, i.opname), i.argval, line)


class Import(NamedTuple):
    """What a function imports: a name of a Python module, or the module itself where that is empty. level: of dots."""

    module: str
    name: str = ""
    level: int = 0


@functools.lru_cache(maxsize=4096)
def imports_in(code: types.CodeType) -> dict[str, Import]:
    """What a function imports when it runs, by the variable that it gets.

    >>> def f():
    ...     import os.path
    ...     from math import pi as number
    >>> imports_in(f.__code__)
    {'os': Import(module='os', name='', level=0), 'number': Import(module='math', name='pi', level=0)}
    """
    found: dict[str, Import] = {}
    constants: list[Any] = [0, None]
    module, name = None, ""  # None: nothing is being imported
    for i in instructions(code):
        if i.name == "IMPORT_NAME":
            (level, names), module, name = constants, i.value, ""
        elif i.name == "IMPORT_FROM":
            name = i.value
        elif i.name.startswith("STORE_") and module is not None:
            if names is not None:
                found[i.value] = Import(module, name, level)
            else:  # import a.b as c; import a.b
                found[i.value] = Import(module if name else module.partition(".")[0])
        elif i.name.startswith("LOAD_"):
            module = None
            constants = [constants[-1], i.value if i.name == "LOAD_CONST" else None]
    return found


@functools.lru_cache(maxsize=4096)
def loops(code: types.CodeType) -> tuple[range, ...]:
    """The loops of a function: the places of their instructions, as a frame that runs has one (`f_lasti`).

    >>> len(loops((lambda: [x for x in "ab"]).__code__)) <= 1, loops((lambda: 0).__code__)
    (True, ())
    """
    jumps = {*dis.hasjrel, *dis.hasjabs}
    found = ((i.argval, i.offset) for i in dis.get_instructions(code) if i.opcode in jumps)
    return tuple(range(begin, end + 1) for begin, end in found if begin < end)


_SEVERAL = {
    "LOAD_FAST_LOAD_FAST": ("LOAD_FAST", "LOAD_FAST"), "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("LOAD_FAST", "LOAD_FAST"),
    "STORE_FAST_LOAD_FAST": ("STORE_FAST", "LOAD_FAST"), "STORE_FAST_STORE_FAST": ("STORE_FAST", "STORE_FAST"),
    "LOAD_SUPER_ATTR": ("CALL", "LOAD_ATTR"),
}  # fmt: skip
"""Since 3.13, and of 3.12: `super().rate`, which is no attribute of what was loaded before."""

_SAME = {
    "LOAD_METHOD": "LOAD_ATTR", "LOAD_FAST_CHECK": "LOAD_FAST", "LOAD_FAST_BORROW": "LOAD_FAST",
    "LOAD_SMALL_INT": "LOAD_CONST",
}  # fmt: skip
