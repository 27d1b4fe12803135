"""Loads one compiled program for the devices of other replicas, without compiling it again.

The device assignment is part of a compiled program, so XLA would compile the same program once per replica. Here it is
serialised once and loaded again with every device replaced by its partner. This uses private names of JAX (0.10.2 and
0.12 were tried), so it is kept in this file: `load_for` returns None when anything does not work, and the caller
compiles. What is loaded is run once on made-up arguments and must give the same bits as the original.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

logger = logging.getLogger(__name__)


def load_for(compiled: Any, source: Sequence[Any], target: Sequence[Any], examples: tuple[Any, Any]) -> Any | None:
    """Makes the twin of a compiled program that runs on other devices.

    Args:
        compiled: a `jax.stages.Compiled` that runs on the devices `source`.
        source: its devices, in the order of its mesh.
        target: as many other devices, of the same kind.
        examples: shapes with shardings (`ShapeDtypeStruct`) of the arguments on source and on target devices.

    Returns:
        The twin, or None when the program cannot be serialised or loaded, or the twin computes something else; None for programs over
        several CPU devices, in which collectives of a loaded program may wait for each other for ever.
    """
    if len(source) > 1 and source[0].platform == "cpu":
        # Not all devices came to a collective of a loaded program, and XLA ended the process (jaxlib 0.10.2; why is not known).
        return None
    try:
        twin = _twin(compiled, source, target)
        # One after the other: two programs with collectives at a time would need twice the threads.
        same = _same(*(_read(program(*_made_up(shapes))) for program, shapes in zip((compiled, twin), examples, strict=True)))
    except Exception as error:  # private names may be gone, and backends refuse in many ways; compiling always works
        logger.info("a program is compiled again for devices %s: %s: %s", target, type(error).__name__, error)
        return None
    if not same:
        logger.warning("a program that was loaded for devices %s computes something else; it is compiled again", target)
        return None
    return twin


def _twin(compiled: Any, source: Sequence[Any], target: Sequence[Any]) -> Any:
    from jax._src import compiler
    from jax.experimental import serialize_executable

    class Unpickler(serialize_executable._JaxPjrtUnpickler):
        """Unpickles an executable while every device of `source` becomes its partner in `target`."""

        def __init__(self, blob: bytes) -> None:
            super().__init__(io.BytesIO(blob), target[0].client, target)
            self.devices_by_id = {a.id: b for a, b in zip(source, target, strict=True)}

        def persistent_load(self, pid: Any) -> Any:
            if pid[0] != "exec":
                return super().persistent_load(pid)
            assignment = np.array(target, dtype=object).reshape(1, -1)
            options = compiler.get_compile_options(num_replicas=1, num_partitions=len(target), device_assignment=assignment)
            return self.backend.deserialize_executable(pid[1], self.execution_devices, options)

    blob, in_tree, out_tree = serialize_executable.serialize(compiled)
    unloaded, args_info, no_kwargs = Unpickler(blob).load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)


def _made_up(shapes: Any) -> Any:
    """Arguments of given shapes: small numbers that differ along the last dimension, the same on every device list."""

    def make(shape: Any) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.device_put(jnp.broadcast_to(jax.random.key(0), shape.shape), shape.sharding)
        count = np.arange(shape.shape[-1] if shape.shape else 1)
        values = np.sin(count + 1.0) / 8 if jnp.issubdtype(shape.dtype, jnp.floating) else count % 2
        row = values.astype(shape.dtype)
        return jax.device_put(np.broadcast_to(row, shape.shape) if shape.shape else row[0], shape.sharding)

    return jax.tree.map(make, shapes)


def _same(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> bool:
    """Whether two results have equal bits; NaN equals NaN."""
    pairs = zip(one, other, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def _read(tree: Any) -> list[np.ndarray]:
    """The leaves of a result on the host, which shows that its program runs; random keys as the numbers that they are."""
    keys = (jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in jax.tree.leaves(tree))
    return [np.asarray(leaf) for leaf in keys]
