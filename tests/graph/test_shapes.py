"""Abstract evaluation finds what crosses each edge, and explains what does not fit, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from support import TEXT_SPECS, chain, middle_functions, student_functions, teacher_functions

from maestro_jax.data import ArraySpec
from maestro_jax.errors import DataError, EdgeError, GraphError, MaestroError
from maestro_jax.graph import Objective, Section, SectionGraph, graph_shapes
from maestro_jax.graph.shapes import batch_shapes, compute_shape


def refused(kind: type[MaestroError], graph: SectionGraph) -> MaestroError:
    with pytest.raises(kind) as caught:
        graph_shapes(graph, TEXT_SPECS)
    return caught.value


def returning(outputs: Callable[[jax.Array], Any]) -> Any:
    """A module that returns `outputs(tokens)` [rows, length]."""
    return lambda key: {"scale": jnp.ones(())}, lambda params, batch, **inputs: outputs(batch["tokens"])


def hidden(shape: Callable[[tuple[int, ...]], tuple[int, ...]], dtype: str = "float32") -> Any:
    return returning(lambda tokens: {"hidden": jnp.zeros(shape(tokens.shape), dtype)})


@pytest.mark.quick
def test_shapes_of_a_chain() -> None:
    shapes = graph_shapes(chain(width=4, teacher={"row_length": 16}), TEXT_SPECS)
    row = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert dict(shapes.edges) == {"teacher.hidden->middle.hidden": row, "middle.hidden->student.hidden": row}
    teacher, student = shapes.sections["teacher"], shapes.sections["student"]
    assert {b: arrays["tokens"].shape for b, arrays in teacher.batch.items()} == {32: (2, 16), 64: (4, 16)}
    assert {n: s.shape for n, s in teacher.params.items()} == {"embed": (16, 4), "inner": (4, 4)}
    assert teacher.outputs["hidden"].shape == (4, 16, 4)
    assert {b: inputs["hidden"].shape for b, inputs in student.inputs.items()} == {32: (1, 32, 4)}
    assert {n: s.shape for n, s in student.outputs.items()} == {"cross_entropy": (), "square": ()}


def test_arrays_that_a_module_receives() -> None:
    section = Section(name="a", module=None, reads="image", microbatch=12, row_length=4)
    specs = {"image": {"pixels": ArraySpec(shape=(3, 2), dtype="uint8")}}
    assert {n: (s.shape, str(s.dtype)) for n, s in batch_shapes(section, specs, 12).items()} == {
        "pixels": ((3, 4, 3, 2), "uint8"),
        "segment_ids": ((3, 4), "int32"),
        "positions": ((3, 4), "int32"),
        "sample_ids": ((3, 4), "uint32"),
    }


def test_edge_carries_the_compute_precision_of_its_producer() -> None:
    shapes = graph_shapes(chain(teacher={"dtype": "bfloat16"}), TEXT_SPECS)
    assert shapes.edges["teacher.hidden->middle.hidden"].dtype == jnp.bfloat16
    assert shapes.sections["teacher"].params["embed"].dtype == jnp.float32


def test_compute_precision_leaves_whole_numbers_alone() -> None:
    assert compute_shape(jax.ShapeDtypeStruct((2,), jnp.float32), "bfloat16") == jax.ShapeDtypeStruct((2,), jnp.bfloat16)
    assert compute_shape(jax.ShapeDtypeStruct((2,), jnp.int32), "bfloat16") == jax.ShapeDtypeStruct((2,), jnp.int32)


@pytest.mark.quick
def test_unknown_output_suggests_a_known_one() -> None:
    error = refused(EdgeError, chain(middle={"inputs": {"hidden": "teacher.hiden"}}))
    assert str(error) == (
        "section 'teacher' has no output 'hiden'.\n"
        "  wanted   one of ['hidden'] (did you mean 'hidden'?)\n"
        "  have     teacher.hiden->middle.hidden\n"
        "  set by   the calling program: Section('middle').inputs\n"
        "  fix      correct the name in inputs, or return it from the module\n"
        "  help     docs/errors.md#unknown-output"
    )


@pytest.mark.quick
def test_widths_that_do_not_agree_are_explained() -> None:
    error = refused(EdgeError, chain(width=8, middle={"module": middle_functions(6)}))
    assert error.what == "the module of section 'middle' fails on the shapes that it would receive."
    assert error.wanted == "a module that takes (batch, **inputs) and returns a dict"
    assert error.have.startswith("TypeError: dot_general requires contracting dimensions to have the same shape")
    assert error.have.endswith("\ninputs: {'hidden': 'float32[1, 48, 8]'}")
    assert (error.set_by, error.anchor) == ("the calling program: Section('middle').inputs", "module-fails")
    assert error.fix == "make the widths and dtypes of the edge agree at both ends, or correct the module"


def test_an_input_that_the_module_does_not_take() -> None:
    error = refused(EdgeError, chain(middle={"inputs": {"guide": "teacher.hidden"}}, student={"inputs": {"hidden": "teacher.hidden"}}))
    assert "unexpected keyword argument 'guide'" in error.have


def test_a_module_that_fails_without_inputs_is_a_matter_of_the_graph() -> None:
    error = refused(GraphError, chain(teacher={"module": returning(lambda tokens: tokens["no"])}))
    assert error.what == "the module of section 'teacher' fails on the shapes that it would receive."
    assert error.have.endswith("\ninputs: none")
    assert error.set_by == "the calling program: Section('teacher').module"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("module", "have"),
    [
        (hidden(lambda rows: rows), "float32[1, 64]"),
        (hidden(lambda rows: (rows[0], 3, 8)), "float32[1, 3, 8]"),
        (hidden(lambda rows: (*rows, 2, 8)), "float32[1, 64, 2, 8]"),
        (hidden(lambda rows: (*rows, 8), "int32"), "int32[1, 64, 8]"),
    ],
)
def test_output_that_is_not_one_row_a_unit_cannot_cross(module: Any, have: str) -> None:
    error = refused(EdgeError, chain(teacher={"module": module}))
    assert str(error) == (
        "output 'hidden' of section 'teacher' cannot cross an edge.\n"
        "  wanted   a floating-point array [rows, length, d] = [1, 64, d]\n"
        f"  have     {have}\n"
        "  set by   the calling program: Section('middle').inputs\n"
        "  fix      return one row per unit of the micro-batch\n"
        "  help     docs/errors.md#edge-shape"
    )


@pytest.mark.quick
def test_missing_objective_suggests_a_known_one() -> None:
    error = refused(GraphError, chain(student={"objectives": {"cross_entropie": Objective()}}))
    assert str(error) == (
        "objective 'cross_entropie' of section 'student' is not a scalar that its module returns.\n"
        "  wanted   'cross_entropie': a float32 scalar, the sum over the micro-batch\n"
        "  have     the keys ['cross_entropy', 'square'] (did you mean 'cross_entropy'?)\n"
        "  set by   the calling program: Section('student').objectives\n"
        "  fix      return the sum (not the mean) under that name, or correct Section.objectives\n"
        "  help     docs/errors.md#objective-missing"
    )


def test_objective_that_is_not_a_scalar() -> None:
    error = refused(GraphError, chain(teacher={"objectives": {"hidden": Objective()}}))
    assert error.have == "float32[1, 64, 8]"


@pytest.mark.parametrize(
    "outputs",
    [lambda tokens: jnp.zeros((*tokens.shape, 8)), lambda tokens: (jnp.zeros((*tokens.shape, 8)),), lambda tokens: None],
    ids=["array", "tuple", "none"],
)
@pytest.mark.parametrize("objectives", [{}, {"loss": Objective()}], ids=["output", "objective"])
def test_module_that_returns_no_dict_is_refused(outputs: Callable[[jax.Array], Any], objectives: dict[str, Objective]) -> None:
    error = refused(GraphError, chain(teacher={"module": returning(outputs), "objectives": objectives}))
    assert error.what == "the module of section 'teacher' fails on the shapes that it would receive."
    assert error.wanted == "a module that takes (batch, **inputs) and returns a dict"


def test_objective_that_is_a_dict_is_refused() -> None:
    module = returning(lambda tokens: {"hidden": jnp.zeros((*tokens.shape, 8)), "loss": {"part": jnp.zeros(())}})
    assert refused(GraphError, chain(teacher={"module": module, "objectives": {"loss": Objective()}})).anchor == "objective-missing"


def test_errors_of_our_own_are_passed_on() -> None:
    error = refused(GraphError, chain(middle={"module": "not a module"}))
    assert error.anchor == "module-kind"


@pytest.mark.quick
def test_unknown_stream_suggests_a_known_one() -> None:
    with pytest.raises(DataError) as caught:
        graph_shapes(chain(teacher={"reads": "texts"}), TEXT_SPECS)
    assert str(caught.value) == (
        "section 'teacher' reads a stream that the data does not have.\n"
        "  wanted   one of ['text'] (did you mean 'text'?)\n"
        "  have     'texts'\n"
        "  set by   the calling program: Section('teacher').reads\n"
        "  fix      correct Section.reads, or use data with that stream\n"
        "  help     docs/errors.md#unknown-stream"
    )


@pytest.mark.parametrize("names", [("vocab",), ("vocab", "embed", "mlp")], ids=str)
def test_logical_names_that_do_not_fit_the_dimensions_are_refused(names: tuple[str, ...]) -> None:
    class Misnamed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Param(jnp.ones((16, 8)), out_sharding=names)

        def __call__(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
            return {"hidden": self.embed[...][batch["tokens"]]}

    error = refused(GraphError, chain(teacher={"module": Misnamed}))
    assert "'teacher'" in error.what
    assert "embed" in error.have


class LinenTeacher(linen.Module):
    @linen.compact
    def __call__(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"hidden": linen.Embed(16, 8)(batch["tokens"])}


def test_sections_of_different_kinds_meet_in_one_graph() -> None:
    shapes = graph_shapes(chain(teacher={"module": LinenTeacher()}, student={"module": student_functions(8)}), TEXT_SPECS)
    assert dict(shapes.sections["teacher"].params) == {"Embed_0/embedding": jax.ShapeDtypeStruct((16, 8), jnp.float32)}


def test_one_output_may_feed_several_sections() -> None:
    graph = chain(teacher={"module": teacher_functions(8)}, student={"inputs": {"hidden": "teacher.hidden"}}, middle={"trainable": False})
    assert sorted(graph_shapes(graph, TEXT_SPECS).edges) == ["teacher.hidden->middle.hidden", "teacher.hidden->student.hidden"]
