// Builds the elements of a conversation. Text from users and models becomes text nodes, never markup.

import { say } from "./i18n.js";

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
  return make("article", "turn user", speaker("you"), make("div", "bubble", text));
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

function copyButton(text) {
  const button = make("button", "quiet small", icon("copy"));
  button.type = "button";
  const name = make("span");
  say(name, "copy");
  button.append(name);
  button.addEventListener("click", async () => {
    const done = await toClipboard(text()).then(() => true, () => false);
    say(name, done ? "copied" : "copyFailed");
    button.firstChild.replaceWith(icon(done ? "check" : "copy"));
    setTimeout(() => {
      say(name, "copy");
      button.firstChild.replaceWith(icon("copy"));
    }, 1600);
  });
  return button;
}

/** The model's turn, which grows while the answer streams. */
export class ModelTurn {
  constructor() {
    this.parts = []; // in the form that the API accepts: {type: text, text} and {type: tool, expression, result}
    this.body = make("div", "body streaming");
    this.meta = make("div", "meta");
    this.count = make("span");
    this.element = make("article", "turn model", speaker("model"), this.body, this.meta);
  }

  get text() {
    return this.parts.filter((part) => part.type === "text").map((part) => part.text).join("");
  }

  get saidSomething() {
    return this.parts.some((part) => part.type === "tool" || part.text.trim());
  }

  addText(text) {
    const last = this.parts.at(-1);
    if (last?.type === "text") {
      last.text += text;
      this.words.appendData(text);
    } else {
      this.parts.push({ type: "text", text });
      this.words = document.createTextNode(text);
      this.body.append(this.words);
    }
  }

  addTool(tool) {
    this.parts.push({ type: "tool", ...tool });
    this.body.append(toolChip(tool));
  }

  /** Show below the answer how many tokens have arrived, and how fast since the question was sent. */
  showSpeed(tokens, seconds) {
    if (!this.count.parentNode) this.meta.prepend(this.count);
    const [amount, speed, rate] = [make("span"), make("span"), tokens / seconds];
    say(amount, tokens === 1 ? "oneToken" : "tokens", { count: tokens });
    say(speed, "rate", { rate: rate < 10 ? Math.round(rate * 10) / 10 : Math.round(rate) });
    this.count.replaceChildren(amount, " · ", speed);
  }

  /** Finish the turn. `note` is a key in i18n.js, or null. */
  end(note) {
    this.body.classList.remove("streaming");
    if (note) {
      const text = make("span", "note");
      say(text, note);
      this.meta.append(text);
    }
    if (this.text.trim()) this.meta.append(copyButton(() => this.text.trim()));
  }

  fail(key, values) {
    const text = make("p", "error");
    text.setAttribute("role", "alert");
    say(text, key, values);
    this.meta.before(text);
    if (!this.saidSomething) this.body.remove();
  }
}
