"""Event files, read back as TensorBoard reads them, and what Weights & Biases is given."""

from __future__ import annotations

import math
import resource
import struct
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto import event_pb2

from maestro_jax.config import describe
from maestro_jax.errors import CheckpointError, ConfigError, MaestroError
from maestro_jax.metrics import Metrics, TensorBoard, WeightsAndBiases, Writer, scalars

CONFIG = "# comment = no\ntrain.steps = 10  # kd.gin:3\na/B.c = 'x  # y'  # default\n"


def record(step: int, loss: float = 2.5, **changes: Any) -> dict[str, Any]:
    """The record of a step, as a run makes it."""
    return {
        "step": step,
        "steps": 10,
        "loss": loss,
        "objectives": {"student/kl": loss, "student/cross_entropy": 0.5},
        "gradient_norm": 1.5,
        "applied": True,
        "seconds": 0.25,
        "tokens": 640,
        "tokens_per_second": 2560.0,
        "eta_seconds": 2.0,
        "padding": {"teacher": 0.25, "student": 0.125},
        "skipped_steps": 0,
    } | changes


def opened(metrics: Metrics, folder: Path, step: int = 0, config_text: str = "") -> Writer:
    return metrics.open(folder, step=step, config_text=config_text)


def event_files(folder: Path) -> list[Path]:
    return sorted((folder / "tensorboard").iterdir())


def masked_checksum(data: bytes) -> int:
    """CRC-32C as the framing has it, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(path: Path) -> Iterator[Any]:
    """Yields the whole events of a file; the last one may have been cut."""
    data = path.read_bytes()
    while len(data) >= 12:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (masked_checksum(data[:8]),)
        content, checksum, data = data[12 : 12 + length], data[12 + length : 16 + length], data[16 + length :]
        if len(checksum) < 4:
            return
        assert struct.unpack("<I", checksum) == (masked_checksum(content),)
        yield event_pb2.Event.FromString(content)  # pyright: ignore[reportAttributeAccessIssue]


def shown(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) that TensorBoard shows: the second and later marks of a start take back steps from theirs on."""
    found: dict[str, list[tuple[int, float]]] = {}
    starts = 0
    for event in (event for path in event_files(folder) for event in events(path)):
        if event.HasField("session_log"):
            starts += 1
            found = {tag: [point for point in points if starts == 1 or point[0] < event.step] for tag, points in found.items()}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return {tag: points for tag, points in found.items() if points}


