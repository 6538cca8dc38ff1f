"""When Triton's kernels serve: on a GPU, or where they are asked for; else torch, with a word; and what a GPU has to spare."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from ci.triton_errors import device
from engine import build
from engine.build import assemble, resolve_compute
from engine.config import ConfigError, EngineConfig
from engine.control.limits import Limits
from engine.cuda.device import SHARE, WORKSPACE, cache_bytes, exact_products, weight_bytes
from engine.cuda.kernels import NoTriton
from engine.cuda.runner import TritonRunner
from engine.loading.synthetic import synthetic_config, synthetic_model
from engine.request import SamplingParams

SMALL: dict[str, Any] = {
    "num_kv_blocks": 4,
    "block_size": 4,
    "max_num_seqs": 1,
    "max_model_len": 8,
    "enforce_eager": True,
}


def there(monkeypatch: pytest.MonkeyPatch, *, triton: bool) -> None:
    def triton_device(where: torch.device) -> None:
        if not triton:
            raise NoTriton("Triton is not installed: pip install it")

    monkeypatch.setattr(build, "triton_device", triton_device)


def test_a_gpu_takes_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, triton=True)
    assert resolve_compute("auto", "cuda", torch.bfloat16) == "triton"
    assert resolve_compute("triton", "cuda", torch.float16) == "triton"
    assert resolve_compute("torch", "cuda", torch.bfloat16) == "torch"


def test_without_triton_torch_serves_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, triton=False)
    with pytest.warns(UserWarning, match="torch computes instead, slower: Triton is not installed"):
        assert resolve_compute("auto", "cuda", torch.bfloat16) == "torch"
    with pytest.raises(ConfigError, match="compute is triton, but Triton is not installed") as refused:
        resolve_compute("triton", "cuda", torch.bfloat16)
    assert refused.value.field == "compute"


def test_on_a_cpu_they_are_interpreted_and_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, triton=True)
    with pytest.warns(UserWarning, match="interpreted on a CPU"):
        assert resolve_compute("triton", "cpu", torch.float32) == "triton"


@pytest.mark.timeout(1800)
def test_an_engine_on_triton() -> None:
    """From settings to a token, with both kinds of products."""
    where = str(device())
    for invariant, said in ((True, "fixed-tile products"), (False, "library products")):
        config = EngineConfig(compute="triton", batch_invariant=invariant, **SMALL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = assemble(config, synthetic_model(), where, torch.float32)
        assert said in dict(engine.capacity())["compute"]
        engine.submit([1, 2, 3], SamplingParams(max_tokens=2))
        tokens = []
        while engine.has_work:
            tokens += [sample.token for _, sample in engine.step().sampled]
        assert len(tokens) == 2


@pytest.mark.parametrize("compute", ["torch", "native"])
def test_other_kernels_have_one_mode(compute: str) -> None:
    with pytest.raises(ConfigError, match=rf"batch_invariant is False, but {compute} kernels") as refused:
        assemble(EngineConfig(compute=compute, batch_invariant=False, **SMALL), synthetic_model())
    assert refused.value.field == "batch_invariant"


def test_the_pool_takes_what_weights_and_graphs_leave() -> None:
    free = 100 * 2**30
    assert cache_bytes(free, 0, 0) == int(free * SHARE) - WORKSPACE
    assert cache_bytes(free, 30 * 2**30, 2**30) == cache_bytes(free, 0, 0) - 31 * 2**30
    config = synthetic_config()
    held = sum(synthetic_model().source.load(name).numel() for name in config.tensors())
    assert weight_bytes(config, torch.bfloat16) == 2 * held
    assert weight_bytes(config, torch.float32) == 4 * held


def test_the_pool_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of blocks follows the free memory of the device, less the budget of the graphs."""
    free = int((WORKSPACE + 60 * 2**20) / SHARE)  # less than every row at full length needs
    monkeypatch.setattr(build, "_free_bytes", lambda device: free)
    config = EngineConfig(max_num_seqs=512, max_num_batched_tokens=512, capture_memory=16)
    blocks = build.settle(config, synthetic_model(), "cuda", torch.bfloat16, "triton").num_blocks
    eager = EngineConfig(max_num_seqs=512, max_num_batched_tokens=512, enforce_eager=True)
    more = build.settle(eager, synthetic_model(), "cuda", torch.bfloat16, "triton").num_blocks
    per_block = 2 * 2 * 2 * 16 * 16 * 2  # layers, keys and values, heads, positions, numbers, bytes
    assert abs((more - blocks) * per_block - 16 * 2**20) <= per_block
    free = WORKSPACE
    with pytest.raises(ConfigError, match=r"needs .* MiB of KV cache, but"):
        build.settle(eager, synthetic_model(), "cuda", torch.bfloat16, "triton")


def test_products_are_exact_whatever_was_set_before() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = True
        exact_products()
        assert not matmul.allow_tf32
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        matmul.allow_tf32 = before


def test_the_runner_refuses_a_device_that_it_cannot_serve() -> None:
    other = "cpu" if torch.cuda.is_available() else "meta"
    limits = Limits(
        num_blocks=2, block_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8, vocab_size=512
    )
    with pytest.raises(NoTriton):
        TritonRunner(synthetic_model(), limits, device=other, dtype=torch.float32)
