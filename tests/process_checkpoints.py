"""Several processes that save and restore the same arrays, each on its own devices."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from damage_support import die_inside_a_save, flip
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maestro_jax import checkpoint
from maestro_jax.checkpoint import Checkpoints, Commit
from maestro_jax.errors import CheckpointError
from maestro_jax.manifest import read_manifest
from maestro_jax.meshes import ProcessGroup
from maestro_jax.resume import newest_good
from maestro_jax.runtime.snapshot import Snapshot, flat

P = PartitionSpec

PLACES: Mapping[int, Mapping[str, tuple[slice, tuple[int, ...]]]] = {
    1: {"first": (slice(0, 3), (3, 1)), "alone": (slice(3, 5), (1, 2)), "both": (slice(0, 4), (2, 2)), "teacher": (slice(5, 6), (1, 1))},
    # Two devices for each process.
    2: {"first": (slice(0, 2), (2, 1)), "alone": (slice(2, 4), (2, 1)), "both": (slice(0, 4), (2, 2)), "teacher": (slice(2, 4), (1, 2))},
    3: {"first": (slice(4, 6), (1, 2)), "alone": (slice(0, 1), (1, 1)), "both": (slice(0, 6), (2, 3)), "teacher": (slice(2, 6), (2, 2))},
}
"""Number of processes -> section -> its devices among all, and the sizes of its mesh."""

ARRAYS: Mapping[str, tuple[tuple[int, ...], str, PartitionSpec]] = {
    "parameters/layer/cut": ((12, 6), "float32", P("x", "y")),
    "parameters/layer/copied": ((6, 5), "bfloat16", P("y")),
    "optimizer/0/moments": ((12, 3, 2), "float32", P(("x", "y"))),
    "optimizer/0/count": ((), "int32", P()),
    "optimizer/0/none": ((0, 3), "uint32", P()),
}


def values(section: str, path: str, step: int) -> np.ndarray:
    """The same in every process, and other ones in every array and step."""
    shape, dtype, _ = ARRAYS[path]
    random = np.random.default_rng(zlib.crc32(f"{section} {path} {step if section != 'teacher' else 0}".encode()))
    return (1000 * random.random(shape)).astype(jnp.dtype(dtype))


def snapshot(count: int, make: Callable[[str, str, NamedSharding], Any], wanted: Callable[[Mesh], bool] = lambda _: True) -> Snapshot:
    """All sections on the devices that they have with so many processes; the teacher is frozen."""
    trained: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    for section, (place, sizes) in PLACES[count].items():
        mesh = Mesh(np.array(jax.devices()[place]).reshape(sizes), ("x", "y"))
        if not wanted(mesh):
            continue
        leaves = {path: make(section, path, NamedSharding(mesh, spec)) for path, (_, _, spec) in ARRAYS.items()}
        layer = {path.rpartition("/")[2]: leaf for path, leaf in leaves.items() if path.startswith("parameters")}
        inner = {path.rpartition("/")[2]: leaf for path, leaf in leaves.items() if path.startswith("optimizer")}
        if section == "teacher":
            frozen[section] = {"layer": layer}
        else:
            trained[section] = {"parameters": {"layer": layer}, "optimizer": {"0": inner}}
    return Snapshot(trained=trained, frozen=frozen)


def shapes(count: int) -> Snapshot:
    return snapshot(count, lambda _, path, place: jax.ShapeDtypeStruct(ARRAYS[path][0], jnp.dtype(ARRAYS[path][1]), sharding=place))


def arrays(count: int, step: int) -> Snapshot:
    """The sections that have devices of this process."""

    def make(section: str, path: str, place: NamedSharding) -> jax.Array:
        whole = values(section, path, step)
        return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index or ()], dtype=whole.dtype)

    return snapshot(count, make, lambda mesh: any(device.process_index == jax.process_index() for device in mesh.devices.flat))


def differing(found: Snapshot, step: int) -> list[str]:
    """Arrays of which a shard on this process's devices has other bits than were saved."""
    trees = {**found.trained, **{name: {"parameters": tree} for name, tree in found.frozen.items()}}
    wrong = []
    for section, tree in trees.items():
        for path, array in flat(tree).items():
            want = values(section, path, step)
            for shard in array.addressable_shards:
                have = np.asarray(shard.data)
                if have.dtype != want.dtype or have.tobytes() != want[shard.index].tobytes():
                    wrong.append(f"{section}/{path}")
    return wrong


