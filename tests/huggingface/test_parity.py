"""Our decoders with weights of a folder compute what transformers computes from it: logits, gradients, continuations."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_support import parts
from parity_support import CASES, logits_of, opened, texts, tiny_folder, torch, transformers
from support import TEXT_SPECS, text_samples

from maestro_jax.data import Dataset
from maestro_jax.data.chat_template import ChatTemplate
from maestro_jax.distill import Distilled
from maestro_jax.generation import generate
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.huggingface import Folder, HuggingFace, load, save
from maestro_jax.optimizers import Sgd
from maestro_jax.runtime import Preparer
from maestro_jax.schedules import InOrder
from maestro_jax.terminal import Terminal
from maestro_jax.trainer import Trainer

pytestmark = pytest.mark.parity

TOKENIZER = str(Path(__file__).parent.parent.parent / "configs" / "tokenizer_tiny.json")


def rows_of(samples: list[list[list[int]]], length: int) -> dict[str, jax.Array]:
    """Packs texts, each row a list of them, one behind another; the rest is padding."""
    batch = {name: np.zeros((len(samples), length), np.int32) for name in ("tokens", "targets", "segment_ids", "positions")}
    mask = np.zeros((len(samples), length), np.float32)
    for row, text_of_row in enumerate(samples):
        start = 0
        for segment, text in enumerate(text_of_row, 1):
            here = (row, slice(start, start + len(text)))
            batch["tokens"][here], batch["segment_ids"][here], batch["positions"][here] = text, segment, np.arange(len(text))
            batch["targets"][row, start : start + len(text) - 1] = text[1:]
            mask[row, start : start + len(text) - 1] = 1.0
            start += len(text)
    found = {name: jnp.asarray(value) for name, value in batch.items()}
    return {**found, "sample_ids": found["segment_ids"].astype(jnp.uint32), "loss_mask": jnp.asarray(mask)}


def head_of(config: Any, params: dict[str, jax.Array]) -> jax.Array:
    return params["embedding/weight" if config.tied else "head/weight"]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_padded_and_packed(case: str, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path, case)
    config, params = load(tmp_path)
    apply = jax.jit(parts(config)[2])
    first, second, third = texts((40, 17, 23))
    padded, packed = rows_of([[first], [second]], 48), rows_of([[second, third], [first]], 48)
    places = [(padded, 0, 0, first), (padded, 1, 0, second), (packed, 0, 0, second), (packed, 0, 17, third), (packed, 1, 0, first)]
    for batch, row, start, text in places:
        hidden_LD = apply(params, batch)["hidden"][row, start : start + len(text)]
        np.testing.assert_allclose(hidden_LD @ head_of(config, params).T, logits_of(model, text), rtol=0, atol=2e-4)


@pytest.mark.parametrize("case", ["qwen3", "qwen2"])
def test_gradients_equal_those_of_torch(case: str, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path, case)
    config, params = load(tmp_path)
    [text] = texts((30,))
    gradients = jax.jit(jax.grad(lambda p, b: parts(config)[2](p, b)["cross_entropy"]))(params, rows_of([[text]], 32))
    logits = model(torch.tensor([text])).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, torch.tensor(text[1:]), reduction="sum").backward()

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    _, wanted = load(tmp_path / "gradients")
    assert set(wanted) == set(gradients)
    for path, value in wanted.items():
        np.testing.assert_allclose(gradients[path], value, rtol=0, atol=1e-3 * float(jnp.max(jnp.abs(value))), err_msg=path)


@pytest.mark.parametrize("case", ["qwen3", "qwen2", "llama3"])
def test_a_greedy_continuation_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path, case)
    config, params = load(tmp_path)
    prompts = texts((5, 21, 16))
    wanted = [
        model.generate(torch.tensor([p]), max_new_tokens=32, do_sample=False, eos_token_id=None)[0, len(p) :].tolist() for p in prompts
    ]
    assert generate(config, params, prompts, new_tokens=32) == wanted
    stop = wanted[0][7]
    assert generate(config, params, prompts, new_tokens=32, stop=[stop])[0] == wanted[0][: wanted[0].index(stop) + 1]


@pytest.mark.parametrize("case", CASES)
def test_transformers_opens_what_is_saved_and_computes_the_same(case: str, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "one", case)
    _, parameters = load(tmp_path / "one")
    arrays = {path: np.asarray(value) for path, value in parameters.items()}
    again = opened(save(tmp_path / "two", Folder(tmp_path / "one"), arrays, shard_bytes=20_000))
    [text] = texts((30,))
    np.testing.assert_array_equal(logits_of(again, text), logits_of(model, text))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder, and the gradient of a step on one device."""
    folder = tmp_path_factory.mktemp("alone")
    tiny_folder(folder, "qwen3", num_key_value_heads=4)
    return folder, gradients_of(folder, {})


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"fsdp": 2}, {"tensor": 4}, {"fsdp": 4}, {"tensor": 2, "fsdp": 2}])
def test_gradients_on_several_devices_are_those_of_one(axes: dict[str, int], alone: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, wanted = alone
    spread = gradients_of(folder, axes)
    for path, value in wanted.items():
        np.testing.assert_allclose(spread[path], value, rtol=0, atol=1e-5 * float(np.max(np.abs(value))), err_msg=path)


def gradients_of(folder: Path, axes: dict[str, int]) -> dict[str, np.ndarray]:
    """The gradient of a step, with the engine on these axes."""
    section = Section(
        name="model",
        module=HuggingFace(folder=str(folder)),
        objectives={"cross_entropy": Objective()},
        microbatch=128,
        row_length=32,
        axes=axes,
    )
    data = Dataset(train=text_samples(16, vocab=96), specs=TEXT_SPECS)
    trainer = Trainer(graph=SectionGraph(sections=(section,)), data=data, steps=1, batch=16)
    run = trainer.start()
    setup = trainer.setup()
    assert setup.batches is not None
    preparer = Preparer(run.engine.compiled, InOrder(), TEXT_SPECS, 0)
    window = preparer.prepare_window([setup.batches(0)], 0)
    return {path: np.asarray(value) for path, value in run.engine.accumulate(window)["model"].items()}


@pytest.mark.parametrize("devices", [2, 4])
def test_distillation_between_two_folders_with_other_padding_runs_and_opens_in_transformers(devices: int, tmp_path: Path) -> None:
    tiny_folder(tmp_path / "teacher", "qwen3", vocab_size=104, num_hidden_layers=2, seed=1)
    tiny_folder(tmp_path / "student", "qwen3_tied", hidden_size=24)
    teacher = HuggingFace(folder=str(tmp_path / "teacher"), choices={"objective": "none"})
    student = HuggingFace(folder=str(tmp_path / "student"))
    axes = {"tensor": devices // 2}
    graph = SectionGraph(
        sections=(
            Section(name="teacher", module=teacher, trainable=False, microbatch=128, row_length=32, axes=axes),
            Section(
                name="student",
                module=Distilled(student=student, teacher=teacher),
                inputs={"teacher_hidden": "teacher.hidden"},
                objectives={"kl": Objective(), "cross_entropy": Objective(weight=0.1)},
                frozen=("teacher_head",),
                microbatch=64,
                row_length=32,
                replicas=devices // 2,
            ),
        )
    )
    data = Dataset(train=text_samples(24, vocab=90), specs=TEXT_SPECS, vocab_size=90)
    trainer = Trainer(graph=graph, data=data, steps=3, batch=8, optimizer=Sgd(learning_rate=0.1), save_shard_bytes=20_000, metrics=None)
    screen = io.StringIO()
    run = trainer.fit(tmp_path / "run", terminal=Terminal(screen), verify_step=True)
    assert {d for s in run.engine.plan.sections.values() for d in s.submesh.mesh.devices.flat} == set(jax.devices()[:devices])
    assert "the KL runs over the first 96 token ids" in screen.getvalue()
    saved = tmp_path / "run" / "weights"
    assert [path.name for path in saved.iterdir()] == ["student"]
    trained = run.engine.parameters("student")
    [text] = texts((20,), vocab=90)
    config = student.config
    own = {path.removeprefix("student/"): jnp.asarray(value) for path, value in trained.items() if path.startswith("student/")}
    hidden_LD = jax.jit(parts(config)[2])(own, rows_of([[text]], 32))["hidden"][0, :20]
    logits_LV = logits_of(opened(saved / "student"), text)
    np.testing.assert_allclose(hidden_LD @ own["embedding/weight"].T, logits_LV, rtol=0, atol=2e-4)
    assert np.max(np.abs(logits_LV - logits_of(opened(tmp_path / "student"), text))) > 1e-2


def test_a_chat_template_writes_what_transformers_writes(tmp_path: Path) -> None:
    template = (
        "{%- if messages[0].role == 'system' %}\n    {{- bos_token + messages[0].content | tojson + '\\n' }}\n{%- endif %}\n"
        "{%- for m in messages %}\n    {%- if m.role == 'system' %}{% continue %}{% endif %}\n"
        "    {{- '<|' + m.role + '|>' + m.content | trim + eos_token + '\\n' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}\n"
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=TOKENIZER, bos_token="<s>", eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    messages = [
        {"role": "system", "content": "be <brief> & \u00fcber"},
        {"role": "user", "content": " 1 + 1?\n"},
        {"role": "assistant", "content": "2"},
    ]
    ours = ChatTemplate.load(tmp_path)
    for ask in (False, True):
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        assert ours.write(messages, ask=ask) == wanted
    text, ((start, stop),) = ours.conversation(messages)
    assert text[start:stop] == "2<|endoftext|>"
