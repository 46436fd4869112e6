// The board's page. Text of models, environments and data goes into the document as text alone.
"use strict";

const FIRST = ["reward/mean", "response/tokens_mean", "train/entropy", "train/kl_rollout_k1", "train/grad_norm", "response/truncated_fraction"];
const SHOWN = 4; // charts at first
const EVERY = 5000; // ms between two looks at a run that goes on
const HUES = { policy: 215, environment: 30, template: 280 };
const state = { of: "", view: "samples", order: "best", status: "", reward: "", search: "", group: "", page: 0, row: null, colour: "" };
let run = null, sample = null, curves = { names: [], steps: [], values: {} }, charts = [];

const $ = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const made = tag === "svg" || tag === "line" || tag === "polyline"
    ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((one) => one !== null && one !== undefined));
  return made;
}

const link = (text, go) => el("button", { type: "button", class: "link", onclick: go }, text);
const number = (value, digits = 4) => value === null || value === undefined ? "none" : String(+value.toPrecision(digits));
const failure = (error) => el("p", { class: "error", role: "alert" }, error.message);

// --- the server -----------------------------------------------------------------------------------

const key = (() => {
  const found = new URLSearchParams(location.hash.slice(1)).get("key");
  if (found) sessionStorage.setItem("key", found);
  return found || sessionStorage.getItem("key") || "";
})();

async function ask(name, words = {}) {
  const query = new URLSearchParams();
  for (const [word, value] of Object.entries(words)) for (const one of [value].flat()) query.append(word, one);
  let answer;
  try {
    answer = await fetch(`/api/${name}?${query}`, { headers: { Authorization: `Bearer ${key}` } });
  } catch {
    throw new Error("The board has ended. Start it again: refrain board RUN.");
  }
  if (answer.status === 401) throw new Error("The key is missing. Open the link that refrain board printed.");
  if (answer.headers.get("content-type") === "image/png") return answer.blob();
  const record = await answer.json();
  if (!answer.ok) throw new Error(record.error || record.detail);
  return record;
}

// --- what is looked at, which the address says too ------------------------------------------------

function remember() {
  const words = Object.entries(state).filter(([, value]) => value !== "" && value !== null && value !== 0);
  history.replaceState(null, "", "#" + new URLSearchParams(words));
}

function go(change) {
  const before = { ...state };
  Object.assign(state, change);
  remember();
  const listed = ["of", "view", "order", "status", "reward", "search", "group", "page"];
  const other = listed.some((name) => before[name] !== state[name]);
  if (other) showList();
  if (before.row !== state.row || before.of !== state.of) showSample();
  if (before.of !== state.of) drawCharts();
  return other;
}

function fillForm() {
  const evaluation = state.of.includes("@");
  $("step").value = evaluation ? "" : state.of;
  $("evaluation").value = evaluation ? state.of : "";
  for (const name of ["view", "order", "status", "reward", "group", "search"]) $(name).value = state[name];
}

// --- the run and its curves -----------------------------------------------------------------------

function showRun() {
  $("run").textContent = run.run;
  document.title = run.run;
  const steps = run.steps && run.steps >= run.last ? `${run.last} of ${run.steps}` : `${run.last}`;
  const origin = run.origin ? `, from ${run.origin}` : "";
  $("state").textContent = `${run.state}, ${steps} steps${origin}, ${run.flow || ""}`;
  $("state").title = run.store;
  $("evaluation").replaceChildren(el("option", { value: "" }, "none"), ...run.evaluations.map((one) => el("option", {}, one)));
  fillForm();
}

async function showCurves() {
  if (!charts.length) {
    const { names } = await ask("curves");
    const evaluations = names.filter((one) => /^eval\/.*\/reward$/.test(one));
    charts = [...FIRST.filter((one) => names.includes(one)).slice(0, SHOWN), ...evaluations];
  }
  curves = await ask("curves", { name: charts });
  $("metrics").replaceChildren(...curves.names.map((one) => el("option", { value: one })));
  drawCharts();
}

