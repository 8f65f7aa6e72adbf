// The list of runs: a box to tick for each, its state, its progress, and its last figures.

import { say, words } from "../language/i18n.js";
import { make } from "../reply/dom.js";
import { duration, ownName, written } from "./figures.js";

const STATES = { running: "running", finished: "finished", stopped: "stopped_run" };
const COLUMNS = ["loss", "val_bpb", "tokens_per_second", "mfu", "memory_gb"];
const AT_ONCE = 12; // runs that are listed until the reader asks for more

/** The name of a run for people: its tag and its stage. */
export function runName({ tag, stage }) {
  return `${tag} · ${words(`stage_${stage}`)}`;
}

export class List {
  /**
   * `ticked` is called with a run's id and whether its box is ticked, `resume` with a run's id, its name and the button.
   * `resumes` tells whether the run of an id has that button.
   */
  constructor(body, more, ticked, resume) {
    Object.assign(this, { body, more, ticked, resume, resumes: () => false });
    this.rows = new Map();
    this.all = false;
    more.addEventListener("click", () => {
      this.all = true;
      this.draw(this.last, this.colours, this.full);
      this.body.querySelectorAll("input")[AT_ONCE]?.focus();
    });
  }

  /** Show runs. `colours` maps the ids of those whose curves are shown; if it is `full`, no more can be ticked. */
  draw(runs, colours, full) {
    [this.last, this.colours, this.full] = [runs, colours, full];
    const shown = this.all ? runs : runs.filter((run, place) => place < AT_ONCE || colours.has(run.id));
    for (const id of this.rows.keys()) if (!shown.some((run) => run.id === id)) this.rows.delete(id);
    const rows = shown.map((run) => this.row(run));
    // A row that is moved loses the focus, so rows are only touched where their order has changed.
    rows.forEach((row, place) => {
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] ?? null);
    });
    while (this.body.children.length > rows.length) this.body.lastChild.remove();
    this.more.hidden = shown.length === runs.length;
    say(this.more, "moreRuns", { count: runs.length - shown.length });
  }

  row(run) {
    const cells = this.rows.get(run.id) ?? this.newRow(run.id);
    const colour = this.colours.get(run.id);
    cells.box.checked = colour !== undefined;
    cells.box.disabled = this.full && colour === undefined;
    cells.label.title = cells.box.disabled ? words("tooMany", { most: this.colours.size }) : "";
    cells.swatch.className = `swatch${colour === undefined ? "" : ` colour-${colour}`}`;
    cells.tag.textContent = run.tag;
    const about = [words(`stage_${run.stage}`)];
    if (run.parameters) about.push(words("about", { parameters: { about: run.parameters } }));
    if (run.ranks > 1) about.push(words("ranks", { count: run.ranks }));
    if (run.device) about.push(run.device);
    cells.about.textContent = about.join(" · ");
    cells.badge.className = `state ${run.state}`;
    cells.badge.textContent = words(STATES[run.state]);
    const far = run.step || run.state !== "running" ? words(run.steps ? "stepOf" : "stepAlone", { step: run.step, steps: run.steps }) : words("gettingReady");
    const left = run.seconds_left === null ? "" : words("left", { time: duration(run.seconds_left) });
    cells.far.textContent = [far, left].filter(Boolean).join(" · ");
    cells.resume.hidden = run.state !== "stopped" || !this.resumes(run.id);
    say(cells.resume, "resume");
    say(cells.resume, "resumeRun", { run: runName(run) }, "label");
    cells.bar.hidden = !run.steps;
    [cells.bar.max, cells.bar.value] = [run.steps || 1, Math.min(run.step, run.steps || 1)];
    cells.bar.setAttribute("aria-label", far);
    COLUMNS.forEach((name, place) => {
      const own = ownName(name, run.stage) === name ? run.figures[name] : null;
      const value = name === "loss" ? (run.figures.smooth_loss ?? own) : own;
      cells.figures[place].textContent = written(value);
      cells.figures[place].dataset.name = words(name === "loss" ? "figure_loss" : `short_${name}`); // phones have no head
    });
    return cells.row;
  }

  newRow(id) {
    const [box, swatch, tag, about] = [make("input"), make("span", "swatch"), make("span", "tag"), make("span", "about")];
    box.type = "checkbox";
    box.addEventListener("change", () => this.ticked(id, box.checked));
    const label = make("label", "", box, swatch, make("span", "names", tag, about));
    const [badge, far, bar, resume] = [make("span", "state"), make("span", "far"), make("progress"), make("button", "quiet small resume-row")];
    resume.type = "button";
    resume.addEventListener("click", () => this.resume(id, tag.textContent, resume));
    const head = make("th", "", label);
    head.scope = "row";
    const figures = COLUMNS.map((name) => make("td", name === "loss" ? "number" : "number wide"));
    const row = make("tr", "", head, make("td", "", make("div", "how-far", badge, far, bar), resume), ...figures);
    const cells = { row, box, label, swatch, tag, about, badge, far, bar, resume, figures };
    this.rows.set(id, cells);
    return cells;
  }
}
