"""Every place in a source text where one small mistake could stand, and the text with that mistake made.

The operators are mutmut's, applied to its syntax trees (libcst) without its test runner, plus five that it lacks: a statement
left out, a condition negated, a value not returned, an order dropped (``sorted``, ``reversed``) and ``min`` for ``max``.
Left alone: docstrings, annotations, imports, decorators, asserts (they talk to the type checker) and the wording of messages.

A mutant is known by what it says, not by where it stands: scope, the lines before and after, and which of several equal
places. So it is found again when lines above it move, and a sample drawn by that name changes only where the code does.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b

import attrs
import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators

Operator = tuple[type[cst.CSTNode], Callable[[cst.CSTNode], Iterable[cst.CSTNode]]]
UNTOUCHED = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom, cst.FormattedString, cst.Assert)
NEVER_CALLED_WRONGLY = {"len", "isinstance"}  # as mutmut has it: a wrong argument only ever raises
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "iter"}


@attrs.frozen
class Mutant:
    """``old`` and ``new`` are whole lines of ``file``, indented as they stand; ``nth`` counts equal places from 0."""

    file: str
    scope: str
    operator: str
    old: str
    new: str
    nth: int

    @property
    def key(self) -> str:
        said = "\0".join((self.file, self.scope, self.old, self.new, str(self.nth)))
        return blake2b(said.encode(), digest_size=6).hexdigest()

    def apply(self, source: str) -> str | None:
        """The whole text with the mistake, or None when ``source`` no longer holds the place."""
        span = _scopes(source).get(self.scope)
        if span is None:
            return None
        lines, old = source.splitlines(), self.old.splitlines()
        starts = [i for i in range(span[0], span[1]) if lines[i : i + len(old)] == old]
        if self.nth >= len(starts):
            return None
        at = starts[self.nth]
        return "\n".join([*lines[:at], *self.new.splitlines(), *lines[at + len(old) :]]) + "\n"


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of one text, in the order in which they stand, each of them another text that compiles."""
    walk = _Walk(file, source)
    MetadataWrapper(cst.parse_module(source)).visit(walk)
    return walk.found


def draw(population: Iterable[Mutant], count: int, seed: int) -> list[Mutant]:
    """``count`` of them, chosen by hash of seed and name, so that an edit elsewhere exchanges nobody."""
    return sorted(population, key=lambda m: blake2b(f"{seed}/{m.key}".encode()).digest())[:count]


class _Walk(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, file: str, source: str) -> None:
        super().__init__()
        self.found: list[Mutant] = []
        self._file = file
        self._source = source
        self._lines = source.splitlines()
        self._scopes = _scopes(source)
        self._path: list[str] = []
        self._indents: list[int] = []
        self._raising = 0
        self._module = cst.parse_module("")
        self._seen: set[tuple[int, str]] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if _left_alone(node):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._path.append(node.name.value)
        if isinstance(node, cst.BaseStatement):
            self._indents.append(self.get_metadata(PositionProvider, node).start.column)
        self._raising += isinstance(node, cst.Raise)
        self._mutate(node)
        return _called(node) not in NEVER_CALLED_WRONGLY

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if _left_alone(original_node):
            return
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self._path.pop()
        if isinstance(original_node, cst.BaseStatement):
            self._indents.pop()
        self._raising -= isinstance(original_node, cst.Raise)

    def _mutate(self, node: cst.CSTNode) -> None:
        if self._raising and not _is_word(node) and not isinstance(node, cst.Raise):
            return
        if _called(node) in NEVER_CALLED_WRONGLY:
            return
        for kind, operator in (*mutation_operators, *OWN):
            if isinstance(node, kind):
                for changed in operator(node):
                    self._keep(node, changed, operator.__name__.removeprefix("operator_"))
        if isinstance(node, cst.If | cst.While | cst.CompIf | cst.IfExp):
            self._keep(node.test, cst.UnaryOperation(cst.Not(), _wrapped(node.test)), "negated")

    def _keep(self, node: cst.CSTNode, changed: cst.CSTNode, operator: str) -> None:
        span = self.get_metadata(PositionProvider, node)
        first, last = span.start.line - 1, span.end.line
        before = self._lines[first][: span.start.column]
        after = self._lines[last - 1][span.end.column :]
        margin = "\n" + " " * self._indents[-1]  # which libcst leaves to the block around the node
        new = before + self._module.code_for_node(_bare(changed)).strip("\n").replace("\n", margin) + after
        if (first, new) not in self._seen and new != "\n".join(self._lines[first:last]):
            self._seen.add((first, new))
            self._add(first, self._lines[first:last], new.split("\n"), operator)

    def _add(self, first: int, old: list[str], new: list[str], operator: str) -> None:
        """Keeps of both texts only the lines between the first and the last that differ."""
        while len(old) > 1 and new and old[0] == new[0]:
            old, new, first = old[1:], new[1:], first + 1
        while len(old) > 1 and new and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        scope = ".".join(self._path)
        start = self._scopes[scope][0]
        nth = sum(self._lines[i : i + len(old)] == old for i in range(start, first))
        self.found.append(Mutant(self._file, scope, operator, "\n".join(old), "\n".join(new), nth))


def _bare(node: cst.CSTNode) -> cst.CSTNode:
    """Without the parentheses and blank lines around it, which are no part of a node's position."""
    if isinstance(node, cst.BaseExpression):
        return node.with_changes(lpar=[], rpar=[])
    return node


def _wrapped(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


def _called(node: cst.CSTNode) -> str:
    """The plain name that a call calls, if the node is one."""
    return node.func.value if isinstance(node, cst.Call) and isinstance(node.func, cst.Name) else ""


def _left_alone(node: cst.CSTNode) -> bool:
    docstring = isinstance(node, cst.Expr) and isinstance(node.value, cst.BaseString)
    exports = (
        isinstance(node, cst.Assign)
        and isinstance(node.targets[0].target, cst.Name)
        and (node.targets[0].target.value == "__all__")
    )
    return docstring or exports or isinstance(node, UNTOUCHED)


def _is_word(node: cst.CSTNode) -> bool:
    """A stable word such as the reason of a refusal, as opposed to a sentence for people."""
    return isinstance(node, cst.SimpleString) and " " not in node.value


def _scopes(source: str) -> dict[str, tuple[int, int]]:
    """First and last line (from 0, last exclusive) of every function and class by qualified name; '' is the whole text."""
    spans = {"": (0, source.count("\n") + 1)}

    def enter(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            here = path
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                here = f"{path}.{child.name}".lstrip(".")
                spans.setdefault(here, (child.lineno - 1, child.end_lineno or child.lineno))
            enter(child, here)

    enter(ast.parse(source), "")
    return spans


def _left_out(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A statement that is not there, unless its absence is a name without a value, which only ever raises."""
    if not (isinstance(node, cst.Assign) and all(isinstance(to.target, cst.Name) for to in node.targets)):
        yield cst.Pass()


def _not_returned(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.Return) and node.value is not None:
        yield node.with_changes(value=cst.Name("None"))


def _swapped(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.Call) and _called(node) in SWAPPED:
        yield node.with_changes(func=cst.Name(SWAPPED[_called(node)]))


_STATEMENTS = (cst.Assign, cst.AugAssign, cst.Expr, cst.Del, cst.Raise, cst.Break, cst.Continue)
OWN: tuple[Operator, ...] = (
    *((kind, _left_out) for kind in _STATEMENTS),
    (cst.Return, _not_returned),
    (cst.Call, _swapped),
)
