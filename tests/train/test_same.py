"""Ranks that were given different things: the field is named with its ranks, on every rank, before any group exists."""

import pytest

from megacore.train.same import check_same, fingerprint, first_difference
from tests.spawn import pool  # noqa: F401


def test_the_first_field_that_differs_is_named_with_its_ranks():
    given = [{"optim.lr": 0.1, "seed": 1}, {"optim.lr": 0.1, "seed": 2}, {"optim.lr": 0.1, "seed": 1}]
    assert first_difference(given) == "seed is 1 on ranks 0, 2 and 2 on rank 1"
    assert first_difference(given[:1] * 3) == ""
    assert first_difference([{"a": 1}, {}]) == "a is 1 on rank 0 and None on rank 1"


def _compare(odd: int) -> str:
    import torch.distributed as dist

    from megacore.train.agreement import CheckpointError
    from megacore.train.job import everybody

    group = everybody()
    try:
        check_same(group, {"data.micro_batch": 2, "parallel.tp": 2 if dist.get_rank() == odd else 1})
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("odd", "said"), [(2, "parallel.tp is 1 on ranks 0, 1, 3 and 2 on rank 2;"), (9, "")])
def test_every_rank_refuses(pool, odd, said):  # noqa: F811
    for answer in pool.run(_compare, odd, world=4):
        assert answer.startswith(said) and bool(answer) == bool(said)


def test_a_fingerprint_tells_files_apart(tmp_path):
    big = bytearray(8 << 20)
    (tmp_path / "a").write_bytes(big)
    big[-1] = 1
    (tmp_path / "b").write_bytes(big)
    (tmp_path / "c").write_bytes(big[:-1])
    (tmp_path / "d").write_bytes(big)
    marks = [fingerprint(tmp_path / name) for name in "abcd"]
    assert len(set(marks)) == 3 and marks[1] == marks[3]
    assert fingerprint(tmp_path / "none") == "" and fingerprint(tmp_path / "a").startswith("8388608 bytes")
