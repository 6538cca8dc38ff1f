"""The offline convenience: prompts in, answers out, in order; what is wrong is said before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest

from engine import LLM, InvalidRequest, SamplingParams
from engine.build import assemble
from engine.config import ConfigError, EngineConfig
from engine.loading.model import LoadedModel, LoadError
from engine.loading.synthetic import synthetic_model
from engine.text.stops import StopSet

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=9, seed=4, ignore_eos=True)
TEXTS = ["hello world", "the water is", "a number", "answer this question", "model"]
SMALL: dict[str, Any] = {"num_kv_blocks": 12, "block_size": 4, "max_num_seqs": 3, "max_model_len": 48}


def make(model: LoadedModel | None = None, **settings: Any) -> LLM:
    return LLM(engine=assemble(EngineConfig(device="cpu", **SMALL | settings), model or synthetic_model()))


@pytest.fixture(scope="module")
def shared() -> LLM:
    return make()


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """One engine for many tests; each must leave it as it was."""
    yield shared
    assert_clean(shared)


def assert_clean(llm: LLM) -> None:
    engine = llm.engine
    assert not engine.has_work
    assert engine.audit() == []
    assert not any(engine.ledger().references)
    runner: Any = engine.runner
    assert runner.rows_state() == ()


def tokens(outputs: Sequence[Any]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


# Prompts ---------------------------------------------------------------------------------------------------------------


def test_text_and_ids_one_and_many(llm: LLM) -> None:
    """A text, its ids, a list of either: the same answer, in the order of the prompts."""
    tokenizer = llm.engine.model.tokenizer
    assert tokenizer is not None
    together = llm.generate(TEXTS, GREEDY)
    assert len(set(tokens(together))) == len(TEXTS)
    for text, output in zip(TEXTS, together, strict=True):
        ids = tokenizer.encode(text)
        assert output.prompt_token_ids == tuple(ids)
        forms: list[Any] = [text, ids, tuple(ids), [text], [ids]]
        for prompt in forms:
            (alone,) = llm.generate(prompt, GREEDY)
            assert (alone.token_ids, alone.text) == (output.token_ids, output.text)
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 12
    assert llm.engine.counters.preemptions > 0  # twelve blocks are too few for three at once
    mixed: list[Any] = [tokenizer.encode(TEXTS[0]), TEXTS[1]]
    assert tokens(llm.generate(mixed, GREEDY)) == tokens(together)[:2]
    assert llm.generate([], GREEDY) == []


def test_params_for_each_prompt(llm: LLM) -> None:
    each = [attrs.evolve(SAMPLED, seed=seed, max_tokens=3 + seed) for seed in range(len(TEXTS))]
    outputs = llm.generate(TEXTS, each)
    assert [len(output.token_ids) for output in outputs] == [3, 4, 5, 6, 7]
    assert [output.choices[0].seed for output in outputs] == [0, 1, 2, 3, 4]
    for text, params, output in zip(TEXTS, each, outputs, strict=True):
        assert llm.generate(text, params)[0].token_ids == output.token_ids


@pytest.mark.parametrize("given", [0, 1, 3])
def test_as_many_params_as_prompts(llm: LLM, given: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{given} sampling parameters were given for 2 prompts") as refused:
        llm.generate(TEXTS[:2], [GREEDY] * given)
    assert refused.value.param == "params"


@pytest.mark.parametrize(
    ("wrong", "params", "param", "code", "words"),
    [
        ([], GREEDY, "prompt", "empty_prompt", "no tokens"),
        ([3, 512], GREEDY, "prompt", "token_out_of_range", "512"),
        (list(range(40)), GREEDY, "max_tokens", "max_model_len", "52"),
        ("hello", attrs.evolve(GREEDY, logit_bias={999: 1.0}), "logit_bias", "invalid_value", "999"),
    ],
)
def test_an_invalid_prompt_is_named_and_nothing_ran(
    wrong: Any, params: SamplingParams, param: str, code: str, words: str
) -> None:
    llm = make()
    with pytest.raises(InvalidRequest, match=f"^prompt 2: .*{words}") as refused:
        llm.generate(["hello", "water", wrong], [GREEDY, GREEDY, params])
    assert (refused.value.param, refused.value.code) == (param, code)
    assert (llm.engine.counters.submitted, llm.engine.counters.iterations) == (0, 0)
    assert_clean(llm)


def test_a_queue_shorter_than_the_list(llm: LLM) -> None:
    narrow = make(max_waiting=2)
    outputs = narrow.generate(TEXTS * 4, GREEDY)
    assert tokens(outputs) == tokens(llm.generate(TEXTS, GREEDY)) * 4
    assert not narrow.engine.counters.refused
    pairs = narrow.generate(TEXTS, attrs.evolve(SAMPLED, n=2))
    assert [len(output.choices) for output in pairs] == [2] * 5
    assert_clean(narrow)


# Answers ---------------------------------------------------------------------------------------------------------------


def test_several_choices(llm: LLM) -> None:
    (output,) = llm.generate("hello", attrs.evolve(SAMPLED, n=3))
    assert len({choice.token_ids for choice in output.choices}) == 3
    assert (output.text, output.token_ids) == (output.choices[0].text, output.choices[0].token_ids)
    for choice in output.choices:  # each can be asked for again by its seed
        (again,) = llm.generate("hello", attrs.evolve(SAMPLED, seed=choice.seed))
        assert again.choices[0] == attrs.evolve(choice, facts=again.choices[0].facts)


def test_without_a_seed_answers_differ(llm: LLM) -> None:
    outputs = llm.generate(["hello"] * 4, attrs.evolve(SAMPLED, seed=None))
    assert len(set(tokens(outputs))) == 4
    seeded = [make(seed=6).generate(["hello"] * 3, attrs.evolve(SAMPLED, seed=None)) for _ in range(2)]
    assert tokens(seeded[0]) == tokens(seeded[1])
    assert len(set(tokens(seeded[0]))) == 3


def test_stop_strings_and_stop_ids(llm: LLM) -> None:
    (free,) = llm.generate("hello", attrs.evolve(GREEDY, max_tokens=30))
    at = next(i for i, character in enumerate(free.text) if i > 3 and character.isalpha())
    stop = free.text[at : at + 2]
    cut = free.text.index(stop)
    params = attrs.evolve(GREEDY, max_tokens=30, stop=("\0never", stop))
    (stopped,) = llm.generate("hello", params)
    assert (stopped.text, stopped.finish_reason, stopped.choices[0].stop) == (free.text[:cut], "stop", stop)
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert len(stopped.token_ids) < 30
    (kept,) = llm.generate("hello", attrs.evolve(params, include_stop_str_in_output=True))
    assert kept.text == free.text[: cut + len(stop)]
    last = free.token_ids[5]
    (by_id,) = llm.generate("hello", attrs.evolve(GREEDY, max_tokens=30, stop_token_ids=(last,)))
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(last) + 1]
    assert (by_id.finish_reason, by_id.choices[0].stop) == ("stop", last)
    assert free.text.startswith(by_id.text)  # the stop token itself is not part of the text


def test_stop_strings_are_compiled_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all choices of all prompts that stop at the same; a text that stops does not disturb its neighbours."""
    compiled: list[tuple[str, ...]] = []
    monkeypatch.setattr("engine.llm.StopSet", lambda stops: compiled.append(stops) or StopSet(stops))
    sampled = attrs.evolve(SAMPLED, n=3, max_tokens=20)
    free = llm.generate(TEXTS[:2], sampled)
    stop = next(a for a in free[0].text if a.isalpha())
    compiled.clear()
    stopped = llm.generate(
        [*TEXTS[:2], TEXTS[2]], [attrs.evolve(sampled, stop=(stop,))] * 2 + [attrs.evolve(GREEDY, stop=[])]
    )
    assert sorted(compiled) == [(), (stop,)]
    assert [one.text for output in stopped[:2] for one in output.choices] == [
        one.text.partition(stop)[0] for output in free for one in output.choices
    ]
    assert {one.stop for output in stopped for one in output.choices} >= {stop, None}
    compiled.clear()
    assert (
        "".join(llm.stream(TEXTS[0], attrs.evolve(GREEDY, stop=("\0never",)))) == llm.generate(TEXTS[0], GREEDY)[0].text
    )
    assert compiled == [("\0never",), ()]


