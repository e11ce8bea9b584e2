"""Two jobs in one folder: the second is told who holds it, and nothing is changed."""

import os
import subprocess
import sys

import pytest

from megacore.train.lock import NAME, RunLock, check_unlocked

HOLD = """
import sys, time
from pathlib import Path
from megacore.train.lock import RunLock
RunLock(Path(sys.argv[1])).take()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.wait()


def test_a_second_job_is_told_who_holds_the_folder(tmp_path, holder):
    for refused in (lambda: check_unlocked(tmp_path, 0.1), lambda: RunLock(tmp_path).take(0.1)):
        with pytest.raises(ValueError, match=rf"in use by process {holder.pid} on .*; wait until it has ended"):
            refused()


def test_the_lock_goes_with_the_process_however_it_ends(tmp_path, holder):
    holder.kill()
    holder.wait()
    check_unlocked(tmp_path, 0.1)
    with RunLock(tmp_path) as lock:
        lock.take(0.1)
        assert str(os.getpid()) in (tmp_path / NAME).read_text()
    RunLock(tmp_path).take(0.1)


def test_ranks_that_look_do_not_see_each_other(tmp_path):
    with RunLock(tmp_path) as lock:
        lock.take()
    import fcntl

    with (tmp_path / NAME).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        check_unlocked(tmp_path, 0.1)


def test_a_lock_that_says_nothing_is_still_one(tmp_path, holder):
    (tmp_path / NAME).write_text("[" * 5000)
    with pytest.raises(ValueError, match="another job"):
        check_unlocked(tmp_path, 0.1)


def test_a_folder_that_nobody_has_used_is_free(tmp_path):
    check_unlocked(tmp_path / "new", 0.0)
