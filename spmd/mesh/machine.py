"""Machine: how fast the links of a machine are, for any mesh on it.

A collective runs in one of several *ways*: an algorithm under a protocol. A way takes one latency at the start, a
latency for each hop, and a time for each byte, on the links inside a host and on those between hosts. The fastest way
for the given bytes runs. So a machine is little more than a list of ways:

    >>> line = Way("ring", base_us=6.6, links=(Link(hop_us=0.6, gb_per_s=87.7), Link(hop_us=2.7, gb_per_s=19.3)))
    >>> Machine("mine", ways=(line,), nics_per_host=1).levels
    2

Measured times (`Measured`) of the machine itself replace those of the ways. `presets.py` has known machines,
`calibration.py` reads and writes files of them, `algorithms.py` has the hops and bytes of an algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

ALGORITHMS = ("direct", "doubling", "ring", "tree")
COPY = "copy"
LOCAL_OPS = ("attention", "norm", "pointwise", "product", "reduction", "special", "view")
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "broadcast", "permute", "reduce_scatter", "scatter")


@dataclass(frozen=True)
class Link:
    """One link of one device. `hop_us`: alpha, in microseconds. `gb_per_s`: bandwidth, in 1e9 bytes a second.

    >>> Link(hop_us=0.6, gb_per_s=50.0).us_per_byte
    2e-05
    """

    hop_us: float
    gb_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.hop_us < inf and 0 < self.gb_per_s < inf):
            raise ValueError(f"{self}: hop_us must be at least 0 and gb_per_s more than 0, both finite")

    @property
    def us_per_byte(self) -> float:
        """beta: microseconds for one byte."""
        return 1e-3 / self.gb_per_s


@dataclass(frozen=True)
class Way:
    """An algorithm under a protocol: its latency at the start, and its links from the innermost level outwards.

    Level 0 is inside a host and level 1 between hosts. `protocol` is a name for readers only.
    """

    algorithm: str
    base_us: float
    links: tuple[Link, ...]
    protocol: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", tuple(self.links))  # a list from the user must not break the hash
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"no algorithm {self.algorithm!r}; choose one of {', '.join(ALGORITHMS)}")
        if not 0 <= self.base_us < inf:
            raise ValueError(f"base_us of {self.name} is {self.base_us}; it must be at least 0, and finite")

    @property
    def name(self) -> str:
        """For readers: "ring LL"."""
        return f"{self.algorithm} {self.protocol}".strip()


@dataclass(frozen=True)
class Compute:
    """How fast one device computes. `gb_per_s`: bytes that it reads and writes, in 1e9 a second. `gflop_per_s`: for
    each dtype 1e9 operations a second of its matrix products; other dtypes are as fast as the last one.

    >>> Compute(1733.0, (("bfloat16", 312000.0), ("float32", 20000.0))).us_per_flop("float64")
    5e-08
    """

    gb_per_s: float
    gflop_per_s: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "gflop_per_s", tuple((name, rate) for name, rate in self.gflop_per_s))
        rates = [self.gb_per_s, *[rate for _, rate in self.gflop_per_s]]
        if len(rates) < 2 or not all(0 < rate < inf for rate in rates):
            raise ValueError(f"{self}: give one dtype or more, and figures that are more than 0 and finite")

    @property
    def us_per_byte(self) -> float:
        """Microseconds to read or write one byte."""
        return 1e-3 / self.gb_per_s

    def us_per_flop(self, dtype: str) -> float:
        """Microseconds of one operation on this dtype, such as "float32"."""
        return 1e-3 / dict(self.gflop_per_s).get(dtype, self.gflop_per_s[-1][1])


@dataclass(frozen=True)
class Measured:
    """A fitted curve: the time of one collective on groups of `ranks_per_host` ranks on each of `hosts` hosts, or the
    time of a "copy", which each rank makes alone.

    The microseconds for x bytes are the maximum over `lines` of us + us_per_byte * x: a latency, then a bandwidth.
    `sharing`: ranks that sent through one NIC at once. `residual`: relative error of the fit; two plans whose times
    differ by less count as equal.

        >>> Measured("all_reduce", ranks_per_host=8, hosts=1, lines=((25.0, 0.0), (18.0, 1e-5)), residual=0.05).hosts
        1
    """

    collective: str
    ranks_per_host: int
    hosts: int
    lines: tuple[tuple[float, float], ...]
    sharing: int = 1
    residual: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple((us, us_per_byte) for us, us_per_byte in self.lines))
        known = (*COLLECTIVES, COPY)
        if self.collective not in known:
            raise ValueError(f"no collective {self.collective!r}; choose one of {', '.join(known)}")
        if min(self.ranks_per_host, self.hosts, self.sharing) < 1 or not 0 <= self.residual < inf:
            raise ValueError(f"{self}: ranks_per_host, hosts and sharing must be at least 1, residual at least 0")
        if not self.lines or not all(0 <= number < inf for line in self.lines for number in line):
            raise ValueError(f"{self}: give one line or more, of numbers that are at least 0 and finite")

    @property
    def group(self) -> tuple[str, int, int, int]:
        """The collective and the kind of group that were measured; a machine has one curve for them."""
        return self.collective, self.ranks_per_host, self.hosts, self.sharing


@dataclass(frozen=True)
class LocalOp:
    """A fitted curve: the time of one kind of local op, called from Python while all ranks of a host call it.

    The microseconds for x are the maximum over `lines` of us + us_per_unit * x. For a "product" of matrices and for
    "attention" x are operations, for others the bytes that are read and written: "pointwise" ops such as add, "special"
    ones such as exp and gelu, "reduction" and "norm". A "view" takes what a call does. dtype: what was timed.
    us_per_byte: what each byte that is read and written takes beside the operations. It tells products of one form from
    those of another: of two with as many operations, that with fewer rows and more sums reads and writes less.

        >>> LocalOp("product", "float32", ((4.0, 0.0), (3.0, 2e-5))).us(1_000_000)
        23.0
        >>> LocalOp("product", "float32", ((3.0, 2e-5),), us_per_byte=1e-4).us(1_000_000, nbytes=50_000)
        28.0
    """

    kind: str
    dtype: str
    lines: tuple[tuple[float, float], ...]
    us_per_byte: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", tuple((us, us_per_unit) for us, us_per_unit in self.lines))
        if self.kind not in LOCAL_OPS:
            raise ValueError(f"no kind of local op {self.kind!r}; choose one of {', '.join(LOCAL_OPS)}")
        numbers = [self.us_per_byte, *[number for line in self.lines for number in line]]
        if not self.lines or not all(0 <= number < inf for number in numbers):
            raise ValueError(f"{self}: give one line or more, of numbers that are at least 0 and finite")

    def us(self, x: float, nbytes: float = 0.0) -> float:
        """The microseconds for so many operations, or bytes. nbytes: those beside operations."""
        return max([us + us_per_unit * x for us, us_per_unit in self.lines]) + self.us_per_byte * nbytes


@dataclass(frozen=True)
class Machine:
    """How fast the links of a machine are.

    `nics_per_host`: None gives each rank a network card of its own; with a number, the ranks of a host share that many
    cards, neighbours first. `ranks_per_host`: for files that know it; None leaves it to the launcher. `memory`: the
    time of a copy in a device's own memory, as a latency and a bandwidth for the bytes of the result; None makes copies
    free. `compute`: how fast a device computes; None where it is not known. `local_ops`: curves of local ops, where
    they were timed. `host`: what a device's copy engines carry to host memory and back, each way at once with the
    other; None where host and device are one, or nothing is known of them.
    """

    name: str
    ways: tuple[Way, ...]
    nics_per_host: int | None = None
    ranks_per_host: int | None = None
    measured: tuple[Measured, ...] = ()
    memory: Link | None = None
    compute: Compute | None = None
    local_ops: tuple[LocalOp, ...] = ()
    host: Link | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ways", tuple(self.ways))
        object.__setattr__(self, "local_ops", tuple(self.local_ops))
        object.__setattr__(self, "measured", tuple(self.measured))
        if not self.ways or len({len(way.links) for way in self.ways}) != 1 or not self.levels:
            raise ValueError(f"machine {self.name!r}: give one way or more, with links for the same levels")
        if "ring" not in {way.algorithm for way in self.ways}:
            raise ValueError(f"machine {self.name!r} has no ring, and only rings do every collective; add one")
        if any(count is not None and count < 1 for count in (self.nics_per_host, self.ranks_per_host)):
            raise ValueError(f"machine {self.name!r}: nics_per_host and ranks_per_host must be at least 1, or None")
        groups = [curve.group for curve in self.measured]
        twice = [group for group in dict.fromkeys(groups) if groups.count(group) > 1]
        if twice:
            raise ValueError(f"machine {self.name!r}: {twice[0]} is measured twice; give one curve for each")

    @property
    def levels(self) -> int:
        """The number of levels of links: 1 is inside a host only, 2 also between hosts."""
        return len(self.ways[0].links)
