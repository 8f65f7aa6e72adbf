// What the checkpoints of the shown runs said to prompts and questions, the newest checkpoint first.

import { request } from "../client.js";
import { hasWords, words } from "../language/i18n.js";
import { make } from "../reply/dom.js";
import { runName } from "./list.js";

export class Samples {
  constructor(section, place) {
    Object.assign(this, { section, place });
    this.kept = new Map(); // id of a run -> its part of the page, the version that it shows, and its samples
  }

  /** Show the samples of the runs that have some. They are loaded when the reader opens them. */
  draw(runs) {
    const having = runs.filter((run) => run.samples !== null);
    this.section.hidden = !having.length;
    for (const id of this.kept.keys()) if (!having.some((run) => run.id === id)) this.kept.delete(id);
    const parts = having.map((run) => this.part(run));
    if (parts.some((part, place) => this.place.children[place] !== part) || this.place.children.length > parts.length) this.place.replaceChildren(...parts);
  }

  part(run) {
    let kept = this.kept.get(run.id);
    if (!kept) {
      kept = { summary: make("summary"), body: make("div", "said-by"), version: null, samples: null };
      kept.details = make("details", "", kept.summary, kept.body);
      kept.details.addEventListener("toggle", () => this.load(kept));
      this.kept.set(run.id, kept);
    }
    kept.run = run;
    kept.summary.textContent = words("samplesOf", { run: runName(run) });
    this.load(kept);
    return kept.details;
  }

  async load(kept) {
    if (!kept.details.open || kept.version === kept.run.samples) return;
    kept.version = kept.run.samples;
    try {
      const response = await request(`runs/samples/${kept.run.id}`, { cache: "no-store" });
      kept.samples = (await response.json()).samples;
    } catch {
      kept.version = null; // retried when the next figures arrive
      return;
    }
    this.write(kept);
  }

  /** Write the samples again, in the language of the page. */
  translate() {
    for (const kept of this.kept.values()) if (kept.samples) this.write(kept);
  }

  write({ body, samples }) {
    const steps = new Map();
    for (const sample of samples) steps.set(sample.step, [...(steps.get(sample.step) ?? []), shown(sample)]);
    const parts = [...steps].flatMap(([step, list]) => [make("h3", "", words("stepAlone", { step })), ...list]);
    body.replaceChildren(...(parts.length ? parts : [make("p", "", words("noSample"))]));
  }
}

function shown({ source, asked, said, grade }) {
  const parts = [make("p", "asked", asked), make("blockquote", "said", said.trim())];
  const key = `source_${source}`;
  const note = [hasWords(key) ? words(key) : source];
  if (grade !== null) note.push(words(grade >= 1 ? "right" : "wrong"));
  return make("div", "sample", ...parts, make("p", "note", note.join(" · ")));
}
