"""Everything that can be set about an engine, checked once. Imports no torch, so that ``--help`` stays fast.

The names are those of vLLM's flags where one exists. ``None`` means "what suits the model and the machine"; it is settled
by ``Engine.from_config`` and shown in the capacity table.
"""

from __future__ import annotations

import attrs

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "float32", "float16", "bfloat16")
COMPUTES = ("auto", "native", "int8", "torch", "triton")


class ConfigError(ValueError):
    """A setting that cannot work; the message is one sentence that names it, its value and what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@attrs.frozen(kw_only=True)
class EngineConfig:
    """Settings of one engine.

    ``model``: a folder, a .gguf file or a hub id; ``None`` is the small model that is installed beside the engine.
    ``compute``: whose kernels; ``auto`` is native on a CPU with a C++ compiler, else torch. The two give different bytes.
    ``int8`` is native with activations rounded to 8 bits before quantised weights: faster, and less exact.
    ``triton`` is for a GPU, and what ``auto`` takes there.
    ``batch_invariant``: a request's bytes depend on nobody else; Triton's kernels on a GPU can do without, and are faster then.
    ``kv_dtype``: of keys and values in the pool; ``auto`` is what is computed in, but float16 where native kernels serve a
    model with weights narrower than fp32. Native kernels round when they write and compute in fp32.
    ``watermark``: blocks that admission leaves free for the growth of running requests (rule 8); ``None`` is 1 % of the pool.
    ``enable_prefix_caching``: requests take over the full KV blocks of an equal beginning (rule 11); it changes no answer.
    ``capture_rows`` x ``capture_widths`` (rows x blocks) are the recorded shapes; ``None`` covers every decode step.
    ``capture_max_len``: tokens of the longest context to record graphs for; ``None`` is the longest that can occur.
    ``capture_memory``: MiB that graphs may hold; ``None`` suits the device. ``max_captures``: how many there may be.
    ``pin_threads``: helper threads stay on their cores where the process may use exactly as many.
    ``weights_cache``: where packed weights are kept for the next start; ``auto`` is the user's cache, ``off`` nowhere.
    ``seed``: makes the seeds of requests that bring none a function of their arrival number; ``None`` draws them.
    """

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    compute: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    num_kv_blocks: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    watermark: int | None = None
    max_waiting: int = 1024
    enforce_eager: bool = False
    capture_rows: tuple[int, ...] | None = None
    capture_widths: tuple[int, ...] | None = None
    capture_max_len: int | None = None
    capture_memory: int | None = None
    max_captures: int = 1024
    persistent_batch: bool = True
    enable_prefix_caching: bool = True
    batch_invariant: bool = True
    threads: int | None = None
    pin_threads: bool = True
    weights_cache: str = "auto"
    seed: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ConfigError("device", f"device is {self.device!r}, but must be one of {', '.join(DEVICES)}")
        if self.dtype not in DTYPES:
            raise ConfigError("dtype", f"dtype is {self.dtype!r}, but must be one of {', '.join(DTYPES)}")
        if self.compute not in COMPUTES:
            raise ConfigError("compute", f"compute is {self.compute!r}, but must be one of {', '.join(COMPUTES)}")
        if self.kv_dtype not in KV_DTYPES:
            raise ConfigError("kv_dtype", f"kv_dtype is {self.kv_dtype!r}, but must be one of {', '.join(KV_DTYPES)}")
        bounds = {
            "block_size": (1, 256),
            "num_kv_blocks": (1, 2**24),
            "max_num_seqs": (1, 1024),
            "max_num_batched_tokens": (1, 2**20),
            "max_model_len": (1, 2**24),
            "watermark": (0, 2**24),
            "max_waiting": (1, 2**20),
            "capture_max_len": (1, 2**24),
            "capture_memory": (1, 2**20),
            "max_captures": (1, 2**16),
            "threads": (1, 1024),
        }
        for field, (low, high) in bounds.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise ConfigError(field, f"{field} is {value}, but must be in {low}..{high}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but must be at least max_num_seqs = "
                f"{self.max_num_seqs}, since each running request decodes one token per iteration",
            )
        if self.num_kv_blocks is not None and self.watermark is not None and self.watermark >= self.num_kv_blocks:
            raise ConfigError(
                "watermark", f"watermark is {self.watermark}, but must be below num_kv_blocks = {self.num_kv_blocks}"
            )
        for field in ("capture_rows", "capture_widths"):
            for value in getattr(self, field) or ():
                if value < 1:
                    raise ConfigError(field, f"{field} holds {value}, but every entry must be at least 1")
