"""The .bin/.idx format against Megatron's own reader and writer, 64-bit offsets, and broken files."""

import os
import struct

import numpy as np
import pytest

from megacore.train.data.indexed import CHUNK, IndexedDataset, token_dtype
from megacore.train.data.writer import IndexedWriter, merge, write_index

DOCUMENTS = [[1, 2, 3], [65499], [], [7] * 1000, [0, 5]]


def write(prefix, documents=DOCUMENTS, dtype=np.uint16, meta=None):
    with IndexedWriter(prefix, dtype) as writer:
        for tokens in documents:
            writer.add_document(np.array(tokens, dtype=np.int64))
        writer.commit(meta)
    return prefix


def contents(data):
    return [data.document(i).tolist() for i in range(data.num_documents)]


def test_bytes_of_the_index_are_the_documented_ones(tmp_path):
    write(tmp_path / "d", [[10, 11], [12]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    expected += struct.pack("<2i", 2, 1) + struct.pack("<2q", 0, 4) + struct.pack("<3q", 0, 1, 2)
    assert (tmp_path / "d.idx").read_bytes() == expected
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<3H", 10, 11, 12)


@pytest.fixture(scope="module")
def megatron():
    return pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core 0.16.1 is not installed")


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_reads_ours(tmp_path, megatron, dtype):
    theirs = megatron.IndexedDataset(str(write(tmp_path / "d", dtype=dtype)))
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert theirs[0].dtype == dtype
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_megatrons(tmp_path, megatron, dtype):
    import torch

    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=dtype)
    builder.add_document(torch.tensor([1, 2, 3, 4, 5]), [2, 3])  # one document of two sequences
    builder.add_item(torch.tensor([6]))
    builder.end_document()
    builder.add_document(torch.tensor([300, 299]), [2])
    builder.finalize(str(tmp_path / "d.idx"))
    ours = IndexedDataset(tmp_path / "d")
    assert [ours[i].tolist() for i in range(len(ours))] == [[1, 2], [3, 4, 5], [6], [300, 299]]
    assert contents(ours) == [[1, 2, 3, 4, 5], [6], [300, 299]]
    assert (ours.num_tokens, ours.largest_token_id, ours.meta, ours.dtype) == (8, 300, {}, dtype)


def test_index_and_merge_equal_megatrons_byte_for_byte(tmp_path, megatron):
    import torch

    for name in ("a", "b"):
        builder = megatron.IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16)
        for tokens in DOCUMENTS:
            builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(tokens)])
        builder.finalize(str(tmp_path / f"{name}.idx"))
    both = megatron.IndexedDatasetBuilder(str(tmp_path / "both.bin"), dtype=np.uint16)
    both.add_index(str(tmp_path / "a"))
    both.add_index(str(tmp_path / "b"))
    both.finalize(str(tmp_path / "both.idx"))
    write(tmp_path / "ours")
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    for mine, theirs in (("ours", "a"), ("merged", "both")):
        for suffix in (".idx", ".bin"):
            assert (tmp_path / (mine + suffix)).read_bytes() == (tmp_path / (theirs + suffix)).read_bytes()


def test_mb21a_offsets_beyond_32_bits(tmp_path):
    """70 000 documents of 65 536 uint16 tokens: 9 175 040 000 bytes, sparse; alone and second in a merge."""
    count, length = 70_000, 65_536
    with open(tmp_path / "big.bin", "wb") as stream:
        stream.truncate(9_175_040_000)
        stream.seek(9_174_908_928)
        stream.write(struct.pack("<8H", *range(1, 9)))
    write_index(tmp_path / "big.idx", np.dtype(np.uint16), [length] * count, range(count + 1))
    big = IndexedDataset(tmp_path / "big")
    assert int(big.pointers[-1]) == 9_174_908_928 and big.num_tokens == 4_587_520_000
    assert big.document(count - 1)[:9].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]
    write(tmp_path / "small", [[5, 6, 7]])
    both = merge([tmp_path / "small", tmp_path / "big"], tmp_path / "both")
    assert int(both.pointers[-1]) == 9_174_908_928 + 6 and both.num_documents == count + 1
    assert both.document(0).tolist() == [5, 6, 7]
    assert both.document(count)[:9].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert both.end_to_end and os.stat(tmp_path / "both.bin").st_blocks * 512 < 1 << 20, "holes were filled"


def test_a_single_sequence_may_pass_32_bits_of_bytes(tmp_path):
    write_index(tmp_path / "d.idx", np.dtype(np.int32), np.array([2**31 - 1, 2**30, 1], np.int32), [0, 3])
    pointers = (tmp_path / "d.idx").read_bytes()[34 + 12 :][:24]
    assert struct.unpack("<3q", pointers) == (0, 8_589_934_588, 12_884_901_884)


def test_a_document_longer_than_int32_lengths_is_several_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr("megacore.train.data.writer.LONGEST", 4)
    data = IndexedDataset(write(tmp_path / "d", [list(range(10)), [1]]))
    assert data.lengths.tolist() == [4, 4, 2, 1] and contents(data) == [list(range(10)), [1]]


