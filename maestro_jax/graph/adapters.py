"""One interface over Flax NNX modules, Flax Linen modules and plain functions.

Outside a module, parameters are one flat dict from path to array ("layers/attention/query"): easy to filter, to shard,
to save and to compare. Module state that changes between calls (batch statistics, counters of random keys) is refused:
its value would depend on how a batch is cut into micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
from flax import linen, nnx, traverse_util
from jax.core import Tracer

from ..errors import GraphError
from ..models.attention_choice import SectionRows, rows_of

Batch = Mapping[str, Any]
Params = dict[str, Any]
LogicalNames = tuple[str | None, ...]


class Adapter(Protocol):
    """A module as the runtime sees it. `batch` and `inputs` are examples (arrays or `ShapeDtypeStruct`s) for the first three."""

    def abstract(self, batch: Batch, inputs: Batch) -> Params:
        """Returns path -> `ShapeDtypeStruct` of every parameter."""
        ...

    def names(self, batch: Batch, inputs: Batch) -> dict[str, LogicalNames]:
        """Returns path -> logical axis name of every dimension, for the parameters that declare them."""
        ...

    def init(self, key: jax.Array, batch: Batch, inputs: Batch) -> Params:
        """Returns path -> initial value; can be jitted."""
        ...

    def apply(self, params: Params, batch: Batch, inputs: Batch) -> dict[str, Any]:
        """Runs the module: objectives are scalar sums, outputs are `[rows, length, d]`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Owner:
    """The section that a module belongs to, for error texts."""

    section: str
    set_by: str

    def refused(self, problem: str, *, wanted: str, have: str, fix: str, anchor: str) -> GraphError:
        what = f"the module of section {self.section!r} {problem}."
        return GraphError(what, wanted=wanted, have=have, fix=fix, anchor=anchor, set_by=self.set_by)

    def check_stateless(self, names: list[str]) -> None:
        if names:
            raise self.refused(
                "keeps state between calls",
                wanted="parameters only: a value that changes between calls would depend on how the batch is cut into micro-batches",
                have=_listed(names),
                fix="use layers without running statistics; for dropout, maestro_jax.models.token_dropout, keyed by sample and position",
                anchor="module-state",
            )

    def check_nothing_sown(self, names: list[str]) -> None:
        if names:
            raise self.refused(
                "sows values, which nothing would collect",
                wanted="everything that counts in what the module returns: a loss is an objective, a sum over the micro-batch",
                have=_listed(names),
                fix="return the sum in the dict, and name it in Section.objectives, with its weight and what it counts",
                anchor="module-state",
            )


def adapt(module: Any, section: str, set_by: str | None = None) -> Adapter:
    """Wraps a user's module.

    Args:
        module: an NNX module, a callable `rngs -> nnx.Module`, a Linen module, or a pair `(init, apply)` with
            `init(key) -> params` (a nested dict) and `apply(params, batch, **inputs) -> dict`.
        section: name of the section, for error texts.
        set_by: where the module was set, for error texts; None is the calling program.

    Raises:
        GraphError: when the module is none of these (a Linen class is none, an NNX class is one), or keeps state between calls.
    """
    owner = _Owner(section=section, set_by=set_by or f"the calling program: Section({section!r}).module")
    if isinstance(module, linen.Module):
        return LinenAdapter(module, owner)
    if isinstance(module, tuple) and len(module) == 2 and all(callable(f) for f in module):
        return FunctionsAdapter(*module)
    if isinstance(module, nnx.Module):
        return NnxAdapter(module, owner)
    if isinstance(module, type) and issubclass(module, linen.Module):
        raise owner.refused(
            "cannot be used",
            wanted="an instance of a Linen module: making one needs no random keys",
            have=f"{module.__name__} is a Linen class",
            fix=f"pass an instance: {module.__name__}(...); in a config, @{module.__name__}() with the parentheses",
            anchor="module-kind",
        )
    if callable(module):
        return NnxAdapter(cast(Callable[[nnx.Rngs], nnx.Module], module), owner)
    raise owner.refused(
        "cannot be used",
        wanted="an NNX module, a callable rngs -> nnx.Module, a Linen module, or a pair of functions (init, apply)",
        have=f"{type(module).__name__}",
        fix="pass one of these as Section.module",
        anchor="module-kind",
    )


