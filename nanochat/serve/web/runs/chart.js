// A chart of one figure over several runs: curves as SVG, a cursor for mouse and keyboard, and the figures as a table.

import { say, words } from "../language/i18n.js";
import { make } from "../reply/dom.js";
import { duration, figureName, written } from "./figures.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190; // pixels, as are these distances from the edges
const [TOP, RIGHT, BOTTOM, LEFT] = [8, 10, 24, 52];
const FROM_ZERO = new Set(["tokens_per_second", "replies_per_second", "mfu", "memory_gb"]);
const LANDMARKS = new Map([["core", ["GPT-2", 0.256525]]]); // what a published model reaches, for orientation, as report/curves.py draws it
const OUTLIERS = 0.02; // share of the points at either end that may lie outside, so that one spike hides no curve
const FEW = 40; // points that are drawn as dots too, and below which none lies outside
const DAY = 86_400; // seconds
const TIMES = [0.1, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, DAY];
const TABLE_ROWS = 20;

function node(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** Return about so many round numbers between two limits. */
export function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9 && found.length < 50; place++) found.push(Number((place * step).toPrecision(12)));
  return found;
}

/** Return about so many round times between two limits, in seconds. */
export function timeTicks(low, high, count) {
  const step = TIMES.find((one) => one >= (high - low) / count);
  if (!step) return ticks(low / DAY, high / DAY, count).map((days) => days * DAY);
  const found = [];
  for (let time = Math.ceil(low / step) * step; time <= high; time += step) found.push(time);
  return found;
}

/** Return the limits of the vertical axis, for all values if they are few, else without the outermost ones. */
export function limits(values, fromZero) {
  const sorted = values.filter(Number.isFinite).sort((a, b) => a - b);
  if (!sorted.length) return [0, 1];
  const cut = sorted.length > FEW ? Math.floor(sorted.length * OUTLIERS) : 0;
  const [least, most] = [fromZero ? Math.min(0, sorted[0]) : sorted[cut], sorted[sorted.length - 1 - cut]];
  const room = (most - least) * 0.06 || Math.abs(most) * 0.05 || 1;
  return [least - (fromZero ? 0 : room), most + room];
}

export class Chart {
  constructor(name) {
    this.name = name;
    this.title = make("h3");
    this.readout = make("p", "readout");
    this.plot = make("div", "plot");
    this.plot.tabIndex = 0;
    this.plot.setAttribute("role", "slider");
    this.summary = make("summary");
    this.table = make("div", "scroll");
    this.table.tabIndex = 0; // so that the arrow keys scroll it
    this.table.setAttribute("role", "region");
    this.details = make("details", "figures", this.summary, this.table);
    this.element = make("figure", "chart", make("figcaption", "", this.title, this.readout), this.plot, this.details);
    [this.curves, this.over, this.cursor, this.drawnWidth] = [[], "step", null, 0];
    this.details.addEventListener("toggle", () => this.fillTable());
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerdown", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.move(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.move(null));
    new ResizeObserver(() => this.plot.clientWidth !== this.drawnWidth && this.draw()).observe(this.plot);
  }

  /** Show curves: {run, colour, points, smooth} each, over steps or time. */
  show(curves, over) {
    if (over !== this.over) this.cursor = null;
    [this.curves, this.over] = [curves, over];
    const name = figureName(this.name);
    this.title.textContent = name;
    this.plot.setAttribute("aria-label", words("curveOf", { figure: name }));
    this.table.setAttribute("aria-label", name);
    say(this.summary, "asTable");
    this.draw();
    this.fillTable();
  }

  // --- drawing ---------------------------------------------------------------------------------

