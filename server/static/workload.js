// A workload/1 file as it stands, without an engine: who asks for what and when, by the file's own numbers. What an engine
// decides is not in the file; the commands at the end run it.
import { at, COLORS, fitted, make, style } from "./dom.js";
import { parse } from "./stream.js";

const DRAWN = 2000, LISTED = 200, KINDS = ["submit", "abort", "fail_step", "shutdown"];
const whole = (value) => Number.isInteger(value);

// The file's value, with where each event falls. Throws an Error that names the place; the replay checks everything else.
export function understand(text) {
  let file;
  try { file = parse(text); } catch (error) { throw new Error(`this is not JSON: ${error.message}`); }
  if (file === null || typeof file !== "object" || Array.isArray(file)) throw new Error("a workload is a JSON object, but this is something else");
  if (file.format !== "workload/1") throw new Error(`format is ${JSON.stringify(file.format)}, but must be "workload/1"`);
  const shape = { budget: 2048, max_model_len: 64, ...file.shape };
  for (const name of ["blocks", "block_size", "rows", "budget", "max_model_len"]) if (!whole(shape[name]) || shape[name] < 1) throw new Error(`shape.${name} is ${JSON.stringify(shape[name])}, but must be an integer of at least 1`);
  if (!Array.isArray(file.events)) throw new Error("events must be a list");
  const events = [], requests = [], owners = [];  // owners: of every request number, its place in ``requests``
  let now = 0, end = 1;
  file.events.forEach((event, index) => {
    const kinds = KINDS.filter((kind) => event !== null && typeof event === "object" && kind in event);
    if (kinds.length !== 1) throw new Error(`event ${index + 1} must have one of ${KINDS.join(", ")}`);
    if (!whole(event.wait ?? 0) || event.wait < 0) throw new Error(`event ${index + 1}: wait is ${JSON.stringify(event.wait)}, but must be an integer of at least 0`);
    now += event.wait ?? 0;
    const [kind] = kinds, told = { kind, at: now, event: event[kind], number: index + 1 };
    if (kind === "submit") {
      Object.assign(told, sizes(event.submit, shape, index + 1), { lane: requests.length, aborted: null });
      for (let choice = 0; choice < (event.submit.n ?? 1); choice++) owners.push(requests.length);
      requests.push(told);
      end = Math.max(end, now + told.lasts);
    } else if (kind === "abort") {
      const of = owners.length ? ((event.abort % owners.length) + owners.length) % owners.length : null;
      told.request = of;
      told.target = of === null ? null : owners[of];
    }
    events.push(told);
    end = Math.max(end, now + 1);
  });
  return { ...file, shape, events, requests, end };
}

function sizes(submit, shape, number) {
  const pieces = submit?.prompt;
  if (!Array.isArray(pieces) || pieces.some((piece) => !Array.isArray(piece) || typeof piece[0] !== "string" || !whole(piece[1]) || piece[1] < 0)) throw new Error(`event ${number}: submit.prompt must be a list of [stream, length]`);
  const prompt = pieces.reduce((sum, [, length]) => sum + length, 0);
  const most = Math.max(0, Math.min(shape.max_model_len - prompt, shape.blocks * shape.block_size - prompt + 1));
  let answer = submit.max_tokens ?? most;
  if (whole(submit.stop_at)) answer = Math.min(answer, Math.max(submit.stop_at, submit.min_tokens ?? 0));
  return { prompt, answer, lasts: Math.max(1, Math.ceil(prompt / shape.budget)) + Math.max(0, answer - 1) };
}

let shown = null, listed = 0;

