"""What the host spends on a task: program calls, transfers and bookkeeping, beside the bare calls of JAX.

`python -m benchmarks.dispatch` runs steps of a graph of two trainable sections with four replicas each on eight CPU devices. The
programs compute next to nothing and hold no collectives, so that what is timed is the host. *Bare* is the time inside the calls of
compiled programs and of `jax.device_put` alone; everything else (routes and payload handles, the loop of what may start, checks) is ours.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maestro_jax.data import ArraySpec, Item, Sample
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.meshes import transfers
from maestro_jax.runtime import Compiled, Engine, Preparer, make_plan
from maestro_jax.schedules import InOrder

WIDTH = 8
UNITS = 16
REPLICAS = 4
TASKS = 192
SPECS = {"text": {"tokens": ArraySpec()}}


def graph() -> SectionGraph:
    """Two sections whose programs do next to nothing: one parameter, one row of features for each unit."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"scale": jnp.ones((WIDTH,))}

    def produce(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {"hidden": jnp.broadcast_to(params["scale"], (*batch["tokens"].shape, WIDTH))}

    def consume(params: Mapping[str, jax.Array], batch: Mapping[str, jax.Array], hidden: jax.Array) -> dict[str, jax.Array]:
        return {"total": jnp.sum(hidden[:, :1] * params["scale"])}

    total = {"total": Objective(count=lambda item: 1)}
    first = Section(name="first", module=(init, produce), replicas=REPLICAS, microbatch=UNITS)
    second = Section(
        name="second", module=(init, consume), replicas=REPLICAS, microbatch=UNITS, inputs={"hidden": "first.hidden"}, objectives=total
    )
    return SectionGraph(sections=(first, second))


class Watch:
    """Adds up the seconds that are spent in functions, and counts their calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.calls: dict[str, int] = collections.defaultdict(int)

    def watched(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with its time added to `part`."""

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds[part] += time.perf_counter() - start
            self.calls[part] += 1
            return result

        return timed


def measure(steps: int, tasks: int) -> dict[str, float]:
    """Runs steps of about `tasks` tasks; returns microseconds per task by part, as medians over the steps."""
    compiled = _compiled()
    watch = Watch()
    _watch(compiled, watch)
    engine = Engine(compiled, seed=0, in_flight=10**6)
    preparer = Preparer(compiled, InOrder(), SPECS, seed=0)
    # Three tasks a sample: forward, forward_backward, backward.
    samples = [sample(n) for n in range(tasks // 3)]
    rows = []
    for step in range(steps + 2):
        prepared = preparer.prepare(samples, step)
        watch.seconds.clear()
        watch.calls.clear()
        start = time.perf_counter()
        report = engine.step(prepared)
        total = time.perf_counter() - start
        report.read({"second": ("total",)})
        count = len(engine.last_tasks)
        parts = {part: seconds / count * 1e6 for part, seconds in watch.seconds.items()}
        rows.append({**parts, "total": total / count * 1e6, "tasks": count})
    return {part: statistics.median(row[part] for row in rows[2:]) for part in rows[0]}


def largest_parts(steps: int, tasks: int, count: int = 5) -> list[tuple[str, float]]:
    """Profiles steps; returns our own functions that take most of the host's time themselves, with their shares of it.

    A profiler slows small functions most, so that shares compare functions with each other and not with the table.
    """
    engine, preparer = engine_and_preparer()
    samples = [sample(n) for n in range(tasks // 3)]
    profiler = cProfile.Profile()
    for step in range(steps + 2):
        prepared = preparer.prepare(samples, step)
        if step >= 2:
            profiler.enable()
        report = engine.step(prepared)
        profiler.disable()
        report.read({"second": ("total",)})
    profile = pstats.Stats(profiler)
    found: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = vars(profile)["stats"]
    total = sum(numbers[2] for numbers in found.values())
    own = {f"{Path(file).stem}.{name}": numbers[2] / total for (file, _, name), numbers in found.items() if "/maestro_jax/" in file}
    return sorted(own.items(), key=lambda part: -part[1])[:count]


def engine_and_preparer() -> tuple[Engine, Preparer]:
    """An engine of this benchmark's graph, and what prepares its steps."""
    compiled = _compiled()
    return Engine(compiled, seed=0, in_flight=10**6), Preparer(compiled, InOrder(), SPECS, seed=0)


def _compiled() -> Compiled:
    return Compiled(make_plan(graph(), SPECS, jax.devices()), {"first": optax.sgd(0.1), "second": optax.sgd(0.1)}, None, evaluation=False)


def _watch(compiled: Compiled, watch: Watch) -> None:
    """Puts a watch on every program and on the put of the transfers."""
    table = compiled._table
    for key, program in table.items():
        table[key] = watch.watched("program calls", program)
    put = jax.device_put

    class Timed:
        """The names of `jax` that the transfers use, with a watch on the put."""

        device_put = staticmethod(watch.watched("device_put", put))

        def __getattr__(self, name: str) -> Any:
            return getattr(jax, name)

    transfers.jax = Timed()


def sample(number: int) -> Sample:
    """A sample that fills a micro-batch."""
    return Sample(id=str(number), items={"text": (Item(units=UNITS, arrays={"tokens": np.zeros(UNITS, np.int32)}),)})


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=TASKS, help="tasks in a step, without the updates")
    args = parser.parse_args()
    parts = largest_parts(args.steps, args.tasks)
    found = measure(args.steps, args.tasks)
    bare = found["program calls"] + found["device_put"]
    found["bookkeeping"] = found["total"] - bare
    print(f"{2 * REPLICAS} replicas, {found['tasks']:.0f} tasks a step, medians over {args.steps} steps\n")
    print("| part | microseconds a task |\n| --- | ---: |")
    for part in ("program calls", "device_put", "bookkeeping", "total"):
        print(f"| {part} | {found[part]:.0f} |")
    print("\nRoutes cost no call of their own: slots are filled and placed inside the programs.")
    print(f"\n{found['total'] / bare:.2f} times the bare calls; {1e6 / found['total']:.0f} tasks a second")
    print("\nOur own functions that take most time themselves, as shares of a profiled step:")
    print("\n".join(f"  {name} {share:.1%}" for name, share in parts))


if __name__ == "__main__":
    main()
