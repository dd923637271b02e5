"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#2f8fd8", "#e0662e", "#1fa57a", "#d073ab", "#d99a1c", "#7b8cff", "#a97b4f", "#4fb3c9"];
const TITLES = {
  loss: "Loss", learning_rate: "Learning rate", grad_norm: "Gradient norm", tokens_per_second: "Tokens per second",
  valid_accuracy: "Accuracy on held-out text", epoch: "Epoch", bits_per_byte: "Bits per byte",
};
const state = { axis: "step", smoothing: 0, log: false, range: null };
const charts = [];

function element(name, parent, attributes = {}, text = null) {
  const svg = ["svg", "path", "line", "rect", "text", "g", "circle", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent?.append(made);
  return made;
}

function interpolate(pairs, x) {
  if (!pairs.length) return x;
  let low = 0, high = pairs.length - 1;
  if (x <= pairs[0][0]) return pairs[0][0] ? pairs[0][1] * x / pairs[0][0] : pairs[0][1];
  if (x >= pairs[high][0]) return pairs[high][1];
  while (high - low > 1) { const middle = (low + high) >> 1; if (pairs[middle][0] <= x) low = middle; else high = middle; }
  const [x0, y0] = pairs[low], [x1, y1] = pairs[high];
  return y0 + (y1 - y0) * (x - x0) / (x1 - x0);
}

const place = (run, step) => state.axis === "step" ? step : interpolate(run[state.axis], step);

function smooth(points) {
  let mean = null;
  return points.map(([x, y, low, high]) => {
    mean = mean === null ? y : state.smoothing * mean + (1 - state.smoothing) * y;
    return [x, state.smoothing ? mean : y, low, high];
  });
}

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(5)));
}

function duration(seconds) {
  const h = Math.floor(seconds / 3600), m = Math.floor(seconds / 60) % 60, s = Math.floor(seconds % 60);
  return h ? `${h}:${String(m).padStart(2, "0")}:${String(s).padStart(2, "0")}` : `${m}:${String(s).padStart(2, "0")}`;
}

const large = (x) => x >= 1e9 ? `${number(x / 1e9)}B` : x >= 1e6 ? `${number(x / 1e6)}M` : x >= 1e4 ? `${number(x / 1e3)}k` : number(x);
const label = (x) => state.axis === "seconds" ? duration(x) : large(x);

function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) found.push(x);
  return found;
}

class Chart {
  constructor(title, series, wide) {
    this.series = series;
    this.box = element("div", document.getElementById("charts"), { class: wide ? "chart wide" : "chart" });
    element("h2", this.box, {}, title);
    this.height = wide ? 330 : 220;
    this.svg = element("svg", this.box, { role: "img", "aria-label": title });
    this.tip = element("div", this.box, { class: "tip" });
    this.start = null;
    this.svg.addEventListener("pointerdown", (event) => { this.start = this.at(event); });
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerleave", () => { this.tip.style.display = "none"; this.cursor?.remove(); });
    this.svg.addEventListener("pointerup", (event) => this.zoom(event));
    this.svg.addEventListener("dblclick", () => { state.range = null; draw(); });
  }

  at(event) {
    const frame = this.svg.getBoundingClientRect();
    return (event.clientX - frame.left) / frame.width * this.width;
  }

