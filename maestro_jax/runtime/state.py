"""The arrays that a section owns, and who may touch them when.

Ownership: all wrappers of a buffer share its fate, and a deleted array of several devices in a warm program is a crash,
not an exception. So each accumulator has one holder; a task takes it (it is donated) and puts the result back. Views of
parameters for the replicas are handed out for one call and never kept outside; an update drops them before it donates.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..meshes import put_whole, rewrapped
from ..models.weights import placed
from .arguments import REPLICATED, Arguments
from .compile import Compiled
from .plan import SectionPlan

Arrays = dict[str, jax.Array]

Reading = Callable[[str, int, int], None]
"""Told of initial weights that were read: the section, how many parameters so far, and of how many."""


class Holder:
    """Holds the accumulators of one replica; empty while a task owns them."""

    def __init__(self) -> None:
        self._held: tuple[Arrays, Arrays] | None = None

    def take(self) -> tuple[Arrays, Arrays]:
        """Returns (gradients, sums) and empties the holder, because the caller donates them."""
        if self._held is None:
            raise RuntimeError("accumulators are taken twice: a task did not put them back")
        held, self._held = self._held, None
        return held

    def put(self, gradients: Arrays, sums: Arrays) -> None:
        """Takes over the accumulators that a program returned."""
        self._held = gradients, sums


class SectionState:
    """Parameters, optimizer state and accumulators of one section, as far as they lie on this process's devices."""

    def __init__(self, section: SectionPlan, arguments: Arguments, values: Mapping[str, jax.Array]) -> None:
        """Takes the initial parameters, as `initial_values` returns them."""
        self.master: Arrays = {path: values[path] for path in section.trained}
        self.optimizer: Any = None
        self.frozen: Arrays = {path: values[path] for path in section.frozen}
        self.compute: Arrays = {}
        replicas = self._replicas = section.submesh.local_replicas
        # Every step wraps the same shards again, so what they are wrapped as is made once.
        self._param_shapes = {r: arguments.params(r) for r in replicas}
        self._accumulator_shapes = {r: (arguments.gradients(r), arguments.sums(r)) for r in replicas}
        self._stack_shapes = arguments.gradient_stack(), arguments.sums_stack()
        self._params: dict[int, Arrays] = {}
        self._frozen = {r: _view(self.frozen, arguments.frozen(r)) for r in replicas}
        self._ahead = not section.section.trainable
        self._holders: dict[int, dict[int, Holder]] = {}
        self._spare: list[tuple[Arrays, Arrays]] = [self._zero_stacks()]

    def params(self, replica: int) -> tuple[Arrays, Arrays]:
        """Views of (updated, frozen) parameters in compute precision for one replica; not to be kept."""
        return self._params[replica], self._frozen[replica]

    def set_compute(self, compute: Arrays) -> None:
        """Takes over new compute parameters and makes the replicas' views of them."""
        self.compute = compute
        self._params = {r: _view(compute, shapes) for r, shapes in self._param_shapes.items()}

    def drop_views(self) -> None:
        """Forgets all views of compute parameters, before an update donates them."""
        self._params = {}

    def begin_window(self) -> None:
        """Forgets sums of steps that an earlier window, broken off in its midst, ran ahead into."""
        if self._ahead:
            self._holders.clear()

    def holder(self, replica: int, step: int) -> Holder:
        """The accumulators of a replica in a step.

        Args:
            replica: its number.
            step: number of the step in its window. A section that has nothing to update may run ahead into the next step before this
                one has been reduced, so it has accumulators (of sums alone) for each step under way.
        """
        return self._holders_of(step)[replica]

    def take_stacks(self, step: int) -> tuple[Arrays, Arrays]:
        """Empties all holders of a step and returns their accumulators as one stack `[replica, ...]`, without a copy."""
        taken = [holder.take() for holder in self._holders_of(step).values()]
        del self._holders[step if self._ahead else 0]
        gradients, sums = self._stack_shapes
        return _stacked(gradients, [t[0] for t in taken]), _stacked(sums, [t[1] for t in taken])

    def put_stacks(self, gradients: Arrays, sums: Arrays) -> None:
        """Takes over zeroed stacks; each replica's part of them is its next accumulators, without a copy."""
        self._spare.append((gradients, sums))

    def _holders_of(self, step: int) -> dict[int, Holder]:
        key = step if self._ahead else 0
        if key not in self._holders:
            gradients, sums = self._spare.pop() if self._spare else self._zero_stacks()
            self._holders[key] = {replica: Holder() for replica in self._replicas}
            for replica, (gradient_shapes, sum_shapes) in self._accumulator_shapes.items():
                self._holders[key][replica].put(_view(gradients, gradient_shapes), _view(sums, sum_shapes))
        return self._holders[key]

    def _zero_stacks(self) -> tuple[Arrays, Arrays]:
        gradients, sums = self._stack_shapes
        return zeros(gradients), zeros(sums)


