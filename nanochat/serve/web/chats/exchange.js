// An exchange, which is a question and its answer: asks a model for the answer, and puts both into the chat.

import { loadDescription, model } from "../about.js";
import { answer, ChatError } from "../client.js";
import { hasWords } from "../language/i18n.js";
import { ModelTurn } from "../reply/turn.js";
import { current, requestSettings, systemMessage, templateSettings } from "../settings/values.js";
import { add } from "./tree.js";

const MOST_MESSAGES = 1000;
const MOST_BYTES = 240_000; // the rest of a request is for its settings
const GONE = "model_not_found";
const HOPELESS = ["context_length_exceeded", "body_too_large", GONE]; // the same request would fail again

/**
 * An exchange without an answer. `asked` and `turn` are the two turns on the page, `user` and `answer` the places of
 * their messages in the chat, `parent` is the place before the question, `forgotten` counts the exchanges that the model
 * does not see, `old` is the exchange that another answer replaces, and `by` describes the model that answers: null
 * stands for the model of the chat.
 */
export function newExchange({ asked, user = null, parent, old = null, forgotten, by = null }) {
  return { asked, turn: new ModelTurn(current().logprobs), user, answer: null, parent, old, forgotten, by };
}

/** Return the exchange of an answer in a chat, by the answer's index. `asked` is the turn of its question. */
export function readExchange(chat, asked, place) {
  const message = chat.messages[place];
  const user = message.parent;
  const { parent } = chat.messages[user];
  return { asked, turn: ModelTurn.of(message), user, answer: place, parent, forgotten: message.forgotten, by: null };
}

/**
 * Ask for the answer of an exchange, or for more of it, and show what arrives. Returns the note to show below the
 * answer, or null. `request` has `earlier`, the exchanges before, `lively` and `before` as requestSettings takes them,
 * and `more`, further fields. `page` has described(), forgot(exchange), follow() and giveBack(text).
 */
export async function ask(exchange, request, signal, page) {
  const { earlier, lively = false, before = 0, more = {} } = request;
  try {
    if (model === null) await loadDescription(page.described);
    exchange.by ??= model;
    if (exchange.by === null) throw new ChatError("unreachable");
    const messages = messagesOf(exchange, earlier, page);
    // An answer that is continued keeps what it was asked with.
    if (exchange.answer === null) exchange.turn.asked = { messages, model: exchange.by.id, ...templateSettings(exchange.by) };
    const settings = { ...requestSettings(exchange.by, lively, before), ...more };
    return await stream(exchange, answer(messages, settings, signal), page);
  } catch (failure) {
    if (signal.aborted) return "stopped";
    if (failure.code === GONE && (await successor(exchange, page))) return ask(exchange, request, signal, page);
    fail(failure, exchange, page);
    return null;
  }
}

/** Give the exchange the model of a server that was restarted with other models. Returns false if there is no other. */
async function successor(exchange, page) {
  await loadDescription(page.described);
  const named = exchange.turn.by !== ""; // the answer is shown under the name of its model
  if (named || model === null || model.id === exchange.by.id) return false;
  exchange.by = model;
  return true;
}

/** Return the messages of a request, without the oldest: the server accepts at most 1,000 messages and 256 kB. */
function messagesOf(exchange, earlier, page) {
  const { asked, forgotten, answer: answered, by } = exchange;
  const turns = earlier.slice(forgotten).map((entry) => [
    { role: "user", content: entry.asked.text },
    { role: "assistant", parts: entry.turn.parts, reasoning_content: entry.turn.thought || undefined },
  ]);
  const system = systemMessage(by);
  const question = answered === null ? [{ role: "user", content: asked.text }] : [];
  let count = system.length + question.length;
  let size = bytesOf([system, question]);
  let first = turns.length;
  for (; first > 0; first--) {
    count += 2;
    size += bytesOf(turns[first - 1]);
    const needed = answered !== null && first === turns.length; // the answer to continue
    if (!needed && (count > MOST_MESSAGES || size > MOST_BYTES)) break;
  }
  if (first > 0) {
    exchange.forgotten += first;
    page.forgot(exchange);
  }
  return [...system, ...turns.slice(first).flat(), ...question];
}

