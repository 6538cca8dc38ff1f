"""OpenTelemetry: one span per HTTP request, sent to a collector as OTLP over HTTP. Numbers only, never prompt or answer.

    traceparent header -> parent            attributes in the names of OpenTelemetry's HTTP and gen_ai conventions,
    front door         -> span begins, ends  timings of the engine in vLLM's names, which dashboards know
    Context.answer     -> what was asked and what became of it

Spans wait in a bounded queue for a thread of their own; a collector that is slow, broken or away costs a request nothing,
and what does not fit into the queue is dropped. ``opentelemetry`` is imported only when tracing was asked for, and neither
provider nor propagator is global, so an application around this one keeps its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine.config import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from engine.request import SamplingParams
    from server.live import Generation

FLUSH_SECONDS = 3.0  # that the last spans get when the server ends
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
}
_PATH = "/v1/traces"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_PACKAGES = {
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
}

current: ContextVar[RequestSpan | None] = ContextVar("span", default=None)
"""The span of the request that is being handled; None when nothing is traced."""


def endpoint_of(given: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The collector's full URL, or None when nobody asked for traces. ``given`` is ``--otlp-endpoint``, which beats the
    standard variables. Raises ``ConfigError``."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if given is None:
        if environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
            return None
        full, base = (environ.get(name) for name in _ENDPOINTS)
        url = full or (base and base.rstrip("/") + _PATH)
    else:
        url = given if given.endswith(_PATH) else given.rstrip("/") + _PATH
    if not url:
        return None
    named = next((environ[name] for name in _PROTOCOLS if environ.get(name)), _PROTOCOL)
    if named != _PROTOCOL:
        raise ConfigError("otlp_endpoint", f"{_PROTOCOLS[1]} is {named!r}, but only {_PROTOCOL} is spoken here")
    return url


def check(endpoint: str) -> None:
    """Raises ``ConfigError`` for what is no URL, and when the packages of the ``otel`` extra are missing. Imports none."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("otlp_endpoint", f"otlp_endpoint is {endpoint!r}, but must be like http://collector:4318")
    for package, module in _PACKAGES.items():
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:  # not even its parent is there
            found = False
        if not found:
            raise ConfigError(
                "otlp_endpoint",
                f"otlp_endpoint is {endpoint!r}, but {package} is not installed: it comes with the otel extra, as in "
                "pip install 'lockstep-engine[otel]'",
            )


class Tracing:
    """Begins spans and sends them to ``endpoint``, a URL that ``check`` let pass."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from engine import __version__

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "lockstep"}
        resource = Resource.create({**named, "service.version": __version__})  # with OTEL_RESOURCE_ATTRIBUTES
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("lockstep", __version__)
        self._kind = SpanKind.SERVER
        self._extract = TraceContextTextMapPropagator().extract

    def begin(self, method: str, path: str, headers: Mapping[str, str], request_id: str) -> RequestSpan:
        """``headers`` with names in lower case. A traceparent that makes no sense begins a trace of its own."""
        attributes = {"http.request.method": method, "url.path": path[:200], "lockstep.request.id": request_id}
        if (operation := OPERATIONS.get(path)) is not None:
            attributes |= {"gen_ai.operation.name": operation, "gen_ai.provider.name": "lockstep"}
        parent = self._extract({name: headers[name] for name in ("traceparent", "tracestate") if name in headers})
        span = self._tracer.start_span(method, context=parent, kind=self._kind, attributes=attributes)
        return RequestSpan(span, method, operation)

    def close(self) -> None:
        """Sends what waits, for ``FLUSH_SECONDS`` at most: a collector that is away does not hold up the exit."""
        sender = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sender.start()
        sender.join(FLUSH_SECONDS)


class RequestSpan:
    """The span of one HTTP request. Used on the event loop."""

    def __init__(self, span: Span, method: str, operation: str | None) -> None:
        self._span = span
        self._method = method
        self._operation = operation
        self._error: str | None = None

    @property
    def trace_id(self) -> str:
        """32 hex digits, as in traceparent."""
        return f"{self._span.get_span_context().trace_id:032x}"

    def asked(self, model: str, params: SamplingParams, stream: bool) -> None:
        """What the client asked of the model, as far as it is numbers."""
        if self._operation is not None:
            self._span.update_name(f"{self._operation} {model}")
        top_k = params.top_k if params.top_k > 0 else None
        self._set({
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.stream": stream,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": top_k,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.choice.count": params.n if params.n > 1 else None,
            "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
            "gen_ai.request.presence_penalty": params.presence_penalty or None,
        })  # fmt: skip

    def answered(self, generation: Generation) -> None:
        """Counts and timings, when the answer is over, whatever ended it. Seconds."""
        choices, now = generation.choices, time.monotonic()
        ends = [choice.end for choice in choices]
        facts = [end.facts for end in ends if end is not None and end.facts is not None]
        admitted, first = (_least(getattr(choice, name) for choice in choices) for name in ("admitted", "first_token"))
        last = max((choice.last_token for choice in choices if choice.last_token is not None), default=None)
        self._set({
            "gen_ai.usage.input_tokens": sum(len(ids) for ids in generation.prompts),
            "gen_ai.usage.output_tokens": generation.num_tokens,
            "gen_ai.usage.cache_read.input_tokens": sum(fact.cached_tokens for fact in facts),
            "gen_ai.response.finish_reasons": [end.reason if end is not None else "open" for end in ends],
            "gen_ai.latency.time_in_queue": _between(generation.arrived, admitted),
            "gen_ai.latency.time_in_model_prefill": _between(admitted, first),
            "gen_ai.latency.time_in_model_decode": _between(first, last),
            "gen_ai.latency.time_to_first_token": _between(generation.arrived, first),
            "gen_ai.latency.e2e": now - generation.arrived,
            "lockstep.preemptions": sum(fact.preemptions for fact in facts),
            "lockstep.recomputed_tokens": sum(fact.recomputed_tokens for fact in facts),
            "lockstep.replayed_steps": sum(fact.replayed_steps for fact in facts),
        })  # fmt: skip
        if (failure := generation.failure) is not None:
            self._error = failure.code or str(failure.status_code)

    def end(self, status: int, route: str | None) -> None:
        """``status`` as the log has it: 499 when the client left before the end."""
        from opentelemetry.trace import StatusCode

        if route is not None and self._operation is None:
            self._span.update_name(f"{self._method} {route}")
        self._set({"http.route": route, "http.response.status_code": status})
        if self._error is not None or status >= 500:
            self._set({"error.type": self._error or str(status)})
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _set(self, attributes: Mapping[str, Any]) -> None:
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})


def _least(times: Any) -> float | None:
    known: Sequence[float] = [time for time in times if time is not None]
    return min(known, default=None)


def _between(began: float | None, ended: float | None) -> float | None:
    return None if began is None or ended is None else ended - began
