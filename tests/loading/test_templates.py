"""Chat templates: what ``transformers`` renders we render, what a template refuses is a failure with its own words, and
what a hostile template tries is stopped before it costs anything."""

from __future__ import annotations

import time
import tracemalloc
from datetime import UTC, datetime
from typing import Any

import pytest

from engine.loading import LoadError
from engine.loading.synthetic import CHATML
from engine.loading.template import ChatTemplate, TemplateFailure

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Hi \u00e9 \U0001f389"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "\u00e9"]}}}],
    },
    {"role": "tool", "content": "42"},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
TEMPLATES = {
    "chatml": "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}<|im_end|>\n{% endfor -%}",
    "blocks on their own lines": "{% for m in messages %}\n    {% if m.content is string %}\n{{ m.content | trim }}\n"
    "    {% else %}\n  other\n    {% endif %}\n{% endfor %}\n",
    "tojson": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}{{ tools | tojson }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "break and continue": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}"
    "{% if loop.first %}{% continue %}{% endif %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}",
    "loop with a test": "{% for m in messages if m.role == 'user' %}{{ loop.index0 }}{{ m.role }}{% endfor %}"
    "{% for m in [] %}x{% else %}none{% endfor %}",
    "slices": "{% for m in messages[1:][::-1] %}{{ m['role'] }}{% endfor %}{{ messages[-1].content[0]['text'] }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    "macro": "{% macro show(m, n=2) %}[{{ m.role * n }}]{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "string methods": "{{ 'a,b'.split(',') | join('-') }}{{ 'x'.upper() }}{{ ' y '.strip() }}"
    "{{ 'ab'.replace('a', 'c') }}{{ 'abc'.startswith('a') }}{{ 'q' ~ 1 ~ none }}"
    "{{ '%s=%d' % ('k', 3) }}{{ '%s' | format('v') }}{{ '{:>4}|{a}'.format(1, a=2) }}",
    "undefined": "{{ nothing }}{{ messages[0].nothing }}{% if nothing is defined %}x{% endif %}{{ nothing or 'd' }}",
    "tokens": "{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}{{ documents is none }}",
    "filters": "{{ messages | map(attribute='role') | list | length }}{{ messages | selectattr('role', 'eq', 'user') "
    "| list | length }}{{ {'b': 1, 'a': 2} | dictsort }}{{ {'a': 1}.items() | list }}{{ [3, 1] | sort | first }}",
    "block set": "{% set x %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{{ x | length }}{{ x }}",
    "recursion": "{% for m in messages recursive %}{{ m.role }}{% if m.k %}{{ loop(m.k) }}{% endif %}{% endfor %}",
    "arithmetic": "{{ 7 // 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ range(5) | list }}{{ [1] + [2] }}"
    "{{ (1, 2) + (3,) }}{{ 2 * 3.5 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(TEMPLATES[name], tokens).render(CHAT, tools=TOOLS)
    theirs = render_jinja_template(
        [CHAT], tools=TOOLS, chat_template=TEMPLATES[name], add_generation_prompt=True, **tokens
    )
    assert ours == theirs[0][0]


def test_chatml_by_hand() -> None:
    template = ChatTemplate(CHATML)
    chat = [{"role": "user", "content": "Hi"}]
    assert template.render(chat) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(chat, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_extra_arguments_reach_the_template_and_may_replace_tokens() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render([], enable_thinking=False) == "False<s>"
    assert template.render([], enable_thinking=True, bos_token="") == "True"


def test_the_clock_is_a_parameter() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", clock=lambda: datetime(2024, 7, 26, tzinfo=UTC))
    assert template.render([]) == "26 Jul 2024"


REFUSALS = {
    "its own words": ("{{ raise_exception('System role not supported') }}", "System role not supported"),
    "content is not a string": ("{{ 'x' + messages[2].content }}", "TypeError"),
    "undefined used": ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
    "key of the wrong type": ("{{ messages['a'].b }}", "'a'"),
    "division by zero": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "not iterable": ("{% for x in 5 %}{% endfor %}", "not iterable"),
    "unknown test at run time": ("{{ messages | map('nope') | list }}", "nope"),
    "macro without end": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recurses"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_template_that_fails_says_why(name: str) -> None:
    source, words = REFUSALS[name]
    with pytest.raises(TemplateFailure) as caught:
        ChatTemplate(source).render(CHAT)
    assert words in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% unknown %}", "{{ x | nofilter }}", "{% for a in b %}"])
def test_a_syntax_error_is_found_at_load(source: str) -> None:
    with pytest.raises(LoadError, match=r"here \(default\): line 2"):
        ChatTemplate("\n" + source, where="here")


ATTACKS = {
    "globals of a global": "{{ raise_exception.__globals__ }}",
    "globals of a method": "{{ namespace.__init__.__globals__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "subclasses by item": "{{ ''['__class__'] }}",
    "by filter": "{{ '' | attr('__class__') }}",
    "by map": "{{ [''] | map(attribute='__class__') | list | first }}",
    "in format": "{{ '{0.__class__}'.format('') }}",
    "in format_map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "through the template": "{{ self.__init__.__globals__ }}",
    "through the cycler": "{{ cycler.__init__.__globals__.os }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "change the caller's list": "{{ messages.append(1) }}",
    "change the caller's object": "{{ messages[0].update({'role': 'x'}) }}",
    "clear": "{{ messages.clear() }}",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_the_sandbox_holds(name: str) -> None:
    chat: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    try:
        rendered = ChatTemplate(ATTACKS[name]).render(chat)
    except TemplateFailure:
        rendered = ""
    assert rendered == ""
    assert chat == [{"role": "user", "content": "x"}]


BOMBS = {
    "long string": "{{ 'x' * 1000000000 }}",
    "long string, folded": "{% set x = 'x' * 10 ** 12 %}",
    "long list": "{{ [0] * 1000000000 }}",
    "large power": "{{ 9 ** 9 ** 9 }}",
    "large power of a float": "{{ 2 ** 1000000 }}",
    "wide range": "{% for i in range(1000000000) %}{% endfor %}",
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested ranges with a test": "{% for i in range(9999) %}"
    "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "nested loops over a string": "{% for a in 'x' * 9999 %}{% for b in 'x' * 9999 %}{% endfor %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling a list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling by set": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "doubling by macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='x') %}"
    "{% for i in range(60) %}{% set n.x = d(n.x) %}{% endfor %}",
    "squaring by replace": "{% set x = 'x' * 1000000 %}{{ x.replace('x', x) }}",
    "squaring by the replace filter": "{% set x = 'x' * 1000000 %}{{ x | replace('x', x) }}",
    "squaring by join": "{% set x = 'x' * 1000000 %}{{ x.join(x) }}",
    "squaring by the join filter": "{% set x = 'x' * 1000000 %}{{ x | join(x) }}",
    "padding": "{{ 'x'.ljust(1000000000) }}",
    "padding by keyword": "{{ 'x' | center(width=1000000000) }}",
    "padding by format": "{{ '{:1000000000}'.format(1) }}",
    "padding by format, nested": "{{ '{:{}}'.format(1, 1000000000) }}",
    "padding by %": "{{ '%1000000000d' % 1 }}",
    "padding by % with a star": "{{ '%*d' % (1000000000, 1) }}",
    "padding by the format filter": "{{ '%1000000000d' | format(1) }}",
    "zfill": "{{ '1'.zfill(1000000000) }}",
    "indent": "{{ 'a\nb' | indent(1000000000) }}",
    "long output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "lorem ipsum": "{{ lipsum(1000000) }}",
    "macro calls": "{% macro a() %}{% endmacro %}{% for i in range(99999) %}{% for j in range(99) %}"
    "{{ a() }}{% endfor %}{% endfor %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_unbounded_work_is_stopped(name: str) -> None:
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(TemplateFailure):
            ChatTemplate(BOMBS[name], max_operations=100_000).render([])
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 5


def test_the_default_limit_stops_within_seconds() -> None:
    started = time.process_time()
    with pytest.raises(TemplateFailure, match="more than 1000000 operations"):
        ChatTemplate(BOMBS["macro calls"]).render([])
    assert time.process_time() - started < 30


def test_a_long_honest_chat_is_far_from_the_limits() -> None:
    chat = [{"role": "user", "content": "word " * 200} for _ in range(5000)]
    assert len(ChatTemplate(CHATML).render(chat)) > 5_000_000


def test_a_failure_leaves_nothing_behind() -> None:
    template = ChatTemplate(
        "{% for i in range(n) %}{% for j in range(99999) %}{% endfor %}{% endfor %}ok", max_operations=200_000
    )
    with pytest.raises(TemplateFailure):
        template.render([], n=99999)
    assert template.render([], n=1) == "ok"


def test_templates_that_are_too_long_or_too_deep_are_load_errors() -> None:
    with pytest.raises(LoadError, match="characters"):
        ChatTemplate("x" * 1_100_000)
    with pytest.raises(LoadError, match="compiled"):
        ChatTemplate("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}")
