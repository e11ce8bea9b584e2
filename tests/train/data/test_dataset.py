"""Samples cut from the stream, and data that does not fit the model."""

import numpy as np
import pytest

from megacore.train.data import GPTDataset, IndexedDataset, check_vocabulary
from tests.train.data.test_indexed import patch, write


@pytest.mark.parametrize("tokens, length", [(11, 5), (12, 5), (15, 5), (16, 5), (6, 5), (40, 1), (7, 6)])
def test_every_token_but_the_first_is_a_target_once(tmp_path, tokens, length):
    stream = np.arange(tokens)
    data = GPTDataset(write(tmp_path / "d", [stream[:4], stream[4:4], stream[4:]]), length)
    assert len(data) == (tokens - 1) // length
    pairs = [data.pair(i) for i in range(len(data))]
    used = len(data) * length
    assert np.concatenate([x for x, _ in pairs]).tolist() == list(range(used))
    assert np.concatenate([y for _, y in pairs]).tolist() == list(range(1, used + 1))
    assert all(data.valid(i) == length for i in range(len(data)))
    assert data.sample(0).dtype == np.int64 and data.sample(0).shape == (length + 1,)


def test_sizes_that_cannot_work(tmp_path):
    write(tmp_path / "d", [[1, 2, 3, 4]])
    with pytest.raises(ValueError, match=r"4 tokens.*seq_length \+ 1 = 5; give more text"):
        GPTDataset(tmp_path / "d", 4)
    with pytest.raises(ValueError, match="seq_length=0"):
        GPTDataset(tmp_path / "d", 0)
    with pytest.raises(IndexError, match="sample 1 of"):
        GPTDataset(tmp_path / "d", 3).sample(1)


def test_sequences_with_gaps_are_no_stream_until_merged(tmp_path):
    from megacore.train.data import merge

    write(tmp_path / "d", [[1, 2], [3, 4], [5, 6]])
    patch(tmp_path / "d.idx", 34 + 12 + 8, (8).to_bytes(8, "little"))  # the second sequence lies where the third does
    assert [IndexedDataset(tmp_path / "d")[i].tolist() for i in range(3)] == [[1, 2], [5, 6], [5, 6]]
    with pytest.raises(ValueError, match="end to end"):
        GPTDataset(tmp_path / "d", 2)
    merge([tmp_path / "d"], tmp_path / "e")
    assert GPTDataset(tmp_path / "e", 5).sample(0).tolist() == [1, 2, 5, 6, 5, 6]


@pytest.mark.parametrize("meta", [None, {"largest_token_id": 50, "vocab_size": 64}])
def test_data_outside_the_vocabulary(tmp_path, meta):
    data = GPTDataset(write(tmp_path / "d", [[1, 50, 3]], meta=meta), 2)
    check_vocabulary(data, 51)
    check_vocabulary(data.data, 51)
    wanted = 64 if meta else 51
    with pytest.raises(
        ValueError, match=f"^vocab_size=50: .*token id 50.*set vocab_size >= {wanted} or prepare"
    ) as error:
        check_vocabulary(data, 50)
    assert "\n" not in str(error.value)
