"""Abstract evaluation finds what crosses each edge, and explains what does not fit, before anything is allocated."""

from __future__ import annotations

import re
import sysconfig
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
    return returning_of(lambda batch: outputs(batch["tokens"]))


def returning_of(outputs: Callable[[Any], Any]) -> Any:
    """A module that returns `outputs(batch)`."""
    return lambda key: {"scale": jnp.ones(())}, lambda params, batch, **inputs: outputs(batch)


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
    assert error.have.endswith("sample_ids: uint32[1, 48]}\ninputs: {hidden: float32[1, 48, 8]}")
    assert error.set_by == "the calling program: Section('middle').module\nthe calling program: Section('middle').inputs"
    assert error.anchor == "module-fails"
    [place] = re.findall(r"^at (.*support\.py:\d+): return ", error.have, flags=re.MULTILINE)
    assert error.fix == f"correct the module at {place}, or make the widths and dtypes of its inputs those that it takes"


class NnxMiddle(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, batch: Any, hidden: jax.Array) -> dict[str, jax.Array]:
        return {"hidden": self.inner(hidden)}


class LinenMiddle(linen.Module):
    @linen.compact
    def __call__(self, batch: Any, hidden: jax.Array) -> dict[str, jax.Array]:
        return {"hidden": linen.Dense(8)(hidden)}


@pytest.mark.parametrize("inputs", [{"guide": "teacher.hidden"}, {}, {"hidden": "teacher.hidden", "guide": "teacher.hidden"}], ids=str)
@pytest.mark.parametrize("module", [middle_functions(8), NnxMiddle, LinenMiddle()], ids=["functions", "nnx", "linen"])
def test_inputs_that_are_not_those_of_the_module(module: Any, inputs: dict[str, str]) -> None:
    fields: dict[str, Any] = {"module": module, "inputs": inputs}
    error = refused(EdgeError, chain(middle=fields, student={"inputs": {"hidden": "teacher.hidden"}}))
    assert error.wanted.startswith(f"a module that takes ({', '.join(['batch', *inputs])}): ")
    assert error.fix == "give the argument of the module and the key in Section.inputs one name"
    assert (error.set_by, error.anchor) == ("the calling program: Section('middle').inputs", "module-fails")


def test_an_input_that_the_module_does_not_take() -> None:
    error = refused(EdgeError, chain(middle={"inputs": {"guide": "teacher.hidden"}}, student={"inputs": {"hidden": "teacher.hidden"}}))
    assert "unexpected keyword argument 'guide'" in error.have


IMAGE_SPECS = {**TEXT_SPECS, "image": {"patches": ArraySpec(shape=(4,), dtype="float32"), "image_rows": ArraySpec()}}


def reading(name: str) -> Any:
    """A module of a section without inputs that takes one array of its batch."""
    return returning_of(lambda batch: {"hidden": jnp.zeros((*batch["positions"].shape, 8)) + batch[name].sum()})


@pytest.mark.parametrize(
    ("name", "field", "fix"),
    [
        ("patches", "reads", "correct the name, or set Section.reads to 'image', whose items have 'patches'"),
        ("token", "module", "correct the name, or add the array to the items of stream 'text'; if it is no array of the batch"),
        ("key", "module", "use batch.get('key'): the key is there only while the section is trained"),
    ],
)
def test_an_array_that_the_batch_does_not_have(name: str, field: str, fix: str) -> None:
    with pytest.raises(GraphError) as caught:
        graph_shapes(chain(teacher={"module": reading(name)}), IMAGE_SPECS)
    assert caught.value.set_by == f"the calling program: Section('teacher').{field}"
    assert caught.value.fix.startswith(fix)
    assert caught.value.wanted.startswith("one of ['tokens', 'targets', 'loss_mask', 'segment_ids', 'positions', 'sample_ids']")
    assert ("(did you mean 'tokens'?)" in caught.value.wanted) == (name == "token")
    assert caught.value.have.startswith(f"KeyError: {name!r}\nat {__file__}:")


class LinenDropout(linen.Module):
    @linen.compact
    def __call__(self, batch: Any) -> dict[str, jax.Array]:
        hidden = linen.Embed(16, 8)(batch["tokens"])
        return {"hidden": linen.Dropout(0.1)(hidden, deterministic="key" not in batch)}


