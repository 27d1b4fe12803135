"""What is trained: an image model that feeds a language model, and a teacher that feeds a student, both on synthetic samples.

Sizes are such that the two sections of a case have about equal work. Every step trains on the same samples in another order, so steps are
alike and yet schedules that depend on the order of arrival are not judged by one order alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maestro_jax.data import ArraySpec, Dataset, Item, Sample
from maestro_jax.distill import Distilled
from maestro_jax.graph import Objective, Section, SectionGraph
from maestro_jax.models import Decoder, Multimodal, VisionTransformer
from maestro_jax.optimizers import AdamW

SEED = 0
CLIP_NORM = 1.0
MERGE = 2
PATCH_SIZE = 8
FLOATS = ArraySpec(dtype="float32")


def optimizer() -> AdamW:
    """Every way trains with it."""
    return AdamW(learning_rate=1e-3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its samples.

    Args:
        name: of the case.
        sections: of the model, each with a device of its own.
        dataset: as many samples as a step has.
        window: steps that are timed together; what waits for no update may run ahead inside.
        main: the section whose units are the tokens that are counted.
    """

    name: str
    sections: tuple[Section, ...]
    dataset: Dataset
    window: int
    main: str

    def graph(self, *, shared: bool = False) -> SectionGraph:
        """The sections on devices of their own, or all of them on all devices, where they take turns."""
        fields: dict[str, Any] = {"submesh": "shared", "replicas": len(self.sections)} if shared else {}
        return SectionGraph(sections=tuple(dataclasses.replace(section, **fields) for section in self.sections))

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return len(self.dataset.train)

    def units(self) -> dict[str, int]:
        """Section -> units of its items in a step."""
        return {s.name: sum(i.units for sample in self.dataset.train for i in sample.items.get(s.reads, ())) for s in self.sections}

    @property
    def tokens(self) -> int:
        """Tokens of a window, without padding."""
        return self.window * self.units()[self.main]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of both cases.

    Args:
        batch: samples of a step.
        embed: width of the vision encoder, of the language model and of the student; heads have 64 features.
        vision_layers: of the vision encoder.
        llm_layers: of the language model.
        teacher_embed: width of the teacher.
        teacher_layers: of the teacher.
        student_layers: of the student.
        vocab: tokens in the vocabulary.
        row: units of a row of a micro-batch.
        rows: rows of a micro-batch, ascending.
        sides: patches along a side of an image.
        most_images: in a sample.
        window: steps of a window of distillation.
    """

    batch: int
    embed: int
    vision_layers: int
    llm_layers: int
    teacher_embed: int
    teacher_layers: int
    student_layers: int
    vocab: int
    row: int
    rows: tuple[int, ...]
    sides: tuple[int, ...]
    most_images: int
    window: int


FULL = Sizes(
    batch=160,
    embed=384,
    vision_layers=6,
    llm_layers=5,
    teacher_embed=640,
    teacher_layers=9,
    student_layers=4,
    vocab=2048,
    row=256,
    rows=(1, 2, 4),
    sides=(4, 6, 8, 10, 12, 14, 16),
    most_images=4,
    window=3,
)

QUICK = Sizes(
    batch=12,
    embed=64,
    vision_layers=1,
    llm_layers=1,
    teacher_embed=64,
    teacher_layers=1,
    student_layers=1,
    vocab=128,
    row=64,
    rows=(1, 2),
    sides=(2, 4, 8),
    most_images=3,
    window=2,
)


def case_of(name: str, *, quick: bool = False, sizes: Sizes = FULL) -> Case:
    """Makes a case.

    Args:
        name: "multimodal" or "distillation".
        quick: tiny sizes, to see whether everything works.
        sizes: otherwise.
    """
    return {"multimodal": _multimodal, "distillation": _distillation}[name](QUICK if quick else sizes)


def _decoder(sizes: Sizes, embed: int, layers: int, **fields: Any) -> Decoder:
    heads = embed // 64
    kv_heads = heads // 2 if heads % 2 == 0 else heads
    return Decoder(
        vocab_size=sizes.vocab,
        layers=layers,
        embed=embed,
        heads=heads,
        kv_heads=kv_heads,
        mlp=8 * embed // 3 // 64 * 64,
        tied=True,
        **fields,
    )


def _multimodal(sizes: Sizes) -> Case:
    vision = VisionTransformer(
        layers=sizes.vision_layers,
        embed=sizes.embed,
        heads=sizes.embed // 64,
        mlp=8 * sizes.embed // 3 // 64 * 64,
        patch_size=PATCH_SIZE,
        merge=MERGE,
        width=sizes.embed,
    )
    llm = Multimodal(
        decoder=_decoder(sizes, sizes.embed, sizes.llm_layers), inputs=("image",), objectives={"text": ("cross_entropy", "loss_mask")}
    )
    buckets = tuple(rows * sizes.row for rows in sizes.rows)
    sections = (
        Section(name="vision", module=vision, reads="image", microbatch=buckets, row_length=sizes.row),
        Section(
            name="llm",
            module=llm,
            inputs={"image": "vision.hidden[image_rows]"},
            objectives={"text": Objective()},
            microbatch=buckets,
            row_length=sizes.row,
        ),
    )
    specs: Mapping[str, Mapping[str, ArraySpec]] = {
        "text": {"tokens": ArraySpec(), "targets": ArraySpec(), "loss_mask": FLOATS, "image_rows": ArraySpec()},
        "image": {"patches": ArraySpec(shape=(vision.patch,), dtype="float32"), "coords": ArraySpec(shape=(2,))},
    }
    dataset = Dataset(train=_multimodal_samples(sizes, vision.patch), specs=specs, merges={"image": MERGE**2})
    return Case(name="multimodal", sections=sections, dataset=dataset, window=1, main="llm")


def _multimodal_samples(sizes: Sizes, patch: int) -> list[Sample]:
    """Half of the samples are text only; of the others, n images come in proportion to 1 / n, and sizes to 1 / area."""
    random = np.random.default_rng(SEED)
    shapes = [(height, width) for height in sizes.sides for width in sizes.sides]
    areas = np.array([height * width for height, width in shapes], np.float64)
    counts = np.arange(1, sizes.most_images + 1)
    samples = []
    for number in range(sizes.batch):
        images: list[Item] = []
        if number % 2:
            drawn = int(random.choice(counts, p=_long_tail(counts)))
            for chosen in random.choice(len(shapes), size=drawn, p=_long_tail(areas)):
                images.append(_image(random, shapes[chosen], patch))
        rows = sum(image.units for image in images) // MERGE**2
        room = sizes.row - rows
        # Questions about images are shorter than plain text.
        text = int(random.integers(4, max(5, min(room, sizes.row // 4) + 1))) if images else _length(random, sizes.row)
        items = {"text": (_text(random, min(text, room) if room else 0, rows, sizes.vocab),)}
        samples.append(Sample(id=f"multimodal:{number}", items={**items, "image": tuple(images)} if images else items))
    return samples


def _long_tail(values: np.ndarray) -> np.ndarray:
    """Probabilities in proportion to 1 / value."""
    return (1 / values) / (1 / values).sum()


def _length(random: np.random.Generator, most: int) -> int:
    """A length up to `most`, log-uniform from an eighth of it on: short ones are many, long ones few."""
    return int(np.exp(random.uniform(np.log(most / 8), np.log(most))))


def _image(random: np.random.Generator, shape: tuple[int, int], patch: int) -> Item:
    height, width = shape
    # Four neighbours that become one row lie behind one another.
    corners = [(y, x) for y in range(0, height, MERGE) for x in range(0, width, MERGE)]
    coords = [(y + dy, x + dx) for y, x in corners for dy in range(MERGE) for dx in range(MERGE)]
    patches = random.normal(size=(height * width, patch)).astype(np.float32)
    return Item(units=height * width, arrays={"patches": patches, "coords": np.array(coords, np.int32)})


def _text(random: np.random.Generator, text: int, rows: int, vocab: int) -> Item:
    """`rows` places for rows of images, then text: what is learned is the text."""
    units = rows + text
    tokens = random.integers(0, vocab, units + 1).astype(np.int32)
    pointers = np.concatenate([np.arange(rows), np.full(text, -1)]).astype(np.int32)
    mask = (pointers < 0).astype(np.float32)
    arrays = {"tokens": tokens[:-1], "targets": tokens[1:], "loss_mask": mask, "image_rows": pointers}
    return Item(units=units, arrays=arrays)


def _distillation(sizes: Sizes) -> Case:
    teacher = _decoder(sizes, sizes.teacher_embed, sizes.teacher_layers, objective="none")
    student = Distilled(
        student=_decoder(sizes, sizes.embed, sizes.student_layers), teacher_vocab_size=sizes.vocab, teacher_embed=sizes.teacher_embed
    )
    buckets = tuple(rows * sizes.row for rows in sizes.rows)
    sections = (
        Section(name="teacher", module=teacher, trainable=False, microbatch=buckets, row_length=sizes.row),
        Section(
            name="student",
            module=student,
            inputs={"teacher_hidden": "teacher.hidden"},
            objectives={"kl": Objective(weight=0.5), "cross_entropy": Objective(weight=0.5)},
            frozen=("teacher_head",),
            microbatch=buckets,
            row_length=sizes.row,
        ),
    )
    specs = {"text": {"tokens": ArraySpec(), "targets": ArraySpec(), "loss_mask": FLOATS}}
    dataset = Dataset(train=_text_samples(sizes), specs=specs)
    return Case(name="distillation", sections=sections, dataset=dataset, window=sizes.window, main="student")


def _text_samples(sizes: Sizes) -> Sequence[Sample]:
    random = np.random.default_rng(SEED)
    samples = []
    for number in range(sizes.batch):
        units = _length(random, sizes.row)
        tokens = random.integers(0, sizes.vocab, units + 1).astype(np.int32)
        arrays = {"tokens": tokens[:-1], "targets": tokens[1:], "loss_mask": np.ones(units, np.float32)}
        samples.append(Sample(id=f"distillation:{number}", items={"text": (Item(units=units, arrays=arrays),)}))
    return samples
