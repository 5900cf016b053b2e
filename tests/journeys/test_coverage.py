"""No line of a page that nobody types, no command that nobody has seen, no exit code that nobody has met.

The walks are data: what they type and how it ends is read from them here, and done by `test_walks.py`.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterator

import click  # noqa: TID251 - that of developers has them
import pytest
import walks
from commands import command_line
from pages import ROOT, Command, commands_of, mentioned, pages
from walking import End, Left, Line, Walk
from walks.installing import ENVIRONMENTS

from anabranch.core.errors import OUTCOMES

PAGES = [page for page in pages() if commands_of(page)]
INSTALLED = {line for lines in ENVIRONMENTS.values() for line in lines}


def _of(page: str) -> list[Walk]:
    return [walk for walk in walks.ALL if walk.page == page]


def _typed(walk: Walk) -> Iterator[str]:
    """Every line of a walk, as it is typed or as the page has it."""
    for line in walk.lines():
        yield line.text if line.own else walk.command(line.text).text


def _is_typed(command: Command) -> bool:
    if command.text in INSTALLED:
        return True
    typed = {text for walk in _of(command.page) for text in _typed(walk)}
    left = [step.text for walk in _of(command.page) for step in walk.steps if isinstance(step, Left)]
    return command.text in typed or any(command.text.startswith(text) for text in left)


@pytest.mark.parametrize("page", PAGES)
def test_every_line_of_a_page_is_typed(page: str) -> None:
    untyped = [str(command) for command in commands_of(page) if not _is_typed(command)]
    assert not untyped, "no walk types:\n" + "\n".join(untyped)


def test_what_is_left_out_is_on_the_page() -> None:
    for walk in walks.ALL:
        for step in walk.steps:
            if isinstance(step, Left):
                found = [c for c in commands_of(walk.page) if c.text.startswith(step.text)]
                assert found, f"{walk.name}: {walk.page} has no {step.text!r}"


def _words(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command under this one."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _words(inner, (*path, name))
    else:
        yield path


def _called(text: str) -> Iterator[list[str]]:
    """The arguments of each `anabranch` in a line of the shell."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for ends, words in itertools.groupby(lexer, lambda word: set(word) <= set(lexer.punctuation_chars)):
        arguments = [] if ends else list(itertools.dropwhile(lambda word: word != "anabranch", words))
        if arguments:
            yield arguments[1:]


def _named(arguments: list[str], root: click.Group) -> tuple[tuple[str, ...], click.Command]:
    """The command that arguments begin with: its words, and itself."""
    words: tuple[str, ...] = ()
    command: click.Command = root
    while isinstance(command, click.Group) and arguments and arguments[0] in command.commands:
        word, *arguments = arguments
        words, command = (*words, word), command.commands[word]
    return words, command


@pytest.fixture(scope="module")
def root() -> click.Group:
    """The command line, as a tree of commands."""
    return command_line()


def test_every_command_is_typed(root: click.Group, figure: Callable[[str], None]) -> None:
    typed = {
        _named(arguments, root)[0]: walk.name
        for walk in walks.ALL
        for text in _typed(walk)
        for arguments in _called(text)
    }
    every = set(_words(root))
    assert not every - set(typed), "no walk types: " + ", ".join(" ".join(w) for w in every - set(typed))
    lines = sum(len(commands_of(page)) for page in PAGES)
    figure(f"{len(every)} commands; {lines} lines of {', '.join(PAGES)}")


def test_every_exit_code_is_met(figure: Callable[[str], None]) -> None:
    steps = (step for walk in walks.ALL for step in walk.steps)
    met = {step.ends for step in steps if isinstance(step, Line | End)}
    rows = re.findall(r"^\| (\d+) \| ", (ROOT / "docs" / "exit-codes.md").read_text(), re.MULTILINE)
    named = {int(code) for code in rows}
    assert named >= {outcome.exit_code for outcome in OUTCOMES.values()}
    assert not named - met - set(walks.NEVER), f"no walk ends so: {named - met - set(walks.NEVER)}"
    figure(f"exit codes {', '.join(str(code) for code in sorted(met & named))}")


@pytest.mark.parametrize("page", [page for page in pages() if mentioned(page)])
def test_what_is_mentioned_is_there(page: str, root: click.Group) -> None:
    for text in mentioned(page):
        for arguments in _called(text):
            words, command = _named(arguments[arguments[:1] == ["help"] :], root)
            known = {name for param in command.get_params(click.Context(command)) for name in param.opts}
            options = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
            assert words or options, f"{page}: {text}"
            assert options <= known, f"{page}: {text}: {options - known}"