  draw() {
    this.width = Math.max(this.box.clientWidth - 16, 200);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.replaceChildren();
    this.lines = this.series.map((one) => ({
      ...one, points: smooth(one.points).map(([step, ...rest]) => [place(one.run, step), ...rest]),
    }));
    const xs = this.lines.flatMap((one) => one.points.map((point) => point[0]));
    const [low, high] = state.range ?? [Math.min(...extent(xs)), Math.max(...extent(xs))];
    const inside = ([x, y]) => x >= low && x <= high && (!state.log || y > 0);
    const ys = extent(this.lines.flatMap((one) => one.points.filter(inside).map((point) => point[1])));
    const value = (y) => state.log ? Math.log10(y) : y;
    let [bottom, top] = [value(ys[0]), value(ys[1])];
    if (!(top > bottom)) { bottom -= Math.abs(bottom) * 0.05 || 0.5; top += Math.abs(top) * 0.05 || 0.5; }
    const pad = (top - bottom) * 0.04;
    bottom -= pad; top += pad;
    const left = 58, right = this.width - 10, above = 8, below = this.height - 22;
    this.x = (x) => left + (x - low) / (high - low || 1) * (right - left);
    this.y = (y) => below - (value(y) - bottom) / (top - bottom) * (below - above);
    this.back = (pixel) => low + (pixel - left) / (right - left) * (high - low);
    for (const y of ticks(bottom, top, 5)) {
      const real = state.log ? 10 ** y : y, at = below - (y - bottom) / (top - bottom) * (below - above);
      element("line", this.svg, { class: "grid", x1: left, x2: right, y1: at, y2: at });
      element("text", this.svg, { x: left - 6, y: at + 4, "text-anchor": "end" }, large(real));
    }
    for (const x of ticks(low, high, this.width / 110))
      element("text", this.svg, { x: this.x(x), y: this.height - 6, "text-anchor": "middle" }, label(x));
    for (const run of new Set(this.lines.map((line) => line.run)))
      for (const [step, text] of run.changes) {
        const at = this.x(place(run, step));
        if (at < left || at > right) continue;
        element("title", element("line", this.svg, { class: "change", x1: at, x2: at, y1: above, y2: below }), {}, text);
      }
    for (const line of this.lines) this.path(line, inside);
  }

