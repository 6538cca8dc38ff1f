"""From settings to an engine: load, size, probe, record. The one place where "what suits the machine" is decided."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.capture_plan import capture_budget, capture_list, describe
from engine.compute.recording import Recorded, corners, refuse_open_shapes
from engine.compute.runner import ModelRunner, PlanRunner, kv_bytes_per_block
from engine.compute.weights import Weights
from engine.config import ConfigError, EngineConfig
from engine.control.door import most_tokens
from engine.control.limits import Limits
from engine.cuda.device import cache_bytes, exact_products, weight_bytes
from engine.cuda.kernels import NoTriton, triton_device
from engine.cuda.runner import TritonRunner
from engine.cuda.weights import TritonWeights
from engine.engine import Engine, Progress
from engine.loading import load_model
from engine.loading.heap import give_back
from engine.loading.model import LoadedModel
from engine.native.build import BadTiles, BuildError
from engine.native.machine import granted
from engine.native.runner import NativeRunner, library, prepare
from engine.native.weights import NativeWeights
from engine.native.weights_cache import WeightsCache, weights_folder

CPU_KV_BYTES = 2**28  # unless one sequence of full length needs more: a larger pool is better asked for
FREE_SHARE = 0.4  # of the memory that is free when the pool is sized

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """See ``Engine.from_config``."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    model = load_model(config.model)
    engine = assemble(config, model, device, dtype, progress)
    give_back()
    return engine


def assemble(
    config: EngineConfig,
    model: LoadedModel,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
    weights: Weights | NativeWeights | TritonWeights | None = None,
) -> Engine:
    """An engine around a model that is loaded already; ``weights`` lets engines of one model share what was made of it."""
    if weights is None:
        compute = resolve_compute(config.compute, device, dtype, progress)
    else:
        compute = _path_of(weights)
    if device == "cuda":
        exact_products()
    if not config.batch_invariant and compute != "triton":
        raise ConfigError("batch_invariant", f"batch_invariant is False, but {compute} kernels have no other mode")
    kv_dtype = resolve_kv_dtype(config.kv_dtype, dtype, compute, narrow=model.is_narrow)
    limits = settle(config, model, device, kv_dtype, compute)
    runner: ModelRunner | NativeRunner | TritonRunner
    if compute == "native":
        if config.threads is not None and (shortage := granted().shortage(config.threads)):
            warnings.warn(f"{shortage}; more threads than cores make every step slower", stacklevel=2)
        own = weights if isinstance(weights, NativeWeights) else None
        cache = resolve_weights_cache(config.weights_cache)
        runner = NativeRunner(
            model,
            limits,
            threads=config.threads,
            progress=progress,
            weights=own,
            cache=cache,
            kv_dtype=kv_dtype,
            integer=config.compute == "int8",
            pin=config.pin_threads,
        )
        if config.compute == "int8" and not runner.weights.integer:
            raise ConfigError("compute", f"compute is int8, but {model.name} has no quantised layers that kernels know")
    elif compute == "triton":
        runner = TritonRunner(
            model,
            limits,
            device=device,
            dtype=dtype,
            batch_invariant=config.batch_invariant,
            progress=progress,
            weights=weights if isinstance(weights, TritonWeights) else None,
        )
    else:
        shared = weights if isinstance(weights, Weights) else None
        runner = ModelRunner(
            model, limits, device=device, dtype=dtype, threads=config.threads, progress=progress, weights=shared
        )
    capture = _record(config, model, limits, runner, device, compute, progress)
    return Engine(
        limits,
        runner,
        eos_token_ids=model.eos_token_ids,
        seed=config.seed,
        model=model,
        capacity=_capacity(model, limits, runner, device, dtype, capture),
        capture=capture,
    )


