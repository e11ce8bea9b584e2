"""megacore.full_state_dict: the plain model's state_dict, bit for bit."""

import pytest
import torch
from transformers import GPT2LMHeadModel

import megacore
from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.plan import parallelize
from megacore.parallel.stage import chain_of, cut
from megacore.pipeline import partition
from tests.models.test_hf_gpt2 import IDS, hf, hf_gpt2
from tests.parallel.test_whole import Net, net_plan

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def gpt2(sizes, dtype, everywhere):
    mesh = Mesh.build(Layout(**sizes))
    model = hf().to(dtype)
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = -0.0  # a bit that sums of floats lose
    plan = hf_gpt2.plan(model)
    parallelize(model, mesh, plan)
    if mesh.pp.size > 1:
        links = chain_of(model, plan)
        model = cut(model, links, partition([link.cost for link in links], mesh.pp.size), mesh.pp.index).model
    whole = megacore.full_state_dict(model, mesh, everywhere=everywhere)
    mesh.destroy()
    return whole


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [dict(tp=2), dict(tp=3), dict(tp=2, dp=2), dict(pp=2), dict(tp=2, pp=2)], ids=str)
def test_gpt2_comes_back_bit_for_bit(pool, sizes, dtype, tmp_path):
    model = hf().to(dtype)
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = -0.0
    want = model.state_dict()
    answers = pool.run(gpt2, sizes, dtype, False, world=Layout(**sizes).world)
    filled = [i for i, whole in enumerate(answers) if whole]
    assert filled == ([0] if "dp" not in sizes else [0, 2])  # the first of each copy of the model
    whole = answers[0]
    assert whole.keys() == want.keys()
    for name, tensor in want.items():
        assert whole[name].dtype == tensor.dtype
        assert torch.equal(whole[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    again = GPT2LMHeadModel.from_pretrained(None, config=model.config, state_dict=whole, dtype=dtype)
    again.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path, dtype=dtype)
    assert torch.equal(loaded.eval()(IDS).logits, model.eval()(IDS).logits)


def test_every_rank_may_have_it(pool):
    want = hf().state_dict()
    for whole in pool.run(gpt2, dict(tp=2), torch.float64, True, world=2):
        assert whole.keys() == want.keys()


def net(tp, multiple):
    mesh = Mesh.build(Layout(tp=tp))
    whole = megacore.full_state_dict(parallelize(Net(), mesh, net_plan(multiple=multiple)), mesh)
    mesh.destroy()
    return whole


@pytest.mark.parametrize("tp, multiple", [(1, 8), (2, 8), (4, 16)])
def test_padding_shared_heads_and_buffers(pool, tp, multiple):
    whole, want = pool.run(net, tp, multiple, world=tp)[0], Net().state_dict()
    assert list(whole) == list(want)
    assert all(torch.equal(whole[name], tensor) for name, tensor in want.items())
