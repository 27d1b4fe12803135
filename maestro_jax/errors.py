"""One tree of errors; each says what is wrong, what was wanted, what there is, where it was set and how to mend it.

The text has five parts so that a user can act without reading our code:

    MeshError: section 'student' cannot be placed.
      wanted   replica=4 x tensor=2 = 8 devices
      have     6 devices left after 'teacher' took 0-1 of 8
      set by   configs/kd_tiny.gin:14  student/Section.replicas
      fix      lower tensor to 1, or give teacher fewer devices; --dry_run shows the plan
      help     docs/errors.md#mesh-too-small
"""

from __future__ import annotations

from typing import Any


class MaestroError(Exception):
    """A mistake of the user's, or of the data's, in five parts.

    Args:
        what: one sentence that names the object that is wrong.
        wanted: what would have been right.
        have: what was found instead.
        fix: what the user can do about it.
        anchor: heading in `docs/errors.md` that explains this kind of error.
        set_by: file and line, or call, that set the wrong value (see `set_by`).
    """

    def __init__(self, what: str, *, wanted: str, have: str, fix: str, anchor: str, set_by: str = "the calling program") -> None:
        self.what, self.wanted, self.have, self.fix, self.anchor, self.set_by = what, wanted, have, fix, anchor, set_by
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = {
            "wanted": self.wanted,
            "have": self.have,
            "set by": self.set_by,
            "fix": self.fix,
            "help": f"docs/errors.md#{self.anchor}",
        }
        lines = [f"  {name:<8} {_indented(text)}" for name, text in parts.items()]
        return "\n".join([self.what, *lines])

    def to_json(self) -> dict[str, str]:
        """The class and the parts of the error, for another process (see `error_of`)."""
        return {
            "kind": type(self).__name__,
            **{part: getattr(self, part) for part in ("what", "wanted", "have", "fix", "anchor", "set_by")},
        }

    def __reduce__(self) -> Any:
        """Keyword-only arguments survive pickling, so that worker processes can pass errors on."""
        state = {"wanted": self.wanted, "have": self.have, "fix": self.fix, "anchor": self.anchor, "set_by": self.set_by}
        return _rebuild, (type(self), self.what, state)


class ConfigError(MaestroError):
    """A configuration value, name or file is wrong."""


class GraphError(MaestroError):
    """The section graph as a whole cannot be trained (cycle, no loss, unknown section)."""


class EdgeError(MaestroError):
    """One edge is wrong: unknown output, shape or dtype mismatch, or a payload that met the wrong consumer."""


class MeshError(MaestroError):
    """Sections and devices do not fit together."""


class ScheduleError(MaestroError):
    """A workload cannot be scheduled, or a schedule breaks a rule."""


class DataError(MaestroError):
    """A data source or sample cannot be used."""


class CheckpointError(MaestroError):
    """Saved weights or state cannot be read, written or applied."""


class ClusterError(MaestroError):
    """The processes of a run do not work together: one is silent, or they do not agree."""


class TrainingError(MaestroError):
    """Training cannot go on: what it computes is no longer of use."""


def error_of(told: dict[str, str]) -> MaestroError:
    """Makes the error that another process told of.

    >>> error_of(DataError("no text.", wanted="some", have="none", fix="add some", anchor="no-text").to_json()).what
    'no text.'
    """
    parts = dict(told)
    kinds = {kind.__name__: kind for kind in MaestroError.__subclasses__()}
    return kinds.get(parts.pop("kind"), MaestroError)(parts.pop("what"), **parts)


def set_by(owner: object, field: str) -> str:
    """Says where `owner.field` was set: file, line and binding when a config file or flag did, else the class.

    Configuration objects made by `maestro_jax.config` carry `_provenance`, a dict from field to location.

    >>> set_by(object(), "steps")
    'the calling program: object.steps'
    """
    known: dict[str, str] = getattr(owner, "_provenance", {})
    if field in known:
        return known[field]
    name = getattr(owner, "name", None)
    label = f"{type(owner).__name__}({name!r})" if isinstance(name, str) else type(owner).__name__
    return f"the calling program: {label}.{field}"


def did_you_mean(name: str, known: list[str]) -> str:
    """Returns ' (did you mean ...?)' when a known name is close to `name`, else an empty string.

    >>> did_you_mean("techer", ["teacher", "student"])
    " (did you mean 'teacher'?)"
    """
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _indented(text: str) -> str:
    return text.replace("\n", "\n" + " " * 11)


def _rebuild(kind: type[MaestroError], what: str, state: dict[str, str]) -> MaestroError:
    return kind(what, **state)
