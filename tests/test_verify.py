"""Parallel equals serial, over every layout of 8 ranks; and `verify` finds what is wrong."""

from dataclasses import replace

import pytest
import torch

import megacore.verify
from megacore.comm.mesh import Layout
from megacore.compare import Outcome, assemble, worst
from megacore.subject import TOY, UNEVEN, Subject, Trial
from megacore.verify import read_layouts, verify
from tests import user_model

FAST = Trial(micro_batches=2, global_batch=16)


def check(pool, model, trial, layouts="all", schedules=("1f1b", "gpipe"), refused=()):
    report = verify(model, layouts=layouts, world=8, schedules=schedules, trial=trial, pool=pool)
    failed = [(row.name, row.schedule, row.where) for row in report.rows if row.verdict == "failed"]
    assert not failed, failed
    assert {row.name for row in report.rows if row.verdict == "refused"} == set(refused)
    assert report.passed
    return report


def test_fp64_every_layout_and_schedule_with_dropout(pool):
    report = check(pool, TOY, FAST)
    assert len({row.name for row in report.rows}) == 38


def test_fp64_uneven_sizes_every_layout(pool):
    check(pool, UNEVEN, FAST, schedules=("1f1b",), refused={"tp7 pp1 dp1", "tp8 pp1 dp1"})  # 6 heads


def test_fp32_every_layout(pool):
    check(pool, replace(TOY, dropout=0.0), replace(FAST, precision="fp32", steps=1), schedules=("1f1b",))


def test_fp64_without_dropout_on_the_largest_layouts(pool):
    check(pool, replace(TOY, dropout=0.0), FAST, "tp2-pp2-dp2,tp4-pp2,pp8,tp8,dp8")


def test_untied_erf_and_grouped_heads(pool):
    grouped = replace(TOY, tied=False, activation="erf", kv_heads=2)
    check(pool, grouped, FAST, "tp4-pp2,tp2-pp2-dp2,tp8")


def test_a_users_model_by_name(pool):
    report = verify(
        "tests.user_model:Tiny", "tests.user_model:plan", "tp2-pp3,tp3-dp2,pp2-dp4,tp5", trial=FAST, pool=pool
    )
    assert [row.verdict for row in report.rows] == ["passed"] * 4, report.rows


def test_frozen_unused_and_scalar_parameters_and_saved_logits(pool):
    report = verify("tests.user_model:Odd", "tests.user_model:odd_plan", "tp2-pp3,tp2-dp2,dp3", trial=FAST, pool=pool)
    assert [row.verdict for row in report.rows] == ["passed"] * 3, report.rows


def test_hugging_face_gpt2_needs_no_plan_of_the_user(pool):
    report = verify(user_model.hugging_face, layouts="tp2-pp2,tp4,dp3", trial=FAST, pool=pool)
    assert [row.verdict for row in report.rows] == ["passed"] * 3, report.rows


def test_a_model_without_plan_is_data_parallel_and_refused_beyond(pool):
    report = verify(user_model.data_parallel_only, layouts="dp2,tp2,pp2", trial=FAST, pool=pool)
    assert [row.verdict for row in report.rows] == ["passed", "refused", "refused"]
    assert "needs a plan table" in report.rows[1].where and "needs a plan with a chain" in report.rows[2].where
    assert report.passed
    assert not verify(user_model.data_parallel_only, layouts="tp2", trial=FAST, pool=pool).passed  # refused only


def test_a_plan_without_head_is_refused_with_the_way_out(pool):
    report = verify(user_model.data_parallel_only, user_model.headless, layouts="tp2", trial=FAST, pool=pool)
    assert report.rows[0].verdict == "refused" and "needs a Head() row" in report.rows[0].where


def test_a_wrong_model_is_found_and_named(pool):
    report = verify("tests.user_model:Wrong", "tests.user_model:plan", "tp2", trial=FAST, pool=pool)
    (row,) = report.rows
    assert row.verdict == "failed" and not report.passed and "differs by" in row.where


def sabotaged():
    """In the workers, the row-parallel bias enters once a rank; its gradient is right all the same."""
    from megacore.parallel.layers import RowParallelLinear

    if not torch.distributed.is_initialized():
        return user_model.Tiny()
    plain = RowParallelLinear.forward

    def forward(self, x):
        return plain(self, x) + (0 if self.bias is None else self.bias * (self.group.size - 1))

    RowParallelLinear.forward = forward
    return user_model.Tiny()


