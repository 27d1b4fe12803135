"""How it runs: the plan, compiled programs, state, feeds, and the dispatcher that binds them into exact steps."""

from __future__ import annotations

from .compile import Compiled, Program
from .engine import Engine, StepReport
from .feeds import PreparedStep, Preparer, Window, make_workload
from .plan import EdgePlan, Plan, SectionPlan, make_plan, requests_of
from .reference import reference_gradients

__all__ = [
    "Compiled",
    "EdgePlan",
    "Engine",
    "Plan",
    "PreparedStep",
    "Preparer",
    "Program",
    "SectionPlan",
    "StepReport",
    "Window",
    "make_plan",
    "make_workload",
    "reference_gradients",
    "requests_of",
]
