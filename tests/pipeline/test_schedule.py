import pytest

from megacore.pipeline import SCHEDULES, Action, forward_only, gpipe, one_f_one_b, simulate

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 5, 7, 16)]


def lists(schedule, p, m, **kwargs):
    return [schedule(rank, p, m, **kwargs) for rank in range(p)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_is_the_closed_form(name, p, m):
    report = simulate(lists(SCHEDULES[name], p, m), f=1.0, b=2.0)
    assert report.makespan == 3 * (m + p - 1)
    assert report.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_peak_live_is_the_closed_form(p, m):
    assert simulate(lists(gpipe, p, m)).peak_live == (m,) * p
    assert simulate(lists(one_f_one_b, p, m)).peak_live == tuple(min(p - rank, m) for rank in range(p))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_forward_only(p, m, chunks):
    report = simulate(lists(forward_only, p, m, chunks=chunks), chunks, microbatches=m)
    assert report.peak_live == (0,) * p
    assert len(report.order) == p * m * chunks
    if m % p == 0:
        assert report.makespan == m * chunks + p - 1


def text(actions):
    return " ".join(str(action) for action in actions)


def test_one_f_one_b_by_hand():
    assert text(one_f_one_b(0, 3, 4)) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text(one_f_one_b(1, 3, 4)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text(one_f_one_b(2, 3, 4)) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert text(one_f_one_b(0, 3, 1)) == "F0 B0"


def test_no_microbatches_no_actions():
    assert gpipe(0, 2, 0) == one_f_one_b(0, 2, 0) == forward_only(0, 2, 0) == []


def test_refusals():
    with pytest.raises(ValueError, match="rank=2"):
        gpipe(2, 2, 1)
    with pytest.raises(ValueError, match="microbatches=-1"):
        one_f_one_b(0, 2, -1)


def test_action_prints_short():
    assert text([Action("W", 0, 3), Action("B", 1, 0)]) == "W3 B0.1"
