"""A small model made of numbers: every family in memory, without a file, the same on every machine.

Each tensor is drawn from a generator seeded by (seed, name), so it can be made on demand and does not depend on the
order of loading. The weights are scaled so that a mistake shows: logits spread by ``logit_std``, attention is far from
uniform, norms are not ones and biases not zeros.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import attrs
import tokenizers
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.loading.model import LoadedModel, LoadError, ModelConfig, StoredTensor
from engine.loading.template import ChatTemplate
from engine.loading.tokenizer import CHAR_OF_BYTE, Tokenizer

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_WORDS = (
    " the, of, and, to, in, is, that, for, it, was, on, with, as, are, this, be, at, or, from, by, not, have, an,"
    " which, token, block, request, model, user, assistant, system, answer, question, number, water, hello, world"
)
_ENDINGS = "ing,tion,er,ed,ly,est,ment,able"
_RMS_EPS = {"llama": 1e-5, "mistral": 1e-5, "qwen2": 1e-6, "qwen3": 1e-6}


def synthetic_config(family: str = "llama", **overrides: Any) -> ModelConfig:
    """The small configuration of ``family`` with the fields of ``ModelConfig`` in ``overrides`` changed."""
    if family not in FAMILIES:
        raise LoadError(f"family is {family!r}, but must be one of {', '.join(FAMILIES)}")
    config = ModelConfig(
        family=family,
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=_RMS_EPS[family],
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )
    return attrs.evolve(config, **overrides)


@attrs.frozen
class SyntheticSource:
    """Tensors as a function of (seed, name, shape); scaled by the part that each name plays."""

    config: ModelConfig
    seed: int = 0
    logit_std: float = 2.0
    shapes: dict[str, tuple[int, ...]] = attrs.field(init=False)

    @shapes.default
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.config.tensors()

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def load(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        # Uniform numbers are multiples of 2**-24 and only scaled, so they have the same bits on every machine.
        unit = torch.rand(shape, generator=generator, dtype=torch.float32) * 2 - 1
        centre, spread = self._scale(name, shape)
        return unit * (spread * math.sqrt(3)) + centre

    def stored(self, name: str) -> StoredTensor:
        tensor = self.load(name)
        return StoredTensor("F32", tensor.reshape(-1, tensor.shape[-1]).view(torch.uint8))

    def _scale(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Mean and standard deviation. After a norm activations are near 1, so fan_in ** -0.5 keeps them there."""
        if name.endswith("norm.weight"):
            return 1.0, 0.15
        if name.endswith(".bias"):
            return 0.0, 0.3
        fan_in = shape[-1] ** -0.5
        if name == "lm_head.weight" or (name == "model.embed_tokens.weight" and self.config.tie_word_embeddings):
            return 0.0, self.logit_std * fan_in
        if name == "model.embed_tokens.weight":
            return 0.0, 1.0
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            return 0.0, 1.5 * fan_in
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return 0.0, 2.0 * fan_in
        return 0.0, fan_in


def _merges() -> list[tuple[str, str]]:
    """Each word left to right, one character more at a time; earlier words rank first."""
    merges: dict[tuple[str, str], None] = {}
    for word in [*_WORDS.split(","), *_ENDINGS.split(",")]:
        characters = "".join(CHAR_OF_BYTE[byte] for byte in word.encode())
        for end in range(1, len(characters)):
            merges[characters[:end], characters[end]] = None
    return list(merges)


def synthetic_backend(vocab_size: int = 512) -> tokenizers.Tokenizer:
    """Byte-level BPE: three special tokens, 256 bytes, then as many merges as leave a few ids without a token."""
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {char: len(SPECIAL_TOKENS) + byte for byte, char in CHAR_OF_BYTE.items()}
    merges = _merges()[: max(0, vocab_size - 12 - len(vocab))]
    kept = []
    for left, right in merges:
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
        kept.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=kept))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return backend


def synthetic_model(family: str = "llama", *, seed: int = 0, logit_std: float = 2.0, **overrides: Any) -> LoadedModel:
    """A random model of ``family``: 2 layers, hidden 64, 4 heads over 2, vocabulary 512, unless ``overrides`` (fields
    of ``ModelConfig``) say otherwise. A vocabulary too small for the 256 bytes has no tokenizer and no template."""
    config = synthetic_config(family, **overrides)
    tokenizer, template, eos = None, None, frozenset[int]()
    if config.vocab_size >= len(SPECIAL_TOKENS) + 256:
        eos = frozenset({SPECIAL_TOKENS.index("<|im_end|>")})
        bos = SPECIAL_TOKENS.index("<|im_start|>")
        tokenizer = Tokenizer(
            synthetic_backend(config.vocab_size), bos_id=bos, eos_ids=eos, vocab_size=config.vocab_size
        )
        template = ChatTemplate(CHATML, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    return LoadedModel(
        name=f"synthetic-{family}",
        config=config,
        source=SyntheticSource(config, seed, logit_std),
        tokenizer=tokenizer,
        template=template,
        eos_token_ids=eos,
    )
