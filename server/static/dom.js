// Small helpers. Every text goes in as textContent, so that what a model or a file says stays text.
export const at = (id) => document.getElementById(id);

export function make(tag, className = "", text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// Okabe and Ito; the same order as .c0 ... .c7 in page.css.
export const COLORS = ["#e69f00", "#56b4e9", "#2fb58d", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#aaaaaa"];

export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A canvas as sharp as the screen. Returns its context in CSS pixels, cleared.
export function fitted(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const across = Math.round(width * ratio), down = Math.round(height * ratio);
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// Numbers for people: 3 digits, no more.
export const brief = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3))));
