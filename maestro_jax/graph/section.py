"""A section: a part of the model with its own parameters, submesh, sharding rules and micro-batch size."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from ..config import check_fields, configurable
from ..data.samples import Item
from ..errors import ConfigError, DataError, did_you_mean, set_by

DEFAULT_RULES: Mapping[str, str | None] = MappingProxyType(
    {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "embed": "fsdp"}
)
"""Logical axis name -> mesh axis; names that are not listed are not split. Rows of data are split over `fsdp` always."""


SOURCE = re.compile(r"(?P<producer>[^.\[\]]+)\.(?P<output>[^.\[\]]+)(\[(?P<rows>[^.\[\]]+)\])?")
"""How an input names where it comes from."""

UNITS = "units"
"""What an objective counts where every unit counts alike."""

POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "everything_saveable", "nothing_saveable")
"""Policies of `jax.checkpoint_policies` that need no arguments."""


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """A scalar that a section's module returns as a sum over its micro-batch.

    The loss is the sum over objectives of `weight * sum / count`, where `count` is taken once over the global batch.

    Args:
        weight: factor in the loss; 0 reports the objective without training on it.
        count: what the sum is divided by: the name of an item array (its sum), "units" (their number), or a function from an item to a
            number.
    """

    weight: float = 1.0
    count: str | Callable[[Item], float] = "loss_mask"

    name: ClassVar[str | None] = None
    """"section/objective" once it belongs to a section, for error texts."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not math.isfinite(self.weight):
            raise ConfigError(
                "an objective has a wrong weight.",
                wanted="a finite number",
                have=str(self.weight),
                fix="0 reports an objective without training on it",
                anchor="objective-weight",
                set_by=set_by(self, "weight"),
            )

    def named(self, name: str) -> Objective:
        """Returns the same objective with the name that errors about it tell."""
        found = copy.copy(self)
        object.__setattr__(found, "name", name)
        return found

    def count_of(self, item: Item) -> float:
        """Returns what one item adds to the denominator.

        Raises:
            DataError: when that is not a finite number, at least 0.
        """
        if isinstance(self.count, str):
            found = item.units if self.count == UNITS else item.arrays[self.count].sum(dtype="float64")
        else:
            found = self.count(item)
        try:
            if math.isfinite(found) and found >= 0:
                return float(found)
        except TypeError:
            pass
        raise DataError(
            "an objective cannot be counted.",
            wanted="a finite number, at least 0, for each item",
            have=f"{found!r} from {self.count!r}",
            fix="correct Objective.count, or the item array that it names",
            anchor="objective-count",
            set_by=set_by(self, "count"),
        )


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge:
    """An output of one section that is an input of another.

    Args:
        producer: name of the section that makes it.
        output: key in what the producer's module returns, `[rows, length, d]`, or `[rows, length / m, d]` where m units become one row.
        consumer: name of the section that takes it.
        input: keyword under which the consumer's module receives it.
        rows: item array of the consumer, int32 `[units]`, that says which row each unit takes, counted from 0 through the rows of all
            of the sample's items in the producer, in order; -1 takes none. None pairs items in order, unit by unit.
    """

    producer: str
    output: str
    consumer: str
    input: str
    rows: str | None = None

    @property
    def label(self) -> str:
        """A name that is unique in a graph."""
        return f"{self.producer}.{self.output}->{self.consumer}.{self.input}"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the model, and where and in which pieces it runs.

    Args:
        name: unique in its graph; in a config, the scope.
        module: an NNX module, a callable `rngs -> nnx.Module`, a Linen module, or a pair `(init, apply)`.
        reads: the stream of items that it processes.
        inputs: input name -> "section.output" of another section, whose items are paired with its own; or "section.output[array]", where
            an item array of its own says which row each unit takes (see `Edge.rows`).
        objectives: name of a scalar sum that the module returns -> how it counts.
        trainable: whether its parameters are updated.
        frozen: patterns of parameter paths that are never updated ("teacher_head/*", shell wildcards; a name alone covers all below it).
        weights: where initial parameters come from: a safetensors file or a folder of Hugging Face, or path prefix -> file or (file, prefix
            in the file); a None in the place of a file initialises at random. None alone: what the module names (see `HuggingFace`).
        check_tokenizer: refuse weights whose recorded tokenizer is not the data's.
        optimizer: its own optimizer; None takes the trainer's.
        replicas: data-parallel copies.
        axes: size of each mesh axis inside a replica, for example {"tensor": 2}.
        submesh: name of the submesh that it runs on; sections that name the same one take turns. None: its own.
        rules: logical axis name -> mesh axis, added to the default rules.
        microbatch: the bucket ladder in units, ascending: one size, or several.
        row_length: units in one row of a micro-batch; None makes it one row.
        packed: whether a row holds several items; False gives each item a row of its own, padded, as some kinds of attention need.
        remat: what a forward keeps for its backward: "none" recomputes nothing (all residuals are kept), "inputs" keeps only what the
            section received and runs it again, the name of a `jax.checkpoint_policies` policy keeps what that policy saves.
        dtype: precision of parameters and activations in compute; master parameters and sums are float32.
        scatter_gradients: split the gradient accumulators over all axes of a replica (reduce-scatter instead of all-reduce); less
            memory where parameters are whole on several devices.
        max_bytes: most bytes that the micro-batches in flight of one replica may hold on a device: residuals, payloads and data, from
            their forward to their backward (or to the forward of their consumers); None: no limit.
        fan_in: most producer micro-batches that feed one of its micro-batches, per edge; None: one more than their sizes need, or where
            rows may go anywhere three more, but at most eight.
        fan_out: most consumer micro-batches that one of its micro-batches feeds, per edge; None: as fan_in.
    """

    name: str
    module: Any
    reads: str = "text"
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    objectives: Mapping[str, Objective] = dataclasses.field(default_factory=dict)
    trainable: bool = True
    frozen: tuple[str, ...] = ()
    weights: str | Mapping[str, str | tuple[str | None, str] | None] | None = None
    check_tokenizer: bool = True
    optimizer: Any = None
    replicas: int = 1
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    submesh: str | None = None
    rules: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    microbatch: int | tuple[int, ...] = 1024
    row_length: int | None = None
    packed: bool = True
    remat: str = "none"
    dtype: str = "float32"
    scatter_gradients: bool = False
    max_bytes: int | None = None
    fan_in: int | None = None
    fan_out: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.name.isidentifier():
            self._refuse("name", "a name made of letters, digits and underscores", repr(self.name), "rename the section")
        for field in ("replicas", "max_bytes", "fan_in", "fan_out"):
            value = getattr(self, field)
            if value is not None and value < 1:
                self._refuse(field, "a whole number, at least 1", str(value), f"set {field} to 1 or more")
        bad = {axis: size for axis, size in self.axes.items() if not isinstance(size, int) or size < 1 or axis == "replica"}
        if bad:
            self._refuse(
                "axes", "axis names other than 'replica' with sizes of at least 1", str(bad), "correct the sizes; replicas is its own field"
            )
        if self.remat not in ("none", "inputs", *POLICIES):
            close = did_you_mean(self.remat, list(POLICIES))
            self._refuse("remat", f"'none', 'inputs', or one of {', '.join(POLICIES)}{close}", repr(self.remat), "choose one of these")
        if self.dtype not in ("float32", "bfloat16"):
            self._refuse("dtype", "float32 or bfloat16", repr(self.dtype), "choose one of the two")
        self._check_buckets()
        for name, source in self.inputs.items():
            if SOURCE.fullmatch(source) is None:
                wanted = f"{name}: 'section.output', or 'section.output[array]'"
                self._refuse("inputs", wanted, repr(source), "name the producer and its output with one dot")
        object.__setattr__(self, "objectives", {name: each.named(f"{self.name}/{name}") for name, each in self.objectives.items()})

    def _check_buckets(self) -> None:
        buckets, row = self.buckets, self.row_length
        if not buckets or min(buckets) < 1 or list(buckets) != sorted(set(buckets)):
            self._refuse("microbatch", "one or more ascending sizes in units", str(self.microbatch), "for example (256, 1024)")
        if row is not None and (row < 1 or any(b % row for b in buckets)):
            self._refuse(
                "row_length", f"a length that divides every bucket of {buckets}", str(row), "choose a common divisor, or leave it out"
            )

    def _refuse(self, field: str, wanted: str, have: str, fix: str) -> None:
        raise ConfigError(
            f"section {self.name!r} has a wrong {field}.",
            wanted=wanted,
            have=have,
            fix=fix,
            anchor="section-value",
            set_by=set_by(self, field),
        )

    @property
    def buckets(self) -> tuple[int, ...]:
        """The bucket ladder in units, ascending."""
        return (self.microbatch,) if isinstance(self.microbatch, int) else tuple(self.microbatch)

    @property
    def largest_item(self) -> int:
        """The most units that one item may have."""
        return self.row_length or self.buckets[-1]

    def is_frozen(self, path: str) -> bool:
        """Whether the parameter at `path` is never updated."""
        return not self.trainable or any(fnmatch.fnmatchcase(path, p) or path.startswith(p.rstrip("/") + "/") for p in self.frozen)
