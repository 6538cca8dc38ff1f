"""The overhead bench measures all its arms, and an answer that is not whole is no measurement."""

from __future__ import annotations

import json

import pytest

from ci.bench_http_overhead import ARMS, Clients, main, serving
from tests.server.stub import stub_engine


def test_every_arm_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(model="stub", streams=(1, 2), tokens=4, rounds=1, as_json=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["streams"], row["arm"]) for row in found["rows"]] == [(n, arm) for n in (1, 2) for arm in ARMS]
    assert all(row["cpu_us"] > 0 and row["wall_us"] > 0 for row in found["rows"])
    assert {row["ratio"] for row in found["rows"] if row["arm"] == "loop"} == {1.0}


def test_an_answer_that_is_refused_counts_as_none() -> None:
    clients = Clients()
    try:
        with serving(stub_engine(), "off") as port:
            clients.send(port, [{"prompt": [5], "max_tokens": 1, "stream": True}])
            with pytest.raises(RuntimeError, match="not whole"):
                clients.send(port, [{"prompt": [5], "max_tokens": -1, "stream": True}])
    finally:
        clients.close()