def test_logprobs_and_digests(llm: LLM) -> None:
    (plain,) = llm.generate("hello", GREEDY)
    (output,) = llm.generate("hello", attrs.evolve(GREEDY, logprobs=3, logits_digest=True))
    assert output.token_ids == plain.token_ids
    for sampled in output.choices[0].sampled:
        assert sampled.logprobs is not None
        assert len(sampled.logprobs.top) == 3
        assert sampled.logprobs.top[0] == (sampled.token, sampled.logprobs.chosen)
        assert sampled.logprobs.rank == 1
        assert sampled.digest is not None
    assert plain.choices[0].sampled[0].logprobs is None
    assert plain.choices[0].sampled[0].digest is None


def test_prompt_logprobs(llm: LLM) -> None:
    prompt = [5, 9, 17, 33]
    asked, plain = llm.generate(
        [prompt, prompt], [SamplingParams(max_tokens=2, prompt_logprobs=2), SamplingParams(max_tokens=2)]
    )
    assert plain.prompt_logprobs is None
    assert asked.prompt_logprobs is not None
    assert len(asked.prompt_logprobs) == len(prompt) - 1
    assert all(one.chosen <= 0 and one.rank >= 1 and len(one.top) == 2 for one in asked.prompt_logprobs)


def test_facts(llm: LLM) -> None:
    outputs = llm.generate(TEXTS, GREEDY)
    facts = [output.choices[0].facts for output in outputs]
    assert all(one is not None for one in facts)
    assert sum(one.preemptions for one in facts if one) > 0
    assert all(one.generated_tokens == 12 and one.replayed_steps > 0 for one in facts if one)


