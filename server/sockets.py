"""The listening socket, taken before anything slow is imported or loaded, so that a port in use is told at once."""

from __future__ import annotations

import socket

BACKLOG = 2048


class StartError(Exception):
    """Why the server cannot start, in one sentence."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ``StartError`` when the address is taken, not ours or not an address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise StartError(f"--host {host}: {_reason(error)}") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)  # here, not later: only now it is certain that nobody else listens
    except OSError as error:
        sock.close()
        raise StartError(f"port {port} on {host} cannot be used: {_reason(error)}") from None
    sock.setblocking(False)
    return sock


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def url_of(host: str, sock: socket.socket) -> str:
    port = sock.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
