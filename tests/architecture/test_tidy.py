"""Style is a test: what the linters do not check, read from the syntax tree.

Every check names all its offenders at once. Generated code is left out.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

COLUMNS_MAX = 110
FUNCTION_LINES_MAX = 50

MAY_PRINT = ("src/anabranch/cli/", "benchmarks/", "examples/", "scripts/")

# Written in halves, so that this file passes its own test.
UNFINISHED = tuple(first + second for first, second in (("TO", "DO"), ("FIX", "ME"), ("XX", "X")))

# Whatever turns bytes into code: no byte from the network may ever reach it.
CODE_LOADERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CODE_CALLS = {"eval", "exec", "torch.load", "torch.jit.load", "torch.hub.load"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Nodes = list[ast.AST]  # of a file, the module first
Check = Callable[[Path, str, Nodes], Iterator[str]]


def _code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: neither blank nor a comment."""
    idle = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in idle:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def _nodes(text: str) -> Nodes:
    return list(ast.walk(ast.parse(text)))


def _functions(nodes: Nodes) -> list[Function]:
    return [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _lines(function: Function) -> range:
    """From its first to its last, whatever they hold."""
    return range(function.lineno, (function.end_lineno or function.lineno) + 1)


def _docstring_lines(function: Function) -> set[int]:
    if ast.get_docstring(function) is None:
        return set()
    first = function.body[0]
    return set(range(first.lineno, (first.end_lineno or first.lineno) + 1))


def _dotted(node: ast.expr) -> str:
    """`torch.load` for the expression that reads so; empty for any other kind of expression."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _calls(nodes: Nodes) -> Iterator[tuple[ast.Call, str]]:
    for node in nodes:
        if isinstance(node, ast.Call):
            yield node, _dotted(node.func)


def has_a_docstring(path: Path, text: str, nodes: Nodes) -> Iterator[str]:
    """Every file says what it is for."""
    module = nodes[0]
    assert isinstance(module, ast.Module)
    if not (ast.get_docstring(module) or "").strip():
        yield "1: no module docstring"


def is_narrow(path: Path, text: str, nodes: Nodes) -> Iterator[str]:
    """Lines fit beside each other on a screen. A file is as long as its one subject."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > COLUMNS_MAX:
            yield f"{number}: {len(line)} columns"


def has_short_functions(path: Path, text: str, nodes: Nodes) -> Iterator[str]:
    """Lines of code count: neither the docstring, nor comments, nor blank lines."""
    long = [function for function in _functions(nodes) if len(_lines(function)) > FUNCTION_LINES_MAX]
    code = _code_lines(text) if long else set()  # to find them takes as long as all the rest
    for function in long:
        length = len(set(_lines(function)) & code - _docstring_lines(function))
        if length > FUNCTION_LINES_MAX:
            yield f"{function.lineno}: {function.name} has {length} lines of code"


def is_annotated(path: Path, text: str, nodes: Nodes) -> Iterator[str]:
    """Every parameter and every result has a type."""
    for function in _functions(nodes):
        named = function.args
        parameters = [*named.posonlyargs, *named.args, *named.kwonlyargs, named.vararg, named.kwarg]
        bare = [p.arg for p in parameters if p and not p.annotation and p.arg not in ("self", "cls")]
        if bare or function.returns is None:
            yield f"{function.lineno}: {function.name} lacks annotations: {', '.join(bare) or 'the result'}"


def is_finished(path: Path, text: str, nodes: Nodes) -> Iterator[str]:
    """Work that is left over is an issue, not a comment."""
    for number, line in enumerate(text.splitlines(), 1):
        if any(mark in line for mark in UNFINISHED):
            yield f"{number}: unfinished"


def prints_only_at_the_top(path: Path, text: str, nodes: Nodes) -> Iterator[str]:
    """A library is silent: its callers decide what a person sees."""
    if not str(path).startswith(MAY_PRINT):
        for call, name in _calls(nodes):
            if name == "print":
                yield f"{call.lineno}: print"


def loads_no_code(path: Path, text: str, nodes: Nodes) -> Iterator[str]:
    """Neither pickle, nor torch.load, nor eval."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
            for name in sorted({name.partition(".")[0] for name in names} & CODE_LOADERS):
                yield f"{node.lineno}: import {name}"
        if isinstance(node, ast.ImportFrom):
            for name in sorted({f"{node.module}.{alias.name}" for alias in node.names} & CODE_CALLS):
                yield f"{node.lineno}: {name} can run what it reads"
    for call, name in _calls(nodes):
        allowed = [k for k in call.keywords if k.arg == "allow_pickle" and not _is_false(k.value)]
        if name in CODE_CALLS or allowed:
            yield f"{call.lineno}: {name or 'a call'} can run what it reads"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


CHECKS: list[Check] = [
    has_a_docstring,
    is_narrow,
    has_short_functions,
    is_annotated,
    is_finished,
    prints_only_at_the_top,
    loads_no_code,
]


def test_every_file(root: Path, sources: list[Path]) -> None:
    assert len(sources) > 20
    offences = []
    for source in sources:
        path, text = source.relative_to(root), source.read_text(encoding="utf-8")
        nodes = _nodes(text)
        for check in CHECKS:
            offences += [f"{path}:{offence}" for offence in check(path, text, nodes)]
    assert not offences, "\n" + "\n".join(offences)


def of_lines(count: int) -> str:
    """A function with so many lines of code, and others that do not count."""
    code = "    x = 1\n" * (count - 1)
    return f'async def long() -> None:\n    """Says\n    so."""\n{code}\n    # a comment\n'


FLAWS: list[tuple[Check, str]] = [
    (has_a_docstring, "x = 1"),
    (has_a_docstring, "' '"),
    (is_narrow, "#" * (COLUMNS_MAX + 1)),
    (has_short_functions, of_lines(FUNCTION_LINES_MAX + 1)),
    *((is_annotated, f"def f({bare}) -> None: ...") for bare in ("a", "a, /", "*, a", "*a", "**a")),
    (is_annotated, "class C:\n    async def f(self, a: int = 1): ..."),
    *((is_finished, f"x = 1  # {mark}: more") for mark in UNFINISHED),
    (prints_only_at_the_top, "print(1)"),
    *((loads_no_code, f"import {name}") for name in sorted(CODE_LOADERS)),
    (loads_no_code, "import json, pickle.whatever"),
    (loads_no_code, "from joblib.any import load"),
    (loads_no_code, "eval(x)"),
    (loads_no_code, "torch.load(x)"),
    (loads_no_code, "from torch import float32, load"),
    (loads_no_code, "from torch.hub import load as found"),
    (loads_no_code, "np.load(x, allow_pickle=True)"),
    (loads_no_code, "np.load(x, allow_pickle=y)"),
]


@pytest.mark.parametrize(("check", "text"), FLAWS, ids=lambda part: getattr(part, "__name__", None))
def test_a_flaw_is_found(check: Check, text: str) -> None:
    assert len(list(check(Path("core/bad.py"), text, _nodes(text)))) == 1


def test_what_is_sound_has_no_flaw() -> None:
    text = f"""'What it is for.'
from torch import float32
def f(self, a: int, /, *b: int, c: int, **d: int) -> None: ...
np.load(x, allow_pickle=False), model.load(x)
{"#" * COLUMNS_MAX}
{of_lines(FUNCTION_LINES_MAX)}"""
    assert [offence for check in CHECKS for offence in check(Path("core/good.py"), text, _nodes(text))] == []
    assert (
        list(prints_only_at_the_top(Path("src/anabranch/cli/good.py"), "print(1)", _nodes("print(1)"))) == []
    )
