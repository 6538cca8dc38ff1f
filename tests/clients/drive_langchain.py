"""langchain-openai against the server at argv[1]; run by .clients/python, which has the library, and not by pytest.

Prints ``{"held": N}`` when every check held, else ends with the first that did not. What an answer should say is asked
for with the standard library, so two clients have to agree about it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from typing import Any

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.checks import Checks

URL, MODEL = sys.argv[1:3]
COMMON: dict[str, Any] = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}


def ask(path: str, **body: Any) -> Any:
    """The choice that the server itself gives."""
    data = json.dumps({"model": MODEL, "seed": 4, "temperature": 0.7, **body}).encode()
    request = urllib.request.Request(f"{URL}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]


def chat(checks: Checks) -> None:
    model = ChatOpenAI(**COMMON, seed=4, temperature=0.7, max_completion_tokens=12, stream_usage=True)
    messages = [SystemMessage("a model"), HumanMessage("hello"), AIMessage("world"), HumanMessage("water")]
    roles = ("system", "user", "assistant", "user")
    plain = [{"role": role, "content": one.content} for role, one in zip(roles, messages, strict=True)]
    wanted = ask("/v1/chat/completions", messages=plain, max_completion_tokens=12)
    answer = model.invoke(messages)
    checks.equal("content", answer.content, wanted["message"]["content"])
    checks.equal("finish", answer.response_metadata["finish_reason"], wanted["finish_reason"])
    checks.equal("model", answer.response_metadata["model_name"], MODEL)
    assert answer.usage_metadata is not None
    checks.equal("output tokens", answer.usage_metadata["output_tokens"], 12)
    whole: Any = None
    for chunk in model.stream(messages):
        whole = chunk if whole is None else whole + chunk
    checks.equal("streamed", whole.content, answer.content)
    checks.equal("streamed usage", whole.usage_metadata["total_tokens"], answer.usage_metadata["total_tokens"])
    batch = model.batch([messages, "hello", messages])
    checks.equal("batch", [one.content == answer.content for one in batch], [True, False, True])
    logged = model.bind(logprobs=True, top_logprobs=2).invoke("hello")
    entries = logged.response_metadata["logprobs"]["content"]
    checks.equal("logprobs", [len(entry["top_logprobs"]) for entry in entries], [2] * 12)
    stop = str(answer.content)[4:7]
    cut = model.invoke(messages, stop=[stop])
    checks.equal("stop", cut.content, str(answer.content).partition(stop)[0])
    several = model.generate([messages], n=2).generations[0]
    checks.equal("n", (len(several), several[0].text), (2, answer.content))


async def together(checks: Checks) -> None:
    model = ChatOpenAI(**COMMON, seed=4, temperature=0.7, max_completion_tokens=12)
    answers = await asyncio.gather(*(model.ainvoke(f"hello {'water ' * k}") for k in range(6)))
    for k, answer in enumerate(answers):
        text = "".join([str(chunk.content) async for chunk in model.astream(f"hello {'water ' * k}")])
        checks.equal("astream", text, answer.content)


def completions(checks: Checks) -> None:
    model = OpenAI(**COMMON, seed=4, temperature=0.7, max_tokens=12)
    wanted = ask("/v1/completions", prompt="hello world", max_tokens=12)
    checks.equal("text", model.invoke("hello world"), wanted["text"])
    checks.equal("streamed", "".join(model.stream("hello world")), wanted["text"])
    result = model.generate(["hello world", "water"])
    checks.equal("two prompts", (len(result.generations), result.generations[0][0].text), (2, wanted["text"]))


def refusals(checks: Checks) -> None:
    def weather(city: str) -> str:
        """The weather in a city."""
        return city

    for model, wanted in (
        (ChatOpenAI(**COMMON).bind_tools([weather]), openai.BadRequestError),
        (ChatOpenAI(**{**COMMON, "model": "gpt-4"}), openai.NotFoundError),
    ):
        try:
            model.invoke("hello")
        except openai.APIStatusError as error:
            checks.true(f"{wanted.__name__}, not {type(error).__name__}", isinstance(error, wanted))
        else:
            raise AssertionError(f"no {wanted.__name__}")


def main() -> None:
    checks = Checks()
    chat(checks)
    asyncio.run(together(checks))
    completions(checks)
    refusals(checks)
    checks.report()


if __name__ == "__main__":
    main()
