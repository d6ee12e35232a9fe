// The page of some runs. It shows what `meshwright watch` answers, or what the file itself holds (`data`).
// No text of a run becomes HTML: everything is set by textContent.

const held = document.getElementById("data");
const fixed = held && JSON.parse(held.textContent);
const byId = (name) => document.getElementById(name);
const runs = new Map(); // rows by id, as the server sends them
const chosen = new Set(); // ids of the runs that are drawn
const curves = new Map(); // by id, of all steps: {version, read, tracks}
const colours = new Map();
const items = new Map(); // elements of the list
const charts = new Map();
const EMPTY = { low: null, high: null };
let zoom = EMPTY, zoomed = new Map();
let here = null; // the run whose details are shown
let sweeps = [], details = null, logOffset = null, isLog = false, inTokens = false, chose = false;
const MOST_LOG_LINES = 5000, FIRST_CHOSEN = 5, REDRAW_MS = 500, MOST_TOLD = 6;
const FAR = 4; // times the range of a curve, beyond which its prediction is told and not drawn
const HUES = [206, 24, 140, 345, 268, 46, 182, 312];

const QUANTITIES = [ // key, name, kind of number, key of the held-out curve
  ["loss", "Loss", "plain", "held_out_loss"],
  ["seconds", "Step time", "seconds"],
  ["tokens_per_second", "Throughput", "rate"],
  ["mfu", "MFU", "share"],
  ["memory_in_use_bytes", "Memory in use", "bytes"],
  ["learning_rate", "Learning rate", "plain"],
  ["gradient_norm", "Gradient norm", "plain"],
  ["input_wait_seconds", "Wait for a batch", "seconds"],
];
const LEFT_OUT = new Set(["applied", "hfu", ...QUANTITIES.map((each) => each[0])]);

// Numbers -----------------------------------------------------------------------------------------------

function scaled(value, step, names, unit) {
  let place = 0, size = Math.abs(value);
  while (size >= step && place < names.length - 1) { size /= step; value /= step; place += 1; }
  return `${plain(value)} ${names[place]}${unit}`.trim();
}

function plain(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 4)));
}

const KINDS = {
  plain,
  share: (value) => `${plain(100 * value)} %`,
  bytes: (value) => scaled(value, 1024, ["", "Ki", "Mi", "Gi", "Ti"], "B"),
  rate: (value, row) => `${scaled(value, 1000, ["", "k", "M", "G", "T"], "")} ${row ? row.unit : ""}/s`,
  seconds: (value) => {
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${plain(1e6 * value)} us`;
    if (size < 1) return `${plain(1e3 * value)} ms`;
    return size < 120 ? `${plain(value)} s` : duration(value);
  },
};

function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.round(seconds / 3600);
  return hours < 48 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${(seconds / 86400).toFixed(1)} days`;
}

function day(seconds) {
  return new Date(1000 * seconds).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
}

// Elements ----------------------------------------------------------------------------------------------

function made(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.map((child) => child instanceof Node ? child : document.createTextNode(child)));
  return element;
}

const own = (object, key) => object && key !== null && Object.hasOwn(object, key) ? object[key] : undefined; // a quantity may be called "constructor"
const isolated = (text) => made("bdi", {}, text);

function table(head, rows, numbers = []) {
  const cell = (text, place) => made("td", numbers.includes(place) ? { class: "number" } : {}, isolated(text));
  const body = rows.map((row) => made("tr", {}, ...row.map(cell)));
  const top = head.length ? [made("thead", {}, made("tr", {}, ...head.map((name) => made("th", {}, name))))] : [];
  return made("div", { class: "scroll" }, made("table", {}, ...top, made("tbody", {}, ...body)));
}

function colourOf(id) {
  if (!colours.has(id)) colours.set(id, colours.size);
  const place = colours.get(id), turn = Math.floor(place / HUES.length);
  const hue = (HUES[place % HUES.length] + 17 * turn) % 360;
  return `hsl(${hue} ${isDark() ? 65 : 62}% ${(isDark() ? 64 : 40) - 5 * (turn % 3)}%)`;
}

const isDark = () => document.documentElement.classList.contains("dark");
const styled = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What the server knows ---------------------------------------------------------------------------------

