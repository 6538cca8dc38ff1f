"""A model of 1.1 billion random weights in Q4_0 (hidden 2048, 22 layers), made on the spot, on this engine and llama.cpp.

python ci/bench_big.py                     about 650 MB in .peers/models, made once
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from cyclopts import App
from rich.console import Console

from engine.loading.gguf_file import gguf_name
from engine.loading.load import default_model_path
from engine.loading.model import ModelConfig
from server.bench.offline import report, table
from server.bench.offline.contestants import PACKAGE, Contestant, own, python_of, ready
from server.bench.offline.models import Files, once
from server.bench.offline.rounds import measure, schedule
from server.bench.offline.worker import Worker
from server.bench.requests import bundled

SHAPE = ModelConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=22,
    num_heads=32,
    num_kv_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)
app = App(name="bench_big", help=__doc__, result_action="return_value")


def write(out: Path, config: ModelConfig = SHAPE, tokenizer_of: Path | None = None) -> None:
    """Random Q4_0 blocks: a scale and 16 bytes of nibbles for 32 weights; the tokenizer is the default model's."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    writer = GGUFWriter(out, config.family)
    writer.add_name("random-1.1B")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for name, field in GGUFReader(tokenizer_of or default_model_path()).fields.items():
        if name.startswith("tokenizer."):
            sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    draw = np.random.default_rng(0)
    for name, shape in config.tensors().items():
        if len(shape) == 1:
            writer.add_tensor(gguf_name(name), np.ones(shape, np.float32))
            continue
        blocks = draw.integers(0, 256, (shape[0], shape[1] // 32, 18), dtype=np.uint8)
        scale = np.float16(0.2 * shape[1] ** -0.5)  # of nibbles from -8 to 7, so that activations stay near 1
        blocks[:, :, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        writer.add_tensor(gguf_name(name), blocks.reshape(shape[0], -1), raw_dtype=GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@app.default
def main(*, repeats: int = 1, threads: int = 2, peers: Path = Path(".peers")) -> int:
    """Exit status: 0 measured, 1 not."""
    console, place = Console(width=170), peers.absolute()
    folder = place / "models" / "random-1.1B"
    files = Files(folder / "q4_0.gguf", folder)
    once(files, files.shipped, console.print, write)
    people = own(files, threads)[:1]
    if ready(place, "llamacpp"):
        command: tuple[Any, ...] = (str(python_of(place, "llamacpp")), "-m", f"{PACKAGE}.drive_llamacpp")
        people.append(Contestant(table.LLAMA_SHIPPED, (*command, str(files.shipped), str(threads)), "llamacpp"))
    lists = {name: asks for name, asks in bundled().items() if name in ("single", "prefill1024", "batch16")}
    turns = list(schedule(people, list(lists), repeats))
    workers = {one.name: Worker(one, threads) for one in people}
    outcomes = list(measure(workers, lists, turns, console.print, patience=300.0).values())
    rows = table.rows(outcomes, lists)
    report.show(console, rows, "1.1 billion random weights in Q4_0")
    for failure in (failed := table.failures(rows, lists)):
        console.print(f"failed: {failure}", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(app())