class InSection:
    """Another adapter, whose module learns how the rows of its section are packed."""

    def __init__(self, adapter: Adapter, rows: SectionRows) -> None:
        self._adapter, self._rows = adapter, rows

    def abstract(self, batch: Batch, inputs: Batch) -> Params:
        """See `Adapter.abstract`."""
        with rows_of(self._rows):
            return self._adapter.abstract(batch, inputs)

    def names(self, batch: Batch, inputs: Batch) -> dict[str, LogicalNames]:
        """See `Adapter.names`."""
        with rows_of(self._rows):
            return self._adapter.names(batch, inputs)

    def init(self, key: jax.Array, batch: Batch, inputs: Batch) -> Params:
        """See `Adapter.init`."""
        with rows_of(self._rows):
            return self._adapter.init(key, batch, inputs)

    def apply(self, params: Params, batch: Batch, inputs: Batch) -> dict[str, Any]:
        """See `Adapter.apply`."""
        with rows_of(self._rows):
            return self._adapter.apply(params, batch, inputs)


class NnxAdapter:
    """An NNX module, given as an instance (its values are the initial ones) or as a callable that makes one."""

    def __init__(self, module: nnx.Module | Callable[[nnx.Rngs], nnx.Module], owner: _Owner) -> None:
        self._instance = module if isinstance(module, nnx.Module) else None
        self._build = None if isinstance(module, nnx.Module) else module
        self._owner = owner

    @functools.cached_property
    def _split(self) -> tuple[Any, nnx.State]:
        """The graph definition and the abstract parameters."""
        module = self._instance if self._instance is not None else nnx.eval_shape(lambda: self._make(jax.random.key(0)))
        # An array that is no variable is a leaf of an instance, and a stray tracer in a module that was built abstractly.
        self._owner.check_stateless(["/".join(map(str, path)) for path, value in nnx.iter_graph(module) if isinstance(value, Tracer)])
        graphdef, params, rest = nnx.split(module, nnx.Param, ...)
        self._owner.check_stateless(["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)])
        return graphdef, params

    def _make(self, key: jax.Array) -> nnx.Module:
        if self._build is None:
            raise RuntimeError("a module instance is not built again")
        # Annotated variables may be created outside a mesh; their placement is decided by the section's rules.
        with nnx.use_eager_sharding(False):
            module = self._build(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise self._owner.refused(
                "cannot be built",
                wanted="a callable rngs -> nnx.Module",
                have=f"a callable that returned {type(module).__name__}",
                fix="return an nnx.Module, or pass a Linen module itself, or a pair of functions (init, apply)",
                anchor="module-kind",
            )
        return module

    def abstract(self, batch: Batch, inputs: Batch) -> Params:
        """See `Adapter.abstract`."""
        return {p: jax.ShapeDtypeStruct(v.get_value().shape, v.get_value().dtype) for p, v in _flat(self._split[1]).items()}

    def names(self, batch: Batch, inputs: Batch) -> dict[str, LogicalNames]:
        """See `Adapter.names`; reads the `out_sharding` (older flax: `sharding_names`) of each `nnx.Param`."""
        found = {}
        for path, variable in _flat(self._split[1]).items():
            metadata = variable.get_metadata()
            names = metadata.get("out_sharding") or metadata.get("sharding_names")
            if names:
                found[path] = tuple(names)
        return found

    def init(self, key: jax.Array, batch: Batch, inputs: Batch) -> Params:
        """See `Adapter.init`; a module given as an instance keeps its values."""
        module = self._instance if self._instance is not None else self._make(key)
        return {path: v.get_value() for path, v in _flat(nnx.state(module, nnx.Param)).items()}

    def apply(self, params: Params, batch: Batch, inputs: Batch) -> dict[str, Any]:
        """See `Adapter.apply`."""
        graphdef, abstract = self._split
        flat = {path: variable.replace(params["/".join(map(str, path))]) for path, variable in nnx.to_flat_state(abstract)}
        module = nnx.merge(graphdef, nnx.from_flat_state(flat))
        return module(batch, **inputs)


class LinenAdapter:
    """A Linen module; logical names come from `nn.with_partitioning` boxes."""

    def __init__(self, module: linen.Module, owner: _Owner) -> None:
        self._module = module
        self._owner = owner

    def _boxed(self, batch: Batch, inputs: Batch) -> dict[str, Any]:
        def init(key: jax.Array) -> Any:
            return self._module.init(key, _zeros(batch), **_zeros(inputs))

        variables = jax.eval_shape(init, jax.random.key(0))
        state = [name for name in variables if name != "params"]
        # Values are sown into tuples; what is kept between calls is an array.
        sown = [name for name in state if any(isinstance(leaf, tuple) for leaf in traverse_util.flatten_dict(variables[name]).values())]
        self._owner.check_nothing_sown(sown)
        self._owner.check_stateless(state)
        is_box = lambda x: isinstance(x, linen.meta.AxisMetadata)  # noqa: E731 - a predicate for two calls
        return {_path(p): leaf for p, leaf in jax.tree_util.tree_flatten_with_path(variables.get("params", {}), is_leaf=is_box)[0]}

    def abstract(self, batch: Batch, inputs: Batch) -> Params:
        """See `Adapter.abstract`."""
        return {path: linen.meta.unbox(leaf) for path, leaf in self._boxed(batch, inputs).items()}

    def names(self, batch: Batch, inputs: Batch) -> dict[str, LogicalNames]:
        """See `Adapter.names`."""
        return {p: tuple(leaf.names) for p, leaf in self._boxed(batch, inputs).items() if isinstance(leaf, linen.Partitioned)}

    def init(self, key: jax.Array, batch: Batch, inputs: Batch) -> Params:
        """See `Adapter.init`."""
        variables = self._module.init(key, _zeros(batch), **_zeros(inputs))
        return flat(linen.meta.unbox(variables).get("params", {}))

    def apply(self, params: Params, batch: Batch, inputs: Batch) -> dict[str, Any]:
        """See `Adapter.apply`."""
        return cast(dict[str, Any], self._module.apply({"params": nested(params)}, batch, **inputs))


class FunctionsAdapter:
    """A plain pair of functions over a nested dict of parameters."""

    def __init__(self, init: Callable[[jax.Array], Any], apply: Callable[..., dict[str, Any]]) -> None:
        self._init = init
        self._apply = apply

    @functools.cached_property
    def _tree(self) -> Any:
        """The user's own structure of parameters, whatever containers it has."""
        return jax.tree.structure(jax.eval_shape(self._init, jax.random.key(0)))

    def abstract(self, batch: Batch, inputs: Batch) -> Params:
        """See `Adapter.abstract`."""
        return flat(jax.eval_shape(self._init, jax.random.key(0)))

    def names(self, batch: Batch, inputs: Batch) -> dict[str, LogicalNames]:
        """See `Adapter.names`: plain functions declare none."""
        return {}

    def init(self, key: jax.Array, batch: Batch, inputs: Batch) -> Params:
        """See `Adapter.init`."""
        return flat(self._init(key))

    def apply(self, params: Params, batch: Batch, inputs: Batch) -> dict[str, Any]:
        """See `Adapter.apply`."""
        paths = [
            _path(path) for path, _ in jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(self._tree, range(self._tree.num_leaves)))[0]
        ]
        return self._apply(jax.tree.unflatten(self._tree, [params[path] for path in paths]), batch, **inputs)


def _flat(state: nnx.State) -> dict[str, Any]:
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def _path(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)


def flat(tree: Any) -> Params:
    """A nested tree as one dict of paths.

    >>> flat({"a": {"b": 1}, "c": 2})
    {'a/b': 1, 'c': 2}
    """
    return {_path(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of paths as a nested dict.

    >>> nested({"a/b": 1, "c": 2})
    {'a': {'b': 1}, 'c': 2}
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def _zeros(tree: Batch) -> dict[str, Any]:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), dict(tree))


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
