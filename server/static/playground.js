// Asks and shows what comes back while it comes. Each answer keeps the exact body that was sent, so that it can be asked for
// again under the seed that the server told: the bytes must be the same, and the page says whether they are.
import { at, brief, make } from "./dom.js";
import { events } from "./stream.js";

const form = at("ask"), field = (name) => form.elements[name];
let conversation = [];  // of the chat, as it is sent
let running = null;     // the AbortController of the answer on its way

export const mode = () => form.elements.mode.value;

export function setModel(hasTemplate) {
  at("mode-hint").hidden = hasTemplate;
  for (const radio of form.elements.mode) {
    if (radio.value === "chat") radio.disabled = !hasTemplate;
    radio.checked = radio.value === (hasTemplate ? "chat" : "completion");
  }
  showMode();
}

// A first question is to fit: what the page proposes is at most half of what one request can hold.
export function setMost(tokens) {
  const limit = field("max_tokens"), half = Math.max(1, Math.floor(tokens / 2));
  if (limit.value === limit.defaultValue && Number(limit.value) > half) limit.value = limit.defaultValue = half;
}

function showMode() { at("system-field").hidden = mode() !== "chat"; }

const number = (name) => (field(name).value.trim() === "" ? undefined : Number(field(name).value));

function wishes() {
  const stop = field("stop").value.split("\n").filter((line) => line !== "");
  return {
    temperature: number("temperature"), top_p: number("top_p"), max_tokens: number("max_tokens"), n: number("n"),
    stop: stop.length ? stop : undefined, seed: field("seed").value.trim() || undefined,
  };
}

// JSON whose seed is an integer with all its digits.
function written({ seed, ...body }) {
  const text = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
  return seed === undefined ? text : `${text.slice(0, -1)},"seed":${BigInt(seed)}}`;
}

function turn(kind, who) {
  at("empty")?.remove();
  const element = make("article", `turn ${kind}`);
  element.append(make("div", "who", who));
  at("transcript").append(element);
  return element;
}

function follow() {
  const box = at("transcript");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 80) box.scrollTop = box.scrollHeight;
}

// One request and its answers. ``again``: the earlier answer that this one repeats.
class Asked {
  constructor(request, again = null) {
    this.request = request;
    this.again = again;
    this.choices = [];
    this.usage = null;
    this.firstAt = null;
    this.element = turn("assistant", again ? "the same seed again" : request.path.includes("chat") ? "model" : "continued");
    this.answers = make("div", "answers");
    this.element.append(this.answers);
  }

  choice(index) {
    while (this.choices.length <= index) {
      const box = make("div"), text = make("div", "text open"), meta = make("div", "meta");
      if (this.request.body.prompt !== undefined) {
        const given = make("span", "given", this.request.body.prompt);
        text.append(given);
      }
      const node = document.createTextNode("");
      text.append(node);
      box.append(text, meta);
      this.answers.append(box);
      this.choices.push({ text, node, meta, said: "", end: null, seed: null });
    }
    return this.choices[index];
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    for (const given of event.choices) {
      const choice = this.choice(given.index);
      const piece = given.delta ? given.delta.content || "" : given.text || "";
      if (piece) {
        this.firstAt ??= performance.now();
        choice.said += piece;
        choice.node.appendData(piece);
      }
      if (given.finish_reason) {
        choice.end = given.finish_reason;
        choice.seed = given.seed ?? null;
        choice.text.classList.remove("open");
      }
    }
    follow();
  }

  async run() {
    const controller = new AbortController();
    const began = performance.now();
    setRunning(controller);
    try {
      const whole = await events(this.request.path, (event) => this.take(event), { body: written(this.request.body), signal: controller.signal });
      if (!whole) throw new Error("the connection ended before the answer did");
    } catch (error) {
      if (controller.signal.aborted) for (const choice of this.choices) choice.end ??= "stopped here";
      else this.element.append(make("p", "alarm", error.message));
    } finally {
      setRunning(null);
      this.close(performance.now() - began, began);
    }
  }

  close(took, began) {
    for (const choice of this.choices) {
      choice.text.classList.remove("open");
      const parts = [choice.end ? `finish: ${choice.end}` : "cut off"];
      if (choice.seed !== null) parts.push(`seed ${choice.seed}`);
      choice.meta.textContent = parts.join(" · ");
    }
    const parts = [];
    if (this.usage) {
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      parts.push(`${this.usage.prompt_tokens} prompt tokens${cached ? ` (${cached} from the cache)` : ""}`, `${this.usage.completion_tokens} answered`);
      parts.push(`${brief(this.usage.completion_tokens / (took / 1000))} tokens a second`);
    }
    if (this.firstAt !== null) parts.push(`first text after ${brief(this.firstAt - began)} ms`);
    if (parts.length) this.element.append(make("div", "meta usage", parts.join(" · ")));
    const seeded = this.choices.length && this.choices.every((choice) => choice.seed !== null);
    if (this.again && this.choices.length) {
      const same = this.again.choices.every((choice, index) => choice.said === this.choices[index]?.said);
      const ended = this.choices.every((choice) => choice.end && choice.end !== "stopped here");
      if (ended) this.element.append(make("div", `meta ${same ? "same" : "other"}`, same ? "✓ the same text, to the byte" : "✗ another text"));
    }
    if (seeded) {
      const button = make("button", "again", "Same seed again");
      button.type = "button";
      button.addEventListener("click", () => { if (!running) repeat(this); });
      this.element.append(button);
    }
    follow();
  }
}

function repeat(asked) {
  // With n = 1 the told seed is the request's. With more, each choice's seed comes from the request's, so that must be fixed.
  const seed = asked.request.body.seed ?? asked.choices[0].seed;
  return new Asked({ ...asked.request, body: { ...asked.request.body, seed } }, asked).run();
}

function setRunning(controller) {
  running = controller;
  at("send").disabled = controller !== null;
  at("stop-button").disabled = controller === null;
}

async function ask() {
  const prompt = field("prompt").value;
  if (running || prompt === "") return;
  field("prompt").value = "";
  if (mode() === "completion") {
    await new Asked({ path: "v1/completions", body: { prompt, ...wishes() } }).run();
    return;
  }
  const user = turn("user", "you");
  user.append(make("div", "text", prompt));
  at("transcript").scrollTop = at("transcript").scrollHeight;
  const system = field("system").value;
  const talk = [...conversation, { role: "user", content: prompt }];
  const messages = system ? [{ role: "system", content: system }, ...talk] : talk;
  const asked = new Asked({ path: "v1/chat/completions", body: { messages, ...wishes() } });
  await asked.run();
  // What was cut off is part of the conversation too; a question that was refused is not.
  if (asked.choices.length) conversation = [...talk, { role: "assistant", content: asked.choices[0].said }];
}

export function start() {
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  field("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  for (const radio of form.elements.mode) radio.addEventListener("change", showMode);
  at("stop-button").addEventListener("click", () => running?.abort());
  at("clear").addEventListener("click", () => {
    running?.abort();
    conversation = [];
    at("transcript").replaceChildren(make("p", "soft", "Nothing was asked yet."));
    at("transcript").firstChild.id = "empty";
    field("prompt").focus();
  });
}