function drawCharts() {
  $("charts").replaceChildren(...charts.map(chart));
}

function chart(name) {
  const points = curves.steps.map((step, at) => [step, (curves.values[name] || [])[at]]).filter(([, y]) => y !== null && y !== undefined);
  const caption = el("span", {}, name);
  const value = el("span", {}, points.length ? number(points.at(-1)[1]) : "no value");
  const close = el("button", { type: "button", class: "link", title: `hide ${name}`, onclick: () => { charts = charts.filter((one) => one !== name); drawCharts(); } }, "✕");
  const figure = el("figure", { "data-metric": name }, el("figcaption", {}, caption, value, close));
  if (!points.length) return figure;
  const [first, last] = [curves.steps[0], curves.steps.at(-1)];
  const ys = points.map(([, y]) => y);
  const low = ys.reduce((a, b) => Math.min(a, b)), high = ys.reduce((a, b) => Math.max(a, b));
  const x = (step) => last === first ? 50 : (100 * (step - first)) / (last - first);
  const y = (one) => high === low ? 50 : 96 - (92 * (one - low)) / (high - low);
  const drawing = el("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": `${name}: ${number(low)} to ${number(high)}` });
  drawing.append(el("polyline", { points: points.map(([step, one]) => `${x(step)},${y(one)}`).join(" ") }));
  if (points.length === 1) drawing.append(el("line", { class: "dot", x1: x(points[0][0]), x2: x(points[0][0]), y1: y(ys[0]), y2: y(ys[0]) }));
  if (/^\d+$/.test(state.of)) drawing.append(el("line", { class: "here", x1: x(+state.of), x2: x(+state.of), y1: 0, y2: 100 }));
  const nearest = (event) => {
    const box = drawing.getBoundingClientRect();
    const step = first + ((event.clientX - box.left) / box.width) * (last - first);
    return points.reduce((a, b) => (Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a));
  };
  drawing.addEventListener("mousemove", (event) => { const [step, one] = nearest(event); value.textContent = `step ${step}: ${number(one)}`; });
  drawing.addEventListener("mouseleave", () => { value.textContent = number(ys.at(-1)); });
  drawing.addEventListener("click", (event) => go({ of: String(nearest(event)[0]), row: null, page: 0 }));
  figure.append(drawing, el("div", { class: "axis" }, el("span", {}, `step ${first}`), el("span", {}, `${number(low)} to ${number(high)}`), el("span", {}, `${last}`)));
  return figure;
}

// --- the list -------------------------------------------------------------------------------------

let asked = 0; // of several answers under way only the last is shown

async function showList() {
  fillForm();
  const mine = ++asked;
  const words = state.view === "groups" ? { of: state.of, page: state.page }
    : { of: state.of, order: state.order, status: state.status, reward: state.reward, search: state.search, group: state.group, page: state.page };
  try {
    const found = await ask(state.view, words);
    if (mine !== asked) return;
    const said = [`${found.name}: ${found.count} samples`];
    if (found.mean !== null) said.push(`mean reward ${number(found.mean)}`);
    if (!found.scored) said.push("not scored yet");
    if (found.failed) said.push(`${found.failed} could not be scored`);
    if (!found.committed) said.push("the step is not committed");
    if (found.chosen !== undefined && found.chosen !== found.count) said.push(`${found.chosen} shown`);
    if (found.matches) said.push(`found ${found.matches.responses} times in answers and ${found.matches.prompts} in prompts`);
    $("facts").textContent = said.join(", ");
    $("list").replaceChildren(...(found.samples || found.groups).map(found.samples ? sampleCard : groupCard));
    showPages(found);
    highlight($("list"));
  } catch (error) {
    if (mine !== asked) return;
    $("facts").textContent = "";
    $("pages").replaceChildren();
    $("list").replaceChildren(failure(error));
  }
}

