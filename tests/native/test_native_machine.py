"""What the machine grants: affinity, quotas of control groups, pinned threads; and that no answer depends on any of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.build import assemble
from engine.config import EngineConfig
from engine.llm import LLM
from engine.loading.synthetic import synthetic_model
from engine.native import runner
from engine.native.machine import Granted, granted
from engine.native.runner import NativeRunner, library
from engine.request import SamplingParams

SMALL = {"num_kv_blocks": 32, "max_num_seqs": 3, "max_num_batched_tokens": 64, "compute": "native"}


def groups(folder: Path, line: str, files: dict[str, str]) -> float | None:
    (folder / "self").write_text(line, encoding="utf-8")
    for name, text in files.items():
        path = folder / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return granted(folder / "self", folder / "fs").quota


V2 = "0::/user/job\n"
V1 = "4:memory:/job\n3:cpu,cpuacct:/job\n"
QUOTAS = {
    "none": (V2, {}, None),
    "unlimited": (V2, {"user/job/cpu.max": "max 100000\n"}, None),
    "own": (V2, {"user/job/cpu.max": "150000 100000\n"}, 1.5),
    "above": (V2, {"user/job/cpu.max": "400000 100000\n", "user/cpu.max": "50000 100000\n"}, 0.5),
    "at the root, as a container sees it": ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
    "version 1": (
        V1,
        {"cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
        2.5,
    ),
    "version 1, unlimited": (
        V1,
        {"cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "nonsense": (V2, {"user/job/cpu.max": "many 0\n"}, None),
    "no period": (V2, {"user/job/cpu.max": "100 0\n"}, None),
    "not a list of groups": ("what\n", {"cpu.max": "50000 100000\n"}, None),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_quota(case: str, tmp_path: Path) -> None:
    line, files, wanted = QUOTAS[case]
    assert groups(tmp_path, line, files) == wanted


def test_without_control_groups(tmp_path: Path) -> None:
    assert granted(tmp_path / "none", tmp_path).quota is None
    assert granted().cpus == tuple(sorted(os.sched_getaffinity(0)))


def test_cores_are_the_lesser_of_both() -> None:
    four = (0, 1, 4, 5)
    assert [Granted(four, quota).cores for quota in (None, 0.2, 1.0, 1.5, 64.0)] == [4, 1, 1, 2, 4]


def test_more_threads_than_cores_are_told_with_the_reason() -> None:
    assert Granted((0, 1)).shortage(2) is None
    assert "may use 2 cores (its affinity has 2)" in str(Granted((0, 1)).shortage(3))
    assert "may use 2 cores (the control group grants the time of 1.5)" in str(
        Granted(tuple(range(64)), 1.5).shortage(4)
    )


def test_the_warning_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.build.granted", lambda: Granted(tuple(range(64)), 1.5))
    with pytest.warns(
        UserWarning, match=r"4 threads were asked for, but this process may use 2 cores \(the control group"
    ):
        assemble(EngineConfig(threads=4, **SMALL), synthetic_model())


def test_pinned_only_where_threads_and_cores_are_equally_many() -> None:
    assert Granted((2, 5)).pins(2) == (2, 5)
    assert Granted((2, 5)).pins(1) is None
    assert Granted((2, 5)).pins(3) is None
    assert Granted((2,)).pins(1) is None
    assert Granted((2, 5), 1.5).pins(2) is None
    assert Granted((2, 5), 2.0).pins(2) == (2, 5)


def affinities() -> list[frozenset[int]]:
    """Of every thread of this process."""
    return [frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]


def test_helpers_stay_on_their_core() -> None:
    mine = sorted(os.sched_getaffinity(0))
    before = affinities().count(frozenset({mine[-1]}))
    pool = library().pool(3, [mine[0], mine[-1], mine[-1]])
    assert pool.pinned == 2
    if len(mine) > 1:
        assert affinities().count(frozenset({mine[-1]})) == before + 2
    assert os.sched_getaffinity(0) == set(mine)  # the caller stays free
    pool.close()
    assert library().pool(2, [0, 2**20 - 1]).pinned == 0  # no such core: it runs wherever it may
    for wrong in ([0], [0, -1], [0, 2**20]):
        with pytest.raises(ValueError, match="one number of a core for each of 2 threads"):
            library().pool(2, wrong)


def test_no_answer_depends_on_threads_or_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[7, 11, 13, 17] * 9, [5, 6], [300] * 50]
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, ignore_eos=True)
    mine = sorted(os.sched_getaffinity(0))
    found = set()
    for cpus, threads, pin, pinned in ((mine, 1, True, 0), ([mine[0]] * 3, 3, True, 2), ([mine[0]] * 3, 3, False, 0)):
        monkeypatch.setattr(runner, "granted", lambda cpus=cpus: Granted(tuple(cpus)))
        monkeypatch.setattr("engine.build.granted", lambda cpus=cpus: Granted(tuple(cpus)))
        engine = assemble(EngineConfig(threads=threads, pin_threads=pin, **SMALL), synthetic_model())
        assert isinstance(engine.runner, NativeRunner)
        assert (engine.runner.threads.threads, engine.runner.threads.pinned) == (threads, pinned)
        found.add(tuple(output.token_ids for output in LLM(engine=engine).generate(prompts, params, progress=False)))
    assert len(found) == 1
