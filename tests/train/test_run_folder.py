"""What a job finds in its folder and says of it: another job, other settings, a report that is missing; and which
checkpoint a path means (MB-44)."""

import json
import shutil

import pytest

from megacore.train.checkpoint import read as read_checkpoint
from megacore.train.checkpoint import read_full
from megacore.train.lock import RunLock
from megacore.train.sample import open_checkpoint
from tests.train.test_job import config, data, jobs, options  # noqa: F401  fixtures

WEIGHT = "model/blocks.0.attn.qkv.weight"


@pytest.mark.parametrize(
    ("fault", "field"),
    [
        ("other rate", "optim.lr is 0.01 on ranks 0, 2, 3 and 0.5 on rank 1"),
        ("other tokens", "data.dir train.bin is"),
        ("other flag", "--fresh is False on ranks 0, 1, 3 and True on rank 2"),
        ("other layout", "parallel.tp is 2 on ranks 0, 1, 2 and 1 on rank 3"),
    ],
)
def test_ranks_that_were_given_different_things_do_not_train(jobs, config, tmp_path, fault, field):  # noqa: F811
    ended = jobs.run(4, "train", config, *options(("tp=2", "dp=2")), fault=fault)
    assert all(code not in (0, -9) for code in ended.codes), ended.output
    assert field in ended.said[0] and len(ended.said[0].splitlines()) == 1, ended.output
    assert not any(ended.said[1:]) and not (tmp_path / "run/metrics.jsonl").exists(), ended.output


def test_what_changed_since_the_checkpoint_is_said(jobs, config):  # noqa: F811
    first = jobs.run(2, "train", config, *options(("tp=2",), stop_at=2))
    assert first.codes == [0] * 2 and "changed since" not in first.output, first.output
    ended = jobs.run(2, "train", config, "--optim.lr=2e-2", *options(("dp=2",), steps=10, stop_at=4))
    assert ended.codes == [0] * 2, ended.output
    line = next(line for line in ended.said[0].splitlines() if "changed since the checkpoint" in line)
    for change in (
        "parallel.tp 2 -> 1",
        "parallel.dp 1 -> 2",
        "optim.lr 0.01 -> 0.02",
        "run.steps 8 -> 10",
        "new curve",
    ):
        assert change in line, line


def test_a_run_that_cannot_be_validated_says_so(jobs, config, tmp_path, data):  # noqa: F811
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("train.bin", "train.idx", "train.json", "tokenizer.json"):
        (copy / name).write_bytes((data / name).read_bytes())
    ended = jobs.run(1, "train", config, f"--data.dir={copy}", "--run.steps=2", "--nproc=1")
    assert ended.codes == [0] and "no validation in this run" in ended.said[0], ended.output


def test_two_jobs_in_one_folder(jobs, config, tmp_path):  # noqa: F811
    with RunLock(tmp_path / "run") as lock:
        lock.take()
        ended = jobs.run(2, "train", config, *options(("tp=2",)))
    assert ended.codes == [2] * 2 and all("is in use by process" in text for text in ended.said), ended.output
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["run.lock"]


def test_a_run_killed_before_its_report_gets_it_on_the_rerun(jobs, config, tmp_path):  # noqa: F811
    whole_run = jobs.run(2, "train", config, *options(("tp=2",)))
    assert whole_run.codes == [0] * 2, whole_run.output
    report = tmp_path / "run/report.json"
    told = json.loads(report.read_text())
    report.unlink()
    again = jobs.run(2, "train", config, *options(("tp=2",)))
    assert again.codes == [0] * 2 and "made afterwards" in again.said[0], again.output
    made = json.loads(report.read_text())
    for name in ("done", "steps", "tokens", "train_loss", "valid_loss", "sample"):
        assert made[name] == told[name], name
    third = jobs.run(2, "train", config, *options(("tp=2",)))
    assert third.codes == [0] * 2 and "closing report" not in third.said[0], third.output


def test_a_sample_is_of_the_checkpoint_that_the_path_names(jobs, config, tmp_path):  # noqa: F811
    """MB-44: copies, links, folders set aside; the step that the content says, the weights of the path given."""
    ended = jobs.run(1, "train", config, "--nproc=1", "--run.stop-at=4", "--run.save-every=2")
    assert ended.codes == [0], ended.output
    folder = tmp_path / "run/checkpoints"
    two, four = folder / "step-00000002", folder / "step-00000004"

    def text(path) -> str:
        sampled = jobs.run(1, "sample", str(path), "--prompt", "alpha", "--tokens", "12", "--temperature", "0")
        assert sampled.codes == [0], sampled.output
        return sampled.said[0]

    def weight(found):
        return read_full(found, [WEIGHT])[WEIGHT]

    right = {2: text(two), 4: text(four)}
    assert not weight(read_checkpoint(two)).equal(weight(read_checkpoint(four)))
    aside = folder / "step-00000004.skipped"
    for other in (folder / "best", aside, folder / "step-00000099", tmp_path / "elsewhere"):
        shutil.copytree(two, other)
    (tmp_path / "link").symlink_to(two)
    for path in (folder / "best", aside, folder / "step-00000099", tmp_path / "elsewhere", tmp_path / "link"):
        assert read_checkpoint(path).step == 2
        assert weight(open_checkpoint(path)).equal(weight(read_checkpoint(two)))
        assert text(path) == right[2]
    shutil.rmtree(folder / "step-00000099")
    assert text(tmp_path / "run") == right[4]
