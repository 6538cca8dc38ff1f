"""The worker around ``transformers``: ``generate`` on a left-padded static batch, greedy, in fp32.

Arguments: the model folder, threads. Its continuous batching needs far longer for these lists, so it is not used.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from server.bench.offline.drive import Reading, Request, clock, serve

PAD = 0  # masked out wherever it stands


def main() -> None:
    folder, threads = sys.argv[1], int(sys.argv[2])
    torch: Any = importlib.import_module("torch")  # of this worker's own environment, as is transformers
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model = model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD

    class Stamps:
        """What ``generate`` takes for a streamer; it is told of the prompt first, then of each token."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: Any) -> None:
            self.times.append(clock())

        def end(self) -> None: ...

    def run(requests: Sequence[Request], _: bool) -> Reading:
        longest, gen = max(len(r.prompt) for r in requests), max(r.gen for r in requests)
        begin = clock()
        ids = torch.tensor([[PAD] * (longest - len(r.prompt)) + r.prompt for r in requests])
        mask = torch.tensor([[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in requests])
        stamps = Stamps() if len(requests) == 1 else None
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=gen,
                min_new_tokens=gen,
                do_sample=False,
                streamer=stamps,
            )
        end = clock()
        times = stamps.times[1:] if stamps else [end]
        tokens = [row[longest : longest + r.gen].tolist() for row, r in zip(made, requests, strict=True)]
        return Reading(end - begin, times[0] - begin, times[-1] - begin, tokens)

    def score(ids: list[int]) -> tuple[list[float], list[int]]:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            logprobs = torch.log_softmax(logits.double(), -1)
        chosen = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        return chosen.tolist(), logits.argmax(-1).tolist()

    serve({"engine": "transformers", "version": transformers.__version__, "torch": torch.__version__}, run, score)


if __name__ == "__main__":
    main()