function showPages(found) {
  const parts = [];
  if (found.page > 0) parts.push(link("◀ before", () => go({ page: state.page - 1 })));
  if (found.pages > 1) parts.push(` page ${found.page + 1} of ${found.pages} `);
  if (found.page + 1 < found.pages) parts.push(link("next ▶", () => go({ page: state.page + 1 })));
  $("pages").replaceChildren(...parts);
}

function sampleCard(one) {
  if (one.error) return el("p", { class: "error", role: "alert" }, `Sample in row ${one.row}: ${one.error}`);
  const reward = one.reward === null ? "no reward" : `reward ${number(one.reward)}`;
  const advantage = one.trained ? `advantage ${number(one.advantage)}` : "did not train";
  const head = `${reward}, ${advantage}; group ${one.group}, data row ${one.data_row}, ${one.tokens} tokens, ${one.finish}, v${one.versions.join(", v")}`;
  return el("button", { type: "button", class: "card", "data-row": one.row, "aria-current": one.row === state.row ? "true" : null, onclick: () => go({ row: one.row }) },
    el("span", {}, head), el("span", { class: "text prompt" }, one.prompt), el("span", { class: "text" }, one.response));
}

function groupCard(one) {
  const head = `group ${one.group}, mean ${number(one.mean)}, deviation ${number(one.std)} `;
  const text = one.error ? el("p", { class: "error" }, one.error) : el("span", { class: "text prompt" }, one.prompt);
  return el("div", { class: "card" }, link(head, () => go({ view: "samples", group: String(one.group), page: 0 })), text,
    chips(one.rows.map((row, at) => ({ row, reward: one.rewards[at] }))));
}

function chips(samples) {
  return el("div", { class: "chips" }, ...samples.map((one) => {
    const made = el("button", { type: "button", title: `sample in row ${one.row}`, "aria-current": one.row === state.row ? "true" : null, onclick: () => go({ row: one.row }) }, one.reward === null ? "failed" : number(one.reward, 3));
    return made;
  }));
}

// --- one sample -----------------------------------------------------------------------------------

async function showSample() {
  for (const card of document.querySelectorAll(".card[data-row]")) {
    if (+card.dataset.row === state.row) card.setAttribute("aria-current", "true");
    else card.removeAttribute("aria-current");
  }
  if (state.row === null) {
    sample = null;
    $("sample").replaceChildren(el("p", { class: "hint" }, "Choose a sample."));
    return;
  }
  const { of, row } = state;
  try {
    const found = await ask("sample", { of, row });
    if (of !== state.of || row !== state.row) return;
    sample = found;
    drawSample();
  } catch (error) {
    $("sample").replaceChildren(failure(error));
  }
}

function colourings() {
  const versions = sample.origin.spans.length ? ["policy version"] : [];
  const names = [...Object.keys(sample.numbers), "author", ...versions];
  const ratio = "log-prob ratio trainer / engine";
  return { names, absent: names.includes(ratio) ? [] : [`${ratio}: stored with train.recompute_old_logprobs=true`] };
}

function drawSample() {
  const { origin } = sample;
  const { names, absent } = colourings();
  if (!names.includes(state.colour)) state.colour = names.find((one) => one.startsWith("advantage")) || names[0];
  const select = el("select", { id: "colour", onchange: (event) => { state.colour = event.target.value; remember(); repaint(); } },
    ...names.map((one) => el("option", { value: one }, one)), ...absent.map((one) => el("option", { disabled: "" }, one)));
  select.value = state.colour;
  const paint = painter();
  const reward = origin.reward === null ? "no reward" : `reward ${number(origin.reward)}`;
  $("sample").replaceChildren(
    el("strong", {}, `Sample ${origin.sample} of ${sample.name}, ${reward}`), " ",
    el("label", {}, " Tokens coloured by ", select), " ", paint.legend,
    ...conversation(paint), origins(),
  );
  highlight($("sample"));
}

