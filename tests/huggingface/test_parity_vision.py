"""Qwen2.5-VL: its two parts, and both together, compute what transformers computes from the same folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_support import parts
from parity_support import torch, transformers
from vision_language_support import PROCESSOR, write_folder, write_image

from maestro_jax.data import Conversations
from maestro_jax.data.patches import image_item
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.huggingface import Folder, HuggingFace, load, save
from maestro_jax.models import Multimodal
from maestro_jax.optimizers import Sgd
from maestro_jax.terminal import Terminal
from maestro_jax.trainer import Trainer

pytestmark = pytest.mark.parity

IMAGE, START, END = 90, 92, 93
TOKENS = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": START, "vision_end_token_id": END}
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}
VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "hidden_act": "silu",
    "patch_size": 2,
    "window_size": 8,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1],
}
"""Windows of 4 x 4 patches; the images below have more, and sides that windows do not divide."""

GRIDS = [(6, 10), (4, 4), (2, 14)]


def tiny_model(vocab_size: int = 96, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2_5_VLConfig(text_config={**TEXT, "vocab_size": vocab_size}, vision_config=VISION, **{**TOKENS, **changes})
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name or "bias" in name or "ln_q" in name else 0.15
            parameter.copy_(spread * torch.randn_like(parameter) + (1.0 if "norm" in name or "ln_q" in name else 0.0))
    return model


def images(count: int) -> list[tuple[np.ndarray, np.ndarray, tuple[int, int]]]:
    """Patches and places of random images, and how many rows and columns of patches they have."""
    random = np.random.default_rng(0)
    found = []
    for rows, columns in GRIDS[:count]:
        coords = image_item(np.zeros((rows, columns, 1)), 1, 2).arrays["coords"]
        found.append((random.normal(size=(rows * columns, 24)).astype(np.float32), coords, (rows, columns)))
    return found


def conversation(count: int, seed: int) -> list[int]:
    """Text with the first images in it."""
    random = np.random.default_rng(seed)
    tokens = random.integers(3, 80, 5).tolist()
    for rows, columns in GRIDS[:count]:
        tokens += [START, *[IMAGE] * (rows * columns // 4), END, *random.integers(3, 80, 4).tolist()]
    return tokens


def wanted_of(model: Any, tokens: list[int], count: int) -> tuple[Any, np.ndarray]:
    """Logits [L, V] as a tensor, and rotary positions [L, 3]."""
    ids = torch.tensor([tokens])
    kinds = (ids == model.config.image_token_id).int()
    more: dict[str, Any] = {}
    if count:
        more["pixel_values"] = torch.tensor(np.concatenate([patches for patches, _, _ in images(count)]))
        more["image_grid_thw"] = torch.tensor([[1, *grid] for grid in GRIDS[:count]])
    positions, _ = model.model.get_rope_index(ids, kinds, more.get("image_grid_thw"))
    return model(input_ids=ids, mm_token_type_ids=kinds, **more).logits[0], positions[:, 0].T.numpy()


def vision_batch(count: int, length: int) -> dict[str, jax.Array]:
    """All images in one row, padded."""
    batch = {
        "patches": np.zeros((1, length, 24), np.float32),
        "coords": np.zeros((1, length, 2), np.int32),
        "segment_ids": np.zeros((1, length), np.int32),
        "positions": np.zeros((1, length), np.int32),
    }
    start = 0
    for number, (patches, coords, _) in enumerate(images(count), 1):
        here = (0, slice(start, start + len(patches)))
        batch["patches"][here], batch["coords"][here], batch["segment_ids"][here] = patches, coords, number
        batch["positions"][here] = np.arange(len(patches))
        start += len(patches)
    found = {name: jnp.asarray(value) for name, value in batch.items()}
    return {**found, "sample_ids": found["segment_ids"].astype(jnp.uint32)}


def text_batch(texts: list[tuple[list[int], np.ndarray]], length: int, image: int = IMAGE) -> dict[str, jax.Array]:
    """Texts behind one another in one row; the first one has the images."""
    names = ("tokens", "targets", "segment_ids", "positions")
    batch: dict[str, np.ndarray] = {name: np.zeros((1, length), np.int32) for name in names}
    batch["rope_positions"], batch["loss_mask"] = np.zeros((1, length, 3), np.int32), np.zeros((1, length), np.float32)
    batch["image_rows"] = np.full((1, length), -1, np.int32)
    start = taken = 0
    for number, (tokens, rope) in enumerate(texts, 1):
        here = (0, slice(start, start + len(tokens)))
        batch["tokens"][here], batch["segment_ids"][here], batch["positions"][here] = tokens, number, np.arange(len(tokens))
        batch["rope_positions"][here] = rope
        batch["targets"][0, start : start + len(tokens) - 1], batch["loss_mask"][0, start : start + len(tokens) - 1] = tokens[1:], 1.0
        for place in np.flatnonzero(np.array(tokens) == image):
            batch["image_rows"][0, start + place], taken = taken, taken + 1
        start += len(tokens)
    found = {name: jnp.asarray(value) for name, value in batch.items()}
    return {**found, "sample_ids": found["segment_ids"].astype(jnp.uint32)}


def placed(rows_TW: jax.Array, text: dict[str, jax.Array]) -> jax.Array:
    """The rows of the tower at the tokens that take them, as the runtime's routes do."""
    index_RL = text["image_rows"]
    return jnp.where(index_RL[..., None] >= 0, rows_TW[index_RL], 0.0)