def initial_values(
    section: SectionPlan, arguments: Arguments, seed: int, given: Mapping[str, Any], reading: Reading | None = None
) -> Arrays:
    """Makes the initial parameters of a section.

    Args:
        section: the section.
        arguments: its shapes and shardings.
        seed: of the run; values do not depend on devices, replicas or axes.
        given: path -> numpy-like array with `shape` and slicing, for parameters that come from files.
        reading: called after each parameter that was read.

    Returns:
        path -> array; updated ones as float32 master copies spread over replicas, frozen ones in compute precision.
    """
    frozen = {p: section.submesh.whole(section.specs[p]) for p in section.frozen}
    shapes: dict[str, Any] = {**section.trained, **section.frozen}
    shardings = {**{p: s.sharding for p, s in arguments.master().items()}, **frozen}
    bucket = section.section.buckets[-1]
    batch, inputs = section.shapes.batch[bucket], section.shapes.inputs[bucket]

    def init() -> Arrays:
        # The key is made inside the program, so that nothing moves between devices.
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(section.section.name.encode()))
        values = section.shapes.adapter.init(key, batch, inputs)
        return {p: values[p].astype(s.dtype) for p, s in shapes.items() if p not in given}

    made: Arrays = {}
    if any(p not in given for p in shapes):
        wanted = {p: s for p, s in shardings.items() if p not in given}
        with jax.set_mesh(section.submesh.mesh):
            made = jax.jit(init, out_shardings=wanted)()
    for number, (path, value) in enumerate(given.items(), start=1):
        made[path] = placed(value, shapes[path].dtype, shardings[path])
        if reading is not None:
            reading(section.section.name, number, len(given))
    return made


def make_states(compiled: Compiled, values: Mapping[str, Arrays], optimizers: Mapping[str, Any] | None = None) -> dict[str, SectionState]:
    """Makes the state of every section: optimizer state with pinned shardings, compute parameters, zero accumulators.

    Args:
        compiled: programs of the plan.
        values: section -> parameters, as `initial_values` returns them.
        optimizers: section -> optimizer state that goes on; None begins anew.
    """
    states = {}
    for name, section in compiled.plan.local.items():
        state = SectionState(section, compiled.arguments[name], values[name])
        with jax.set_mesh(section.submesh.mesh):
            if name in compiled.trained and optimizers is not None:
                state.optimizer = optimizers[name]
            elif name in compiled.trained:
                shardings = jax.tree.map(lambda s: s.sharding, compiled.optimizer_states[name])
                state.optimizer = jax.jit(compiled.optimizers[name].init, out_shardings=shardings)(state.master)
            state.set_compute(_cast(state.master, compiled.arguments[name].compute()))
        states[name] = state
    return states


def _cast(master: Arrays, compute: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
    """Compute parameters from master copies; a copy even where dtypes agree, because both are donated by the update."""
    if not master:
        return {}

    def cast(values: Arrays) -> Arrays:
        return {path: jnp.array(value, compute[path].dtype, copy=True) for path, value in values.items()}

    return jax.jit(cast, out_shardings={path: s.sharding for path, s in compute.items()})(master)


def _view(arrays: Mapping[str, jax.Array], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Arrays:
    """The shards that lie on the wanted devices, without a copy."""
    return {path: rewrapped(shape, [arrays[path]]) for path, shape in wanted.items()}


def _stacked(wanted: Mapping[str, jax.ShapeDtypeStruct], parts: list[Arrays]) -> Arrays:
    """The accumulators of all replicas as one array each, without a copy."""
    return {path: rewrapped(shape, [part[path] for part in parts]) for path, shape in wanted.items()}


def zeros(shapes: Any) -> Any:
    """Puts zeros on devices for a tree of shapes with shardings."""
    return jax.tree.map(lambda s: put_whole(np.zeros(s.shape, s.dtype), s.sharding), shapes)


def whole(section: SectionPlan, value: Any) -> jax.Array:
    """Puts a small host value on every device of a section."""
    return put_whole(np.asarray(value), section.submesh.whole(REPLICATED))