function repaint() {
  const paint = painter();
  for (const one of $("sample").querySelectorAll(".token")) one.style.background = paint.colour(one.dataset.at);
  $("sample").querySelector(".legend").replaceWith(paint.legend);
}

function conversation(paint) {
  const shown = [turn("prompt", [sample.prompt])];
  const rewards = [...(sample.origin.turn_rewards || [])];
  const pictures = Array.from({ length: sample.pictures }, (_, at) => at);
  if (pictures.length) shown.push(pictureOf(pictures.shift()));
  for (let at = 0; at < sample.tokens.length;) {
    const who = sample.authors[at];
    const spans = [];
    for (; at < sample.tokens.length && sample.authors[at] === who; at++) spans.push(token(at, paint));
    const worth = who === "policy" && rewards.length ? rewards.shift() : null;
    shown.push(turn(who, spans, worth === null ? "" : `, reward of the turn ${number(worth)}`));
    if (who === "environment" && pictures.length) shown.push(pictureOf(pictures.shift()));
  }
  if (pictures.length) shown.push(el("div", { class: "pictures" }, ...pictures.map(image)));
  return shown;
}

function turn(who, parts, more = "") {
  return el("div", { class: `turn ${who}` }, el("div", { class: "who" }, who + more), ...parts);
}

function token(at, paint) {
  const text = sample.tokens[at];
  const made = el("span", { class: text ? "token" : "token part", "data-at": at }, text);
  made.style.background = paint.colour(at);
  return made;
}

document.addEventListener("mouseover", (event) => {
  const at = event.target.dataset && event.target.dataset.at;
  if (at === undefined || sample === null) return;
  const numbers = Object.entries(sample.numbers).map(([name, values]) => `${name}: ${number(values[at])}`);
  const version = versionOf(+at);
  event.target.title = [`token ${at}, ${sample.authors[at]}${version === null ? "" : `, version ${version}`}`, ...numbers].join("\n");
});

function versionOf(at) {
  const span = sample.origin.spans.find((one) => one.start <= at && at < one.stop);
  return span ? span.version : null;
}

// How each token is coloured, and what the colours mean.
function painter() {
  const name = state.colour;
  if (name === "author" || name === "policy version") {
    const label = name === "author" ? (at) => sample.authors[at] : (at) => versionOf(+at);
    const labels = [...new Set(sample.tokens.map((_, at) => label(at)))].filter((one) => one !== null);
    const hue = (one) => (name === "author" ? HUES[one] : (labels.indexOf(one) * 137) % 360);
    const colour = (one) => `hsl(${hue(one)} 80% 55% / 35%)`;
    return { colour: (at) => (label(at) === null ? "" : colour(label(at))), legend: legend(labels.map((one) => [colour(one), name === "author" ? one : `v${one}`])) };
  }
  const values = sample.numbers[name] || [];
  const known = values.filter((one) => one !== null);
  const size = known.reduce((a, b) => Math.max(a, Math.abs(b)), 0) || 1;
  const colour = (one) => `hsl(${one < 0 ? 5 : 215} 85% 55% / ${Math.round((70 * Math.abs(one)) / size)}%)`;
  const ends = [[colour(-size), number(-size, 3)], [colour(0), "0"], [colour(size), number(size, 3)]];
  const low = known.some((one) => one < 0), high = known.some((one) => one > 0);
  const wanted = ends.filter((_, at) => at === 1 || (at === 0 ? low : high));
  return { colour: (at) => (values[at] === null || values[at] === undefined ? "" : colour(values[at])), legend: legend(wanted) };
}

function legend(ends) {
  return el("span", { class: "legend" }, ...ends.flatMap(([colour, text]) => {
    const box = el("i");
    box.style.background = colour;
    return [box, text];
  }));
}

function pictureOf(at) {
  return el("div", { class: "pictures" }, image(at));
}

