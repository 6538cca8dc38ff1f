"""Spans as a collector gets them: over a real socket, in OTLP's own bytes; and a collector that is away costs nothing."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from engine.config import ConfigError
from server import tracing
from server.app import create_app
from server.options import Options
from server.settings import ServerSettings
from tests.server.stub import stub_engine
from tests.server.test_server_cli import in_process
from tests.server.world import World

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ROOT = Path(__file__).resolve().parents[2]
SECRET = "what the client said"


class Collector:
    """``status``: what it answers; ``gate``: it answers only when this is set."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.bytes = b""
        self.status = 200
        self.gate = threading.Event()
        self.gate.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.gate.wait(30)
                if self.path == "/v1/traces" and collector.status == 200:
                    collector.take(body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def take(self, body: bytes) -> None:
        self.bytes += body
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            self.resources.append(values(resource.resource.attributes))
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]


def values(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {entry.key: plain(entry.value) for entry in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.gate.set()
    collector.server.shutdown()
    collector.thread.join(10)
    collector.server.server_close()


def world_of(url: str) -> World:
    return World(settings=ServerSettings(otlp_endpoint=tracing.endpoint_of(url, {}), log_level="error"))


async def close(world: World) -> float:
    """Seconds that the end took."""
    began = time.monotonic()
    door = world.app.middleware_stack or world.app.build_middleware_stack()
    while not hasattr(door, "_tracing"):
        door = door.app
    await asyncio.to_thread(door._tracing.close)
    return time.monotonic() - began


def test_a_span_tells_what_a_request_cost_and_belongs_to_its_trace(collector: Collector) -> None:
    async def serve() -> None:
        world = world_of(collector.url)
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "temperature": 0.5, "seed": 3}
        exchange = world.post("/v1/chat/completions", body | {"stream": True, "ignore_eos": True}, headers=headers)
        await world.run(exchange)
        assert exchange.ended
        await close(world)

    asyncio.run(serve())
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "chat synthetic-llama"
    assert span.kind == 2  # a server's
    assert span.status.code == 0
    told = values(span.attributes)
    assert told["http.route"] == "/v1/chat/completions"
    assert told["http.request.method"] == "POST"
    assert told["http.response.status_code"] == 200
    assert told["lockstep.request.id"] == "mine"
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "synthetic-llama"
    assert told["gen_ai.request.stream"] is True
    assert [told[f"gen_ai.request.{name}"] for name in ("max_tokens", "temperature", "seed")] == [5, 0.5, 3]
    assert told["gen_ai.usage.input_tokens"] > 5
    assert told["gen_ai.usage.output_tokens"] == 5
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    times = [told[f"gen_ai.latency.time_in_{name}"] for name in ("queue", "model_prefill", "model_decode")]
    assert min(times) >= 0
    assert times[0] + times[1] == pytest.approx(told["gen_ai.latency.time_to_first_token"])
    assert sum(times) <= told["gen_ai.latency.e2e"] <= (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert collector.resources[0]["service.name"] == "lockstep"
    assert SECRET.encode() not in collector.bytes


def test_errors_refusals_and_probes(collector: Collector) -> None:
    async def serve() -> None:
        world = world_of(collector.url)
        world.runner.fail_at = {1}
        failed = world.post("/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}})
        await world.run(failed)
        assert failed.status == 500
        bad = world.post("/v1/completions", {"prompt": [5], "temperature": -1})
        left = world.post("/v1/completions", {"prompt": [5], "max_tokens": 9, "stream": True, "ignore_eos": True})
        await world.submitted(1)
        await world.step(3)
        left.leave()
        await world.run(bad, left)
        await world.run(world.post("/health", {}), world.post("/nowhere/at/all", {}))
        await close(world)

    asyncio.run(serve())
    told: dict[str, list[Any]] = {}
    for span in collector.spans:
        told.setdefault(values(span.attributes)["url.path"], []).append((span, values(span.attributes)))
    assert sorted(told) == ["/generate", "/nowhere/at/all", "/v1/completions"]
    ((span, failed),) = told["/generate"]
    assert (failed["error.type"], failed["http.response.status_code"], span.status.code) == ("engine_error", 500, 2)
    assert "secret detail" not in repr(span)
    statuses = {one["http.response.status_code"]: one for _, one in told["/v1/completions"]}
    assert sorted(statuses) == [400, 499]
    assert statuses[499]["gen_ai.usage.output_tokens"] in (3, 4)
    assert all(span.status.code == 0 for span, _ in told["/v1/completions"])
    assert told["/nowhere/at/all"][0][0].name == "POST"


@pytest.mark.parametrize("trouble", ["away", "refuses", "silent"])
def test_a_collector_in_trouble_costs_the_requests_nothing(collector: Collector, trouble: str) -> None:
    async def serve() -> None:
        world = world_of("http://127.0.0.1:9" if trouble == "away" else collector.url)
        collector.status = 503
        if trouble == "silent":
            collector.gate.clear()
        for _ in range(3):
            exchange = world.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True})
            await world.run(exchange)
            assert exchange.json()["usage"]["completion_tokens"] == 3
        assert await close(world) < 4 * tracing.FLUSH_SECONDS  # the request's own time-out would be ten seconds each

    asyncio.run(serve())
    assert collector.spans == []


def test_nonsense_in_traceparent_begins_a_trace(collector: Collector) -> None:
    async def serve() -> None:
        world = world_of(collector.url)
        for nonsense in ("", "00-xyz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "9" * 5000):
            exchange = world.post(
                "/v1/completions", {"prompt": [5], "max_tokens": 1}, headers={"traceparent": nonsense}
            )
            await world.run(exchange)
            assert exchange.status == 200
        await close(world)

    asyncio.run(serve())
    assert len({span.trace_id for span in collector.spans}) == 4
    assert {span.parent_span_id for span in collector.spans} == {b""}


def test_which_variable_is_heard() -> None:
    full, base = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
    assert tracing.endpoint_of(None, {}) is None
    assert tracing.endpoint_of(None, {base: "http://a:1/"}) == "http://a:1/v1/traces"
    assert tracing.endpoint_of(None, {base: "http://a:1", full: "http://b/x"}) == "http://b/x"
    assert tracing.endpoint_of("http://c", {base: "http://a:1"}) == "http://c/v1/traces"
    assert tracing.endpoint_of("http://c/v1/traces", {}) == "http://c/v1/traces"
    assert tracing.endpoint_of(None, {base: "http://a:1", "OTEL_TRACES_EXPORTER": "none"}) is None
    assert tracing.endpoint_of("http://c", {"OTEL_SDK_DISABLED": "true"}) is None
    with pytest.raises(ConfigError, match=r"'grpc'.*only http/protobuf"):
        tracing.endpoint_of("http://c", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_what_cannot_work_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, _, err = in_process(capsys, "--dry-run", "--otlp-endpoint", "collector:4318")
    assert (status, err.count("\n")) == (2, 1)
    assert "http://collector:4318" in err
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    status, _, err = in_process(capsys, "--dry-run", "--otlp-endpoint", "http://collector:4318")
    assert (status, err.count("\n")) == (2, 1)
    assert "opentelemetry-sdk is not installed" in err
    assert "lockstep-engine[otel]" in err
    assert Options().settings().otlp_endpoint is None  # and nobody who did not ask is bothered


def test_nothing_is_imported_when_off() -> None:
    code = (
        "import sys, json\nfrom tests.server.stub import stub_engine\nfrom server.app import create_app\n"
        "create_app(stub_engine()).build_middleware_stack()\n"
        "print(json.dumps([name for name in sys.modules if name.startswith(('opentelemetry.sdk', "
        "'opentelemetry.exporter', 'google.protobuf'))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_the_app_sends_its_last_spans_when_it_ends(collector: Collector) -> None:
    async def serve() -> None:
        app = create_app(stub_engine(), ServerSettings(otlp_endpoint=collector.url + "/v1/traces"))
        messages: list[Any] = []

        async def send(message: Any) -> None:
            messages.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}'}

        async with app.router.lifespan_context(app):
            await app.state.context.bridge.wait_phase("ready")
            scope = {"type": "http", "method": "GET", "path": "/v1/models", "raw_path": b"/v1/models", "headers": [],
                     "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
                     "asgi": {"version": "3.0", "spec_version": "2.3"}, "server": ("x", 1), "client": ("x", 1)}  # fmt: skip
            await app(scope, receive, send)
        assert messages[0]["status"] == 200

    asyncio.run(serve())
    assert [span.name for span in collector.spans] == ["GET /v1/models"]