async function ask(path, pairs) {
  const answer = await fetch(`${path}?${new URLSearchParams(pairs)}`);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

function listen() {
  const source = new EventSource("events");
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onerror = () => {
    const ended = source.readyState === EventSource.CLOSED;
    say(ended ? "The server has ended; this is what it last said." : "The server does not answer; trying again.", true);
  };
}

function take(message) {
  for (const row of message.runs) runs.set(row.id, row);
  sweeps = message.sweeps;
  if (!chose && runs.size) choose();
  listRuns();
  changed();
}

function sorted() {
  const rank = (row) => row.state === "running" ? 0 : 1;
  return [...runs.values()].sort((one, other) => rank(one) - rank(other) || other.begun - one.begun);
}

function choose() {
  chose = true;
  const all = sorted(), live = all.filter((row) => row.state === "running");
  for (const row of (live.length ? live : all).slice(0, FIRST_CHOSEN)) chosen.add(row.id);
  show(all[0].id);
}

let timer = null, isBusy = false, isStale = false;
function changed(now = false) { // asks and draws at most every REDRAW_MS, whatever comes in between
  isStale = true;
  if (isBusy || (timer !== null && !now)) return;
  clearTimeout(timer);
  timer = setTimeout(work, now ? 0 : REDRAW_MS);
}

async function work() {
  timer = null;
  isBusy = true;
  isStale = false;
  try { await refresh(); } catch (error) { say(`The server does not answer: ${error.message}`, true); }
  isBusy = false;
  if (isStale) changed();
}

async function refresh() {
  const stale = [...chosen].filter((id) => runs.has(id) && curves.get(id)?.asked !== runs.get(id).version);
  const isZoomed = zoom !== EMPTY;
  if (!fixed && stale.length) {
    const pairs = stale.flatMap((id) => [["run", id], ...have(id)]);
    for (const [id, answer] of Object.entries(await ask("curves", pairs))) merge(id, answer);
  }
  if (!fixed && isZoomed && (stale.length || zoom.asked !== chosen.size)) {
    const pairs = [...chosen].map((id) => ["run", id]);
    const answers = await ask("curves", [...pairs, ["low", zoom.low], ["high", zoom.high]]);
    zoomed = new Map(Object.entries(answers).map(([id, answer]) => [id, { ...answer, tracks: opened(answer.tracks) }]));
    zoom.asked = chosen.size;
  }
  await showDetails();
  drawAll();
  sayState();
}

function have(id) {
  const known = curves.get(id);
  if (!known || known.read < 1) return [];
  return Object.entries(known.tracks).map(([kind, track]) =>
    ["have", [id, kind, track.generation, track.width, Math.max(0, track.first.length - 1)].join(":")]);
}

function opened(tracks) { // each curve has its least, mean and largest values
  for (const track of Object.values(tracks)) {
    if (!track.last.length) track.last = track.first;
    for (const [key, rows] of Object.entries(track.curves)) if (rows.length === 1) track.curves[key] = [rows[0], rows[0], rows[0]];
  }
  return tracks;
}

function merge(id, answer) {
  const known = curves.get(id), tracks = opened(answer.tracks);
  for (const [kind, track] of Object.entries(tracks)) {
    const old = known?.tracks[kind];
    if (!track.start) continue;
    if (!old || old.first.length < track.start) { known.asked = null; return; } // asked again
    const joined = (one, other) => one.slice(0, track.start).concat(other);
    const nothing = new Array(track.start).fill(null);
    for (const key of Object.keys(track.curves)) {
      track.curves[key] = track.curves[key].map((row, end) => joined(own(old.curves, key)?.[end] ?? nothing, row));
    }
    track.first = joined(old.first, track.first);
    track.last = joined(old.last, track.last);
    track.start = 0;
  }
  curves.set(id, { ...answer, tracks, asked: answer.version });
}

// The list ----------------------------------------------------------------------------------------------

function matches(row) {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = `${row.name} ${row.of} ${row.on} ${row.state} ${row.layout}`.toLowerCase();
  return words.every((word) => text.includes(word));
}

function listRuns() {
  const list = byId("list"), listed = sorted().filter(matches);
  const kept = new Set(listed.map((row) => row.id));
  for (const [id, item] of items) if (!kept.has(id)) item.element.remove();
  listed.forEach((row, place) => {
    const item = items.get(row.id) ?? newItem(row);
    const version = `${row.version} ${chosen.has(row.id)} ${row.id === here} ${isDark()}`;
    if (item.version !== version) fill(item, row);
    item.version = version;
    if (list.children[place] !== item.element) list.insertBefore(item.element, list.children[place] ?? null);
  });
}

function newItem(row) {
  const box = made("input", { type: "checkbox", "aria-label": `draw ${row.name}` });
  const name = made("b"), words = made("small");
  const element = made("li", {}, box, made("div", {}, name, words));
  box.addEventListener("change", () => toggle(row.id));
  element.addEventListener("click", (event) => { if (event.target !== box) show(row.id); });
  const item = { element, box, name, words };
  items.set(row.id, item);
  return item;
}

function fill(item, row) {
  item.box.checked = chosen.has(row.id);
  item.element.classList.toggle("here", row.id === here);
  if (chosen.has(row.id)) item.element.style.setProperty("--swatch", colourOf(row.id));
  item.name.replaceChildren(isolated(row.name.split("/").at(-1)));  // runs of a sweep begin alike
  item.name.title = row.folder;
  const step = row.steps ? `${row.step} of ${row.steps}` : `step ${row.step}`;
  const loss = row.loss === null ? "" : `, loss ${plain(row.loss)}`;
  item.words.replaceChildren(made("span", { class: row.state }, row.state), `, ${step}${loss}`);
}

function toggle(id) {
  if (!chosen.delete(id)) chosen.add(id);
  listRuns();
  changed(true);
}

function show(id) {
  if (here !== id) { here = id; details = null; logOffset = null; byId("details").replaceChildren(); }
  listRuns();
  items.get(id)?.element.scrollIntoView({ block: "nearest" });
  changed(true);
}

function say(text, isBad = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", isBad);
}

function sayState() {
  const all = [...runs.values()], live = all.filter((row) => row.state === "running").length;
  const unread = [...chosen].filter((id) => curves.get(id)?.read < 1);
  const parts = [runs.size ? `${live} of ${runs.size} runs under way` : "No run is here yet"];
  if (chosen.size > 1) parts.push(`${chosen.size} drawn`);
  if (unread.length) parts.push(`${unread.length} still being read: their curves are samples`);
  if (fixed) parts.push("as they were when this file was written");
  say(`${parts.join(", ")}.`);
  const row = runs.get(here);
  if (row) document.title = `${row.state === "running" ? `${row.step} of ${row.steps ?? "?"}, ` : ""}${row.name}`;
}

// The run that is shown ---------------------------------------------------------------------------------

async function showDetails() {
  const row = runs.get(here);
  if (!row) return;
  facts(row);
  if (details?.id === here && details.version === row.version) return;
  const id = here;
  const answer = fixed ? fixed.details[id] : await ask("details", [["run", id]]);
  const log = fixed ? fixed.log[id] : await ask("log", logOffset === null ? [["run", id]] : [["run", id], ["offset", logOffset]]);
  if (id !== here) return;
  const begins = logOffset === null || log.offset < logOffset;
  logOffset = log.offset;
  detail(answer, row);
  addLog(log.lines, begins);
  details = { ...answer, version: row.version };
}

function facts(row) {
  const cards = [], card = (value, words) => cards.push(made("div", {}, made("b", {}, value), made("span", {}, words)));
  card(row.steps ? `${row.step} of ${row.steps}` : String(row.step), "step");
  if (row.loss !== null) card(plain(row.loss), "training loss");
  if (row.held_out_loss !== null) card(plain(row.held_out_loss), "held-out loss");
  if (row.step_seconds !== null) {
    const band = row.predicted.seconds;
    const ends = band ? `, predicted ${KINDS.seconds(band[1])} to ${KINDS.seconds(band[2])}` : "";
    card(KINDS.seconds(row.step_seconds), `a step${ends}`);
    if (band) card(...gap(row.step_seconds, band));
    if (row.tokens_per_step) card(KINDS.rate(row.tokens_per_step / row.step_seconds, row), "throughput");
  }
  if (row.mfu !== null) card(KINDS.share(row.mfu), "MFU");
  if (row.memory !== null) card(KINDS.bytes(row.memory), "memory of a device in use");
  if (row.seconds_left !== null) card(KINDS.seconds(row.seconds_left), "of steps left");
  const where = [row.of, row.on && `on ${row.on}`, row.layout && `layout ${row.layout}`].filter(Boolean).join(", ");
  byId("facts").replaceChildren(
    made("h2", {}, isolated(row.name)),
    made("p", { class: "words" }, made("span", { class: row.state }, row.state), row.words ? ` (${row.words})` : "",
      ", ", isolated(where), row.begun ? `, since ${day(row.begun)}` : ""),
    ...(row.finish ? [made("p", {}, "Finish: ", isolated(row.finish))] : []),
    made("div", { class: "cards" }, ...cards));
}

function gap(seconds, [expected, low, high]) { // between a measured step and its prediction
  const error = seconds / expected - 1, where = seconds < low ? "below" : seconds > high ? "above" : "inside";
  const words = Math.abs(error) < 9.995 ? `${error > 0 ? "+" : ""}${(100 * error).toFixed(1)} %` : `${plain(seconds / expected)} x`;
  return [words, `against ${KINDS.seconds(expected)} expected, ${where} the interval`];
}

function detail(found, row) {
  const parts = [], part = (title, ...children) => parts.push(made("section", {}, made("h2", {}, title), ...children));
  if (found.notes.length) part("Not whole", ...found.notes.map((note) => made("p", {}, isolated(note))));
  if (found.notices.length) {
    const words = (each) => [String(each.step), each.kind, each.hint ? `${each.message} (${each.hint})` : each.message];
    part("Notices", table(["step", "what", "words"], found.notices.map(words), [0]));
  }
  if (found.phases.length) {
    const whole = found.phases.reduce((sum, each) => sum + each[1], 0);
    part(row.state === "running" ? "Where the time goes, so far" : "Where the time went", shares("phase", found.phases, whole));
  }
  if (found.parts.length) {
    const whole = found.parts.reduce((sum, each) => sum + each[1], 0), measured = row.step_seconds;
    const rows = [...found.parts, ["in all, predicted", whole]];
    if (measured !== null) rows.push(["measured", measured], ["the gap", measured - whole]);
    part("What a step's time is made of, as predicted", shares("part", rows, whole));
  }
  if (found.compared.length) part("Predicted beside measured", table(["quantity", "predicted", "measured", "error", "measured by"], found.compared, [1, 2, 3]));
  for (const sample of found.samples) part("What it writes", made("pre", {}, made("b", {}, isolated(sample.prompt)), isolated(sample.text)));
  if (found.checkpoints.length) part("Checkpoints", made("p", {}, `of steps ${found.checkpoints.join(", ")}`));
  const known = new Map([...byId("details").querySelectorAll("details")].map((each) => [each.dataset.name, each.open]));
  const fold = (name, open, child) => {
    const element = made("details", { "data-name": name }, made("summary", {}, name), child);
    element.open = known.get(name) ?? open;
    parts.push(element);
  };
  const log = byId("log") ?? made("pre", { id: "log", role: "log", tabindex: "0" });
  fold("Log", true, log);
  if (found.settings.length) fold("Settings", false, table([], found.settings));
  const scroll = log.scrollTop; // an element that moves in the page loses where it was scrolled to
  byId("details").replaceChildren(...parts);
  log.scrollTop = scroll;
}

function shares(name, rows, whole) { // seconds, and how large a part of the whole they are
  const cells = (each) => [each[0], KINDS.seconds(each[1]), whole > 0 ? `${(100 * each[1] / whole).toFixed(1)} %` : ""];
  return table([name, "time", "share"], rows.map(cells), [1, 2]);
}

function addLog(lines, begins) {
  const log = byId("log"), follows = log.scrollHeight - log.scrollTop - log.clientHeight < 30;
  if (begins) log.replaceChildren();
  for (const line of lines) log.append(isolated(line), "\n");
  while (log.childNodes.length > 2 * MOST_LOG_LINES) log.firstChild.remove();
  if (follows || begins) log.scrollTop = log.scrollHeight;
}

// Curves ------------------------------------------------------------------------------------------------

const trackOf = (id, kind) => (zoom !== EMPTY && !fixed ? zoomed.get(id) ?? curves.get(id) : curves.get(id))?.tracks[kind];
const scaleOf = (id) => inTokens ? runs.get(id).tokens_per_step ?? 1 : 1;

function wanted() { // what there is to draw: the known quantities, then those of the models' own
  const keys = new Set(), heldOut = new Set(), epoch = new Set();
  for (const id of chosen) {
    for (const [kind, into] of [["train", keys], ["held-out", heldOut], ["epoch", epoch]])
      for (const [key, rows] of Object.entries(trackOf(id, kind)?.curves ?? {})) if (rows[1].some((value) => value !== null)) into.add(key);
  }
  const others = [...keys].filter((key) => !LEFT_OUT.has(key));
  const found = QUANTITIES.filter(([key, , , other]) => keys.has(key) || heldOut.has(other));
  found.push(...others.map((key) => [key, named(key), "plain", `held_out_${key}`]));
  const drawn = new Set(found.map((each) => each[3]));
  found.push(...[...heldOut].filter((key) => !drawn.has(key)).map((key) => [null, named(key), "plain", key]));
  found.push(...[...epoch].filter((key) => !["epoch", "epoch_loss"].includes(key)).map((key) => [key, named(key), key.endsWith("seconds") ? "seconds" : "plain", null, "epoch"]));
  return found.slice(0, 40);
}

const named = (key) => key.charAt(0).toUpperCase() + key.slice(1).replaceAll("_", " ");

function drawAll() {
  const begun = performance.now(), found = wanted();
  const names = new Set(found.map((each) => each[0] ?? each[3]));
  for (const [name, chart] of charts) if (!names.has(name)) { chart.figure.remove(); charts.delete(name); }
  const box = byId("charts");
  found.forEach((quantity, place) => {
    const name = quantity[0] ?? quantity[3];
    if (!charts.has(name)) charts.set(name, newChart(quantity));
    const { figure } = charts.get(name);
    if (box.children[place] !== figure) box.insertBefore(figure, box.children[place] ?? null);
  });
  const range = steps();
  for (const chart of charts.values()) draw(chart, range);
  drawSweeps();
  const drawn = Number(document.body.dataset.drawn ?? 0) + 1;
  document.body.dataset.drawn = drawn;
  document.body.dataset.ms = (performance.now() - begun).toFixed(1);
}

function steps() { // the range of the horizontal axis, in steps or in tokens
  let low = Infinity, high = -Infinity;
  for (const id of chosen) for (const track of Object.values(trackOf(id, "train") ? curves.get(id).tracks : {})) {
    if (!track.first.length) continue;
    low = Math.min(low, track.first[0] * scaleOf(id));
    high = Math.max(high, track.last[track.last.length - 1] * scaleOf(id));
  }
  if (zoom !== EMPTY) { low = zoom.low * zoom.scale; high = zoom.high * zoom.scale; }
  if (!(low <= high)) return [0, 1];
  return low === high ? [low, low + 1] : [low, high];
}

function newChart(quantity) {
  const [key, title] = quantity, told = made("span");
  const base = made("canvas"), top = made("canvas", { class: "top" });
  const figure = made("figure", key === "loss" ? { class: "wide" } : {}, made("figcaption", {}, title, told), made("div", { class: "plot" }, base, top));
  base.setAttribute("role", "img");
  const chart = { quantity, figure, told, base, top, drag: null };
  top.addEventListener("pointermove", (event) => point(event, chart));
  top.addEventListener("pointerleave", () => { if (chart.drag === null) pointAt(null); });
  top.addEventListener("pointerdown", (event) => { if (event.button === 0 && event.pointerType !== "touch") { chart.drag = event.offsetX; top.setPointerCapture(event.pointerId); } });
  top.addEventListener("pointerup", (event) => release(event, chart));
  top.addEventListener("dblclick", () => zoomTo(EMPTY));
  return chart;
}

function sized(canvas) {
  const ratio = devicePixelRatio || 1, { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  return [pen, width, height];
}

function lines(quantity) { // what a picture holds: each run's curve, and its held-out one
  const [key, , , other, kind] = quantity, found = [];
  for (const id of chosen) {
    for (const [name, of, isOther] of [[key, kind ?? "train", false], [other, "held-out", true]]) {
      const track = name ? trackOf(id, of) : null, rows = own(track?.curves, name);
      if (rows) found.push({ id, track, rows, isOther, scale: scaleOf(id) });
    }
  }
  return found;
}

function draw(chart, [left, right]) {
  const [pen, width, height] = sized(chart.base), [key, title, kind] = chart.quantity;
  const found = lines(chart.quantity), margin = { left: 58, right: 8, top: 6, bottom: 20 };
  let low = Infinity, high = -Infinity, least = Infinity; // least: the smallest value above zero, for a logarithm
  for (const { rows, track, scale } of found) {
    for (let i = 0; i < rows[1].length; i++) {
      if (rows[1][i] === null || track.last[i] * scale < left || track.first[i] * scale > right) continue;
      if (rows[0][i] < low) low = rows[0][i];
      if (rows[2][i] > high) high = rows[2][i];
      if (rows[0][i] > 0 && rows[0][i] < least) least = rows[0][i];
    }
  }
  const bands = predicted(key), near = [low / FAR, high * FAR];
  for (const [, bottom, top] of bands) {
    if (top < near[0] || bottom > near[1]) continue; // a band that far away would leave the curve no room
    low = Math.min(low, bottom);
    high = Math.max(high, top);
    if (bottom > 0) least = Math.min(least, bottom);
  }
  if (!(low <= high)) { chart.view = null; return; }
  const asLog = isLog && least < Infinity && high > 0;
  if (asLog) low = least; else if (["seconds", "rate", "share", "bytes"].includes(kind)) low = Math.min(0, low);
  if (low === high && low === 0) high = 1; else if (low === high) { low -= Math.abs(low) / 10 || 1; high += Math.abs(high) / 10 || 1; if (asLog) low = high / 10; }
  const bend = asLog ? Math.log10 : (value) => value;
  const [from, to] = [bend(low), bend(high) + (bend(high) - bend(low)) * .04];
  const x = (value) => margin.left + (width - margin.left - margin.right) * (value - left) / (right - left);
  const y = (value) => height - margin.bottom - (height - margin.top - margin.bottom) * (bend(Math.max(value, asLog ? low : value)) - from) / (to - from);
  chart.view = { x, y, left, right, margin, width, height, found };
  axes(pen, chart.view, asLog ? decades(from, to) : ticks(low, high, 4, kind), ticks(left, right, Math.max(3, Math.floor(width / 100))), kind);
  pen.save();
  pen.beginPath();
  pen.rect(margin.left, 0, width - margin.left - margin.right, height - margin.bottom + 1);
  pen.clip();
  for (const [middle, bottom, top, colour] of bands) {
    pen.fillStyle = pen.strokeStyle = colour;
    pen.globalAlpha = .16;
    pen.fillRect(margin.left, y(top), width, Math.max(1, y(bottom) - y(top)));
    pen.globalAlpha = .8;
    pen.setLineDash([2, 3]);
    stroke(pen, [[margin.left, y(middle)], [width, y(middle)]]);
    pen.setLineDash([]);
  }
  for (const line of found) if (line.id !== here) curve(pen, line, x, y);
  for (const line of found) if (line.id === here) curve(pen, line, x, y);
  pen.restore();
  chart.base.setAttribute("aria-label", `${title} of ${chosen.size} runs: ${KINDS[kind](low)} to ${KINDS[kind](high)}`);
  chart.told.textContent = summary(chart);
}

function predicted(key) { // the band of the run that is shown, or of the few that are drawn
  const ids = chosen.has(here) ? [here] : chosen.size <= 2 ? [...chosen] : [];
  return ids.flatMap((id) => {
    const band = own(runs.get(id)?.predicted, key);
    return band ? [[...band, colourOf(id)]] : [];
  });
}

function curve(pen, { id, track, rows, isOther, scale }, x, y) {
  const [low, mean, high] = rows, { first, last } = track;
  pen.strokeStyle = pen.fillStyle = colourOf(id);
  pen.lineWidth = id === here ? 1.8 : 1.1;
  if (low !== high) { // spikes: a stroke from the least to the largest value of each bucket
    pen.globalAlpha = .38;
    pen.beginPath();
    for (let i = 0; i < mean.length; i++) {
      if (mean[i] === null || high[i] === low[i]) continue;
      const at = x((first[i] + last[i]) / 2 * scale);
      pen.moveTo(at, y(low[i]));
      pen.lineTo(at, y(high[i]));
    }
    pen.stroke();
  }
  pen.globalAlpha = 1;
  if (isOther) pen.setLineDash([5, 3]);
  pen.beginPath();
  let draws = false;
  for (let i = 0; i < mean.length; i++) {
    if (mean[i] === null) { draws = false; continue; }
    const at = x((first[i] + last[i]) / 2 * scale), level = y(mean[i]);
    if (draws) pen.lineTo(at, level); else { pen.moveTo(at, level); if (mean.length === 1 || mean[i + 1] === null) pen.rect(at - 1, level - 1, 2, 2); }
    draws = true;
  }
  pen.stroke();
  pen.setLineDash([]);
  if (isOther && mean.length < 60) for (let i = 0; i < mean.length; i++) if (mean[i] !== null) pen.fillRect(x(first[i] * scale) - 2, y(mean[i]) - 2, 4, 4);
}

function stroke(pen, points) {
  pen.beginPath();
  points.forEach(([x, y], place) => place ? pen.lineTo(x, y) : pen.moveTo(x, y));
  pen.stroke();
}

function ticks(low, high, count, kind = "plain") {
  if (kind === "bytes") {
    const unit = 1024 ** Math.max(0, Math.floor(Math.log(high) / Math.log(1024)));
    return ticks(low / unit, high / unit, count).map((each) => each * unit);
  }
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? rough;
  const found = [];
  for (let place = Math.ceil(low / step); place * step <= high && found.length < 50; place++) found.push(place * step);
  return found;
}

function decades(from, to) {
  const every = Math.max(1, Math.ceil((to - from) / 6)), found = [];
  for (let power = Math.ceil(from); power <= to; power += every) found.push(10 ** power);
  return found.length > 1 ? found : ticks(10 ** from, 10 ** to, 4).filter((value) => value > 0);
}

function axes(pen, { x, y, margin, width, height }, levels, places, kind) {
  pen.strokeStyle = styled("--line");
  pen.fillStyle = styled("--faint");
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const level of levels) {
    stroke(pen, [[margin.left, y(level)], [width - margin.right, y(level)]]);
    pen.fillText(KINDS[kind](level), margin.left - 5, y(level));
  }
  pen.textAlign = "center";
  pen.textBaseline = "top";
  const few = (value) => value >= 1e4 ? scaled(value, 1000, ["", "k", "M", "G", "T"], "") : plain(value);
  for (const place of places) if (x(place) < width - 12) pen.fillText(few(place), x(place), height - margin.bottom + 5);
}

function summary(chart) {
  const { found } = chart.view, mine = found.filter((line) => line.id === here), row = runs.get(here);
  const band = mine.length ? own(row.predicted, chart.quantity[0]) : null, words = (value) => KINDS[chart.quantity[2]](value, row);
  const ends = band ? [...new Set(band.slice(1).map(words))].join(" to ") : "";
  return mine.map(({ rows, isOther }) => {
    const value = rows[1].findLast((each) => each !== null);
    return value === undefined ? "" : `${isOther ? "held-out " : ""}${KINDS[chart.quantity[2]](value, row)}`;
  }).filter(Boolean).join(", ") + (ends ? `, predicted ${ends}` : "");
}

// The pointer -------------------------------------------------------------------------------------------

function point(event, chart) {
  if (!chart.view) return;
  const { left, right, margin, width } = chart.view;
  const place = left + (event.offsetX - margin.left) / (width - margin.left - margin.right) * (right - left);
  pointAt(Math.min(right, Math.max(left, place)), chart, event.offsetX);
}

function pointAt(place, dragged = null, at = 0) {
  for (const chart of charts.values()) {
    if (!chart.view) continue;
    const [pen, , height] = sized(chart.top), { x, y, found, margin } = chart.view;
    if (place === null) { chart.told.textContent = summary(chart); continue; }
    if (chart === dragged && chart.drag !== null) {
      pen.fillStyle = styled("--accent");
      pen.globalAlpha = .2;
      pen.fillRect(Math.min(at, chart.drag), 0, Math.abs(at - chart.drag), height - margin.bottom);
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = styled("--faint");
    stroke(pen, [[x(place), 0], [x(place), height - margin.bottom]]);
    const told = [];
    for (const { id, track, rows, isOther, scale } of found) {
      const i = nearest(track, place / scale), value = rows[1][i];
      if (value === null || value === undefined) continue;
      pen.fillStyle = colourOf(id);
      pen.beginPath();
      pen.arc(x((track.first[i] + track.last[i]) / 2 * scale), y(value), 3, 0, 7);
      pen.fill();
      const row = runs.get(id), words = KINDS[chart.quantity[2]](value, row);
      const spread = rows[2][i] > rows[0][i] ? ` (to ${KINDS[chart.quantity[2]](rows[2][i], row)})` : "";
      told.push(`${chosen.size > 1 ? `${row.name} ` : ""}${isOther ? "held-out " : ""}${words}${spread}`);
    }
    const more = told.length > MOST_TOLD ? `, and ${told.length - MOST_TOLD} more` : "";
    chart.told.textContent = `${inTokens ? "" : "step "}${scaled(Math.round(place), 1000, ["", "k", "M", "G", "T"], "")}: ${told.slice(0, MOST_TOLD).join(", ")}${more}`;
    chart.told.title = told.join("\n");
  }
}

function nearest({ first, last }, step) {
  let low = 0, high = first.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (last[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - last[low - 1] < first[low] - step ? low - 1 : low;
}

function release(event, chart) {
  const begun = chart.drag;
  chart.drag = null;
  if (begun === null || !chart.view || Math.abs(event.offsetX - begun) < 5) return;
  const { left, right, margin, width } = chart.view, scale = scaleOf(here ?? [...chosen][0]);
  const ends = [begun, event.offsetX].sort((one, other) => one - other)
    .map((at) => left + (at - margin.left) / (width - margin.left - margin.right) * (right - left));
  const low = Math.max(0, Math.floor(ends[0] / scale)), high = Math.max(low + 1, Math.ceil(ends[1] / scale));
  zoomTo({ low, high, scale });
}

function zoomTo(view) {
  zoom = view;
  zoomed = new Map();
  byId("key-r").disabled = zoom === EMPTY;
  changed(true);
}

// Sweeps ------------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";
function svg(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

let drawnSweeps = "";
function drawSweeps() { // a line for each run, through its values and its held-out loss
  const state = JSON.stringify([sweeps, [...chosen], here, isDark()]);
  if (state === drawnSweeps) return;
  drawnSweeps = state;
  byId("sweeps").replaceChildren(...sweeps.filter((sweep) => sweep.runs.length && sweep.keys.length).map(parallel));
}

function parallel(sweep) {
  const WIDTH = 900, HEIGHT = 240, LEFT = 40, RIGHT = 110, TOP = 34, BOTTOM = 20;
  const columns = [...sweep.keys.map((key) => [key, (run) => own(run.values, key)]), ["held-out loss", (run) => run.held_out_loss]];
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const scales = columns.map(([, of]) => axisOf(sweep.runs.map(of)));
  const across = (place) => LEFT + (WIDTH - LEFT - RIGHT) * place / Math.max(1, columns.length - 1);
  const down = (share) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share;
  const losses = sweep.runs.map((run) => run.held_out_loss).filter((loss) => loss !== null).sort((one, other) => one - other);
  for (const run of sweep.runs) {
    const points = columns.map(([, of], place) => [across(place), scales[place].at(of(run))]).filter(([, share]) => share !== null);
    const path = svg("path", { d: points.map(([x, share], place) => `${place ? "L" : "M"}${x.toFixed(1)} ${down(share).toFixed(1)}`).join("") });
    const rank = losses.indexOf(run.held_out_loss) / Math.max(1, losses.length - 1);
    if (run.held_out_loss === null) path.classList.add("open");
    else path.style.stroke = `hsl(${206 - 180 * rank} 70% ${isDark() ? 62 : 42}%)`;
    if (run.id === here) path.style.strokeWidth = 4;
    const values = sweep.keys.map((key) => `${key}=${own(run.values, key)}`).join(", ");
    path.append(svg("title", {}, `${values}: ${run.held_out_loss === null ? "not finished" : plain(run.held_out_loss)}`));
    if (run.id) path.addEventListener("click", () => { chosen.add(run.id); show(run.id); });
    picture.append(path);
  }
  columns.forEach(([name], place) => {
    const x = across(place), lastOne = place === columns.length - 1;
    picture.append(svg("line", { class: "axis", x1: x, x2: x, y1: down(0), y2: down(1) }));
    picture.append(svg("text", { x, y: 16, "text-anchor": place ? lastOne ? "start" : "middle" : "start" }, name));
    for (const [share, text] of scales[place].marks) picture.append(svg("text", { x: x + 6, y: down(share) + 4 }, text));
  });
  const best = losses.length ? `, best held-out loss ${plain(losses[0])}` : "";
  return made("div", { class: "parallel" }, made("h2", {}, "Sweep ", isolated(sweep.name)), made("p", { class: "words" }, `${sweep.runs.length} runs${best}`), picture);
}

function axisOf(values) { // numbers on a line, by their logarithm where they span a lot; other values in a row
  const known = values.filter((value) => value !== null && value !== undefined), numbers = known.map(Number);
  if (numbers.length && numbers.every((value, place) => Number.isFinite(value) && known[place] !== "")) {
    const low = Math.min(...numbers), high = Math.max(...numbers), asLog = low > 0 && high / low >= 20;
    const bend = asLog ? Math.log10 : (value) => value, span = bend(high) - bend(low);
    const at = (value) => value === null || value === undefined ? null : span ? (bend(Number(value)) - bend(low)) / span : .5;
    const marks = [...new Set(numbers)].sort((one, other) => one - other);
    const few = marks.length > 6 ? [low, high] : marks;
    return { at, marks: few.map((value) => [at(value), plain(value)]) };
  }
  const names = [...new Set(known)];
  const at = (value) => names.includes(value) ? (names.length > 1 ? names.indexOf(value) / (names.length - 1) : .5) : null;
  return { at, marks: names.slice(0, 12).map((name) => [at(name), name.slice(0, 24)]) };
}

// Keys --------------------------------------------------------------------------------------------------

function press(button, isOn) {
  byId(button).setAttribute("aria-pressed", String(isOn));
  drawAll();
}

function theme(dark) {
  document.documentElement.classList.toggle("dark", dark);
  byId("key-d").textContent = dark ? "light" : "dark";
}

function move(by) {
  const listed = sorted().filter(matches), place = listed.findIndex((row) => row.id === here);
  const next = listed[Math.min(listed.length - 1, Math.max(0, place + by))];
  if (next) show(next.id);
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  ArrowDown: () => move(1),
  ArrowUp: () => move(-1),
  x: () => here && toggle(here),
  o: () => { if (!here) return; chosen.clear(); toggle(here); },
  a: () => { for (const row of sorted().filter(matches)) chosen.add(row.id); listRuns(); changed(true); },
  "/": () => byId("filter").focus(),
  l: () => press("key-l", isLog = !isLog),
  t: () => { zoomTo(EMPTY); press("key-t", inTokens = !inTokens); },
  r: () => zoomTo(EMPTY),
  d: () => { theme(!isDark()); listRuns(); drawAll(); },
  "?": () => byId("help").showModal(),
};

addEventListener("keydown", (event) => {
  const isTyping = event.target.matches?.("input[type=search], pre") || byId("help").open;
  if (event.key === "Escape" && event.target === byId("filter")) byId("filter").blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
});
for (const key of ["l", "t", "r", "d", "a", "o"]) byId(`key-${key}`).addEventListener("click", KEYS[key]);
byId("key-help").addEventListener("click", KEYS["?"]);
byId("filter").addEventListener("input", listRuns);
const prefers = matchMedia("(prefers-color-scheme: dark)");
prefers.addEventListener("change", () => { theme(prefers.matches); drawAll(); });
theme(prefers.matches);
let resized = null;
new ResizeObserver(() => { cancelAnimationFrame(resized); resized = requestAnimationFrame(drawAll); }).observe(byId("charts"));

if (fixed) {
  for (const [id, answer] of Object.entries(fixed.curves)) merge(id, answer);
  take(fixed);
} else listen();
