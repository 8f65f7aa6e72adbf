// The drawer of settings: an input box for each, with one sentence on what it does, and a way back to the defaults.

import { knowsSystem, model, rival, thinksByDefault } from "../about.js";
import { hasWords, say } from "../language/i18n.js";
import { make } from "../reply/dom.js";
import { change, current, defaultTokens, NUMBERS, reset } from "./values.js";

const find = (id) => document.getElementById(id);

export class SettingsDrawer {
  /** `changed` is called after every change. */
  constructor(changed) {
    this.changed = changed;
    this.drawer = find("settings");
    find("settings-toggle").addEventListener("click", () => this.show());
    find("settings-close").addEventListener("click", () => this.drawer.close());
    this.drawer.addEventListener("click", ({ target }) => {
      if (target === this.drawer) this.drawer.close(); // outside the drawer, on its backdrop
    });
    find("settings-reset").addEventListener("click", () => {
      reset();
      this.draw();
      this.changed();
    });
  }

  show() {
    this.draw();
    this.drawer.showModal();
  }

  draw() {
    const boxes = NUMBERS.map((number) => this.#number(number));
    if (knowsSystem(model) || knowsSystem(rival)) boxes.unshift(this.#system());
    const thinks = thinksByDefault(model) ?? thinksByDefault(rival);
    if (thinks !== null) boxes.unshift(this.#switch("think", current().think ?? thinks));
    find("settings-list").replaceChildren(...boxes, this.#switch("logprobs", current().logprobs === true));
  }

  #keep(changes) {
    change(changes);
    this.changed();
  }

  #number({ name, low, high, step }) {
    const box = make("input");
    Object.assign(box, { type: "number", min: low, max: high, step: step < 1 ? "any" : 1, inputMode: "decimal" });
    box.value = current()[name] ?? "";
    const standard = { top_p: 1, ...model?.defaults };
    if (model) standard.max_tokens = defaultTokens(model);
    box.placeholder = standard[name] ?? "";
    const wrong = make("span", "wrong");
    say(wrong, "outOfRange", { low, high });
    wrong.hidden = true;
    box.addEventListener("input", () => {
      wrong.hidden = box.checkValidity();
      box.setAttribute("aria-invalid", String(!wrong.hidden));
      this.#keep({ [name]: box.value === "" || !wrong.hidden ? undefined : Number(box.value) });
    });
    return field(name, box, wrong);
  }

  #system() {
    const box = make("textarea");
    box.rows = 3;
    box.value = current().system ?? "";
    box.addEventListener("input", () => this.#keep({ system: box.value }));
    return field("system", box);
  }

  #switch(name, checked) {
    const box = make("input");
    Object.assign(box, { type: "checkbox", checked });
    box.addEventListener("change", () => this.#keep({ [name]: box.checked }));
    const place = field(name, box);
    place.classList.add("switch");
    return place;
  }
}

function field(name, box, ...more) {
  const [label, help] = [make("label"), make("span", "help")];
  box.id = `setting-${name}`;
  help.id = `setting-${name}-help`;
  label.htmlFor = box.id;
  box.setAttribute("aria-describedby", help.id);
  say(label, `set_${name}`);
  if (hasWords(`set_${name}_help`)) say(help, `set_${name}_help`);
  return make("div", "setting", label, box, ...more, help);
}