@pytest.mark.parametrize("attention", ["dense", "blockwise"])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_the_tower_equal_those_of_transformers(count: int, attention: str, tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    config, parameters = load(tmp_path, part="vision")
    config = type(config)(**{**vars(config), "attention": attention})
    with torch.no_grad():
        pixels = torch.tensor(np.concatenate([patches for patches, _, _ in images(count)]))
        wanted = model.model.visual(pixels, torch.tensor([[1, *grid] for grid in GRIDS[:count]])).pooler_output.numpy()
    found = jax.jit(parts(config)[2])(parameters, vision_batch(count, 136))["hidden"][0, : len(wanted)]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_with_and_without_images_equal_those_of_transformers_padded_and_packed(tied: bool, tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    tower, tower_parameters = load(tmp_path, part="vision")
    decoder, parameters = load(tmp_path, part="language")
    rows_TW = jax.jit(parts(tower)[2])(tower_parameters, vision_batch(3, 136))["hidden"][0]
    with torch.no_grad():
        with_images, alone = conversation(3, 1), conversation(0, 2)
        texts = [(tokens, *wanted_of(model, tokens, count)) for tokens, count in ((with_images, 3), (alone, 0))]
    apply = jax.jit(lambda p, b, image: parts(Multimodal(decoder=decoder, inputs=("image",)))[2](p, b, image=image))
    head = parameters["embedding/weight" if tied else "head/weight"]
    own = {f"decoder/{path}": value for path, value in parameters.items()}
    for together in ([texts[0]], texts):
        batch = text_batch([(tokens, rope) for tokens, _, rope in together], 80)
        hidden_LD = apply(own, batch, placed(rows_TW, batch))["hidden"][0]
        start = 0
        for tokens, logits, _ in together:
            np.testing.assert_allclose(hidden_LD[start : start + len(tokens)] @ head.T, logits.numpy(), rtol=0, atol=2e-4)
            start += len(tokens)


def test_gradients_of_the_composition_equal_those_of_torch(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    tower, tower_parameters = load(tmp_path / "model", part="vision")
    decoder, decoder_parameters = load(tmp_path / "model", part="language")
    tokens = conversation(2, 1)
    logits, rope = wanted_of(model, tokens, 2)
    torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="sum").backward()
    text, vision = text_batch([(tokens, rope)], 64), vision_batch(2, 80)
    both = Multimodal(decoder=decoder, inputs=("image",))

    def loss(parameters: tuple[dict[str, jax.Array], dict[str, jax.Array]]) -> jax.Array:
        rows_TW = parts(tower)[2](parameters[0], vision)["hidden"][0]
        own = {f"decoder/{path}": value for path, value in parameters[1].items()}
        return parts(both)[2](own, text, image=placed(rows_TW, text))["cross_entropy"]

    found = jax.jit(jax.grad(loss))((tower_parameters, decoder_parameters))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    for part, gradients in zip(("vision", "language"), found, strict=True):
        _, wanted = load(tmp_path / "gradients", part=part)
        assert set(wanted) == set(gradients)
        for path, value in wanted.items():
            np.testing.assert_allclose(gradients[path], value, rtol=0, atol=1e-3 * float(jnp.max(jnp.abs(value))), err_msg=path)


def test_transformers_opens_what_is_saved_and_it_is_the_same(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "one")
    arrays = {
        f"{part}/{path}": np.asarray(value)
        for part in ("vision", "language")
        for path, value in load(tmp_path / "one", part=part)[1].items()
    }
    saved = save(tmp_path / "two", Folder(tmp_path / "one"), arrays, shard_bytes=20_000)
    again = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(saved)
    for (name, one), two in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, two), name


def tuned_folder(folder: Path) -> Any:
    """A whole folder of a tiny model, tokenizer and all, and the model."""
    write_folder(folder, processor={**PROCESSOR, "patch_size": 2, "min_pixels": 16, "max_pixels": 400})
    ids = {name: value for name, value in json.loads((folder / "config.json").read_text()).items() if name.endswith("_token_id")}
    model = tiny_model(vocab_size=320, **ids)
    model.save_pretrained(folder)
    return model


def conversations_in(folder: Path) -> str:
    """Twelve conversations with no, one and two images of their own sizes."""
    lines = []
    for number in range(12):
        names = [f"{number}_{n}.png" for n in range(number % 3)]
        for n, name in enumerate(names):
            write_image(folder / name, 8 + 4 * (number % 4), 8 + 8 * n, seed=number)
        question, answer = "<image>" * len(names) + "What is it?", f"A cat, and {number} dogs."
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": str(number), "messages": messages, "images": names}))
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "chats.jsonl")


