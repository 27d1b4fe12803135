"""The command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import CONFIG

from maestro_jax.pace import Preempted
from maestro_jax.train import INTERRUPTED, PREEMPTED, main
from maestro_jax.trainer import Trainer

ROOT = Path(__file__).parent.parent


def fresh(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command in a fresh process, as a user with two cores and no accelerator would."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "maestro_jax.train", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.quick
def test_a_shipped_config_is_found_from_anywhere_and_makes_its_own_devices(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "models").mkdir()
    done = fresh("--gin_file=kd_tiny.gin", "--dry_run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 devices (cpu)" in done.stdout
    assert "1 x tensor=2" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == ["configs", "models"]


def test_overrides_reach_scopes_without_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gin.teacher/Section.microbatch=[512, 1024]", "--gin.student/Section.dtype=bfloat16", "--gin.student/Section.replicas", "1"]
    assert main(["--gin_file=kd_tiny.gin", "--dry_run", *flags]) == 0
    shown = capsys.readouterr().out
    assert "3 devices" in shown
    assert "512, 1024" in shown


def test_mistakes_are_five_part_errors_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gin_file=kd_tiny.gin", "--gin.techer/Section.microbatch=512"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("ConfigError: ")
    assert "did you mean" in shown
    assert all(part in shown for part in ("wanted", "have", "set by", "fix", "help     docs/errors.md#"))


def test_help_lists_sections_and_configurables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "--gin_file=kd_tiny.gin"]) == 0
    shown = capsys.readouterr().out
    assert "teacher          forward only; scope teacher/" in shown
    assert "    steps: int = 100" in shown
    assert "optimizer steps; 0 only evaluates." in shown
    for name in ("Section", "Decoder", "Distilled", "Corpus", "TextFolder", "AdamW", "InOrder"):
        assert f"\n  {name}: " in shown


def test_an_unknown_flag_is_refused() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--gin_fil=kd_tiny.gin"])
    assert caught.value.code == 2


def test_without_a_graph_the_text_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "graph" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize(("raised", "code", "says"), [(KeyboardInterrupt, INTERRUPTED, "interrupted"), (Preempted, PREEMPTED, "SIGTERM")])
def test_what_ended_a_run_is_its_exit_code(
    raised: type[BaseException], code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(Trainer, "fit", stopped)
    assert main(["--gin_file=kd_tiny.gin"]) == code in (130, 75)
    assert says in capsys.readouterr().err


def test_the_same_command_goes_on_and_restart_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.gin").write_text(CONFIG)
    command = [f"--gin_file={tmp_path / 'small.gin'}", f"--workdir={tmp_path / 'run'}", "--gin.train.evaluate_batches=0"]
    assert main([*command, "--gin.train.steps=2"]) == 0
    assert main([*command, "--gin.train.steps=4"]) == 0
    shown = capsys.readouterr().out
    assert "note: changed since step 2: train.steps = 2 -> 4\n" in shown
    assert f"resuming from step 2 of 4, run folder {tmp_path / 'run'} (--restart begins anew)\n" in shown
    assert shown.count("checkpoint: step 4; the same command goes on from there\n") == 1
    # Nothing would be trained, so another configuration is refused.
    before = (tmp_path / "run" / "config.gin").read_text()
    assert main([*command, "--gin.train.steps=4", "--gin.train.optimizer=@AdamW()"]) == 2
    assert "is complete, and another one is configured now" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.gin").read_text() == before
    # Other optimizer state cannot go on; a new run can begin.
    changed = [*command, "--gin.train.steps=6", "--gin.train.optimizer=@AdamW()"]
    assert main(changed) == 2
    refused = capsys.readouterr().err
    assert "the run cannot go on from its checkpoint of step 4: shapes have changed" in refused
    assert "b: optimizer/0/mu/inner is not there in the checkpoint, float32[8, 8] now" in refused
    assert "changed setting: train.optimizer = @Sgd() -> @AdamW()" in refused
    assert main([*changed, "--restart"]) == 0
    assert f"training 6 steps of 6 samples, run folder {tmp_path / 'run'} (the same command goes on with it)\n" in capsys.readouterr().out
    assert (tmp_path / "run" / "previous-1" / "checkpoints" / "00000004" / "manifest.json").exists()
