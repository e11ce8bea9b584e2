"""MB-13: membership and creation order of process groups; axes, order strings, refusals."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.comm.mesh import Group, Layout, Mesh, layouts


def sums(*shapes):
    """All-reduce of the rank in every kind of group, for one layout after another in the same processes."""
    found = []
    for sizes in shapes:
        mesh = Mesh.build(Layout(**sizes))
        row = {}
        for kind in mesh.layout.kinds():
            group = getattr(mesh, kind)
            x = torch.tensor([float(dist.get_rank())])
            if group.size > 1:
                dist.all_reduce(x, group=group.pg)
            row[kind] = (group.ranks, x.item())
        found.append(row)
        mesh.destroy()
    return found


def refusal(sizes):
    try:
        Mesh.build(Layout(**sizes))
    except ValueError as error:
        return str(error)


def test_every_kind_of_group_sums_its_own_members(pool):
    shapes = [dict(tp=2, pp=4), dict(tp=2, pp=2, dp=2), dict(dp=8), dict(tp=2, pp=2, dp=2, order="pp-dp-cp-tp")]
    answers = pool.run(sums, *shapes, world=8)
    for number, sizes in enumerate(shapes):
        kinds = Layout(**sizes).kinds()
        for rank, answer in enumerate(answers):
            for kind, (members, total) in answer[number].items():
                assert total == sum(members), (sizes, rank, kind)
                assert members in kinds[kind] or (kind == "embed" and members == (rank,))
    # first and last stage of (a): {0,6} = 6 and {1,7} = 8
    assert [answers[r][0]["embed"][1] for r in (0, 6, 1, 7)] == [6, 6, 8, 8]


def test_the_groups_of_tp2_pp2_dp2_are_those_of_the_case():
    kinds = Layout(tp=2, pp=2, dp=2).kinds()
    assert kinds["tp"] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert kinds["dp"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert kinds["pp"] == kinds["embed"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert kinds["model"] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert kinds["world"] == [tuple(range(8))]


def test_rank_formula():
    layout = Layout(tp=2, cp=3, dp=2, pp=2)
    t, c, d = 2, 3, 2
    for rank in range(layout.world):
        at = layout.coords(rank)
        assert rank == at["tp"] + t * (at["cp"] + c * (at["dp"] + d * at["pp"])) == layout.rank(**at)


def test_a_data_parallel_group_stays_inside_one_stage():
    layout = Layout(tp=2, pp=2, dp=2)
    for group in layout.groups("dp"):
        assert len({layout.coords(r)["pp"] for r in group}) == 1
        assert group[1] - group[0] == 2  # stride t*c


def test_experts_divide_dp_and_are_no_factor_of_the_world():
    layout = Layout(tp=2, dp=4, ep=2)
    assert layout.world == 8
    assert layout.kinds()["ep"] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert layout.kinds()["expert_dp"] == [(0, 4), (1, 5), (2, 6), (3, 7)]


@settings(deadline=None)
@given(st.tuples(*[st.integers(1, 4)] * 4), st.permutations(["tp", "cp", "dp", "pp"]))
def test_every_kind_partitions_the_world(sizes, order):
    layout = Layout(*sizes, order="-".join(order))
    for kind, groups in layout.kinds().items():
        members = [r for g in groups for r in g]
        if kind == "embed" and layout.pp > 1:
            assert len(members) == len(set(members)) == 2 * layout.world // layout.pp
        else:
            assert sorted(members) == list(range(layout.world)), kind


def test_all_38_layouts_of_up_to_8_ranks():
    found = layouts(8)
    assert len(found) == len(set(found)) == 38
    assert all(layout.world <= 8 for layout in found)


@pytest.mark.parametrize("sizes", [dict(tp=3), dict(tp=2, pp=2), dict(dp=8)])
def test_a_world_that_does_not_fit_is_refused_on_every_rank(pool, sizes):
    messages = pool.run(refusal, sizes, world=6)
    assert len(set(messages)) == 1 and "world=6 is not tp*cp*dp*pp" in messages[0]


@pytest.mark.parametrize(
    "sizes, words",
    [
        (dict(tp=0), "tp=0 is not a positive"),
        (dict(ep=2, dp=3), "ep=2 does not divide dp\\*cp=3"),
        (dict(order="tp-dp-pp"), "does not name each of tp-cp-dp-pp"),
        (dict(order="tp-tp-dp-pp"), "does not name each"),
    ],
)
def test_impossible_layouts_are_one_line_errors(sizes, words):
    with pytest.raises(ValueError, match=words) as caught:
        Layout(**sizes)
    assert "\n" not in str(caught.value)


def test_ep_may_stand_in_an_order_string():
    assert Layout(tp=2, dp=2, order="tp-cp-ep-dp-pp").groups("dp") == [(0, 2), (1, 3)]


def shared_communicators(sizes):
    mesh = Mesh.build(Layout(**sizes))
    return mesh.dp.pg is mesh.dp_cp.pg, mesh.pp.pg is mesh.model.pg, mesh.pp_up.pg is mesh.pp.pg, mesh.tp.pg


def test_equal_memberships_share_a_communicator_and_groups_of_one_have_none(pool):
    for dp_shared, pp_shared, up_shared, tp_pg in pool.run(_no_handles, dict(dp=2, pp=2), world=4):
        assert dp_shared and pp_shared and not up_shared and tp_pg


def _no_handles(sizes):
    *shared, tp = shared_communicators(sizes)
    return (*shared, tp is None)


def test_a_group_survives_deepcopy_and_says_why_it_cannot_be_pickled():
    import copy
    import pickle

    group = Group((0, 1), 1)
    assert copy.deepcopy(group) is group
    assert pickle.loads(pickle.dumps(group)) == group
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(Group((0, 1), 1, pg=object()))
