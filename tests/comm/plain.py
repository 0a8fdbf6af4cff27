"""Every collective as a plain function of all ranks' tensors, and the cases to try it on.

    given = [inputs(case, place, n) for place in range(n)]
    expected = results(case, given)                 # no communication
    found = called(case, place, n, given[place], group)

Inputs are small whole numbers: every order of summing gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from spmd import comm
from spmd.mesh import DeviceMesh, init_device_mesh

Tensors = list[torch.Tensor]
Shape = tuple[int, ...]


class Case(NamedTuple):
    """A call: the collective, its plain arguments, and shapes, dtype and layout of its tensors."""

    kind: str
    args: tuple
    shapes: tuple[Shape, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kind}{self.args} of {dtype} {' '.join(map(str, self.shapes))} {self.layout}"


# ---- groups -----------------------------------------------------------------------------------

LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
TURNED = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
ROWS, COLUMNS, ALL = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]


def _world(rank: int):
    return torch.distributed.group.WORLD


NOTATIONS: dict[str, tuple[Callable, list[list[int]]]] = {
    "list": (lambda rank: [0, 1, 2, 3], ALL),
    "turned list": (lambda rank: [3, 1, 0, 2], [[3, 1, 0, 2]]),
    "list of some": (lambda rank: [2, 0] if rank in (0, 2) else [1, 3], [[2, 0], [1, 3]]),
    "lists": (lambda rank: [[0, 1], [3, 2]], [[0, 1], [3, 2]]),
    "lists of unlike lengths": (lambda rank: [[2], [3, 0], [1]], [[2], [3, 0], [1]]),
    "tuple of tuples": (lambda rank: ((0, 2), (1, 3)), COLUMNS),
    "1-D mesh": (lambda rank: LINE, ALL),
    "slice of a mesh": (lambda rank: TURNED["tp"], [[3, 1], [0, 2]]),
    "axis by name": (lambda rank: (GRID, "tp"), ROWS),
    "axis by number": (lambda rank: (GRID, 0), COLUMNS),
    "axis from the end": (lambda rank: (TURNED, -2), [[3, 0], [1, 2]]),
    "process group": (_world, ALL),
    "process group of an axis": (lambda rank: GRID.get_group("tp"), ROWS),
    "torch's name": (lambda rank: _world(rank).group_name, ALL),
    "spmd's name": (lambda rank: "ranks:3,1,0,2", [[3, 1, 0, 2]]),
}
"""Each notation of a group: the group as a rank gives it, and the ranks of each group."""

WITHOUT_PROCESS_GROUP = [name for name in NOTATIONS if "process group" not in name and "torch" not in name]


def group_of(spelling: str, rank: int) -> tuple[object, int, list[int]]:
    """The group as the rank gives it, the rank's place, and the ranks of its group."""
    say, groups = NOTATIONS[spelling]
    ranks = next(group for group in groups if rank in group)
    return say(rank), ranks.index(rank), ranks


# ---- inputs -----------------------------------------------------------------------------------


def data(seed: int, shape: Shape, dtype: torch.dtype, layout: str = "contiguous") -> torch.Tensor:
    """Whole numbers from -3 to 3 (unsigned: 0 to 3), with the memory layout `layout`."""
    source = torch.Generator().manual_seed(seed)
    whole = torch.randint(-3, 4, shape, generator=source)
    if dtype == torch.bool:
        x = whole > 0
    elif dtype.is_complex:
        x = torch.complex(whole.float(), torch.randint(-3, 4, shape, generator=source).float()).to(dtype)
    else:
        x = (whole if dtype.is_signed else whole.abs()).to(dtype)
    return LAYOUTS[layout](x)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "offset": lambda x: torch.cat([x[:1], x])[1:],
    "nan": lambda x: torch.where(x == 2, torch.nan, torch.where(x == 1, -torch.inf, x)),
    "conjugate": lambda x: x.conj(),
    "imaginary": lambda x: torch.complex(x, x).conj().imag,
}


