"""When it runs: tasks, costs, policies and the loop that says what may start. Loads no JAX."""

from __future__ import annotations

from .bounds import lower_bound
from .cutting import Microbatch, cut
from .fitting import fitted_call, fitted_cost, fitted_workload
from .gap import Gap, gap_of, utilization_of
from .lockstep import Lockstep
from .loop import DEVICES, Clock, Executor, Progress, issue, run
from .placement import place
from .policies import InOrder, Policy, Sequential, adaptive
from .queues import IN_FLIGHT
from .tasks import Schedule, Task
from .wavefront import Wavefront
from .workload import Cost, EdgeWork, SampleWork, SectionWork, Workload

__all__ = [
    "DEVICES",
    "IN_FLIGHT",
    "Clock",
    "Cost",
    "EdgeWork",
    "Executor",
    "Gap",
    "InOrder",
    "Lockstep",
    "Microbatch",
    "Policy",
    "Progress",
    "SampleWork",
    "Schedule",
    "SectionWork",
    "Sequential",
    "Task",
    "Wavefront",
    "Workload",
    "adaptive",
    "cut",
    "fitted_call",
    "fitted_cost",
    "fitted_workload",
    "gap_of",
    "issue",
    "lower_bound",
    "place",
    "run",
    "utilization_of",
]
