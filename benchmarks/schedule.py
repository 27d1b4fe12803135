"""What scheduling costs: time per batch size, and whether it disturbs the thread that issues tasks.

`python -m benchmarks.schedule` makes schedules of batches of a long-tailed multimodal workload with `Wavefront` on one core, and then
issues the tasks of `benchmarks.dispatch` while schedules are made in another process (as in training), in a thread of the same process,
and not at all. *Dispatch delay* is the time that the issuing of one task takes. Rounds of the three kinds take turns, because machines
are noisy.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.dispatch import TASKS, engine_and_preparer, sample
from maestro_jax.runtime import Engine, Preparer
from maestro_jax.runtime.dispatcher import Dispatcher
from maestro_jax.schedules import Cost, EdgeWork, SampleWork, Schedule, SectionWork, Task, Wavefront, Workload
from maestro_jax.schedules.bounds import lower_bound
from maestro_jax.schedules.worker import Worker

SIZES = (32, 64, 128, 256, 512)
KINDS = ("no scheduling", "another process", "a thread here")


def workload(samples: int, seed: int = 0) -> Workload:
    """A vision encoder and an LLM; about half of the samples have images, of long-tailed number and size."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(samples):
        items: dict[str, tuple[int, ...]] = {"llm": (int(min(2048, 64 + random.lognormal(5.5, 0.8))),)}
        if random.random() < 0.5:
            items["vision"] = tuple(int(min(1024, 32 + random.lognormal(4.5, 0.8))) for _ in range(1 + random.geometric(0.5)))
        made.append(SampleWork(id=number, items=items))
    vision = SectionWork(
        replicas=2,
        buckets=(512, 1024, 2048),
        trainable=True,
        max_inflight=10**9,
        forward=Cost(fixed=100_000, per_unit=900, per_unit_squared=60),
        backward=Cost(fixed=100_000, per_unit=1800, per_unit_squared=120),
        update=2_000_000,
    )
    llm = SectionWork(
        replicas=4,
        buckets=(1024, 2048, 4096),
        trainable=True,
        max_inflight=10**9,
        forward=Cost(fixed=150_000, per_unit=1500, per_unit_squared=80),
        backward=Cost(fixed=150_000, per_unit=3000, per_unit_squared=160),
        update=3_000_000,
    )
    return Workload(sections={"vision": vision, "llm": llm}, edges=(EdgeWork(producer="vision", consumer="llm"),), steps=(tuple(made),))


class Timed(Dispatcher):
    """A dispatcher that notes how long the issuing of each task takes."""

    delays: list[int]

    def start(self, task: Task) -> int:
        begin = time.perf_counter_ns()
        end = super().start(task)
        self.delays.append(time.perf_counter_ns() - begin)
        return end


def delays(engine: Engine, preparer: Preparer, step: int) -> list[int]:
    """Nanoseconds for each task of a step, whose update is not applied."""
    number, standing = engine.next_number(), engine.standing
    timed = Timed(engine.compiled, engine.states, engine.zeros, engine.in_flight, engine.debug, number, standing)
    timed.delays = []
    window = preparer.prepare([sample(n) for n in range(TASKS // 3)], step)
    for ended in timed.issue(window):
        engine.time_update(window.steps[ended], ended)
    return timed.delays


class Beside:
    """Makes schedules again and again in a thread, while it is open."""

    def __init__(self, make: Callable[[Workload], Schedule] | None) -> None:
        self._make, self._closed = make, threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    def _work(self) -> None:
        batch = workload(128)
        while self._make is not None and not self._closed.is_set():
            self._make(batch)


def disturbance(rounds: int, steps: int) -> dict[str, float]:
    """Kind of scheduling -> microseconds, median over rounds of the 99th percentile of dispatch delays."""
    engine, preparer = engine_and_preparer()
    worker, policy = Worker(), Wavefront()
    makers = dict(zip(KINDS, (None, lambda w: worker.schedule(policy, w), policy.schedule), strict=True))
    worker.schedule(policy, workload(16))
    numbers: Iterator[int] = iter(range(10**9))
    for _ in range(3):
        delays(engine, preparer, next(numbers))
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, make in makers.items():
            with Beside(make):
                seen = [d for _ in range(steps) for d in delays(engine, preparer, next(numbers))]
            found[kind].append(float(np.percentile(seen, 99)) / 1000)
    worker.close()
    return {kind: statistics.median(values) for kind, values in found.items()}


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    args = parser.parse_args()
    print("| samples | ms | ms per 100 samples | makespan / bound |\n| ---: | ---: | ---: | ---: |")
    for samples in SIZES:
        batch = workload(samples)
        begin = time.process_time()
        schedule = Wavefront().schedule(batch)
        milliseconds = (time.process_time() - begin) * 1000
        ratio = schedule.makespan / lower_bound(batch)
        print(f"| {samples} | {milliseconds:.0f} | {100 * milliseconds / samples:.0f} | {ratio:.3f} |")
    found = disturbance(args.rounds, args.steps)
    print("\n| schedules made in | 99th percentile of dispatch delay, microseconds | times that without |\n| --- | ---: | ---: |")
    for kind, value in found.items():
        print(f"| {kind} | {value:.0f} | {value / found[KINDS[0]]:.2f} |")


if __name__ == "__main__":
    main()
