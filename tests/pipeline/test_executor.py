import pytest
import torch

from megacore.comm.mesh import Group
from megacore.pipeline import SCHEDULES, Action, Executor, gpipe, simulate
from megacore.pipeline.messages import Headers, Mailbox, Spec, decode, encode, header_of
from tests.pipeline import runs
from tests.pipeline.chain import MB, Stage, adders, layers, loss, microbatches, serial

COUNTS = (1, 2, 3, 4, 5, 7)


def merged(results):
    return [f"rank {rank}: {text}" for rank, wrong in enumerate(results) for text in wrong]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_any_layers_stages_and_microbatches(pool, stages):
    results = pool.run(runs.sweep, stages, tuple(SCHEDULES), (4, 5, 6, 7, 3), COUNTS, world=stages, timeout=60)
    assert not merged(wrong for wrong, _ in results)
    assert {ran for _, ran in results} == {2 * 2 * (5 if stages < 4 else 4) * len(COUNTS)}


def test_thirty_layers_over_four(pool):
    results = pool.run(runs.sweep, 4, tuple(SCHEDULES), (30,), (5,), world=4, timeout=60)
    assert not merged(wrong for wrong, _ in results)


@pytest.mark.parametrize("stages", [2, 4])
def test_random_sleeps(pool, stages):
    results = pool.run(runs.sweep, stages, tuple(SCHEDULES), (5,), (1, 3, 5), True, world=stages, timeout=60)
    assert not merged(wrong for wrong, _ in results)


def actions(text):
    """'F0.1' is F of micro-batch 0 in chunk 1."""
    found = []
    for word in text.split():
        microbatch, _, chunk = word[1:].partition(".")
        found.append(Action(word[0], int(chunk or 0), int(microbatch)))
    return found


