"""What a caller may ask for, checked once, before anything is queued.

Sources of the meanings: OpenAI's API reference for temperature, top_p, penalties, logit_bias, logprobs, stop and seed;
vLLM's for top_k (0 or -1 is off), min_p, repetition_penalty, min_tokens, stop_token_ids and ignore_eos.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

MAX_LOGPROBS = 20
MAX_CHOICES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 500
MAX_LOGIT_BIAS = 1024
SEED_RANGE = (-(2**63), 2**63 - 1)
MAX_SALT_CHARS = 256


class InvalidRequest(ValueError):
    """A request that can never be served. ``param`` names the field, ``code`` is a stable word for programs."""

    def __init__(self, param: str, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def _shown(value: object) -> str:
    """``value`` in a message: short, whatever it is. Python refuses to spell out very large integers."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "an integer of more than 30 digits"
    return f"{value!r:.40}"


def check_salt(salt: str | None) -> None:
    """A salt separates prefix-cache entries (rule 11). Raises ``InvalidRequest`` unless it is absent or 1 to 256 characters."""
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_CHARS):
        what = f"has {len(salt)} characters" if isinstance(salt, str) else f"is {_shown(salt)}"
        raise InvalidRequest("salt", f"salt {what}, but must be a text of 1 to {MAX_SALT_CHARS} characters")


def _number(params: SamplingParams, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    value = getattr(params, name)
    real = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high  # NaN is not
    if not real or (open_low and value == low):
        bound = "(" if open_low else "["
        raise InvalidRequest(name, f"{name} is {_shown(value)}, but must be a number in {bound}{low}, {high}]")


def _integer(params: SamplingParams, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(name, f"{name} is {_shown(value)}, but must be an integer in [{low}, {high}]")


def _stops(stop: str | Iterable[str]) -> tuple[str, ...]:
    """A text alone is one stop string."""
    return (stop,) if isinstance(stop, str) else tuple(stop)


@attrs.frozen
class SamplingParams:
    """How one request is sampled and when it stops. Raises ``InvalidRequest`` on a value outside its range.

    ``temperature`` 0 is greedy. ``logprobs`` k reports the chosen token and the k most likely ones from the raw
    distribution (before penalties, bias, temperature and filters); ``None`` reports nothing. ``prompt_logprobs`` k
    reports the same for every prompt token but the first; such a request takes no prefix hits (rule 11).
    ``logits_digest`` reports a digest of the raw fp32 logits of every sampled row: equal digests mean equal bytes.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)
    min_tokens: int = 0
    stop: tuple[str, ...] = attrs.field(default=(), converter=_stops)
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_digest: bool = False

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer(self, "max_tokens", 1, 2**31 - 1)
        _number(self, "temperature", 0.0, 100.0)
        _number(self, "top_p", 0.0, 1.0, open_low=True)
        _integer(self, "top_k", -1, 2**31 - 1)
        _number(self, "min_p", 0.0, 1.0)
        _number(self, "repetition_penalty", 0.0, 100.0, open_low=True)
        _number(self, "frequency_penalty", -2.0, 2.0)
        _number(self, "presence_penalty", -2.0, 2.0)
        _integer(self, "min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}")
        if self.seed is not None:
            _integer(self, "seed", *SEED_RANGE)
        _integer(self, "n", 1, MAX_CHOICES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(self, name, 0, MAX_LOGPROBS)
        self._check_stops()
        self._check_bias()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                "stop", f"stop has {len(self.stop)} strings, but at most {MAX_STOP_STRINGS} are allowed"
            )
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest("stop", f"each stop string must have 1 to {MAX_STOP_CHARS} characters")
        for token in self.stop_token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < 2**31:
                raise InvalidRequest("stop_token_ids", "each of stop_token_ids must be a token id, an integer from 0")

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "logit_bias", f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS} are allowed"
            )
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise InvalidRequest("logit_bias", f"logit_bias key {_shown(token)} is not a token id")
            good = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
            if not good:
                raise InvalidRequest(
                    "logit_bias", f"logit_bias for token {_shown(token)} is {_shown(bias)}, but must be in [-100, 100]"
                )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Token ids in ``logit_bias`` and ``stop_token_ids`` must lie below the model's vocabulary size."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if token >= vocab_size:
                    raise InvalidRequest(
                        name, f"{name} names token {_shown(token)}, but the model's vocabulary has {vocab_size}"
                    )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@attrs.frozen
class SamplingSpec:
    """What travels with a seat to compute: the parameters, the seed that was settled at submit, and what min_tokens masks.

    ``masked`` are the end-of-sequence and stop token ids whose logits are minus infinity while fewer than
    ``params.min_tokens`` tokens have been generated.
    """

    params: SamplingParams
    seed: int
    masked: tuple[int, ...] = ()
