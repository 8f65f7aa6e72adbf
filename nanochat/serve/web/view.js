// Builds the elements of a conversation. Text from users and models becomes text nodes, never markup.

import { say } from "./i18n.js";
import { phrased, phrases } from "./phrases.js";

const SVG = "http://www.w3.org/2000/svg";

function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

function speaker(key) {
  const name = make("span", "hidden");
  say(name, key);
  return name;
}

export function userTurn(text) {
  return make("article", "turn user", speaker("you"), make("div", "bubble", ...phrased(text)));
}

export function forgottenLine(context) {
  const line = make("p", "forgotten");
  const text = make("span");
  say(text, "forgotten", { context });
  line.append(text);
  return line;
}

/** A calculator call: shows the result at a glance, and an explanation when opened. */
function toolChip({ expression, result }) {
  const failed = result === null || result === "error"; // the engine's answer to an invalid expression
  const sum = make("code", "", failed ? `${expression} = ?` : `${expression} = ${result}`);
  const summary = make("summary", "", icon("tool"), sum);
  const text = make("p");
  say(text, failed ? "toolFailed" : "toolText", { expression, result });
  say(summary, "toolName", {}, "title");
  return make("details", "tool", summary, text);
}

async function toClipboard(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const box = make("textarea", "hidden", text); // browsers offer no clipboard over plain http to another machine
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  if (!done) throw new Error("the browser refused");
}

/** A button with an icon and a text below an answer. */
function smallButton(key, image, press) {
  const button = make("button", "quiet small", icon(image), make("span"));
  button.type = "button";
  say(button.lastChild, key);
  button.addEventListener("click", press);
  return button;
}

function copyButton(text) {
  const show = (key, image) => {
    say(button.lastChild, key);
    button.firstChild.replaceWith(icon(image));
  };
  const button = smallButton("copy", "copy", async () => {
    const done = await toClipboard(text()).then(() => true, () => false);
    show(done ? "copied" : "copyFailed", done ? "check" : "copy");
    setTimeout(() => show("copy", "copy"), 1600);
  });
  return button;
}

/** The lines that describe the model, for the panel behind its name. */
export function description(model, corpus) {
  const { stage, tag, step, context_length: context, parameters, others = [] } = model;
  const line = (key, values) => {
    const text = make("p");
    say(text, key, values);
    return text;
  };
  const lines = parameters ? [line("size", { parameters: { about: parameters }, context })] : [];
  if (corpus || stage === "published") lines.push(line(stage));
  lines.push(line("place", { stage, tag, step }), line("keeping"));
  if (others.length) lines.push(line("others"), make("ul", "", ...others.map((flags) => make("li", "", make("code", "", flags)))));
  return lines;
}

/** The model's turn, which grows while the answer streams. */
export class ModelTurn {
  constructor() {
    this.parts = []; // in the form that the API accepts: {type: text, text} and {type: tool, expression, result}
    this.note = null; // a key in words.js
    this.numbers = null; // [tokens, seconds since the question was sent]
    this.body = make("div", "body streaming");
    this.meta = make("div", "meta");
    this.element = make("article", "turn model", speaker("model"), this.body, this.meta);
    this.open = null; // the text node that still grows
  }

  get text() {
    return this.parts.filter((part) => part.type === "text").map((part) => part.text).join("");
  }

  get saidSomething() {
    return this.parts.some((part) => part.type === "tool" || part.text.trim());
  }

  addText(text) {
    const last = this.parts.at(-1);
    if (last?.type === "text") last.text += text;
    else this.parts.push({ type: "text", text });
    if (this.open === null) this.body.append((this.open = document.createTextNode("")));
    this.open.appendData(text);
    this.#settle(2); // the last words may still change as more characters come
  }

  /** Put a place for a line break between the words of the open text, except between its last `open` words. */
  #settle(open) {
    const found = phrases(this.open.data);
    for (const word of found.slice(0, Math.max(0, found.length - open))) {
      this.open.before(word, make("wbr"));
      this.open.deleteData(0, word.length);
    }
  }

  #close() {
    if (this.open !== null) this.#settle(1);
    this.open = null;
  }

  addTool({ expression, result }) {
    this.#close();
    this.parts.push({ type: "tool", expression, result });
    this.body.append(toolChip({ expression, result }));
  }

  /** Keep how many tokens have arrived and how long that took; the details below the answer show both. */
  count(tokens, seconds) {
    this.numbers = [tokens, seconds];
  }

  #details() {
    const [tokens, seconds] = this.numbers;
    const [amount, speed, rate] = [make("span"), make("span"), tokens / Math.max(seconds, 1e-3)];
    say(amount, tokens === 1 ? "oneToken" : "tokens", { count: tokens });
    say(speed, "rate", { rate: rate < 10 ? Math.round(rate * 10) / 10 : Math.round(rate) });
    const summary = make("summary", "quiet small", icon("numbers"));
    say(summary, "numbers", {}, "label");
    say(summary, "numbers", {}, "title");
    return make("details", "numbers", summary, make("span", "", amount, " · ", speed));
  }

  /** Finish the turn. `note` is a key in words.js, or null. */
  end(note) {
    this.note = note;
    this.#close();
    this.body.classList.remove("streaming");
    if (note) {
      const text = make("span", "note");
      say(text, note);
      this.meta.append(text);
    }
    if (this.text.trim()) this.meta.append(copyButton(() => this.text.trim()));
    if (this.numbers) this.meta.append(this.#details());
  }

  /** Offer to answer the question again; `withdraw` takes the offer back. */
  offer(press) {
    this.withdraw();
    this.again = smallButton(this.error ? "retry" : "anew", "again", press);
    if (!this.error) say(this.again, "anewTitle", {}, "title");
    if (this.error) this.error.append(this.again);
    else this.meta.insertBefore(this.again, this.meta.querySelector(".numbers"));
  }

  withdraw() {
    this.again?.remove();
  }

  fail(key, values) {
    const text = make("p");
    say(text, key, values);
    text.setAttribute("role", "alert");
    this.error = make("div", "error", text);
    this.meta.before(this.error);
    if (!this.saidSomething) this.body.remove();
  }
}