def inputs(case: Case, place: int, n: int, seed: int = 0) -> Tensors:
    """The input tensors of the rank at this place; for an all-to-all with a table as many rows as it sends."""
    shapes = list(case.shapes)
    if case.kind == "all_to_all_single" and case.args[0] is not None:
        shapes = [(sum(case.args[0][place]), *shapes[0][1:])]
    return [data(1000 * seed + 10 * place + i, shape, case.dtype, case.layout) for i, shape in enumerate(shapes)]


# ---- calls ------------------------------------------------------------------------------------


def called(case: Case, place: int, n: int, xs: Sequence[torch.Tensor], group: object) -> Tensors:
    """The results of the functional collective."""
    collective, args = getattr(comm, case.kind), case.args
    if case.kind == "all_to_all_single":
        table = args[0]
        splits = (None, None) if table is None else ([row[place] for row in table], table[place])
        return [collective(xs[0], *splits, group)]
    if "coalesced" in case.kind:
        return list(collective(list(xs), *args, group))
    return [collective(xs[0] if len(xs) == 1 else list(xs), *args, group)]


# ---- the truth --------------------------------------------------------------------------------


def results(case: Case, given: list[Tensors]) -> list[Tensors]:
    """The results of each rank, computed from the tensors of all ranks."""
    return PLAIN[case.kind](given, *case.args)


def reduced(xs: Tensors, op: str) -> torch.Tensor:
    dtype, n = xs[0].dtype, len(xs)
    if dtype == torch.bool:
        every = torch.stack(xs)
        return every.all(0) if op in ("product", "min", "band") else every.any(0)
    wide = torch.stack([x.to(torch.int64) if not (dtype.is_floating_point or dtype.is_complex) else x for x in xs])
    if op in ("band", "bor", "bxor"):
        out = wide[0]
        for x in wide[1:]:
            out = {"band": out & x, "bor": out | x, "bxor": out ^ x}[op]
        return out.to(dtype)
    found = {
        "sum": lambda: wide.sum(0),
        "avg": lambda: wide.sum(0) / n,
        "product": lambda: wide.prod(0),
        "min": lambda: wide.amin(0),
        "max": lambda: wide.amax(0),
    }[op]()
    return found.to(dtype)


def _exchanged(given: list[Tensors], table: list[list[int]] | None) -> list[Tensors]:
    n = len(given)
    parts = [x.chunk(n) if table is None else x.split(table[i]) for i, [x] in enumerate(given)]  # parts[from][to]
    return [[torch.cat([row[to] for row in parts])] for to in range(n)]


def _scattered(given: list[Tensors], src: int) -> list[Tensors]:
    n = len(given)
    sent = given[src] if len(given[src]) > 1 else given[src][0].chunk(n)
    return [[sent[place]] for place in range(n)]


def _permuted(given: list[Tensors], src_dst: Sequence[int]) -> list[Tensors]:
    came = [torch.zeros_like(x) for [x] in given]
    for [x], dst in zip(given, src_dst, strict=True):
        if dst >= 0:
            came[dst] = x
    return [[x] for x in came]


def _each(given: list[Tensors], one: Callable[[int, Tensors], Tensors]) -> list[Tensors]:
    """`one` computes all ranks' i-th results from all ranks' i-th tensors."""
    columns = [one(i, list(xs)) for i, xs in enumerate(zip(*given, strict=True))]
    return [[column[place] for column in columns] for place in range(len(given))]


def _all_reduced(given: list[Tensors], op: str) -> list[Tensors]:
    return _each(given, lambda i, xs: [reduced(xs, op)] * len(xs))


def _gathered(given: list[Tensors], dim: int = 0) -> list[Tensors]:
    return _each(given, lambda i, xs: [torch.cat([x.reshape(1) if x.ndim == 0 else x for x in xs], dim)] * len(xs))


def _reduce_scattered(given: list[Tensors], op: str, dim: int | list[int]) -> list[Tensors]:
    dims = [dim] * len(given[0]) if isinstance(dim, int) else dim
    return _each(given, lambda i, xs: list(reduced(xs, op).chunk(len(xs), dims[i])))


