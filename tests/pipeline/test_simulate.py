import pytest

from megacore.pipeline import Action, gpipe, one_f_one_b, simulate

F, B, W = (lambda i, c=0, kind=kind: Action(kind, c, i) for kind in "FBW")


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ([[F(0), B(0)], [F(0)]], "rank 1: B0 missing"),
        ([[F(0), F(1), B(0)], [F(0), F(1), B(0), B(1)]], "rank 0: B1 missing"),
        ([[F(0), F(0), B(0)]], "F0 appears twice"),
        ([[B(0), F(0)]], "B0 comes before F0"),
        ([[F(0), W(0), B(0)]], "W0 comes before B0"),
        ([[F(0), B(0), W(0), W(0)]], "W0 appears twice"),
        ([[F(0, 1), B(0, 1)]], "no action of 1 chunks"),
        ([[Action("X", 0, 0)]], "no action"),
        ([], "0 schedules"),
    ],
)
def test_incomplete(schedules, message):
    with pytest.raises(ValueError, match=message):
        simulate(schedules)


def test_microbatch_that_every_rank_forgets():
    lists = [gpipe(r, 2, 3) for r in range(2)]
    simulate(lists)
    with pytest.raises(ValueError, match="F3, B3 missing"):
        simulate(lists, microbatches=4)
    with pytest.raises(ValueError, match="F2 is no action"):
        simulate(lists, microbatches=2)


def test_deadlock_between_ranks():
    # Rank 0 wants the gradient of 0 before it sends 1; rank 1 wants both activations first.
    with pytest.raises(ValueError, match="deadlocks: rank 0 at B0, rank 1 at F1"):
        simulate([[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]])


def test_deadlock_between_chunks():
    with pytest.raises(ValueError, match="deadlocks: rank 0 at F0.1, rank 1 at F0.1"):
        simulate([[F(0), F(0, 1), B(0, 1), B(0)], [F(0, 1), F(0), B(0, 1), B(0)]], 2)


def test_split_backward_fills_the_bubble():
    """p=2, m=2, f=b=w=1: 1F1B is idle for 1/3 of the time; with W apart, each rank for one unit in seven."""
    whole = simulate([one_f_one_b(r, 2, 2) for r in range(2)], f=1, b=1, w=1)
    assert (whole.makespan, whole.bubble) == (9, pytest.approx(1 / 3))
    split = simulate([[F(0), F(1), B(0), W(0), B(1), W(1)], [F(0), B(0), F(1), B(1), W(0), W(1)]], f=1, b=1, w=1)
    assert (split.makespan, split.bubble) == (7, pytest.approx(1 / 7))
    assert split.peak_live == (2, 2)  # W keeps the graph


def test_interleaving_shrinks_the_bubble():
    """Chunks of half the time: makespan m(f+b) + (p-1)(f+b)/v."""
    interleaved = [
        [F(0), F(1), F(0, 1), F(1, 1), B(0, 1), B(1, 1), B(0), B(1)],
        [F(0), F(1), F(0, 1), B(0, 1), F(1, 1), B(1, 1), B(0), B(1)],
    ]
    assert simulate(interleaved, 2, f=0.5, b=1.0).makespan == 2 * 3 + 3 / 2
    assert simulate([one_f_one_b(r, 2, 2) for r in range(2)], f=1.0, b=2.0).makespan == 2 * 3 + 3


def test_measured_times_per_stage():
    report = simulate([one_f_one_b(r, 2, 3) for r in range(2)], f=[1, 2], b=[2, 4])
    assert report.makespan == 1 + 3 * 6 + 2  # the slow stage never waits once it has begun
    with pytest.raises(ValueError, match="times of F"):
        simulate([gpipe(0, 1, 1)], f=[1, 2])


def test_free_actions_keep_the_order():
    """With times of zero an order by start alone would be arbitrary."""
    lists = [one_f_one_b(r, 4, 6) for r in range(4)]
    check_topological(simulate(lists, f=0, b=0).order, 4)


def check_topological(order, p):
    seen = set()
    for event in order:
        a, s = event.action, event.action.chunk * p + event.rank
        last = max(e.action.chunk * p + e.rank for e in order)
        needs = {"F": [("F", s - 1)] if s else [], "B": [("F", s)] + ([("B", s + 1)] if s < last else [])}[a.kind]
        assert all((kind, stage, a.microbatch) in seen for kind, stage in needs)
        seen.add((a.kind, s, a.microbatch))