def resolve_device(name: str) -> str:
    """``auto`` is a GPU where this torch can use one. Raises ``ConfigError`` that says which torch is needed."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        if torch.version.cuda is None:
            raise ConfigError(
                "device",
                f"device is cuda, but torch {torch.__version__} is a CPU build: install the CUDA build of the same "
                "version, or use --device cpu",
            )
        raise ConfigError("device", "device is cuda, but torch finds no usable GPU: check the driver with nvidia-smi")
    return name


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """``auto`` is fp32 on the CPU, where the answers are byte-identical in a crowd, and bf16 on a GPU."""
    if name == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu" and name != "float32":
        raise ConfigError("dtype", f"dtype is {name}, but the CPU path computes in float32 only")
    return _DTYPES[name]


def resolve_compute(name: str, device: str, dtype: torch.dtype, progress: Progress | None = None) -> str:
    """``native`` (``int8`` is) or ``torch``. Raises ``ConfigError`` where native kernels were asked for and cannot be had.

    ``auto`` warns once when it falls back to torch for want of a working compiler. A bad ``LOCKSTEP_TILES`` is an error always.
    """
    if name == "torch":
        return "torch"
    if name == "triton" or (name == "auto" and device != "cpu"):
        return _resolve_triton(name, device)
    if device != "cpu" or dtype != torch.float32:
        raise ConfigError(
            "compute", f"compute is {name}, but native kernels run on the CPU in float32, not on {device}"
        )
    try:
        prepare(progress)
        library()
    except BadTiles as error:  # a wish that was misspelt is no missing compiler
        raise ConfigError("LOCKSTEP_TILES", str(error)) from None
    except BuildError as error:
        if name != "auto":
            raise ConfigError("compute", f"compute is {name}, but {error}") from None
        warnings.warn(
            f"native kernels cannot be had, torch computes instead, several times slower: {error}", stacklevel=2
        )
        return "torch"
    return "native"


def _resolve_triton(name: str, device: str) -> str:
    try:
        triton_device(torch.device(device))
    except NoTriton as error:
        if name != "auto":
            raise ConfigError("compute", f"compute is {name}, but {error}") from None
        warnings.warn(f"Triton's kernels cannot be had, torch computes instead, slower: {error}", stacklevel=3)
        return "torch"
    if device == "cpu":
        warnings.warn("Triton's kernels are interpreted on a CPU: hundreds of times slower, for tests", stacklevel=3)
    return "triton"


def _path_of(weights: Weights | NativeWeights | TritonWeights) -> str:
    if isinstance(weights, NativeWeights):
        return "native"
    return "triton" if isinstance(weights, TritonWeights) else "torch"


def resolve_kv_dtype(name: str, dtype: torch.dtype, compute: str, *, narrow: bool = False) -> torch.dtype:
    """``auto`` is what is computed in, or fp16 on native kernels for ``narrow`` weights, which were rounded as much or more.

    Raises ``ConfigError`` where no kernel reads the type that was asked for.
    """
    if name == "auto":
        return torch.float16 if narrow and compute == "native" else dtype
    kv_dtype = _DTYPES[name]
    if kv_dtype != dtype and compute != "native":
        computed = str(dtype).removeprefix("torch.")
        raise ConfigError(
            "kv_dtype", f"kv_dtype is {name}, but must be {computed} or auto: only native kernels convert it"
        )
    return kv_dtype


def resolve_weights_cache(name: str) -> WeightsCache | None:
    """Where packed weights are kept, if anywhere."""
    if name == "off":
        return None
    return WeightsCache(weights_folder() if name == "auto" else Path(name).expanduser())


def settle(
    config: EngineConfig, model: LoadedModel, device: str, kv_dtype: torch.dtype, compute: str = "torch"
) -> Limits:
    """Fills in what the settings left open; ``kv_dtype`` says what a block costs. Raises ``ConfigError``."""
    context = model.config.max_position_embeddings
    max_model_len = config.max_model_len or context
    if max_model_len > context:
        raise ConfigError(
            "max_model_len", f"max_model_len is {max_model_len}, but {model.name} knows {context} positions"
        )
    num_blocks = config.num_kv_blocks or _blocks_that_suit(config, model, max_model_len, device, kv_dtype)
    watermark = num_blocks // 100 if config.watermark is None else config.watermark
    if watermark >= num_blocks:
        raise ConfigError(
            "watermark", f"watermark is {watermark} blocks, but must be below num_kv_blocks = {num_blocks}"
        )
    longest = _longest(max_model_len, num_blocks, config.block_size)
    return Limits(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        watermark=watermark,
        max_waiting=config.max_waiting,
        persistent_batch=config.persistent_batch,
        prefix_cache=config.enable_prefix_caching,
        captures=capture_list(config, model, longest=longest, device=device, compute=compute).shapes,
    )


def _record(
    config: EngineConfig,
    model: LoadedModel,
    limits: Limits,
    runner: PlanRunner,
    device: str,
    compute: str,
    progress: Progress | None,
) -> dict[str, Any]:
    """Records every shape before anybody may ask; returns what was decided, and what it cost."""
    longest = _longest(limits.max_model_len, limits.num_blocks, limits.block_size)
    captures = capture_list(config, model, longest=longest, device=device, compute=compute)
    with torch.inference_mode():
        refuse_open_shapes(runner.network, runner.inputs, corners(limits.captures))
    began = time.perf_counter()
    runner.warm(progress)
    recorded = Recorded(runner.recorded, time.perf_counter() - began, runner.network.graphs.nbytes)
    return describe(captures, recorded, max_num_seqs=limits.max_num_seqs, longest=longest, block_size=limits.block_size)


def _longest(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """The longest sequence that can exist: the context, or what the pool holds and one sampled token."""
    return min(max_model_len, num_blocks * block_size + 1)


def _blocks_that_suit(
    config: EngineConfig, model: LoadedModel, max_model_len: int, device: str, kv_dtype: torch.dtype
) -> int:
    """Room for every row at full length, or for what a share of the free memory holds, whichever is less.

    At least one sequence of full length must fit, or the model's own context could not be served.
    """
    per_block = kv_bytes_per_block(model.config, config.block_size, kv_dtype)
    one = -(-max_model_len // config.block_size)
    free = _free_bytes(device)
    if device != "cpu":  # where weights, graphs and pool share a memory of their own
        room = cache_bytes(free, weight_bytes(model.config, kv_dtype), capture_budget(config, device))
    else:
        room = min(int(free * FREE_SHARE), max(CPU_KV_BYTES, one * per_block))
    blocks = min(one * config.max_num_seqs, room // per_block)
    if blocks < one:
        raise ConfigError(
            "max_model_len",
            f"one sequence of {max_model_len} tokens needs {one * per_block / 2**20:.0f} MiB of KV cache, but "
            f"{room / 2**20:.0f} MiB are to spare: lower max_model_len or set num_kv_blocks",
        )
    return blocks


def _free_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 8 * CPU_KV_BYTES


def _size(nbytes: int) -> str:
    """So small a pool that it would be 0 MiB still has a size."""
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 10 * 2**20 else f"{nbytes / 2**10:.0f} KiB"


def _few(count: int, one: str) -> str:
    return f"{count} {one if count == 1 else one + 's'}"


def _graphs(limits: Limits, capture: Mapping[str, Any]) -> str:
    if not limits.captures:
        return f"none ({capture['bound_by']}): every decode step runs eagerly"
    cost = f"{_size(capture['bytes'])}, recorded in {capture['seconds']:.1f} s"
    widest = f"the widest {_few(capture['ceiling'], 'block')}, bound by {capture['bound_by']}"
    gap = capture["gap"] or "every decode step replays"
    scattered = "" if limits.persistent_batch else "; without the persistent batch, scattered rows run eagerly"
    return f"{_few(len(limits.captures), 'shape')}, {cost}; {widest}; {gap}{scattered}"


def _context(limits: Limits) -> str:
    """How long a request may be, and how many of the longest the pool and the rows have room for at the same time."""
    most = most_tokens(limits, 0)
    if most < limits.max_model_len:
        return f"{limits.max_model_len} tokens, but a request has at most {most}: the KV cache holds no more"
    blocks = max(1, -(-(most - 1) // limits.block_size))  # the last token needs no K/V
    count = min(limits.num_blocks // blocks, limits.max_num_seqs)
    return f"{most} tokens; room for {_few(count, 'request')} of that length at once"


def _capacity(
    model: LoadedModel,
    limits: Limits,
    runner: ModelRunner | NativeRunner | TritonRunner,
    device: str,
    dtype: torch.dtype,
    capture: Mapping[str, Any],
) -> list[tuple[str, str]]:
    if isinstance(runner, NativeRunner):
        compute, threads, origin = runner.compute, runner.threads.threads, runner.weights.origin
    else:
        compute = runner.compute if isinstance(runner, TritonRunner) else "torch kernels"
        threads, origin = torch.get_num_threads(), None
    weights = f"{_size(runner.weight_bytes)}, " + ("in memory" if origin is None else f"mapped from {origin}")
    tokens = limits.num_blocks * limits.block_size
    return [
        ("model", f"{model.name} ({model.config.family}, {model.weight_types})"),
        ("device", f"{device}, {str(dtype).removeprefix('torch.')}, {_few(threads, 'thread')}"),
        ("compute", compute),
        ("weights", weights),
        (
            "KV cache",
            f"{_few(limits.num_blocks, 'block')} x {limits.block_size} = {_few(tokens, 'token')}, {_size(runner.kv_bytes)}",
        ),
        ("context", _context(limits)),
        ("prefix cache", "on" if limits.prefix_cache else "off"),
        ("batch", f"{_few(limits.max_num_seqs, 'row')}, {_few(limits.max_num_batched_tokens, 'token')} an iteration"),
        ("recorded graphs", _graphs(limits, capture)),
        ("byte identity", runner.probe_summary),
    ]
