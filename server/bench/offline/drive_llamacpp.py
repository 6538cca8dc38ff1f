"""The worker around llama.cpp, in process: its own server core with continuous batching and prompt caching.

Arguments: a GGUF file, threads. The package is ``xllamacpp``, a wheel of llama.cpp built for AVX2.
"""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Sequence
from typing import Any

from server.bench.offline.drive import Reading, Request, clock, serve

ROWS = 16
CONTEXT = 2048  # of each row


def main() -> None:
    path, threads = sys.argv[1], int(sys.argv[2])
    llama: Any = importlib.import_module("xllamacpp")  # of this worker's own environment
    params = llama.CommonParams()
    params.model.path = path
    params.n_ctx = ROWS * CONTEXT
    params.n_parallel = ROWS
    params.kv_unified = True  # one pool of cells for all rows, so that a prefix can be shared
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_gpu_layers = 0
    params.warmup = False
    params.endpoint_metrics = False
    server = llama.Server(params)

    def run(requests: Sequence[Request], hits: bool) -> Reading:
        begin = clock()
        tokens: list[list[int]] = [[] for _ in requests]
        stamps: list[list[float]] = [[] for _ in requests]
        errors: list[str] = []

        def ask(at: int) -> None:
            request = requests[at]
            body = {
                "prompt": request.prompt,
                "n_predict": request.gen,
                "max_tokens": request.gen,
                "temperature": 0.0,
                "samplers": ["top_k"],
                "top_k": 1,
                "ignore_eos": True,
                "stream": True,
                "cache_prompt": hits,
                "verbose": True,  # the only way to the token ids
            }

            def take(chunk: Any) -> bool:
                event = json.loads(chunk) if isinstance(chunk, str | bytes) else chunk
                if "choices" not in event:
                    errors.append(str(event)[:300])
                    return True
                made = (event.get("__verbose") or {}).get("tokens") or []
                if made:
                    tokens[at] += made
                    stamps[at].append(clock() - begin)
                return False

            server.handle_completions(body, take)

        askers = [threading.Thread(target=ask, args=(at,)) for at in range(len(requests))]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        if errors:
            raise RuntimeError(errors[0])
        return Reading(clock() - begin, stamps[0][0], stamps[0][-1], tokens)

    serve({"engine": "llama.cpp", "version": llama.__version__, "system": llama.get_system_info()}, run)


if __name__ == "__main__":
    main()