def test_a_wrong_layer_is_found(pool):
    try:
        report = verify(sabotaged, "tests.user_model:plan", "tp2", trial=FAST, pool=pool)
        assert [row.verdict for row in report.rows] == ["failed"]
    finally:
        pool.restart()  # the workers' layers are spoilt


def crash():
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        raise RuntimeError("boom on one rank")
    return user_model.Tiny()


def test_an_exception_of_one_rank_is_a_failure_with_its_traceback(pool):
    report = verify(crash, "tests.user_model:plan", "dp2", trial=FAST, pool=pool)
    assert report.rows[0].verdict == "failed" and "boom on one rank" in report.rows[0].where


def test_a_layout_that_only_some_ranks_refuse_is_a_failure(pool):
    report = verify(refuse_on_one, "tests.user_model:plan", "dp2", trial=FAST, pool=pool)
    assert report.rows[0].verdict == "failed"


def refuse_on_one():
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        raise ValueError("not this rank")
    return user_model.Tiny()


def test_the_module_is_a_function_too(pool):
    assert megacore.verify("gpt", layouts="tp2", trial=replace(FAST, steps=1), pool=pool).passed


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(layouts="tp2-xx3"), "is not like tp2-pp2-dp2"),
        (dict(layouts="tp16"), "needs 16 ranks, world=8"),
        (dict(schedules=("zigzag",)), "schedule='zigzag' is unknown"),
        (dict(trial=Trial(precision="bf16")), "precision='bf16' has no bound"),
        (dict(world=0), "world=0 is not a positive"),
        (
            dict(model=user_model.no_module, plan=user_model.plan),
            "model=no_module gives a int, wanted a plain nn.Module",
        ),
        (dict(model=user_model.Tiny, plan=user_model.small_vocabulary), r"gives \(1, 16, 30\) for ids"),
        (dict(model=user_model.Tiny, plan={"up": 1}), "gives a dict, wanted a Plan"),
        (dict(model="nowhere"), "is not of the form package.module:name"),
        (dict(model="tests.user_model:Nobody"), "cannot be imported"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        verify(**arguments)
    assert "\n" not in str(caught.value)


def test_errors_are_relative_to_the_tensor_or_a_tenth_of_the_largest():
    want = {"big": torch.tensor([10.0, 1.0]), "zero": torch.zeros(2)}
    got = {"big": torch.tensor([10.0, 1.5]), "zero": torch.tensor([0.1, 0.0])}
    error, where = worst(got, want, bound=0.2)
    assert where == "zero" and error == pytest.approx(0.1)  # none is out of bounds: the largest
    assert worst(got, want, bound=0.01)[1] == "big"  # the first that is out of bounds
    nan = {"big": torch.tensor([float("nan"), 1.0]), "zero": torch.zeros(2)}
    assert worst(nan, want, bound=1.0) == (float("inf"), "big")


def test_every_element_must_come_exactly_once():
    like = {"w": torch.zeros(4)}

    def outcome(*pieces):
        return Outcome([], [], [("w", (box,), values) for box, values in pieces], [], {})

    left, right = ((0, 2), torch.ones(2)), ((2, 4), torch.ones(2))
    assert torch.equal(assemble([outcome(left), outcome(right)], lambda o: o.gradients, like)["w"], torch.ones(4))
    with pytest.raises(ValueError, match="2 elements belong to no rank"):
        assemble([outcome(left)], lambda o: o.gradients, like)
    with pytest.raises(ValueError, match="2 to several"):
        assemble([outcome(left, right), outcome(left)], lambda o: o.gradients, like)


def test_layout_names():
    assert read_layouts("tp2-pp2-dp2, tp4", 8) == [Layout(tp=2, pp=2, dp=2), Layout(tp=4)]
    assert len(read_layouts("all", 4)) == 13


def test_the_uneven_toy_has_sizes_that_do_not_divide():
    assert (UNEVEN.layers, UNEVEN.heads, UNEVEN.vocab_size) == (7, 6, 50) and (TOY.layers, TOY.heads) == (8, 8)
    build, plan, init = Subject("gpt-uneven").resolve(0)
    assert plan.vocab_size == 50 and init is not None
