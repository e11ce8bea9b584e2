import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megacore.comm.workers import WorkerError


def rank_sum():
    if not dist.is_initialized():
        return 0.0
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError("sample 7")
    dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep_for(seconds):
    time.sleep(seconds)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_each_task_has_a_world_of_its_own(pool, world):
    assert pool.run(rank_sum, world=world) == [world * (world - 1) / 2] * world


def test_a_failure_carries_the_ranks_traceback_and_leaves_the_pool_usable(pool):
    with pytest.raises(WorkerError, match="(?s)rank 2 of 4.*sample 7"):
        pool.run(fail_on, 2, world=4)
    assert pool.run(rank_sum, world=2) == [1.0, 1.0]


def test_a_killed_rank_is_reported(pool):
    with pytest.raises(WorkerError, match="exit code -9|Connection closed|Connection reset"):
        pool.run(die_on, 1, world=3)
    assert pool.run(rank_sum, world=8) == [28.0] * 8


def test_a_hang_ends_in_a_timeout(pool):
    with pytest.raises(TimeoutError, match="ranks \\[0, 1\\]"):
        pool.run(sleep_for, 60, world=2, timeout=1.0)
