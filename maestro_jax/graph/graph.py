"""The graph that sections form, checked when it is made; modes are derived from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from ..config import configurable
from ..errors import EdgeError, GraphError, did_you_mean, set_by
from .section import SOURCE, Edge, Section


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionGraph:
    """Sections and the edges between them.

    Args:
        sections: every section, each with a name of its own.
        more_edges: edges beside those that the sections' `inputs` name.

    Raises:
        GraphError: two sections of one name, a cycle, no loss, or a trainable section from which no loss can be reached.
        EdgeError: an input from an unknown section, or from two producers.
    """

    sections: tuple[Section, ...]
    more_edges: tuple[Edge, ...] = ()

    def __post_init__(self) -> None:
        names = [s.name for s in self.sections]
        for name in names:
            if names.count(name) > 1:
                raise _graph_error(
                    f"two sections are called {name!r}", "a name of its own for each", str(names), "rename one", "section-names"
                )
        if not names:
            raise _graph_error("the graph has no sections", "at least one", "none", "pass sections=(...)", "section-names")
        self._check_edges()
        self._check_cycle()
        self._check_losses()

    def __getitem__(self, name: str) -> Section:
        return self.by_name[name]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Section]:
        """Sections by name."""
        return {s.name: s for s in self.sections}

    @functools.cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, in the order of the consumers."""
        named = []
        for section in self.sections:
            for name, source in section.inputs.items():
                found = SOURCE.fullmatch(source)
                if found is not None:
                    named.append(Edge(consumer=section.name, input=name, **found.groupdict()))
        return (*named, *self.more_edges)

    @functools.cached_property
    def order(self) -> tuple[str, ...]:
        """Section names, producers first; shorter than `sections` when there is a cycle."""
        order: list[str] = []
        while True:
            free = [s.name for s in self.sections if s.name not in order and all(e.producer in order for e in self.into(s.name))]
            if not free:
                return tuple(order)
            order.append(free[0])

    def _repr_html_(self) -> str:
        from ..drawing.graph import graph_html  # here, because only notebooks draw

        return graph_html(self)

    def into(self, section: str) -> tuple[Edge, ...]:
        """Edges that end in a section."""
        return tuple(e for e in self.edges if e.consumer == section)

    def out_of(self, section: str) -> tuple[Edge, ...]:
        """Edges that start in a section."""
        return tuple(e for e in self.edges if e.producer == section)

    @functools.cached_property
    def runs_backward(self) -> Mapping[str, bool]:
        """Whether each section runs backward: it, or anything upstream of it, is trainable."""
        found: dict[str, bool] = {}
        for name in self.order:
            found[name] = self.by_name[name].trainable or any(found[e.producer] for e in self.into(name))
        return found

    def mode(self, section: str) -> str:
        """A word for people: 'train', 'pass gradient' (frozen, below something trainable) or 'forward only'."""
        if self.by_name[section].trainable:
            return "train"
        return "pass gradient" if self.runs_backward[section] else "forward only"

    def _check_edges(self) -> None:
        names = [s.name for s in self.sections]
        seen: dict[tuple[str, str], Edge] = {}
        for edge in self.edges:
            for end in (edge.producer, edge.consumer):
                if end not in names:
                    raise EdgeError(
                        f"an edge names the section {end!r}, which is not in the graph.",
                        wanted=f"one of {names}{did_you_mean(end, names)}",
                        have=edge.label,
                        fix="correct the name, or add the section",
                        anchor="unknown-section",
                        set_by=_edge_origin(self, edge),
                    )
            other = seen.setdefault((edge.consumer, edge.input), edge)
            if other is not edge:
                raise EdgeError(
                    f"input {edge.input!r} of section {edge.consumer!r} has two producers.",
                    wanted="one producer for each input",
                    have=f"{other.label} and {edge.label}",
                    fix="give the second one an input name of its own, and combine them in the module",
                    anchor="two-producers",
                    set_by=_edge_origin(self, edge),
                )

    def _check_cycle(self) -> None:
        stuck = [s.name for s in self.sections if s.name not in self.order]
        if stuck:
            have = ", ".join(e.label for e in self.edges if e.consumer in stuck and e.producer in stuck)
            raise _graph_error(f"sections {stuck} form a cycle", "edges without a cycle", have, "remove one of these edges", "cycle")

    def _check_losses(self) -> None:
        with_loss = {s.name for s in self.sections if any(o.weight for o in s.objectives.values())}
        if any(s.trainable for s in self.sections) and not with_loss:
            have = {s.name: dict(s.objectives) for s in self.sections}
            fix = "add objectives={'name': Objective(weight=1.0)} to the section whose module returns that sum"
            raise _graph_error("no section has a loss", "an objective with a weight other than 0", str(have), fix, "no-loss")
        reaches = set(with_loss)
        for name in reversed(self.order):
            if any(e.consumer in reaches for e in self.out_of(name)):
                reaches.add(name)
        lost = [s.name for s in self.sections if s.trainable and s.name not in reaches]
        if lost:
            fix = "connect it to a section with a loss, give it an objective of its own, or set trainable=False"
            have = f"losses in {sorted(with_loss)}; edges {[e.label for e in self.edges]}"
            raise _graph_error(
                f"no loss can be reached from trainable {lost}", "a path from each trainable section to a loss", have, fix, "no-loss"
            )


def _edge_origin(graph: SectionGraph, edge: Edge) -> str:
    consumer = next((s for s in graph.sections if s.name == edge.consumer), None)
    return set_by(graph, "more_edges") if edge in graph.more_edges or consumer is None else set_by(consumer, "inputs")


def _graph_error(what: str, wanted: str, have: str, fix: str, anchor: str) -> GraphError:
    return GraphError(what + ".", wanted=wanted, have=have, fix=fix, anchor=anchor, set_by="SectionGraph.sections")
