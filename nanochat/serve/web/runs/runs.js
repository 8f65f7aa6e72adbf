// The page of training runs: the list, the curves of the runs that are ticked, and their samples, kept up to date.

import { currentLanguage, say, switchLanguage, translatePage, words } from "../language/i18n.js";
import { Chart } from "./chart.js";
import { Feed } from "./feed.js";
import { curveOf, Figures, namesOf } from "./figures.js";
import { List, runName } from "./list.js";
import { Form } from "./form.js";
import { make } from "../reply/dom.js";
import { Samples } from "./samples.js";
import { Started } from "./started.js";

const MOST_SHOWN = 8; // as many as there are colours
const KEY = "nanochat.runs"; // in the browser's storage: the ticked runs
const AFTER = { running: "nowRunning", finished: "nowFinished", stopped: "nowStopped" };

const find = (id) => document.getElementById(id);
const list = new List(find("rows"), find("more-runs"), tick, resume);
const form = new Form(showStarted);
const startedRuns = new Started(find("started"), find("started-list"), { resume, changed: () => feed.look() });
const samples = new Samples(find("samples"), find("samples-list"));
const charts = new Map(); // by the name of the figure
const figures = new Map(); // by the run's id
let runs = []; // as the server listed them
let older = 0;
let chosen = keptChoice(); // ids of the ticked runs; null: the reader has not chosen, and the newest run is shown
let colours = new Map(); // by the run's id
let over = "step";
let [failedAt, seenAt] = [false, null];
let [started, startedNow] = [null, null]; // the runs that the page has started, by id; null: it may not. And the latest, until it is listed

function keptChoice() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY));
    return Array.isArray(kept) ? kept.filter((id) => typeof id === "string").slice(0, MOST_SHOWN) : null;
  } catch {
    return null; // the browser may forbid storage
  }
}

// --- which runs are shown ------------------------------------------------------------------------

/** Give a colour to every run that is shown, which it keeps as long as it is shown. */
function paint() {
  const there = new Set(runs.map((run) => run.id));
  const newest = runs.find((run) => run.state === "running") ?? runs[0];
  const wanted = chosen === null ? [newest?.id].filter(Boolean) : chosen.filter((id) => there.has(id));
  const kept = new Map([...colours].filter(([id]) => wanted.includes(id)));
  for (const id of wanted) {
    if (kept.has(id)) continue;
    const used = new Set(kept.values());
    kept.set(id, [...Array(MOST_SHOWN).keys()].find((colour) => !used.has(colour)));
  }
  colours = kept;
  for (const id of figures.keys()) if (!colours.has(id)) figures.delete(id);
}

function tick(id, on) {
  chosen = [...colours.keys()].filter((one) => one !== id);
  if (on && chosen.length < MOST_SHOWN) chosen.push(id);
  try {
    localStorage.setItem(KEY, JSON.stringify(chosen));
  } catch {
    // without storage, the choice lasts until the page is closed
  }
  paint();
  draw();
  feed.look();
}

// --- what the server says ------------------------------------------------------------------------

const feed = new Feed({
  shown: () => [...colours.keys()].map((id) => `${id}.${figures.get(id)?.place ?? ".0"}`).join(","),
  took(answer) {
    seenAt = new Date();
    if (failedAt) showTrouble(null);
    if (answer === null) return;
    tellChanges(answer.runs);
    [runs, older, started] = [answer.runs, answer.older, answer.started ?? null];
    find("chat-link").hidden = !answer.chat;
    const before = [...colours.keys()].join();
    paint();
    for (const [id, news] of Object.entries(answer.shown)) {
      if (!colours.has(id)) continue;
      if (!figures.has(id)) figures.set(id, new Figures(runs.find((run) => run.id === id)?.stage));
      figures.get(id).take(news);
    }
    draw();
    if ([...colours.keys()].join() !== before) feed.look();
  },
  failed: showTrouble,
});

/** Show the reason for a failure, or remove it for null. */
function showTrouble(failure) {
  failedAt = failure !== null;
  find("trouble").hidden = !failedAt;
  if (!failedAt) return;
  const refused = failure.code && failure.code !== "unreachable" && failure.detail;
  if (refused) say(find("trouble"), "failed", { status: failure.values.status, detail: failure.detail });
  else say(find("trouble"), "unreachableRuns", { time: seenAt?.toLocaleTimeString(currentLanguage()) ?? "–" });
}

