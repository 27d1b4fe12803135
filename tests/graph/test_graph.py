"""A graph that cannot be trained is refused with the reason; modes are derived."""

from __future__ import annotations

from typing import Any

import pytest
from support import chain

from maestro_jax.errors import EdgeError, GraphError, MaestroError
from maestro_jax.graph import Edge, Objective, Section, SectionGraph

LOSS = {"loss": Objective()}


def section(name: str, *producers: str, **fields: Any) -> Section:
    """A section with one input from each producer."""
    inputs = {f"from_{p}": f"{p}.hidden" for p in producers}
    return Section(**{"name": name, "module": None, "inputs": inputs, **fields})


def refused(kind: type[MaestroError], *sections: Section, more_edges: tuple[Edge, ...] = ()) -> MaestroError:
    with pytest.raises(kind) as caught:
        SectionGraph(sections=sections, more_edges=more_edges)
    return caught.value


@pytest.mark.quick
def test_cycle_names_its_sections_and_edges() -> None:
    error = refused(GraphError, section("top"), section("a", "b", "top"), section("b", "a", objectives=LOSS))
    assert str(error) == (
        "sections ['a', 'b'] form a cycle.\n"
        "  wanted   edges without a cycle\n"
        "  have     b.hidden->a.from_b, a.hidden->b.from_a\n"
        "  set by   SectionGraph.sections\n"
        "  fix      remove one of these edges\n"
        "  help     docs/errors.md#cycle"
    )


def test_a_section_that_feeds_itself_is_a_cycle() -> None:
    assert refused(GraphError, section("a", "a", objectives=LOSS)).have == "a.hidden->a.from_a"


@pytest.mark.quick
def test_unknown_section_suggests_a_known_one() -> None:
    error = refused(EdgeError, section("teacher"), section("student", "techer", objectives=LOSS))
    assert str(error) == (
        "an edge names the section 'techer', which is not in the graph.\n"
        "  wanted   one of ['teacher', 'student'] (did you mean 'teacher'?)\n"
        "  have     techer.hidden->student.from_techer\n"
        "  set by   the calling program: Section('student').inputs\n"
        "  fix      correct the name, or add the section\n"
        "  help     docs/errors.md#unknown-section"
    )


def test_unknown_consumer_of_a_further_edge() -> None:
    edge = Edge(producer="a", output="hidden", consumer="b", input="x")
    error = refused(EdgeError, section("a", objectives=LOSS), more_edges=(edge,))
    assert (error.what, error.set_by) == (
        "an edge names the section 'b', which is not in the graph.",
        "the calling program: SectionGraph.more_edges",
    )


@pytest.mark.quick
def test_two_producers_of_one_input() -> None:
    edge = Edge(producer="b", output="other", consumer="c", input="from_a")
    error = refused(EdgeError, section("a"), section("b"), section("c", "a", objectives=LOSS), more_edges=(edge,))
    assert str(error) == (
        "input 'from_a' of section 'c' has two producers.\n"
        "  wanted   one producer for each input\n"
        "  have     a.hidden->c.from_a and b.other->c.from_a\n"
        "  set by   the calling program: SectionGraph.more_edges\n"
        "  fix      give the second one an input name of its own, and combine them in the module\n"
        "  help     docs/errors.md#two-producers"
    )


def test_the_same_edge_twice_is_refused() -> None:
    edge = Edge(producer="a", output="hidden", consumer="b", input="from_a")
    error = refused(EdgeError, section("a"), section("b", "a", objectives=LOSS), more_edges=(edge,))
    assert error.have == "a.hidden->b.from_a and a.hidden->b.from_a"


@pytest.mark.quick
def test_graph_without_a_loss() -> None:
    reported = {"loss": Objective(weight=0.0)}
    error = refused(GraphError, section("a", objectives=reported))
    assert str(error) == (
        "no section has a loss.\n"
        "  wanted   an objective with a weight other than 0\n"
        f"  have     {{'a': {reported}}}\n"
        "  set by   SectionGraph.sections\n"
        "  fix      add objectives={'name': Objective(weight=1.0)} to the section whose module returns that sum\n"
        "  help     docs/errors.md#no-loss"
    )


