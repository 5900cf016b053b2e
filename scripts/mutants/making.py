"""The mutants of one source file: each is the file with one small change.

The changes are mutmut's (a boundary moved, an operator swapped, an argument left out, a value gone), and
two that it lacks: a statement left out, a plain condition turned round. Its trampolines are not used: they
leave out constants, properties and the defaults of dataclasses. Never changed: words (strings, what is
logged), assertions, annotations, imports and decorators.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

WORDS = (cst.SimpleString, cst.FormattedString, cst.ConcatenatedString)
LOGGERS = {"log", "LOG", "logger", "warnings"}


@dataclass(frozen=True)
class Mutant:
    """One changed file. `was` and `now` are the lines that differ, without indentation."""

    file: str
    line: int
    was: str
    now: str
    source: str
    function: (
        str  # the outermost function that runs the change when it is called; empty: it runs at the import
    )


@dataclass(frozen=True)
class Change:
    """One node of the tree and what takes its place."""

    line: int
    old: cst.CSTNode
    new: cst.CSTNode


Operator = Callable[[Any], Iterable[cst.CSTNode]]


def left_out(node: cst.Expr | cst.Raise | cst.Del | cst.AugAssign) -> Iterator[cst.CSTNode]:
    """`statement` becomes `pass`. A string by itself is a docstring."""
    if not (isinstance(node, cst.Expr) and isinstance(node.value, (*WORDS, cst.Ellipsis, cst.Yield))):
        yield cst.Pass()


def turned_round(node: cst.If | cst.While | cst.IfExp) -> Iterator[cst.CSTNode]:
    """`if a:` becomes `if not a:`; a comparison has mutants of its own."""
    if isinstance(node.test, cst.Name | cst.Attribute | cst.Call | cst.NamedExpr):
        test = (
            node.test
            if node.test.lpar
            else node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        )
        turned = cst.UnaryOperation(cst.Not(), test, lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=turned)


def without_an_argument(node: cst.Call) -> Iterator[cst.CSTNode]:
    """Each argument but words becomes None, or goes."""
    words = [arg.value for arg in node.args if isinstance(arg.value, WORDS)]
    for changed in mutators.operator_arg_removal(node):
        assert isinstance(changed, cst.Call)
        if all(any(arg.value is word for arg in changed.args) for word in words):
            yield changed


OPERATORS: tuple[tuple[tuple[type[cst.CSTNode], ...], Operator], ...] = (
    ((cst.BaseNumber,), mutators.operator_number),
    ((cst.Name,), mutators.operator_name),
    ((cst.Assign, cst.AnnAssign), mutators.operator_assignment),
    ((cst.AugAssign,), mutators.operator_augmented_assignment),
    ((cst.UnaryOperation,), mutators.operator_remove_unary_ops),
    ((cst.Call,), without_an_argument),
    ((cst.Call,), mutators.operator_symmetric_string_methods_swap),
    ((cst.Lambda,), mutators.operator_lambda),
    ((cst.CSTNode,), mutators.operator_keywords),
    ((cst.CSTNode,), mutators.operator_swap_op),
    ((cst.Match,), mutators.operator_match),
    ((cst.IfExp,), mutators.operator_if_exp),
    ((cst.Expr, cst.Raise, cst.Del, cst.AugAssign), left_out),
    ((cst.If, cst.While), turned_round),
)


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Change] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _is_never_changed(node):
            return False
        for kinds, operator in OPERATORS:
            if isinstance(node, kinds):
                line = self.get_metadata(PositionProvider, node).start.line
                self.changes += [Change(line, node, new) for new in operator(node)]
        return True


def _is_never_changed(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.Annotation | cst.Decorator | cst.Import | cst.ImportFrom | cst.TypeAlias):
        return True
    if isinstance(node, cst.FormattedString | cst.Assert):
        return True
    if isinstance(node, cst.If) and isinstance(node.test, cst.Name):
        return node.test.value == "TYPE_CHECKING"
    if isinstance(node, cst.Expr) and isinstance(node.value, cst.Call):
        return _is_logging(node.value)
    return isinstance(node, cst.AnnAssign | cst.Assign) and _is_of_types(node)


def _is_logging(call: cst.Call) -> bool:
    owner = call.func.value if isinstance(call.func, cst.Attribute) else None
    return isinstance(owner, cst.Name) and owner.value in LOGGERS


def _is_of_types(node: cst.AnnAssign | cst.Assign) -> bool:
    """`Weights = Mapping[str, float]`: an alias, or a name of the module such as `log`."""
    targets = [node.target] if isinstance(node, cst.AnnAssign) else [t.target for t in node.targets]
    name = targets[0]
    if not isinstance(name, cst.Name):
        return False
    if name.value in LOGGERS | {"__all__", "__slots__"}:
        return True
    mixed = name.value[:1].isupper() and not name.value.isupper()
    return mixed and isinstance(node.value, cst.Subscript | cst.BinaryOperation | cst.Name)


def mutants_of(file: str, source: str) -> list[Callable[[], Mutant | None]]:
    """Every mutant of the file, in order; each is made when it is called. None: it does not differ."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    finder = _Finder()
    wrapper.visit(finder)
    spans = _functions(ast.parse(source))

    def maker(change: Change) -> Callable[[], Mutant | None]:
        return lambda: _made(file, source, wrapper.module, change, spans)

    return [maker(change) for change in finder.changes]


def _made(
    file: str, source: str, module: cst.Module, change: Change, spans: list[tuple[str, range]]
) -> Mutant | None:
    tree = module.deep_replace(change.old, change.new)
    assert isinstance(tree, cst.Module)
    changed = tree.code
    was, now = _difference(source, changed)
    if not was and not now:
        return None
    try:
        compile(changed, file, "exec")
    except SyntaxError:
        return None
    function = next((name for name, lines in spans if change.line in lines), "")
    return Mutant(file, change.line, was, now, changed, function)


def _difference(before: str, after: str) -> tuple[str, str]:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))[2:]
    was, now = ([line[1:].strip() for line in lines if line[0] == sign] for sign in "-+")
    return " ".join(was), " ".join(now)


def _functions(tree: ast.Module) -> list[tuple[str, range]]:
    """The outermost functions and the lines of their bodies; what stands above runs at the import."""
    found: list[tuple[str, range]] = []

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0].lineno
                found.append((f"{prefix}{node.name}", range(first, (node.end_lineno or first) + 1)))

    walk(tree.body, "")
    return found
