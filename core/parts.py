"""Parts that others may write: one mechanism for every kind of them.

A part is known by its name: it is built in, an installed package brings it (an entry point of the kind's
group), or it was let in: code of one's own, `path/to/file.py:Class` or `module:Class`, which a command line
or a file of settings has named. Nothing here loads such code; `support/code.py` does, for whoever starts a
process, and a name that another machine has sent is looked up and never loaded.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol

from anabranch.core.config.tables import Config, StrategyTable
from anabranch.core.errors import AnabranchError, ConfigError
from anabranch.core.spelling import did_you_mean

log = logging.getLogger(__name__)

_CODE = re.compile(r"(?:.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*\Z", re.DOTALL)

LACKING_SAID = 4
GROUPS = "anabranch."
_OWN_NAMES: dict[str, str] = {}  # of what was let in, by place
_KINDS: list[PartKind] = []  # those that this process knows


def is_code(name: str) -> bool:
    """Whether a name is the place of some code: `path/to/file.py:Class` or `module:Class`."""
    return _CODE.match(name) is not None


def members(protocol: type[Any], but: Collection[str] = ()) -> tuple[str, ...]:
    """What a class must have to be of a protocol."""
    parents = [cls for cls in protocol.__mro__ if getattr(cls, "_is_protocol", False) and cls is not Protocol]
    named = [name for cls in parents for name in (*inspect.get_annotations(cls), *vars(cls))]
    return tuple(n for n in dict.fromkeys(named) if not n.startswith("_") and n not in but)


class PartKind:
    """One kind of part: what is built in, what is installed, what was let in.

    `settings`: the keys that name one, as `table.key`, or a list of them. `also`: words that such a key may
    have as well. A built-in is the part itself, or its place as `module:Class`, imported when it is wanted.
    `needs`: what each part must have, as `members` gives it; `check` raises `ConfigError` for what is wrong
    otherwise. `option`: what a device's command line calls it, where devices need the part too.
    """

    def __init__(
        self,
        word: str,
        group: str,
        settings: Collection[str],
        built_in: Mapping[str, Any],
        needs: Collection[str] = (),
        check: Callable[[Any], None] | None = None,
        also: Collection[str] = (),
        option: str = "",
    ) -> None:
        self.word, self.group, self.settings, self.option = word, f"{GROUPS}{group}", settings, option
        self.built_in, self.also = built_in, also
        self._needs, self._check = needs, check
        self._let_in: dict[str, Any] = {}  # by name and by place
        self._installed: dict[str, Any] = {}  # those that were wanted, by name
        self._broken: set[str] = set()  # those that could not be loaded when all were wanted
        _KINDS.append(self)

    def names(self) -> list[str]:
        """Every name that `find` knows; those built in come first."""
        own = (name for name in self._let_in if not is_code(name))
        return list(dict.fromkeys((*self.built_in, *sorted({*own, *self._entries}))))

    def find(self, name: str) -> Any:
        """The part of this name. Raises `ConfigError`, naming what there is."""
        if name in self.built_in:
            return _imported(self.built_in[name])
        if name in self._let_in:
            return self._let_in[name]
        entries = self._entries.get(name)
        if entries is None:
            raise ConfigError(self._unknown(name))
        return self._loaded(name, entries)

    def ours(self) -> dict[str, Any]:
        """All that are built in, by name; imported now."""
        return {name: self.find(name) for name in self.built_in}

    def others(self) -> dict[str, Any]:
        """All that are not built in, by name, those that are installed too.

        An installed one that cannot be had is left out, and said once: most of what asks needs another.
        """
        found = {}
        for name in self._entries:
            if name not in self._broken:
                try:
                    found[name] = self.find(name)
                except ConfigError as error:
                    self._broken.add(name)
                    log.warning("%s; nothing that needs it will run", error)
        return {**found, **{name: part for name, part in self._let_in.items() if not is_code(name)}}

    def let_in(self, place: str, part: Any) -> None:
        """From now on `part`, which was loaded from `place`, is known by that and by its own name.

        Raises `ConfigError` where it is no part of this kind, or where its name is taken.
        """
        name = name_of(part)
        if not name:
            raise ConfigError(f"{place}: this {self.word} needs a name of its own: write name = '...' in it")
        known = self._let_in.get(name)
        if name in self.built_in or name in self._entries or not (known is None or _same(known, part)):
            raise ConfigError(f"{place}: there is another {self.word} {name!r} already: rename this one")
        self.check(part, place)
        self._let_in[place] = self._let_in[name] = part
        _OWN_NAMES[place] = name

    def named(self, part: Any) -> str:
        """How a setting names a part that is at hand: by its name; one's own, which is let in, by its place.

        Raises `ConfigError` where it is no part of this kind.
        """
        name = name_of(part)
        if (name in self.built_in or name in self._entries) and self.find(name) is part:
            return name
        place = f"{part.__module__}:{part.__qualname__}"
        self.let_in(place, part)
        return place

    def has(self, place: str) -> bool:
        """Whether the code of this place was let in."""
        return place in self._let_in

    def own(self) -> list[Any]:
        """Those of others that this process has: let in, or installed and wanted so far."""
        parts = (*self._let_in.values(), *self._installed.values())
        return list({id(part): part for part in parts}.values())

    def check_name(self, name: str) -> None:
        """Raises `ConfigError` where no part has this name, or an installed one that of a built-in."""
        if name not in self.built_in:
            self.find(name)  # what is built in is imported when it is wanted
        elif name in self._entries:
            others = _packages(self._entries[name])
            raise ConfigError(
                f"{self.word} {name!r} is built in, and of the installed package {others} as well: "
                "give the entry point, and what it names, another name"
            )

    def check(self, part: Any, place: str) -> None:
        """Raises `ConfigError`, which begins with `place`, for what is no part of this kind."""
        if lacking := [name for name in self._needs if not hasattr(part, name)]:
            more = ", ..." if len(lacking) > LACKING_SAID else ""
            said = ", ".join(lacking[:LACKING_SAID]) + more
            raise ConfigError(f"{place} is no {self.word}: it lacks {said}; see docs/extending.md")
        if waits := [name for name in self._needs if inspect.iscoroutinefunction(getattr(part, name))]:
            raise ConfigError(f"{place}: {waits[0]} is `async def`, and nobody awaits it: write `def`")
        if self._check is not None:
            try:
                self._check(part)
            except AnabranchError as error:
                raise ConfigError(f"{place}: {error}") from error

    def named_in(self, config: Config) -> list[tuple[str, str]]:
        """Each key of `settings` with the names that a configuration has there, words of `also` left out."""
        found = []
        for key in self.settings:
            value = _at(config, key)
            texts = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else []
            found += [
                (key, text) for text in texts if isinstance(text, str) and text and text not in self.also
            ]
        return found

    def _loaded(self, name: str, entries: Sequence[EntryPoint]) -> Any:
        entry, *more = entries
        if more:
            raise ConfigError(
                f"{self.word} {name!r} is of several installed packages, {_packages(entries)}: "
                "uninstall all but one"
            )
        place = f"{self.word} {name!r} of the installed package {_package(entry)}"
        try:
            part = entry.load()
        except Exception as error:
            raise ConfigError(f"{place} cannot be loaded: {type(error).__name__}: {error}") from error
        self.check(part, place)
        if "name" in self._needs and (own := name_of(part)) != name:
            # Settings go by the one and the wire by the other: a device would not have what a chain names.
            raise ConfigError(f"{place} calls itself {own!r}: give the entry point that name")
        self._installed[name] = part
        return part

    @cached_property
    def _entries(self) -> dict[str, list[EntryPoint]]:
        found: dict[str, list[EntryPoint]] = {}
        for entry in installed():
            if entry.group == self.group:
                found.setdefault(entry.name, []).append(entry)
        return found

    def _unknown(self, name: str) -> str:
        setting = next(iter(self.settings), self.word)
        names = [*self.also, *self.names()]
        if is_code(name):
            return (
                f"{setting} is {name!r}, which is code: only a command line or a file of settings can name it"
            )
        near = did_you_mean(name, names, likeness=0.4)
        hint = near or "your own is path/to/file.py:Class"
        own = f"{' Or' if near else ', or'} name your own with {self.option}" if self.option else ""
        return f"{setting} must be one of {', '.join(names)}, not {name!r}; {hint}{own}"


def kinds() -> tuple[PartKind, ...]:
    """The kinds of part that this process knows: those whose modules are imported."""
    return tuple(_KINDS)


@cache
def installed() -> tuple[EntryPoint, ...]:
    """The entry points of all installed packages that bring parts; each once."""
    groups = entry_points()
    named = (
        entry for group in groups.groups if group.startswith(GROUPS) for entry in groups.select(group=group)
    )
    return tuple({(entry.group, entry.name, entry.value): entry for entry in named}.values())


def name_of(part: Any) -> str:
    """What a part calls itself: its `name`, or that of the function."""
    found = getattr(part, "name", "") or ("" if isinstance(part, type) else getattr(part, "__name__", ""))
    return found if isinstance(found, str) else ""


def answer_text(found: Any) -> str:
    """What a part has answered, in a word or two, for the error that says what it should have been."""
    return "None" if found is None else f"a {type(found).__name__}"


def is_data(part: Any) -> bool:
    """Whether a part is a frozen dataclass: its fields are its parameters, and nothing is remembered in it.

    What it counted there would be gone after a restart, and no snapshot would have it.
    """
    params = getattr(part, "__dataclass_params__", None)
    return isinstance(part, type) and bool(getattr(params, "frozen", False))


def check_is_data(part: Any, what: str) -> None:
    """Raises `ConfigError`, with `what` it must be, unless a part is a frozen dataclass."""
    if not is_data(part):
        raise ConfigError(f"{what}: write @dataclass(frozen=True)")


def told_name(name: Any) -> Any:
    """A setting as another machine is told it: code that was let in here by its own name, never its place."""
    return _OWN_NAMES.get(name, name) if isinstance(name, str) else name


def check_names(config: Config, kinds: Iterable[PartKind]) -> None:
    """Raises `ConfigError` where a setting names no part that is known."""
    for kind in kinds:
        for _, name in kind.named_in(config):
            kind.check_name(name)


def _imported(part: Any) -> Any:
    if not isinstance(part, str):
        return part
    module, _, name = part.partition(":")
    return getattr(import_module(module), name)


def _same(known: Any, part: Any) -> bool:
    """The same definition, perhaps loaded twice: a file has one module name, however its path is written."""
    return bool(known.__qualname__ == part.__qualname__ and _module(known) == _module(part))


def _module(part: Any) -> str:
    return str(getattr(part, "__module__", ""))


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _packages(entries: Sequence[EntryPoint]) -> str:
    return " and ".join(sorted({_package(entry) for entry in entries}))


def _at(config: Config, key: str) -> Any:
    table, *rest = key.split(".")
    found: Any = getattr(config, table)
    if isinstance(found, StrategyTable):
        found = {"name": found.name, **found.params}
    for name in rest:
        found = [_of(one, name) for one in found] if isinstance(found, list | tuple) else _of(found, name)
    return found


def _of(table: Any, name: str) -> Any:
    return table.get(name) if isinstance(table, Mapping) else getattr(table, name, None)


def is_looked_at(number: int) -> bool:
    """Whether the event of this number is one at which parts of one's own are looked at closely.

    1, 2, 4, 8, ...: what has gone well for long costs little, and what does not is seen at once.
    """
    return number.bit_count() == 1
