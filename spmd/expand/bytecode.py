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


def instructions(code: types.CodeType) -> Iterator[Instruction]:
    """The instructions of a function, without those of the functions inside it.

    >>> [(i.name, i.value) for i in instructions((lambda x, y: y.real).__code__)][-3:-1]
    [('LOAD_FAST', 'y'), ('LOAD_ATTR', 'real')]
    """
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