@pytest.mark.quick
def test_trainable_section_that_reaches_no_loss() -> None:
    error = refused(GraphError, section("a"), section("lost", "a"), section("b", "a", objectives=LOSS))
    assert str(error) == (
        "no loss can be reached from trainable ['lost'].\n"
        "  wanted   a path from each trainable section to a loss\n"
        "  have     losses in ['b']; edges ['a.hidden->lost.from_a', 'a.hidden->b.from_a']\n"
        "  set by   SectionGraph.sections\n"
        "  fix      connect it to a section with a loss, give it an objective of its own, or set trainable=False\n"
        "  help     docs/errors.md#no-loss"
    )


def test_a_loss_is_reached_through_frozen_sections() -> None:
    graph = SectionGraph(sections=(section("a"), section("b", "a", trainable=False), section("c", "b", trainable=False, objectives=LOSS)))
    assert [graph.mode(name) for name in "abc"] == ["train", "pass gradient", "pass gradient"]


def test_nothing_trainable_needs_no_loss() -> None:
    assert SectionGraph(sections=(section("a", trainable=False),)).mode("a") == "forward only"


@pytest.mark.quick
def test_two_sections_of_one_name() -> None:
    error = refused(GraphError, section("a"), section("b"), section("a", objectives=LOSS))
    assert str(error) == (
        "two sections are called 'a'.\n"
        "  wanted   a name of its own for each\n"
        "  have     ['a', 'b', 'a']\n"
        "  set by   SectionGraph.sections\n"
        "  fix      rename one\n"
        "  help     docs/errors.md#section-names"
    )


def test_graph_without_sections() -> None:
    assert refused(GraphError).what == "the graph has no sections."


@pytest.mark.quick
@pytest.mark.parametrize(
    ("teacher", "middle", "student", "modes"),
    [
        (False, False, True, ["forward only", "forward only", "train"]),
        (True, False, True, ["train", "pass gradient", "train"]),
        (False, True, False, ["forward only", "train", "pass gradient"]),
        (False, False, False, ["forward only", "forward only", "forward only"]),
    ],
)
def test_modes_are_derived(teacher: bool, middle: bool, student: bool, modes: list[str]) -> None:
    graph = chain(teacher={"trainable": teacher}, middle={"trainable": middle}, student={"trainable": student})
    assert [graph.mode(name) for name in graph.order] == modes
    assert dict(graph.runs_backward) == {name: mode != "forward only" for name, mode in zip(graph.order, modes, strict=True)}


def test_one_trainable_producer_suffices_for_a_backward() -> None:
    graph = SectionGraph(sections=(section("a", trainable=False), section("b"), section("c", "a", "b", trainable=False, objectives=LOSS)))
    assert dict(graph.runs_backward) == {"a": False, "b": True, "c": True}


def test_order_puts_producers_first() -> None:
    graph = SectionGraph(sections=(section("d", "c", objectives=LOSS), section("c", "a"), section("b", objectives=LOSS), section("a")))
    assert graph.order == ("b", "a", "c", "d")


def test_edges_of_a_section() -> None:
    more = Edge(producer="a", output="extra", consumer="c", input="extra")
    graph = SectionGraph(sections=(section("a"), section("b", "a"), section("c", "a", "b", objectives=LOSS)), more_edges=(more,))
    assert [e.label for e in graph.into("c")] == ["a.hidden->c.from_a", "b.hidden->c.from_b", "a.extra->c.extra"]
    assert [e.label for e in graph.out_of("a")] == ["a.hidden->b.from_a", "a.hidden->c.from_a", "a.extra->c.extra"]
    assert graph["b"].name == "b"
