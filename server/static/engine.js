// The engine as GET /live tells it: a frame at most five times a second while something happens, nothing while nothing does.
// The stream is left while nobody looks at the page, so that a forgotten tab costs the server nothing.
import { at, brief, make } from "./dom.js";
import { Chart } from "./charts.js";
import { drawLegend, Grid } from "./grid.js";
import { events } from "./stream.js";

const grid = new Grid(at("grid"), at("readout"));
const chart = (name) => document.querySelector(`[data-chart=${name}]`);
const line = { color: "--line-a" }, dashed = { color: "--line-b", dashed: true };
const charts = {
  rate: new Chart(chart("rate"), [line], 10),
  load: new Chart(chart("load"), [line, dashed], 4),
  first: new Chart(chart("first"), [{ color: "--line-a", dots: true }], 10, " ms"),
  between: new Chart(chart("between"), [line, dashed], 10, " ms"),
  replay: new Chart(chart("replay"), [line], 100, " %"),
};
let shape = { blocks: 0, block_size: 0, rows: 0 }, last = null, lastAt = 0, idleAt = 0;
let sampled = [];  // [when, tokens since start] of the last second: a rate over less would show how steps fall into frames

function set(id, text) { if (at(id).textContent !== text) at(id).textContent = text; }

export function take(frame) {
  const now = performance.now();
  if (frame.shape) shape = frame.shape;
  grid.apply(frame.runs, frame.shape?.blocks);
  const before = last && !frame.shape ? last.totals : null, totals = frame.totals;
  tiles(frame);
  rows(frame);
  if (before) {
    if (now - lastAt > 1500) sampled = [[now - 200, before.sampled_tokens]];  // the engine was idle until just now
    while (sampled.length > 1 && now - sampled[0][0] > 1000) sampled.shift();
    const rate = (totals.sampled_tokens - sampled[0][1]) / Math.max(0.2, (now - sampled[0][0]) / 1000);
    charts.rate.add(now, rate);
    set("rate", brief(rate));
    const steps = totals.decode_steps - before.decode_steps;
    if (steps) charts.replay.add(now, (100 * (totals.replayed - before.replayed)) / steps);
    if (totals.preemptions > before.preemptions) charts.load.tick(now);
  }
  if (!before) sampled = [];
  sampled.push([now, totals.sampled_tokens]);
  charts.load.add(now, frame.requests.length, frame.waiting);
  for (const wait of frame.first || []) charts.first.add(now, wait);
  if (frame.between) charts.between.add(now, frame.between[0], frame.between[1]);
  last = frame;
  lastAt = now;
  document.body.dataset.frames = Number(document.body.dataset.frames || 0) + 1;
  draw();
}

function tiles(frame) {
  const totals = frame.totals, held = shape.blocks - frame.free;
  set("running", `${frame.requests.length} of ${shape.rows}`);
  set("waiting", String(frame.waiting));
  set("held", `${held} of ${shape.blocks}`);
  set("replayed", totals.decode_steps ? `${((100 * totals.replayed) / totals.decode_steps).toFixed(1)} %` : "-");
  set("preemptions", totals.preemptions.toLocaleString("en"));
  set("recomputed", totals.recomputed_tokens.toLocaleString("en"));
  set("hits", totals.prefix_hit_tokens.toLocaleString("en"));
  set("blocks-heading", `KV blocks: ${shape.blocks} of ${shape.block_size} tokens`);
  const eager = Object.entries(totals.eager).map(([reason, count]) => `${count} ${reason}`).join(", ");
  set("eager", `${totals.iterations.toLocaleString("en")} iterations since start, ${totals.decode_steps.toLocaleString("en")} of them decoded; without a recorded graph: ${eager || "none"}; ${totals.row_moves} row moves, ${totals.failed_steps} failed steps.`);
  const counts = grid.counts();
  at("lost-key").hidden = !counts.lost;
  set("grid-summary", `${counts.held} held, ${counts.shared} shared, ${counts.cached} cached, ${counts.blank} blank${counts.lost ? `, ${counts.lost} lost` : ""}`);
  Object.assign(at("grid").dataset, counts);
}

function chips(list, wanted, none) {
  const shown = wanted.length ? wanted : [["none", none]];
  while (list.children.length > shown.length) list.lastChild.remove();
  while (list.children.length < shown.length) list.append(make("li"));
  shown.forEach(([look, text, label], index) => {
    const chip = list.children[index];
    if (chip.className !== `chip ${look}`) chip.className = `chip ${look}`;
    if (chip.textContent !== text) chip.textContent = text;
    if (label) chip.title = label;
  });
}

function rows(frame) {
  const seats = Array.from({ length: shape.rows }, (_, row) => ["none", `${row}`, `row ${row}: free`]);
  for (const [request, status, row] of frame.requests) if (row !== null) seats[row] = [`c${request % 8} ${status}`, `${row}: r${request}`, `row ${row}: request ${request}, ${status}`];
  chips(at("rows"), seats, "none");
  const queue = frame.queue.map((request) => [`c${request % 8}`, `r${request}`]);
  if (frame.waiting > queue.length) queue.push(["none", `and ${frame.waiting - queue.length} more`]);
  chips(at("queue"), queue, "empty");
  if (!at("requests").closest("details").open) return;
  at("requests").tBodies[0].replaceChildren(...frame.requests.map(([request, status, row, computed, tokens, blocks, preempted]) => {
    const entry = make("tr"), name = make("td");
    name.append(make("span", `chip c${request % 8}`, `r${request}`));
    entry.append(name, ...[status, row ?? "-", `${computed}/${tokens}`, blocks, preempted].map((text) => make("td", "", String(text))));
    return entry;
  }));
}

function draw() { for (const one of Object.values(charts)) one.draw(performance.now()); }

// While the engine is idle no frame comes: the lines go on at zero, and time moves.
function idle() {
  const now = performance.now();
  if (document.hidden || !last) return;
  if (now - lastAt > 1500 && now - idleAt > 900 && !last.requests.length && !last.waiting) {
    idleAt = now;
    charts.rate.add(now, 0);
    charts.load.add(now, 0, 0);
    set("rate", "0");
  }
  draw();
}

function link(state, text) {
  at("link").className = `pill ${state}`;
  set("link", text);
}

let watching = null;

async function watch() {
  for (;;) {
    if (document.hidden) await new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
    if (document.hidden) continue;
    watching = new AbortController();
    let wait = 2000;
    try {
      await events("live", (frame) => { link("live", "live"); take(frame); }, { signal: watching.signal });
      link("gone", "the server has stopped");
    } catch (error) {
      if (watching.signal.aborted) wait = 0;
      else if (error.status === 401) wait = null;  // until a key is given
      if (!watching.signal.aborted) link("gone", error.status ? error.message : "the server does not answer");
    }
    watching = null;
    await new Promise((resolve) => { wake = resolve; if (wait !== null) setTimeout(resolve, wait); });
  }
}
let wake = () => {};

export function retry() { wake(); }

export function start() {
  drawLegend();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawLegend(); draw(); });
  document.addEventListener("visibilitychange", () => { if (document.hidden) watching?.abort(); });
  setInterval(idle, 500);
  watch();
}
