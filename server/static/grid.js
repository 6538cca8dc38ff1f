// The block grid: one integer a block, drawn on a canvas. Only cells that changed are drawn, so ten thousand blocks cost
// what changes in them. Kinds differ in form as well as in colour: held is full, shared is split, cached is a half cell,
// blank is empty, lost is crossed.
import { at, COLORS, fitted, style } from "./dom.js";

const HEIGHT = 300, LARGEST = 30, LABELLED = 20;
export const BLANK = 0, CACHED = -1, LOST = -2;

export function words(code) {
  if (code === BLANK) return "blank";
  if (code === CACHED) return "cached, held by nobody";
  if (code === LOST) return "lost: neither held nor free, or both";
  return code > 0 ? `held by request ${code - 1}` : `shared by ${-1 - code} requests`;
}

export function cell(context, x, y, size, code, theme) {
  const gap = size > 5 ? 1 : size > 3 ? 0.5 : 0, s = size - gap;
  context.fillStyle = theme.paper;
  context.fillRect(x, y, size, size);
  if (code > 0) {
    context.fillStyle = COLORS[(code - 1) % 8];
    context.fillRect(x, y, s, s);
    return;
  }
  if (code === BLANK) {
    context.strokeStyle = theme.line;
    context.lineWidth = 1;
    if (size > 5) context.strokeRect(x + 0.5, y + 0.5, s - 1, s - 1);
    else { context.fillStyle = theme.panel; context.fillRect(x, y, s, s); }
    return;
  }
  const triangle = (color, ax, ay) => {
    context.fillStyle = color;
    context.beginPath();
    context.moveTo(x, y + s);
    context.lineTo(x + s, y);
    context.lineTo(x + ax, y + ay);
    context.fill();
  };
  if (code === CACHED) {
    context.fillStyle = theme.panel;
    context.fillRect(x, y, s, s);
    triangle(theme.cached, s, s);
  } else if (code === LOST) {
    context.fillStyle = theme.alarm;
    context.fillRect(x, y, s, s);
    context.strokeStyle = theme.paper;
    context.lineWidth = Math.max(1, s / 8);
    context.beginPath();
    context.moveTo(x, y); context.lineTo(x + s, y + s);
    context.moveTo(x + s, y); context.lineTo(x, y + s);
    context.stroke();
  } else {
    context.fillStyle = theme.ink;
    context.fillRect(x, y, s, s);
    triangle(COLORS[-code % 8], 0, 0);
  }
}

export const theme = () => Object.fromEntries(["paper", "panel", "ink", "line", "cached", "alarm"].map((name) => [name, style(`--${name}`)]));

export class Grid {
  constructor(canvas, readout) {
    this.canvas = canvas;
    this.readout = readout;
    this.codes = new Int32Array(0);
    this.cursor = -1;
    this.size = 0;
    this.across = 1;
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    canvas.addEventListener("pointerleave", () => this.select(-1));
    canvas.addEventListener("blur", () => this.select(-1));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.across, ArrowDown: this.across, Home: -1e9, End: 1e9 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      this.select(Math.max(0, Math.min(this.codes.length - 1, (this.cursor < 0 ? 0 : this.cursor) + (this.cursor < 0 ? 0 : step))));
    });
    new ResizeObserver(() => this.redraw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  // ``runs``: flat (start, count, code) triples.
  apply(runs, blocks) {
    if (blocks !== undefined && blocks !== this.codes.length) {
      this.codes = new Int32Array(blocks);
      this.redraw();
    }
    const fresh = blocks !== undefined;
    for (let at = 0; at < runs.length; at += 3) this.codes.fill(runs[at + 2], runs[at], runs[at] + runs[at + 1]);
    if (fresh) this.redraw();
    else for (let at = 0; at < runs.length; at += 3) for (let k = 0; k < runs[at + 1]; k++) this.draw(runs[at] + k);
    this.tell();
  }

  layout() {
    const width = this.canvas.clientWidth, blocks = Math.max(1, this.codes.length);
    let size = Math.min(LARGEST, width);
    while (size > 2 && Math.ceil(blocks / Math.floor(width / size)) * size > HEIGHT) size -= size > 8 ? 1 : 0.5;
    this.size = size;
    this.across = Math.max(1, Math.floor(width / size));
    return Math.ceil(blocks / this.across) * size + 1;
  }

  redraw() {
    if (!this.canvas.clientWidth) return;
    const height = this.layout();
    this.canvas.style.height = `${height}px`;
    this.context = fitted(this.canvas, this.canvas.clientWidth, height);
    this.theme = theme();
    for (let block = 0; block < this.codes.length; block++) this.draw(block);
  }

  draw(block) {
    if (!this.context) return;
    const x = (block % this.across) * this.size + 1, y = Math.floor(block / this.across) * this.size + 1, code = this.codes[block];
    cell(this.context, x, y, this.size, code, this.theme);
    if (this.size >= LABELLED && (code > 0 || code < LOST)) {
      const text = code > 0 ? String(code - 1) : `×${-1 - code}`;
      const shared = code < 0;
      this.context.font = `${text.length > 3 ? 8 : 10}px system-ui, sans-serif`;
      this.context.textAlign = "center";
      this.context.textBaseline = "middle";
      if (shared) { this.context.fillStyle = "#fffd"; this.context.fillRect(x + 3, y + this.size / 2 - 7, this.size - 7, 13); }
      this.context.fillStyle = !shared && (code - 1) % 8 === 4 ? "#fff" : "#111";
      this.context.fillText(text, x + (this.size - 1) / 2, y + this.size / 2);
    }
    if (block === this.cursor) {
      this.context.strokeStyle = this.theme.ink;
      this.context.lineWidth = 2;
      this.context.strokeRect(x + 1, y + 1, this.size - 3, this.size - 3);
    }
  }

  point(x, y) {
    const block = Math.floor(y / this.size) * this.across + Math.floor(x / this.size);
    this.select(Math.floor(x / this.size) < this.across && block < this.codes.length ? block : -1);
  }

  select(block) {
    const before = this.cursor;
    this.cursor = block;
    if (before >= 0 && before < this.codes.length) this.draw(before);
    if (block >= 0) this.draw(block);
    this.tell();
  }

  tell() {
    const text = this.cursor < 0 || this.cursor >= this.codes.length ? "Point at a block, or move with the arrow keys." : `block ${this.cursor}: ${words(this.codes[this.cursor])}`;
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }

  counts() {
    const found = { held: 0, shared: 0, cached: 0, blank: 0, lost: 0 };
    for (const code of this.codes) found[code > 0 ? "held" : code === BLANK ? "blank" : code === CACHED ? "cached" : code === LOST ? "lost" : "shared"] += 1;
    return found;
  }
}

export function drawLegend() {
  const codes = { held: 1, shared: -3, cached: CACHED, blank: BLANK, lost: LOST };
  for (const canvas of document.querySelectorAll(".legend canvas")) cell(fitted(canvas, 18, 18), 1, 1, 16, codes[canvas.dataset.kind], theme());
}
