"""What the README shows works as it stands there."""

from __future__ import annotations

import importlib
import json
import os
import pydoc_data.topics
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from maestro_jax.config import find_file
from maestro_jax.data import tokenizer
from maestro_jax.explain import main as explain
from maestro_jax.simulate import main as simulate
from maestro_jax.train import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_script_with_a_users_own_modules_runs_and_learns(tmp_path: Path) -> None:
    [script] = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(script.splitlines()) <= 45
    (tmp_path / "own.py").write_text(script)
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss=([\d.]+)", done.stdout)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    assert "'student/distance'" in done.stdout.splitlines()[-1]


def test_every_command_line_of_the_readme_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dry runs check data, tokenizer, weights, plan and optimizers; the second command's own weights are made by hand."""
    texts = tmp_path / "my_texts"
    texts.mkdir()
    for name, text in list(pydoc_data.topics.topics.items())[:12]:
        (texts / f"{name}.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    turns = [{"role": "user", "content": "What is a section?"}, {"role": "assistant", "content": "A part of a model. " * 4}]
    (tmp_path / "chats").mkdir()
    for file in (tmp_path / "chats.jsonl", tmp_path / "chats" / "some.jsonl"):
        file.write_text((json.dumps({"messages": turns}) + "\n") * 100)
    Image.new("RGB", (60, 40)).save(tmp_path / "chats" / "7.png")
    shown = [{"role": "user", "content": "<image> What is it?"}, turns[1]]
    (tmp_path / "chats" / "shown.jsonl").write_text((json.dumps({"messages": shown, "images": ["7.png"]}) + "\n") * 100)
    commands = re.findall(r"^python -m maestro_jax.*$", README.replace("\\\n", " "), flags=re.MULTILINE)
    assert len(commands) >= 10
    for command in commands:
        module, *flags = shlex.split(command.split("  #")[0])[2:]
        if module == "maestro_jax.launch":
            # What each process runs; that the launcher starts it is tested elsewhere.
            flags = flags[flags.index("--") + 1 :]
        if module == "maestro_jax.explain":
            # The run that it is about was not trained here; `test_explain.py` reads one that was.
            assert explain(flags) == 2
            assert "train.timelines" in capsys.readouterr().err
        elif module in ("maestro_jax.plan", "maestro_jax.profile"):
            # `test_plan_command.py` runs them on something small.
            named = importlib.import_module(module).make_parser().parse_args(flags)
            assert find_file(named.gin_file).exists()
        elif module == "maestro_jax.simulate":
            assert simulate(flags) == 0
        elif module == "maestro_jax.data.tokenizer":
            tokenizer.main(flags)
            assert (tmp_path / "my" / "tokenizer.json").exists()
        elif "--gin.teacher_weights=runs/teacher/weights/teacher.safetensors" in flags:
            assert main([*flags, "--dry_run"]) == 2  # everything is right but for the weights of a teacher that was not trained
            assert "runs/teacher/weights/teacher.safetensors" in capsys.readouterr().err
        else:
            assert main([*flags, "--dry_run"] if "--help" not in flags else flags) == 0, command


def test_the_links_of_the_readme_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_no_placeholder_is_left() -> None:
    assert not re.findall(r"\b[A-Z]+_[A-Z_]+\b", README)
