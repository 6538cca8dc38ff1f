"""The options of ``python -m server``: every field is a flag, an environment variable and a key of the TOML file.

Flag before ``LOCKSTEP_*`` variable before ``--config`` file before default. Engine options have the names of
``EngineConfig``, server options those of ``ServerSettings``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import attrs
from cyclopts import Group, Parameter

from engine.config import ConfigError, EngineConfig
from server import tracing
from server.settings import ServerSettings

_MODEL = Group("Model", sort_key=1)
_MEMORY = Group("Memory and batching", sort_key=2)
_HTTP = Group("HTTP", sort_key=3)
_CHECK = Group("Checking", sort_key=4)
_OTHER = Group("Other", sort_key=5)


def _flag(group: Group, help_text: str, **more: Any) -> Parameter:
    return Parameter(group=group, help=help_text, show_env_var=False, negative_iterable="", **more)


@Parameter(name="*")
@attrs.frozen(kw_only=True)
class Options:
    """Everything that can be set on the command line. The values are checked by ``engine_config`` and ``settings``."""

    model: Annotated[
        str | None,
        _flag(
            _MODEL, "A model folder, a .gguf file or a hub id; by default the small model installed beside the engine."
        ),
    ] = None
    served_model_name: Annotated[
        tuple[str, ...],
        _flag(_MODEL, "A name that requests may use for the model; may be given several times.", show_default=False),
    ] = ()
    device: Annotated[str, _flag(_MODEL, "auto, cpu or cuda.")] = "auto"
    dtype: Annotated[str, _flag(_MODEL, "auto, float32, bfloat16 or float16.")] = "auto"
    compute: Annotated[
        str,
        _flag(
            _MODEL,
            "auto, native, int8, triton or torch kernels; native ones are built once by the system's C++ compiler, int8 are "
            "native ones that round activations to 8 bits: faster, and less exact.",
        ),
    ] = "auto"
    kv_dtype: Annotated[
        str,
        _flag(
            _MODEL,
            "auto, float32, float16 or bfloat16: of the KV cache. auto is float16, half the room, where native kernels serve "
            "weights narrower than fp32, else what is computed in.",
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        _flag(
            _MODEL,
            "An answer's bytes depend on nobody else, by products of one fixed tile; without it a GPU takes its library's "
            "products, which are faster. On a CPU always so.",
        ),
    ] = True
    threads: Annotated[int | None, _flag(_MODEL, "CPU threads of the kernels; by default one per core.")] = None
    pin_threads: Annotated[
        bool, _flag(_MODEL, "Keep threads on their cores, where there is one for each and no quota (native kernels).")
    ] = True
    weights_cache: Annotated[
        str,
        _flag(
            _MODEL,
            "A folder in which packed weights are kept for the next start; auto is the user's cache, off nowhere. The 8 files "
            "used last stay, of 16 GiB at most together and none unused for 30 days; the log says what is removed.",
        ),
    ] = "auto"
    seed: Annotated[
        int | None, _flag(_MODEL, "Makes the seeds of requests that bring none a function of their arrival number.")
    ] = None

    num_kv_blocks: Annotated[
        int | None,
        _flag(
            _MEMORY,
            "KV blocks in the pool. By default, on a CPU, 256 MiB or one request of the whole context, whichever is more; on a "
            "GPU what memory allows. Few blocks force preemption.",
        ),
    ] = None
    block_size: Annotated[int, _flag(_MEMORY, "Tokens in a KV block.")] = 16
    max_num_seqs: Annotated[int, _flag(_MEMORY, "Requests that run at the same time.")] = 16
    max_num_batched_tokens: Annotated[int, _flag(_MEMORY, "Tokens computed in one iteration.")] = 512
    max_model_len: Annotated[
        int | None, _flag(_MEMORY, "Longest prompt plus answer, in tokens; by default what the model allows.")
    ] = None
    max_waiting: Annotated[int, _flag(_MEMORY, "Requests that may wait; more are refused with 429.")] = 1024
    watermark: Annotated[
        int | None, _flag(_MEMORY, "Blocks that admission keeps free for running requests; by default 1 % of the pool.")
    ] = None
    enforce_eager: Annotated[bool, _flag(_MEMORY, "Record and replay no graphs.", negative="")] = False
    capture_rows: Annotated[
        tuple[int, ...] | None,
        _flag(
            _MEMORY,
            "Row counts to record graphs for, up to --max-num-seqs; by default every count with native kernels (above 64 "
            "every sixteenth), else 1, 2, 4 and so on.",
            consume_multiple=True,
        ),
    ] = None
    capture_widths: Annotated[
        tuple[int, ...] | None,
        _flag(
            _MEMORY,
            "Block-table widths to record; by default the longest alone with native kernels, else in steps.",
            consume_multiple=True,
        ),
    ] = None
    capture_max_len: Annotated[
        int | None, _flag(_MEMORY, "Longest context to record graphs for, in tokens; longer ones run eagerly.")
    ] = None
    capture_memory: Annotated[
        int | None, _flag(_MEMORY, "MiB that recorded graphs may hold; by default 256, on a GPU 1024.")
    ] = None
    max_captures: Annotated[int, _flag(_MEMORY, "How many graphs may be recorded.")] = 1024
    persistent_batch: Annotated[
        bool, _flag(_MEMORY, "Keep decoding requests in the first rows, so that every decode step can replay a graph.")
    ] = True
    enable_prefix_caching: Annotated[
        bool, _flag(_MEMORY, "Keep the KV blocks of what was computed, for later requests that begin the same.")
    ] = True

    host: Annotated[str, _flag(_HTTP, "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _flag(_HTTP, "Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[
        tuple[str, ...],
        _flag(
            _HTTP,
            "A key that requests must bring; may be given several times. LOCKSTEP_API_KEY keeps it out of ps.",
            show_default=False,
        ),
    ] = ()
    api_key_file: Annotated[
        Path | None,
        _flag(_HTTP, "A file with more such keys, one a line; empty lines and those that begin with # are not."),
    ] = None
    admin_key: Annotated[
        str | None, _flag(_HTTP, "A key for /debug/*, which does not exist without one. LOCKSTEP_ADMIN_KEY is better.")
    ] = None
    cors_origin: Annotated[
        tuple[str, ...],
        _flag(
            _HTTP,
            "An origin whose pages may call this server, as https://example.org; may be given several times.",
            show_default=False,
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        _flag(
            _HTTP,
            "Names that requests may call this server by (the Host header), as example.org or *.example.org; * is any. By "
            "default any, and on a loopback address localhost, 127.0.0.1 and [::1] alone.",
            show_default=False,
            consume_multiple=True,
        ),
    ] = ()
    max_body_bytes: Annotated[int, _flag(_HTTP, "Largest request body.")] = 4 * 2**20
    max_prompt_bytes: Annotated[
        int, _flag(_HTTP, "Most text that one request may have tokenised, in bytes of UTF-8; more is a 400.")
    ] = 2**20
    drain_timeout: Annotated[
        float, _flag(_HTTP, "Seconds that running requests get to finish after SIGTERM or Ctrl-C.")
    ] = 30.0
    stall_timeout: Annotated[
        float, _flag(_HTTP, "Seconds after which a stuck iteration fails /health; 0 is never.")
    ] = 60.0
    ping_interval: Annotated[float, _flag(_HTTP, "Seconds between comments in a silent stream; 0 is never.")] = 15.0
    send_timeout: Annotated[
        float, _flag(_HTTP, "Seconds after which a client that does not read its answer is cut off; 0 is never.")
    ] = 60.0
    request_timeout: Annotated[
        float, _flag(_HTTP, "Seconds that a request may take, waiting included, before it is ended; 0 is any time.")
    ] = 0.0
    metrics_prefix: Annotated[str, _flag(_HTTP, "Prefix of the metrics' names; vllm makes its dashboards work.")] = (
        "lockstep"
    )

    check: Annotated[
        str,
        _flag(
            _CHECK,
            "off, log or raise: audit the engine's invariants and who waits for which request, between iterations, "
            "and what then happens.",
        ),
    ] = "off"
    check_interval: Annotated[int, _flag(_CHECK, "Audit after every so many iterations.")] = 1
    record: Annotated[
        Path | None,
        _flag(
            _CHECK,
            "Write the run to this file as a workload, when the server ends: lengths, common prefixes and stops, no "
            "text. python -m properties replay runs it again in lockstep.",
        ),
    ] = None

    otlp_endpoint: Annotated[
        str | None,
        _flag(
            _OTHER,
            "An OpenTelemetry collector, as http://127.0.0.1:4318, that gets a span per request (OTLP over HTTP, no text). "
            "The standard OTEL_* variables work too. Needs the otel extra.",
        ),
    ] = None
    log_level: Annotated[str, _flag(_OTHER, "debug, info, warning or error.")] = "info"
    log_format: Annotated[str, _flag(_OTHER, "text or json.")] = "text"
    config: Annotated[Path | None, _flag(_OTHER, "A TOML file with any of these options.")] = None
    dry_run: Annotated[
        bool, _flag(_OTHER, "Print the resolved options and what can be known without loading, then exit.", negative="")
    ] = False

    def engine_config(self) -> EngineConfig:
        """Raises ``ConfigError``."""
        return EngineConfig(**{field.name: getattr(self, field.name) for field in attrs.fields(EngineConfig)})

    def settings(self) -> ServerSettings:
        """Raises ``ConfigError``."""
        others: dict[str, Any] = {
            "api_keys": (*self.api_key, *_keys_in(self.api_key_file)),
            "admin_keys": () if self.admin_key is None else (self.admin_key,),
            "cors_origins": self.cors_origin,
            "otlp_endpoint": tracing.endpoint_of(self.otlp_endpoint),
        }
        names = [field.name for field in attrs.fields(ServerSettings) if field.name not in others]
        return ServerSettings(**others, **{name: getattr(self, name) for name in names})

    def rows(self) -> Iterator[tuple[str, str, bool]]:
        """(flag, value, whether it was set) for people; keys are not shown."""
        for field in attrs.fields(Options):
            value = getattr(self, field.name)
            secret = field.name in ("api_key", "admin_key")
            shown = (
                f"{len(value) if isinstance(value, tuple) else int(value is not None)} given"
                if secret
                else _shown(value)
            )
            yield f"--{field.name.replace('_', '-')}", shown, value != field.default


def _keys_in(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_key_file", f"api_key_file is {str(path)!r}, but cannot be read: {error}") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError("api_key_file", f"api_key_file is {str(path)!r}, but holds no key")
    return keys


def _shown(value: object) -> str:
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(str(one) for one in value) or "-"
    return str(value)