function image(at) {
  const made = el("img", { alt: at === 0 ? "what the environment showed first" : `what it showed after turn ${at}` });
  ask("picture", { of: state.of, row: state.row, number: at }).then((data) => {
    made.src = URL.createObjectURL(data);
    made.onload = () => URL.revokeObjectURL(made.src);
  }, (error) => made.replaceWith(failure(error)));
  return made;
}

function origins() {
  const { origin } = sample;
  const facts = [];
  const fact = (name, ...parts) => facts.push(el("dt", {}, name), el("dd", {}, ...parts));
  fact("group", link(`${origin.group}`, () => go({ view: "samples", group: String(origin.group), page: 0 })), chips(sample.siblings));
  fact("data row", link(`${origin.prompt_row}`, showDraws), " ", el("span", { id: "draws" }), sample.data === null ? null : el("pre", {}, JSON.stringify(sample.data, null, 1)));
  for (const version of new Set(origin.spans.map((one) => one.version))) {
    const tokens = origin.spans.filter((one) => one.version === version).map((one) => `${one.start} to ${one.stop - 1}`);
    const made = origin.step && version >= run.first && version <= run.last;
    const visit = () => go({ of: String(version), row: null, page: 0, group: "" });
    fact("policy", made ? link(`version ${version}, which step ${version} made`, visit) : `version ${version}`, `: tokens ${tokens.join(", ")}`);
  }
  fact("weights held", origin.weights_digest || "not recorded");
  if (sample.version_in) fact("step began with", `version ${sample.version_in.version}, ${sample.version_in.digest}`);
  if (sample.version_out) fact(origin.trained ? "it trained" : "it trained no version; the step made", `version ${sample.version_out.version}, ${sample.version_out.digest}`);
  fact("worker", `${origin.worker}, attempt ${origin.attempt}`);
  fact("end", [origin.finish_reason, origin.episode_end && `episode: ${origin.episode_end}`, origin.episode_error].filter(Boolean).join(", "));
  for (const [name, value] of Object.entries(origin.scores)) fact(`score ${name}`, number(value));
  if (origin.advantage !== null) fact("advantage", `${number(origin.advantage)} on average`);
  if (origin.reward_code) fact("reward code", origin.reward_code);
  if (origin.teacher) fact("teacher", `${origin.teacher}, ${origin.teacher_digest}`);
  if (origin.player !== null) fact("player", `${origin.player} of episode ${origin.episode}`);
  if (origin.opponent) fact("opponent", origin.opponent);
  if (sample.frames && !sample.pictures) fact("frames", `${sample.frames}, which is no picture`);
  for (const [name, value] of Object.entries(origin.extras)) if (value !== null) fact(name, el("pre", {}, typeof value === "string" ? value : JSON.stringify(value, null, 1)));
  fact("stored in", ...sample.objects.map((one) => el("div", {}, one)));
  return el("div", {}, el("h2", {}, "Where it came from"), el("dl", {}, ...facts));
}

async function showDraws() {
  const place = $("draws");
  place.textContent = "is looked for…";
  try {
    const found = await ask("data_row", { row: sample.origin.prompt_row });
    const by = found.samples.map((one) => link(`step ${one.step}: ${one.reward === null ? "failed" : number(one.reward, 3)}`, () => goTo(one)));
    const gone = found.removed.map(([, step]) => `step ${step}: removed by retention`);
    const dropped = found.dropped.map(([, step, reason]) => `step ${step}: ${reason}`);
    place.replaceChildren("drawn: ", ...[...by, ...gone, ...dropped].flatMap((one) => [one, "; "]), found.more ? "and perhaps later" : "");
  } catch (error) {
    place.replaceChildren(failure(error));
  }
}

async function goTo(one) {
  const of = String(one.step);
  try {
    const { row } = await ask("find", { of, sample: one.sample });
    go({ of, row, group: "", search: "", status: "", reward: "", page: 0 });
  } catch (error) {
    $("draws").replaceChildren(failure(error));
  }
}

