"""The worker around OpenVINO GenAI's ``ContinuousBatchingPipeline``, prefix caching on.

Arguments: a GGUF file or an IR folder, threads, the inference precision (f32), the precision of the K/V cache
(``default`` leaves it to the engine).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from server.bench.offline.drive import Reading, Request, clock, serve

KV_GIB = 2
ROWS = 16
BATCHED_TOKENS = 2048


def main() -> None:
    path, threads, precision, kv = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    np: Any = importlib.import_module("numpy")  # of this worker's own environment, as are the others
    openvino: Any = importlib.import_module("openvino")
    genai: Any = importlib.import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = KV_GIB
    scheduler.max_num_seqs = ROWS
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    if kv != "default":
        properties["KV_CACHE_PRECISION"] = kv
    pipe = genai.ContinuousBatchingPipeline(path, scheduler_config=scheduler, device="CPU", properties=properties)
    served = 0

    def run(requests: Sequence[Request], _: bool) -> Reading:
        nonlocal served
        begin = clock()
        handles = []
        for request in requests:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = request.gen, True, False
            ids = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
            handles.append(pipe.add_request(served, ids, config))
            served += 1
        tokens: list[list[int]] = [[] for _ in requests]
        first = last = 0.0
        while pipe.has_non_finished_requests():
            pipe.step()
            for handle, own in zip(handles, tokens, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        own += list(output.generated_ids)
                        if own is tokens[0] and output.generated_ids:
                            last = clock() - begin
                            first = first or last
        return Reading(clock() - begin, first, last, tokens)

    serve({"engine": "OpenVINO GenAI", "version": genai.__version__, "precision": precision, "kv": kv}, run)


if __name__ == "__main__":
    main()
