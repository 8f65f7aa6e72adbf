// A chat as a tree: edited questions and repeated answers are branches next to the earlier ones.

/**
 * A chat is {id, title, created, updated, messages, at}. `title` is empty until the reader gives one, times are in
 * milliseconds since 1970, and `at` is the last message of the branch that is shown (-1 in an empty chat). A message is
 * {parent, role: "user", text} or {parent, role: "assistant", parts, note, numbers, used, forgotten, context}; `parent`
 * is the place of the message before it, or -1. `forgotten` counts the exchanges that the model no longer saw.
 * An answer may also have `thought`, `model`, the name of the model that gave it, and `beside`, the place of the other answer to its
 * question that stands to its left until the reader has continued from one of them.
 */
export function newChat() {
  const now = Date.now();
  return { id: randomId(), title: "", created: now, updated: now, messages: [], at: -1 };
}

/** Return a new id for a chat. */
export function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Add a message after its parent, show it, and return its index. */
export function add(chat, message) {
  chat.messages.push(message);
  chat.updated = Date.now();
  return (chat.at = chat.messages.length - 1);
}

/** Return the indices of the messages that directly follow the one at `place`; -1 is the beginning of the chat. */
export function children(chat, place) {
  return chat.messages.flatMap(({ parent }, child) => (parent === place ? [child] : []));
}

/** Return the end of the newest branch after a message, or of the whole chat for -1. */
export function newestEnd(chat, place) {
  const last = new Map(chat.messages.map(({ parent }, child) => [parent, child]));
  while (last.has(place)) place = last.get(place);
  return place;
}

/** Return the indices of two answers next to each other, the left one first, if `place` is one of them, else null. */
export function besideAt(chat, place) {
  const left = chat.messages[place].beside;
  if (left !== undefined) return [left, place];
  const right = chat.messages.findIndex(({ beside }) => beside === place);
  return right < 0 ? null : [place, right];
}

/** Return the indices of the messages up to one, the oldest first. */
export function pathTo(chat, place) {
  const path = [];
  for (; place >= 0; place = chat.messages[place].parent) path.push(place);
  return path.reverse();
}

/** Return the text of a message without its calculator calls. */
export function textOf({ role, text, parts }) {
  return role === "user" ? text : parts.map((part) => part.text ?? "").join("");
}

/** Return the title of a chat: the reader's own, or the beginning of the first question. */
export function titleOf(chat) {
  return chat.title || (chat.messages[0]?.text ?? "").trim().replace(/\s+/g, " ").slice(0, 80).replace(/[\ud800-\udbff]$/, "");
}
