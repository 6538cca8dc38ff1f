"""What 8-bit activations and a bf16 cache cost and gain, against the same weights in fp32 arithmetic, in one run.

    python ci/lower_precision.py [MODEL] [--only int8] [--windows 4] [--tokens 32] [--json]

The bench's fixed text is scored in windows: perplexity, how often the most likely token is the same, and the mean
difference of log-probabilities; its first window is also continued greedily, eight times, each from another place. Speed is
CPU time of one thread for recorded decode steps with short contexts, where linear layers are nearly all, and for one
prefill: the least of several rounds that take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

import attrs

from engine.build import assemble
from engine.config import EngineConfig
from engine.llm import LLM
from engine.loading import load_model
from engine.request import SamplingParams

WINDOW, PREFILL, CONTINUED, ROUNDS = 256, 128, 8, 3
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"compute": "native", "kv_dtype": "float32"},
    "fp16 K/V": {"compute": "native", "kv_dtype": "float16"},
    "bf16 K/V": {"compute": "native", "kv_dtype": "bfloat16"},
    "int8": {"compute": "int8", "kv_dtype": "float32"},
    "int8, fp16 K/V": {"compute": "int8", "kv_dtype": "float16"},
}


@attrs.frozen
class Found:
    """``best``: the most likely token at each position; ``greedy``: tokens of each continuation; CPU ms of each speed."""

    logprobs: tuple[float, ...]
    best: tuple[int, ...]
    greedy: tuple[tuple[int, ...], ...]
    speed: dict[str, float]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def against(self, reference: Found) -> dict[str, Any]:
        same = sum(a == b for a, b in zip(self.best, reference.best, strict=True))
        apart = [abs(a - b) for a, b in zip(self.logprobs, reference.logprobs, strict=True)]
        first = [
            next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
            for mine, theirs in zip(self.greedy, reference.greedy, strict=True)
        ]
        return {
            "perplexity": self.perplexity,
            "difference": self.perplexity / reference.perplexity - 1,
            "agreement": same / len(self.best),
            "mean_logprob_difference": sum(apart) / len(apart),
            "greedy": first,
            "speed": {name: reference.speed[name] / ms for name, ms in self.speed.items()},
        }


def measure(path: str | None, names: Sequence[str], windows: int, tokens: int) -> dict[str, Found]:
    model = load_model(path)
    assert model.tokenizer is not None
    text = resources.files("server.bench.offline").joinpath("text.txt").read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text)
    chunks = [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)][:windows]
    limits: dict[str, Any] = {
        "max_num_seqs": 16,
        "num_kv_blocks": 512,
        "max_model_len": 2 * WINDOW,
        "threads": 1,
        "enable_prefix_caching": False,
    }
    engines = {name: LLM(engine=assemble(EngineConfig(**VARIANTS[name], **limits), model)) for name in names}
    speeds = _speeds(engines, ids)
    return {name: _found(engine, chunks, tokens, speeds[name]) for name, engine in engines.items()}


def _found(engine: LLM, chunks: Sequence[list[int]], tokens: int, speed: dict[str, float]) -> Found:
    scoring = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    logprobs, best = [], []
    for output in engine.generate(chunks, scoring, progress=False):
        for told in output.choices[0].sampled[0].prompt or ():
            logprobs.append(told.chosen)
            best.append(told.top[0][0])
    going_on = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    starts = [chunks[0][: 32 + 24 * part] for part in range(CONTINUED)]
    greedy = [output.token_ids for output in engine.generate(starts, going_on, progress=False)]
    return Found(tuple(logprobs), tuple(best), tuple(greedy), speed)


def _speeds(engines: dict[str, LLM], ids: list[int]) -> dict[str, dict[str, float]]:
    """CPU ms, least of ROUNDS in which the engines take turns: the step that an engine recorded last, and a prefill."""
    best: dict[str, dict[str, float]] = {name: {} for name in engines}
    one = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for rows, steps in ((1, 8), (16, 3)):
        for engine in engines.values():
            engine.generate([ids[row : row + 8] for row in range(rows)], one, progress=False)
        for _ in range(ROUNDS):
            for name, engine in engines.items():
                _keep_least(best[name], f"decode, {rows} rows", _replayed(engine, rows, steps))
    for _ in range(ROUNDS):
        for name, engine in engines.items():
            began = time.process_time()
            engine.generate([ids[:PREFILL]], attrs.evolve(one, max_tokens=1), progress=False)
            _keep_least(best[name], f"prefill of {PREFILL}", time.process_time() - began)
    return best


def _keep_least(found: dict[str, float], what: str, seconds: float) -> None:
    found[what] = min(1e3 * seconds, found.get(what, math.inf))


def _replayed(engine: LLM, rows: int, steps: int) -> float:
    runner: Any = engine.engine.runner
    shape = next(shape for shape in engine.engine.limits.captures if shape[0] == rows)
    began = time.process_time()
    for _ in range(steps):
        runner.network.graphs.replay(shape)
    return (time.process_time() - began) / steps


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a .gguf file or folder; by default the small model")
    parser.add_argument("--windows", type=int, default=4, help=f"of {WINDOW} tokens of the text")
    parser.add_argument("--tokens", type=int, default=32, help="of each greedy continuation")
    parser.add_argument("--only", choices=VARIANTS, action="append", help="this variant, beside fp32")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    names = tuple(name for name in VARIANTS if not asked.only or name == "fp32" or name in asked.only)
    found = measure(asked.model, names, asked.windows, asked.tokens)
    told = {name: one.against(found["fp32"]) for name, one in found.items()}
    if asked.json:
        print(json.dumps(told, indent=1))
        return 0
    print("| | perplexity | difference | same best token | mean logprob difference | greedy tokens agreeing | speed |")
    print("|---|---|---|---|---|---|---|")
    for name, row in told.items():
        speed = ", ".join(f"{what} {ratio:.2f} x" for what, ratio in row["speed"].items())
        print(
            f"| {name} | {row['perplexity']:.4f} | {row['difference']:+.4%} | {row['agreement']:.2%} | "
            f"{row['mean_logprob_difference']:.4f} | {', '.join(map(str, row['greedy']))} of {asked.tokens} | {speed} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
