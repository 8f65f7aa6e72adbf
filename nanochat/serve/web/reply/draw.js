// Draws the tree of markdown.js as elements, and changes only those elements that a longer text has changed.

import { say } from "../language/i18n.js";
import { phrased } from "../language/phrases.js";
import { copyButton, make } from "./dom.js";

const drawn = new WeakMap(); // element -> the blocks that redraw() has drawn in it, as JSON

/**
 * Draw blocks in an element, with tools as draw() takes them. What stands before the first block that is new is left alone, or a
 * long answer would be drawn more slowly than it arrives.
 */
export function redraw(element, blocks, tools) {
  const [before, now] = [drawn.get(element) ?? [], blocks.map((block) => JSON.stringify(block))];
  drawn.set(element, now);
  const same = now.findIndex((text, place) => text !== before[place] || /"tag":"tool"|\uE000/.test(text));
  const left = [...element.childNodes].slice(0, same < 0 ? now.length : same);
  update(element, [...left, ...draw(blocks.slice(left.length), tools)]);
}

/** The elements of blocks. `tools` are the elements of the calculator calls, which are taken in order. */
export function draw(blocks, tools) {
  const rest = [...tools];
  return blocks.map((block) => drawBlock(block, rest));
}

function drawBlock(block, tools) {
  const { tag, nodes, blocks, items, text } = block;
  if (tag === "hr") return make("hr");
  if (tag === "pre") return drawCode(block, tools);
  if (tag === "blockquote") return make(tag, "", ...blocks.map((inner) => drawBlock(inner, tools)));
  if (tag === "table") return drawTable(block, tools);
  if (!items) return make(tag, "", ...drawInline(nodes, tools));
  const list = make(tag, "", ...items.map((item) => make("li", "", ...drawItem(item, tools))));
  if (tag === "ol" && block.start !== 1) list.start = block.start;
  return list;
}

/** An item that begins with a paragraph shows its words without the space around a paragraph. */
function drawItem([first, ...rest], tools) {
  if (first?.tag !== "p") return first ? [first, ...rest].map((block) => drawBlock(block, tools)) : [];
  return [...drawInline(first.nodes, tools), ...rest.map((block) => drawBlock(block, tools))];
}

function drawCode({ language, text }, tools) {
  const code = make("code", "", ...split(text, tools));
  const copy = copyButton(() => code.textContent, "copyCode");
  return make("div", "code", make("div", "head", make("span", "", language), copy), scrolling("codeBlock", make("pre", "", code)));
}

/** Let the arrow keys scroll an element, and name it for those who cannot see why it takes the focus. */
function scrolling(key, element) {
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  say(element, key, {}, "label");
  return element;
}

function split(text, tools) {
  return text.split("\uE000").flatMap((part, place) => (place && tools.length ? [tools.shift(), part] : [part]));
}

function drawTable({ align, head, rows }, tools) {
  const row = (cells, tag) => make("tr", "", ...cells.map((nodes, column) =>
    make(tag, align[column] ?? "", ...drawInline(nodes, tools))));
  const body = rows.map((cells) => row(cells, "td"));
  const table = make("table", "", make("thead", "", row(head, "th")), make("tbody", "", ...body));
  return scrolling("table", make("div", "scrolls", table));
}

function drawInline(nodes, tools) {
  return nodes.flatMap((node) => {
    if (typeof node === "string") return phrased(node);
    if (node.tag === "tool") return tools.length ? [tools.shift()] : [];
    if (node.tag === "br") return [make("br")];
    if (node.tag === "code") return [make("code", "", ...split(node.text, tools))];
    const element = make(node.tag, "", ...drawInline(node.nodes, tools));
    if (node.tag !== "a") return [element];
    element.href = element.title = node.href;
    element.target = "_blank";
    element.rel = "noopener noreferrer";
    const shown = element.textContent;
    const { host } = new URL(node.href);
    return shown.includes(host) && safeName(shown, host) ? [element] : [element, make("span", "address", ` (${host})`)];
  });
}

/** Return whether a link's text is its address; otherwise text that looks like an address could mislead a reader. */
function safeName(shown, host) {
  try {
    return new URL(/^https?:/.test(shown) ? shown : `https://${shown}`).host === host;
  } catch {
    return false;
  }
}

/** Make the children of an element like new ones, and keep those that are the same: selections and focus stay. */
function update(element, wanted) {
  const here = [...element.childNodes];
  wanted.forEach((node, place) => {
    const old = here[place];
    if (old === undefined) element.append(node);
    else if (old !== node && !merge(old, node)) old.replaceWith(node);
  });
  for (const extra of here.slice(wanted.length)) if (extra.parentNode === element && !wanted.includes(extra)) extra.remove();
}

/** Give an element the content of another one of its kind; returns false if they are of different kinds. */
function merge(old, node) {
  if (old.nodeName !== node.nodeName || old.className !== node.className) return false;
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
    return true;
  }
  if (old.matches("a, .tool, ol")) return old.isEqualNode(node); // attributes belong to their content
  if (old.matches(".code > .head")) {
    old.firstChild.textContent = node.firstChild.textContent;
    return true; // includes the button, which copies the code next to it
  }
  update(old, [...node.childNodes]);
  return true;
}