/** Tell screen readers which runs have begun or ended. */
function tellChanges(now) {
  if (!runs.length) return;
  const before = new Map(runs.map((run) => [run.id, run.state]));
  const changed = now.filter((run) => before.get(run.id) !== run.state);
  if (changed.length) find("told").textContent = changed.map((run) => words(AFTER[run.state], { run: runName(run) })).join(" ");
}

// --- runs of this page ---------------------------------------------------------------------------

function resume(id, name, opener) {
  form.open(opener, id, name);
}

/** Show a run as soon as the server lists it. */
function showStarted(id) {
  startedNow = id;
  feed.look();
}

function drawStarted() {
  find("may-start").hidden = started === null;
  list.resumes = (id) => started !== null && !Object.hasOwn(started, id); // the others have a button in their card
  startedRuns.draw(started ?? {}, new Map(runs.map((run) => [run.id, run.state])));
  if (startedNow && startedRuns.show(startedNow)) startedNow = null;
}

find("new-run").addEventListener("click", () => form.open(find("new-run")));

// --- drawing -------------------------------------------------------------------------------------

function draw() {
  drawStarted();
  find("none").hidden = runs.length > 0 || seenAt === null || started !== null;
  find("list").hidden = !runs.length;
  list.draw(runs, colours, colours.size >= MOST_SHOWN);
  find("older").hidden = older === 0;
  say(find("older"), "older", { count: older });
  const shown = [...colours.keys()].map((id) => runs.find((run) => run.id === id)).filter(Boolean);
  drawNotes(shown);
  drawCharts(shown);
  samples.draw(shown);
  const running = runs.find((run) => run.state === "running");
  const far = running?.steps ? `${Math.floor((100 * running.step) / running.steps)} % ` : "";
  document.title = `${running ? far : ""}${words("runs")} · nanochat`;
}

function drawNotes(shown) {
  const notes = [];
  if (!shown.length) notes.push(words("nothingTicked"));
  for (const run of shown) {
    const { behind, done, size, bad, width } = figures.get(run.id) ?? {};
    const values = { run: runName(run) };
    if (behind) notes.push(words("reading", { ...values, percent: Math.floor((100 * done) / size) }));
    if (bad) notes.push(words("badLines", { ...values, count: bad }));
    if (width > 1) notes.push(words("averaged", { ...values, count: width }));
  }
  const place = find("notes");
  if ([...place.children].map((note) => note.textContent).join("\n") !== notes.join("\n")) place.replaceChildren(...notes.map((note) => make("li", "", note)));
}

function drawCharts(shown) {
  find("curves").hidden = !runs.length;
  const there = shown.filter((run) => figures.get(run.id)?.steps.length);
  const { first, further } = namesOf(there.map((run) => figures.get(run.id)));
  place(find("charts"), first, there);
  place(find("further-charts"), further, there);
  find("further").hidden = !further.length;
}

/** Show the charts of some figures in an element. A chart that is already there is redrawn, so that it keeps the focus. */
function place(where, names, there) {
  const wanted = names.map((name) => {
    if (!charts.has(name)) charts.set(name, new Chart(name));
    return charts.get(name);
  });
  const old = [...where.children];
  if (wanted.length !== old.length || wanted.some((chart, number) => chart.element !== old[number])) where.replaceChildren(...wanted.map((chart) => chart.element));
  for (const chart of wanted) {
    const curves = there.map((run) => ({ run: runName(run), colour: colours.get(run.id), ...curveOf(figures.get(run.id), chart.name, over) }));
    chart.show(curves.filter(({ points }) => points.length), over);
  }
}

// --- the page ------------------------------------------------------------------------------------

function showLanguage() {
  say(find("language"), "otherLanguage");
  say(find("language"), "otherLanguageLabel", {}, "label");
  draw();
  form.translate();
  samples.translate();
}

find("language").addEventListener("click", () => {
  switchLanguage();
  showLanguage();
});
for (const choice of document.getElementsByName("over")) {
  choice.addEventListener("change", () => {
    over = choice.value;
    draw();
  });
}
find("further").addEventListener("toggle", draw);

translatePage();
showLanguage();
feed.look();
