"""Chat templates: the model file's own Jinja program, run in a sandbox, because a model file is not trusted code.

The environment gives what Hugging Face templates expect (``raise_exception``, ``strftime_now``, ``tojson`` that does
not escape, ``{% generation %}``, ``break`` and ``continue``) and takes away what they could abuse: attributes that
begin with an underscore, changing a value of the caller, and unbounded work. Work is counted in operations, never in
seconds, so that a template that renders once always renders.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from engine.loading.model import LoadError

MAX_OPERATIONS = 1_000_000  # loop items, attribute reads, operators and calls in one rendering
CALL_COST = 5  # of one call, in operations
MAX_LENGTH = 16_000_000  # characters of the result, and items of any string or list that the template builds
MAX_PADDING = 10_000  # width that a padding function may be asked for
_WIDE = re.compile(r"\d{5,}|\*|\{[^}]*\{")  # a format string whose width is huge, or taken from an argument
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap"})


class TemplateFailure(Exception):
    """The template refused or could not render these messages; the message is the template's own."""


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote, for training; when serving it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Meter(NodeTransformer):
    """Rewrites a parsed template so that loops and ``~`` pass through the environment, which counts them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _hook("counted", [node.iter], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _hook("joined", node.nodes, node.lineno)


def _hook(name: str, arguments: list[Any], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, clock: Callable[[], datetime], max_operations: int) -> None:
        # Not optimised: folding constants would run a template's arithmetic before any limit is in place.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self._local = threading.local()
        self._max_operations = max_operations
        self.filters["tojson"] = _tojson
        for name in (*_PADDING, "format", "replace", "join"):
            if name in self.filters:
                self.filters[name] = _guarded_filter(name, self.filters[name])
        self.globals = {
            "range": self.globals["range"],
            "dict": self.globals["dict"],
            "namespace": self.globals["namespace"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": _raise_exception,
            "strftime_now": lambda layout: clock().strftime(str(layout)[:100]),
        }

    def restart(self) -> None:
        self._local.left = self._max_operations

    def tick(self, cost: int = 1) -> None:
        left = getattr(self._local, "left", self._max_operations) - cost
        self._local.left = left
        if left < 0:
            raise TemplateFailure(f"the chat template needs more than {self._max_operations} operations")

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.tick()
            yield item

    def joined(self, *parts: Any) -> str:
        return self.concat(str(part) for part in parts)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        kept, length = [], 0
        for part in parts:
            length += len(part)
            _allow(length)
            kept.append(part)
        return "".join(kept)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Meter().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        assert isinstance(tree, nodes.Template)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.tick()
        return super().getitem(obj, argument)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick(CALL_COST)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _guard(obj.__name__, owner, args)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The sandbox replaces ``str.format`` by a function of its own, so ``call`` would not know it."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _guard("format", value.__self__, args)
            return wrapped(*args, **kwargs)

        return checked

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        numbers = not hasattr(left, "__len__") and not hasattr(right, "__len__")
        if operator == "**":
            if not (numbers and abs(left) <= 10**6 and abs(right) <= 64):
                raise TemplateFailure(f"the chat template raises {_brief(left)} to the power {_brief(right)}")
        elif operator == "*" and not numbers:
            sequence, times = (left, right) if hasattr(left, "__len__") else (right, left)
            _allow(len(sequence) * max(int(times), 0))
        elif operator == "*":
            _allow(abs(left).bit_length() if isinstance(left, int) else 0)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _allow(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _guard("format", left, ())
        return super().call_binop(context, operator, left, right)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _allow(length: int) -> None:
    if length > MAX_LENGTH:
        raise TemplateFailure(f"the chat template builds a value of {length} items; at most {MAX_LENGTH} are allowed")


def _guard(name: str, owner: Any, args: Sequence[Any]) -> None:
    """Refuses the string functions whose result can be far longer than what they are given."""
    if name in _PADDING:
        if any(isinstance(argument, int) and abs(argument) > MAX_PADDING for argument in args):
            raise TemplateFailure(f"the chat template asks {name} for a width above {MAX_PADDING}")
    elif name in ("format", "format_map"):
        if _WIDE.search(str(owner)):
            raise TemplateFailure("the chat template uses a format string whose width is not a small constant")
    elif name == "replace" and len(args) >= 2:
        text = str(owner)
        _allow(len(text) + text.count(str(args[0])) * len(str(args[1])))
    elif name == "join" and args and hasattr(args[0], "__len__"):
        _allow(len(owner) * len(args[0]))


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``functools.wraps`` keeps the mark by which Jinja knows that a filter wants the evaluation context first."""
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        owner, rest = args[leading], [*args[leading + 1 :], *kwargs.values()]
        if name == "join":
            items = list(owner)
            _guard("join", str(rest[0]) if rest else "", [items])
            args = (*args[:leading], items, *args[leading + 1 :])
        else:
            _guard(name, owner, rest)
        return function(*args, **kwargs)

    return checked


def _raise_exception(message: object) -> None:
    raise TemplateFailure(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template, or several under names (``default``, and ``tool_use`` for requests with tools).

    ``tokens`` are the special tokens by the names that templates use (``bos_token``, ``eos_token``, ...). ``clock``
    answers ``strftime_now``; ``max_operations`` bounds one rendering. Raises ``LoadError`` where a source is not valid
    Jinja.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        tokens: Mapping[str, str] | None = None,
        *,
        where: str = "chat template",
        clock: Callable[[], datetime] = datetime.now,
        max_operations: int = MAX_OPERATIONS,
    ) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self.source = sources.get("default") or next(iter(sources.values()), "")
        self.tokens = dict(tokens or {})
        self._sandbox = _Sandbox(clock, max_operations)
        self._templates = {name: self._compile(text, f"{where} ({name})") for name, text in sources.items()}
        if not self._templates:
            raise LoadError(f"{where}: no template in it")

    def _compile(self, source: str, where: str) -> jinja2.Template:
        if len(source) > MAX_LENGTH // 16:
            raise LoadError(f"{where}: {len(source)} characters, but at most {MAX_LENGTH // 16} are allowed")
        try:
            return self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise LoadError(f"{where}: line {error.lineno}: {error.message}") from None
        except (RecursionError, MemoryError, ValueError, SyntaxError, TypeError) as error:
            raise LoadError(f"{where}: cannot be compiled: {error}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # so that a variable of the template may have any name, "self" too
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text for ``messages``. Raises ``TemplateFailure`` where the template refuses them or fails."""
        names = ("tool_use", "default") if tools else ("default",)
        template = next((self._templates[n] for n in names if n in self._templates), None)
        if template is None:
            template = next(iter(self._templates.values()))
        variables = {"documents": None, **self.tokens, **kwargs}
        variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        self._sandbox.restart()
        try:
            return template.render(variables)
        except TemplateFailure:
            raise
        except RecursionError:
            raise TemplateFailure("the chat template recurses without end") from None
        except Exception as error:
            raise TemplateFailure(f"{type(error).__name__}: {error}") from error
