// The figures of a run as the server sends them piece by piece, and how the page names and writes figures.

import { currentLanguage, hasWords, words } from "../language/i18n.js";

const HIDDEN = new Set(["step", "smooth_loss", "seconds", "cpu_seconds", "total_seconds"]);
const FIRST = ["loss", "reward", "val_bpb", "val_loss", "val_accuracy", "core", "chat_core", "accuracy", "tokens_per_second", "replies_per_second", "mfu", "memory_gb"];
const OF_REPLIES = { tokens_per_second: "replies_per_second", mfu: null }; // reinforcement learning counts replies, not tokens
const SMOOTHING = 0.9; // weight of the past in the average of a figure that scatters from step to step

/** Figures by step: `steps`, `times` (seconds of training) and for each name the lists {mean, low, high}. */
export class Figures {
  constructor(stage) {
    this.stage = stage;
    this.edition = "";
    this.steps = [];
    this.columns = new Map();
  }

  /** Add the new rows that the server has sent. */
  take(news) {
    if (news.edition !== this.edition || news.from > this.steps.length) {
      this.steps = [];
      this.columns.clear();
      this.edition = news.edition;
    }
    this.steps = [...this.steps.slice(0, news.from), ...news.steps];
    for (const [given, values] of Object.entries(news.figures)) {
      const name = ownName(given, this.stage);
      if (name === null) continue;
      const before = this.columns.get(name);
      const column = {};
      for (const [kind, list] of Object.entries(values)) {
        const kept = before?.[kind].slice(0, news.from) ?? new Array(news.from).fill(null);
        column[kind] = [...kept, ...list];
      }
      this.columns.set(name, column);
    }
    [this.behind, this.done, this.size, this.bad, this.width] = [news.behind, news.done, news.size, news.bad, news.width];
  }

  /** Return what to send to the server: the edition and the number of rows that are known. */
  get place() {
    return `${this.edition}.${this.steps.length}`;
  }

  /** Return the x values of the rows: steps, or seconds of training. */
  places(over) {
    if (over !== "time") return this.steps;
    const { high, mean } = this.columns.get("total_seconds") ?? {};
    return this.steps.map((step, row) => (high ?? mean)?.[row] ?? (step ? null : 0)); // what is measured before training has no time
  }
}

/** Return the name of a figure of a stage on this page, or null if it means nothing for that stage. */
export function ownName(name, stage) {
  return stage === "rl" && Object.hasOwn(OF_REPLIES, name) ? OF_REPLIES[name] : name;
}

/** Return the names of the figures to draw: first the most important ones, then the others. */
export function namesOf(all) {
  const found = new Set(all.flatMap((figures) => [...figures.columns.keys()]).filter((name) => !HIDDEN.has(name)));
  const first = FIRST.filter((name) => found.has(name));
  return { first, further: [...found].filter((name) => !FIRST.includes(name)).sort() };
}

/** Return the curve of a figure: points [x, mean, low, high], and the smooth line [x, value] through a figure that scatters. */
export function curveOf(figures, name, over) {
  const [column, places] = [figures.columns.get(name), figures.places(over)];
  const points = [];
  const smooth = [];
  let [total, weight] = [0, 0];
  const own = name === "loss" ? figures.columns.get("smooth_loss") : null;
  column?.mean.forEach((value, row) => {
    if (value === null || places[row] === null || places[row] === undefined) return;
    points.push([places[row], value, column.low?.[row] ?? value, column.high?.[row] ?? value]);
    if (name === "reward") {
      total = SMOOTHING * total + (1 - SMOOTHING) * value;
      weight = SMOOTHING * weight + (1 - SMOOTHING);
      smooth.push([places[row], total / weight]);
    }
    const line = own?.mean[row];
    if (line !== null && line !== undefined) smooth.push([places[row], line]);
  });
  return { points, smooth };
}

export function figureName(name) {
  const key = `figure_${name}`;
  return hasWords(key) ? words(key) : name;
}

/** Return a value as text for people, with four significant digits. */
export function written(value) {
  if (value === null || value === undefined) return "–";
  const small = value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e12);
  if (small) return value.toExponential(2);
  const digits = Math.abs(value) >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 };
  return value.toLocaleString(currentLanguage(), digits);
}

/** Return seconds as text for people, in at most two units. */
export function duration(seconds) {
  for (const [size, part, name, smaller] of [[86400, 3600, "d", "h"], [3600, 60, "h", "min"], [60, 1, "min", "s"]]) {
    const parts = Math.round(seconds / part);
    const [whole, rest] = [Math.floor(parts / (size / part)), parts % (size / part)];
    if (whole) return words(`unit_${name}`, { count: whole }) + (rest ? ` ${words(`unit_${smaller}`, { count: rest })}` : "");
  }
  return words("unit_s", { count: Math.round(seconds) });
}
