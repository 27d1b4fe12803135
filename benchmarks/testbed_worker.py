"""One of the two processes of `benchmarks.testbed`: measures the tasks of a config, or trains it, when it is told to."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

STEPS = 8
"""Of a window: as many as a plan is judged by where batches are small."""


class Job:
    """A config on two processes with a device each.

    Args:
        spec: "gin_file", "overrides" and "way": "profile" or "train".
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        from maestro_jax import configurables
        from maestro_jax.cluster import connect
        from maestro_jax.config import load

        connect()
        trainer: configurables.trainer.Trainer = load(spec["gin_file"], spec["overrides"], root="train").build()
        self.profiles, self.run = spec["way"] == "profile", trainer.start()
        self.measured: dict[str, Any] = {}
        self._steps: Iterator[Any] = self.run.steps()

    def window(self) -> list[float]:
        """Measures, or trains some steps; returns their losses."""
        if self.profiles:
            from maestro_jax.profile import measured

            self.measured = measured(self.run, STEPS).to_json()
            return []
        return [next(self._steps).metrics["loss"] for _ in range(STEPS)]

    def facts(self) -> dict[str, Any]:
        """What was measured."""
        return {"measured": self.measured}

    def close(self) -> None:
        """Ends the thread that prepares steps."""
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()


def main() -> None:
    """Is pinned, and answers until the input ends."""
    spec = json.loads(sys.argv[1])
    # JAX counts cores when it starts, so it is imported later.
    os.sched_setaffinity(0, spec["cores"])
    from .pinned.worker import answered

    answered(lambda: Job(spec))


if __name__ == "__main__":
    main()
