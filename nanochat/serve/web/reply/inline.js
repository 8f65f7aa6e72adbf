// Reads the Markdown inside a line: emphasis, code, links and line breaks, in time that is linear in its length.

const DEEPEST = 24; // emphasis inside emphasis
const LINK = /\[([^[\]\n]{1,500})\]\(([^\s()]{1,2000}(?:\([^\s()]{0,500}\)[^\s()]{0,500})?)(?:\s"[^"\n]{0,200}")?\)/y;
const HALF_LINK = /\[([^[\]\n]{1,500})\]\([^\s()]{0,2000}$/y; // its end has not arrived yet
const ADDRESS = /https?:\/\/[^\s<>"'`*，。；：！？、（）【】《》“”]{1,2000}/y;
const WORDS_AFTER_HOST = /^(https?:\/\/[\w.-]*\w(?::\d+)?)\p{Script=Han}.*/u; // Chinese puts no space between
const SPECIAL = /[\\`*_~[!\nh\uE000]/g;
const LETTER = /[\p{L}\p{N}]/u;
const BEFORE = /[A-Za-z0-9)\]]/; // a * between two such characters is a product
const AFTER = /[A-Za-z0-9([]/;
export const TOOL = "\uE000"; // stands for a calculator call in a text

/** Return the address of a link if it is safe to follow, else null. */
export function safeAddress(text) {
  try {
    const { protocol, href } = new URL(text);
    return protocol === "https:" || protocol === "http:" ? href : null;
  } catch {
    return null;
  }
}

/**
 * The nodes of a text: strings, {tag: "strong" | "em" | "del" | "a", nodes, href}, {tag: "code", text}, {tag: "br"} and
 * {tag: "tool"}. If the text is `open`, more of it will come: emphasis that has begun counts as if it ended here.
 */
export function readInline(text, open = false, links = true) {
  const frames = [{ mark: "", nodes: [] }];
  const begun = new Map(); // mark -> how many frames have it
  const put = (node) => {
    const { nodes } = frames.at(-1);
    if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes.push(nodes.pop() + node);
    else if (node !== "") nodes.push(node);
  };
  const spill = () => {
    const { mark, nodes } = frames.pop();
    begun.set(mark, begun.get(mark) - 1);
    put(mark);
    nodes.forEach(put);
  };
  const close = (mark) => {
    while (frames.at(-1).mark !== mark) spill();
    const { nodes } = frames.pop();
    begun.set(mark, begun.get(mark) - 1);
    put({ tag: mark === "~~" ? "del" : mark.length === 2 ? "strong" : "em", nodes });
  };
  const lastCode = new Map(); // run of backticks -> where no closing run follows any more
  let at = 0;

  /** A run of the same marks opens or closes emphasis, or is text. */
  function marks(run, before, after) {
    const [first] = run;
    const spaceAfter = after === "" || /\s/.test(after);
    const spaceBefore = before === "" || /\s/.test(before);
    let left = run.length;
    const mayClose = !spaceBefore && !(first === "_" && LETTER.test(after));
    while (left && mayClose) {
      const mark = frames.findLast(({ mark }) => mark[0] === first)?.mark;
      if (!mark || !begun.get(mark) || mark.length > left || !frames.at(-1).nodes.length) break;
      close(mark);
      left -= mark.length;
    }
    const within = first === "_" ? LETTER.test(before) : BEFORE.test(before) && AFTER.test(after); // x_{1} keeps its mark
    const mayOpen = (!spaceAfter || (open && after === "")) && !within;
    while (left) {
      const mark = first.repeat(first === "~" ? 2 : Math.min(2, left));
      if (!mayOpen || mark.length > left || frames.length > DEEPEST) break;
      frames.push({ mark, nodes: [] });
      begun.set(mark, (begun.get(mark) ?? 0) + 1);
      left -= mark.length;
    }
    put(first.repeat(left));
  }

  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) {
      put(text.slice(at));
      break;
    }
    put(text.slice(at, found.index));
    at = found.index;
    const character = text[at];
    if (character === TOOL) {
      put({ tag: "tool" });
      at += 1;
    } else if (character === "\n") {
      put({ tag: "br" });
      at += 1;
    } else if (character === "\\" && /[\\`*_~#|>[\]!-]/.test(text[at + 1] ?? "")) {
      put(text[at + 1]);
      at += 2;
    } else if (character === "`") {
      const run = runAt(text, at);
      const end = lastCode.has(run) ? -1 : closingRun(text, at + run.length, run.length);
      if (end < 0 && !open) lastCode.set(run, at);
      if (end >= 0 || open) put({ tag: "code", text: trimmed(text.slice(at + run.length, end < 0 ? undefined : end)) });
      else put(run);
      at = end >= 0 ? end + run.length : open ? text.length : at + run.length;
    } else if ("*_~".includes(character)) {
      const run = runAt(text, at);
      marks(run, text[at - 1] ?? "", text[at + run.length] ?? "");
      at += run.length;
    } else if (links && (character === "[" || (character === "!" && text[at + 1] === "["))) {
      const place = character === "!" ? at + 1 : at;
      LINK.lastIndex = HALF_LINK.lastIndex = place;
      const link = LINK.exec(text) ?? (open ? HALF_LINK.exec(text) : null);
      const href = link?.[2] && safeAddress(link[2]);
      if (link && (href || link[2] === undefined)) {
        const nodes = readInline(link[1], false, false);
        if (href) put({ tag: "a", href, nodes });
        else nodes.forEach(put);
        at = place + link[0].length;
      } else {
        put(character);
        at += 1;
      }
    } else if (character === "h" && links && !BEFORE.test(text[at - 1] ?? "")) {
      ADDRESS.lastIndex = at;
      const address = ADDRESS.exec(text)?.[0].replace(WORDS_AFTER_HOST, "$1").replace(/[.,;:!?)\]}]{1,9}$/, "");
      const href = address && safeAddress(address);
      put(href ? { tag: "a", href, nodes: [address] } : "h");
      at += href ? address.length : 1;
    } else {
      put(character);
      at += 1;
    }
  }
  while (frames.length > 1) {
    if (!open) spill();
    else if (frames.at(-1).nodes.length) close(frames.at(-1).mark);
    else begun.set(frames.at(-1).mark, begun.get(frames.pop().mark) - 1);
  }
  return frames[0].nodes;
}

function runAt(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return text.slice(at, end);
}

/** Return where a run of exactly so many backticks begins, or -1. */
function closingRun(text, at, length) {
  for (;;) {
    const start = text.indexOf("`", at);
    if (start < 0) return -1;
    const run = runAt(text, start);
    if (run.length === length) return start;
    at = start + run.length;
  }
}

/** Return the text of inline code, without one space at both ends, which belongs to the marks. */
function trimmed(text) {
  const line = text.replaceAll("\n", " ");
  return line.length > 2 && line.startsWith(" ") && line.endsWith(" ") && line.trim() ? line.slice(1, -1) : line;
}
