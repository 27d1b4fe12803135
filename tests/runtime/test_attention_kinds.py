"""A section trains alike with every kind of attention, however its rows are packed."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from engines import build, worst_leaf
from support import TEXT_SPECS, VOCAB, text_samples

from maestro_jax.errors import ConfigError
from maestro_jax.graph import Objective, Section, SectionGraph, graph_shapes
from maestro_jax.models import Decoder
from maestro_jax.runtime import make_plan

EXACT = 1e-5


def graph(attention: str, **fields: Any) -> SectionGraph:
    module = Decoder(vocab_size=VOCAB, layers=2, embed=16, heads=4, kv_heads=2, mlp=16, attention=attention)
    section = Section(name="llm", module=module, objectives={"cross_entropy": Objective()}, **fields)
    return SectionGraph(sections=(section,))


@pytest.mark.parametrize(
    ("attention", "fields"),
    [
        ("blockwise", {"microbatch": (32, 64), "row_length": 32, "axes": {"tensor": 2}, "replicas": 2}),
        ("one_sample", {"microbatch": (8, 16, 32), "packed": False, "replicas": 2}),
        ("one_sample", {"microbatch": (64, 128), "row_length": 32, "packed": False, "axes": {"fsdp": 2}}),
    ],
    ids=["blocks", "a micro-batch an item", "a row an item"],
)
def test_gradients_are_those_of_one_program(attention: str, fields: dict[str, Any]) -> None:
    setup = build(graph(attention, **fields))
    samples = text_samples(7)
    assert worst_leaf(setup.gradients(samples), setup.reference(samples)[1]) < EXACT


def test_a_section_that_packs_refuses_attention_for_one_item_before_anything_is_compiled() -> None:
    with pytest.raises(ConfigError, match="section 'llm' asks for attention 'one_sample'") as caught:
        graph_shapes(graph("one_sample", microbatch=64), TEXT_SPECS)
    assert "Section.packed = False" in caught.value.fix


def test_the_plan_tells_what_auto_took() -> None:

    plan = make_plan(graph("auto", microbatch=1024), TEXT_SPECS, jax.devices()[:1])
    (note,) = plan.notes
    assert note.startswith("section 'llm': attention is 'blockwise': ")
    assert make_plan(graph("dense", microbatch=64), TEXT_SPECS, jax.devices()[:1]).notes == ()
