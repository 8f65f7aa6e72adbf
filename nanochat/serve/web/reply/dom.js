// Makes elements: texts become text nodes, never markup.

import { say } from "../language/i18n.js";

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
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

/** A button with an icon and a text. */
export function smallButton(key, image, press) {
  const button = make("button", "quiet small", icon(image), make("span"));
  button.type = "button";
  say(button.lastChild, key);
  button.addEventListener("click", press);
  return button;
}

/** A button with an icon alone; the text is its name and its tooltip. */
export function iconButton(key, image, press, values = {}) {
  const button = make("button", "quiet tiny", icon(image));
  button.type = "button";
  say(button, key, values, "label");
  say(button, key, values, "title");
  button.addEventListener("click", press);
  return button;
}

/** A button that copies what `text` returns. `key` names it in words.js. */
export function copyButton(text, key = "copy") {
  const show = (said, image) => {
    say(button.lastChild, said);
    button.firstChild.replaceWith(icon(image));
  };
  const button = smallButton(key, "copy", async () => {
    const done = await toClipboard(text()).then(() => true, () => false);
    show(done ? "copied" : "copyFailed", done ? "check" : "copy");
    setTimeout(() => show(key, "copy"), 1600);
  });
  return button;
}
