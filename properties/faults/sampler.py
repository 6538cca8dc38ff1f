"""Faults of the sampler: whose logits, whose state, which noise, which filter. What follows a row is in faults/compute.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from properties.arming import Fault, in_area, instead, line

SAMPLER = "engine.compute.sampler:Sampler"
MODULE = "engine.compute.sampler"  # the name through which the sampler reaches choose
CHOICE = "engine.compute.sampling_choice"
ROW = "engine.compute.sampling_row:RowState"
PENALTIES = "engine.compute.sampling_row:Penalties"


def _plain_requests_write_nothing(seat: Callable[..., None]) -> Any:
    """A request without options of its own keeps whatever options last stood in its row."""
    last: dict[int, Any] = {}

    def faulty(sampler: Any, entry: Any) -> None:
        seat(sampler, entry)
        states = sampler._states
        if states[entry.row].plain and entry.row in last:
            states[entry.row] = last[entry.row]
        last[entry.row] = states[entry.row]

    return faulty


DRAWS = in_area(
    "sampler",
    Fault(
        "L01",
        "a sampled row is drawn from the logits of its neighbour",
        ("solo", "tokens"),
        line(SAMPLER, "sample", "self._sample_row(host[k],", "self._sample_row(host[k - 1],"),
        rules=("14.1",),
    ),
    Fault(
        "L02",
        "options are looked up among the rows that have some, by the place among all",
        ("solo", "tokens"),
        line(SAMPLER, "sample", "states[i], positions[i]", "states[k], positions[i]"),
        source="ml-explore/mlx-lm PR#1225",
        rules=("14.1",),
    ),
    Fault(
        "L03",
        "greedy rows go through the random path with temperature 0",
        ("raises",),
        line("engine.request:SamplingParams", "greedy", "self.temperature == 0.0", "self.temperature < 0.0"),
        source="vllm-project/vllm#22180",
        rules=("14.1",),
    ),
    Fault(
        "L04",
        "every position draws from the same noise",
        ("solo", "tokens"),
        line(SAMPLER, "_sample_row", "stream_key(state.seed, position)", "stream_key(state.seed, 0)"),
        rules=("14.1",),
    ),
    Fault(
        "L05",
        "the seed has no effect",
        ("solo", "tokens"),
        line(SAMPLER, "_sample_row", "stream_key(state.seed, position)", "stream_key(0, position)"),
        source="ggml-org/llama.cpp#7381",
        rules=("14.1",),
    ),
    Fault(
        "L06",
        "a resumed request draws from fresh noise",
        ("solo", "tokens"),
        line(ROW, "__init__", "self.seed = spec.seed", "self.seed = spec.seed + (len(seat.tokens) > seat.prompt_len)"),
        rules=("14.1",),
        needs="resumed",
    ),
    Fault(
        "L08",
        "a request without options takes over those of whoever sat in its row before",
        ("solo", "tokens"),
        instead(SAMPLER, "seat", _plain_requests_write_nothing),
        source="vllm-project/vllm#43894",
        rules=("14.1",),
        needs="row reused",
    ),
    Fault(
        "L09",
        "of several stop tokens only the first is held back before min_tokens",
        ("tokens", "solo"),
        line(ROW, "__init__", "sorted(masked) if", "sorted(masked)[:1] if"),
        source="vllm-project/vllm PR#5849",
        rules=("13.2",),
    ),
    Fault(
        "L11",
        "penalties do not learn of the tokens that were generated since the row was taken",
        ("solo", "tokens"),
        line(SAMPLER, "_note", "state.append(token)", "pass"),
        source="vllm-project/vllm-ascend PR#7785",
        rules=("14.1",),
    ),
    Fault(
        "L12",
        "frequency and presence penalties punish the prompt",
        ("solo", "tokens"),
        line(
            PENALTIES,
            "__init__",
            "for token in tokens[:prompt_len]:\n        self._slot(token)",
            "for token in tokens[:prompt_len]:\n        self.append(token)",
        ),
        source="vllm-project/vllm-metal PR#69",
        rules=("14.1",),
    ),
    Fault(
        "L13",
        "top-p keeps one token too few",
        ("solo", "tokens"),
        line(
            CHOICE,
            "nucleus",
            "int(np.count_nonzero(before < bound))",
            "max(1, int(np.count_nonzero(before < bound)) - 1)",
        ),
        rules=("14.2",),
    ),
    Fault(
        "L14",
        "top-k keeps one token too many",
        ("solo", "tokens"),
        line(CHOICE, "survivors", "first(logits, params.top_k)", "first(logits, min(params.top_k + 1, len(logits)))"),
        rules=("14.2",),
    ),
    Fault(
        "L15",
        "min-p is measured before the temperature",
        ("solo", "tokens"),
        line(MODULE, "choose", "params.temperature * math.log", "math.log"),
        rules=("14.2",),
    ),
    Fault(
        "L16",
        "temperature is applied twice",
        ("solo", "tokens"),
        line(MODULE, "choose", "race(logits, peak, params.temperature,", "race(logits, peak, params.temperature**2,"),
        rules=("14.1",),
    ),
    Fault(
        "L17",
        "penalties count the tokens of all rows",
        ("solo", "tokens"),
        line(SAMPLER, "_note", "state.append(token)", "[other.append(token) for other in self._states if other]"),
        source="huggingface/text-generation-inference PR#1765",
        rules=("14.1",),
    ),
    Fault(
        "L18",
        "a resumed request has forgotten what it generated where penalties count it",
        ("solo", "tokens"),
        line(PENALTIES, "__init__", "for token in tokens[prompt_len:]:", "for token in ():"),
        rules=("14.1",),
        needs="resumed",
    ),
    rung="tiny",
)
# What is masked shows as soon as logits have an order, so these need no transformer.
MASKS = in_area(
    "sampler",
    Fault(
        "L10",
        "the prompt counts towards min_tokens where stop tokens are held back",
        ("decisions", "solo"),
        line(ROW, "__init__", "seat.prompt_len + params.min_tokens", "params.min_tokens"),
        source="NVIDIA/TensorRT-LLM PR#12358",
        rules=("13.2",),
    ),
    rung="rows",
)
FAULTS = (*DRAWS, *MASKS)
