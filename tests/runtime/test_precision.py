"""Training in bfloat16 with float32 masters, gradients and sums follows training in float32."""

from __future__ import annotations

import numpy as np

from maestro_jax.data import Corpus
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.models import Decoder
from maestro_jax.optimizers import AdamW
from maestro_jax.trainer import Trainer

STEPS = 50


def losses(dtype: str) -> list[float]:
    """The loss of each step of a small language model, split over two devices with two replicas."""
    decoder = Decoder(vocab_size=1024, layers=2, embed=64, heads=4, kv_heads=2, mlp=128, qk_norm=True, tied=True, attention="blockwise")
    section = Section(
        name="llm",
        module=decoder,
        objectives={"cross_entropy": Objective()},
        microbatch=256,
        row_length=128,
        replicas=2,
        axes={"tensor": 2},
        dtype=dtype,
    )
    data = Corpus(max_length=128)
    trainer = Trainer(graph=SectionGraph(sections=(section,)), data=data, steps=STEPS, batch=8, optimizer=AdamW(learning_rate=2e-3))
    return [result.metrics["loss"] for result in trainer.start().steps()]


def test_losses_of_fifty_steps_in_bfloat16_are_those_of_float32_to_a_hundredth() -> None:
    half, single = losses("bfloat16"), losses("float32")
    assert len(half) == STEPS
    assert single[-1] < 0.95 * single[0]
    assert half != single
    np.testing.assert_allclose(half, single, rtol=0.01)