def differing_on_host(found: Mapping[str, np.ndarray], section: str, step: int) -> list[str]:
    """The same of a section's parameters that were read to the host."""
    want = {path.removeprefix("parameters/"): values(section, path, step) for path in ARRAYS if path.startswith("parameters")}
    assert found.keys() == want.keys()
    return [path for path, each in want.items() if (found[path].dtype, found[path].tobytes()) != (each.dtype, each.tobytes())]


class Job:
    """What one process does, step by step; all do the same."""

    def __init__(self, folder: Path, group: ProcessGroup) -> None:
        self.folder, self.group, self.told = folder, group, {}
        self.state = {"signature": shapes(group.count).signature()}
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=2, keep_best="first/loss", group=group)

    def save(self, step: int, without: str = "", heldout: float | None = None) -> str | None:
        """Saves and waits; returns the error."""
        whole = arrays(self.group.count, step)
        kept = Snapshot(trained={name: tree for name, tree in whole.trained.items() if name != without}, frozen=whole.frozen)
        try:
            self.checkpoints.save(step, kept, self.state, None if heldout is None else {"first/loss": heldout})
            # On CPU a donated array's memory is used again.
            jax.tree.map(lambda array: array.delete(), dict(kept.trained))
            self.checkpoints.wait()
        except CheckpointError as error:
            return str(error)
        return None

    def restored(self, commit: Commit) -> dict[str, Any]:
        found = self.checkpoints.restore(commit, shapes(self.group.count))
        return {"sections": sorted([*found.trained, *found.frozen]), "differing": differing(found, commit.step)}

    def all_is_well(self) -> None:
        """Two processes save five times; twice something is wrong in the second one."""
        self.told["saved"] = [self.save(1, heldout=0.5), self.save(2, heldout=0.7), self.save(3, heldout=0.6)]
        commits = self.checkpoints.commits()
        self.told["commits"] = [[commit.step, commit.frozen, str(commit.path)] for commit in commits]
        best = self.checkpoints.best()
        self.told["best"] = best and [best[0], best[1].step]
        self.told["restored"] = self.restored(commits[0])
        if self.group.first:
            self.told["read"] = {
                name: differing_on_host(self.checkpoints.read_parameters(commits[0], name), name, 3) for name in PLACES[self.group.count]
            }
        with self.disk_full() if not self.group.first else contextlib.nullcontext():
            self.told["full"] = self.save(4)
        self.told["left out"] = self.save(5, without="alone")
        self.told["kept"] = [commit.step for commit in self.checkpoints.commits()]
        self.told["problems"] = [self.checkpoints.problem(commit) for commit in commits]

    def harmed(self) -> None:
        """A file that another process wrote is damaged, which is seen by all."""
        self.group.agreed("test", "before", "the moment")
        newest = self.checkpoints.commits()[0]
        if self.group.first:
            flip(next((newest.path / "alone").iterdir()))
        self.group.agreed("test", "after", "the moment")
        self.told["problem"] = self.checkpoints.problem(newest)
        notes: list[str] = []
        good = newest_good(self.checkpoints, notes.append, "the test")
        self.told["good"] = good and good.step
        self.told["notes"] = notes
        self.group.agreed("test", "seen", "the moment")
        if self.group.first:
            os.truncate(next((newest.path / "alone").iterdir()), 300)
        self.group.agreed("test", "cut", "the moment")
        try:
            self.checkpoints.restore(newest, shapes(self.group.count))
        except CheckpointError as error:
            self.told["unreadable"] = str(error)

    def restore(self) -> None:
        """Any number of processes goes on."""
        commit = self.checkpoints.commits()[0]
        self.told["problem"] = self.checkpoints.problem(commit)
        self.told["restored"] = self.restored(commit)
        self.told["saved"] = self.save(7)

    def killed(self, process: str, moment: str) -> None:
        """A process ends inside a save, which the others cannot complete then."""
        self.told["saved"] = self.save(1)
        if self.group.index == int(process):
            die_inside_a_save(moment)
        self.save(2)
        raise RuntimeError("nothing was killed")

    @contextlib.contextmanager
    def disk_full(self) -> Iterator[None]:
        """This process cannot write."""

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        write, checkpoint.write_pieces = checkpoint.write_pieces, full
        yield
        checkpoint.write_pieces = write


def do(group: ProcessGroup, folder: str, names: str, *arguments: str) -> dict[str, Any]:
    """Takes part in jobs ("all_is_well+harmed"), as one of the processes; returns what was told."""
    job = Job(Path(folder), group)
    for name in names.split("+"):
        getattr(job, name)(*arguments)
    job.checkpoints.close()
    return job.told


def files_of(folder: Path) -> list[str]:
    """What the manifest of a folder names."""
    content = read_manifest(folder)
    assert content is not None
    return list(content["files"])