def test_dtype_is_the_smallest_and_ids_that_do_not_fit_are_refused(tmp_path):
    assert (token_dtype(65_499), token_dtype(65_500)) == (np.uint16, np.int32)
    with pytest.raises(ValueError, match="token id 65536 does not fit uint16"):
        write(tmp_path / "d", [[1], [65_536]])
    assert list(tmp_path.iterdir()) == [], "an abandoned writer left files"
    with pytest.raises(ValueError, match="token id -1 does not fit"):
        write(tmp_path / "d", [[-1]])


def test_merge_of_mixed_dtypes_is_refused_and_sidecars_are_merged(tmp_path):
    write(tmp_path / "a", [[1, 9]], meta={"largest_token_id": 9, "vocab_size": 10, "eod_id": 0})
    write(tmp_path / "b", [[3]], meta={"largest_token_id": 3, "vocab_size": 10, "eod_id": 1})
    write(tmp_path / "c", dtype=np.int32)
    both = merge([tmp_path / "b", tmp_path / "a"], tmp_path / "ab")
    assert contents(both) == [[3], [1, 9]]
    assert (both.meta["largest_token_id"], both.meta["vocab_size"], "eod_id" in both.meta) == (9, 10, False)
    with pytest.raises(ValueError, match="c holds int32.*holds uint16"):
        merge([tmp_path / "a", tmp_path / "c"], tmp_path / "out")
    with pytest.raises(ValueError, match="one of the datasets to merge"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "a")
    assert contents(IndexedDataset(tmp_path / "a")) == [[1, 9]]


def test_largest_id_is_scanned_where_no_sidecar_records_it(tmp_path, monkeypatch):
    monkeypatch.setattr("megacore.train.data.indexed.CHUNK", 64)
    data = IndexedDataset(write(tmp_path / "d"))  # several chunks of the scan
    assert CHUNK > 64 and "largest_token_id" not in data.meta and data.largest_token_id == 65_499
    assert IndexedDataset(write(tmp_path / "e", [])).largest_token_id == -1


def test_prefix_may_have_dots_or_a_suffix(tmp_path):
    write(tmp_path / "corpus.v1.2")
    assert contents(IndexedDataset(tmp_path / "corpus.v1.2")) == contents(IndexedDataset(tmp_path / "corpus.v1.2.bin"))


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file(tmp_path, suffix):
    write(tmp_path / "d")
    (tmp_path / f"d{suffix}").unlink()
    with pytest.raises(FileNotFoundError) as error:
        IndexedDataset(tmp_path / "d")
    assert f"d{suffix} is missing" in one_line(error) and "megacore prepare" in str(error.value)


@pytest.mark.parametrize(
    "name, keep",
    [("d.bin", 100), ("d.bin", 2010), ("d.idx", 5), ("d.idx", 20), ("d.idx", 60), ("d.bin", 0), ("d.idx", 0)],
)
def test_truncated_file(tmp_path, name, keep):
    write(tmp_path / "d")
    os.truncate(tmp_path / name, keep)
    with pytest.raises(ValueError) as error:
        IndexedDataset(tmp_path / "d")
    assert name in one_line(error) and " again" in str(error.value) or "MMIDIDX" in str(error.value)


def patch(path, at, raw):
    data = bytearray(path.read_bytes())
    data[at : at + len(raw)] = raw
    path.write_bytes(data)


@pytest.mark.parametrize(
    "at, raw, message",
    [
        (0, b"PK\x03\x04", "MMIDIDX"),
        (9, struct.pack("<Q", 2), "index version 2"),
        (17, b"\x07", "floats"),
        (17, b"\x63", "dtype code 99"),
        (34 + 4 * 5 + 8, struct.pack("<q", -8), "sequence 1 is at byte -8"),
        (34 + 4 * 5 + 8, struct.pack("<q", 7), "sequence 1 is at byte 7"),  # between two tokens
        (34, struct.pack("<i", -3), "sequence 0 .* -3 tokens"),
        (34 + 12 * 5 + 8, struct.pack("<q", -1), "document indices"),
        (34 + 12 * 5 + 40, struct.pack("<q", 99), "document indices"),
    ],
)
def test_foreign_or_overflowed_index(tmp_path, at, raw, message):
    write(tmp_path / "d")
    patch(tmp_path / "d.idx", at, raw)
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(tmp_path / "d")
    assert "d.idx" in one_line(error) or "d.bin" in one_line(error)


def test_sidecar_of_other_files_is_refused(tmp_path):
    write(tmp_path / "a", [[1, 2, 3]], meta={"largest_token_id": 3})
    write(tmp_path / "b", [[1, 900]], meta={"largest_token_id": 900})
    os.replace(tmp_path / "a.json", tmp_path / "b.json")
    with pytest.raises(ValueError, match="belongs to other files"):
        _ = IndexedDataset(tmp_path / "b").largest_token_id
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(ValueError, match="not a sidecar"):
        _ = IndexedDataset(tmp_path / "b").meta


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_a_commit_that_stops_half_way_never_pairs_new_data_with_an_old_index(tmp_path, monkeypatch, renamed):
    write(tmp_path / "d", [[1, 2, 3]])
    real, calls = os.replace, []

    def stop(*names):
        if len(calls) == renamed:
            raise KeyboardInterrupt
        calls.append(names)
        real(*names)

    monkeypatch.setattr("megacore.train.data.writer.os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "d", [[4, 5, 6]])
    with pytest.raises(FileNotFoundError, match="d.idx is missing"):
        IndexedDataset(tmp_path / "d")
