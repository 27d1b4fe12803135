"""Programs that were compiled for one replica and loaded for the others compute the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from engines import build, worst_leaf
from jax.experimental.compilation_cache import compilation_cache
from support import chain, text_samples

from maestro_jax.runtime import load

SAMPLES = text_samples(20)
GRAPH = {"teacher": {"replicas": 2, "axes": {"tensor": 2}}, "student": {"replicas": 3}}


@pytest.fixture(autouse=True)
def no_cache() -> Iterator[None]:
    """A CPU program that came from the compile cache cannot be serialised."""
    jax.config.update("jax_enable_compilation_cache", False)
    # Whether the cache is used is decided once, until it is reset.
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.quick
def test_each_program_is_compiled_once_and_loaded_for_the_other_replicas() -> None:
    setup = build(chain(**GRAPH), evaluation=True)
    sections = setup.engine.plan.sections
    # Programs over several CPU devices are compiled for each replica.
    alone = {name for name, section in sections.items() if len(section.submesh.replica_devices(0)) == 1}
    assert 0 < len(alone) < len(sections)
    for program in setup.engine.compiled.programs:
        assert program.loaded == (program.replica > 0 and program.section in alone)
    assert any(program.loaded for program in setup.engine.compiled.programs)
    assert worst_leaf(setup.gradients(SAMPLES), setup.reference(SAMPLES)[1]) < 1e-5


def test_without_the_private_names_every_program_is_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def gone(*_: Any) -> Any:
        raise AttributeError("no such name in this JAX")

    monkeypatch.setattr(load, "_twin", gone)
    with caplog.at_level(logging.INFO):
        setup = build(chain(**GRAPH))
    assert not any(p.loaded for p in setup.engine.compiled.programs)
    assert "no such name in this JAX" in caplog.text
    assert worst_leaf(setup.gradients(SAMPLES), setup.reference(SAMPLES)[1]) < 1e-5


def test_programs_that_take_and_return_random_keys_are_loaded_too() -> None:
    """Residuals may hold typed random keys."""
    one, other = jax.devices()[:2]
    here, there = (jax.ShapeDtypeStruct((2,), jax.random.key(0).dtype, sharding=jax.sharding.SingleDeviceSharding(d)) for d in (one, other))
    program = jax.jit(lambda keys: jax.vmap(jax.random.split)(keys)).lower(here).compile()
    twin = load.load_for(program, [one], [other], ((here,), (there,)))
    assert twin is not None
    keys = jax.random.split(jax.random.key(3))
    expected = jax.random.key_data(program(jax.device_put(keys, one)))
    np.testing.assert_array_equal(jax.random.key_data(twin(jax.device_put(keys, other))), expected)


def test_a_twin_that_computes_something_else_is_not_used() -> None:
    one, other = jax.devices()[:2]

    def compiled(device: Any, factor: float) -> tuple[Any, jax.ShapeDtypeStruct]:
        shape = jax.ShapeDtypeStruct((3,), np.float32, sharding=jax.sharding.SingleDeviceSharding(device))
        return jax.jit(lambda x: x * factor).lower(shape).compile(), shape

    (program, here), (wrong, there) = compiled(one, 2.0), compiled(other, 3.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_twin", lambda *_: wrong)
        assert load.load_for(program, [one], [other], ((here,), (there,))) is None
    twin = load.load_for(program, [one], [other], ((here,), (there,)))
    assert twin is not None
    assert np.asarray(twin(jax.device_put(np.ones(3, np.float32), other))).tolist() == [2.0, 2.0, 2.0]