PLAIN: dict[str, Callable] = {
    "all_reduce": _all_reduced,
    "all_gather_tensor": _gathered,
    "reduce_scatter_tensor": _reduce_scattered,
    "all_to_all_single": _exchanged,
    "broadcast": lambda given, src: [given[src]] * len(given),
    "scatter": _scattered,
    "permute_tensor": _permuted,
    "all_reduce_coalesced": _all_reduced,
    "all_gather_into_tensor_coalesced": _gathered,
    "reduce_scatter_tensor_coalesced": _reduce_scattered,
}


# ---- cases ------------------------------------------------------------------------------------


def typical(n: int) -> list[Case]:
    """Each collective once or twice, for a group of n ranks."""
    ring = tuple((i + 1) % n for i in range(n))
    partial = (-1,) * (n - 1) + (0,)
    table = [[(i + 2 * j) % 3 for j in range(n)] for i in range(n)]
    return [
        Case("all_reduce", ("sum",), ((3, 2),)),
        Case("all_reduce", ("avg",), ((2,),)),
        Case("all_reduce", ("max",), ((5,),)),
        Case("all_gather_tensor", (0,), ((2, 3),)),
        Case("all_gather_tensor", (-1,), ((2, 3),)),
        Case("reduce_scatter_tensor", ("sum", 0), ((2 * n, 3),)),
        Case("reduce_scatter_tensor", ("avg", -1), ((3, 2 * n),)),
        Case("all_to_all_single", (None,), ((2 * n, 3),)),
        Case("all_to_all_single", (table,), ((0, 2),)),
        Case("broadcast", (n - 1,), ((2, 3),)),
        Case("scatter", (n - 1,), ((2 * n, 3),)),
        Case("scatter", (0,), tuple((i, 2) for i in range(n)) if n > 1 else ((3, 2),)),
        Case("permute_tensor", (ring,), ((2, 3),)),
        Case("permute_tensor", (partial,), ((2, 3),)),
        Case("all_reduce_coalesced", ("sum",), ((3,), (2, 2))),
        Case("all_gather_into_tensor_coalesced", (), ((3,), (2, 2))),
        Case("reduce_scatter_tensor_coalesced", ("sum", [0, 1]), ((n,), (2, 2 * n))),
    ]


SUMMED = [
    torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.float64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip
MOVED = [*SUMMED, torch.uint16, torch.uint32, torch.uint64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]
REDUCE_OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]


def is_legal(op: str, dtype: torch.dtype) -> bool:
    """Whether the dtype has this reduction."""
    whole = not dtype.is_floating_point and not dtype.is_complex
    return {
        "sum": True,
        "avg": not whole,
        "product": not dtype.is_complex,
        "min": not dtype.is_complex,
        "max": not dtype.is_complex,
        "band": whole,
        "bor": whole,
        "bxor": whole and dtype != torch.bool,
    }[op]


def of_all_dtypes(n: int) -> list[Case]:
    """Every reduction of every dtype that has it, and every dtype sent."""
    legal = [(op, dtype) for op in REDUCE_OPS for dtype in SUMMED if is_legal(op, dtype)]
    moves = [case for case in typical(n) if "reduce" not in case.kind]
    return [
        *[Case("all_reduce", (op,), ((3, 2),), dtype) for op, dtype in legal],
        *[Case("reduce_scatter_tensor", (op, 1), ((3, n),), dtype) for op, dtype in legal],
        *[Case("all_reduce_coalesced", (op,), ((3, 2), (4,)), dtype) for op, dtype in legal],
        *[Case("reduce_scatter_tensor_coalesced", (op, [1, 0]), ((3, n), (n, 2)), dtype) for op, dtype in legal],
        *[case._replace(dtype=dtype) for dtype in MOVED for case in moves],
    ]


