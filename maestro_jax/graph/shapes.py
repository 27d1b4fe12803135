"""Shapes and dtypes of a graph, found by abstract evaluation: parameters, outputs, and what crosses each edge."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..data.samples import ArraySpec
from ..errors import DataError, EdgeError, GraphError, MaestroError, did_you_mean, set_by
from ..models.attention_choice import SectionRows
from .adapters import Adapter, InSection, LogicalNames, adapt
from .failures import Call, described, module_failed, not_a_dict
from .graph import SectionGraph
from .section import UNITS, Edge, Section

Specs = Mapping[str, Mapping[str, ArraySpec]]

_OWN_ARRAYS = {"segment_ids": "int32", "positions": "int32", "sample_ids": "uint32"}
"""Arrays of a batch that packing makes, `[rows, length]`."""

_KEY = jax.ShapeDtypeStruct((2,), jnp.uint32)
"""`batch["key"]`, which a section receives while it is trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionShapes:
    """What is known of a section before anything is allocated.

    Args:
        adapter: the section's module.
        batch: per bucket, the arrays that the module receives (without the training key).
        inputs: per bucket, the input arrays `[rows, length, d]`.
        params: path -> shape, in float32 or an integer dtype.
        names: path -> logical axis names.
        outputs: key -> shape of what the module returns at the largest bucket.
        notes: what was chosen for the module and why, for the plan.
        attention: the kinds of attention that the module has.
    """

    adapter: Adapter
    batch: Mapping[int, Mapping[str, jax.ShapeDtypeStruct]]
    inputs: Mapping[int, Mapping[str, jax.ShapeDtypeStruct]]
    params: Mapping[str, jax.ShapeDtypeStruct]
    names: Mapping[str, LogicalNames]
    outputs: Mapping[str, jax.ShapeDtypeStruct]
    notes: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphShapes:
    """Shapes of every section and the width and dtype of every edge.

    Args:
        sections: by name.
        edges: label -> row of the edge, `[d]` with its dtype.
        merges: label -> how many units of the producer become one row.
    """

    sections: Mapping[str, SectionShapes]
    edges: Mapping[str, jax.ShapeDtypeStruct]
    merges: Mapping[str, int]


