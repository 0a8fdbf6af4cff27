"""What travels in the buckets of a program, and what does not: the sentences of a pass that packs.

    all_reduce over dp, 21 of them in 1 bucket of 325,348 bytes
    left alone: all_reduce over tp, 4 of them: read before another is made, or no room in the memory for a bucket
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence

from spmd.expand.program import Program
from spmd.tensor.redistribute.bucket import Bucket, bucket_key
from spmd.tensor.redistribute.plan import Step

NO_BUCKET = "their blocks, or the marks of their elements, fit into no bucket"
NO_OTHER = "no other is of their axes, reduction and dtype"
TOO_EARLY = "read before another is made, or no room in the memory for a bucket"


def in_buckets(program: Program, kinds: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is in buckets, and what of these kinds is alone and why, each in a sentence for a kind and axes."""
    buckets: dict[str, list[Bucket]] = defaultdict(list)
    alone: dict[str, list[Step]] = defaultdict(list)
    for _, sent in program.steps():
        if sent.sends and sent.kind in kinds:
            found = buckets if isinstance(sent, Bucket) else alone
            found[f"{sent.kind} over {program.axes_text(sent.axes)}"].append(sent)
    did = [_in_buckets(what, found) for what, found in buckets.items()]
    packed = {bucket_key(bucket.steps[0]) for found in buckets.values() for bucket in found}
    reasons = [(what, _reasons(found, packed)) for what, found in alone.items()]
    return tuple(did), tuple([f"{what}, {n} of them: {why}" for what, each in reasons for why, n in each.items()])


def _in_buckets(what: str, buckets: Sequence[Bucket]) -> str:
    sizes = ", ".join([f"{bucket.nbytes:,}" for bucket in buckets])
    many = "1 bucket" if len(buckets) == 1 else f"{len(buckets)} buckets"
    return f"{what}, {sum([bucket.tensors for bucket in buckets])} of them in {many} of {sizes} bytes"


def _reasons(alone: Sequence[Step], packed: Collection[Hashable]) -> Counter[str]:
    """How many are alone for each reason. packed: the keys of what is in buckets."""
    keys = [bucket_key(step) for step in alone]
    several = {key for key, n in Counter(keys).items() if n > 1 or key in packed}
    return Counter([NO_BUCKET if key is None else TOO_EARLY if key in several else NO_OTHER for key in keys])
