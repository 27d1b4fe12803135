"""The shipped multimodal configurations: their modes, what of their steps is padding, and that frozen weights are those that ship."""

from __future__ import annotations

import collections
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from maestro_jax import configurables
from maestro_jax.config import load
from maestro_jax.errors import ConfigError
from maestro_jax.runtime import make_workload
from maestro_jax.runtime.costs import counted_costs
from maestro_jax.runtime.memory import predict_bucket_bytes
from maestro_jax.schedules import Wavefront

CONFIGS = Path(__file__).parent.parent / "configs"


def trainer(name: str, *overrides: str) -> configurables.trainer.Trainer:
    return load(str(CONFIGS / f"{name}.gin"), list(overrides), root="train").build()


def padding(name: str, steps: int) -> float:
    """Share of the units of all micro-batches that hold nothing, as the default policy schedules the first steps."""
    made = trainer(name)
    setup = made.setup()
    assert made.policy == Wavefront()
    assert setup.batches is not None
    costs, sizes = counted_costs(setup.plan), predict_bucket_bytes(setup.plan)
    units: collections.Counter[str] = collections.Counter()
    for step in range(steps):
        workload = make_workload(setup.plan, [setup.batches(step)], True, costs, sizes)
        units["used"] += sum(sum(items) for sample in workload.steps[0] for items in sample.items.values())
        units["scheduled"] += sum(
            task.bucket for task in made.policy.schedule(workload).tasks if task.kind in ("forward", "forward_backward")
        )
    return 1 - units["used"] / units["scheduled"]


def test_at_most_a_tenth_of_omni_tiny_is_padding() -> None:
    assert 0 < padding("omni_tiny", steps=12) <= 0.1


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("omni_tiny", {"vision": "train", "audio": "train", "llm": "train", "generator": "train"}),
        ("omni_long_tail", {"vision": "train", "audio": "train", "llm": "train", "generator": "train"}),
        ("vlm_frozen_llm", {"vision": "train", "llm": "pass gradient"}),
        ("vlm_frozen_vision", {"vision": "forward only", "llm": "train"}),
    ],
)
def test_sections_run_as_the_config_says(name: str, modes: dict[str, str]) -> None:
    made = trainer(name)
    setup = made.setup()
    assert {section: made.graph.mode(section) for section in setup.plan.sections} == modes
    assert setup.optimizers.keys() == {section for section, mode in modes.items() if mode == "train"}


def test_a_frozen_encoder_waits_for_no_update_and_a_trained_one_does() -> None:
    assert [len(trainer(name).window(0)) for name in ("vlm_frozen_vision", "vlm_frozen_llm")] == [4, 1]


def test_the_long_tail_has_samples_with_many_images_and_most_have_few() -> None:
    setup = trainer("omni_long_tail").setup()
    assert setup.batches is not None
    images = [len(sample.items.get("image", ())) for step in range(20) for sample in setup.batches(step)]
    some = [count for count in images if count]
    assert max(some) > 12
    assert np.median(some) <= 4


@pytest.mark.parametrize("name", ["vlm_frozen_llm", "vlm_frozen_vision"])
def test_frozen_weights_train_for_two_steps_and_keep_their_bits(name: str) -> None:
    run = trainer(name, "train.batch=4", "train.evaluate_batches=0").start()
    frozen = "llm" if name == "vlm_frozen_llm" else "vision"
    before = run.engine.parameters(frozen)
    given = load_file(CONFIGS / ("teacher_tiny.safetensors" if frozen == "llm" else "vision_tiny.safetensors"))
    prefix = "decoder/" if frozen == "llm" else ""
    assert before.keys() == {prefix + path for path in given}
    assert all(np.array_equal(before[prefix + path], value.astype(np.float32)) for path, value in given.items())
    steps = iter(run.steps())
    assert [next(steps).metrics["applied"] for _ in range(2)] == [1, 1]
    after = run.engine.parameters(frozen)
    assert all(before[path].tobytes() == after[path].tobytes() for path in before)
    states = {n: jax.tree.leaves(s.optimizer) for n, s in run.engine.states.items()}
    assert states[frozen] == []
    assert states["vision" if frozen == "llm" else "llm"]


@pytest.mark.parametrize("override", ["VisionTransformer.merge=1", "AudioEncoder.stride=2", "Omni.merge=1"])
def test_rows_that_data_and_encoder_count_differently_are_refused(override: str) -> None:
    """A token would take a row of another image, and nothing else would tell."""
    with pytest.raises(ConfigError, match="makes other rows than the data counts") as caught:
        trainer("omni_tiny", override).setup()
    assert caught.value.anchor == "units-per-row"
