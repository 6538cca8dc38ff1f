"""The door: what can never be served is refused at submit, with the number that was wrong (rule 1).

What passes the door is sure to finish: alone in the pool it always fits, and preemption can always make it alone.
"""

from __future__ import annotations

from engine.control.limits import Limits
from engine.control.request import Refusal, Submission


def most_tokens(limits: Limits, prompt_len: int) -> int:
    """The most tokens that a prompt of this length may generate; below 1 when it cannot be served at all.

    The last sampled token never needs K/V, hence the one more than the pool holds.
    """
    return min(limits.max_model_len - prompt_len, limits.num_blocks * limits.block_size + 1 - prompt_len)


def check_door(limits: Limits, submission: Submission, n: int, num_waiting: int) -> int:
    """Returns ``max_tokens``, settled if it was absent. Raises ``Refusal`` with the first reason that applies."""
    prompt = submission.prompt
    if not prompt:
        raise Refusal("empty_prompt", "the prompt has no tokens, but at least 1 is needed")
    if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < limits.vocab_size)
        raise Refusal(
            "token_out_of_range", f"the prompt holds token id {wrong}, but ids must be in 0..{limits.vocab_size - 1}"
        )
    max_tokens = submission.max_tokens
    if max_tokens is None:
        max_tokens = max(1, most_tokens(limits, len(prompt)))
    if max_tokens < 1:
        raise Refusal("max_tokens", f"max_tokens is {max_tokens}, but must be at least 1")
    total = len(prompt) + max_tokens
    if total > limits.max_model_len:
        raise Refusal(
            "max_model_len",
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, together {total}, "
            f"but the model's context holds {limits.max_model_len}",
        )
    need = limits.blocks_for(total - 1)
    if need > limits.num_blocks:
        raise Refusal(
            "pool",
            f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens}, which needs {need} KV blocks of "
            f"{limits.block_size}, but the pool has {limits.num_blocks}",
        )
    if num_waiting + n > limits.max_waiting:
        raise Refusal("queue_full", f"{num_waiting} requests are waiting, and the queue holds {limits.max_waiting}")
    return max_tokens
