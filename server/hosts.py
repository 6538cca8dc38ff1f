"""Whose names this server answers to, so that a web page of somebody else cannot reach one on this machine.

A page may point a name of its own at 127.0.0.1 (DNS rebinding); the browser then takes this server for the page's own and
lets the page read every answer. The request still says the name that was called: ``Host``. So a server on a loopback address
answers to loopback's names only, and any server that was given names to those.

Always right are the names of loopback and the address by which the connection came in: a page that was loaded from there is
this server's own. So probes that call a pod by its address need no entry. Who sends no ``Host`` is no browser.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

import attrs

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
NAME = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?|\[[0-9a-f:.]+\]")
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/?#@\s]+)(:[0-9]{0,5})?")


@attrs.frozen
class Hosts:
    """``names`` that are answered, in lower case: exact ones, ``*.example.org`` for all below that name, ``*`` for any."""

    names: tuple[str, ...]

    def refusal(self, given: Sequence[str], address: str | None) -> str | None:
        """Why a request is not answered. ``given``: its Host headers; ``address``: where its connection arrived."""
        if "*" in self.names:
            return None
        for value in given:
            name = name_of(value)
            if name is None or not (self._known(name) or _same(name, address)):
                add = name if name is not None and NAME.fullmatch(name) else "NAME"
                return (
                    f"Host is {value[:200]!r}, but this server answers to {', '.join(self.names)} only; "
                    f"--allowed-hosts {add} adds it"
                )
        return None

    def _known(self, name: str) -> bool:
        return any(name == one or (one.startswith("*.") and name.endswith(one[1:])) for one in self.names)


def allowed(given: Sequence[str], address: str | None = None) -> Hosts:
    """Of a server that listens on ``address``; None when only somebody else knows. On a loopback address, or with any name
    given: loopback's names and ``given``; else every name."""
    here = None if address is None else _address(address)
    if given or (here is not None and here.is_loopback):
        return Hosts((*LOOPBACK, *given))
    return Hosts(("*",))


def written(name: str) -> str:
    """A name as Host headers have it: in lower case, an IPv6 address in brackets."""
    name = name.strip().lower()
    return f"[{name}]" if isinstance(_address(name), ipaddress.IPv6Address) and not name.startswith("[") else name


def name_of(host: str) -> str | None:
    """The name in a Host header, in lower case, without its port and a last dot; None when there is none."""
    found = _HOST.fullmatch(host.lower())
    return None if found is None else found[1].removesuffix(".")


def _same(name: str, address: str | None) -> bool:
    called = _address(name)
    return called is not None and address is not None and called == _address(address)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(text.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return None
    return (isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped) or found
