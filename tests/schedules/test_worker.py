"""Schedules made in another process are the same, and nothing that happens to it ends a run."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from workload_support import Refusing, Talkative, raw_file

from maestro_jax.errors import ScheduleError
from maestro_jax.schedules import InOrder, Schedule, Workload
from maestro_jax.schedules import worker as worker_module
from maestro_jax.schedules.worker import Worker

WORKLOAD = Workload.from_json(raw_file("mllm_tiny_batch"))


def test_the_schedule_is_that_of_this_process() -> None:
    worker = Worker()
    assert worker.schedule(InOrder(), WORKLOAD).digest() == InOrder().schedule(WORKLOAD).digest()
    first = worker._process
    assert worker.schedule(Talkative(), WORKLOAD).digest() == InOrder().schedule(WORKLOAD).digest()
    assert first is not None
    assert worker._process is first
    worker.close()
    assert first.poll() is not None


def test_errors_are_passed_on() -> None:
    worker = Worker()
    with pytest.raises(ScheduleError, match=r"no\.") as caught:
        worker.schedule(Refusing(), WORKLOAD)
    assert caught.value.wanted == "a"
    assert worker.schedule(InOrder(), WORKLOAD).tasks
    worker.close()


def test_a_process_that_died_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    worker.schedule(InOrder(), WORKLOAD)
    assert worker._process is not None
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    with caplog.at_level(logging.WARNING):
        assert worker.schedule(InOrder(), WORKLOAD).tasks
    assert "made in this process" in caplog.text
    assert worker._process is None
    assert worker.schedule(InOrder(), WORKLOAD).tasks
    assert worker._process is not None
    worker.close()


def test_it_loads_no_jax_and_does_not_run_a_script_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import json, sys
        print("script runs")
        from maestro_jax.schedules import InOrder, Workload
        from maestro_jax.schedules.worker import Worker
        class Mine:
            def schedule(self, workload):
                return InOrder().schedule(workload)
        workload = Workload.from_json(json.load(open(sys.argv[1])))
        worker = Worker()
        here = worker.schedule(Mine(), workload)
        assert worker._process is None
        there = worker.schedule(InOrder(), workload)
        assert here.digest() == there.digest()
        maps = open(f"/proc/{worker._process.pid}/maps").read()
        print("jax" if "jaxlib" in maps else "no jax")
        """)
    )
    path = Path(__file__).parent / "workloads" / "mllm_tiny_batch.json"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, str(script), str(path)], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["script runs", "no jax"]


def test_an_interrupt_between_question_and_answer_does_not_leave_the_answer_to_the_next_question(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    worker.schedule(InOrder(), WORKLOAD)
    read = worker_module._read

    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(worker_module, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.schedule(InOrder(), Workload.from_json(raw_file("kd_three_steps")))
    monkeypatch.setattr(worker_module, "_read", read)
    assert worker.schedule(InOrder(), WORKLOAD).digest() == InOrder().schedule(WORKLOAD).digest()
    worker.close()


def test_a_policy_that_cannot_be_sent_is_asked_here() -> None:
    @dataclasses.dataclass(frozen=True)
    class Locked:
        lock: object = dataclasses.field(default_factory=threading.Lock)

        def schedule(self, workload: Workload) -> Schedule:
            return InOrder().schedule(workload)

    worker = Worker()
    assert worker.schedule(Locked(), WORKLOAD).digest() == InOrder().schedule(WORKLOAD).digest()
    worker.close()
