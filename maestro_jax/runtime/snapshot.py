"""What a checkpoint holds of an engine, as plain nested dicts that do not depend on replicas, axes or devices.

A trained section is `{"parameters": ..., "optimizer": ...}` with float32 master copies; what is never updated is kept apart, because it
needs to be written only once. Global shapes are the same on every plan, so that a snapshot fits any other plan of the same graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from ..graph.adapters import flat, nested
from .arguments import Arguments, shaped
from .plan import Plan

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """State of all sections between two steps: arrays, or their shapes with shardings.

    Args:
        trained: section -> {"parameters": nested dict, "optimizer": nested dict}.
        frozen: section -> nested dict of the parameters that are never updated; sections without any are left out.
    """

    trained: Mapping[str, Tree]
    frozen: Mapping[str, Tree]

    def only(self, sections: Container[str]) -> Snapshot:
        """The part that belongs to some sections."""
        trained, frozen = ({name: tree for name, tree in part.items() if name in sections} for part in (self.trained, self.frozen))
        return Snapshot(trained=trained, frozen=frozen)

    def signature(self) -> dict[str, dict[str, str]]:
        """Section -> path -> "float32[2, 3]": what must agree for a snapshot to fit. Frozen parameters may change their dtype."""
        found: dict[str, dict[str, str]] = {}
        for name, tree in self.trained.items():
            found[name] = {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in flat(tree).items()}
        for name, tree in self.frozen.items():
            found.setdefault(name, {}).update({f"frozen/{path}": str(list(leaf.shape)) for path, leaf in flat(tree).items()})
        return found


def snapshot_shapes(plan: Plan, optimizers: Mapping[str, Any]) -> Snapshot:
    """The snapshot that an engine of this plan would give, as shapes with shardings; nothing is compiled.

    Args:
        plan: where the sections run.
        optimizers: section -> optax transformation, for trainable sections.
    """
    trained, frozen = {}, {}
    for name, section in plan.sections.items():
        arguments = Arguments(plan, section)
        if name in optimizers:
            trained[name] = _trained(arguments.master(), arguments.optimizer_state(optimizers[name]))
        if section.frozen:
            whole = section.submesh.whole
            frozen[name] = nested({p: shaped(s.shape, s.dtype, whole(section.specs[p])) for p, s in section.frozen.items()})
    return Snapshot(trained=trained, frozen=frozen)


def take_snapshot(states: Mapping[str, Any], trained: tuple[str, ...]) -> Snapshot:
    """The arrays of an engine's states (`SectionState`); the next update donates them, so they are not to be kept."""
    return Snapshot(
        trained={name: _trained(states[name].master, states[name].optimizer) for name in trained},
        frozen={name: nested(state.frozen) for name, state in states.items() if state.frozen},
    )


def optimizer_of(tree: Tree, shapes: Any) -> Any:
    """Brings the "optimizer" part of a snapshot back into the form of the optimizer's own state.

    Args:
        tree: a section of `Snapshot.trained`.
        shapes: the optimizer state as shapes.
    """
    found = flat(tree["optimizer"])
    return jax.tree_util.tree_map_with_path(lambda path, _: found[_name(path)], shapes)


def _trained(master: Mapping[str, Any], optimizer: Any) -> Tree:
    leaves = jax.tree_util.tree_flatten_with_path(optimizer)[0]
    return {"parameters": nested(master), "optimizer": nested({_name(path): leaf for path, leaf in leaves})}


def _name(path: tuple[Any, ...]) -> str:
    """The path of a leaf of an optimizer state: fields, positions and parameter paths, joined by "/"."""
    return "/".join(str(_key(part)) for part in path) or "state"


def _key(part: Any) -> Any:
    match part:
        case DictKey(key=key):
            return key
        case SequenceKey(idx=index):
            return index
        case GetAttrKey(name=name):
            return name
    return part
