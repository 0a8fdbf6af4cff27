"""Known machines.

`textbook` is the default: rings only, with the constants of NCCL's ring under its LL protocol on Ampere; between
hosts 0.22 of the bandwidth and 2.7 us a hop. It is simple and stable, its copies are free, and golden pages of plans
are priced by it.

`ampere`, `hopper` and `blackwell` are NCCL's own model of these machines (NCCL 2.30, src/graph/tuning.cc): a latency
for each algorithm and protocol, and the least time over all of them. LL sends a flag with each 4 bytes, so it has half
the bandwidth, up to a cap; LL128 sends 120 bytes of 128. NVLink carries (links per GPU) * (GB/s per link): 12 links on
Ampere, 18 on Hopper and Blackwell. Each GPU has a NIC of its own, at line rate: 200 Gbit/s on Ampere (DGX A100), 400
Gbit/s on the others (DGX H100, DGX B200). A copy reads and writes, at 0.85 of the bandwidth that the maker of the
memory gives: 2,039 GB/s on Ampere (A100 of 80 GB), 3,350 on Hopper (H100), 8,000 on Blackwell (B200). Left out:
reductions in the switch (NVLS), PCI between cards, and the cost of each further peer of a send beyond a hop.

`compute` is what the makers give for dense matrix products without sparsity (A100, H100 SXM and B200 data sheets;
32-bit floats without the shortened ones of tensor cores), and the same share of the memory's bandwidth as a copy has.
The textbook computes as an A100 does.

Copies to host memory go over PCI Express, 16 lanes of the generation that the maker gives: 4 on Ampere with 32 GB/s
each way, 5 on the others with 64, of which copies get the same share as in a device's memory. The textbook has none:
its mesh may be one of CPUs.

    >>> sorted(PRESETS)
    ['ampere', 'blackwell', 'hopper', 'textbook']
    >>> [way.links[0].gb_per_s for way in PRESETS["hopper"].ways if way.algorithm == "ring"]
    [141.0, 341.136, 370.8]
"""

from __future__ import annotations

from spmd.mesh.machine import Compute, Link, Machine, Way

BASE_LATENCY_US = 6.6
INTRA = Link(hop_us=0.6, gb_per_s=87.7)
INTER = Link(hop_us=2.7, gb_per_s=19.294)  # 0.22 of 87.7


def _compute(memory: float, half: float, single: float, double: float) -> Compute:
    """`memory`: GB/s as the maker gives it. The rates of matrix products in TFLOP/s."""
    rates = {"bfloat16": half, "float16": half, "float64": double, "float32": single}
    return Compute(round(0.85 * memory, 1), tuple((name, 1e3 * rate) for name, rate in rates.items()))


A100 = _compute(2039, half=312, single=19.5, double=19.5)
H100 = _compute(3350, half=989, single=67, double=67)
B200 = _compute(8000, half=2250, single=80, double=40)

TEXTBOOK = Machine("textbook", (Way("ring", BASE_LATENCY_US, (INTRA, INTER)),), compute=A100)

COPY_US = 2.0  # a small kernel
HOST_COPY_US = 5.0  # an engine that is told what to copy

# For LL, LL128 and Simple, in microseconds: the latency at the start, of an NVLink hop, and of a network hop.
# A send to one peer takes as long as a step of a ring.
_LATENCIES = {
    "ring": ((6.6, 0.6, 2.7), (14.0, 1.9, 4.0), (8.4, 3.4, 14.0)),
    "tree": ((6.8, 0.6, 5.0), (14.0, 1.25, 8.5), (8.4, 4.0, 14.0)),
    "direct": ((6.6, 0.6, 2.7), (14.0, 1.9, 4.0), (8.4, 3.4, 14.0)),
}
_PROTOCOLS = ("LL", "LL128", "Simple")


def _nccl(
    name: str, compute: Compute, links: int, gb_per_link: float, ll_cap: float, ll128_per_channel: float, nic: float,
    memory: float, host: float,
) -> Machine:  # fmt: skip
    """With one channel for each link. `nic`, `memory`, `host`: GB/s of the network card, of the memory of one GPU, and
    of its link to the host each way."""
    nvlink = links * gb_per_link
    inside = (min(ll_cap, nvlink / 2), min(0.92 * nvlink, links * ll128_per_channel), nvlink)
    between = (nic / 2, nic * 120 / 128, nic)
    return Machine(
        name,
        tuple(
            Way(algorithm, base, (Link(hop, round(fast, 6)), Link(net_hop, round(slow, 6))), protocol)
            for algorithm, latencies in _LATENCIES.items()
            for protocol, (base, hop, net_hop), fast, slow in zip(_PROTOCOLS, latencies, inside, between, strict=True)
        ),
        memory=Link(COPY_US, round(0.85 * memory / 2, 1)),
        compute=compute,
        host=Link(HOST_COPY_US, round(0.85 * host, 1)),
    )


AMPERE = _nccl("ampere", A100, links=12, gb_per_link=20.0, ll_cap=87.7, ll128_per_channel=20.0, nic=25.0, memory=2039,
               host=32)  # fmt: skip
HOPPER = _nccl("hopper", H100, links=18, gb_per_link=20.6, ll_cap=141.0, ll128_per_channel=36.7, nic=50.0, memory=3350,
               host=64)  # fmt: skip
BLACKWELL = _nccl("blackwell", B200, links=18, gb_per_link=40.1, ll_cap=282.0, ll128_per_channel=40.0, nic=50.0,
                  memory=8000, host=64)  # fmt: skip

PRESETS = {machine.name: machine for machine in (TEXTBOOK, AMPERE, HOPPER, BLACKWELL)}