def batch_shapes(section: Section, specs: Specs, bucket: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays that a section's module receives for one bucket.

    Args:
        section: the section.
        specs: stream -> array name -> spec, from the data set.
        bucket: size in units.

    Raises:
        DataError: when the data has no stream of that name.
    """
    if section.reads not in specs:
        raise DataError(
            f"section {section.name!r} reads a stream that the data does not have.",
            wanted=f"one of {sorted(specs)}{did_you_mean(section.reads, list(specs))}",
            have=repr(section.reads),
            fix="correct Section.reads, or use data with that stream",
            anchor="unknown-stream",
            set_by=set_by(section, "reads"),
        )
    taken = sorted({*_OWN_ARRAYS, "key"} & set(specs[section.reads]))
    if taken:
        raise DataError(
            f"stream {section.reads!r} has arrays with names that the runtime uses itself.",
            wanted=f"other names than {sorted({*_OWN_ARRAYS, 'key'})}",
            have=str(taken),
            fix="rename the arrays of the items",
            anchor="item-arrays",
            set_by="Dataset.specs",
        )
    length = section.row_length or bucket
    shape = (bucket // length, length)
    arrays = {name: jax.ShapeDtypeStruct(shape + spec.shape, jnp.dtype(spec.dtype)) for name, spec in specs[section.reads].items()}
    return arrays | {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, dtype in _OWN_ARRAYS.items()}


def graph_shapes(graph: SectionGraph, specs: Specs) -> GraphShapes:
    """Evaluates every section abstractly, producers first.

    Args:
        graph: the sections.
        specs: stream -> array name -> spec, from the data set.

    Raises:
        EdgeError: an unknown output, an output that is not `[rows, length, d]`, or a consumer that cannot take it.
        GraphError: an objective that the module does not return as a scalar, or a module that fails.
    """
    sections: dict[str, SectionShapes] = {}
    edges: dict[str, jax.ShapeDtypeStruct] = {}
    merges: dict[str, int] = {}
    for name in graph.order:
        section = graph[name]
        rows = {e.input: edges[e.label] for e in graph.into(name)}
        sections[name] = _section_shapes(section, specs, rows)
        for edge in graph.out_of(name):
            edges[edge.label], merges[edge.label] = _edge_row(graph, edge, sections[name], specs)
    for edge in graph.edges:
        _check_rows_array(graph, edge, specs)
    return GraphShapes(sections=sections, edges=edges, merges=merges)


def _section_shapes(section: Section, specs: Specs, rows: Mapping[str, jax.ShapeDtypeStruct]) -> SectionShapes:
    batch = {b: batch_shapes(section, specs, b) for b in section.buckets}
    inputs = {
        b: {n: jax.ShapeDtypeStruct(batch[b]["segment_ids"].shape + row.shape, row.dtype) for n, row in rows.items()}
        for b in section.buckets
    }
    told = SectionRows(section=section.name, packed=section.packed, set_by=set_by(section, "packed"))
    adapter = InSection(adapt(section.module, section.name, set_by(section, "module")), told)
    largest = section.buckets[-1]
    example = batch[largest], inputs[largest]
    try:
        params = {p: jax.ShapeDtypeStruct(s.shape, s.dtype) for p, s in adapter.abstract(*example).items()}
        names = adapter.names(*example)
        compute = {p: compute_shape(s, section.dtype) for p, s in params.items()}
        outputs = jax.eval_shape(adapter.apply, compute, *example)
        # In training there is a key beside, and what depends on it.
        trained = jax.eval_shape(adapter.apply, compute, {**batch[largest], "key": _KEY}, inputs[largest]) if section.trainable else outputs
    except MaestroError:
        raise
    except Exception as error:  # a user's module may fail in any way; the text must say which section it was
        raise module_failed(Call(section=section, specs=specs, batch=example[0], inputs=example[1]), error) from error
    _check_names(section, params, names)
    for returned in (outputs, trained):
        if not isinstance(returned, Mapping):
            raise not_a_dict(section, returned)
        _check_objectives(section, specs, returned)
    return SectionShapes(
        adapter=adapter,
        batch=batch,
        inputs=inputs,
        params=params,
        names=names,
        outputs=outputs,
        notes=tuple(told.chosen),
        attention=tuple(told.kinds),
    )


def compute_shape(param: Any, dtype: str) -> jax.ShapeDtypeStruct:
    """The shape of a parameter in compute precision: floating dtypes become `dtype`, others stay."""
    floating = jnp.issubdtype(param.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(param.shape, jnp.dtype(dtype) if floating else param.dtype)


def _edge_row(graph: SectionGraph, edge: Edge, producer: SectionShapes, specs: Specs) -> tuple[jax.ShapeDtypeStruct, int]:
    """Returns a row of an edge, and how many units become one row."""
    section = graph[edge.producer]
    origin = set_by(graph[edge.consumer], "inputs")
    if edge.output not in producer.outputs:
        known = sorted(producer.outputs)
        raise EdgeError(
            f"section {edge.producer!r} has no output {edge.output!r}.",
            wanted=f"one of {known}{did_you_mean(edge.output, known)}",
            have=edge.label,
            fix="correct the name in inputs, or return it from the module",
            anchor="unknown-output",
            set_by=origin,
        )
    shape = producer.outputs[edge.output]
    rows, length = producer.batch[section.buckets[-1]]["segment_ids"].shape
    merge = _merge(shape, rows, length)
    # Paired units meet one by one.
    if merge is None or (merge > 1 and edge.rows is None):
        merged = "" if edge.rows is None else ", or fewer along length where several units become one row"
        fix = "return one row per unit of the micro-batch"
        if merge is not None:
            array = _likely_rows(edge, specs.get(graph[edge.consumer].reads, {}))
            fix += f", or say in the items which row each unit takes: '{edge.producer}.{edge.output}[{array}]'"
        raise EdgeError(
            f"output {edge.output!r} of section {edge.producer!r} cannot cross an edge.",
            wanted=f"a floating-point array [rows, length, d] = [{rows}, {length}, d]{merged}",
            have=described(shape),
            fix=fix,
            anchor="edge-shape",
            set_by=origin,
        )
    return jax.ShapeDtypeStruct(shape.shape[2:], shape.dtype), merge


def _merge(shape: Any, rows: int, length: int) -> int | None:
    """How many units of a micro-batch become one row of an output; None where it is no output of rows."""
    found: list[int] = [*getattr(shape, "shape", ())]
    fits = len(found) == 3 and found[0] == rows and found[1] > 0 and length % found[1] == 0 and jnp.issubdtype(shape.dtype, jnp.floating)
    return length // found[1] if fits else None


def _check_rows_array(graph: SectionGraph, edge: Edge, specs: Specs) -> None:
    if edge.rows is None:
        return
    stream = graph[edge.consumer].reads
    spec = specs[stream].get(edge.rows)
    known = _numbers(specs[stream])
    if edge.rows not in known:
        raise EdgeError(
            f"edge {edge.label} takes its rows from an array that stream {stream!r} does not have.",
            wanted=f"an int32 array with one number a unit: one of {known}{did_you_mean(edge.rows, known)}",
            have=f"{edge.rows!r}" + ("" if spec is None else f" of {spec.dtype}{list(spec.shape)} a unit"),
            fix="correct the name in brackets, or add the array to the items of that stream",
            anchor="edge-rows",
            set_by=set_by(graph[edge.consumer], "inputs"),
        )


def _numbers(arrays: Mapping[str, ArraySpec]) -> list[str]:
    """Names of arrays with a whole number for each unit."""
    return [name for name, each in arrays.items() if each.shape == () and jnp.dtype(each.dtype).kind == "i"]


def _likely_rows(edge: Edge, arrays: Mapping[str, ArraySpec]) -> str:
    """The array that says which rows an input takes, by its name; else the name that it should have."""
    usual = f"{edge.input}_rows"
    return next(iter(difflib.get_close_matches(usual, _numbers(arrays), n=1)), usual)


def _check_names(section: Section, params: Mapping[str, Any], names: Mapping[str, LogicalNames]) -> None:
    for path, found in names.items():
        if len(found) != len(params[path].shape):
            raise GraphError(
                f"a parameter of section {section.name!r} has logical names that do not fit its dimensions.",
                wanted=f"one name, or None, for each dimension of {list(params[path].shape)}",
                have=f"{path}: {found}",
                fix="correct the names where the module makes the parameter",
                anchor="logical-names",
                set_by=set_by(section, "module"),
            )


def _check_objectives(section: Section, specs: Specs, outputs: Mapping[str, Any]) -> None:
    arrays = list(specs[section.reads])
    for name, objective in section.objectives.items():
        if isinstance(objective.count, str) and objective.count not in (UNITS, *arrays):
            raise GraphError(
                f"objective {name!r} of section {section.name!r} counts an array that its items do not have.",
                wanted=f"one of {arrays}{did_you_mean(objective.count, arrays)}, {UNITS!r}, or a function from an item to a number",
                have=repr(objective.count),
                fix="correct Objective.count",
                anchor="objective-count",
                set_by=set_by(objective, "count"),
            )
        have: Any = outputs.get(name)
        # A sum in half precision has lost what it was added up from.
        if getattr(have, "shape", None) != () or jnp.dtype(have.dtype).itemsize < 4:
            raise GraphError(
                f"objective {name!r} of section {section.name!r} is not a scalar that its module returns.",
                wanted=f"{name!r}: a float32 scalar, the sum over the micro-batch",
                have=described(have) if name in outputs else f"the keys {sorted(outputs)}{did_you_mean(name, list(outputs))}",
                fix="return the sum (not the mean) under that name, or correct Section.objectives",
                anchor="objective-missing",
                set_by=set_by(section, "objectives"),
            )
