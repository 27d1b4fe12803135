"""Weight files: what is written is what is read, slice by slice."""

from __future__ import annotations

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from maestro_jax.errors import CheckpointError
from maestro_jax.models.weights import WeightFile, save_weights

ARRAYS = {
    "layers/query": np.arange(24, dtype=np.float32).reshape(4, 6) / 7,
    "head/weight": np.ones((3, 2), np.float32),
    "count": np.array([3]),
}


@pytest.mark.quick
def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    save_weights(tmp_path / "inside" / "w.safetensors", ARRAYS, tokenizer="f" * 64)
    file = WeightFile(tmp_path / "inside" / "w.safetensors", "the test")
    assert file.tokenizer_fingerprint == "f" * 64
    found = {path: array[:] for path, array in file.arrays().items()}
    assert {p: (a.dtype, a.tolist()) for p, a in found.items()} == {p: (a.dtype, a.tolist()) for p, a in ARRAYS.items()}
    assert [p.name for p in (tmp_path / "inside").iterdir()] == ["w.safetensors"]


def test_only_the_asked_slice_is_read(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.safetensors", ARRAYS)
    stored = WeightFile(tmp_path / "w.safetensors", "the test").arrays("layers")["query"]
    assert stored.shape == (4, 6)
    assert stored[1:3, 2:4].tolist() == ARRAYS["layers/query"][1:3, 2:4].tolist()


@pytest.mark.skipif(os.name != "posix", reason="other systems have no umask")
@pytest.mark.parametrize(("umask", "permissions"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_permissions_follow_the_umask_also_over_an_unfinished_file(tmp_path: Path, umask: int, permissions: int) -> None:
    (tmp_path / "w.safetensors.unfinished").touch(0o400)
    before = os.umask(umask)
    try:
        save_weights(tmp_path / "w.safetensors", ARRAYS)
    finally:
        os.umask(before)
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == permissions


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_floating_point_arrays_are_converted_and_others_kept(tmp_path: Path, dtype: str) -> None:
    save_weights(tmp_path / "w.safetensors", ARRAYS, dtype=dtype)
    found = {path: array[:] for path, array in WeightFile(tmp_path / "w.safetensors", "the test").arrays().items()}
    assert found["layers/query"].dtype == jnp.dtype(dtype)
    assert np.allclose(found["layers/query"].astype(np.float32), ARRAYS["layers/query"], rtol=1e-2)
    assert found["count"].tolist() == [3]


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    save_weights(tmp_path / "w.safetensors", ARRAYS)
    (tmp_path / "w.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="weights cannot be read"):
        WeightFile(tmp_path / "w.safetensors", "the test")
