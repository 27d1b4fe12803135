"""Decides which binding counts: duplicates, what replaces what, macros, scopes, and bindings that count for nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import ConfigError, did_you_mean
from . import registry
from .registry import Entry
from .syntax import COMMAND_LINE, Binding, Macro, Reference, Source, label, leaves

Owner = tuple[str, str]
"""Scope and configurable name of something that is built."""


class Bindings:
    """The bindings of one configuration, checked against the registry.

    A scoped binding beats one with a shorter scope. Among bindings of one key the last file in reading order wins, and
    the command line wins over files; a file must not contradict itself.

    Args:
        source: what was read.

    Raises:
        ConfigError: unknown configurable or parameter, duplicate binding, undefined, unused or circular macro.
    """

    def __init__(self, source: Source) -> None:
        self.macros: dict[str, Binding] = {}
        self._settings: dict[tuple[str, str, str], Binding] = {}
        self._replaced: list[tuple[Binding, Binding]] = []
        self._used: set[Binding] = set()
        self._entries: dict[str, Entry] = {}
        self._all = source.bindings
        for binding in source.bindings:
            self._add(binding)
        for binding in source.bindings:
            for leaf in leaves(binding.value):
                self._check_leaf(leaf, binding)
        self._check_macros()

    def entry(self, name: str, set_by: str) -> Entry:
        """The configurable that a file calls `name`; a module's name is imported once."""
        if name not in self._entries:
            self._entries[name] = registry.find(name, set_by)
        return self._entries[name]

    def lookup(self, owner: Owner, parameter: str) -> Binding | None:
        """The binding that sets `parameter` of `owner`, which thereby counts as used."""
        scope, name = owner
        candidates = [self._settings.get((prefix, name, parameter)) for prefix in _prefixes(scope)]
        found = [binding for binding in candidates if binding is not None]
        if not found:
            return None
        winner = found[-1]
        self._used.add(winner)
        self._replaced += [(loser, winner) for loser in found[:-1] if _may_replace(loser, winner)]
        return winner

    def extra_parameters(self, owner: Owner, known: Iterable[str]) -> list[str]:
        """Names bound for `owner` beyond the `known` ones, for a signature that takes any keyword."""
        scope, name = owner
        bound = {key[2]: None for key in self._settings if key[1] == name and key[0] in _prefixes(scope)}
        return [parameter for parameter in bound if parameter not in set(known)]

    def expand(self, value: Any) -> Any:
        """The value with every macro replaced by what it stands for."""
        if isinstance(value, Macro):
            return self.expand(self.macros[value.name].value)
        if isinstance(value, dict):
            return {self.expand(key): self.expand(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.expand(item) for item in value)
        return value

    def sources(self, binding: Binding) -> str:
        """Where `binding` was set, with the places of the macros in it."""
        macros = {name: self.macros[name].place for name in self._macro_names(binding.value)}
        return binding.source + "".join(f" (macro {name}: {place})" for name, place in macros.items())

    def check_unused(self, root: str, built: list[Owner]) -> None:
        """Raises a ConfigError when a binding touched nothing of what was built.

        A file's binding is excused when the command line or an including file replaced it, or replaced the reference
        to what it configures: choosing another policy must not need an edit of the shipped file.

        Args:
            root: the configurable that was asked for.
            built: everything that was built for it.
        """
        excused = self._used | self._excused()
        unused = {binding: key for key, binding in self._settings.items() if binding not in excused}
        if not unused:
            return
        first, (scope, name, parameter) = next(iter(unused.items()))
        scopes = [built_scope for built_scope, built_name in built if built_name == name]
        uncalled = self._uncalled(name)
        if not scopes and uncalled is not None:
            reference, holder = uncalled
            what, wanted = f"nothing calls {reference}, so no value reaches it", f"{reference}(): the parentheses call it"
            fix = f"write {reference}(), with parentheses ({holder.source}), or delete the binding"
        elif not scopes:
            what, wanted = "it is not built", f"a binding of what {root} builds: {', '.join(label(*owner) for owner in built)}"
            fix = f"refer to @{label(scope, name)}() somewhere, or delete the binding"
        elif all(scope not in _prefixes(built_scope) for built_scope in scopes):
            what = f"no {name} is built in scope {scope!r}{did_you_mean(scope, scopes)}"
            wanted, fix = "one of " + ", ".join(label(built_scope, name) for built_scope in scopes), "correct the scope, or refer to it"
        else:
            winners = [self.lookup((built_scope, name), parameter) for built_scope in scopes if scope in _prefixes(built_scope)]
            what, fix = "more specific bindings win everywhere", "change those bindings, or delete this one"
            wanted = "a binding with an effect; these win:\n" + "\n".join(winner.source for winner in winners if winner is not None)
        raise ConfigError(
            f"binding {first.key} has no effect: {what}.",
            wanted=wanted,
            have=", ".join(binding.key for binding in unused),
            set_by="\n".join(self.sources(binding) for binding in unused),
            fix=fix,
            anchor="unused-binding",
        )

    def _uncalled(self, name: str) -> tuple[Reference, Binding] | None:
        """A reference that counts, to the class or function `name` itself, and the binding that holds it."""
        held = [(leaf, binding) for binding in self._used for leaf in leaves(self.expand(binding.value)) if isinstance(leaf, Reference)]
        found = [(leaf, binding) for leaf, binding in held if not leaf.called and self._entries[leaf.name].name == name]
        return min(found, key=lambda pair: pair[1].order, default=None)

    def _add(self, binding: Binding) -> None:
        if not binding.parameter and "." not in binding.selector:
            self._replace(self.macros, label(binding.scope, binding.selector), binding)
            return
        entry = self.entry(binding.selector, binding.source)
        registry.check_parameter(entry, binding.parameter, binding.source)
        self._replace(self._settings, (binding.scope, entry.name, binding.parameter), binding)

    def _replace(self, table: dict[Any, Binding], key: Any, binding: Binding) -> None:
        earlier = table.get(key)
        if earlier is not None:
            both_flags = earlier.file == binding.file == COMMAND_LINE  # Of equal flags the last one wins, as everywhere.
            if not both_flags and not _may_replace(earlier, binding):
                raise ConfigError(
                    f"{binding.key} is bound twice.",
                    wanted="one binding a file; includes stand above the bindings that change them",
                    have=f"{earlier.place} and {binding.place}",
                    set_by=binding.source,
                    fix="delete one of the two lines",
                    anchor="duplicate-binding",
                )
            self._replaced.append((earlier, binding))
        table[key] = binding

    def _check_macros(self) -> None:
        named = {leaf.name for binding in self._all for leaf in leaves(binding.value) if isinstance(leaf, Macro)}
        for name, binding in self.macros.items():
            if name not in named:
                raise ConfigError(
                    f"macro {name!r} is never used{did_you_mean(name, sorted(named))}.",
                    wanted=f"%{name} in some value",
                    have=f"a line '{name} = ...' and no %{name}",
                    set_by=binding.source,
                    fix=f"delete the line; to set a parameter, write its configurable too: Name.{name} = ...",
                    anchor="unused-macro",
                )
        for name in self.macros:
            self._check_circle(name, ())

    def _check_circle(self, name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            raise ConfigError(
                f"macro {name!r} refers to itself.",
                wanted="macros without a circle",
                have=" -> ".join(f"%{part}" for part in (*trail[trail.index(name) :], name)),
                set_by=self.macros[name].source,
                fix="give one of them a value of its own",
                anchor="circular-reference",
            )
        for leaf in leaves(self.macros[name].value):
            if isinstance(leaf, Macro):
                self._check_circle(leaf.name, (*trail, name))

    def _check_leaf(self, leaf: Reference | Macro, binding: Binding) -> None:
        if isinstance(leaf, Reference):
            self.entry(leaf.name, binding.source)
            if leaf.scope and not leaf.called:
                raise ConfigError(
                    f"reference {leaf} has a scope that does nothing.",
                    wanted=f"{leaf}() for an object with the bindings of that scope, or @{leaf.name} for the class itself",
                    have=str(leaf),
                    set_by=binding.source,
                    fix="add () or take the scope away",
                    anchor="gin-syntax",
                )
        elif leaf.name not in self.macros:
            raise ConfigError(
                f"macro %{leaf.name} is not defined{did_you_mean(leaf.name, sorted(self.macros))}.",
                wanted=f"a line '{leaf.name} = ...'" + (f", or one of %{', %'.join(self.macros)}" if self.macros else ""),
                have=f"%{leaf.name}",
                set_by=binding.source,
                fix=f"define {leaf.name} in the file, or write the value itself",
                anchor="undefined-macro",
            )

    def _macro_names(self, value: Any) -> Iterator[str]:
        for leaf in leaves(value):
            if isinstance(leaf, Macro):
                yield leaf.name
                yield from self._macro_names(self.macros[leaf.name].value)

    def _excused(self) -> set[Binding]:
        """Bindings without effect because a later file or the command line chose something else."""
        excused = {loser for loser, _ in self._replaced}
        waiting = list(self._replaced)
        while waiting:
            loser, winner = waiting.pop()
            for leaf in leaves(self.expand(loser.value)):
                for binding in self._bindings_of(leaf) if isinstance(leaf, Reference) else ():
                    if binding not in excused and _may_replace(binding, winner):
                        excused.add(binding)
                        waiting.append((binding, winner))
        return excused

    def _bindings_of(self, reference: Reference) -> list[Binding]:
        name, scopes = self._entries[reference.name].name, _prefixes(reference.scope)
        return [binding for key, binding in self._settings.items() if key[1] == name and key[0] in scopes]


def _prefixes(scope: str) -> list[str]:
    """Scopes whose bindings apply in `scope`, the weakest first: for "a/b" these are "", "a" and "a/b"."""
    parts = scope.split("/") if scope else []
    return ["/".join(parts[:count]) for count in range(len(parts) + 1)]


def _may_replace(earlier: Binding, later: Binding) -> bool:
    """Whether `later` comes from a file, or the command line, that was written to change the earlier one's file."""
    return earlier.order < later.order and earlier.file != later.file and earlier.file not in later.includers
