"""The speed of decode steps on one device, as one table: with and without recorded graphs, batch-invariant and not.

    python ci/gpu_table.py [--device cuda] [--batches 1,8,32,128] [--json]

The model is random, of Llama's shape and about one billion weights, and made on the spot. An entry is the median time between
two tokens of a request (ITL) while all requests of the batch decode. ``limit`` is the share of the memory's speed: the bytes
that a step must read (weights once, the contexts' keys and values) over what a copy on this device moves in that time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import attrs
import torch

from engine.build import assemble, resolve_compute
from engine.compute.runner import kv_bytes_per_block
from engine.config import EngineConfig
from engine.cuda.device import weight_bytes
from engine.cuda.weights import load_triton
from engine.loading.model import LoadedModel
from engine.loading.synthetic import synthetic_model
from engine.request import SamplingParams

BILLION: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
TYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


@attrs.frozen
class Entry:
    """``itl`` in seconds."""

    batch: int
    graphs: bool
    batch_invariant: bool
    itl: float
    limit: float


def bandwidth(device: str, numel: int = 2**28) -> float:
    """Bytes a second that a copy reads and writes on ``device``."""
    source = torch.zeros(numel, dtype=torch.float32, device=device)
    copy = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        wait(device)
        began = time.perf_counter()
        copy.copy_(source)
        wait(device)
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def settings(batch: int, context: int, *, graphs: bool, batch_invariant: bool, compute: str) -> EngineConfig:
    return EngineConfig(
        compute=compute,
        batch_invariant=batch_invariant,
        max_num_seqs=batch,
        max_num_batched_tokens=max(512, batch),
        max_model_len=context,
        num_kv_blocks=batch * -(-context // 16),
        capture_rows=(batch,),
        enforce_eager=not graphs,
        enable_prefix_caching=False,
        seed=0,
    )


def itl(model: LoadedModel, weights: Any, config: EngineConfig, device: str, prompt: int, steps: int) -> float:
    """Seconds, the median over the steps in which every request decodes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = assemble(config, model, device, TYPES[device], weights=weights)
    batch, vocab = config.max_num_seqs, model.config.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=steps + batch * prompt // 512 + 4, ignore_eos=True)
    for request in range(batch):
        engine.submit([(7 * request + i) % vocab for i in range(prompt)], params)
    times: list[float] = []
    while engine.has_work:
        began = time.perf_counter()
        record = engine.step()
        if len(record.plan.decodes) == batch and not record.plan.chunks:
            times.append(time.perf_counter() - began)
    if len(times) < 3:
        raise RuntimeError(f"only {len(times)} steps had all {batch} requests decoding")
    return statistics.median(times[2:])


def entries(
    model: LoadedModel, device: str, batches: list[int], *, prompt: int, steps: int, compute: str, speed: float
) -> Iterator[Entry]:
    modes = (True, False) if compute == "triton" else (True,)
    weights = load_triton(model, torch.device(device), TYPES[device]) if compute == "triton" else None
    context = min(model.config.max_position_embeddings, prompt + steps + max(batches) * prompt // 512 + 4)
    position = kv_bytes_per_block(model.config, 1, TYPES[device])
    for batch in batches:
        read = weight_bytes(model.config, TYPES[device]) + batch * (prompt + steps // 2) * position
        for batch_invariant in modes:
            for graphs in (True, False):
                config = settings(batch, context, graphs=graphs, batch_invariant=batch_invariant, compute=compute)
                seconds = itl(model, weights, config, device, prompt, steps)
                # A copy reads and writes each byte, a step only reads.
                yield Entry(batch, graphs, batch_invariant, seconds, read / seconds / speed)


def versions(device: str) -> dict[str, str]:
    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "absent"

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": of("triton"),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads",
    }


def main(argv: list[str] | None = None, shape: dict[str, Any] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(TYPES), default="cuda")
    parser.add_argument("--compute", choices=("auto", "torch", "triton"), default="auto")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("ci/gpu_table.py: no CUDA device, nothing was measured")
        return 0
    model = synthetic_model("llama", **(BILLION if shape is None else shape))
    compute = resolve_compute(options.compute, options.device, TYPES[options.device])
    speed = bandwidth(options.device, 2**28 if options.device == "cuda" else 2**22)
    found = list(
        entries(
            model,
            options.device,
            [int(batch) for batch in options.batches.split(",")],
            prompt=options.prompt,
            steps=options.steps,
            compute=compute,
            speed=speed,
        )
    )
    told = versions(options.device) | {"compute": compute, "copy": f"{speed / 1e9:.0f} GB/s"}
    if options.json:
        print(json.dumps({"versions": told, "entries": [attrs.asdict(entry) for entry in found]}))
        return 0
    print(", ".join(f"{name} {value}" for name, value in told.items()))
    print("batch  invariant  ITL, graphs   ITL, eager   limit, graphs")
    for with_graphs, eager in zip(found[::2], found[1::2], strict=True):
        invariant = "yes" if with_graphs.batch_invariant else "no"
        times = f"{with_graphs.itl * 1e3:8.2f} ms  {eager.itl * 1e3:8.2f} ms"
        print(f"{with_graphs.batch:5}  {invariant:9}  {times}  {with_graphs.limit:12.0%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
