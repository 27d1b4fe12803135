"""Generation: the cache changes nothing, prompts do not see one another, and what cannot be continued is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from model_support import parts

from maestro_jax.errors import ConfigError, DataError
from maestro_jax.generation import generate
from maestro_jax.models import Decoder, YarnScaling

CONFIG = Decoder(
    vocab_size=32,
    layers=2,
    embed=16,
    heads=4,
    kv_heads=2,
    mlp=24,
    qk_norm=True,
    qkv_bias=True,
    rope_scaling=YarnScaling(factor=2.0, original_length=16),
)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [8, 4], [6, 2, 6, 4, 3, 3, 8]]


def parameters() -> dict[str, jax.Array]:
    # Larger than initial ones, so that the largest logit is well apart from the next.
    return {path: value * 8 if "weight" in path else value for path, value in parts(CONFIG)[0].items()}


def without_a_cache(prompt: list[int], count: int) -> list[int]:
    params, apply, text = parameters(), jax.jit(parts(CONFIG)[2]), list(prompt)
    for _ in range(count):
        tokens = np.zeros((1, 32), np.int32)
        tokens[0, : len(text)] = text
        ids = jnp.asarray(np.arange(32)[None] < len(text), jnp.int32)
        batch = {"tokens": jnp.asarray(tokens), "targets": ids, "segment_ids": ids, "positions": jnp.arange(32)[None]}
        hidden = apply(params, {**batch, "loss_mask": ids.astype(jnp.float32), "sample_ids": ids.astype(jnp.uint32)})["hidden"]
        text.append(int(jnp.argmax(hidden[0, len(text) - 1] @ params["head/weight"].T)))
    return text[len(prompt) :]


def test_a_batch_of_prompts_goes_on_as_each_of_them_does_without_a_cache() -> None:
    wanted = [without_a_cache(prompt, 9) for prompt in PROMPTS]
    assert generate(CONFIG, parameters(), PROMPTS, new_tokens=9) == wanted
    assert len({token for tokens in wanted for token in tokens}) > 4


def test_parameters_below_a_prefix_and_on_several_devices_give_the_same() -> None:
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    names = parts(CONFIG)[1]
    specs = {path: PartitionSpec(*("tensor" if name == "kv_heads" else None for name in names[path])) for path in names}
    spread = {f"student/{path}": jax.device_put(value, NamedSharding(mesh, specs[path])) for path, value in parameters().items()}
    assert generate(CONFIG, spread, PROMPTS, new_tokens=6, prefix="student") == generate(CONFIG, parameters(), PROMPTS, new_tokens=6)


def test_a_continuation_ends_with_the_token_that_stops_it() -> None:
    whole = generate(CONFIG, parameters(), PROMPTS, new_tokens=9)
    [stopped, *_] = generate(CONFIG, parameters(), PROMPTS, new_tokens=9, stop=[whole[0][3]])
    assert stopped == whole[0][: whole[0].index(whole[0][3]) + 1]


@pytest.mark.parametrize("prompt", [[], [3, 32], [-1]])
def test_a_prompt_without_tokens_or_with_foreign_ones_is_refused(prompt: list[int]) -> None:
    with pytest.raises(DataError, match="prompt 1 cannot be continued"):
        generate(CONFIG, parameters(), [[1], prompt])


def test_a_decoder_without_a_head_is_refused() -> None:
    headless = Decoder(vocab_size=32, layers=1, embed=16, heads=4, kv_heads=2, mlp=24, objective="none")
    with pytest.raises(ConfigError, match="no output head"):
        generate(headless, parts(headless)[0], [[1]])
