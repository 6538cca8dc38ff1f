"""What can be set about the server itself, apart from the engine. Imports neither torch nor FastAPI."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import attrs

from engine.config import ConfigError
from server import hosts, tracing
from server.check import MODES

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")
_METRIC_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def _host_names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(hosts.written(name) for name in names)


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


@attrs.frozen(kw_only=True)
class ServerSettings:
    """Settings of one HTTP front. Times are seconds, sizes bytes. Raises ``ConfigError`` for a value that cannot work.

    ``served_model_name``: the names that requests may use; empty means the model's own name. ``api_keys``: with any,
    every path but /health, /ready and /version asks for one. ``admin_keys``: open /debug/* and everything else; without any
    there is no /debug/*. Keys are given as text and kept as digests. ``cors_origins``: whose pages may call this server from
    a browser; by default nobody's. ``allowed_hosts``: names that requests may call this server by, beside those that it has
    without: see server/hosts.py. ``max_prompt_bytes``: see ``Reading``. ``ping_interval``: a
    silent stream sends an SSE comment this often. ``send_timeout``: a client that does not read for so long is cut off;
    ``request_timeout``: a request that runs longer ends with an error; 0 is never, for both. ``stall_timeout``: an iteration
    that runs longer makes /health answer 503. ``check``: see server/check.py; ``record``: see server/record.py;
    ``otlp_endpoint``: where spans go, a full URL: see server/tracing.py.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[bytes, ...] = attrs.field(default=(), repr=False, converter=_digests)
    admin_keys: tuple[bytes, ...] = attrs.field(default=(), repr=False, converter=_digests)
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = attrs.field(default=(), converter=_host_names)
    metrics_prefix: str = "lockstep"
    log_level: str = "info"
    log_format: str = "text"
    max_body_bytes: int = 4 * 2**20
    max_prompt_bytes: int = 2**20
    drain_timeout: float = 30.0
    stall_timeout: float = 60.0
    ping_interval: float = 15.0
    send_timeout: float = 60.0
    request_timeout: float = 0.0
    check: str = "off"
    check_interval: int = 1
    record: Path | None = None
    otlp_endpoint: str | None = None

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError("port", f"port is {self.port}, but must be in 0..65535")
        for field, allowed in (("log_level", LOG_LEVELS), ("log_format", LOG_FORMATS), ("check", MODES)):
            if getattr(self, field) not in allowed:
                raise ConfigError(
                    field, f"{field} is {getattr(self, field)!r}, but must be one of {', '.join(allowed)}"
                )
        if not _METRIC_PREFIX.fullmatch(self.metrics_prefix):
            raise ConfigError(
                "metrics_prefix",
                f"metrics_prefix is {self.metrics_prefix!r}, but must be letters, digits and _, no digit first",
            )
        if not 1024 <= self.max_body_bytes <= 2**31:
            raise ConfigError(
                "max_body_bytes", f"max_body_bytes is {self.max_body_bytes}, but must be in 1024..{2**31}"
            )
        if self.max_prompt_bytes < 1:
            raise ConfigError(
                "max_prompt_bytes", f"max_prompt_bytes is {self.max_prompt_bytes}, but must be at least 1"
            )
        for field in ("drain_timeout", "stall_timeout", "ping_interval", "send_timeout", "request_timeout"):
            if not 0 <= getattr(self, field) <= 86400:
                raise ConfigError(field, f"{field} is {getattr(self, field)}, but must be in 0..86400 seconds")
        if not 1 <= self.check_interval <= 10**9:
            raise ConfigError("check_interval", f"check_interval is {self.check_interval}, but must be at least 1")
        if self.record is not None and not self.record.parent.is_dir():
            raise ConfigError("record", f"record is {str(self.record)!r}, but there is no folder {self.record.parent}")
        if self.otlp_endpoint is not None:
            tracing.check(self.otlp_endpoint)
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "cors_origins",
                    f"cors_origin is {origin!r}, but must be like https://example.org, without a path, or *",
                )
        for name in self.allowed_hosts:
            if not hosts.NAME.fullmatch(name):
                raise ConfigError(
                    "allowed_hosts",
                    f"allowed_hosts holds {name!r}, but names are like example.org, *.example.org, 10.0.0.1 or [::1], without "
                    "scheme and port, or *",
                )
        if any(not name for name in self.served_model_name):
            raise ConfigError("served_model_name", "served_model_name holds an empty name")
        if any(not key for key in self.api_keys):
            raise ConfigError("api_key", "api_key holds an empty key")
