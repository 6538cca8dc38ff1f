// Requests to this server, with the key that was typed here and is kept nowhere else; and server-sent events out of a fetch,
// since EventSource can send neither a key nor a body.
let key = "";
let askForKey = () => {};

export function useKey(given) { key = given; }
export function whenKeyIsNeeded(callback) { askForKey = callback; }

// Seeds have up to 63 bits, which a number of this language cannot hold: they stay text.
export const parse = (text) => JSON.parse(text.replace(/"seed":(-?\d{16,})/g, '"seed":"$1"'));

async function send(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  if (response.status === 401) askForKey();
  let message = `the server answered ${response.status}`;
  try { message = JSON.parse(await response.text()).error.message; } catch { /* no error object: the status has to do */ }
  throw Object.assign(new Error(message), { status: response.status });
}

export const read = async (path) => parse(await (await send(path)).text());

// Calls ``take`` for every event until the stream ends; returns whether it ended with [DONE].
export async function events(path, take, { body, signal } = {}) {
  const posted = body === undefined ? {} : { method: "POST", body, headers: { "Content-Type": "application/json" } };
  const response = await send(path, { ...posted, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return false;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice(6);
      if (data === "[DONE]") return true;
      const event = parse(data);
      if (event.error) throw new Error(event.error.message);
      take(event);
    }
  }
}
