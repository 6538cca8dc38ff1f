// openai for Node against the server at argv[2] with the model argv[3]; prints {"held": N} when every check held.
// Run in .clients/node, where ci/clients.sh has put the library.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000});
const messages = [{role: "user", content: "hello world"}];
const seeded = {model, seed: 4};
let held = 0;
const equal = (what, seen, wanted) => { assert.deepStrictEqual(seen, wanted, what); held++; };
const ok = (what, seen) => { assert.ok(seen, what); held++; };

async function raises(kind, call, wanted) {
  try { await call(); } catch (error) {
    ok(`${kind.name}, not ${error.constructor.name}`, error instanceof kind);
    for (const [name, value] of Object.entries(wanted)) equal(name, error[name], value);
    return;
  }
  assert.fail(`no ${kind.name}`);
}

const names = [];
for await (const one of client.models.list()) names.push(one.id);
equal("models", names, [model]);
equal("model", (await client.models.retrieve(model)).id, model);

// Chat: plain, streamed, through the helper that accumulates.
const chat = {...seeded, messages, max_completion_tokens: 12};
const plain = await client.chat.completions.create(chat);
equal("object", plain.object, "chat.completion");
equal("role", plain.choices[0].message.role, "assistant");
equal("usage", plain.usage.total_tokens, plain.usage.prompt_tokens + 12);
const chunks = [];
const stream = await client.chat.completions.create({...chat, stream: true, stream_options: {include_usage: true}});
for await (const chunk of stream) chunks.push(chunk);
const said = chunks.filter((chunk) => chunk.choices.length);
equal("streamed", said.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), plain.choices[0].message.content);
equal("chunk object", new Set(chunks.map((chunk) => chunk.object)), new Set(["chat.completion.chunk"]));
equal("one id", new Set(chunks.map((chunk) => chunk.id)).size, 1);
equal("one finish", said.map((chunk) => chunk.choices[0].finish_reason).filter(Boolean), ["length"]);
equal("usage comes last", chunks.at(-1).usage.total_tokens, plain.usage.total_tokens);
const runner = client.chat.completions.stream(chat);
let pieces = "";
runner.on("content", (piece) => { pieces += piece; });
equal("helper", (await runner.finalChatCompletion()).choices[0].message.content, plain.choices[0].message.content);
equal("helper's events", pieces, plain.choices[0].message.content);

const table = await client.chat.completions.create({...chat, logprobs: true, top_logprobs: 3, n: 2});
equal("choices", table.choices.length, 2);
equal("logprobs", table.choices[0].logprobs.content.map((entry) => entry.top_logprobs.length), Array(12).fill(3));

// Completions: several prompts, streamed, stop strings.
const several = await client.completions.create({...seeded, prompt: ["hello", "water"], max_tokens: 7, n: 2});
equal("indices", several.choices.map((choice) => choice.index), [0, 1, 2, 3]);
let text = "";
for await (const chunk of await client.completions.create({...seeded, prompt: "hello", max_tokens: 7, stream: true})) {
  text += chunk.choices[0].text;
}
equal("streamed text", text, several.choices[0].text);
const free = (await client.completions.create({...seeded, prompt: "hello", max_tokens: 40})).choices[0].text;
const stop = free.slice(8, 11);
const cut = (await client.completions.create({...seeded, prompt: "hello", max_tokens: 40, stop: [stop]})).choices[0];
equal("stop", [cut.text, cut.finish_reason], [free.slice(0, free.indexOf(stop)), "stop"]);

await raises(OpenAI.NotFoundError, () => client.completions.create({model: "gpt-4", prompt: "x"}), {code: "model_not_found"});
for (const streamed of [false, true]) {
  await raises(
    OpenAI.BadRequestError,
    () => client.completions.create({model, prompt: "x", temperature: -1, stream: streamed}),
    {param: "temperature", status: 400, type: "invalid_request_error"},
  );
}

// Leaving early: by break, and by abort() while the answer is on its way.
const endless = {...seeded, prompt: "hello", max_tokens: 400, ignore_eos: true};
for await (const chunk of await client.completions.create({...endless, stream: true})) {
  equal("first chunk", chunk.object, "text_completion");
  break;
}
const controller = new AbortController();
setTimeout(() => controller.abort(), 20);
const left = {...endless, max_tokens: 480};
await raises(OpenAI.APIUserAbortError, async () => {
  for (;;) await client.completions.create(left, {signal: controller.signal});
}, {});

console.log(JSON.stringify({held}));
