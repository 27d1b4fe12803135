"""Time and memory of the kinds of attention, forward and backward, on the device that JAX finds.

`python -m benchmarks.attention` prints for rows of several lengths, of one item and of many, what each kind takes as a multiple of what
"blockwise" takes in the same run: the median time of a program, and the bytes that it holds at its peak, as XLA reports them. Kinds that
are not installed, or do not serve the rows, are left out; so is "dense" beyond `--dense_to`, where its scores would fill the memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maestro_jax.errors import ConfigError
from maestro_jax.models import attention

KINDS = ("blockwise", "dense", "one_sample", "transformer_engine")


def rows(length: int, items: int, arguments: argparse.Namespace) -> list[jax.Array]:
    """Queries, keys, values, segment ids and positions of one row of equally long items."""
    keys = jax.random.split(jax.random.key(0), 3)
    heads = (arguments.heads, arguments.kv_heads, arguments.kv_heads)
    made = [jax.random.normal(k, (1, length, n, arguments.features), arguments.dtype) for k, n in zip(keys, heads, strict=True)]
    units = length // items
    return [*made, jnp.asarray(np.arange(length)[None] // units + 1, jnp.int32), jnp.asarray(np.arange(length)[None] % units, jnp.int32)]


def measured(kind: str, arrays: Sequence[jax.Array], repeats: int) -> tuple[float, int] | None:
    """Seconds and bytes of a forward and backward; None where the kind cannot be used."""

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.sum(attention(q, k, v, segments, positions, kind).astype(jnp.float32))

    try:
        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()
    except ConfigError:
        return None
    memory: Any = program.memory_analysis()
    jax.block_until_ready(program(*arrays))
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of the kinds of attention, as multiples of those of 'blockwise'.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096, 16384], help="units of a row")
    parser.add_argument("--item", type=int, default=512, help="units of an item where a row holds many")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv_heads", type=int, default=2)
    parser.add_argument("--features", type=int, default=64, help="of a head")
    parser.add_argument("--dtype", default="bfloat16" if jax.default_backend() == "gpu" else "float32")
    parser.add_argument("--dense_to", type=int, default=4096, help="longest row for kinds that hold all scores")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, {arguments.dtype}, {arguments.heads} heads of {arguments.features}, forward and backward")
    print(f"{'row':>7} {'items':>6}  {'kind':<19} {'time':>7} {'memory':>7}   of blockwise's")
    for length in arguments.lengths:
        for items in sorted({1, max(1, length // arguments.item)}):
            arrays = rows(length, items, arguments)
            found = {}
            for kind in KINDS:
                # On GPUs cuDNN serves half precision in memory that grows with the length alone.
                holds_scores = kind == "dense" or (kind == "one_sample" and jax.default_backend() != "gpu")
                if (holds_scores and length > arguments.dense_to) or (kind == "one_sample" and items > 1):
                    continue
                found[kind] = measured(kind, arrays, arguments.repeats)
            unit = found["blockwise"]
            for kind, each in found.items():
                if each is None or unit is None:
                    continue
                plain = f"{each[0] * 1000:.4g} ms, {each[1] / 1e6:.4g} MB" if kind == "blockwise" else ""
                print(f"{length:>7} {items:>6}  {kind:<19} {each[0] / unit[0]:>7.2f} {each[1] / unit[1]:>7.2f}   {plain}", flush=True)


if __name__ == "__main__":
    main()
