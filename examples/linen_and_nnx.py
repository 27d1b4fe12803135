"""A Linen encoder and an NNX decoder, both written here, train together as two sections.

The encoder sees handwritten digits as patches. The decoder reads its rows in the places of some tokens, and names each digit behind its
image. The digits come with scikit-learn (`pip install -e '.[examples]'`); it takes less than a minute on two CPU cores:

    python examples/linen_and_nnx.py --steps 150

Dimensions: R rows of a micro-batch, L length of a row in units (here patches, or tokens), W width.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from sklearn.datasets import load_digits

from maestro_jax import ArraySpec, Dataset, Item, Objective, Sample, Section, SectionGraph, Trainer
from maestro_jax.models import token_dropout

PATCHES, MERGE, WIDTH, HEADS = 16, 4, 64, 4  # an image is 16 patches of 2 x 2 pixels; 4 patches become one row
DIGITS, IMAGE = 10, 10  # tokens 0 to 9 are digits; IMAGE keeps a place for a row of the encoder

# What the items of each stream hold, for each unit. A section reads one stream.
SPECS = {
    "image": {"patches": ArraySpec(shape=(4,), dtype="float32")},
    "text": {"tokens": ArraySpec(), "targets": ArraySpec(), "image_rows": ArraySpec(), "answer": ArraySpec(dtype="float32")},
}


def same_item(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Which unit may look at which [R, 1, L, L]: a row holds several items, numbered by segment_ids, and 0 is padding."""
    return (batch["segment_ids"][:, :, None] == batch["segment_ids"][:, None, :])[:, None]


class Encoder(linen.Module):
    """Patches to rows. It receives the arrays of its stream packed into rows, and segment_ids, positions and sample_ids [R, L]."""

    dropout: float = 0.1

    @linen.compact
    def __call__(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns what other sections may take: one row for each MERGE patches, [R, L / MERGE, W]."""
        x_RLW = linen.Dense(WIDTH)(batch["patches"]) + linen.Embed(PATCHES, WIDTH)(batch["positions"])
        x_RLW += linen.MultiHeadDotProductAttention(HEADS)(linen.LayerNorm()(x_RLW), mask=same_item(batch))
        x_RLW += linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x_RLW))))
        # Noise by sample and position, the same however a step is cut into micro-batches; "key" is there only while training.
        x_RLW = token_dropout(x_RLW, self.dropout, batch.get("key"), batch["sample_ids"], batch["positions"], layer=0, place=0)
        rows, length, width = x_RLW.shape
        return {"hidden": linen.Dense(WIDTH)(x_RLW.reshape(rows, length // MERGE, MERGE * width))}


class Decoder(nnx.Module):
    """Tokens, and rows in the places of some of them, to the next tokens."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(DIGITS + 1, WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.norm, self.last_norm = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, DIGITS, rngs=rngs)

    def __call__(self, batch: Mapping[str, jax.Array], image: jax.Array) -> dict[str, jax.Array]:
        """Takes the rows that the data names, [R, L, W], each where its unit is, and returns sums over the micro-batch.

        Sums, not means: the runtime divides each by its count over the whole batch, so that how it is cut changes nothing.
        Padding is 0 in every array of the data, so the mask `answer` leaves it out.
        """
        x_RLW = jnp.where(batch["image_rows"][..., None] >= 0, image, self.embed(batch["tokens"]))
        earlier = batch["positions"][:, None, :, None] >= batch["positions"][:, None, None, :]
        x_RLW += self.attention(self.norm(x_RLW), mask=same_item(batch) & earlier)
        logits = self.head(self.last_norm(x_RLW))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"] % DIGITS)
        right = jnp.argmax(logits, axis=-1) == batch["targets"]
        return {"cross_entropy": (loss * batch["answer"]).sum(), "accuracy": (right * batch["answer"]).sum()}


def sample(name: str, images: np.ndarray, labels: np.ndarray) -> Sample:
    """Images [n, 8, 8], an item each, and the text that names them: four places for rows of an image, its digit, four places, ..."""
    patches = images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3).reshape(-1, PATCHES, 4).astype(np.float32)
    text = np.concatenate([[*[IMAGE] * (PATCHES // MERGE), label] for label in labels]).astype(np.int32)
    tokens, targets = text[:-1], text[1:]
    # The number of the row that a unit takes, counted through all images of the sample; -1 takes none.
    rows = np.where(tokens == IMAGE, np.cumsum(tokens == IMAGE) - 1, -1).astype(np.int32)
    arrays = {"tokens": tokens, "targets": targets, "image_rows": rows, "answer": (targets < DIGITS).astype(np.float32)}
    pictures = tuple(Item(units=PATCHES, arrays={"patches": each}) for each in patches)
    return Sample(id=name, items={"image": pictures, "text": (Item(units=len(tokens), arrays=arrays),)})


def dataset(count: int = 4000, heldout: int = 100) -> Dataset:
    """Samples of one to five digits; those held out show images that no training sample shows."""
    digits: Any = load_digits()
    images, labels = digits.images / 8 - 1, digits.target
    random = np.random.default_rng(0)

    def samples(side: str, count: int, choice: np.ndarray) -> list[Sample]:
        chosen = [random.choice(choice, random.integers(1, 6)) for _ in range(count)]
        # Ids are unique in a data set: noise and error texts depend on them.
        return [sample(f"{side}/{n}", images[some], labels[some]) for n, some in enumerate(chosen)]

    order = random.permutation(len(labels))
    return Dataset(train=samples("train", count, order[:-300]), heldout=samples("heldout", heldout, order[-300:]), specs=SPECS)


def graph() -> SectionGraph:
    """Two sections, each with devices of its own, and with micro-batches and rows counted in units of its own stream."""
    encoder = Section(name="encoder", module=Encoder(), reads="image", microbatch=512, row_length=64)
    decoder = Section(
        name="decoder",
        module=Decoder,  # a Linen module is an instance; of an NNX module the class, or anything that takes rngs and makes one
        inputs={"image": "encoder.hidden[image_rows]"},  # argument of the module: section.output[array that names the rows]
        objectives={"cross_entropy": Objective(count="answer"), "accuracy": Objective(count="answer", weight=0.0)},
        microbatch=256,
        row_length=64,
        replicas=2,
    )
    return SectionGraph(sections=(encoder, decoder))


def main(arguments: Sequence[str] | None = None) -> None:
    """Compares gradients, trains, evaluates and saves."""
    parser = argparse.ArgumentParser(description="Trains a Linen encoder and an NNX decoder together.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--weights", default="runs/linen_and_nnx", help="folder for the weights of each section")
    given = parser.parse_args(arguments)
    trainer = Trainer(graph=graph(), data=dataset(), steps=given.steps, batch=32, optimizer=optax.adam(3e-3))
    run = trainer.start()  # places sections on devices, compiles their programs, makes parameters
    compared = run.verify()  # against one program of both modules on whole samples
    compared.require()
    print(compared)
    for result in run.steps():
        if result.step == 1 or result.step % 10 == 0:
            print(f"step {result.step}  loss {result.metrics['loss']:.4f}  accuracy {result.metrics['decoder/accuracy']:.3f}")
    print(f"held-out accuracy {run.evaluate()['decoder/accuracy']:.3f}")
    # Another run goes on from them with Section(weights="FOLDER/encoder.safetensors", ...).
    print("weights:", *run.save(given.weights))


if __name__ == "__main__":
    main()
