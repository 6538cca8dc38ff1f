"use strict";
// Shows one iteration at a time. Every text goes in as textContent; elements are made once and only what changes is touched,
// so that a run of a thousand iterations scrolls as fast as one of ten.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);
  const steps = data.steps, found = data.finding, last = steps.length - 1;
  const foundAt = found ? steps.findIndex((step) => step.it === found.iteration) : -1;
  let now = -1, timer = null;

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const names = (requests) => requests.map((request) => "r" + request).join(" ");
  const color = (request) => Number(request) % 8;

  // Which requests hold each block, and what else is said of it: one value a block, as text, so that two sides compare.
  function blocksOf(side) {
    const blocks = Array.from({ length: data.pool }, () => ({ owners: [], free: 0, cached: false, published: null }));
    const known = (block) => (blocks[block] ||= { owners: [], free: 0, cached: false, published: null });
    for (const [request, table] of Object.entries(side.tables)) for (const block of table) known(block).owners.push(request);
    for (const block of side.blank) known(block).free += 1;
    for (const block of side.cached) { known(block).free += 1; known(block).cached = true; }
    for (const [block, content] of Object.entries(side.published)) known(block).published = data.texts[content];
    return blocks;
  }
  function label(block) {
    if (block.owners.length && block.free) return names(block.owners) + " free";
    if (block.owners.length > 3) return block.owners.length + " owners";
    if (block.owners.length) return names(block.owners);
    if (!block.free) return "lost";
    if (block.free > 1) return "free x" + block.free;
    return block.cached ? "cached" : "blank";
  }
  function look(block) {
    const owners = block.owners, published = block.published !== null ? " published" : "";
    if (owners.length ? block.free : block.free !== 1) return "lost" + published;
    if (owners.length > 1) return `shared c${color(owners[0])} d${color(owners[1])}${published}`;
    if (owners.length) return `owned c${color(owners[0])}${published}`;
    return (block.cached ? "cached" : "blank") + published;
  }
  const words = (number, block, differs) => `block ${number}: ${label(block)}` +
    (block.published !== null ? `, published, ${block.published}` : "") + (differs ? ", the two sides differ" : "");

  const panels = [...document.querySelectorAll(".side")].map((panel) => {
    const grid = panel.querySelector(".grid"), cells = [];
    for (let number = 0; number < data.pool; number++) {
      const cell = make("li", "block");
      cell.dataset.block = number;
      cell.append(make("span", "number", "b" + number), make("span", "label"));
      grid.append(cell);
      cells.push(cell);
    }
    const rows = panel.querySelector(".rows"), seats = [];
    for (let row = 0; row < data.rows; row++) seats.push(rows.appendChild(make("li", "chip")));
    return { panel, cells, seats, queue: panel.querySelector(".queue"), running: panel.querySelector(".running tbody") };
  });

  // Only what changed since the iteration before was sent, of a mapping its changed entries; null is a side that is not known.
  const sidesAt = [], before = data.names.map(() => ({}));
  function changed(old, change) {
    if (old === undefined || Array.isArray(change)) return change;
    return Object.fromEntries(Object.entries({ ...old, ...change }).filter(([, value]) => value !== null));
  }
  for (const step of steps) {
    sidesAt.push(step.sides.map((side, which) => {
      if (side === null) return null;
      const next = { ...before[which] };
      for (const [name, change] of Object.entries(side)) next[name] = changed(next[name], change);
      return (before[which] = next);
    }));
  }

  function showSide(view, side, other) {
    view.panel.querySelector(".absent").hidden = side !== null;
    view.panel.classList.toggle("missing", side === null);
    const shown = side || { tables: {}, rows: {}, requests: {}, waiting: [], running: [], blank: [], cached: [], published: {} };
    const blocks = blocksOf(shown), others = side && other ? blocksOf(other) : null;
    view.cells.forEach((cell, number) => {
      const block = blocks[number], differs = others !== null && look(block) + label(block) + block.published !== look(others[number]) + label(others[number]) + others[number].published;
      const className = side === null ? "block blank" : `block ${look(block)}${differs ? " differs" : ""}`;
      if (cell.className !== className) cell.className = className;
      const text = side === null ? "?" : label(block);
      if (cell.lastChild.textContent !== text) cell.lastChild.textContent = text;
      const said = side === null ? `block ${number}: not known` : words(number, block, differs);
      if (cell.title !== said) { cell.title = said; cell.setAttribute("aria-label", said); }
    });
    const holder = {}, otherHolder = {};
    for (const [request, row] of Object.entries(shown.rows)) (holder[row] ||= []).push(request);
    if (side && other) for (const [request, row] of Object.entries(other.rows)) (otherHolder[row] ||= []).push(request);
    view.seats.forEach((seat, row) => {
      const who = holder[row] || [];
      const differs = side && other && names(who) !== names(otherHolder[row] || []);
      seat.textContent = `${row}: ${who.length ? names(who) : "-"}`;
      seat.className = `chip ${who.length ? "c" + color(who[0]) : "none"}${differs ? " differs" : ""}`;
    });
    const line = shown.waiting.map((request) => make("li", `chip c${color(request)}`, "r" + request));
    view.queue.replaceChildren(...(line.length ? line : [make("li", "chip none", "empty")]));
    view.running.replaceChildren(...shown.running.map((request) => {
      const [status, computed, tokens] = shown.requests[request] || [-1, "?", "?"];
      const row = make("tr");
      const name = make("td");
      name.append(make("span", `chip c${color(request)}`, "r" + request));
      row.append(name, make("td", "", data.texts[status] || "?"), make("td", "", `${computed}/${tokens}`), make("td", "", request in shown.rows ? shown.rows[request] : "-"),
        make("td", "", (shown.tables[request] || []).map((block) => "b" + block).join(" ")));
      return row;
    }));
  }

  function showDecided(step) {
    const specification = step.decided[step.decided.length - 1];
    const columns = step.decided.map((column) => (column === 0 ? specification : column));
    const lines = Object.keys(specification).filter((name) => columns.some((column) => column && column[name]));
    at("decided").tBodies[0].replaceChildren(...lines.map((name) => {
      const cells = columns.map((column) => (column ? column[name] || "-" : "not told"));
      const row = make("tr", new Set(cells).size > 1 ? "differs" : "");
      row.append(make("th", "", name), ...cells.map((text) => make("td", "", text)));
      return row;
    }), ...(lines.length ? [] : [make("tr", "", "nothing")]));
  }

  function showDifferences(step, index) {
    const facts = index === foundAt ? found.facts.filter(([name]) => !(name in step.decided[step.decided.length - 1]) && !step.differs.some(([other]) => other === name)).map((fact) => [...fact, ""]) : [];
    const lines = data.names.length === 2 || facts.length ? [...facts, ...step.differs] : [];
    at("differences").hidden = lines.length === 0;
    at("differs").tBodies[0].replaceChildren(...lines.map(([name, mine, theirs, note]) => {
      const row = make("tr", "differs");
      row.append(make("th", "", name), ...[mine, theirs].slice(-Math.max(1, data.names.length)).map((text) => make("td", "", text || "-")), make("td", "", note));
      return row;
    }));
  }

  function show(index) {
    index = Math.max(0, Math.min(last, index));
    if (index === now || last < 0) return;
    const step = steps[index], both = sidesAt[index];
    panels.forEach((view, which) => showSide(view, both[which], both.length === 2 ? both[1 - which] : null));
    const mark = index === foundAt ? `, the ${data.mark}` : "";
    at("heading").textContent = `iteration ${step.it}${mark}`;
    at("events").textContent = "events before it: " + (step.events.join(", ") || "none");
    showDecided(step);
    showDifferences(step, index);
    at("slider").value = index;
    at("slider").setAttribute("aria-valuetext", `iteration ${step.it} of ${steps[last].it}${mark}`);
    at("now").textContent = `${step.it} of ${steps[last].it}`;
    at("strip-now").setAttribute("d", `M${x(index)} 0V60`);
    const lines = at("lines").children, box = at("timeline");
    if (now >= 0 && lines[now]) lines[now].removeAttribute("aria-current");
    if (lines[index]) {
      lines[index].setAttribute("aria-current", "step");
      const top = lines[index].offsetTop - at("lines").offsetTop;
      if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 60) box.scrollTop = top - box.clientHeight / 2;
    }
    document.body.dataset.iteration = step.it;
    now = index;
  }

  const x = (index) => ((index + 0.5) * 1000) / steps.length;
  function drawStrip() {
    const own = sidesAt.map((sides) => sides.find((side) => side) || { blank: [], cached: [], waiting: [] });
    const most = Math.max(1, ...own.map((side) => side.waiting.length));
    const y = (share) => (58 - 56 * share).toFixed(1);
    at("strip-free").setAttribute("d", "M0 60" + own.map((side, index) => {
      const height = y((side.blank.length + side.cached.length) / data.pool), width = 1000 / steps.length;
      return `L${(index * width).toFixed(2)} ${height}H${((index + 1) * width).toFixed(2)}`;
    }).join("") + "V60Z");
    at("strip-waiting").setAttribute("d", own.map((side, index) => `${index ? "L" : "M"}${x(index).toFixed(2)} ${y(side.waiting.length / most)}`).join(""));
    at("strip-preempted").setAttribute("d", steps.map((step, index) => (step.decided[step.decided.length - 1].preempted ? `M${x(index).toFixed(2)} 0v12` : "")).join(""));
    if (foundAt >= 0) at("strip-found").setAttribute("d", `M${x(foundAt)} 0V60`);
  }

  function play(start) {
    if (timer !== null) clearInterval(timer);
    timer = start ? setInterval(() => (now >= last ? play(false) : show(now + 1)), 400) : null;
    at("play").textContent = start ? "stop" : "play";
    at("play").setAttribute("aria-pressed", String(start));
  }
  const moves = {
    ArrowLeft: () => show(now - 1), ArrowRight: () => show(now + 1), Home: () => show(0), End: () => show(last),
    " ": () => play(timer === null), d: () => foundAt >= 0 && show(foundAt),
  };
  document.addEventListener("keydown", (event) => {
    const own = event.target.closest("summary, a, #timeline") || (event.target.closest("button") && event.key === " ");
    if (own || event.ctrlKey || event.metaKey || event.altKey || !(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  });
  at("slider").max = Math.max(0, last);
  at("slider").addEventListener("input", (event) => show(Number(event.target.value)));
  for (const [id, move] of [["start", "Home"], ["back", "ArrowLeft"], ["on", "ArrowRight"], ["end", "End"], ["play", " "], ["jump", "d"]]) {
    if (at(id)) at(id).addEventListener("click", () => { if (id === "play" && timer === null && now >= last) show(0); moves[move](); });
  }
  at("strip").addEventListener("click", (event) => {
    const box = at("strip").getBoundingClientRect();
    show(Math.floor(((event.clientX - box.left) / box.width) * steps.length));
  });
  at("header").textContent = data.header;
  at("lines").append(...data.lines.map((line, index) => make("span", index === foundAt ? "found" : "", line)));
  at("lines").addEventListener("click", (event) => {
    const index = [...at("lines").children].indexOf(event.target);
    if (index >= 0) show(index);
  });
  if (last >= 0) drawStrip();
  show(foundAt >= 0 ? foundAt : 0);
})();
