// A chat as a tree: a question that was edited and an answer that was given again stand beside the earlier ones.

/**
 * A chat is {id, title, created, updated, messages, at}. `title` is empty until the reader gives one, times are in
 * milliseconds since 1970, and `at` is the last message of the branch that is shown (-1 in an empty chat). A message is
 * {parent, role: "user", text} or {parent, role: "assistant", parts, note, numbers, used, forgotten, context}; `parent`
 * is the place of the message before it, or -1. `forgotten` counts the exchanges that the model no longer saw.
 * An answer may also have `model`, the name of the model that gave it, and `beside`, the place of the other answer to its
 * question that stands to its left until the reader has continued from one of them.
 */
export function newChat() {
  const now = Date.now();
  return { id: randomId(), title: "", created: now, updated: now, messages: [], at: -1 };
}

/** An id for a chat. */
export function randomId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Put a message behind its parent, show it, and return its place. */
export function add(chat, message) {
  chat.messages.push(message);
  chat.updated = Date.now();
  return (chat.at = chat.messages.length - 1);
}

/** The places of the messages that follow a message directly; -1 stands for the beginning of the chat. */
export function children(chat, place) {
  return chat.messages.flatMap(({ parent }, child) => (parent === place ? [child] : []));
}

/** The end of the newest branch behind a message, or the newest of the whole chat for -1. */
export function newestEnd(chat, place) {
  const last = new Map(chat.messages.map(({ parent }, child) => [parent, child]));
  while (last.has(place)) place = last.get(place);
  return place;
}

/** The places of two answers that stand next to each other, the left one first, if one of them is at `place`; else null. */
export function besideAt(chat, place) {
  const left = chat.messages[place].beside;
  if (left !== undefined) return [left, place];
  const right = chat.messages.findIndex(({ beside }) => beside === place);
  return right < 0 ? null : [place, right];
}

/** The places of the messages up to one, the oldest first. */
export function pathTo(chat, place) {
  const path = [];
  for (; place >= 0; place = chat.messages[place].parent) path.push(place);
  return path.reverse();
}

/** The words of a message without its calculator calls. */
export function textOf({ role, text, parts }) {
  return role === "user" ? text : parts.map((part) => part.text ?? "").join("");
}

/** The title of a chat: the reader's own, or the beginning of the first question. */
export function titleOf(chat) {
  return chat.title || (chat.messages[0]?.text ?? "").trim().replace(/\s+/g, " ").slice(0, 80);
}
