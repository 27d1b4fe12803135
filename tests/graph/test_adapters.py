"""Modules of every kind give the values that they give when called directly.

Dimensions: R rows, L length, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from maestro_jax.config import load
from maestro_jax.errors import GraphError
from maestro_jax.graph import adapt
from maestro_jax.graph.adapters import Batch, LogicalNames

VOCAB, WIDTH = 16, 8
NAMES: dict[str, LogicalNames] = {"embed": ("vocab", "embed"), "inner/kernel": ("embed", "mlp")}
SHAPES = {"embed": (VOCAB, WIDTH), "inner/kernel": (WIDTH, WIDTH), "inner/bias": (WIDTH,)}


class NnxInner(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)), out_sharding=("embed", "mlp"))
        self.bias = nnx.Param(jnp.full((WIDTH,), 0.25))


class NnxModule(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, WIDTH)), out_sharding=("vocab", "embed"))
        self.inner = NnxInner(rngs)

    def __call__(self, batch: Batch, hidden: jax.Array) -> dict[str, jax.Array]:
        x_RLD = self.embed[...][batch["tokens"]] + hidden
        return {"hidden": jnp.tanh(x_RLD @ self.inner.kernel[...] + self.inner.bias[...][None, None])}


class LinenInner(linen.Module):
    @linen.compact
    def __call__(self, x_RLD: jax.Array) -> jax.Array:
        kernel: Any = self.param("kernel", linen.with_partitioning(linen.initializers.normal(1.0), ("embed", "mlp")), (WIDTH, WIDTH))
        bias = self.param("bias", linen.initializers.constant(0.25), (WIDTH,))
        return jnp.tanh(x_RLD @ kernel + bias[None, None])


class LinenModule(linen.Module):
    @linen.compact
    def __call__(self, batch: Batch, hidden: jax.Array) -> dict[str, jax.Array]:
        embed: Any = self.param("embed", linen.with_partitioning(linen.initializers.normal(1.0), ("vocab", "embed")), (VOCAB, WIDTH))
        return {"hidden": LinenInner(name="inner")(embed[batch["tokens"]] + hidden)}


def functions_init(key: jax.Array) -> dict[str, Any]:
    embed, kernel = jax.random.split(key)
    inner = {"kernel": jax.random.normal(kernel, (WIDTH, WIDTH)), "bias": jnp.full((WIDTH,), 0.25)}
    return {"embed": jax.random.normal(embed, (VOCAB, WIDTH)), "inner": inner}


def functions_apply(params: Mapping[str, Any], batch: Batch, hidden: jax.Array) -> dict[str, jax.Array]:
    x_RLD = params["embed"][batch["tokens"]] + hidden
    return {"hidden": jnp.tanh(x_RLD @ params["inner"]["kernel"] + params["inner"]["bias"][None, None])}


def nnx_instance() -> NnxModule:
    with nnx.use_eager_sharding(False):
        return NnxModule(nnx.Rngs(3))


MODULES = {
    "nnx instance": nnx_instance,
    "nnx callable": lambda: NnxModule,
    "linen": LinenModule,
    "functions": lambda: (functions_init, functions_apply),
}
KINDS = pytest.mark.parametrize("kind", MODULES)


def data() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """A batch [R, L] of tokens, and the input [R, L, D]."""
    random = np.random.default_rng(0)
    tokens_RL = jnp.asarray(random.integers(0, VOCAB, (2, 5)), jnp.int32)
    return {"tokens": tokens_RL}, {"hidden": jnp.asarray(random.normal(size=(2, 5, WIDTH)), jnp.float32)}


def directly(kind: str, module: Any, params: Mapping[str, jax.Array]) -> jax.Array:
    """What the module returns when it is called without our code."""
    batch, inputs = data()
    nested = {"embed": params["embed"], "inner": {"kernel": params["inner/kernel"], "bias": params["inner/bias"]}}
    if kind == "linen":
        return module.apply({"params": nested}, batch, **inputs)["hidden"]
    if kind == "functions":
        return functions_apply(nested, batch, **inputs)["hidden"]
    instance = nnx_instance()
    instance.embed.set_value(params["embed"])
    instance.inner.kernel.set_value(params["inner/kernel"])
    instance.inner.bias.set_value(params["inner/bias"])
    return instance(batch, **inputs)["hidden"]


@pytest.mark.quick
@KINDS
def test_apply_gives_the_values_of_the_module(kind: str) -> None:
    module = MODULES[kind]()
    adapter, (batch, inputs) = adapt(module, "a"), data()
    params = jax.jit(lambda key: adapter.init(key, batch, inputs))(jax.random.key(1))
    found = jax.jit(adapter.apply)(params, batch, inputs)
    assert list(found) == ["hidden"]
    np.testing.assert_allclose(found["hidden"], directly(kind, module, params), rtol=1e-6, atol=1e-6)


@KINDS
def test_shapes_are_known_before_anything_is_made(kind: str) -> None:
    batch, inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), data())
    adapter = adapt(MODULES[kind](), "a")
    abstract = adapter.abstract(batch, inputs)
    assert {path: shape.shape for path, shape in abstract.items()} == SHAPES
    assert {shape.dtype for shape in abstract.values()} == {jnp.dtype("float32")}
    made = adapter.init(jax.random.key(1), batch, inputs)
    assert {path: value.shape for path, value in made.items()} == SHAPES


@pytest.mark.quick
@KINDS
def test_logical_names_are_found(kind: str) -> None:
    assert adapt(MODULES[kind](), "a").names(*data()) == ({} if kind == "functions" else NAMES)


@pytest.mark.parametrize("kind", ["nnx callable", "linen", "functions"])
def test_initial_values_depend_on_the_key_alone(kind: str) -> None:
    adapter, (batch, inputs) = adapt(MODULES[kind](), "a"), data()
    one, same, other = (adapter.init(jax.random.key(seed), batch, inputs)["embed"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_an_nnx_instance_keeps_its_values() -> None:
    module = nnx_instance()
    params = adapt(module, "a").init(jax.random.key(7), *data())
    np.testing.assert_array_equal(params["embed"], module.embed[...])
    np.testing.assert_array_equal(params["inner/kernel"], module.inner.kernel[...])


@KINDS
def test_gradients_reach_every_parameter(kind: str) -> None:
    adapter, (batch, inputs) = adapt(MODULES[kind](), "a"), data()
    params = adapter.init(jax.random.key(1), batch, inputs)
    gradients = jax.grad(lambda p: adapter.apply(p, batch, inputs)["hidden"].sum())(params)
    assert {path: g.shape for path, g in gradients.items()} == SHAPES
    assert all(float(jnp.abs(g).max()) > 0 for g in gradients.values())


def test_functions_get_their_tree_back_whatever_its_shape() -> None:
    def init(key: jax.Array) -> dict[str, Any]:
        return {"layers": [jnp.ones((2,)), (jnp.zeros((3,)),)], "a/b": jnp.ones(()), "nothing": {}}

    adapter = adapt((init, lambda params, batch: {"same": params}), "a")
    params = adapter.init(jax.random.key(0), {}, {})
    assert jax.tree.structure(adapter.apply(params, {}, {})["same"]) == jax.tree.structure(init(jax.random.key(0)))


class BatchNorm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)


class Dropout(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class LinenBatchNorm(linen.Module):
    @linen.compact
    def __call__(self, batch: Batch, hidden: jax.Array) -> dict[str, jax.Array]:
        return {"hidden": linen.BatchNorm(use_running_average=False)(hidden)}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("module", "state"),
    [
        (BatchNorm, ["norm/mean", "norm/var"]),
        (lambda rngs: Dropout(rngs), ["dropout/rngs"]),
        (LinenBatchNorm(), ["batch_stats"]),
    ],
    ids=["nnx batch norm", "nnx dropout", "linen batch norm"],
)
def test_state_between_calls_is_refused(module: Any, state: list[str]) -> None:
    with pytest.raises(GraphError, match="the module of section 'a' keeps state between calls") as caught:
        adapt(module, "a").abstract(*data())
    assert all(name in caught.value.have for name in state)
    assert (caught.value.anchor, caught.value.set_by) == ("module-state", "the calling program: Section('a').module")
    assert caught.value.fix.startswith("use layers without running statistics; for dropout, maestro_jax.models.token_dropout")


class Sowing(linen.Module):
    @linen.compact
    def __call__(self, batch: Batch, hidden: jax.Array) -> dict[str, jax.Array]:
        self.sow("intermediates", "hidden", hidden)
        self.sow("losses", "balance", hidden.sum())
        return {"hidden": linen.Dense(WIDTH)(hidden)}


def test_a_sown_loss_belongs_among_the_objectives() -> None:
    with pytest.raises(GraphError, match="the module of section 'a' sows values, which nothing would collect") as caught:
        adapt(Sowing(), "a", "model.gin:3").abstract(*data())
    assert (caught.value.have, caught.value.anchor, caught.value.set_by) == ("losses", "module-state", "model.gin:3")
    assert "Section.objectives" in caught.value.fix


def test_statistics_that_are_only_read_can_be_parameters() -> None:
    norm = linen.BatchNorm(use_running_average=True)
    batch, inputs = data()
    adapter = adapt(
        (lambda key: norm.init(key, inputs["hidden"]), lambda params, batch, hidden: {"hidden": norm.apply(params, hidden)}), "a"
    )
    params = {**adapter.init(jax.random.key(0), batch, inputs), "batch_stats/mean": jnp.full((WIDTH,), 2.0)}
    found = adapter.apply(params, batch, inputs)["hidden"]
    np.testing.assert_allclose(found, (inputs["hidden"] - 2) / np.sqrt(1 + norm.epsilon), rtol=1e-6, atol=1e-6)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("module", "have"),
    [(None, "NoneType"), ("decoder", "str"), ((functions_init,), "tuple"), ((functions_init, 3), "tuple")],
    ids=["none", "text", "one", "number"],
)
def test_what_is_no_module_is_refused(module: Any, have: str) -> None:
    with pytest.raises(GraphError) as caught:
        adapt(module, "a")
    assert str(caught.value) == (
        "the module of section 'a' cannot be used.\n"
        "  wanted   an NNX module, a callable rngs -> nnx.Module, a Linen module, or a pair of functions (init, apply)\n"
        f"  have     {have}\n"
        "  set by   the calling program: Section('a').module\n"
        "  fix      pass one of these as Section.module\n"
        "  help     docs/errors.md#module-kind"
    )


@pytest.mark.quick
def test_a_linen_class_is_told_from_its_instance() -> None:
    with pytest.raises(GraphError) as caught:
        adapt(LinenModule, "a")
    assert caught.value.have == "LinenModule is a Linen class"
    assert caught.value.fix.startswith("pass an instance: LinenModule(...)")
    assert caught.value.anchor == "module-kind"


class Keyword(nnx.Module):
    def __init__(self, width: int = 2, *, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(width, width, rngs=rngs)


def test_an_nnx_class_can_have_its_settings_in_a_config() -> None:
    settings = ["Section.name=a", f"Section.module=@{__name__}.Keyword()", f"{__name__}.Keyword.width=5"]
    module = load(None, settings, root="Section").build().module
    assert adapt(module, "a").abstract({}, {})["inner/kernel"].shape == (5, 5)


@pytest.mark.parametrize(("made", "have"), [(3, "int"), (LinenModule(), "LinenModule")])
def test_a_callable_that_makes_no_nnx_module_is_refused(made: Any, have: str) -> None:
    with pytest.raises(GraphError, match="the module of section 'a' cannot be built") as caught:
        adapt(lambda rngs: made, "a").abstract(*data())
    assert (caught.value.have, caught.value.anchor) == (f"a callable that returned {have}", "module-kind")


class Table(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jnp.ones((WIDTH,)))
        self.table = jnp.arange(float(WIDTH))


@pytest.mark.parametrize("module", [Table, Table(nnx.Rngs(0))], ids=["callable", "instance"])
def test_an_array_of_a_module_that_is_no_parameter_is_refused(module: Any) -> None:
    with pytest.raises(GraphError, match="the module of section 'a' keeps state between calls") as caught:
        adapt(module, "a").abstract(*data())
    assert caught.value.have == "table"