class FakeRun:
    """What a run of W&B is to a writer."""

    def __init__(self, wandb: FakeWandb, arguments: dict[str, Any]) -> None:
        self.id, self.step = arguments["id"] or "new1", wandb.first
        self.offline, self.disabled = arguments["mode"] == "offline", arguments["mode"] == "disabled"
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def log(self, values: dict[str, float], *, step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


class FakeWandb(types.ModuleType):
    """The package wandb without a network; `first` is the step after those that it has of a run."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
        self.first = 0
        self.refusal: str | None = None
        self.calls: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []

    def init(self, **arguments: Any) -> FakeRun:
        if self.refusal is not None:
            raise self.errors.Error(self.refusal)
        self.calls.append(arguments)
        self.runs.append(FakeRun(self, arguments))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_scalars_have_the_names_that_a_reader_looks_for() -> None:
    assert scalars(record(3, applied=False, skipped_steps=2)) == {
        "loss": 2.5,
        "gradient_norm": 1.5,
        "tokens_per_second": 2560.0,
        "seconds": 0.25,
        "applied": 0.0,
        "skipped_steps": 2.0,
        "padding/teacher": 0.25,
        "padding/student": 0.125,
        "student/kl": 2.5,
        "student/cross_entropy": 0.5,
    }


def test_an_event_file_gives_back_what_was_written(tmp_path: Path) -> None:
    writer = opened(TensorBoard(), tmp_path)
    writer.heldout(0, {"student/kl": 4.0})
    for step in (1, 2):
        writer.steps(record(step, loss=step / 2))
    writer.close()
    found = shown(tmp_path)
    assert found["heldout/student/kl"] == [(0, 4.0)]
    assert found["loss"] == found["student/kl"] == [(1, 0.5), (2, 1.0)]
    assert found["padding/student"] == [(1, 0.125), (2, 0.125)]
    assert found.keys() == {"heldout/student/kl", *scalars(record(1))}


def test_events_carry_the_time(tmp_path: Path) -> None:
    before = time.time()
    opened(TensorBoard(), tmp_path).close()
    assert all(before <= event.wall_time <= time.time() for event in events(event_files(tmp_path)[0]))


def test_what_was_written_is_in_the_file_at_once(tmp_path: Path) -> None:
    writer = opened(TensorBoard(), tmp_path)
    writer.steps(record(1))
    assert shown(tmp_path)["loss"] == [(1, 2.5)]
    writer.close()


def test_a_resumed_run_takes_back_what_an_abandoned_attempt_wrote(tmp_path: Path) -> None:
    first = opened(TensorBoard(), tmp_path)
    for step in range(1, 8):
        first.steps(record(step, loss=float(step)))
    first.heldout(7, {"student/kl": 4.0})
    first.close()
    second = opened(TensorBoard(), tmp_path, step=4)
    second.steps(record(5, loss=50.0))
    second.close()
    found = shown(tmp_path)
    assert found["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]
    assert "heldout/student/kl" not in found


def test_a_run_that_begins_again_at_0_takes_back_everything(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        writer = opened(TensorBoard(), tmp_path)
        writer.heldout(0, {"student/kl": loss})
        writer.steps(record(1, loss=loss))
        writer.close()
    found = shown(tmp_path)
    assert (found["heldout/student/kl"], found["loss"]) == ([(0, 2.0)], [(1, 2.0)])


def test_resumed_twice_within_a_second_loses_nothing(tmp_path: Path) -> None:
    for step in range(4):
        writer = opened(TensorBoard(), tmp_path, step=step)
        writer.steps(record(step + 1))
        writer.close()
    assert shown(tmp_path)["loss"] == [(step, 2.5) for step in range(1, 5)]


def test_a_new_file_is_read_last_even_if_the_clock_went_back(tmp_path: Path) -> None:
    later = tmp_path / "tensorboard" / f"events.out.tfevents.{int(time.time()) + 1000}.other-machine"
    later.parent.mkdir()
    later.touch()
    opened(TensorBoard(), tmp_path).close()
    assert event_files(tmp_path)[0] == later
    assert len(event_files(tmp_path)) == 2


def test_the_configuration_is_shown_as_code(tmp_path: Path) -> None:
    opened(TensorBoard(), tmp_path, step=4, config_text=CONFIG).close()
    values = [(event.step, value) for event in events(event_files(tmp_path)[0]) for value in event.summary.value]
    assert [(step, value.tag) for step, value in values] == [(4, "config/text_summary")]
    text = values[0][1].tensor.string_val[0].decode()
    assert text.splitlines() == [f"    {line}" for line in CONFIG.splitlines()]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_numbers_that_are_not_finite_are_written(tmp_path: Path, value: float) -> None:
    writer = opened(TensorBoard(), tmp_path)
    writer.steps(record(1, loss=value, gradient_norm=value))
    writer.heldout(1, {"student/kl": value})
    writer.close()
    found = shown(tmp_path)
    written = [found["loss"][0][1], found["gradient_norm"][0][1], found["heldout/student/kl"][0][1]]
    # Event files hold float32, which ends at 3e38.
    wanted = math.inf if value == 1e300 else value
    assert all(each == wanted or (math.isnan(each) and math.isnan(wanted)) for each in written)


def test_a_step_without_any_loss_is_written(tmp_path: Path) -> None:
    writer = opened(TensorBoard(), tmp_path)
    writer.steps({"step": 1, "seconds": 0.5, "objectives": {}, "loss": None, "tokens_per_second": None, "padding": {}})
    writer.steps({"step": 2})
    writer.heldout(2, {})
    writer.close()
    assert shown(tmp_path) == {"seconds": [(1, 0.5)]}


def test_every_leaves_out_steps_but_none_that_was_skipped(tmp_path: Path) -> None:
    writer = opened(TensorBoard(every=3), tmp_path)
    for step in range(1, 8):
        writer.steps(record(step, applied=step != 5))
    writer.close()
    assert [step for step, _ in shown(tmp_path)["loss"]] == [3, 5, 6]


def test_a_full_disk_is_an_error_and_what_was_written_stays(tmp_path: Path) -> None:
    writer = opened(TensorBoard(), tmp_path)
    writer.steps(record(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Ends in the midst of the next event.
    resource.setrlimit(resource.RLIMIT_FSIZE, (event_files(tmp_path)[0].stat().st_size + 40, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large") as caught:
            writer.steps(record(2))
        writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.anchor == "run-folder-unwritable"
    assert shown(tmp_path)["loss"] == [(1, 2.5)]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(CheckpointError, match=r"/tensorboard' cannot be written\."):
        opened(TensorBoard(), tmp_path)


def test_closing_twice_is_harmless(tmp_path: Path) -> None:
    writer = opened(TensorBoard(), tmp_path)
    writer.close()
    writer.close()


def test_neither_library_is_loaded_before_it_is_used() -> None:
    program = "import sys, maestro_jax.metrics; print([name for name in ('tensorboardX', 'wandb', 'jax') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert found.stdout.split() == ["[]"]


@pytest.mark.usefixtures("wandb")
@pytest.mark.parametrize("kind", [TensorBoard, WeightsAndBiases])
def test_a_wrong_every_is_refused(kind: type[TensorBoard | WeightsAndBiases]) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(every=0)
    assert str(caught.value) == (
        f"{kind.__name__} has a wrong every.\n"
        "  wanted   a whole number, at least 1\n"
        "  have     0\n"
        f"  set by   the calling program: {kind.__name__}.every\n"
        "  fix      correct every; 1 writes each step\n"
        "  help     docs/errors.md#metrics-every"
    )


def test_help_explains_every_field() -> None:
    fields = describe(["TensorBoard", "WeightsAndBiases"])
    assert [field.field for field in fields if not field.doc] == []
    assert {field.configurable for field in fields} == {"TensorBoard", "WeightsAndBiases"}


def test_weights_and_biases_gets_the_same_numbers(tmp_path: Path, wandb: FakeWandb) -> None:
    writer = opened(WeightsAndBiases(), tmp_path)
    writer.heldout(0, {"student/kl": 4.0})
    writer.steps(record(1, loss=math.nan, objectives={}))
    writer.steps(record(2))
    writer.close()
    writer.close()
    run = wandb.runs[0]
    assert [step for step, _ in run.logged] == [0, 1, 2]
    assert run.logged[0][1] == {"heldout/student/kl": 4.0}
    assert math.isnan(run.logged[1][1]["loss"])
    assert run.logged[2][1] == scalars(record(2))
    assert run.finished == 1


def test_weights_and_biases_is_told_what_runs_and_where(tmp_path: Path, wandb: FakeWandb) -> None:
    folder = tmp_path / "kd_tiny-1"
    opened(WeightsAndBiases(project="kd", entity="us", tags=("a", "b")), folder, config_text=CONFIG)
    call = wandb.calls[0]
    assert (call["project"], call["entity"], call["name"], call["tags"]) == ("kd", "us", "kd_tiny-1", ("a", "b"))
    assert (call["dir"], call["id"], call["mode"]) == (str(folder), None, None)
    assert call["config"] == {"train.steps": "10", "a/B.c": "'x  # y'"}


def test_a_resumed_run_goes_on_in_the_same_run_and_repeats_no_step(tmp_path: Path, wandb: FakeWandb) -> None:
    opened(WeightsAndBiases(name="mine"), tmp_path)
    wandb.first = 7  # The first attempt went on to step 6.
    writer = opened(WeightsAndBiases(name="mine"), tmp_path, step=4)
    for step in range(5, 9):
        writer.steps(record(step))
    writer.heldout(5, {"student/kl": 1.0})
    assert [(call["id"], call["name"], call["resume"]) for call in wandb.calls] == [(None, "mine", "allow"), ("new1", None, "allow")]
    assert [step for step, _ in wandb.runs[1].logged] == [7, 8]


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_an_attempt_that_was_not_online_is_not_resumed(tmp_path: Path, wandb: FakeWandb, mode: Any) -> None:
    metrics = WeightsAndBiases(name="mine", mode=mode)
    opened(metrics, tmp_path)
    opened(metrics, tmp_path, step=4)
    assert [(call["id"], call["name"], call["mode"]) for call in wandb.calls] == [(None, "mine", mode), (None, "mine from step 4", mode)]


def refused(metrics: WeightsAndBiases, folder: Path) -> MaestroError:
    with pytest.raises(ConfigError) as caught:
        opened(metrics, folder)
    return caught.value


def test_a_refusal_by_weights_and_biases_says_what_to_do(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.refusal = "No API key configured."
    assert str(refused(WeightsAndBiases(), tmp_path)) == (
        "Weights & Biases refuses the run.\n"
        "  wanted   an account and a connection, or mode 'offline' or 'disabled'\n"
        "  have     Error: No API key configured.\n"
        "  set by   the calling program: WeightsAndBiases.mode\n"
        "  fix      log in with `wandb login`, or set WeightsAndBiases.mode = 'offline' and send the run later with `wandb sync`\n"
        "  help     docs/errors.md#wandb-refused"
    )


def test_a_missing_package_is_told_when_the_configuration_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError) as caught:
        WeightsAndBiases()
    assert str(caught.value) == (
        "Weights & Biases cannot be used.\n"
        "  wanted   the package wandb\n"
        "  have     ModuleNotFoundError: import of wandb halted; None in sys.modules\n"
        "  set by   the calling program: WeightsAndBiases.mode\n"
        "  fix      pip install 'maestro_jax[wandb]', or use TensorBoard\n"
        "  help     docs/errors.md#wandb-missing"
    )


def test_a_folder_named_wandb_is_not_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.ModuleType("wandb"))
    with pytest.raises(ConfigError, match="a folder of that name, and no package"):
        WeightsAndBiases()
