"""Rows that a reduce-scatter sends: one for each rank, of one length."""

import itertools

import pytest
import torch

from spmd.tensor.redistribute.runs import Boxes, Run


@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 2, 1), (2, 1, 0, 0), (0, 0), (0, 2, 1), (2,)], ids=str)
def test_rows_of_pieces_are_padded_to_one_length(sizes):
    """As when each piece is padded alone, with whole pieces in front, and empty ones behind and between."""
    x, row = torch.arange(sum(sizes) * 3.0).view(-1, 3), max(sizes) * 3
    ends = list(itertools.accumulate(sizes))
    pieces = [((end - size, end), (0, 3)) for end, size in zip(ends, sizes, strict=True)]
    want = [torch.nn.functional.pad(p.reshape(-1), (0, row - p.numel())) for p in x.split(list(sizes))]
    assert torch.equal(Boxes(tuple(map(Run, pieces))).cut_rows(x, x.shape), torch.cat(want))
