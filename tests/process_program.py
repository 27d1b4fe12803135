"""What tests of several processes run in each of them: `python -m process_program FOLDER FUNCTION ARGUMENTS...`."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maestro_jax.cluster import connect
from maestro_jax.errors import ClusterError, DataError, MaestroError
from maestro_jax.meshes import Parcel, ProcessGroup, Wire, move, on_every_device, processes_of, put_whole


def group_calls(group: ProcessGroup) -> dict[str, Any]:
    """What processes tell one another."""
    found: dict[str, Any] = {"order": [group.all_gather("order", [group.index, n]) for n in range(50)]}
    lists: dict[str, list[Any]] = {"a": [], "b": []}

    def talk(channel: str) -> None:
        lists[channel] = [group.all_gather(channel, f"{channel}{n}") for n in range(30)]

    threads = [threading.Thread(target=talk, args=(channel,)) for channel in lists]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found["threads"] = lists
    group.agreed("same", {"x": 1}, "x")
    found["disagree"] = anchor_of(lambda: group.agreed("different", group.index, "the index"))

    def fail() -> None:
        raise DataError("no.", wanted="a", have="b", fix="c", anchor="d")

    found["lead"] = [group.lead("good", lambda: "done"), anchor_of(lambda: group.lead("bad", fail))]
    if group.index == 0:
        found["silent"] = anchor_of(lambda: group.all_gather("silent", None, seconds=1.5))
    return found


def anchor_of(call: Any) -> str:
    try:
        call()
    except MaestroError as error:
        return error.anchor
    return "no error"


def transfers(group: ProcessGroup, source: str, target: str, count: str) -> dict[str, Any]:
    """Two-way transfers between devices of the first and of the last process, each slot with values of its own, many in flight."""
    from jax.sharding import AxisType, Mesh

    def mesh(process: int, size: int) -> Mesh:
        devices = [d for d in jax.devices() if d.process_index == process][:size]
        return Mesh(np.array(devices), ("tensor",), axis_types=(AxisType.Auto,))

    here, there = mesh(0, int(source)), mesh(group.count - 1, int(target))
    wire = Wire(here, there, 24, jax.ShapeDtypeStruct((3,), np.float32), "test")
    kept, wrong = [], 0

    def rows(number: int, back: bool) -> np.ndarray:
        return np.arange(24 * 3, dtype=np.float32).reshape(24, 3) + 1000 * number + 500 * back

    def slot(at: Mesh, number: int, back: bool) -> Any:
        if group.index not in processes_of(at):
            return None
        shapes = wire.shapes(at)
        parts = np.split(rows(number, back), len(shapes))
        return tuple(put_whole(part, shape.sharding) for part, shape in zip(parts, shapes, strict=True))

    for number in range(int(count)):
        for back in (False, True):
            [arrived] = move([Parcel(wire, slot(there if back else here, number, back), back)], group.transport, f"{number} {back}")
            if arrived is not None:
                kept.append((number, back, arrived))
    for number, back, arrived in kept:
        whole = np.concatenate([np.concatenate([np.asarray(s.data) for s in array.addressable_shards]) for array in arrived])
        wrong += not np.array_equal(whole, rows(number, back))
    return {"arrived": len(kept), "wrong": wrong, "scalar": scalar(group, here, there)}


def scalar(group: ProcessGroup, here: Any, there: Any) -> list[float] | None:
    from jax.sharding import NamedSharding, PartitionSpec

    places = [NamedSharding(mesh, PartitionSpec()) for mesh in (here, there)]
    value = put_whole(np.full((), 2.5, np.float32), places[0]) if group.index == 0 else None
    found = on_every_device(value, places[0], places[1], group.transport, "scalar")
    return [float(np.asarray(shard.data)) for shard in found.addressable_shards] if found is not None else None


def steps(group: ProcessGroup, graph_name: str) -> dict[str, Any]:
    """Gradients of a step, losses of twenty, and an evaluation; bad schedules and payloads are refused."""
    import optax
    from engines import build
    from multimodal_support import SPECS, omni, omni_samples
    from support import TEXT_SPECS, chain, text_samples

    if graph_name == "chain":
        graph, specs, samples = chain(teacher={"replicas": 2, "trainable": True}), TEXT_SPECS, text_samples(14)
    elif graph_name == "tensor":
        graph, specs, samples = chain(teacher={"axes": {"tensor": 2}, "trainable": True}), TEXT_SPECS, text_samples(14)
    else:
        graph, specs, samples = omni(vision={"replicas": 2}, llm={"replicas": 2}), SPECS, omni_samples(12)
    setup = build(graph, specs=specs, optimizer=optax.sgd(0.05), evaluation=True)
    plan, found = setup.engine.plan, {}
    gradients = setup.engine.accumulate(setup.preparer.prepare(samples, 0))
    found["gradients"] = {
        f"{section}/{path}": [
            [s.index and [[p.start, p.stop] for p in s.index], np.asarray(s.data).tolist()] for s in leaf.addressable_shards
        ]
        for section, leaves in gradients.items()
        for path, leaf in leaves.items()
    }
    found["losses"] = []
    for step in range(20):
        report = setup.engine.step(setup.preparer.prepare(samples, step)).wait().shared(plan)
        found["losses"].append(report.read(setup.objectives()))
    found["evaluation"] = setup.engine.evaluate([setup.preparer.prepare(samples, 0, training=False)])
    found["sections"] = {name: list(section.submesh.processes) for name, section in plan.sections.items()}
    return found


def disagree(group: ProcessGroup) -> dict[str, Any]:
    """One process makes another schedule; then its rows claim to be others."""
    from engines import build
    from support import chain, text_samples

    from maestro_jax.runtime import feeds
    from maestro_jax.schedules import InOrder, Sequential

    setup = build(chain(teacher={"trainable": True}))
    samples = text_samples(14)
    setup.preparer.policy = Sequential() if group.index else InOrder()
    found = {"schedule": anchor_of(lambda: setup.preparer.prepare(samples, 0))}
    setup.preparer.policy = InOrder()
    right = feeds.sent
    feeds.sent = (lambda *args: "0" * 16) if group.index == 0 else right
    window = setup.preparer.prepare(samples, 0)
    if group.index:
        found["payload"] = anchor_of(lambda: setup.engine.accumulate(window))
    else:
        # Its rows are fetched before they are refused.
        threading.Thread(target=lambda: setup.engine.accumulate(window), daemon=True).start()
    return found


def refused(group: ProcessGroup) -> dict[str, Any]:
    """A replica over both processes, which also run another one."""
    from engines import build
    from support import chain

    return {"layout": anchor_of(lambda: build(chain(teacher={"replicas": 1, "axes": {"tensor": 2}}, middle={"replicas": 1})))}


def reads(group: ProcessGroup) -> dict[str, Any]:
    """Each process reads its share, and besides what runs on its devices."""
    from engines import build
    from support import TEXT_SPECS, chain, text_samples

    from maestro_jax.data import LazySamples, Sample
    from maestro_jax.runtime.global_batch import Reader

    samples, read = text_samples(16), []

    class Counting(LazySamples):
        def __len__(self) -> int:
            return len(samples)

        def read(self, number: int) -> Sample:
            read.append(number)
            if number == 5:
                raise DataError("sample 5 is bad.", wanted="a", have="b", fix="c", anchor="d")
            return samples[number]

    setup = build(chain(teacher={"trainable": True, "replicas": 4}, middle={"submesh": "s"}, student={"submesh": "s"}))
    [(batch, bad)] = Reader(setup.engine.plan, TEXT_SPECS, skip=True).read(Counting(), [range(16)], "reads")
    share = sorted(read)
    setup.preparer.prepare(batch, 0)
    return {"share": share, "ids": [sample.id for sample in batch.samples], "bad": [e.what for e in bad], "all": len(set(read))}


def timeline(group: ProcessGroup) -> dict[str, Any]:
    """A recorded step, after one that is not."""
    from engines import build
    from support import chain, text_samples

    from maestro_jax.runtime.completions import Completions

    setup = build(chain(middle={"submesh": "s"}, student={"submesh": "s", "replicas": 2}, teacher={"replicas": 2}))
    setup.engine.step(setup.preparer.prepare(text_samples(14), 0)).wait()
    window = setup.preparer.prepare(text_samples(14), 1)
    completions = Completions(setup.engine.plan, window)
    list(setup.engine.run(window, completions))
    return completions.record().to_json()


def main(folder: str, function: str, *arguments: str) -> None:
    group = connect()
    # JAX is started before the first exchange.
    jax.devices()
    found = globals()[function](group, *arguments)
    (Path(folder) / f"{function}-{group.index}.json").write_text(json.dumps(found))
    if function == "disagree":
        # What was asked of the other process never comes, and an orderly end would wait for it.
        group.all_gather("end", None, seconds=30)
        os._exit(0)
    if function != "group_calls":
        try:
            group.all_gather("end", None, seconds=30)
        except ClusterError:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
