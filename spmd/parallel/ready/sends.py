"""What a step sends, by formula: before anything runs, for any number of tokens.

    all_reduce tp  24 x  T*768      each of 12 layers: the result of attention, of the MLP, and both gradients

T is the number of tokens (of images: of samples) of a rank. Numbers are elements that a rank gives to the collective;
`Send.nbytes` has bytes. A ring moves 2 (n-1)/n of an all-reduce, (n-1) of what is given to a gather, (n-1)/n of what is
given to a reduce-scatter or an all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil


@dataclass(frozen=True)
class Send:
    """Collectives of one kind on one axis, all of one size.

    times: how many a step sends. per_token, fixed: elements that a rank gives to each, for each of its tokens and
    besides. what: why. source: where the formula is from.
    """

    kind: str
    axis: str
    times: int
    per_token: float
    fixed: int
    what: str
    source: str = ""

    def elements(self, tokens: int) -> float:
        """Elements that a rank gives to one of them."""
        return self.per_token * tokens + self.fixed

    def nbytes(self, tokens: int, itemsize: int = 4) -> float:
        """Bytes that a rank gives to all of them in a step. itemsize: bytes of an element."""
        return self.times * self.elements(tokens) * itemsize

    @property
    def formula(self) -> str:
        terms = [f"T*{self.per_token:g}"] if self.per_token else []
        return " + ".join([*terms, *([f"{self.fixed:,}"] if self.fixed or not terms else [])])

    def __str__(self):
        return f"{self.kind} {self.axis}  {self.times} x {self.formula}  {self.what}"


def together(sends: Iterable[Send]) -> list[Send]:
    """Those that differ in nothing but how many there are, as one.

    >>> [send.times for send in together([*of_pairs(1, 8, "tp"), *of_pairs(1, 8, "tp")])]
    [2, 2]
    """
    times: dict[Send, int] = {}
    for send in sends:
        alike = replace(send, times=0)
        times[alike] = times.get(alike, 0) + send.times
    return [replace(send, times=n) for send, n in times.items()]


def of_pairs(pairs: int, width: int, axis: str) -> list[Send]:
    """Megatron: a pair has its result summed, and in the backward the gradient of its input."""
    paper = "Shoeybi et al. 2019, section 3"
    return [
        Send("all_reduce", axis, pairs, width, 0, f"the results of {pairs} pairs", paper),
        Send("all_reduce", axis, pairs, width, 0, f"the gradients of what {pairs} pairs are given", paper),
    ]


def of_inside(sizes: list[int], axis: str) -> list[Send]:
    """Parameters between the layers of a pair, such as norms of queries, see a part of the heads on each rank."""
    return [
        Send("all_reduce", axis, sizes.count(n), 0, n, "gradients of parameters inside of pairs")
        for n in dict.fromkeys(sizes)
    ]


def of_batch_norms(channels: list[int], axes: str) -> list[Send]:
    """Sums and squares of the batch of all ranks, and their gradients."""
    found = []
    for n in dict.fromkeys(channels):
        times = 2 * channels.count(n)
        found.append(Send("all_reduce", axes, times, 0, n + 1, "sums of batch norms, and their gradients"))
        found.append(Send("all_reduce", axes, times, 0, n, "squares of batch norms, and their gradients"))
    return found


def of_words(width: int, axis: str) -> list[Send]:
    """A table in rows: each rank looks up the words that it has."""
    return [Send("all_reduce", axis, 1, width, 0, "the words that are looked up", "Shoeybi et al. 2019, section 3")]


def of_head(width: int, words: int, ranks: int, axis: str) -> list[Send]:
    """A head by columns whose result is gathered."""
    return [
        Send("all_gather_into_tensor", axis, 1, ceil(words / ranks), 0, "the logits of all words"),
        Send("all_reduce", axis, 1, width, 0, "the gradient of what the head is given"),
    ]


def of_group(
    elements: int, parameters: int, shards: int, sharded: str, copies: str | None, times: int, is_root: bool
) -> list[Send]:
    """ZeRO-3: a group is gathered before its forward and its backward, and its gradients are reduced and scattered.

    elements: of a rank's block. parameters: how many there are; a number for each says whether it was used. The root
    stays whole between the two, so it is gathered once.
    """
    paper = "Rajbhandari et al. 2020, section 7.2.2"
    what = "what is in no group" if is_root else "groups"
    own, whole = elements + parameters, (elements + parameters) * shards
    found = [
        Send("all_gather_into_tensor", sharded, times if is_root else 2 * times, 0, elements, what, paper),
        Send("reduce_scatter_tensor", sharded, times, 0, whole, f"gradients of {what}", paper),
    ]
    if copies is not None:
        zhao = "Zhao et al. 2023, section 3.2.2"
        found.append(Send("all_reduce", copies, times, 0, own, f"gradients of {what}, over copies", zhao))
    return found


def of_copies(elements: int, axes: str) -> list[Send]:
    """Data parallelism: gradients are averaged; in buckets, so that their number depends on sizes.

    elements: of all parameters, and a number for each, which says whether it was used.
    """
    return [Send("all_reduce", axes, 1, 0, elements, "gradients, together; in buckets", "Li et al. 2020, section 3.2")]


def of_experts(layers: int, width: int, k: int, experts: int, axis: str) -> list[Send]:
    """GShard: tokens go to their experts and back, and their gradients; before it, how many go where."""
    paper = "Lepikhin et al. 2021, section 3.2"
    return [
        Send("all_to_all_single", axis, layers, 0, experts, "how many tokens each expert gets, as 8-byte integers"),
        Send("all_to_all_single", axis, 4 * layers, k * width, 0, "tokens to experts and back, spread evenly", paper),
    ]