// What was searched for is marked where the browser can (CSS Custom Highlight API).
function highlight(place) {
  if (!("highlights" in CSS)) return;
  const ranges = place.id === "list" ? [] : [...(CSS.highlights.get("search") || [])].filter((one) => $("list").contains(one.startContainer));
  let pattern = null;
  try {
    pattern = state.search ? new RegExp(state.search, "g") : null;
  } catch { /* Python's syntax, which the server has understood, is not quite the browser's */ }
  for (const part of pattern ? place.querySelectorAll(".text, .turn") : []) {
    const nodes = [];
    const walker = document.createTreeWalker(part, NodeFilter.SHOW_TEXT);
    let length = 0;
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      nodes.push([length, node]);
      length += node.data.length;
    }
    const at = (offset) => { // the text node in which a place of the whole text lies
      const [start, node] = nodes.findLast(([begin]) => begin <= offset);
      return [node, offset - start];
    };
    for (const match of part.textContent.matchAll(pattern)) {
      if (!match[0]) continue;
      const range = new Range();
      range.setStart(...at(match.index));
      range.setEnd(...at(match.index + match[0].length));
      ranges.push(range);
    }
  }
  CSS.highlights.set("search", new Highlight(...ranges));
}

// --- the beginning --------------------------------------------------------------------------------

async function lookAgain() {
  if (!document.hidden) {
    try {
      const before = JSON.stringify([run.last, run.evaluations]);
      run = await ask("run");
      showRun();
      if (JSON.stringify([run.last, run.evaluations]) !== before) await showCurves();
    } catch (error) {
      $("state").replaceChildren(failure(error));
    }
  }
  if (run.running) setTimeout(lookAgain, EVERY);
}

function listen() {
  $("choice").addEventListener("submit", (event) => {
    event.preventDefault();
    const of = $("step").value || $("evaluation").value || state.of;
    const change = Object.fromEntries(["view", "order", "status", "reward", "group", "search"].map((name) => [name, $(name).value]));
    const other = go({ ...change, of, page: 0, row: of === state.of ? state.row : null });
    if (!other) showList(); // the same once more, of a step that goes on
  });
  for (const name of ["view", "order", "status"]) $(name).addEventListener("change", () => $("choice").requestSubmit());
  $("evaluation").addEventListener("change", (event) => go({ of: event.target.value || String(run.last), row: null, page: 0, group: "" }));
  const move = (by) => go({ of: String(Math.max(1, (/^\d+$/.test(state.of) ? +state.of : run.last) + by)), row: null, page: 0, group: "" });
  $("step").addEventListener("change", (event) => event.target.value && go({ of: event.target.value, row: null, page: 0, group: "" }));
  $("back").addEventListener("click", () => move(-1));
  $("on").addEventListener("click", () => move(1));
  $("newest").addEventListener("click", () => go({ of: String(run.last), row: null, page: 0, group: "" }));
  $("add").addEventListener("submit", async (event) => {
    event.preventDefault();
    const name = $("metric").value;
    if (!curves.names.includes(name) || charts.includes(name)) return;
    charts.push(name);
    $("metric").value = "";
    await showCurves();
  });
}

async function begin() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(state)) if (words.has(name)) state[name] = ["row", "page"].includes(name) ? +words.get(name) : words.get(name);
  try {
    run = await ask("run");
  } catch (error) {
    $("state").replaceChildren(failure(error));
    return;
  }
  state.of ||= String(Math.max(run.last, run.first));
  remember();
  listen();
  showRun();
  showCurves().catch((error) => $("charts").replaceChildren(failure(error)));
  showList();
  if (state.row !== null) showSample();
  if (run.running) setTimeout(lookAgain, EVERY);
}

addEventListener("DOMContentLoaded", begin);
