"""Pipelines: schedules as data, a simulator that proves them, a partition of the model, and one executor."""

from megacore.pipeline.execute import Executor
from megacore.pipeline.partition import partition
from megacore.pipeline.schedule import SCHEDULES, Action, Schedule, forward_only, gpipe, one_f_one_b
from megacore.pipeline.simulate import Report, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Executor",
    "Report",
    "Schedule",
    "forward_only",
    "gpipe",
    "one_f_one_b",
    "partition",
    "simulate",
]
