"""Our decoders with weights of a folder compute what transformers computes from it: logits, gradients, continuations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_support import parts
from parity_support import CASES, logits_of, texts, tiny_folder, torch

from maestro_jax.huggingface import load

pytestmark = pytest.mark.parity


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
