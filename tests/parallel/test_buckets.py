"""The flat layout: every parameter has one aligned place, and buckets are stretches of whole parameters."""

import pytest
import torch
from torch import nn

from megacore.parallel.buckets import ALIGN_BYTES, flat_layout
from tests.parallel.test_data import chain


def test_layout_is_reverse_order_aligned_and_disjoint():
    module = chain([7, 5, 3])
    layout = flat_layout(dict(module.named_parameters()), 1 << 20)
    assert list(layout.slots) == ["1.bias", "1.weight", "0.bias", "0.weight"]
    ends = 0
    for slot in layout.slots.values():
        assert slot.start * 4 % ALIGN_BYTES == 0 and slot.start >= ends
        ends = slot.start + slot.numel
    assert [b.names for b in layout.buckets] == [tuple(layout.slots)]


@pytest.mark.parametrize("bucket_bytes", [1, 256, 512, 1 << 20])
def test_buckets_cover_every_parameter_once_and_respect_the_size(bucket_bytes):
    params = dict(chain([16, 16, 1, 40]).named_parameters())
    params["half"] = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
    params["double"] = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    params["empty"] = nn.Parameter(torch.zeros(0, 4))
    layout = flat_layout(params, bucket_bytes)
    assert sorted(n for b in layout.buckets for n in b.names) == sorted(params)
    assert layout.slots["half"].dtype == torch.float32 and layout.slots["double"].dtype == torch.float64
    for i, b in enumerate(layout.buckets):
        assert (b.stop - b.start) * b.dtype.itemsize <= bucket_bytes or len(b.names) == 1 or "empty" in b.names
        assert all(layout.slots[n].bucket == i and layout.slots[n].dtype == b.dtype for n in b.names)
    complete = [list(layout.slots).index(b.names[-1]) for b in layout.buckets]
    assert complete == sorted(complete)  # backward completes them in the order of their numbers
    for dtype, size in layout.sizes.items():
        stretches = sorted((b.start, b.stop) for b in layout.buckets if b.dtype == dtype)
        assert stretches[0][0] == 0 and stretches[-1][1] == size
        assert all(a[1] == b[0] for a, b in zip(stretches, stretches[1:], strict=False))


def test_a_bucket_holds_something():
    with pytest.raises(ValueError, match="bucket_bytes=0 is not positive"):
        flat_layout({}, 0)
