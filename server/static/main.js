// Starts the three parts of the page, asks for the model, and for a key when the server wants one.
import { at } from "./dom.js";
import * as engine from "./engine.js";
import * as playground from "./playground.js";
import * as workload from "./workload.js";
import { read, useKey, whenKeyIsNeeded } from "./stream.js";

async function meet() {
  try {
    const { data: [model] } = await read("v1/models");
    at("model").textContent = `${model.id}, context of ${model.max_model_len} tokens`;
    const info = await read("server_info");
    at("facts").textContent = [`Lockstep ${info.version}`, `torch ${info.torch}`, ...Object.entries(info.capacity).map(([name, value]) => `${name}: ${value}`), info.system_fingerprint].join(" · ");
    let hasTemplate = false;
    try { hasTemplate = (await read("tokenizer_info")).chat_template !== null; } catch { /* a model without a tokenizer: the answer to a prompt will say so */ }
    playground.setModel(hasTemplate);
    playground.setMost(model.max_model_len);
    document.body.dataset.ready = "yes";
  } catch (error) {
    if (error.status !== 401) setTimeout(meet, 2000);  // it loads, or it is away; with a wrong key, the form is open
  }
}

whenKeyIsNeeded(() => { at("key-form").hidden = false; at("key-hint").textContent = "the server asks for a key; it is kept in this page only"; });
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value.trim());
  at("key").value = "";
  at("key-hint").textContent = "kept in this page only";
  meet();
  engine.retry();
});

playground.start();
workload.start();
engine.start();
meet();
