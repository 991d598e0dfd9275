"use strict";
// The page of `poseidon dashboard`: shows one job live, and curves of others over it.

const find = (id) => document.getElementById(id);
const jobs = new Map(); // name -> {state, parts: {id: html}, series: {name: [[x...], [y...], panel]}}
const drawn = new Map(); // id -> html
const overlaid = new Set();
const charts = new Map(); // title -> uPlot
let shown = ""; // the job's name
let stream = null;
const resized = new ResizeObserver(() => {
  for (const [title, chart] of charts) chart.setSize({ width: Math.max(200, holder(title).clientWidth), height: 240 });
});

const COLOURS = ["#0b7bd3", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#0c8599", "#e67700", "#5f3dc4"];
const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat(); // ticks of iterations
const FEW = 40; // points of a curve, below which they are shown, and not smoothed
const FIRST = ["Loss", "Scores"]; // panels; then those of what a script logs
const LAST = ["Images a second", "Learning rate"];

// -- text ---------------------------------------------------------------------------------------------------------------

function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && Math.abs(value) < 1e-4) return Number(value.toPrecision(digits)).toExponential();
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// -- jobs ---------------------------------------------------------------------------------------------------------------

async function listJobs() {
  const rows = await fetchJson("api/jobs");
  if (!rows) return;
  const select = find("job");
  const names = rows.map((row) => row.name);
  if ([...select.options].map((option) => option.value).join() !== names.join()) {
    select.replaceChildren(...rows.map((row) => element("option", row.name, { value: row.name })));
    drawOverlayChoices(names);
  }
  for (const option of select.options) {
    const row = rows.find((each) => each.name === option.value);
    option.textContent = `${row.name} (${row.state})`;
  }
  if (!names.length) return;
  const wanted = [decodeURIComponent(location.hash.slice(1)), shown, new URLSearchParams(location.search).get("job")];
  const chosen = wanted.find((name) => names.includes(name)) || names[0];
  if (chosen !== shown) show(chosen);
  select.value = chosen;
}

async function fetchJson(path) {
  try {
    const answer = await fetch(path);
    return answer.ok ? await answer.json() : null;
  } catch {
    drawPart("state", '<span class="state lost">dashboard gone</span>');
    return null;
  }
}

function show(name) {
  shown = name;
  location.replace(`#${encodeURIComponent(name)}`);
  if (stream) stream.close();
  jobs.delete(name);
  for (const chart of charts.values()) chart.destroy();
  charts.clear();
  for (const chart of find("charts").querySelectorAll(".chart")) chart.remove();
  find("log-form").elements.job.value = name;
  drawLog();
  stream = new EventSource(`api/jobs/${encodeURIComponent(name)}/stream`);
  stream.addEventListener("open", () => jobs.delete(name)); // a new connection begins with all points
  stream.addEventListener("job", (event) => {
    merge(JSON.parse(event.data));
    draw();
  });
  drawOverlayChoices([...find("job").options].map((option) => option.value));
}

function merge(news) {
  const job = jobs.get(news.name) || { series: {} };
  for (const [name, part] of Object.entries(news.series)) {
    const [xs, ys] = job.series[name] || [[], []];
    xs.length = ys.length = part.from;
    for (const [x, y] of part.points) {
      xs.push(x);
      ys.push(y);
    }
    job.series[name] = [xs, ys, part.panel];
  }
  jobs.set(news.name, { ...news, series: job.series });
}

async function refreshOverlaid() {
  for (const name of overlaid) {
    const whole = name === shown ? null : await fetchJson(`api/jobs/${encodeURIComponent(name)}`);
    if (whole) {
      jobs.delete(name);
      merge(whole);
    }
  }
  drawCurves();
}

function drawOverlayChoices(names) {
  const choices = names.filter((name) => name !== shown).slice(0, 20);
  const labels = choices.map((name) => {
    const box = element("input", undefined, { type: "checkbox" });
    box.checked = overlaid.has(name);
    box.addEventListener("change", () => {
      if (box.checked) overlaid.add(name);
      else overlaid.delete(name);
      refreshOverlaid();
    });
    const label = element("label");
    label.append(box, ` ${name}`);
    return label;
  });
  find("overlay").replaceChildren(find("overlay").querySelector("legend"), ...labels);
}

// -- drawing ------------------------------------------------------------------------------------------------------------

function draw() {
  const job = jobs.get(shown);
  if (!job) return;
  document.title = `${job.state}: ${shown}`;
  for (const [id, html] of Object.entries(job.parts)) drawPart(id, html);
  drawCurves();
}