@pytest.mark.parametrize("devices", [2, 4])
def test_fine_tuning_on_json_lines_runs_and_opens_in_transformers_with_equal_logits(devices: int, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    before = tuned_folder(tmp_path / "model")
    language = HuggingFace(folder=folder, part="language")
    llm = Multimodal(decoder=language, inputs=("image",), objectives={"cross_entropy": ("cross_entropy", "loss_mask")})
    sections = (
        Section(
            name="vision",
            module=HuggingFace(folder=folder, part="vision"),
            reads="image",
            microbatch=256,
            row_length=128,
            replicas=devices // 2,
        ),
        Section(
            name="llm",
            module=llm,
            inputs={"image": "vision.hidden[image_rows]"},
            objectives={"cross_entropy": Objective()},
            microbatch=256,
            row_length=128,
            axes={"tensor": devices // 2},
        ),
    )
    data = Conversations(path=conversations_in(tmp_path), model=folder, max_length=128, max_patches=100, heldout_fraction=0.0)
    trainer = Trainer(graph=SectionGraph(sections=sections), data=data, steps=3, batch=6, optimizer=Sgd(learning_rate=0.05), metrics=None)
    run = trainer.fit(tmp_path / "run", terminal=Terminal(io.StringIO()), verify_step=True)
    assert {d for s in run.engine.plan.sections.values() for d in s.submesh.mesh.devices.flat} == set(jax.devices()[:devices])
    assert [path.name for path in (tmp_path / "run" / "weights").iterdir()] == ["vision_llm"]

    trained = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "run" / "weights" / "vision_llm").eval()
    image = trained.config.image_token_id
    tokens = [image if token == IMAGE else token for token in conversation(2, 1)]
    with torch.no_grad():
        wanted, rope = wanted_of(trained, tokens, 2)
        untrained, _ = wanted_of(before, tokens, 2)
    rows_TW = jax.jit(parts(HuggingFace(folder=folder, part="vision").config)[2])(run.engine.parameters("vision"), vision_batch(2, 80))
    text = text_batch([(tokens, rope)], 64, image)
    apply = jax.jit(lambda p, b, rows: parts(Multimodal(decoder=language.config, inputs=("image",)))[2](p, b, image=rows))
    own = run.engine.parameters("llm")
    hidden_LD = apply(own, text, placed(rows_TW["hidden"][0], text))["hidden"][0, : len(tokens)]
    np.testing.assert_allclose(hidden_LD @ own["decoder/head/weight"].T, wanted.numpy(), rtol=0, atol=2e-4)
    assert float((wanted - untrained).abs().max()) > 1e-2
