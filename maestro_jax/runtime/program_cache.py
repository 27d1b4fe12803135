"""Where JAX keeps compiled programs for later runs, and which process writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from ..meshes import ProcessGroup


def keep_programs(folder: Path) -> None:
    """Makes JAX keep every compiled program in `folder`, for all that this process compiles from now on.

    On CPU a program that comes from the cache cannot be loaded for other replicas, so theirs are kept as well.
    """
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The default would leave out what compiles in less than a second, which is most of a small graph.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # JAX opens its cache once; without this, a second folder would be ignored.
    compilation_cache.reset_cache()


@contextlib.contextmanager
def kept_by(process: int, group: ProcessGroup) -> Iterator[None]:
    """What is compiled meanwhile is kept by one process; every process reads.

    JAX keeps only what process 0 compiles, so that processes do not write one file at the same time. A section that has no device there
    would be compiled anew in every run.

    Args:
        process: the lowest one that compiles it.
        group: this process among the others.
    """
    from jax._src import distributed  # a private name; JAX has no setting for this (0.10.2 and 0.12 were tried)

    state = distributed.global_state
    if process == 0 or process != group.index:
        yield
        return
    before = state.process_id
    # The compiler alone looks at it: the service and the devices know their number from elsewhere.
    state.process_id = 0
    try:
        yield
    finally:
        state.process_id = before
