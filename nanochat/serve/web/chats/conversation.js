// The open chat: shows the branch that the reader is on, and asks for at most one answer at a time.

import { loadDescription, model } from "../about.js";
import { answer, ChatError } from "../client.js";
import { hasWords } from "../language/i18n.js";
import { forgottenLine, ModelTurn, UserTurn } from "../reply/turn.js";
import { current, requestSettings, systemMessage } from "../settings/values.js";
import { add, children, newChat, newestEnd, pathTo } from "./tree.js";

const TOO_LONG = ["context_length_exceeded", "body_too_large"]; // trying again as it is would fail again

/**
 * `shown` are the answered exchanges on the page, {asked, turn, user, answer, forgotten}: the two turns, the places of
 * their messages in the chat, and how many exchanges the model did not see. `last` is the last exchange, answered or
 * not, and may be answered again; its `old` is then the exchange that another answer replaces.
 */
export class Conversation {
  /** `page` has changed(), called when the chat or the state has changed, follow(again), focus() and giveBack(text). */
  constructor(log, page) {
    this.log = log;
    this.page = page;
    this.#empty(newChat());
  }

  #empty(chat) {
    Object.assign(this, { chat, shown: [], last: null, running: null });
  }

  get isEmpty() {
    return this.log.childElementCount === 0;
  }

  /** Show a chat, at the branch where it was left. An answer in progress ends; what has arrived of it is kept. */
  open(chat) {
    if (this.running) {
      const left = this.snapshot();
      this.running.abort();
      this.page.changed(left);
    }
    this.#empty(chat);
    this.#draw();
    this.page.changed();
  }

  /** Stop the answer in progress, and keep nothing of it. */
  discard() {
    this.running?.abort();
    this.running = null;
  }

  #draw() {
    const { chat } = this;
    chat.at = newestEnd(chat, chat.at);
    this.shown = [];
    this.log.replaceChildren();
    this.log.removeAttribute("aria-busy");
    const path = pathTo(chat, chat.at);
    for (let place = 0; place + 1 < path.length; place += 2) {
      const [user, answered] = path.slice(place, place + 2);
      const message = chat.messages[answered];
      const asked = this.#question(chat.messages[user].text);
      const entry = { asked, turn: ModelTurn.of(message), user, answer: answered, forgotten: message.forgotten };
      this.log.append(asked.element, entry.turn.element);
      this.shown.push(entry);
      this.#arrows(entry);
    }
    this.last = this.shown.at(-1) ?? null;
    this.#showForgotten(this.last?.forgotten, this.last && chat.messages[this.last.answer].context);
    this.#offer();
    this.page.follow(true);
  }

  #question(text) {
    const asked = new UserTurn(text);
    asked.offerEdit((edited) => this.#edit(asked, edited));
    return asked;
  }

  #arrows({ asked, turn, user, answer: answered }) {
    const put = (where, place, parent) => {
      const all = children(this.chat, parent);
      where.branches(all.indexOf(place), all.length, (next) => this.#goTo(all[next]));
    };
    put(asked, user, this.chat.messages[user].parent);
    put(turn, answered, user);
  }

  #goTo(place) {
    if (this.running) return;
    this.chat.at = newestEnd(this.chat, place);
    this.#draw();
    this.page.changed();
  }

  #offer() {
    const { last } = this;
    if (!last || last.turn.hopeless) return;
    last.turn.offer(() => this.again());
    const whole = last.turn.parts.at(-1)?.type === "text"; // not in the middle of a calculation
    if (whole && ["length", "stopped"].includes(last.turn.note)) last.turn.offerMore(() => this.carryOn());
  }

  #showForgotten(exchanges, context) {
    this.log.querySelector(".forgotten")?.remove();
    if (exchanges) this.shown[exchanges - 1]?.turn.element.after(forgottenLine(context));
  }

  // --- asking ------------------------------------------------------------------------------------

  /** Ask a question at the end of the chat. */
  send(question) {
    if (this.running || !question.trim()) return false;
    const asked = this.#question(question);
    this.log.append(asked.element);
    this.#reply({ asked, user: null, parent: this.chat.at });
    return true;
  }

  /** Ask an edited question in place of a shown one; the earlier one stays on a branch of its own. */
  #edit(asked, text) {
    if (this.running) return;
    const place = this.shown.findIndex((entry) => entry.asked === asked);
    const from = place < 0 ? this.last : this.shown[place];
    const parent = place < 0 ? from.parent : this.chat.messages[from.user].parent;
    while (asked.element.nextSibling) asked.element.nextSibling.remove();
    asked.element.remove();
    this.shown = place < 0 ? this.shown : this.shown.slice(0, place);
    this.chat.at = parent;
    this.last = null;
    this.send(text);
    this.page.focus();
  }

  /** Answer the last question again: an answer that failed with the same settings, a finished one by drawing words. */
  again() {
    const { last } = this;
    if (this.running || !last) return;
    const old = this.shown.at(-1)?.asked === last.asked ? this.shown.pop() : null;
    if (old) old.turn.element.hidden = true; // until there is another answer
    if (old !== last) last.turn.element.remove();
    const parent = old ? this.chat.messages[old.user].parent : last.parent;
    this.#reply({ asked: last.asked, user: old?.user ?? null, parent, old, lively: Boolean(old && !last.turn.error) });
    this.page.focus();
  }

  /** Stop the answer in progress. */
  stop() {
    this.running?.abort();
  }

  /** Continue the last answer, which was cut short. */
  carryOn() {
    const { last } = this;
    if (this.running || !last) return;
    last.turn.resume();
    this.#run(last, { continue_final_message: true });
    this.page.focus();
  }

  #reply({ asked, user, parent, old = null, lively = false }) {
    const turn = new ModelTurn(current().logprobs);
    const forgotten = this.shown.at(-1)?.forgotten ?? 0;
    this.last?.turn.withdraw();
    asked.element.classList.remove("unanswered");
    this.log.append(turn.element);
    const before = old ? children(this.chat, user).length : 0;
    this.#run({ asked, turn, user, parent, old, answer: null, forgotten }, {}, lively, before);
  }

  /** Ask for the answer of an exchange, or for more of it. `before` counts the answers that the question has. */
  async #run(last, more, lively = false, before = 0) {
    const stop = (this.running = new AbortController());
    this.last = last;
    this.log.setAttribute("aria-busy", "true"); // screen readers wait for the whole answer
    this.page.changed();
    this.page.follow(true);
    let note = null;
    try {
      if (model === null) await loadDescription(this.page.described);
      if (model === null) throw new ChatError("unreachable");
      const settings = requestSettings(lively, before);
      const messages = this.#messages(last);
      if (last.answer === null) last.turn.asked = { messages, model: model.id }; // else the answer is continued
      note = await this.#stream(last, answer(messages, { ...settings, ...more }, stop.signal));
    } catch (failure) {
      if (stop.signal.aborted) note = "stopped";
      else this.#fail(failure, last);
    }
    if (stop === this.running) this.#finish(note); // else the reader has opened another chat meanwhile
  }

  #messages({ asked, forgotten, answer: answered }) {
    const turns = this.shown.slice(forgotten).flatMap((entry) => [
      { role: "user", content: entry.asked.text },
      { role: "assistant", parts: entry.turn.parts },
    ]);
    const question = answered === null ? [{ role: "user", content: asked.text }] : [];
    return [...systemMessage(), ...turns, ...question];
  }

  /** Show the pieces of an answer as they arrive; return the note to show below the answer, or null. */
  async #stream(last, pieces) {
    const { turn } = last;
    const start = performance.now();
    const [tokens, seconds] = turn.numbers ?? [0, 0]; // of an answer that is continued
    let finish = null;
    for await (const piece of pieces) {
      if (piece.forgotten) {
        last.forgotten += piece.forgotten / 2; // later requests leave these messages out as well
        this.#showForgotten(last.forgotten, model.context_length);
        if (turn.asked) turn.asked.messages = without(turn.asked.messages, piece.forgotten);
      }
      if (piece.text) turn.addText(piece.text);
      if (piece.tool) turn.addTool(piece.tool);
      if (piece.tokens) turn.count(tokens + piece.tokens, seconds + (performance.now() - start) / 1000);
      if (piece.scores) turn.addScores(piece.scores);
      if (piece.used) turn.used = piece.used;
      if (piece.finish) finish = piece.finish;
      this.page.follow();
    }
    if (finish === "length") return "length";
    return turn.saidSomething ? null : "noAnswer";
  }

  #fail(failure, { turn, asked, answer: answered }) {
    if (!(failure instanceof ChatError)) console.error(failure);
    const { code = "broken", detail = "", values = {} } = failure;
    const key = hasWords(code) ? code : "failed";
    turn.fail(key, { ...values, detail, context: model?.context_length });
    turn.hopeless = TOO_LONG.includes(code);
    if (turn.hopeless && answered === null) this.page.giveBack(asked.text); // to be made shorter
    if (code === "unreachable") loadDescription(this.page.described);
  }

  #finish(note) {
    const { last } = this;
    const { old } = last;
    last.turn.end(note);
    this.running = null;
    if (last.turn.saidSomething) {
      old?.turn.element.remove();
      if (last.answer === null) this.shown.push(last);
      record(this.chat, last);
      this.#arrows(last);
    } else if (old) {
      old.turn.element.hidden = false;
      this.shown.push(old);
    } else last.asked.element.classList.add("unanswered");
    this.#offer();
    this.log.removeAttribute("aria-busy");
    this.page.changed();
    this.page.follow();
  }

  /** The chat as it stands, with what has arrived of an answer in progress. */
  snapshot() {
    const { chat, last, running } = this;
    if (!running || !last.turn.saidSomething) return chat;
    const copy = { ...chat, messages: [...chat.messages] };
    record(copy, { ...last }, "stopped");
    return copy;
  }

  /** A question that has no answer, as text: it would be lost with the page. */
  get unanswered() {
    const { last, shown, running } = this;
    const answered = running ? last.turn.saidSomething || last.old : shown.some(({ asked }) => asked === last?.asked);
    return last && !answered ? last.asked.text : "";
  }
}

/** Messages without the first `count` of them, the system message left out of the count. */
function without(messages, count) {
  const first = messages[0].role === "system" ? 1 : 0;
  return [...messages.slice(0, first), ...messages.slice(first + count)];
}

/** Put the question, unless it is there, and its answer into the chat, and their places into the exchange. */
function record(chat, exchange, cut = null) {
  const { asked, turn, parent, forgotten } = exchange;
  exchange.user ??= add(chat, { parent, role: "user", text: asked.text });
  const { parts, numbers, used, error } = turn;
  const note = cut ?? (error ? "stopped" : turn.note);
  const message = { parent: exchange.user, role: "assistant", parts, note, numbers, used, forgotten };
  message.context = model?.context_length ?? 0;
  if (exchange.answer === null) exchange.answer = add(chat, message);
  else chat.messages[exchange.answer] = message;
}
