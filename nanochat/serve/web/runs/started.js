// The runs that this page has started: how they are, what they print, and the buttons that stop and resume them.

import { say, words } from "../language/i18n.js";
import { copyButton, make } from "../reply/dom.js";
import { logOf, stop } from "./control.js";
import { runName } from "./list.js";

const EVERY = 1500; // milliseconds between two looks at a log
const MOST_LETTERS = 200_000; // of a log that the page keeps

export class Started {
  /** `resume` is called with a run's id, its name and the button; `changed` after a run was asked to stop. */
  constructor(section, list, { resume, changed }) {
    Object.assign(this, { section, list, resume, changed, cards: new Map() });
    document.addEventListener("visibilitychange", () => this.cards.forEach((card) => card.log.look()));
  }

  /** Show runs, by id; `states` has the state of each run that has written figures. */
  draw(started, states) {
    this.section.hidden = !Object.keys(started).length;
    for (const [id, card] of this.cards) {
      if (Object.hasOwn(started, id)) continue;
      card.element.remove();
      this.cards.delete(id);
    }
    Object.values(started).forEach((run, place) => {
      if (!this.cards.has(run.id)) this.cards.set(run.id, new Card(run.id, this));
      const card = this.cards.get(run.id);
      card.draw(run, states.get(run.id));
      if (this.list.children[place] !== card.element) this.list.insertBefore(card.element, this.list.children[place] ?? null);
    });
  }

  /** Show what a run prints, and move the focus to it. */
  show(id) {
    const card = this.cards.get(id);
    if (!card) return false;
    card.log.details.open = true;
    card.title.focus();
    return true;
  }
}

class Card {
  constructor(id, { resume, changed }) {
    this.id = id;
    [this.title, this.badge, this.note] = [make("h3"), make("span", "state"), make("p", "note")];
    this.title.tabIndex = -1;
    this.note.setAttribute("role", "status");
    this.stop = this.button("stop", async () => {
      this.stop.disabled = true;
      await stop(id).catch((failure) => (this.note.textContent = failure.detail || words("unreachable")));
      changed();
    });
    this.resume = this.button("resume", () => resume(id, runName(this.run), this.resume));
    this.log = new Log(id);
    const copy = copyButton(() => this.run.command, "copyCommand");
    this.element = make("li", "started", make("div", "head", this.title, this.badge), this.note, make("div", "buttons", this.stop, this.resume, copy), this.log.details);
  }

  button(key, press) {
    const button = make("button", "plain");
    button.type = "button";
    say(button, key);
    button.addEventListener("click", press);
    return button;
  }

  draw(run, state) {
    this.run = run;
    const name = runName(run);
    const ended = run.state === "ended" && state !== "running"; // a command in a terminal may have resumed it
    const finished = ended && state === "finished";
    const failed = ended && !finished && run.code !== null && run.code !== 0
      && !(run.asked && [-15, 143].includes(run.code)); // SIGTERM, as asked
    this.title.textContent = name;
    this.badge.className = `state ${ended ? (finished ? "finished" : "stopped") : "running"}`;
    this.badge.textContent = words(ended ? (finished ? "finished" : failed ? "failedRun" : "stopped_run") : run.state === "stopping" ? "stopping" : "running");
    const notes = [];
    if (failed) notes.push(words("failedHow", { code: run.code }));
    if (run.saved !== null) notes.push(words("savedStep", { step: run.saved }));
    else if (ended) notes.push(words("savedNothing"));
    const text = notes.join(" ");
    if (this.note.textContent !== text) this.note.textContent = text;
    [this.stop.hidden, this.stop.disabled] = [run.state === "ended", run.state === "stopping"];
    this.resume.hidden = !ended || finished;
    for (const [button, key] of [[this.stop, "stopRun"], [this.resume, "resumeRun"]]) say(button, key, { run: name }, "label");
    this.log.describe(name, ended);
  }
}

/** What a run prints, read on from where the last look ended while its fold is open. */
class Log {
  constructor(id) {
    Object.assign(this, { id, place: null, ended: false, timer: null, busy: false });
    [this.summary, this.text] = [make("summary"), make("pre", "output")];
    this.text.tabIndex = 0; // so that the arrow keys scroll it
    this.text.setAttribute("role", "region");
    this.details = make("details", "printed", this.summary, this.text);
    this.details.addEventListener("toggle", () => this.look());
    say(this.summary, "printed");
  }

  describe(name, ended) {
    this.text.setAttribute("aria-label", words("logOf", { run: name }));
    const again = this.ended && !ended;
    this.ended = ended;
    if (again) this.look();
  }

  async look() {
    clearTimeout(this.timer);
    if (!this.details.open || document.hidden || this.busy || !this.details.isConnected) return;
    this.busy = true;
    const ended = this.ended;
    let [more, whole] = [false, false];
    try {
      const part = await logOf(this.id, this.place);
      [more, whole] = [part.next < part.size && part.text !== "", part.next >= part.size];
      this.add(part);
    } catch {
      // the feed shows that the server does not answer; the next look tries again
    }
    this.busy = false;
    if (!(ended && whole)) this.timer = setTimeout(() => this.look(), more ? 0 : EVERY);
  }

  add({ from, next, text }) {
    const bottom = this.text.scrollTop + this.text.clientHeight >= this.text.scrollHeight - 4;
    if (from !== this.place) this.text.textContent = "";
    this.place = next;
    this.text.append(text);
    if (this.text.textContent.length > MOST_LETTERS) this.text.textContent = this.text.textContent.slice(-MOST_LETTERS / 2);
    if (bottom) this.text.scrollTop = this.text.scrollHeight;
  }
}