function bytesOf(value) {
  return new TextEncoder().encode(JSON.stringify(value)).length;
}

async function stream(exchange, pieces, page) {
  const { turn } = exchange;
  const start = performance.now();
  const [tokens, seconds] = turn.numbers ?? [0, 0]; // of an answer that is continued
  let finish = null;
  for await (const piece of pieces) {
    if (piece.forgotten) {
      exchange.forgotten += piece.forgotten / 2; // later requests leave these messages out as well
      page.forgot(exchange);
      if (turn.asked) turn.asked.messages = without(turn.asked.messages, piece.forgotten);
    }
    if (piece.thought) turn.addThought(piece.thought);
    if (piece.text) turn.addText(piece.text);
    if (piece.tool) turn.addTool(piece.tool);
    if (piece.tokens) turn.count(tokens + piece.tokens, seconds + (performance.now() - start) / 1000);
    if (piece.scores) turn.addScores(piece.scores);
    if (piece.used) turn.used = piece.used;
    if (piece.finish) finish = piece.finish;
    page.follow();
  }
  if (finish === "length") return "length";
  return turn.answered ? null : "noAnswer";
}

function fail(failure, { turn, asked, answer: answered, by }, page) {
  if (!(failure instanceof ChatError)) console.error(failure);
  const { code = "broken", detail = "", values = {} } = failure;
  const full = code === "context_length_exceeded" && answered !== null; // by an answer that was to be continued
  const key = full ? "contextFull" : hasWords(code) ? code : "failed";
  turn.fail(key, { ...values, detail, context: by?.context_length });
  turn.hopeless = HOPELESS.includes(code) && answered === null;
  if (turn.hopeless) page.giveBack(asked.text); // to be made shorter, or to be asked of another model
  if (code === "unreachable") loadDescription(page.described);
}

/** Return messages without the first `count`, which does not include the system message. */
function without(messages, count) {
  const first = messages[0].role === "system" ? 1 : 0;
  return [...messages.slice(0, first), ...messages.slice(first + count)];
}

/** Add the answer, and the question if it is missing, to the chat, and note their indices in the exchange. */
export function record(chat, exchange) {
  const { asked, turn, parent, forgotten, by } = exchange;
  exchange.user ??= add(chat, { parent, role: "user", text: asked.text });
  const { parts, numbers, used, error, open } = turn;
  const note = error || open ? "stopped" : turn.note;
  const message = { parent: exchange.user, role: "assistant", parts, note, numbers, used, forgotten };
  message.context = by?.context_length ?? 0;
  if (turn.by) message.model = turn.by;
  if (turn.thought) message.thought = turn.thought;
  if (exchange.answer === null) exchange.answer = add(chat, message);
  else {
    chat.messages[exchange.answer] = message;
    chat.updated = Date.now(); // or another tab would take the chat for unchanged
  }
}

/** Return the turn of the message at an index of the chat, or undefined if no exchange has it. */
export function turnAt(exchanges, place) {
  const exchange = exchanges.find(({ user, answer: answered }) => user === place || answered === place);
  return exchange?.user === place ? exchange.asked : exchange?.turn;
}

/** Return the text of the last question of a conversation if it has no answer and was not given back, else "". */
export function unansweredOf({ last, shown, running, pair }) {
  if (last?.turn.hopeless) return ""; // it has been given back, and may have been made shorter since
  const saying = pair ? pair.said.length > 0 : last?.turn.saidSomething || last?.old;
  const answered = running ? saying : shown.some(({ asked }) => asked === last?.asked);
  return last && !answered ? last.asked.text : "";
}