@pytest.mark.parametrize("cache", [True, False])
def test_the_prefix_cache(cache: bool) -> None:
    """What was asked before is found, under the same salt only; the answers are those of an engine without a cache."""
    llm = make(num_kv_blocks=48, enable_prefix_caching=cache)
    ids = [list(range(3, 12)), list(range(40, 45))]
    cold, warm, salted = (llm.generate(ids, GREEDY, salt=salt) for salt in (None, None, "other"))
    assert [output.cached_tokens for output in cold + warm + salted] == [0, 0, *([8, 4] if cache else [0, 0]), 0, 0]
    assert (
        tokens(cold)
        == tokens(warm)
        == tokens(salted)
        == tokens(make(enable_prefix_caching=False).generate(ids, GREEDY))
    )
    assert "".join(llm.stream(ids[0], GREEDY, salt="other")) == cold[0].text
    assert llm.engine.counters.prefix_hit_tokens == (20 if cache else 0)
    assert dict(llm.engine.capacity())["prefix cache"] == ("on" if cache else "off")
    assert_clean(llm)


@pytest.mark.parametrize("salt", ["", "x" * 257, 5])
def test_a_bad_salt_is_refused_before_anything_runs(llm: LLM, salt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt 0: salt .*1 to 256") as refused:
        llm.generate(TEXTS, GREEDY, salt=salt)
    assert refused.value.param == "salt"
    with pytest.raises(InvalidRequest, match=r"^salt "):
        llm.engine.submit([3], GREEDY, salt=salt)


def test_a_failed_step_ends_answers_with_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    expected = tokens(llm.generate(TEXTS, GREEDY))
    runner: Any = llm.engine.runner
    real, calls = runner._decode, iter(range(1000))

    def fail_once(plan: Any) -> Any:
        if next(calls) == 4:
            raise RuntimeError("a broken kernel")
        return real(plan)

    monkeypatch.setattr(runner, "_decode", fail_once)
    outputs = llm.generate(TEXTS, GREEDY)
    failed = [output for output in outputs if output.finish_reason == "error"]
    assert 1 <= len(failed) <= 3
    for output, whole in zip(outputs, expected, strict=True):
        assert output.token_ids == whole[: len(output.token_ids)]
        assert output.finish_reason == "error" or output.token_ids == whole
    assert tokens(llm.generate(TEXTS, GREEDY)) == expected
    assert_clean(llm)


# Streams ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        attrs.evolve(SAMPLED, max_tokens=25),
        attrs.evolve(GREEDY, max_tokens=30, stop=("o", "e")),
        attrs.evolve(GREEDY, max_tokens=30, stop=("er", "mo"), include_stop_str_in_output=True, min_tokens=9),
        attrs.evolve(SAMPLED, max_tokens=20, temperature=8.0, skip_special_tokens=False),
    ],
)
def test_pieces_join_to_the_text(llm: LLM, params: SamplingParams) -> None:
    for text in TEXTS:
        pieces = list(llm.stream(text, params))
        (output,) = llm.generate(text, params)
        assert "".join(pieces) == output.text
        assert all(pieces)
        assert len(pieces) > 1 or params.stop