def of_all_shapes(n: int) -> list[Case]:
    """Empty and 0-dim tensors, all dims, all layouts, NaN and infinities."""
    ring = tuple((i + 1) % n for i in range(n))
    some = [[0 if (i + j) % 2 else i for j in range(n)] for i in range(n)]
    none = [[0] * n for _ in range(n)]
    empty: list[Shape] = [(0,), (2, 0), (0, 3)]
    half = torch.bfloat16
    return [
        *[Case("all_reduce", (op,), (shape,)) for op in ("sum", "max") for shape in [(), *empty]],
        *[Case("all_gather_tensor", (dim,), ((2, 3, 2),), dtype)
          for dim in range(-3, 3) for dtype in (half, torch.int16)],
        *[Case("all_gather_tensor", (0,), (shape,), dtype) for shape in [(), *empty] for dtype in (half, torch.int16)],
        Case("all_gather_tensor", (1,), ((2, 0),), torch.complex64),
        *[Case("reduce_scatter_tensor", (op, dim), ((n, 2 * n, n),)) for op in ("sum", "min") for dim in range(-3, 3)],
        *[Case("reduce_scatter_tensor", (op, 0), (shape,)) for op in ("sum", "min") for shape in [(n, 0), (0, 3)]],
        *[Case("all_to_all_single", (t,), ((0, k),), dtype)
          for t in (some, none) for k in (2, 0) for dtype in (half, torch.int16)],
        Case("all_to_all_single", (some,), ((0,),)),
        Case("all_to_all_single", (None,), ((0, 3),)),
        *[Case("broadcast", (src,), (shape,), dtype)
          for src in range(n) for shape in [(), *empty] for dtype in (half, torch.int16)],
        *[Case("scatter", (src,), ((n, 2),)) for src in range(n)],
        *[Case("scatter", (0,), (shape,)) for shape in [(0, 3), (n, 0)]],
        Case("scatter", (n - 1,), ((), (0, 2), (3,), (1, 2))[:n] if n > 1 else ((2,),), torch.complex64),
        *[Case("permute_tensor", (ring,), (shape,), dtype) for shape in [(), *empty] for dtype in (half, torch.int16)],
        *[Case("permute_tensor", (to,), ((3,),)) for to in (tuple(range(n)), (-1,) * n, (n - 1, *(-1,) * (n - 1)))],
        *[Case(*case[:3], case.dtype, layout)
          for case in typical(n) for layout in ("strided", "expanded", "offset") if min(case.shapes)],
        *[Case("all_reduce", (op,), ((3, 2),), layout="transposed") for op in ("sum", "max")],
        *[Case("all_gather_tensor", (dim,), ((3, 2),), layout="transposed") for dim in (0, 1)],
        *[Case("broadcast", (0,), ((3, 2),), layout="transposed")],
        *[Case("permute_tensor", (ring,), ((3, 2),), layout="transposed")],
        *[Case("all_reduce", (op,), ((40,),), dtype, "nan")
          for op in ("min", "max") for dtype in (torch.float32, half)],
        *[Case("reduce_scatter_tensor", (op, 1), ((5, 4 * n),), layout="nan") for op in ("min", "max")],
        *[Case("all_reduce_coalesced", (op,), ((5, 4 * n), (), (0,)), layout="nan") for op in ("min", "max")],
        *[Case(kind, args, ((2 * n, 3),), torch.complex64, "conjugate")
          for kind, args in [("all_reduce", ("sum",)), ("reduce_scatter_tensor", ("sum", 0)), ("broadcast", (0,)),
                             ("all_gather_tensor", (0,)), ("permute_tensor", (ring,)), ("all_to_all_single", (None,))]],
        *[Case(kind, args, ((2 * n, 3),), torch.float32, "imaginary")
          for kind, args in [("all_reduce", ("sum",)), ("all_reduce", ("max",)), ("all_gather_tensor", (0,))]],
        Case("all_reduce_coalesced", ("sum",), ()),
        Case("all_gather_into_tensor_coalesced", (), ()),
        Case("reduce_scatter_tensor_coalesced", ("sum", []), ()),
        Case("all_gather_into_tensor_coalesced", (), ((), (0, 2), (3,)), torch.int16),
    ]  # fmt: skip
