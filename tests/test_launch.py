"""Several processes on this machine: one exit code, and none that stays."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from process_support import end, launched, launcher, lives, waited

from maestro_jax.launch import main

ANNOUNCE = "say(folder, f'pid-{index}', str(os.getpid()))\n"
# The first process comes later, and meanwhile the other, which waits for it, is told to stop once more.
LEAVE_LATE = (
    "import subprocess; time.sleep(3 * (1 - index)); "
    "index and subprocess.Popen(['sh', '-c', f'sleep 1; kill -TERM {os.getpid()}']); leave(75)"
)
CONNECT = "from maestro_jax.cluster import connect, leave\ngroup = connect()\n"


def numbers(folder: Path, names: tuple[str, ...] = ("pid-0", "pid-1")) -> list[int]:
    assert waited(lambda: all((folder / name).exists() for name in names)), "the processes do not start"
    return [int((folder / name).read_text()) for name in names]


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("pass", 0),
        ("sys.exit(3) if index == 1 else time.sleep(60)", 3),
        ("os.kill(os.getpid(), 9) if index == 1 else time.sleep(60)", 137),
        ("time.sleep(60) if index == 1 else sys.exit(2)", 2),
        ("time.sleep(0.5 * index)\nsys.exit(75)", 75),
    ],
)
def test_the_exit_code_is_that_of_the_first_process_that_failed_by_itself(code: str, wanted: int, tmp_path: Path) -> None:
    begun = time.monotonic()
    assert launched(tmp_path, code)[0] == wanted
    assert time.monotonic() - begun < 30


def test_each_process_has_a_log_and_the_first_one_is_shown(tmp_path: Path) -> None:
    code, out, errors = launched(tmp_path, "print(f'I am {index} of', os.environ['MAESTRO_PROCESSES'])", "--processes=3")
    assert (code, out, errors) == (0, "I am 0 of 3\n", "")
    assert [(tmp_path / "logs" / f"process-{n}.log").read_text() for n in range(3)] == [f"I am {n} of 3\n" for n in range(3)]


def test_one_process_has_the_devices_that_were_asked_for_whatever_a_plan_wants(tmp_path: Path) -> None:
    code = CONNECT + "from maestro_jax.trainer import make_cpu_devices\nmake_cpu_devices(6)\nprint(len(jax.devices()))"
    assert launched(tmp_path, f"import jax\n{code}", "--processes=1", "--devices_per_process=3")[:2] == (0, "3\n")


def test_how_another_process_failed_is_shown(tmp_path: Path) -> None:
    _, _, errors = launched(tmp_path, "sys.exit('no such thing') if index == 1 else time.sleep(60)")
    assert errors == "process 1 ended with code 1; the others are ended\n  no such thing\n"


def test_a_process_that_will_not_end_is_killed(tmp_path: Path) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ANNOUNCE
    wait = "while not os.path.exists(folder + '/pid-0'): time.sleep(0.01)\nsys.exit(3)"
    assert launched(tmp_path, stubborn + f"if index == 0: time.sleep(60)\n{wait}")[0] == 3
    assert not any(map(lives, numbers(tmp_path)))


def test_what_a_process_started_ends_with_it(tmp_path: Path) -> None:
    code = "import subprocess\nchild = subprocess.Popen(['sleep', '60'])\nsay(folder, 'child', str(child.pid))\nos.kill(os.getpid(), 9)"
    assert launched(tmp_path, code, "--processes=1")[0] == 137
    [child] = numbers(tmp_path, ("child",))
    assert waited(lambda: not lives(child), 10)


def test_a_stop_is_passed_on_and_nobody_is_hurried(tmp_path: Path) -> None:
    """The first process to stop must not end the one that still writes a checkpoint."""
    code = (
        "def stop(number, frame):\n"
        "    time.sleep(2.5 * index)\n    say(folder, f'saved-{index}')\n    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop)\n" + ANNOUNCE + "time.sleep(60)"
    )
    with launcher(tmp_path, code) as process:
        numbers(tmp_path)
        process.terminate()
        assert process.wait(30) == 75
    assert all((tmp_path / f"saved-{n}").exists() for n in range(2))


def test_a_stop_before_a_process_can_take_it_is_a_stop_too(tmp_path: Path) -> None:
    """While modules are imported, SIGTERM ends a process by itself; nothing has been trained that could be lost."""
    take = "if index == 0: signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    with launcher(tmp_path, take + ANNOUNCE + "time.sleep(60)") as process:
        numbers(tmp_path)
        process.terminate()
        assert process.wait(30) == 75


@pytest.mark.parametrize("moment", ["connected", "leaving"])
def test_a_stop_of_a_connected_run_keeps_its_code(moment: str, tmp_path: Path) -> None:
    """JAX has a handler of its own for SIGTERM, which would swallow it; a second one comes when some processes have ended already."""
    stop = "def stop(*_):\n    os.environ['late'] and say(folder, 'late')\n    raise KeyError\nos.environ['late'] = ''\n"
    take = "signal.signal(signal.SIGTERM, stop)\n" + CONNECT + "group.all_gather('a', 1)\n" + ANNOUNCE
    wait = "try:\n    time.sleep(60)\nexcept KeyError:\n    "
    go = "leave(75)" if moment == "connected" else f"os.environ['late'] = '1'; {LEAVE_LATE}"
    with launcher(tmp_path, stop + take + wait + go) as process:
        numbers(tmp_path)
        process.terminate()
        assert process.wait(40) == 75
    assert not (tmp_path / "late").exists()


def test_ctrl_c_and_the_question_where_everything_stands_are_passed_on(tmp_path: Path) -> None:
    code = (
        "signal.signal(signal.SIGUSR1, lambda *_: say(folder, f'asked-{index}'))\n" + ANNOUNCE + "try:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    sys.exit(130)"
    )
    with launcher(tmp_path, code) as process:
        numbers(tmp_path)
        process.send_signal(signal.SIGUSR1)
        assert waited(lambda: all((tmp_path / f"asked-{n}").exists() for n in range(2)))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_the_question_ends_no_process_that_is_not_ready_for_it(tmp_path: Path) -> None:
    code = ANNOUNCE + "while not os.path.exists(folder + '/go'): time.sleep(0.01)"
    with launcher(tmp_path, code) as process:
        numbers(tmp_path)
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        (tmp_path / "go").touch()
        assert process.wait(30) == 0


def test_no_process_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launcher(tmp_path, ANNOUNCE + "time.sleep(300)") as process:
        found = numbers(tmp_path)
        try:
            assert all(map(lives, found))
            process.kill()
            assert waited(lambda: not any(map(lives, found)), 10)
        finally:
            end(found)


def test_a_process_of_a_connected_run_is_killed_and_all_end(tmp_path: Path) -> None:
    code = CONNECT + ANNOUNCE + "group.all_gather('a', 1)\nif index == 1: os.kill(os.getpid(), 9)\ngroup.all_gather('b', 1)"
    begun = time.monotonic()
    assert launched(tmp_path, code)[0] == 137
    assert time.monotonic() - begun < 45
    assert not any(map(lives, numbers(tmp_path)))


@pytest.mark.parametrize(("failure", "wanted"), [("leave(2)", 2), ("raise ValueError('mine')", 1)])
def test_a_process_that_fails_does_not_wait_for_the_others(failure: str, wanted: int, tmp_path: Path) -> None:
    begun = time.monotonic()
    code, _, errors = launched(tmp_path, CONNECT + f"group.all_gather('a', 1)\nif index == 1:\n    {failure}\ngroup.all_gather('b', 1)")
    assert code == wanted
    assert time.monotonic() - begun < 25
    assert ("ValueError: mine" in errors) == ("mine" in failure)


def test_processes_are_bound_to_cores_round_robin(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    code = "say(folder, f'cores-{index}', repr(sorted(os.sched_getaffinity(0))))"
    assert launched(tmp_path, code, "--processes=3", "--cpus")[0] == 0
    assert [(tmp_path / f"cores-{n}").read_text() for n in range(3)] == [f"[{cores[n % len(cores)]}]" for n in range(3)]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--processes=0"], "--processes is wrong"),
        (["--devices_per_process=-1"], "--devices_per_process is wrong"),
        (["--cpus=1000000"], "--cpus is wrong"),
        (["--module=no.such.module"], "--module is wrong"),
        (["--module=maestro_jax.errors", "--log_dir=/proc/nowhere"], "--log_dir is wrong"),
        (["--gin_file=configs/kd_tiny.gin"], "put -- before them"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    text = capsys.readouterr().err
    assert named in text
    assert "docs/errors.md#launch-flags" in text


def test_more_gpus_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("maestro_jax.launch.gpus", lambda environment: 2)
    assert main(["--processes=2", "--devices_per_process=2"]) == 2
    assert "at most the 2 GPUs" in capsys.readouterr().err