def test_closing_a_stream_early_frees_everything(llm: LLM) -> None:
    before = llm.engine.counters.finished["abort"]
    stream = llm.stream("hello", attrs.evolve(GREEDY, max_tokens=40))
    assert next(stream)
    assert llm.engine.has_work
    stream.close()  # type: ignore[attr-defined]
    assert_clean(llm)
    assert llm.engine.counters.finished["abort"] == before + 1
    for _ in llm.stream("hello", GREEDY):
        break  # the loop drops the generator, which closes it
    assert_clean(llm)
    assert llm.engine.counters.finished["abort"] == before + 2


def test_a_stream_has_one_answer(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="n is 2, but a stream has one answer"):
        next(llm.stream("hello", attrs.evolve(SAMPLED, n=2)))


# Chat ------------------------------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "the"}, {"role": "user", "content": "hello"}]


def test_chat_is_the_rendered_prompt(llm: LLM) -> None:
    rendered = llm.render(CHAT)
    tokenizer = llm.engine.model.tokenizer
    assert tokenizer is not None
    text = tokenizer.decode(rendered, skip_special_tokens=False)
    assert text == "<|im_start|>system\nthe<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    params = attrs.evolve(GREEDY, max_tokens=4)
    output = llm.chat(CHAT, params)
    assert output.prompt_token_ids == tuple(rendered)
    assert output.token_ids == llm.generate(rendered, params)[0].token_ids


def test_without_a_template_or_a_tokenizer() -> None:
    plain = make(attrs.evolve(synthetic_model(), template=None))
    for call in (plain.render, plain.chat):
        with pytest.raises(InvalidRequest, match="synthetic-llama has no chat template; use generate") as refused:
            call(CHAT)
        assert refused.value.param == "messages"
    assert plain.generate("hello", GREEDY)[0].text
    bare = make(synthetic_model(vocab_size=64))
    with pytest.raises(InvalidRequest, match="synthetic-llama has no tokenizer; pass token ids"):
        bare.generate("hello", GREEDY)
    (output,) = bare.generate([3, 4, 5], GREEDY)
    assert len(output.token_ids) == 12
    assert output.text == ""
    assert_clean(bare)


def test_what_llm_raises_at_start() -> None:
    with pytest.raises(ConfigError, match="block_size is 0"):
        LLM("whatever", block_size=0)
    with pytest.raises(LoadError, match="/nope"):
        LLM("/nope")
    with pytest.raises(TypeError, match="block_sizes"):
        LLM("whatever", block_sizes=4)
