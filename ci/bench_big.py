"""A model of 1.1 billion random weights in Q4_0 (hidden 2048, 22 layers), made on the spot, on this engine and llama.cpp.

python ci/bench_big.py --plot big.png      about 600 MB in .peers/models, made once; some minutes
python ci/bench_big.py --layers 2 --lists single                a smaller model of the same width, for a first look
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import attrs
import numpy as np
from cyclopts import App, Parameter
from rich.console import Console

from engine.loading.gguf_file import gguf_name
from engine.loading.load import default_model_path
from engine.loading.model import ModelConfig
from server.bench.offline import report, table
from server.bench.offline.contestants import PACKAGE, Contestant, own, python_of, ready
from server.bench.offline.models import Files, once
from server.bench.offline.plot import plot
from server.bench.offline.rounds import measure, schedule
from server.bench.offline.worker import Worker
from server.bench.plot import NoPlots, check_places
from server.bench.requests import Ask, bundled

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
LISTS = ("single", "prefill1024", "batch16")
app = App(name="bench_big", help=__doc__, result_action="return_value")


def write(out: Path, config: ModelConfig = SHAPE, tokenizer_of: Path | None = None) -> None:
    """Random Q4_0 blocks: a scale and 16 bytes of nibbles for 32 weights; the tokenizer is the default model's."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

    writer = GGUFWriter(out, config.family)
    writer.add_name(f"random-{parameters(config) / 1e9:.2f}B")
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
def main(
    *,
    repeats: int = 1,
    threads: int = 2,
    layers: int = SHAPE.num_layers,
    lists: tuple[str, ...] = LISTS,
    minutes: float = 20.0,
    peers: Path = Path(".peers"),
    plot_to: Annotated[Path | None, Parameter(name="--plot")] = None,
) -> int:
    """Prints a table. Exit status: 0 measured, 1 not.

    Args:
        layers: fewer make a smaller model of the same width, for a first look.
        lists: of those that come along: single, prefill1024, batch16, shared16.
        plot_to: where the table is drawn (.png, .svg, .pdf).
        minutes: for all runs together; each has the same share of it and is cut, and told, when it takes longer.
    """
    console, asks = Console(width=190), {name: one for name, one in bundled().items() if name in lists}
    if not asks or layers < 1 or minutes <= 0:
        console.print(f"lists are {', '.join(bundled())}; layers and minutes must be positive", markup=False)
        return 1
    try:
        check_places(None, plot_to)
    except (NoPlots, ValueError) as error:
        console.print(str(error), markup=False)
        return 1
    config = attrs.evolve(SHAPE, num_layers=layers)
    rows = measured(
        config, asks, Told(console), repeats=repeats, threads=threads, minutes=minutes, peers=peers.absolute()
    )
    title = f"{parameters(config) / 1e9:.2f} billion random weights in Q4_0, {threads} threads"
    report.show(console, rows, title)
    if plot_to is not None:
        plot(rows, plot_to, title)
    for failure in (failed := table.failures(rows, asks)):
        console.print(f"failed: {failure}", markup=False)
    return 1 if failed else 0


def measured(
    config: ModelConfig,
    lists: Mapping[str, Sequence[Ask]],
    say: Callable[[str], None],
    *,
    repeats: int,
    threads: int,
    minutes: float,
    peers: Path,
) -> list[table.Row]:
    """Makes the model unless it is there, then measures this engine on it, and llama.cpp where it is installed."""
    folder = peers / "models" / f"random-{config.num_layers}-layers-{config.hidden_size}"
    files = Files(folder / "q4_0.gguf", folder)
    once(files, files.shipped, say, lambda out: write(out, config))
    people = own(files, threads)[:1]
    if ready(peers, "llamacpp"):
        command = (str(python_of(peers, "llamacpp")), "-m", f"{PACKAGE}.drive_llamacpp", str(files.shipped))
        people.append(Contestant(table.LLAMA_SHIPPED, (*command, str(threads)), "llamacpp", int8=True))
    else:
        say("llama.cpp is not installed (`make peers`): nobody to compare with")
    turns = list(schedule(people, list(lists), repeats))
    workers = {one.name: Worker(one, threads) for one in people}
    outcomes = measure(workers, lists, turns, say, patience=60 * minutes / len(turns))
    return table.rows(list(outcomes.values()), lists)


def parameters(config: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in config.tensors().values())


class Told:
    """Prints what begins, and how many seconds after the first."""

    def __init__(self, console: Console) -> None:
        self._console, self._began = console, time.perf_counter()

    def __call__(self, text: str) -> None:
        self._console.print(f"{time.perf_counter() - self._began:5.0f} s  {text}", markup=False)


if __name__ == "__main__":
    sys.exit(app())