class NnxDropout(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.dropout = nnx.Embed(16, 8, rngs=rngs), nnx.Dropout(0.1)

    def __call__(self, batch: Any) -> dict[str, jax.Array]:
        return {"hidden": self.dropout(self.embed(batch["tokens"]), deterministic="key" not in batch)}


@pytest.mark.quick
@pytest.mark.parametrize("module", [LinenDropout(), NnxDropout], ids=["linen", "nnx"])
def test_dropout_in_training_only_is_refused_before_training(module: Any) -> None:
    error = refused(GraphError, chain(teacher={"module": module}))
    assert error.what == "the module of section 'teacher' draws random numbers from Flax."
    assert "maestro_jax.models.token_dropout with batch.get('key')" in error.fix
    assert (error.set_by, error.anchor) == ("the calling program: Section('teacher').module", "module-state")
    assert graph_shapes(chain(teacher={"module": module, "trainable": False}), TEXT_SPECS).edges


def test_what_is_returned_in_training_only_is_seen() -> None:
    def outputs(batch: Any) -> Any:
        hidden = jnp.zeros((*batch["tokens"].shape, 8))
        return {"hidden": hidden} if "key" in batch else {"hidden": hidden, "square": hidden.sum()}

    error = refused(GraphError, chain(teacher={"module": returning_of(outputs), "objectives": {"square": Objective()}}))
    assert (error.anchor, error.have) == ("objective-missing", "the keys ['hidden']")


@pytest.mark.parametrize(("name", "want"), [("image_rows", "image_rows"), ("img_rows", "img_rows"), ("number", "image_rows")])
def test_merged_rows_without_their_numbers_are_told_the_array(name: str, want: str) -> None:
    specs = {"text": {**TEXT_SPECS["text"], name: ArraySpec()}}
    merged = hidden(lambda rows: (rows[0], rows[1] // 4, 8))
    graph = chain(teacher={"module": merged}, middle={"inputs": {"image": "teacher.hidden"}, "module": returning(lambda tokens: {})})
    with pytest.raises(EdgeError) as caught:
        graph_shapes(graph, specs)
    fix = f"return one row per unit of the micro-batch, or say in the items which row each unit takes: 'teacher.hidden[{want}]'"
    assert (caught.value.fix, caught.value.anchor) == (fix, "edge-shape")


def test_a_module_that_fails_without_inputs_is_a_matter_of_the_graph() -> None:
    error = refused(GraphError, chain(teacher={"module": returning(lambda tokens: tokens["no"])}))
    assert error.what == "the module of section 'teacher' fails on the shapes that it would receive."
    assert "inputs: " not in error.have
    assert re.fullmatch(rf"correct the module at {re.escape(__file__)}:\d+", error.fix)
    assert error.set_by == "the calling program: Section('teacher').module"


def test_a_module_among_installed_packages_is_not_taken_for_a_library() -> None:
    place = f"{sysconfig.get_path('purelib')}/their_models.py"
    names: dict[str, Any] = {}
    exec(compile("def helper(x): pass\ndef apply(params, batch): helper()", place, "exec"), names)
    error = refused(GraphError, chain(teacher={"module": (lambda key: {}, names["apply"])}))
    assert "missing 1 required positional argument: 'x'" in error.have
    assert (error.fix, error.set_by) == (f"correct the module at {place}:2", "the calling program: Section('teacher').module")


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
    ("outputs", "have"),
    [
        (lambda tokens: jnp.zeros((*tokens.shape, 8)), "float32[1, 64, 8]"),
        (lambda tokens: (jnp.zeros((*tokens.shape, 8)),), "tuple"),
        (lambda tokens: None, "NoneType"),
    ],
    ids=["array", "tuple", "none"],
)
@pytest.mark.parametrize("objectives", [{}, {"loss": Objective()}], ids=["output", "objective"])
def test_module_that_returns_no_dict_is_refused(outputs: Callable[[jax.Array], Any], have: str, objectives: dict[str, Objective]) -> None:
    error = refused(GraphError, chain(teacher={"module": returning(outputs), "objectives": objectives}))
    assert error.what == "the module of section 'teacher' returns no dict."
    assert (error.have, error.anchor) == (have, "module-fails")
    assert error.set_by == "the calling program: Section('teacher').module"


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


def test_an_array_that_is_counted_and_missing_is_told_with_its_objective() -> None:
    error = refused(GraphError, chain(student={"objectives": {"square": Objective(count="mask")}}))
    assert (error.anchor, error.set_by) == ("objective-count", "the calling program: Objective('student/square').count")
