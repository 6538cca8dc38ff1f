"""Two import contracts that import-linter lacks: "imports nothing but" and "only from inside a function".

pyproject.toml says which packages they bind; `lint-imports` runs them. Both look at direct imports: an allowed package
is trusted, and each of our own packages has its own contract.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


class _BanContract(Contract):
    """Lists the imports that a subclass calls illegal, one line each: importer, line number, imported."""

    source_modules = fields.ListField(subfield=fields.StringField())

    def _names(self, field: str) -> list[str]:
        names: list[str] = getattr(self, field)  # import-linter puts the parsed value in the place of the field
        return names

    def illegal(self, graph: ImportGraph, importer: str, imported: str) -> Iterator[int]:
        """Line numbers at which ``importer`` may not import ``imported``."""
        raise NotImplementedError

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        found: list[str] = []
        for source in self._names("source_modules"):
            modules = sorted(m for m in graph.modules if _inside(m, source))
            if not modules:
                raise ValueError(f"{self.name}: no module {source} in the import graph")
            for importer in modules:
                for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                    found += [
                        f"{importer}:{line} imports {imported}" for line in self.illegal(graph, importer, imported)
                    ]
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["found"]:
            output.print_error(line, bold=False)


class OnlyContract(_BanContract):
    """``source_modules`` may import the standard library, themselves and ``allowed``; nothing else."""

    type_name = "only"
    allowed = fields.ListField(subfield=fields.StringField())

    def illegal(self, graph: ImportGraph, importer: str, imported: str) -> Iterator[int]:
        fine = [*sys.stdlib_module_names, *self._names("allowed"), *self._names("source_modules")]
        if not any(_inside(imported, package) for package in fine):
            for detail in graph.get_import_details(importer=importer, imported=imported):
                yield detail["line_number"]


class LazyContract(_BanContract):
    """``source_modules`` may import ``lazy_modules`` only from inside a function: loading one never loads the other."""

    type_name = "lazy"
    lazy_modules = fields.ListField(subfield=fields.StringField())

    def illegal(self, graph: ImportGraph, importer: str, imported: str) -> Iterator[int]:
        if any(_inside(imported, package) for package in self._names("lazy_modules")):
            at_import = set(_lines_run_on_import(importer))
            for detail in graph.get_import_details(importer=importer, imported=imported):
                if detail["line_number"] in at_import:
                    yield detail["line_number"]


def _lines_run_on_import(module: str) -> Iterator[int]:
    """Lines of the import statements that run with ``module`` itself: those outside functions and TYPE_CHECKING."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"no source file for {module}")
    todo: list[ast.AST] = [ast.parse(Path(spec.origin).read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node.lineno
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
