"""`verify` judges the first wrong thing, by name; says in one line what it cannot judge; and does not cry wolf."""

from dataclasses import replace

import pytest
import torch

from megacore.subject import TOY, Trial
from megacore.verify import verify
from tests import hard_models, user_model
from tests.parallel import partial_models

FAST = Trial(micro_batches=2, global_batch=8)


def row(pool, model, layout="tp2", plan=hard_models.plan, trial=FAST):
    (found,) = verify(model, plan, layout, trial=trial, pool=pool).rows
    return found


def spoilt(pool, model, layout="tp2", **more):
    try:
        return row(pool, model, layout, **more)
    finally:
        pool.restart()  # the workers' optimizer is spoilt


@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2", "dp3"])
def test_rounding_that_adamw_amplifies_is_no_fault(pool, layout):
    """With eps far below the gradients' rounding, a key bias (exact gradient zero) moves by the whole rate in a random
    direction: weights differ by 1e-3 from the serial ones, and every step is right."""
    toy = replace(TOY, dropout=0.0, layers=2)
    found = row(pool, toy, layout, plan=None, trial=replace(FAST, eps=1e-25))
    assert found.verdict == "passed", found
    assert found.weight < 1e-12 and found.grad < 1e-12  # of each step by itself


def test_a_wrong_gradient_is_named_not_the_loss_of_a_later_step(pool):
    found = row(pool, hard_models.scaled_gradient)
    assert found.verdict == "failed" and found.where.startswith("gradient of norm.weight differs by"), found.where


@pytest.mark.parametrize("eps", [1e-8, 1e-25])
def test_a_weight_that_is_off_by_1e_9_still_fails(pool, eps):
    found = spoilt(pool, hard_models.wrong_update, trial=replace(FAST, eps=eps))
    assert found.verdict == "failed", found
    assert found.where.startswith("weight ") and "after step 1" in found.where
    assert 1e-12 < found.weight < 1e-7


def test_the_step_that_is_wrong_is_told(pool):
    found = spoilt(pool, hard_models.wrong_later)
    assert found.verdict == "failed" and "after step 2" in found.where, found.where


def test_copies_that_part_are_named_before_the_losses_that_follow(pool):
    found = spoilt(pool, hard_models.drifting_copy)
    assert found.verdict == "failed"
    assert found.where == "weight norm.bias: ranks 0 and 1 hold copies with different bits"


@pytest.mark.parametrize(
    "model, plan, words",
    [
        (hard_models.NoDouble, hard_models.plan, r"no fp64 kernel in act \(SingleOnly\) .*picky_cpu.*--precision fp32"),
        (hard_models.CastsInside, hard_models.plan, r"computes in float32 inside act \(Narrow\).*--precision fp32"),
        (hard_models.Broken, hard_models.plan, r"fails in one process in act \(Linear\): RuntimeError"),
        (
            hard_models.OwnDropout,
            hard_models.unkeyed,
            r"the same logits twice.*drop \(Dropout, p=0.1\).*Keyed",
        ),
        (hard_models.factory_that_raises, hard_models.plan, "model=factory_that_raises raises KeyError"),
        (hard_models.Pair, hard_models.plan, "model gives a tuple for ids"),
    ],
)
def test_what_cannot_be_judged_is_said_in_one_line_before_any_layout(model, plan, words):
    if plan is hard_models.plan and model is hard_models.factory_that_raises:
        plan = hard_models.plan(None)
    with pytest.raises(ValueError, match=words) as caught:
        verify(model, plan, "tp2", world=2, trial=FAST)  # no pool: it must not come to that
    assert "\n" not in str(caught.value)


def test_without_fp64_kernels_fp32_is_verified(pool):
    assert row(pool, hard_models.NoDouble, trial=replace(FAST, precision="fp32")).verdict == "passed"


def test_tables_in_fp32_that_no_activation_enters_are_fine(pool):
    assert row(pool, hard_models.Constants).verdict == "passed"


def test_batch_statistics_are_hinted_at(pool):
    found = row(pool, hard_models.Batchy)
    assert found.verdict == "failed" and "\n" not in found.where
    assert "depend on the other samples of its micro-batch, by bn (BatchNorm1d)" in found.where
    assert row(pool, hard_models.Batchy, trial=replace(FAST, micro_batches=1)).verdict == "passed"


@pytest.mark.parametrize("model", [partial_models.qk_norm, partial_models.router, partial_models.columns])
def test_partial_parameters_with_their_style_pass(pool, model):
    for layout in ("tp2", "tp2-dp2", "tp3"):
        assert row(pool, model, layout, plan=partial_models.mended).verdict == "passed", layout


@pytest.mark.parametrize(
    "model, words",
    [
        (partial_models.router, "the output of mlp.router is whole and meets"),
        (partial_models.prelu, "mlp.act.weight is whole on every rank"),
    ],
)
def test_partial_parameters_without_it_are_named_in_one_line(pool, model, words):
    found = row(pool, model, plan=partial_models.bare)
    assert found.verdict == "failed" and found.where.startswith(words) and "\n" not in found.where


def qwen3():
    """Hugging Face's Qwen3; its RMSNorms, which compute in fp32 whatever comes, replaced by torch's."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=40, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Qwen3RMSNorm":
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            torch.nn.init.normal_(norm.weight, 1.0, 0.1)
            model.set_submodule(name, norm)
    model.config.use_cache = False
    return model


def qwen3_as_it_is():
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen3ForCausalLM(qwen3().config)


def qwen3_plan(model):
    from megacore.parallel.plan import Plan
    from megacore.parallel.styles import Column, Head, KvHeads, QueryHeads, Row, Vocab

    at = "model.layers.*"
    table = {
        "model.embed_tokens": Vocab(),
        f"{at}.self_attn.q_proj": QueryHeads(4, 2),
        f"{at}.self_attn.k_proj": KvHeads(4, 2),
        f"{at}.self_attn.v_proj": KvHeads(4, 2),
        f"{at}.self_attn.o_proj": QueryHeads(4, 2, row=True),
        f"{at}.mlp.gate_proj": Column(),
        f"{at}.mlp.up_proj": Column(),
        f"{at}.mlp.down_proj": Row(),
        "lm_head": Head(),
    }
    return Plan(table, vocab_size=40)


@pytest.mark.parametrize("layout", ["tp2", "tp2-dp2"])
def test_the_norms_of_qwen3_are_summed_by_themselves(pool, layout):
    found = row(pool, qwen3, layout, plan=qwen3_plan)
    assert found.verdict == "passed", found


def test_qwen3_as_it_is_computes_in_fp32(pool):
    with pytest.raises(ValueError, match=r"computes in float32 inside model.layers.0.input_layernorm \(Qwen3RMSNorm\)"):
        row(pool, qwen3_as_it_is, plan=qwen3_plan)
    found = row(pool, qwen3_as_it_is, plan=qwen3_plan, trial=replace(FAST, precision="fp32"))
    assert found.verdict == "passed", found


def test_a_wrong_forward_is_the_loss_of_the_first_step(pool):
    found = row(pool, user_model.Wrong, plan=user_model.plan)
    assert found.where.startswith("loss of step 1 differs by"), found.where
