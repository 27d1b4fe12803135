"""Compiles the task programs of one section and bucket, for all of its replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..meshes import processes_of
from .arguments import Arguments, shaped, shardings
from .load import load_for
from .programs import SectionFunctions

Tree = Any


class TaskPrograms:
    """Makes the programs of a section at one bucket: compiled for replica 0, loaded for the others where that works.

    Args:
        functions: what the section computes.
        arguments: what it takes.
        bucket: size in units.
    """

    def __init__(self, functions: SectionFunctions, arguments: Arguments, bucket: int) -> None:
        self.functions, self.arguments, self.bucket = functions, arguments, bucket
        self._made: dict[tuple[str, int], Any] = {}

    def make(self, kind: str, replica: int) -> tuple[Any, bool]:
        """Makes a program; a forward before its backward, and the first replica of this process before the others.

        Args:
            kind: "forward", "backward", "forward_backward" or "evaluate".
            replica: number of the replica.

        Returns:
            The program, and whether it was loaded rather than compiled.
        """
        loaded = self._load(kind, replica) if replica != self._first else None
        program = loaded if loaded is not None else self._compile(kind, replica)
        self._made[kind, replica] = program
        return program, loaded is not None

    def takes(self, kind: str, replica: int) -> tuple[Tree, ...]:
        """Shapes of everything that a kind of program takes on a replica."""
        a = self.arguments
        training = kind != "evaluate" and (kind != "forward" or a.plan.graph.runs_backward[a.section.section.name])
        inputs = a.params(replica), a.frozen(replica), a.feed(self.bucket, replica, training), a.slots_in(replica)
        if kind == "backward":
            return *inputs, self.residuals(replica), a.slots_out(replica), a.gradients(replica)
        if kind == "forward_backward":
            return *inputs, a.sums(replica), a.gradients(replica)
        return *inputs, a.sums(replica)

    def _keeps_residuals(self) -> bool:
        return self.arguments.section.keeps_residuals

    def _compile(self, kind: str, replica: int) -> Any:
        function, donated = self._function(kind)
        with jax.set_mesh(self.arguments.section.submesh.replica_meshes[replica]):
            jitted = jax.jit(function, donate_argnums=donated, out_shardings=self._gives(kind, replica))
            return jitted.lower(*self.takes(kind, replica)).compile()

    def _load(self, kind: str, replica: int) -> Any | None:
        submesh = self.arguments.section.submesh
        if len(processes_of(submesh.replica_meshes[replica])) > 1:
            # What is loaded is run once, which every process of the replica would have to do at the same time.
            return None
        examples = self.takes(kind, self._first), self.takes(kind, replica)
        return load_for(self._made[kind, self._first], submesh.replica_devices(self._first), submesh.replica_devices(replica), examples)

    @property
    def _first(self) -> int:
        """The first replica that this process has devices of."""
        return self.arguments.section.submesh.local_replicas[0]

    def _function(self, kind: str) -> tuple[Callable[..., Any], tuple[int, ...]]:
        """The function of a kind, and the arguments that it donates: sums and accumulators, which come back."""
        if kind == "backward":
            return self.functions.backward, (6,)
        if kind == "forward_backward":
            return self.functions.forward_backward, (4, 5)
        keeps = kind == "forward" and self._keeps_residuals()
        return (self.functions.forward_residuals if keeps else self.functions.forward), (4,)

    def _gives(self, kind: str, replica: int) -> Tree:
        """Shardings of the results; None where XLA may choose (residuals and markers, which nothing feeds back)."""
        a = self.arguments
        slots_in, sums, gradients = a.slots_in(replica), shardings(a.sums(replica)), shardings(a.gradients(replica))
        back = shardings({e.edge.label: slots_in[e.edge.label] for e in a.into if e.backward})
        payload = shardings(a.slots_out(replica))
        if kind == "backward":
            return back, gradients, None
        if kind == "forward_backward":
            return back, sums, gradients, None
        return (payload, sums, None, None) if kind == "forward" and self._keeps_residuals() else (payload, sums, None)

    def residuals(self, replica: int) -> Tree:
        """Residuals as the compiled forward of a replica lays them out, which its lowered program does not know yet."""
        if not self._keeps_residuals():
            return ()
        shapes, places = self._made["forward", self._first].out_info[2], self._made["forward", replica].output_shardings[2]
        return jax.tree.map(lambda shape, place: shaped(shape.shape, shape.dtype, place), shapes, places)

    def abstract_residuals(self) -> Tree:
        """Residuals without shardings, known before anything is compiled."""
        name = self.arguments.section.section.name
        consumed = bool(self.arguments.plan.graph.out_of(name))
        if not (self._keeps_residuals() and consumed and self.arguments.plan.graph.runs_backward[name]):
            return ()
        with jax.set_mesh(self.arguments.section.submesh.replica_meshes[0]):
            kept = jax.eval_shape(self.functions.forward_residuals, *self.takes("forward", 0))[2]
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), kept)
