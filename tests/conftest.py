"""Settings of JAX for all tests: eight CPU devices, strict numerics, and a compile cache that outlives the run.

The environment is set before JAX is imported, so that processes which tests start inherit it. The number of devices is set in this
process alone, because the command line makes its own devices.

A CPU program that came from the compile cache cannot be serialised again (it fails when it runs). A test about serialised programs
therefore turns the cache off: see `tests/runtime/test_load.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"

os.environ["JAX_PLATFORMS"] = "cpu"
# Two-way transfers between CPU devices hang with the small thread pool that a machine of two cores would get.
os.environ["PJRT_NPROC"] = "16"
# Most of a test's time is compilation, in many programs that take less than a second, which is the default threshold.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"

import jax  # noqa: E402  (reads the environment above)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# Explicit device_put stays allowed. What JAX moves by itself raises: an array of another submesh, and also an uncommitted scalar or
# index that meets an array of several devices outside a program (read such arrays with `jax.device_get`).
# Compiling is most of the time; XLA's expensive passes would not change what is tested.
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_transfer_guard_device_to_device", "disallow")
# Started here: the first test that starts JAX might be one of the trainer, which asks for as many CPU devices as its plan needs.
jax.devices()