// The server escapes what it sends. An unchanged part is not read aloud again, and keeps its place in a scrolled list.
function drawPart(id, html) {
  if (drawn.get(id) === html || find(id).innerHTML === html) return;
  drawn.set(id, html);
  find(id).innerHTML = html;
}

function drawCurves() {
  const names = [shown, ...[...overlaid].filter((name) => name !== shown)].filter((name) => jobs.has(name));
  find("last-values")?.remove(); // the server's, in place of curves
  const panels = new Map(); // title -> curves
  for (const name of names) {
    for (const [curve, points] of Object.entries(jobs.get(name).series)) {
      const [, , title] = points;
      if (!title) continue;
      if (!panels.has(title)) panels.set(title, []);
      panels.get(title).push([names.length > 1 ? `${name}: ${curve}` : curve, points]);
    }
  }
  for (const [title, curves] of panels) drawChart(title, curves);
}

function drawChart(title, curves) {
  const smoothing = Number(find("smoothing").value);
  const logarithmic = find("log-axis").checked;
  const weight = (points) => (points.length < FEW ? 0 : smoothing);
  const data = uPlot.join(curves.map(([, [xs, ys]]) => [xs, smooth(ys, weight(xs), logarithmic)]));
  const key = JSON.stringify([curves.map(([name]) => name), logarithmic]);
  const old = charts.get(title);
  if (old && old.key === key) {
    old.setData(data);
  } else {
    if (old) old.destroy();
    const chart = new uPlot(options(title, curves, logarithmic), data, holder(title));
    chart.key = key;
    charts.set(title, chart);
  }
  const last = curves.map(([name, [, ys]]) => `${name} ${number(ys[ys.length - 1])}`).join(", ");
  holder(title).setAttribute("aria-label", `${title}. Last values: ${last}`);
}

function holder(title) {
  const id = `chart-${title.replaceAll(" ", "-")}`;
  if (!find(id)) {
    const card = element("div", undefined, { class: "chart" });
    card.append(element("h3", title), element("div", undefined, { id, role: "img" }));
    const place = placeOf(title);
    const after = [...find("charts").children].find((child) => child.dataset.place > place);
    card.dataset.place = place;
    find("charts").insertBefore(card, after || null);
    resized.observe(card);
  }
  return find(id);
}

function placeOf(title) {
  if (FIRST.includes(title)) return `0 ${FIRST.indexOf(title)}`;
  return LAST.includes(title) ? `2 ${LAST.indexOf(title)}` : `1 ${title}`;
}

function options(title, curves, logarithmic) {
  const style = getComputedStyle(document.documentElement);
  const axis = {
    stroke: style.getPropertyValue("--quiet"),
    grid: { stroke: style.getPropertyValue("--line"), width: 1 },
    ticks: { stroke: style.getPropertyValue("--line") },
  };
  return {
    width: Math.max(200, holder(title).clientWidth),
    height: 240,
    scales: { x: { time: false }, y: logarithmic ? { distr: 3 } : {} },
    axes: [{ ...axis, incrs: WHOLE }, { ...axis, size: 64, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 4))) }],
    series: [
      { label: "iteration", value: atCursor },
      ...curves.map(([name], index) => ({
        label: name,
        stroke: COLOURS[index % COLOURS.length],
        width: 1.5,
        spanGaps: true,
        points: { show: curves[index][1][0].length < FEW },
        value: atCursor,
      })),
    ],
  };
}

function atCursor(chart, value, series, index) {
  const values = chart.data[series]; // without a cursor the last value is shown
  const chosen = index === null || index === undefined ? values.findLast(Number.isFinite) : value;
  return number(chosen, series ? 4 : 9); // the first series has the iterations
}

function smooth(values, weight, logarithmic) {
  let mean = 0;
  let norm = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    const shownValue = mean / norm;
    return logarithmic && shownValue <= 0 ? null : shownValue;
  });
}

async function drawLog() {
  const search = encodeURIComponent(find("search").value);
  const lines = await fetchJson(`api/jobs/${encodeURIComponent(shown)}/log?search=${search}`);
  find("log").textContent = lines && lines.length ? lines.join("\n") : "No such line.";
  find("log").scrollTop = find("log").scrollHeight;
}

// -- controls -----------------------------------------------------------------------------------------------------------

find("job").addEventListener("change", (event) => show(event.target.value));
find("smoothing").addEventListener("input", drawCurves);
find("log-axis").addEventListener("change", drawCurves);
find("log-form").addEventListener("submit", (event) => {
  event.preventDefault();
  drawLog();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts.values()) chart.destroy();
  charts.clear();
  drawCurves();
});

listJobs();
setInterval(listJobs, 3000);
setInterval(() => overlaid.size && refreshOverlaid(), 5000);
