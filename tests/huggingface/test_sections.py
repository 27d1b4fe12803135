"""Folders as sections: from a config file to a run, and from a run to a folder again."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folder_support import QWEN3, qwen3_folder
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from support import TEXT_SPECS, text_samples

from maestro_jax import configurables
from maestro_jax.config import load as load_config
from maestro_jax.data import Dataset
from maestro_jax.distill import Distilled
from maestro_jax.errors import CheckpointError, ConfigError
from maestro_jax.final_weights import save_sections
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.huggingface import Folder, HuggingFace, load
from maestro_jax.models import Decoder, Multimodal, Projector
from maestro_jax.models.weights import StoredArray, WeightFile, placed
from maestro_jax.optimizers import Sgd
from maestro_jax.terminal import Terminal
from maestro_jax.trainer import Trainer

CONFIGS = Path(__file__).parent.parent.parent / "configs"
FIELDS: Mapping[str, Any] = {"vocab_size": 40, "layers": 3, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp": 24}
SAME = Decoder(**FIELDS, rope_theta=1e6, norm_epsilon=1e-6, qk_norm=True)
"""The decoder of the folders that `qwen3_folder` writes."""

QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
QWEN3_1B7 = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
PUBLISHED = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
"""What the two published files say."""


def section(module: Any, **fields: Any) -> Section:
    return Section(name="model", module=module, objectives={"cross_entropy": Objective()}, microbatch=64, row_length=32, **fields)


def trainer(only: Section, **fields: Any) -> Trainer:
    data = Dataset(train=text_samples(16, vocab=40), specs=TEXT_SPECS)
    return Trainer(
        graph=SectionGraph(sections=(only,)), data=data, steps=1, batch=4, optimizer=Sgd(learning_rate=0.0), metrics=None, **fields
    )


def test_a_section_starts_with_the_weights_of_its_module_s_folder(tmp_path: Path) -> None:
    folder = qwen3_folder(tmp_path)
    run = trainer(section(HuggingFace(folder=str(folder)), axes={"tensor": 2})).start()
    _, wanted = load(folder)
    found = run.engine.parameters("model")
    assert set(found) == set(wanted)
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_a_decoder_takes_the_weights_of_a_folder_of_the_same_model_alone(tmp_path: Path) -> None:
    folder = str(qwen3_folder(tmp_path))
    trainer(section(SAME, weights=folder)).setup()
    trainer(section(dataclasses.replace(SAME, dropout=0.5, loss_chunk=8), weights=folder)).setup()
    other = dataclasses.replace(SAME, rope_theta=1e4, norm_epsilon=1e-5)
    with pytest.raises(CheckpointError, match="weights do not fit") as caught:
        trainer(section(other, weights=folder)).setup()
    assert caught.value.have.splitlines() == [
        "rope_theta: 1000000.0 in config.json, 10000.0 in the module",
        "norm_epsilon: 1e-06 in config.json, 1e-05 in the module",
    ]


def test_a_run_that_learns_nothing_writes_the_folder_that_it_read(tmp_path: Path) -> None:
    folder = qwen3_folder(tmp_path / "model")
    screen = io.StringIO()
    only = section(HuggingFace(folder=str(folder)))
    trainer(only, save_dtype="bfloat16", save_shard_bytes=3000).fit(tmp_path / "run", terminal=Terminal(screen))
    made = tmp_path / "run" / "weights" / "model"
    assert f"weights: {made}" in screen.getvalue()
    assert "read the weights of model: 14 parameters" in screen.getvalue()
    files = sorted(made.glob("model-*.safetensors"))
    assert len(files) > 2
    found = {name: value.tobytes() for file in files for name, value in load_file(file).items()}
    assert found == {name: value.tobytes() for name, value in load_file(folder / "model.safetensors").items()}


def test_a_distilled_section_names_its_student_s_weights_and_the_head_of_its_teacher(tmp_path: Path) -> None:
    teacher = HuggingFace(folder=str(qwen3_folder(tmp_path / "teacher", vocab_size=44)))
    student = HuggingFace(folder=str(qwen3_folder(tmp_path / "student")))
    distilled = Distilled(student=student, teacher=teacher)
    assert (distilled.teacher_vocab_size, distilled.teacher_embed, distilled.vocab_size) == (44, 16, 40)
    assert distilled.initial_weights == {
        "student": (str(tmp_path / "student"), ""),
        "teacher_head": (str(tmp_path / "teacher"), "head"),
    }
    assert "first 40 token ids" in distilled.notes[0]
    assert Distilled(student=student, teacher=student).notes == ()
    with pytest.raises(ConfigError, match=r"Distilled\.teacher_vocab_size"):
        Distilled(student=student)


def test_what_was_trained_beside_the_model_of_a_folder_goes_into_a_file(tmp_path: Path) -> None:
    decoder = HuggingFace(folder=str(qwen3_folder(tmp_path / "model")))
    module = Multimodal(decoder=decoder, inputs=("image",), projectors={"image": Projector(embed=6, width=16)})
    assert module.initial_weights == {"decoder": (str(tmp_path / "model"), "")}
    arrays = {f"decoder/{path}": np.asarray(value) for path, value in load(tmp_path / "model")[1].items()}
    arrays |= {"image_projector/up": np.ones((6, 6), np.float32)}
    saved = save_sections(tmp_path / "out", [section(module)], lambda name: arrays, None, "float32", 10**9)
    assert saved == [tmp_path / "out" / "model", tmp_path / "out" / "model.safetensors"]
    assert set(WeightFile(saved[1], "the test").arrays()) == {"image_projector/up"}
    frozen = section(module, frozen=("image_projector",))
    assert save_sections(tmp_path / "second", [frozen], lambda name: arrays, None, "float32", 10**9) == [tmp_path / "second" / "model"]


def test_each_slice_of_a_file_is_read_once_and_by_those_who_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = qwen3_folder(tmp_path)
    read: list[tuple[int, ...]] = []
    whole = StackedRecorder(read)
    monkeypatch.setattr("maestro_jax.huggingface.layout.Tensor.read", whole.read)
    mesh = jax.make_mesh((2, 2), ("replica", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    stored = Folder(folder).arrays()
    sharding = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
    found = placed(stored["layers/attention/query"], jnp.bfloat16, sharding)
    assert sorted(read) == [(16, 2, 8)] * 6
    assert found.dtype == jnp.bfloat16


class StackedRecorder:
    """Notes the shape of what is read of each tensor."""

    def __init__(self, read: list[tuple[int, ...]]) -> None:
        self._read = read

    def read(self, source: StoredArray, sizes: Mapping[str, int], wanted: list[range]) -> np.ndarray:
        self._read.append(tuple(len(part) for part in wanted))
        return np.zeros([len(part) for part in wanted], np.float32)


def test_a_config_file_names_a_folder_from_where_it_lies(tmp_path: Path) -> None:
    qwen3_folder(tmp_path / "mine" / "model")
    (tmp_path / "mine" / "run.gin").write_text("HuggingFace.folder = 'model'\nHuggingFace.choices = {'dropout': 0.25}\n")
    made = load_config(str(tmp_path / "mine" / "run.gin"), [], root="HuggingFace").build()
    assert made.config == dataclasses.replace(SAME, dropout=0.25)
    with pytest.raises(ConfigError, match="cannot be found") as caught:
        load_config(str(tmp_path / "mine" / "run.gin"), ["HuggingFace.folder='other'"], root="HuggingFace").build()
    assert "HuggingFace.folder" in caught.value.set_by


def test_the_shipped_distillation_of_qwen3_has_the_sizes_of_the_published_models(tmp_path: Path) -> None:
    made: Trainer = load_config(str(CONFIGS / "kd_qwen3_8b_to_1b7.gin"), [], root="train").build()
    assert configurables.trainer.Trainer is type(made)
    teacher, student = made.graph.sections
    for name, config, sizes in (("8b", teacher.module, QWEN3_8B), ("1b7", student.module.student, QWEN3_1B7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**QWEN3, **PUBLISHED, **sizes}))
        (model,) = Folder(tmp_path / name).models.values()
        assert dataclasses.replace(model.config, objective=config.objective, attention=config.attention) == config
    assert (student.module.teacher_vocab_size, student.module.teacher_embed) == (teacher.module.vocab_size, teacher.module.embed)
    assert made.setup().weights == {"teacher": {}, "student": {}}


def test_the_config_file_of_the_documentation_distils_one_folder_into_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```gin\n(.*?)```", (CONFIGS.parent / "docs" / "models.md").read_text(), flags=re.DOTALL)
    [text] = [block for block in blocks if "Distilled" in block]
    (tmp_path / "run.gin").write_text(text)
    messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"id": str(n), "messages": messages}) + "\n" for n in range(40)))
    for name, vocab_size in (("teacher-folder", 1100), ("student-folder", 1030)):
        folder = qwen3_folder(tmp_path / name, vocab_size=vocab_size)
        shutil.copyfile(CONFIGS / "tokenizer_tiny.json", folder / "tokenizer.json")
        (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    monkeypatch.chdir(tmp_path)
    made: Trainer = load_config("run.gin", ["train.batch=8"], root="train").build()
    setup = made.setup()
    assert {name: len(given) for name, given in setup.weights.items()} == {"teacher": 13, "student": 15}
    assert any("first 1030 token ids" in note for note in setup.plan.notes)
    assert setup.dataset.tokenizer_fingerprint == Folder(tmp_path / "teacher-folder").tokenizer_fingerprint
