"""How a tensor of a checkpoint lies in one of our parameters: other axes, in another order, and a tensor for each layer.

A layout is written as in einops: `"(H K) D -> D H K"` says that the tensor has heads and their features in one axis before the width, and
that the parameter has the width first, then heads, then features. Letters stand for sizes of the model. Parameters of layers have the
layers as a first axis, which a tensor's name tells by `{layer}`. An axis of the parameter may be made of several letters too. A digit, as
in `"(3 H K) D -> D H K"`, says that the tensor is so many parameters one behind another, of which this is the `piece`-th.

Only what is asked for is read: a slice of a parameter becomes a slice of each tensor, in each layer that it covers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

LAYER = "{layer}"
LAYERS = "layers"
"""The size that counts layers."""

Sizes = Mapping[str, int]
Get = Callable[[str], Any]
"""Tensor's name -> something that reads a part of it, given a tuple of slices."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint, or one for each layer, and the parameter that it is.

    Args:
        name: of the tensor; `{layer}` stands for the number of a layer.
        path: of the parameter.
        axes: the axes of the tensor, `->`, and those of the parameter without that of layers; one side where both are equal.
        piece: which of the parameters it is that lie in the tensor one behind another, from 0; a digit in `axes` counts them.

    >>> query = Tensor("layers.{layer}.q_proj.weight", "layers/attention/query", "(H K) D -> D H K")
    >>> sizes = {"layers": 2, "H": 4, "K": 8, "D": 16}
    >>> query.shape(sizes), query.tensor_shape(sizes)
    ((2, 16, 4, 8), (32, 16))
    >>> query.names(sizes)
    ['layers.0.q_proj.weight', 'layers.1.q_proj.weight']
    """

    name: str
    path: str
    axes: str
    piece: int = 0

    @property
    def stacked(self) -> bool:
        """Whether there is a tensor for each layer."""
        return LAYER in self.name

    @functools.cached_property
    def outside(self) -> tuple[tuple[str, ...], ...]:
        """The axes of the tensor, each made of one letter or several."""
        return _grouped(self.axes.partition("->")[0])

    @functools.cached_property
    def inside(self) -> tuple[tuple[str, ...], ...]:
        """The axes of the parameter, without that of layers, each made of one letter or several."""
        return _grouped(self.axes.partition("->")[2] or self.axes)

    def names(self, sizes: Sizes) -> list[str]:
        """The names of all its tensors, layer by layer."""
        return [self.name.replace(LAYER, str(layer)) for layer in range(sizes[LAYERS])] if self.stacked else [self.name]

    def tensor_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape of each tensor."""
        return tuple(math.prod(_size(letter, sizes) for letter in axis) for axis in self.outside)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape of the parameter."""
        return ((sizes[LAYERS],) if self.stacked else ()) + tuple(math.prod(sizes[letter] for letter in axis) for axis in self.inside)

    def read(self, source: Any, sizes: Sizes, wanted: Sequence[range]) -> np.ndarray:
        """Reads a part of one tensor, as the parameter has it.

        Args:
            source: reads a part of the tensor, given a tuple of slices.
            sizes: of the model.
            wanted: for each axis of the parameter (without that of layers), where the part lies.
        """
        # Of an axis of several letters all is read, as what is wanted need not be a block of them.
        ranges = {
            letter: part if len(axis) == 1 else range(sizes[letter])
            for axis, part in zip(self.inside, wanted, strict=True)
            for letter in axis
        }
        cuts = [_covering(axis, sizes, ranges, self.piece) for axis in self.outside]
        found = np.asarray(source[tuple(slice(start, stop) for start, stop, _ in cuts)])
        parts = [part for _, _, axis in cuts for part in axis]
        found = found.reshape([len(covered) for _, covered in parts])
        # One of the parameters that lie one behind another was read.
        found = found.squeeze(tuple(n for n, (letter, _) in enumerate(parts) if letter.isdigit()))
        parts = [part for part in parts if not part[0].isdigit()]
        letters = [letter for letter, _ in parts]
        found = found.transpose([letters.index(letter) for axis in self.inside for letter in axis])
        # An axis of several letters was read in whole runs of its last ones; the rest of what was read is cut off here.
        begins = {letter: covered.start for letter, covered in parts}
        kept = tuple(slice(ranges[a].start - begins[a], ranges[a].stop - begins[a]) for axis in self.inside for a in axis)
        found = found[kept].reshape([math.prod(len(ranges[letter]) for letter in axis) for axis in self.inside])
        grouped = [slice(part.start, part.stop) if len(axis) > 1 else slice(None) for axis, part in zip(self.inside, wanted, strict=True)]
        return found[tuple(grouped)]

    def written(self, values: np.ndarray, sizes: Sizes) -> np.ndarray:
        """Returns a tensor, or the piece of it, of the part of the parameter (without the axis of layers) that it is."""
        inside = [letter for axis in self.inside for letter in axis]
        letters = [letter for axis in self.outside for letter in axis if not letter.isdigit()]
        shape = [math.prod(sizes[letter] for letter in axis if not letter.isdigit()) for axis in self.outside]
        return values.reshape([sizes[a] for a in inside]).transpose([inside.index(letter) for letter in letters]).reshape(shape)


def _grouped(axes: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple((group or letter).split()) for group, letter in re.findall(r"\(([^)]*)\)|(\w+)", axes))


def _size(letter: str, sizes: Sizes) -> int:
    return int(letter) if letter.isdigit() else sizes[letter]


def _covering(axis: Sequence[str], sizes: Sizes, ranges: Mapping[str, range], piece: int) -> tuple[int, int, list[tuple[str, range]]]:
    """The one run of an axis that covers a part, and what of each letter lies in it.

    Of the first letter, what is wanted; of the others all, unless a single value of each letter before them is wanted.
    """
    start, stop, covered = 0, 1, []
    whole = False
    for letter in axis:
        size = _size(letter, sizes)
        wanted = range(piece, piece + 1) if letter.isdigit() else ranges[letter]
        part = range(size) if whole else wanted
        start, stop = start * size + part.start, (stop - 1) * size + part.stop
        covered.append((letter, part))
        whole = whole or len(part) > 1
    return start, stop, covered


class StackedArray:
    """A parameter in a checkpoint, read slice by slice; what `maestro_jax.models.weights.StoredArray` is for our own files.

    Args:
        tensor: which one.
        sizes: of the model.
        get: opens a tensor of the checkpoint.
    """

    def __init__(self, tensor: Tensor, sizes: Sizes, get: Get) -> None:
        self._tensor, self._sizes, self._get = tensor, sizes, get
        self.shape = tensor.shape(sizes)

    def __getitem__(self, index: Any) -> np.ndarray:
        """Reads the part that `index` (a tuple of slices, or one of them) names."""
        index = index if isinstance(index, tuple) else (index,)
        index += (slice(None),) * (len(self.shape) - len(index))
        wanted = [range(*part.indices(size)) for part, size in zip(index, self.shape, strict=True)]
        names = self._tensor.names(self._sizes)
        if not self._tensor.stacked:
            return self._tensor.read(self._get(names[0]), self._sizes, wanted)
        first = self._tensor.read(self._get(names[wanted[0].start]), self._sizes, wanted[1:])
        # Filled layer by layer, so that no more than one layer is held twice.
        found = np.empty((len(wanted[0]), *first.shape), first.dtype)
        found[0] = first
        for place, layer in enumerate(wanted[0][1:], start=1):
            found[place] = self._tensor.read(self._get(names[layer]), self._sizes, wanted[1:])
        return found
