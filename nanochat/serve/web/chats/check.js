// Reads chats that come from outside, a file or the browser's store, and rejects everything that is not a chat.

const NOTES = ["stopped", "length", "noAnswer"];
const LONGEST_TITLE = 200;
const LONGEST_NAME = 1000; // of a model

function must(condition) {
  if (!condition) throw new TypeError("no chat");
}

function text(value, longest = Infinity) {
  must(typeof value === "string" && value.length <= longest);
  return value;
}

function number(value, most = Number.MAX_SAFE_INTEGER) {
  must(typeof value === "number" && value >= 0 && value <= most);
  return value;
}

function count(value, most) {
  must(Number.isInteger(value));
  return number(value, most);
}

function readPart(part) {
  if (part.type === "text") return { type: "text", text: text(part.text) };
  must(part.type === "tool");
  return { type: "tool", expression: text(part.expression), result: part.result === null ? null : text(part.result) };
}

/** Return the fields that only some answers have: the model's name, its thought, and the index of the answer to the left. */
function readExtras({ model, thought, beside }, parent, place, all) {
  const read = {};
  if (model !== undefined) read.model = text(model, LONGEST_NAME);
  if (thought !== undefined) read.thought = text(thought);
  if (beside !== undefined) {
    read.beside = count(beside, all.length - 1);
    must(beside !== place && all[beside].parent === parent && all[beside].beside === undefined);
  }
  return read;
}

function readMessage({ parent, role, ...rest }, place, all) {
  must(Number.isInteger(parent) && parent >= -1 && parent < place);
  const before = parent === -1 ? "assistant" : all[parent].role;
  must(role === (before === "user" ? "assistant" : "user"));
  if (role === "user") return { parent, role, text: text(rest.text) };
  must(Array.isArray(rest.parts) && (rest.note === null || NOTES.includes(rest.note)));
  must(rest.numbers === null || (Array.isArray(rest.numbers) && rest.numbers.length === 2));
  return {
    parent,
    role,
    parts: rest.parts.map(readPart),
    note: rest.note,
    numbers: rest.numbers?.map((value) => number(value)) ?? null,
    used: count(rest.used),
    forgotten: count(rest.forgotten, place),
    context: count(rest.context),
    ...readExtras(rest, parent, place, all),
  };
}

/** Return a chat as tree.js describes it, with no other fields. Throws TypeError if the value is not a chat. */
export function readChat(value) {
  const { id, title, created, updated, messages, at } = value;
  must(/^[0-9a-zA-Z-]{1,64}$/.test(text(id)) && Array.isArray(messages));
  must(Number.isInteger(at) && at >= -1 && at < messages.length);
  const read = messages.map(readMessage);
  must(at === -1 || read[at].role === "assistant");
  const times = [created, updated].map((time) => number(time, 8.64e15)); // the last moment that a Date can hold
  return { id, title: text(title, LONGEST_TITLE), created: times[0], updated: times[1], messages: read, at };
}
