"""Clients of every manner over real sockets: who stays, who leaves at some moment, who stops reading, who sends nonsense.

Everything about a client is a function of the storm's seed and the client's number.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from typing import Any

import attrs

PATIENCE = 60.0  # seconds after which a client counts as forgotten, unless the storm says otherwise
BODIES: list[dict[str, Any]] = [
    {
        "prompt": [3 + (11 * kind + at) % 400 for at in range(6 + 9 * kind)],
        "max_tokens": 12 + 4 * kind,
        "temperature": 0.8 * (kind % 2),
        "seed": kind,
        "ignore_eos": True,
        "stream": kind % 3 != 0,
        "return_token_ids": True,
    }
    for kind in range(6)
]
LARGE = BODIES[1] | {"max_tokens": 400, "logprobs": 20, "stream": True}  # larger than all buffers together
MALFORMED = (b"{", b'{"prompt": []}', b'{"prompt": [1], "max_tokens": -1}', b"\xff", b'{"prompt": "x", "n": "many"}')


@attrs.frozen
class Outcome:
    """``manner``: stays, leaves, stalls or malformed. ``answer`` is what came, None for who did not wait for it."""

    manner: str
    kind: int = 0
    status: int = 0
    answer: Any = None
    error: str | None = None  # the code of an error that ended the answer
    whole: bool = False  # a plain answer, or a stream up to its [DONE]


def manner(number: int) -> str:
    """A twentieth malformed, a tenth that stop reading, a third that leave, of any twenty in a row or more."""
    if number % 20 == 7:
        return "malformed"
    if number % 10 == 3:
        return "stalls"
    return "leaves" if number % 3 == 0 else "stays"


async def client(port: int, number: int, seed: int, patience: float, stalled: tuple[float, float]) -> Outcome:
    chance = random.Random(seed * 100_003 + number)
    kind, how = chance.randrange(len(BODIES)), manner(number)
    await asyncio.sleep(chance.uniform(0, 0.3))
    body = {"malformed": MALFORMED[number // 20 % len(MALFORMED)], "stalls": json.dumps(LARGE).encode()}
    came = b""
    sock = socket.socket()
    if how == "stalls":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2048 if how == "stalls" else 2**16)
    except OSError:
        sock.close()
        return Outcome(how, kind, error="refused")
    try:
        data = body.get(how) or json.dumps(BODIES[kind]).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        if how == "leaves":
            await asyncio.wait(
                {asyncio.ensure_future(reader.read(chance.choice((1, 600))))}, timeout=chance.uniform(0, 0.4)
            )
            return Outcome(how, kind)
        if how == "stalls":
            await asyncio.sleep(chance.uniform(*stalled))
            return Outcome(how, kind)
        async with asyncio.timeout(patience):
            while piece := await reader.read(2**16):
                came += piece
        return parse(how, kind, came)
    except ConnectionError:  # before any byte: the server ended while this connection still waited to be accepted
        return Outcome(how, kind, error="reset" if came else "refused")
    except TimeoutError:
        return Outcome(how, kind, error="forgotten")
    finally:
        if how in ("leaves", "stalls") and sock.fileno() >= 0 and chance.random() < 0.5:  # without a farewell
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


def parse(how: str, kind: int, data: bytes) -> Outcome:
    head, _, body = data.partition(b"\r\n\r\n")
    if not head:
        return Outcome(how, kind, error="closed")
    status = int(head.split()[1])
    if b"text/event-stream" not in head:
        answer = json.loads(body)
        return Outcome(how, kind, status, ids_of([answer]), code_of(answer), whole=True)
    events = [line[6:] for line in dechunked(body).split(b"\n\n") if line.startswith(b"data: ")]
    whole = bool(events) and events[-1] == b"[DONE]"
    answers = [json.loads(event) for event in events if event != b"[DONE]"]
    errors = [code for answer in answers if (code := code_of(answer))]
    return Outcome(how, kind, status, ids_of(answers), errors[0] if errors else None, whole)


def dechunked(body: bytes) -> bytes:
    parts, at = [], 0
    while (end := body.find(b"\r\n", at)) > 0:
        size = int(body[at:end], 16)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(parts)


def code_of(answer: Any) -> str | None:
    return str(answer["error"]["code"]) if "error" in answer else None


def ids_of(answers: list[Any]) -> list[int]:
    choices = [choice for answer in answers for choice in answer.get("choices", ())]
    return [token for choice in choices for token in choice["token_ids"]]


async def storm(
    port: int, clients: int, seed: int, patience: float = PATIENCE, stalled: tuple[float, float] = (0.2, 1.2)
) -> list[Outcome]:
    """``stalled``: how many seconds, at least and at most, a client that stops reading stays before it leaves."""
    return list(await asyncio.gather(*(client(port, number, seed, patience, stalled) for number in range(clients))))


async def alone(port: int) -> list[list[int]]:
    """The answer to each body, one at a time."""
    answers = []
    for kind, body in enumerate(BODIES):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        outcome = parse("stays", kind, await reader.read(-1))
        writer.close()
        assert outcome.whole
        assert outcome.error is None
        answers.append(outcome.answer)
    return answers


def complaints(outcomes: list[Outcome], solo: list[list[int]], *, draining: bool = False) -> list[str]:
    """What is wrong with a storm. While ``draining``, an end that says so is a right answer, too."""
    found = []
    for number, outcome in enumerate(outcomes):
        told = draining and (outcome.error in ("server_shutdown", "refused"))
        if outcome.manner == "stays" and not told:
            if outcome.error is not None or not outcome.whole:
                found.append(f"client {number} got {outcome.error or 'no end'} with status {outcome.status}")
            elif outcome.answer != solo[outcome.kind]:
                found.append(f"client {number} got another answer than alone")
        if outcome.manner == "stays" and told and outcome.error != "refused" and not outcome.whole:
            found.append(f"client {number} was not told the end")
        if outcome.manner == "malformed" and not told and outcome.status != 400:
            found.append(f"client {number} sent nonsense and got {outcome.status}")
    return found
