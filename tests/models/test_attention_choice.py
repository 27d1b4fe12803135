"""What "auto" takes, what it says about it, and what sections refuse."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maestro_jax.errors import ConfigError
from maestro_jax.models import SectionRows, attention, rows_of
from maestro_jax.models.attention import dense_attention
from maestro_jax.models.attention_choice import BLOCKWISE_FROM, choose
from maestro_jax.models.transformer_engine import packed_attention

SEGMENTS = jnp.asarray([[1, 1, 1, 1, 2, 2, 0, 0]])
POSITIONS = jnp.asarray([[0, 1, 2, 3, 0, 1, 0, 0]])


def rows(packed: bool) -> SectionRows:
    return SectionRows(section="llm", packed=packed, set_by="a.gin:3")


def inputs(dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = (jax.random.normal(key, (1, 8, 2, 4), dtype) for key in jax.random.split(jax.random.key(0), 3))
    return q, k, v


@pytest.mark.parametrize(
    ("platform", "packed", "dtype", "features", "length", "windows", "kind"),
    [
        ("gpu", False, "bfloat16", 64, 512, False, "one_sample"),
        ("gpu", False, "bfloat16", 64, 8192, True, "blockwise"),
        ("gpu", False, "float32", 64, 8192, False, "blockwise"),
        ("gpu", False, "bfloat16", 72 + 4, 8192, False, "blockwise"),
        ("gpu", True, "bfloat16", 64, 8192, False, "blockwise"),
        ("gpu", True, "bfloat16", 64, BLOCKWISE_FROM - 1, False, "dense"),
        ("cpu", False, "bfloat16", 64, 8192, False, "blockwise"),
        ("cpu", True, "float32", 64, 512, False, "dense"),
    ],
)
def test_auto_goes_by_platform_packing_dtype_features_and_length(
    platform: str, packed: bool, dtype: str, features: int, length: int, windows: bool, kind: str
) -> None:
    with rows_of(rows(packed)):
        assert choose(length=length, features=features, dtype=jnp.dtype(dtype), windows=windows, platform=platform) == kind


def test_the_reason_is_logged_once_for_a_section(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told = rows(packed=True)
    for _ in range(2):
        with rows_of(told):
            attention(*inputs(), SEGMENTS, POSITIONS, "auto")
    (line,) = caplog.messages
    assert line.startswith("section 'llm': attention is 'dense': ")
    assert list(told.chosen) == [line]


def test_auto_computes_attention() -> None:
    arrays = inputs()
    wanted = dense_attention(*arrays, SEGMENTS, POSITIONS)
    np.testing.assert_allclose(attention(*arrays, SEGMENTS, POSITIONS, "auto")[:, :6], wanted[:, :6], atol=1e-6)


@pytest.mark.parametrize("windows", [False, True])
def test_rows_of_several_segments_are_refused_where_the_kind_serves_one(windows: bool) -> None:
    with rows_of(rows(packed=not windows)), pytest.raises(ConfigError, match="serves rows of one segment only") as caught:
        attention(*inputs(), SEGMENTS, POSITIONS, "one_sample", windows=windows)
    assert caught.value.set_by == "a.gin:3"
    assert caught.value.anchor == "attention-packed"


def test_windows_are_segments() -> None:
    q, k, v = inputs()
    windows = jnp.asarray([[1, 1, 2, 2, 3, 3, 0, 0]])
    got = attention(q, k, v, windows, None, "auto", windows=True)
    for place in (0, 2, 4):
        part = slice(place, place + 2)
        np.testing.assert_allclose(
            got[:, part], dense_attention(q[:, part], k[:, part], v[:, part], jnp.ones((1, 2), jnp.int32), None), atol=1e-6
        )


def test_transformer_engine_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.attention", None)
    with pytest.raises(ConfigError, match="needs Transformer Engine, which is not installed") as caught:
        attention(*inputs(), SEGMENTS, POSITIONS, "transformer_engine")
    assert "pip install" in caught.value.fix
    assert caught.value.anchor == "transformer-engine"


def engine(calls: list[dict[str, Any]]) -> SimpleNamespace:
    """What the module of Transformer Engine offers, by its documentation; the kernel is dense attention over its sequences."""

    def fused_attn(qkv: Any, bias: Any, sequences: Any, seed: Any, **options: Any) -> jax.Array:
        calls.append(options)
        (q, k, v), (segments, positions) = qkv, sequences
        return dense_attention(q, k, v, segments, positions if options["attn_mask_type"] == "causal" else None)

    return SimpleNamespace(
        fused_attn=fused_attn,
        SequenceDescriptor=SimpleNamespace(from_segment_ids_and_pos=lambda segments, positions: (segments, positions)),
        AttnBiasType=SimpleNamespace(NO_BIAS="none"),
        AttnMaskType=SimpleNamespace(PADDING_MASK="both", PADDING_CAUSAL_MASK="causal"),
        AttnSoftmaxType=SimpleNamespace(VANILLA_SOFTMAX="vanilla"),
        QKVLayout=SimpleNamespace(THD_THD_THD="thd"),
    )


@pytest.mark.parametrize("positions", [POSITIONS, None], ids=["causal", "both ways"])
def test_transformer_engine_gets_segments_and_their_units(monkeypatch: pytest.MonkeyPatch, positions: jax.Array | None) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine.jax", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.attention", engine(calls))
    arrays = inputs("bfloat16")
    got = packed_attention(*arrays, SEGMENTS, positions)
    np.testing.assert_array_equal(got[:, :6], dense_attention(*arrays, SEGMENTS, positions)[:, :6])
    assert not got[:, 6:].any()
    assert calls[0]["qkv_layout"] == "thd"
    if positions is not None:
        assert bool(jnp.isnan(packed_attention(*arrays, SEGMENTS, positions.at[0, 2].set(1))).all())
