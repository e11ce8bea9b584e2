"""MB-50: what takes a parallel model for the whole one gives what one process gives, or one line with the remedy."""

import copy
import io
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel

import megacore
from megacore.comm.mesh import Layout, Mesh
from megacore.parallel.batch import MicroBatch
from megacore.parallel.plan import Plan, parallelize
from megacore.parallel.record import records
from megacore.parallel.styles import Head, KvHeads, QueryHeads, Vocab
from megacore.train.step import TrainStep
from tests.models.test_hf_gpt2 import IDS, TARGETS, hf, hf_gpt2


class Net(nn.Module):
    """One KV head for four query heads, a padded odd vocabulary, a buffer that counts: what full names must survive."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(3)
        self.tok = nn.Embedding(51, 16)
        self.q, self.k, self.o = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 51, bias=False)
        self.register_buffer("seen", torch.tensor(3))
        self.to(dtype)

    def forward(self, ids):
        x = self.tok(ids)
        k = self.k(self.norm(x)).view(*ids.shape, 1, 4)
        q = self.q(self.norm(x)).view(*ids.shape, -1, 4)
        return self.head(self.norm(x + self.o((q * torch.tanh(k)).flatten(-2))))


def net_plan(gather=False, multiple=1):
    rows = {"q": QueryHeads(4, 1), "k": KvHeads(4, 1), "o": QueryHeads(4, 1, row=True)}
    return Plan({"tok": Vocab(), **rows, "head": Head(gather=gather)}, 51, vocab_multiple=multiple)


def split_gpt2(mesh, gather, **change):
    model = hf(**change)
    return parallelize(model, mesh, hf_gpt2.plan(model, gather=gather))


def message(action, *args, **kwargs):
    try:
        action(*args, **kwargs)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was said"


def texts(tp, gather):
    mesh = Mesh.build(Layout(tp=tp))
    model = split_gpt2(mesh, gather).eval()
    found = []
    for sample in (False, True):
        torch.manual_seed(11)
        found.append(model.generate(IDS[:, :4], max_new_tokens=8, do_sample=sample, pad_token_id=0))
    torch.manual_seed(100 + mesh.rank)
    refused = message(model.generate, IDS[:, :4], max_new_tokens=2, do_sample=True, pad_token_id=0)
    other = message(model.generate, IDS[:, :4] + mesh.rank, max_new_tokens=2, pad_token_id=0)
    mesh.destroy()
    return found, refused, other


@pytest.mark.parametrize("tp", [2, 3])
def test_generate_gives_one_processs_text(pool, tp):
    model, want = hf().eval(), []
    for sample in (False, True):
        torch.manual_seed(11)
        want.append(model.generate(IDS[:, :4], max_new_tokens=8, do_sample=sample, pad_token_id=0))
    for found, refused, other in pool.run(texts, tp, True, world=tp):
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
        assert "torch.manual_seed" in refused
        assert "different inputs" in other


def labelled(tp):
    mesh = Mesh.build(Layout(tp=tp))
    model = split_gpt2(mesh, True).train()
    loss = model(IDS, labels=TARGETS).loss
    loss.backward()
    recs, grads = records(model, mesh), {}
    for name, p in model.named_parameters():
        grads[name] = torch.zeros(recs[name].shape, dtype=p.dtype)
        recs[name].add_into_full(p.grad, grads[name], recs[name].counted())
    mesh.destroy()
    return loss.detach(), grads


@pytest.mark.parametrize("tp", [2, 3])
def test_labels_give_one_processs_loss_and_gradients(pool, tp):
    model = hf().train()
    want = model(IDS, labels=TARGETS).loss
    want.backward()
    answers = pool.run(labelled, tp, world=tp)
    for loss, _ in answers:
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(sum(g[name] for _, g in answers), p.grad, rtol=1e-11, atol=1e-14, msg=name)


def gathered(tp, multiple):
    mesh = Mesh.build(Layout(tp=tp))
    model = parallelize(Net(), mesh, net_plan(True, multiple))
    logits = model(IDS)
    mesh.destroy()
    return logits.detach()


@pytest.mark.parametrize("tp, multiple", [(2, 1), (2, 8), (4, 1), (4, 16)])
def test_gathered_logits_are_those_of_the_true_columns(pool, tp, multiple):
    want = Net()(IDS)
    for logits in pool.run(gathered, tp, multiple, world=tp):
        torch.testing.assert_close(logits, want, rtol=1e-12, atol=1e-12)


def refusals():
    mesh = Mesh.build(Layout(tp=2))
    said = {}
    for copied in (False, True):
        model = split_gpt2(mesh, False)
        model = copy.deepcopy(model) if copied else model
        said |= {
            ("generate", copied): message(model.generate, IDS),
            ("labels", copied): message(model, IDS, labels=TARGETS),
            ("save_pretrained", copied): message(model.save_pretrained, "folder"),
            ("push_to_hub", copied): message(model.push_to_hub, "x"),
            ("inner save", copied): message(model.transformer.save_pretrained, "folder"),
            ("resize", copied): message(model.resize_token_embeddings, 60),
            ("DDP", copied): message(DistributedDataParallel, model),
            ("DDP around it", copied): message(DistributedDataParallel(nn.Sequential(model)), IDS),
        }
    untouched = hf()(IDS, labels=TARGETS).loss.item()
    mesh.destroy()
    return said, untouched


REMEDIES = {
    "generate": r"Head\(gather=True\)",
    "labels": r"Head\(gather=True\)",
    "save_pretrained": "full_state_dict",
    "push_to_hub": "full_state_dict",
    "inner save": "full_state_dict",
    "resize": "before parallelize",
    "DDP": r"process_group=mesh.dp.pg",
    "DDP around it": r"process_group=mesh.dp.pg",
}


def test_what_cannot_be_right_stops_with_the_remedy_on_every_rank(pool):
    for said, untouched in pool.run(refusals, world=2):
        assert untouched == hf()(IDS, labels=TARGETS).loss.item()  # no other model of the process is guarded
        for (what, copied), text in said.items():
            assert re.search(REMEDIES[what], text), (what, copied, text)
            assert "\n" not in text


def sharded_over_the_world():
    from torch.distributed.fsdp import fully_shard

    mesh = Mesh.build(Layout(tp=2))
    model = split_gpt2(mesh, False, vocab_size=52)
    text = message(lambda: fully_shard(model)(IDS))
    mesh.destroy()
    return text


def test_fsdp_over_the_world_stops_with_the_remedy(pool):
    for text in pool.run(sharded_over_the_world, world=2):
        assert "FSDP" in text and "mesh.dp.pg" in text


def replicas():
    """tp 2 x dp 2: each replica its half of the batch, DDP over dp; gradients as full tensors of the first replica."""
    mesh = Mesh.build(Layout(tp=2, dp=2))
    model = split_gpt2(mesh, True).train()
    ddp = DistributedDataParallel(model, process_group=mesh.dp.pg)
    rows = slice(mesh.dp.index, mesh.dp.index + 1)
    ddp(IDS[rows], labels=TARGETS[rows]).loss.backward()
    norm = megacore.clip_grad_norm_(ddp, mesh, 0.5)
    recs, grads = records(model, mesh), {}
    for name, p in model.named_parameters():
        grads[name] = torch.zeros(recs[name].shape, dtype=p.dtype)
        recs[name].add_into_full(p.grad, grads[name], recs[name].counted() if mesh.dp.index == 0 else ())
    mesh.destroy()
    return norm, grads


def test_ddp_over_dp_gives_serial_gradients(pool):
    """DDP averages: with as many counted tokens on each replica, that is the mean over all of them."""
    model = hf().train()
    model(IDS, labels=TARGETS).loss.backward()
    want = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    answers = pool.run(replicas, world=4)
    for norm, _ in answers:
        torch.testing.assert_close(norm, want, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(sum(g[name] for _, g in answers), p.grad, rtol=1e-11, atol=1e-14, msg=name)


def clipped_by_torch():
    mesh = Mesh.build(Layout(tp=2))
    model = split_gpt2(mesh, True).train()
    adam = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    for clip in (
        lambda: megacore.clip_grad_norm_(model, mesh, 0.5),
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5),
    ):
        said.append(message(lambda: model(IDS, labels=TARGETS).loss.backward()))
        clip()
        adam.step()
        adam.zero_grad()
    said.append(message(model, IDS, labels=TARGETS))
    mesh.destroy()
    return said


def test_torchs_own_clipping_is_found_at_the_next_forward(pool):
    for first, second, third in pool.run(clipped_by_torch, world=2):
        assert first == second == "nothing was said"
        assert "megacore.clip_grad_norm_" in third and "differs between tp ranks" in third


def differently_built():
    mesh = Mesh.build(Layout(tp=2))
    model = Net()
    with torch.no_grad():
        model.o.bias.add_(mesh.rank)
    parallelize(model.eval(), mesh, net_plan())
    with torch.no_grad():
        text = message(model, IDS)
    mesh.destroy()
    return text


def test_ranks_that_built_different_weights_are_told_at_the_first_forward(pool):
    for text in pool.run(differently_built, world=2):
        assert text.startswith("o.bias (1 of") and "the same seed" in text


def trained(gather):
    mesh = Mesh.build(Layout(tp=2))
    whole = MicroBatch.of(IDS, TARGETS)
    plan = net_plan(gather)
    steps = TrainStep(Net, plan, mesh, precision="fp64", fused_loss=False)
    losses = [steps.step([whole], whole.valid, 1e-2).loss for _ in range(3)]
    mesh.destroy()
    return losses


def test_a_train_step_keeps_logits_split_whatever_the_row_says(pool):
    want = F.cross_entropy(Net()(IDS).flatten(0, 1), TARGETS.flatten()).item()
    split, gathered_row = pool.run(trained, False, world=2), pool.run(trained, True, world=2)
    assert split == gathered_row
    assert split[0][0] == pytest.approx(want, rel=1e-12)


def shards():
    mesh = Mesh.build(Layout(tp=2))
    model = parallelize(Net(), mesh, net_plan())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, buffer.getvalue(), group=mesh.tp.pg)
    own, other = (torch.load(io.BytesIO(everyone[i]), weights_only=True) for i in (mesh.rank, 1 - mesh.rank))
    said = message(model.load_state_dict, own), message(model.load_state_dict, other)
    plain = message(Net().load_state_dict, own)
    mesh.destroy()
    return *said, plain


def test_a_shard_goes_to_its_own_rank_only(pool):
    for rank, (own, other, plain) in enumerate(pool.run(shards, world=2)):
        assert own == "nothing was said"
        assert f"shard of tp rank {1 - rank} of 2" in other
        assert "size mismatch" in plain


def test_the_plain_loss_takes_gathered_logits(pool):
    for loss in pool.run(plain_loss, world=2):
        torch.testing.assert_close(loss, F.cross_entropy(Net()(IDS).flatten(0, 1), TARGETS.flatten()).detach())


def plain_loss():
    mesh = Mesh.build(Layout(tp=2))
    logits = parallelize(Net(), mesh, net_plan(True))(IDS)
    mesh.destroy()
    return F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten()).detach()


def test_a_group_of_one_is_not_guarded():
    model = hf()
    parallelize(model, Mesh(), hf_gpt2.plan(model))
    assert "generate" not in vars(model) and "save_pretrained" not in vars(model)
    assert isinstance(model, GPT2LMHeadModel) and not model._forward_pre_hooks