  path(line, inside) {
    const seen = line.points.filter(inside);
    const text = seen.map(([x, y], number) => `${number ? "L" : "M"}${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join("");
    const style = { fill: "none", stroke: line.color, "stroke-width": line.main ? 2 : 1.2, opacity: line.main ? 1 : 0.75 };
    if (line.dash) {
      style["stroke-dasharray"] = line.dash;
      if (seen.length) element("text", this.svg, { x: this.width - 12, y: this.y(seen[0][1]) - 4, "text-anchor": "end" }, line.name);
    }
    element("path", this.svg, { d: text || "M0,0", ...style, "data-name": line.name });
    if (seen.length === 1 || (line.dots && seen.length < 200))
      for (const [x, y] of seen) element("circle", this.svg, { cx: this.x(x), cy: this.y(y), r: 2.5, fill: line.color });
  }

  move(event) {
    const pixel = this.at(event), x = this.back(pixel);
    this.cursor?.remove();
    this.cursor = element("g", this.svg);
    if (this.start !== null && Math.abs(pixel - this.start) > 4) {
      const from = Math.min(pixel, this.start), wide = Math.abs(pixel - this.start);
      element("rect", this.cursor, { class: "zoom", x: from, width: wide, y: 8, height: this.height - 30 });
    }
    element("line", this.cursor, { class: "cursor", x1: pixel, x2: pixel, y1: 8, y2: this.height - 22 });
    this.tip.replaceChildren(element("div", null, {}, `${state.axis === "seconds" ? "" : state.axis + " "}${label(Math.round(x))}`));
    for (const line of this.lines) {
      const near = nearest(line.points, x);
      if (near) element("div", this.tip, { style: `color:${line.color}` }, `${line.name}: ${number(near[1])}`);
    }
    this.tip.style.display = "block";
    const share = pixel / this.width, frame = this.svg.getBoundingClientRect();
    this.tip.style.top = "2rem";
    this.tip.style.left = share < 0.5 ? `${share * frame.width + 24}px` : "auto";
    this.tip.style.right = share < 0.5 ? "auto" : `${(1 - share) * frame.width + 24}px`;
  }

  zoom(event) {
    const from = this.start, to = this.at(event);
    this.start = null;
    if (from === null || Math.abs(to - from) < 5) return;
    state.range = [this.back(Math.min(from, to)), this.back(Math.max(from, to))];
    draw();
  }
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return low === Infinity ? [0, 1] : [low, high];
}

function nearest(points, x) {
  if (!points.length) return null;
  let low = 0, high = points.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (points[middle][0] <= x) low = middle; else high = middle; }
  return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? points[low] : points[high];
}

function draw() { for (const chart of charts) chart.draw(); }

function table(parent, rows, head = null) {
  const made = element("table", element("div", parent, { class: "scroll" }));
  if (head) { const row = element("tr", made); for (const one of head) element("th", row, {}, one); }
  for (const cells of rows) {
    const row = element("tr", made);
    for (const cell of cells) {
      const numeric = typeof cell === "number";
      element("td", row, numeric ? { class: "number" } : {}, numeric ? number(cell) : String(cell ?? ""));
    }
  }
}

function fold(parent, title, open = false) {
  const made = element("details", parent, open ? { open: "" } : {});
  element("summary", made, {}, title);
  return made;
}

function buildSummary() {
  if (data.comparison) return buildComparison(data.comparison);
  for (const [name, value] of data.runs[0].summary) {
    const tile = element("div", document.getElementById("summary"), { class: "tile" });
    element("b", tile, {}, value);
    element("span", tile, {}, name);
  }
}

function buildComparison({ head, rows, findings }) {
  const parent = document.getElementById("comparison");
  table(parent, rows, head);
  const made = parent.querySelector("table");
  made.querySelectorAll("th").forEach((title, column) => title.addEventListener("click", () => {
    const up = title.getAttribute("aria-sort") !== "ascending";
    for (const other of made.querySelectorAll("th")) other.removeAttribute("aria-sort");
    title.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = (row) => row.cells[column].textContent, plain = (text) => Number(text.replaceAll(",", "") || NaN);
    const order = (a, b) => plain(a) - plain(b) || (isNaN(plain(a)) ? 1 : 0) - (isNaN(plain(b)) ? 1 : 0) || a.localeCompare(b, "en", { numeric: true });
    made.append(...[...made.rows].slice(1).sort((a, b) => (up ? 1 : -1) * order(value(a), value(b))));
  }));
  for (const finding of findings) element("p", parent, {}, finding);
}

function baselines(run) {
  const steps = extent(Object.values(run.series).flatMap((rows) => rows.map((row) => row[0])));
  return Object.entries(run.baselines).map(([name, bits], index) => ({
    run, points: steps.map((step) => [step, bits]), name, color: COLORS[2 + index], dash: "6 4",
  }));
}

function buildCharts() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))];
  const many = data.runs.length > 1;
  const series = (metric, options) => data.runs.flatMap((run, index) => run.series[metric]?.length ? [{
    run, points: run.series[metric], name: (many ? `${run.name}: ` : "") + metric.replaceAll("_", " "),
    color: COLORS[(many ? index : options.color ?? 0) % COLORS.length], ...options.style,
  }] : []);
  const loss = [...series("loss", { style: { main: false } }), ...series("valid_loss", { color: 1, style: { main: true, dots: true } })];
  if (loss.length) charts.push(new Chart(TITLES.loss, loss, true));
  const bits = [...series("bits_per_byte", { style: { main: false } }),
    ...series("valid_bits_per_byte", { color: 1, style: { main: true, dots: true } })];
  if (bits.length) charts.push(new Chart(TITLES.bits_per_byte, [...bits, ...(many ? [] : baselines(data.runs[0]))], true));
  const inPairs = ["loss", "valid_loss", "bits_per_byte", "valid_bits_per_byte"];
  for (const metric of names.filter((name) => !inPairs.includes(name)))
    charts.push(new Chart(TITLES[metric] ?? metric.replaceAll("_", " "), series(metric, { style: { main: true } }), false));
  const legend = document.getElementById("legend");
  for (const one of many ? data.runs.map((run, index) => ({ name: run.name, color: COLORS[index % COLORS.length] })) : loss) {
    const entry = element("span", legend);
    element("i", entry, { style: `background:${one.color}` });
    entry.append(one.name);
  }
}

function buildDetails() {
  const parent = document.getElementById("details");
  for (const run of data.runs) {
    const place = data.comparison ? fold(parent, run.name) : parent;
    for (const part of run.parts) {
      const box = fold(place, part.title, part.open && data.runs.length === 1);
      if (part.rows) table(box, part.rows, part.head);
      for (const text of part.texts ?? []) element("pre", box, {}, text);
    }
  }
}

document.getElementById("axis").addEventListener("change", (event) => { state.axis = event.target.value; state.range = null; draw(); });
document.getElementById("smoothing").addEventListener("input", (event) => { state.smoothing = Number(event.target.value); draw(); });
document.getElementById("log").addEventListener("change", (event) => { state.log = event.target.checked; draw(); });
window.addEventListener("resize", draw);
document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).getPropertyValue("--back").trim() === "#12151b";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});
buildSummary();
buildCharts();
buildDetails();
draw();
