// The form of a run: one field for each flag of the script, the command that they make, and what it needs.

import { currentLanguage, say, words } from "../language/i18n.js";
import { copyButton, make } from "../reply/dom.js";
import { formOf, submit } from "./control.js";

const PAUSE = 400; // milliseconds without a key before the command is composed again

const find = (id) => document.getElementById(id);

export class Form {
  /** `started` is called with the id of a run that the form has started. */
  constructor(started) {
    Object.assign(this, { started, run: null, name: "", about: null, inputs: new Map(), timer: null, turn: 0 });
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    find("form").addEventListener("input", () => this.changed());
    find("forecast").addEventListener("click", () => this.forecast());
    find("cancel").addEventListener("click", () => this.close());
    find("command-line").append(copyButton(() => find("command").textContent));
  }

  /** Open the form of a new run or, with its id and its name, of a run that is resumed; `opener` gets the focus back. */
  async open(opener, run = null, name = "") {
    Object.assign(this, { opener, run, name, about: null });
    find("start").hidden = false;
    find("start-title").tabIndex = -1;
    this.inputs.clear();
    find("fields").replaceChildren();
    find("rare-fields").replaceChildren();
    find("forecast-text").hidden = true;
    this.refuse(null);
    this.translate();
    find("start-title").focus();
    const turn = ++this.turn;
    this.busy("readingFlags");
    try {
      const about = await formOf(run);
      if (turn !== this.turn) return;
      this.about = about;
      this.draw();
      this.busy(null);
      this.compose();
    } catch (failure) {
      if (turn === this.turn) this.refuse(failure);
    }
  }

  close() {
    this.turn++;
    clearTimeout(this.timer);
    find("start").hidden = true;
    if (this.opener?.isConnected) this.opener.focus();
  }

  // --- the fields ------------------------------------------------------------------------------

  draw() {
    const { fields, values, processes, most_processes, forecasts } = this.about;
    const order = [...fields.filter(({ required }) => required), ...fields.filter(({ required }) => !required)];
    for (const field of order) {
      const input = this.input(field, values[field.name]);
      this.inputs.set(field.name, { field, input, before: this.read(field, input) });
      find(field.rare ? "rare-fields" : "fields").append(this.box(field, input));
    }
    find("rare").hidden = !order.some(({ rare }) => rare);
    [find("processes").value, find("processes").max] = [processes, most_processes];
    find("processes-box").hidden = most_processes === 1;
    find("forecast").hidden = !forecasts;
  }

  input(field, value) {
    const { kind, choices, name } = field;
    const input = make({ list: "textarea", choice: "select" }[kind] ?? "input");
    input.id = `flag-${name}`;
    input.required = field.required;
    if (kind === "switch") {
      [input.type, input.checked] = ["checkbox", value ?? field.default];
    } else if (kind === "choice") {
      for (const choice of [...(choices.includes(field.default) ? [] : [""]), ...choices]) input.append(new Option(choice || "–", choice));
      input.value = value ?? field.default;
    } else {
      Object.assign(input, { spellcheck: false, autocomplete: "off", placeholder: [field.default].flat().join(" ") });
      input.value = [value ?? []].flat().join("\n");
      if (kind === "list") input.rows = 2;
    }
    return input;
  }

  box(field, input) {
    const label = make("label", "", make("code", "", `--${field.name}`));
    label.htmlFor = input.id;
    const help = make("p", "note", field.help[currentLanguage()]);
    help.id = `${input.id}-help`;
    input.setAttribute("aria-describedby", help.id);
    const box = make("div", `field kind-${field.kind}`, ...(field.kind === "switch" ? [input, label] : [label, input]), help);
    if (field.required) label.append(" ", make("span", "note", words("required")));
    return box;
  }

  read({ kind }, input) {
    if (kind === "switch") return input.checked;
    return kind === "list" ? input.value.split("\n").filter(Boolean) : input.value;
  }

  /** What the reader has changed, by name. */
  get filled() {
    const values = {};
    for (const [name, { field, input, before }] of this.inputs) {
      const value = this.read(field, input);
      if (String(value) !== String(before)) values[name] = value;
    }
    return { run: this.run, values, processes: Number(find("processes").value) };
  }

  // --- what the server says --------------------------------------------------------------------

  changed() {
    if (this.starting) return;
    clearTimeout(this.timer);
    find("forecast-text").hidden = true;
    this.timer = setTimeout(() => this.compose(), PAUSE);
  }

  /** Show the command that the fields make. What is missing is no fault yet. */
  async compose() {
    if (!this.about || [...this.inputs.values()].some(({ field, input }) => field.required && !input.value.trim())) {
      find("command-line").hidden = true;
      return this.refuse(null);
    }
    await this.ask("command", null, ({ command }) => this.showCommand(command));
  }

  showCommand(command) {
    find("command-line").hidden = false;
    find("command").textContent = command;
  }

  async forecast() {
    if (!find("form").reportValidity()) return;
    await this.ask("forecast", "forecasting", ({ command, code, text }) => {
      this.showCommand(command);
      find("forecast-text").hidden = false;
      find("forecast-text").className = code === 0 ? "output" : "output trouble";
      find("forecast-text").textContent = text.trim();
    });
  }

  async start() {
    if (!this.about || this.starting) return;
    this.starting = true;
    await this.ask("start", "starting", ({ id }) => {
      this.close();
      this.started(id);
    });
    this.starting = false;
  }

  /** Submit the form, and show why if the server refuses it. Only the latest answer counts. */
  async ask(action, busy, took) {
    const turn = ++this.turn;
    clearTimeout(this.timer); // the command is part of each answer
    this.busy(busy);
    try {
      const answer = await submit(action, this.filled);
      if (turn !== this.turn) return;
      this.refuse(null);
      took(answer);
    } catch (failure) {
      if (turn === this.turn) this.refuse(failure);
    }
  }

  /** Show that the server is at work, or with null that it is not. */
  busy(key) {
    find("form-told").textContent = key ? words(key) : "";
    find("form").setAttribute("aria-busy", String(key !== null));
    for (const id of ["forecast", "go"]) find(id).disabled = key !== null;
  }

  /** Show why the server refuses the form, and which field is to blame; null: it does not. */
  refuse(failure) {
    this.busy(null);
    find("form-trouble").hidden = failure === null;
    find("form-trouble").textContent = failure === null ? "" : failure.detail || words("unreachable");
    for (const [name, { input }] of this.inputs) {
      if (name === failure?.values?.param) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
  }

  translate() {
    say(find("start-title"), this.run ? "resumeTitle" : "startTitle", { run: this.name });
    say(find("go"), this.run ? "resume" : "start");
    for (const { field, input } of this.inputs.values()) {
      find(`${input.id}-help`).textContent = field.help[currentLanguage()];
      const mark = input.parentElement.querySelector("label .note");
      if (mark) mark.textContent = words("required");
    }
  }
}
