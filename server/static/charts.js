// Small charts of the last minute: lines, dots and ticks on a canvas, each with its newest value in words.
import { brief, fitted, style } from "./dom.js";

export const SPAN = 60_000;  // milliseconds

export class Chart {
  // ``lines``: [{ color, dashed, dots }]; ``floor``: the least upper end of the scale.
  constructor(canvas, lines, floor, unit = "") {
    this.canvas = canvas;
    this.value = canvas.parentElement.querySelector("b");
    this.name = canvas.parentElement.querySelector("figcaption").textContent.trim();
    this.lines = lines.map((line) => ({ ...line, points: [] }));
    this.ticks = [];
    this.floor = floor;
    this.unit = unit;
  }

  add(now, ...values) {
    values.forEach((value, index) => { if (value !== undefined) this.lines[index].points.push([now, value]); });
  }

  tick(now) { this.ticks.push(now); }

  draw(now) {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight;
    if (!width) return;
    const context = fitted(this.canvas, width, height), start = now - SPAN;
    while (this.ticks.length && this.ticks[0] < start) this.ticks.shift();
    for (const line of this.lines) while (line.points.length > 1 && line.points[1][0] < start) line.points.shift();
    let top = this.floor;
    for (const line of this.lines) for (const [when, value] of line.points) if (when >= start && value > top) top = value;
    const x = (when) => ((when - start) / SPAN) * (width - 4), y = (value) => height - 3 - (value / top) * (height - 16);
    context.fillStyle = style("--soft");
    context.font = "10px system-ui, sans-serif";
    context.fillText(brief(top) + this.unit, 4, 10);
    context.fillStyle = style("--alarm");
    for (const when of this.ticks) context.fillRect(x(when) - 1, height - 14, 3, 14);
    for (const line of this.lines) {
      context.strokeStyle = context.fillStyle = style(line.color);
      context.lineWidth = 1.5;
      context.setLineDash(line.dashed ? [4, 3] : []);
      context.beginPath();
      let previous = null;
      for (const [when, value] of line.points) {
        if (line.dots) { context.moveTo(x(when) + 2.5, y(value)); context.arc(x(when), y(value), 2.5, 0, 7); continue; }
        if (previous === null || when - previous > 3000) context.moveTo(x(when), y(value));
        else context.lineTo(x(when), y(value));
        previous = when;
      }
      if (line.dots) context.fill();
      else context.stroke();
    }
    context.setLineDash([]);
    const newest = this.lines.map((line) => line.points.at(-1)).filter((point) => point && point[0] >= start).map((point) => brief(point[1]));
    const text = newest.join(" / ");
    if (this.value.textContent !== text) {
      this.value.textContent = text;
      this.canvas.setAttribute("aria-label", `${this.name}, last minute: now ${text || "nothing"}${this.unit}`);
    }
  }
}