WRITTEN = {
    # name: (stages, chunks, micro-batches, one line per rank)
    "interleaved": (
        2,
        2,
        4,
        "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ),
    "interleaved over three": (
        3,
        2,
        3,
        "F0 F1 F2 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0 B1 B2",
        "F0 F1 F2 F0.1 F1.1 B0.1 F2.1 B1.1 B2.1 B0 B1 B2",
        "F0 F1 F2 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 B0 B1 B2",
    ),
    "zero bubble": (
        2,
        1,
        4,
        "F0 F1 B0 F2 W0 B1 F3 W1 B2 W2 B3 W3",
        "F0 B0 F1 W0 B1 F2 B2 W1 F3 B3 W2 W3",
    ),
    "zero bubble over three": (
        3,
        1,
        3,
        "F0 F1 F2 B0 W0 B1 B2 W1 W2",
        "F0 F1 B0 F2 B1 W0 B2 W1 W2",
        "F0 B0 F1 B1 F2 B2 W0 W1 W2",
    ),
    "consumed in another order than made": (
        2,
        1,
        3,
        "F0 F1 F2 B0 B1 B2",
        "F1 F0 B0 B1 F2 B2",
    ),
    "interleaved with some weights apart": (
        2,
        2,
        2,
        "F0 F1 F0.1 F1.1 B0.1 B1.1 W0.1 B0 W1.1 B1",
        "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 W1.1 B1 W0 W1",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_schedule_written_by_hand(pool, name):
    stages, chunks, m, *lines = WRITTEN[name]
    schedule = [actions(line) for line in lines]
    simulate(schedule, chunks, microbatches=m)
    assert not merged(pool.run(runs.written, schedule, stages, chunks, m, world=stages, timeout=60))


LISTS = {name: ([actions(line) for line in lines], chunks, m) for name, (_, chunks, m, *lines) in WRITTEN.items()}
for p, m in ((2, 5), (3, 2), (4, 6)):
    LISTS |= {f"{n} {p} {m}": ([make(r, p, m) for r in range(p)], 1, m) for n, make in SCHEDULES.items()}


@pytest.mark.parametrize("name", LISTS)
def test_both_ends_post_in_one_order(name, monkeypatch):
    """Where messages of a pair match strictly as posted (NCCL), one that is posted out of turn waits for ever or takes
    another's place. Every rank runs here alone, on messages that hold nothing, and notes what it posts."""
    lists, chunks, m = LISTS[name]
    p, noted = len(lists), {}

    def note(mail, message, item, tensor):
        pair = (message.kind, *sorted((message.source, message.target)))
        if item >= 2:
            noted.setdefault(pair, {}).setdefault(mail.groups["F"].index, []).append(message.key)
        return Done()

    monkeypatch.setattr(Mailbox, "_isend", note)
    monkeypatch.setattr(Mailbox, "_irecv", note)
    for rank in range(p):
        group = Group(tuple(range(p)), rank)
        executor = Executor([Double() for _ in range(chunks)], group, group, lambda r, p, m: lists[r])
        known = {(s, (2, n), True): (Spec("x", "float32", (1,), True),) for s in range(p * chunks) for n in (3, 5)}
        executor._headers.known.update(known)
        executor.step(microbatches(m), lambda outputs, mb: outputs["x"].sum())
    assert len(noted) == 2 * (p if chunks > 1 and p > 2 else p - 1)
    for pair, (one, other) in ((pair, ends.values()) for pair, ends in noted.items()):
        assert one == other, pair


class Done:
    def wait(self):
        return True


class Double:
    def forward(self, tensors, mb):
        return {"x": 2 * tensors.get("x", torch.ones(1, requires_grad=True))}


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_one_rank_needs_no_communication(chunks):
    chain, batches = layers(4), microbatches(3)
    want = serial(chain, batches)
    parts = [Stage(chain, cut) for cut in (range(0, 4), *((range(0, 2), range(2, 4)) if chunks == 2 else ()))]
    parts = {1: parts, 2: parts[1:], 3: [Stage(chain, cut) for cut in (range(0, 1), range(1, 3), range(3, 4))]}[chunks]
    executor = Executor(parts, schedule=runs.chunked_gpipe(chunks))
    assert runs.same(executor.evaluate(batches, loss), want)
    assert runs.same(executor.step(batches, loss), want)
    assert not [text for part in parts for text in part.difference(chain)]
    assert executor.wait_seconds == 0


@pytest.mark.parametrize("pattern", ["110000", "111111", "111110", "011110", "001100", "100001"])
def test_frozen_layers(pool, pattern):
    assert not merged(pool.run(runs.frozen, 3, [c == "1" for c in pattern], world=3, timeout=60))


def test_thawed_layers_train_after_forget(pool):
    assert not merged(pool.run(runs.thawed, world=2, timeout=60))


def test_change_of_header_is_refused():
    headers, x = Headers(), torch.ones(2, 3, dtype=torch.bfloat16)
    key = (1, (2, 3), True)
    header = header_of({"hidden": x, "ids": torch.ones(0, dtype=torch.int64)})
    assert decode(encode(header)) == header
    assert headers.announce(key, header)
    assert not headers.announce(key, header)
    with pytest.raises(ValueError, match=r"stage 1.*forget\(\)"):
        headers.announce(key, header_of({"hidden": x.requires_grad_(), "ids": torch.ones(0, dtype=torch.int64)}))


@pytest.mark.parametrize("split", [False, True])
def test_unused_strided_and_empty_tensors_cross(pool, split):
    """The gradient of a sum is expanded, and autograd.grad hands it on as such."""
    lists = [gpipe(rank, 3, 3) for rank in range(3)]
    if split:
        lists = [actions(line) for line in WRITTEN["zero bubble over three"][3:]]
    assert not merged(pool.run(runs.passing, lists, world=3, timeout=60))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_frees_what_its_backward_is_done_with(pool, schedule):
    for peak, simulated, after in pool.run(runs.live, schedule, 3, 6, world=3, timeout=60)[1:]:
        assert (peak, after) == (simulated, 0)


def test_waiting_is_measured(pool):
    assert pool.run(runs.waits, 0.2, world=2, timeout=60)[1] >= 0.1


@pytest.mark.parametrize("split", [False, True])
def test_last_weight_gradient_is_announced(split):
    chain, events = adders(2), []
    parts = [Stage(chain, range(0, 1)), Stage(chain, range(1, 2))]
    for chunk, part in enumerate(parts):
        for p in part.module.parameters():
            p.register_post_accumulate_grad_hook(lambda _, chunk=chunk: events.append(f"gradient {chunk}"))
    lines = "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1" + (" W0 W0.1 W1.1 W1" if split else "")
    executor = Executor(parts, schedule=lambda rank, p, m: actions(lines))
    executor.step(microbatches(2), loss, on_last=lambda chunk: events.append(f"last {chunk}"))
    chunk0, chunk1 = ([e for e in events if e.endswith(c)] for c in "01")
    assert chunk0 == ["gradient 0", "last 0", "gradient 0"]
    assert chunk1 == ["gradient 1", "last 1", "gradient 1"]


def test_exceptions_propagate():
    class Broken(Stage):
        def forward(self, tensors, mb):
            raise ValueError("sample 7")

    with pytest.raises(ValueError, match="sample 7"):
        Executor([Broken(layers(1), range(1))]).step(microbatches(2), loss)


def test_refusals():
    stage = Stage(layers(1), range(1))
    with pytest.raises(ValueError, match="microbatches is empty"):
        Executor([stage]).step([], loss)
    with pytest.raises(ValueError, match="chunks is empty"):
        Executor([])
    with pytest.raises(ValueError, match="up="):
        Executor([stage], Group((0, 1), 0), Group((0, 2), 0))
    with pytest.raises(ValueError, match="missing"):
        Executor([stage], schedule=lambda r, p, m: gpipe(r, p, m)[:-1]).step(microbatches(2), loss)
    with pytest.raises(ValueError, match="only tensors cross"):
        Executor([WithNumber(layers(2), range(1)), stage], schedule=runs.chunked_gpipe(2)).step(microbatches(1), loss)


class WithNumber(Stage):
    def forward(self, tensors, mb: MB):
        return {"number": 3}


def test_no_microbatches_to_evaluate():
    assert Executor([Stage(layers(1), range(1))]).evaluate([], loss) == []