function draw() {
  const canvas = at("timeline-canvas"), width = at("timeline").clientWidth;
  if (!shown || !width) return;
  const requests = shown.requests.slice(0, DRAWN), lane = requests.length <= 400 ? 14 : 5, head = 18;
  const left = Math.min(180, width / 4), longest = Math.max(1, ...requests.map((request) => request.prompt));
  const height = head + requests.length * lane + 8;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = fitted(canvas, width, height);
  const x = (iteration) => left + 12 + (iteration / shown.end) * (width - left - 24), y = (index) => head + index * lane;
  const streams = new Map();
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = style("--soft");
  context.fillText("prompt", 4, 12);
  const step = niceStep(shown.end / Math.max(2, (width - left) / 90));
  for (let mark = 0; mark <= shown.end; mark += step) {
    context.fillStyle = style("--soft");
    context.fillText(mark.toLocaleString("en"), x(mark) + 3, 12);
    context.fillStyle = style("--line");
    context.fillRect(x(mark), 0, 1, height);
  }
  requests.forEach((request, index) => {
    let from = 4;
    for (const [stream, length] of request.event.prompt) {
      if (!streams.has(stream)) streams.set(stream, streams.size);
      const across = (length / longest) * (left - 8);
      context.fillStyle = COLORS[streams.get(stream) % 8];
      context.fillRect(from, y(index) + 1, Math.max(1, across - 1), lane - 3);
      from += across;
    }
    const wide = Math.max(2, x(request.at + request.lasts) - x(request.at));
    context.fillStyle = style("--panel");
    context.strokeStyle = style("--soft");
    context.fillRect(x(request.at), y(index) + 1, wide, lane - 3);
    context.strokeRect(x(request.at) + 0.5, y(index) + 1.5, Math.max(1, wide - 1), lane - 4);
  });
  context.fillStyle = context.strokeStyle = style("--alarm");
  for (const event of shown.events) {
    if (event.kind === "abort" && event.target !== null && event.target < requests.length) context.fillRect(x(event.at) - 3, y(event.target) + 1, 6, lane - 3);
    if (event.kind === "fail_step" || event.kind === "shutdown") {
      context.setLineDash(event.kind === "fail_step" ? [2, 3] : []);
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(x(event.at), head);
      context.lineTo(x(event.at), height);
      context.stroke();
    }
  }
  context.setLineDash([]);
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

function list(more) {
  const body = at("events").tBodies[0];
  if (!more) { body.replaceChildren(); listed = 0; }
  const next = shown.events.slice(listed, listed + LISTED);
  body.append(...next.map((event) => {
    const row = make("tr"), cells = [String(event.number), String(event.at)];
    if (event.kind === "submit") {
      const { prompt, max_tokens: most, ...rest } = event.event;
      cells.push("submit", prompt.map(([stream, length]) => `${stream}:${length}`).join(" + "), [`max_tokens ${most ?? "as many as fit"}`, ...Object.entries(rest).map(([name, value]) => `${name} ${JSON.stringify(value)}`)].join(", "));
    } else if (event.kind === "abort") cells.push("abort", "", event.request === null ? "nothing was submitted: no effect" : `request ${event.request}`);
    else cells.push(event.kind, "", event.kind === "fail_step" ? `the next ${event.event} iterations` : "everything that has not ended is aborted");
    row.append(...cells.map((text) => make("td", "", text)));
    return row;
  }));
  listed += next.length;
  at("more-events").hidden = listed >= shown.events.length;
}

function show(text, name) {
  at("workload-error").hidden = true;
  try {
    shown = understand(text);
  } catch (error) {
    shown = null;
    at("workload-shown").hidden = true;
    at("workload-error").hidden = false;
    at("workload-error").textContent = `${name}: ${error.message}`;
    return;
  }
  at("workload-shown").hidden = false;
  at("workload-title").textContent = shown.title || "a workload without a title";
  const count = (kind) => shown.events.filter((event) => event.kind === kind).length;
  const facts = [`${count("submit")} submits`, `${count("abort")} aborts`, `${count("fail_step")} failed steps`];
  if (shown.digests?.length) facts.push(`${shown.digests.length} iterations recorded, each with a digest that a replay must meet`);
  if (shown.fault) facts.push(`brought back by fault ${shown.fault}`);
  if (shown.requests.length > DRAWN) facts.push(`the first ${DRAWN} requests are drawn`);
  at("workload-facts").textContent = facts.join(" · ");
  at("workload-shape").replaceChildren(...Object.entries(shown.shape).map(([key, value]) => make("span", "", `${key} ${Array.isArray(value) ? value.join(" ") || "none" : value}`)));
  at("timeline-canvas").setAttribute("aria-label", `${facts.join(", ")}, over ${shown.end} iterations; listed below under Events`);
  const file = /^[\w.-]+$/.test(name) && !name.startsWith("-") ? name : `'./${name.replaceAll("'", "'\\''")}'`;
  const commands = [
    [`replay ${file} --html run.html`, "both sides, iteration by iteration, as a page"],
    [`show ${file}`, "the timeline as text, by the specification alone"],
    [`shrink ${file}`, "if it fails: the same failure, smaller"],
  ];
  const width = commands[0][0].length + 2;
  at("commands").textContent = commands.map(([command, why]) => `python -m properties ${command.padEnd(width)}# ${why}`).join("\n");
  list(false);
  draw();
}

async function open(file) {
  at("file-name").textContent = file.name;
  show(await file.text(), file.name);
}

export function start() {
  at("file").addEventListener("change", () => { if (at("file").files.length) open(at("file").files[0]); });
  at("more-events").addEventListener("click", () => list(true));
  const section = at("workload");
  section.addEventListener("dragover", (event) => event.preventDefault());
  section.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) open(event.dataTransfer.files[0]);
  });
  new ResizeObserver(draw).observe(at("timeline"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
