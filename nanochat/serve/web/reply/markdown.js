// Reads Markdown into a tree of blocks: a pure function that takes any text, half-streamed and hostile ones too.

import { readInline } from "./inline.js";

const DEEPEST = 10; // lists and quotes inside each other
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})[ \t]*([^\s`]{0,30})/; // ```code``` on one line is no block
const HEADING = /^ {0,3}(#{1,6})(?=\s|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,3}[.)])[ \t]+(?=\S)/; // "1776." alone is an answer and no list
const TAB = "\t   "; // a tab with the spaces that make it as wide as an indent; code gets the tab back
const BEGUN = /^\s*(#{1,6}|[-+*]|\d{1,3}[.)]|`{1,2}|~{1,2}|>|-{2}|\*{2,3}|_{1,3})$/; // a line that may become anything

/**
 * The blocks of a text: {tag: "p" | "h1" to "h6", nodes}, {tag: "pre", language, text}, {tag: "blockquote", blocks},
 * {tag: "ul" | "ol", start, items: [blocks]}, {tag: "table", align, head, rows} and {tag: "hr"}; `nodes` are those of
 * inline.js, and a cell is such nodes. If the text is `open`, more of it will come: what has begun counts as if it
 * ended here, and a last line that may still become anything is left out.
 */
export function readMarkdown(text, open = false) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n").map((line) => line.replaceAll("\t", TAB));
  if (open && BEGUN.test(lines.at(-1))) lines.pop();
  return readBlocks(lines, open, 0);
}

function readBlocks(lines, open, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, end] = readBlock(lines, at, open, depth);
    blocks.push(block);
    at = end;
  }
  return blocks;
}

/** Return the block that begins at a line, and the line after it. */
function readBlock(lines, at, open, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const words = line.slice(heading[0].length).trim().replace(/(^|\s)#{1,20}$/, "");
    return [{ tag: `h${heading[1].length}`, nodes: readInline(words, open && at === lines.length - 1) }, at + 1];
  }
  if (isRule(line)) return [{ tag: "hr" }, at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) {
    let end = at;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    const inner = lines.slice(at, end).map((quoted) => quoted.replace(QUOTE, ""));
    return [{ tag: "blockquote", blocks: readBlocks(inner, open && end === lines.length, depth + 1) }, end];
  }
  if (depth < DEEPEST && ITEM.test(line)) return readList(lines, at, open, depth);
  if (isTable(lines, at, open)) return readTable(lines, at, open);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, open)) end += 1;
  const words = lines.slice(at, end).map((part) => part.trim()).join("\n");
  return [{ tag: "p", nodes: readInline(words, open && end === lines.length) }, end];
}

function isRule(line) {
  return line.length < 200 && /^(-{3,}|\*{3,}|_{3,})$/.test(line.replaceAll(/[ \t]/g, ""));
}

/** Return whether a line ends the paragraph before it. */
function interrupts(lines, at, open) {
  const line = lines[at];
  const item = ITEM.exec(line);
  const starts = item && (item[2].length === 1 || /^1[.)]$/.test(item[2]));
  return FENCE.test(line) || HEADING.test(line) || isRule(line) || QUOTE.test(line) || starts || isTable(lines, at, open);
}

function readFence(lines, at, [, marks, language]) {
  const body = [];
  const block = () => ({ tag: "pre", language, text: body.join("\n").replaceAll(TAB, "\t") });
  for (at += 1; at < lines.length; at++) {
    const line = lines[at].trim();
    if (line.length >= marks.length && line === marks[0].repeat(line.length)) {
      return [block(), at + 1];
    }
    body.push(lines[at]);
  }
  return [block(), at];
}

function indent(line) {
  return line.length - line.trimStart().length;
}

function readList(lines, at, open, depth) {
  const first = ITEM.exec(lines[at]);
  const [own, ordered] = [first[1].length, first[2].length > 1];
  const items = [];
  let end = at;
  for (let item = first; item; ) {
    const deeper = own + 2; // lines with a larger indent belong to the item
    const start = end;
    const inner = [lines[start].slice(item[0].length)];
    for (end += 1; end < lines.length; end++) {
      const line = lines[end];
      if (!line.trim()) {
        const next = lines.slice(end, end + 3).find((following) => following.trim());
        if (next === undefined || indent(next) < deeper) break;
      } else if (indent(line) < deeper && (interrupts(lines, end, open) || ITEM.test(line) || !lines[end - 1].trim())) break;
      inner.push(line.slice(Math.min(indent(line), item[0].length)));
    }
    items.push(readBlocks(inner, open && end === lines.length, depth + 1));
    let next = end;
    while (next < lines.length && !lines[next].trim() && next < end + 2) next += 1; // blank lines between items
    item = ITEM.exec(lines[next] ?? "");
    if (!item || item[1].length >= deeper || (item[2].length > 1) !== ordered || isRule(lines[next])) break;
    end = next;
  }
  const tag = ordered ? "ol" : "ul";
  return [{ tag, start: ordered ? Number.parseInt(first[2], 10) : 1, items }, end];
}

// --- tables --------------------------------------------------------------------------------------

/** Return whether a table begins at a line. Until the next line has arrived, a line that starts with | is enough. */
function isTable(lines, at, open) {
  if (!lines[at].includes("|")) return false;
  if (open && at >= lines.length - 2 && lines[at].trim()[0] === "|") {
    if (at === lines.length - 1 || /^[\s|:-]*$/.test(lines[at + 1])) return true;
  }
  const below = lines[at + 1] ?? "";
  return below.includes("-") && below.includes("|") && cells(below).every((cell) => /^:?-+:?$/.test(cell));
}

function cells(line) {
  const found = line.trim().split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
  if (found[0] === "") found.shift();
  if (found.at(-1) === "") found.pop();
  return found.slice(0, 40);
}

function readTable(lines, at, open) {
  const align = cells(lines[at + 1] ?? "").map((cell) => (cell.at(-1) !== ":" ? "" : cell[0] === ":" ? "center" : "right"));
  const head = cells(lines[at]).map((cell) => readInline(cell, open && at === lines.length - 1));
  const rows = [];
  let end = Math.min(at + 2, lines.length);
  for (; end < lines.length && lines[end].trim() && lines[end].includes("|"); end++) {
    const row = cells(lines[end]).map((cell) => readInline(cell, open && end === lines.length - 1));
    rows.push(head.map((_, column) => row[column] ?? []));
  }
  return [{ tag: "table", align, head, rows }, end];
}