  draw() {
    const width = this.plot.clientWidth;
    this.drawnWidth = width;
    if (width < LEFT + RIGHT + 20) return; // hidden
    const points = this.curves.flatMap((curve) => curve.points);
    const across = points.map(([x]) => x);
    const ends = across.length ? [across.reduce((a, b) => Math.min(a, b)), across.reduce((a, b) => Math.max(a, b))] : [0, 1];
    if (ends[0] === ends[1]) ends[1] = ends[0] + 1;
    const landmark = LANDMARKS.get(this.name);
    const values = points.map(([, value]) => value);
    const [low, high] = limits(landmark ? [...values, landmark[1]] : values, FROM_ZERO.has(this.name));
    this.x = (value) => LEFT + ((value - ends[0]) / (ends[1] - ends[0])) * (width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const svg = node("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
    this.axes(svg, width, ends, [low, high]);
    if (landmark) this.landmark(svg, width, landmark);
    const inside = node("svg", { x: 0, y: TOP - 3, width, height: HEIGHT - TOP - BOTTOM + 6, viewBox: `0 ${TOP - 3} ${width} ${HEIGHT - TOP - BOTTOM + 6}` });
    for (const curve of this.curves) this.curve(inside, curve);
    this.line = node("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    svg.append(inside, this.line);
    this.plot.replaceChildren(svg);
    this.move(this.cursor);
  }

  axes(svg, width, ends, [low, high]) {
    for (const value of ticks(low, high, 4)) {
      const y = this.y(value);
      svg.append(node("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      const text = node("text", { x: LEFT - 7, y: y + 3.5, "text-anchor": "end" });
      text.textContent = written(value);
      svg.append(text);
    }
    const places = this.over === "time" ? timeTicks(...ends, width < 420 ? 3 : 4) : ticks(...ends, width < 420 ? 4 : 6).filter(Number.isInteger);
    for (const value of places) {
      const x = this.x(value);
      const anchor = x > width - 40 ? "end" : "middle";
      const text = node("text", { x: anchor === "end" ? width - RIGHT : x, y: HEIGHT - 6, "text-anchor": anchor });
      text.textContent = this.over === "time" ? duration(value) : written(value);
      svg.append(text);
    }
  }

  /** Draw a horizontal line at what a published model reaches, with its name. */
  landmark(svg, width, [name, value]) {
    const y = this.y(value);
    const text = node("text", { x: width - RIGHT, y: y + 12, "text-anchor": "end" });
    text.textContent = `${name} ${written(value)}`;
    svg.append(node("line", { class: "landmark", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), text);
  }

  curve(svg, { points, smooth, colour }) {
    const path = (line) => line.map(([x, value], place) => `${place ? "L" : "M"}${this.x(x).toFixed(1)} ${this.clamp(value)}`).join("");
    if (points.some(([, , low, high]) => low !== high)) {
      const edge = [...points.map(([x, , , high]) => [x, high]), ...points.map(([x, , low]) => [x, low]).reverse()];
      svg.append(node("path", { class: `band colour-${colour}`, d: `${path(edge)}Z` }));
    }
    svg.append(node("path", { class: `curve colour-${colour}${smooth.length ? " faint" : ""}`, d: path(points) }));
    if (smooth.length) svg.append(node("path", { class: `curve colour-${colour}`, d: path(smooth) }));
    if (points.length > FEW) return;
    for (const [x, value] of points) svg.append(node("circle", { class: `dot colour-${colour}`, cx: this.x(x).toFixed(1), cy: this.clamp(value), r: smooth.length ? 1.5 : 2.5 }));
  }

  /** Return the y position of a value, bounded, since browsers do not draw lines to points that are too far away. */
  clamp(value) {
    return Math.min(Math.max(this.y(value), -HEIGHT), 2 * HEIGHT).toFixed(1);
  }

  // --- the cursor ------------------------------------------------------------------------------

  /** Return the positions that the cursor can take: those of the run with the most points. */
  get stops() {
    return this.curves.reduce((most, { points }) => (points.length > most.length ? points : most), []).map(([x]) => x);
  }

  point({ clientX }) {
    const [stops, left] = [this.stops, this.plot.getBoundingClientRect().left];
    if (!stops.length || !this.x) return;
    this.move(stops.reduce((best, x) => (Math.abs(this.x(x) + left - clientX) < Math.abs(this.x(best) + left - clientX) ? x : best)));
  }

  key(event) {
    const stops = this.stops;
    const place = this.cursor === null ? stops.length - 1 : stops.indexOf(this.cursor);
    const far = Math.max(1, Math.round(stops.length / 10));
    const moves = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -far, PageUp: far, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") this.move(null);
    if (!Object.hasOwn(moves, event.key) || !stops.length) return;
    event.preventDefault();
    this.move(stops[Math.min(Math.max(place + moves[event.key], 0), stops.length - 1)]);
  }

  /** Put the cursor at a position, or remove it for null, which shows the latest values. */
  move(place) {
    this.cursor = place;
    const stops = this.stops;
    this.line?.setAttribute("visibility", place === null ? "hidden" : "visible");
    if (place !== null && this.x) for (const end of ["x1", "x2"]) this.line.setAttribute(end, this.x(place).toFixed(1));
    const values = this.curves.filter(({ points }) => points.length).map((curve) => ({ ...curve, value: valueAt(curve.points, place) }));
    const x = place === null ? words("latest") : this.over === "time" ? duration(place) : words("atStep", { step: place });
    const said = values.map(({ run, value }) => `${run} ${written(value)}`).join(", ");
    this.readout.replaceChildren(make("span", "at", x), ...values.map(({ colour, value }) => make("span", `value colour-${colour}`, written(value))));
    this.plot.setAttribute("aria-valuemin", 0);
    this.plot.setAttribute("aria-valuemax", Math.max(0, stops.length - 1));
    this.plot.setAttribute("aria-valuenow", place === null ? Math.max(0, stops.length - 1) : stops.indexOf(place));
    this.plot.setAttribute("aria-valuetext", words("cursor", { x, values: said }));
  }

  // --- the table -------------------------------------------------------------------------------

  /** Fill the table, if it is open, with the figures at evenly spaced positions. */
  fillTable() {
    if (!this.details.open) return;
    const stops = this.stops;
    const every = Math.max(1, Math.ceil(stops.length / TABLE_ROWS));
    const chosen = stops.filter((_, place) => (stops.length - 1 - place) % every === 0);
    const column = (text) => {
      const cell = make("th", "", text);
      cell.scope = "col";
      return cell;
    };
    const head = make("tr", "", column(words(this.over === "time" ? "tableTime" : "tableSteps")), ...this.curves.map(({ run }) => column(run)));
    const rows = chosen.map((x) => {
      const first = make("th", "", this.over === "time" ? duration(x) : written(x));
      first.scope = "row";
      return make("tr", "", first, ...this.curves.map(({ points }) => make("td", "number", written(valueAt(points, x)))));
    });
    this.table.replaceChildren(make("table", "", make("thead", "", head), make("tbody", "", ...rows)));
  }
}

/** Return the value of the last point at or before a position, null outside the points, or the last value for null. */
function valueAt(points, place) {
  if (place === null) return points.at(-1)?.[1] ?? null;
  let found = null;
  for (const [x, value] of points) {
    if (x > place) break;
    found = value;
  }
  return points.length && place > points.at(-1)[0] ? null : found;
}
