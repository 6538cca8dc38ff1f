"""lm-eval's ``local-completions`` on two small local tasks, offline, with the server as its tokenizer.

Log-likelihoods need ``echo`` with ``logprobs`` on token ids; the answers of the free task need greedy decoding and
stop strings. What lm-eval computed from the server's answers is held against ``transformers`` on the same weights.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading.synthetic import synthetic_model
from tests.clients.installed import PYTHON, ROOT, needs_clients, run
from tests.clients.planted import NO_LOGPROBS
from tests.clients.served import MODEL, Served, serve
from tests.models import write_folder

pytestmark = [needs_clients, pytest.mark.timeout(600)]
TASKS = Path("tests/clients/lm_eval_tasks")
DOCUMENTS = [json.loads(line) for line in (ROOT / TASKS / "words.jsonl").read_text().splitlines()]
PAIRS = sum(len(document["choices"]) for document in DOCUMENTS)


def lm_eval(served: Served, folder: Path, *tasks: str) -> subprocess.CompletedProcess[str]:
    model_args = (
        f"model={MODEL},base_url={served.url}/v1/completions,num_concurrent=4,tokenizer_backend=remote,max_retries=1"
    )
    where = ["--include_path", str(TASKS), "--output_path", str(folder / "out"), "--log_samples"]
    command = ["-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model_args]
    return run([PYTHON, *command, "--tasks", ",".join(tasks), *where], folder)


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """lm-eval's log of one task, in the order of the documents."""
    (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: int(sample["doc_id"]))


class Reference:
    """transformers on the weights of the served model."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(write_folder(folder / "model"), dtype=torch.float32)
        tokenizer = synthetic_model().tokenizer
        assert tokenizer is not None
        self.tokenizer = tokenizer

    def log_probabilities(self, ids: list[int]) -> torch.Tensor:
        """(len(ids), vocabulary)"""
        with torch.inference_mode():
            return torch.log_softmax(self.model(torch.tensor([ids])).logits[0].double(), -1)

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Of ``continuation`` after ``context``, and whether greedy decoding would have said it."""
        ids, start = self.tokenizer.encode(context + continuation), len(self.tokenizer.encode(context))
        table = self.log_probabilities(ids)
        said = [
            (table[at - 1, ids[at]].item(), table[at - 1].argmax().item() == ids[at]) for at in range(start, len(ids))
        ]
        return sum(value for value, _ in said), all(best for _, best in said)

    def greedy(self, context: str, count: int, until: list[str]) -> str:
        ids = prompt = self.tokenizer.encode(context)
        text = ""
        while len(ids) < len(prompt) + count:
            token = int(self.log_probabilities(ids)[-1].argmax())
            if token == 2:
                break
            ids = [*ids, token]
            text = self.tokenizer.decode(ids[len(prompt) :])
            if any(stop in text for stop in until):
                break
        return text


def test_lm_eval(tmp_path: Path, record_property: Callable[[str, Any], None]) -> None:
    with serve() as served, served.counted() as calls:
        done = lm_eval(served, tmp_path, "words_choice", "words_free")
    assert done.returncode == 0, done.stderr[-4000:]
    assert calls["/v1/completions", 200] == PAIRS + len(DOCUMENTS)
    assert calls["/tokenize", 200] >= PAIRS
    assert calls["/tokenizer_info", 200] >= 1
    assert {status for _, status in calls} == {200}
    reference = Reference(tmp_path)
    checks = 0
    for sample, document in zip(samples(tmp_path, "words_choice"), DOCUMENTS, strict=True):
        for (value, greedy), choice in zip(sample["filtered_resps"], document["choices"], strict=True):
            wanted, best = reference.loglikelihood(document["question"], choice)
            assert float(value) == pytest.approx(wanted, abs=1e-3), (document["question"], choice)
            assert str(greedy) == str(best)
            checks += 2
    for sample, document in zip(samples(tmp_path, "words_free"), DOCUMENTS, strict=True):
        until = sample["arguments"]["gen_args_0"]["arg_1"]["until"]
        said = reference.greedy(document["question"], 16, until)
        cut = min((said.index(stop) for stop in until if stop in said), default=len(said))
        assert sample["filtered_resps"][0] == said[:cut], document["question"]
        checks += 1
    record_property("told", f"lm-eval: {calls.total()} calls, {checks} checks held")


@pytest.mark.slow
def test_lm_eval_notices_missing_logprobs(tmp_path: Path) -> None:
    with serve(between=NO_LOGPROBS) as served:
        done = lm_eval(served, tmp_path, "words_choice")
    assert done.returncode != 0 or not list((tmp_path / "out").rglob("results_*.json"))


def test_a_wrong_loglikelihood_would_be_seen(tmp_path: Path) -> None:
    """The reference tells a right log-likelihood from that of a text one token longer or shorter."""
    reference = Reference(tmp_path)
    right, _ = reference.loglikelihood("the water is", " hello world")
    for other in (" hello", " hello world,", " world hello"):
        assert abs(reference.loglikelihood("the water is", other)[0] - right) > 0.1
