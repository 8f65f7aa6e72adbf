// Two answers to one question, by two models: next to each other, each with its own stop, until the reader takes one.

import { say } from "../language/i18n.js";
import { make, smallButton } from "../reply/dom.js";
import { ask, newExchange, record } from "./exchange.js";
import { children } from "./tree.js";

export class Pair {
  /** `exchanges` are the two that ask the same question, and `earlier` the ones before them. */
  constructor(exchanges, earlier) {
    this.exchanges = exchanges;
    this.earlier = earlier;
    this.stops = new Set(); // of the answers in progress
    this.element = make("div", "pair", ...exchanges.map(({ turn }) => turn.element));
    this.element.setAttribute("role", "group");
    say(this.element, "pairLabel", {}, "label");
    for (const { turn, by } of exchanges) if (by) turn.name(by.id);
  }

  /** Return the answers that are not empty, the left one first. */
  get said() {
    return this.exchanges.filter(({ turn }) => turn.saidSomething);
  }

  /** Ask for the answers of some of the exchanges. Returns when the last of them has ended. */
  async run(exchanges, page) {
    await Promise.all(exchanges.map((exchange) => this.#run(exchange, page)));
  }

  async #run(exchange, page) {
    const { turn, by } = exchange;
    const stop = new AbortController();
    const halt = smallButton("haltOne", "halt", () => {
      stop.abort();
      page.focus();
    });
    say(halt, "haltNamed", { model: by.id }, "label");
    turn.meta.append(halt);
    this.stops.add(stop);
    const note = await ask(exchange, { earlier: this.earlier }, stop.signal, page);
    this.stops.delete(stop);
    halt.remove();
    turn.end(note);
    if (this.stops.size) page.ended();
  }

  /** Stop the answers in progress. */
  abort() {
    for (const stop of this.stops) stop.abort();
  }

  /** Put a new exchange in the place of one that failed, and return it. */
  renew(exchange) {
    const { asked, parent, by, turn } = exchange;
    const { user } = this.said[0] ?? exchange;
    const fresh = newExchange({ asked, user, parent, by, forgotten: this.earlier.at(-1)?.forgotten ?? 0 });
    fresh.turn.name(by.id);
    turn.element.replaceWith(fresh.turn.element);
    this.exchanges[this.exchanges.indexOf(exchange)] = fresh;
    return fresh;
  }

  /** Offer to continue from each answer, and to retry each one that failed. */
  offer(take, retry) {
    this.withdraw();
    for (const exchange of this.exchanges) {
      const { turn } = exchange;
      if (turn.error && !turn.hopeless) turn.offer(() => retry(exchange));
      if (turn.saidSomething) turn.offerTake(() => take(exchange));
    }
  }

  withdraw() {
    for (const { turn } of this.exchanges) turn.withdraw();
  }

  /** Put the question and both answers into a chat, which then shows the left answer. */
  record(chat) {
    const { said } = this;
    if (!said.length) return;
    let user = said.find((exchange) => exchange.user !== null)?.user ?? null;
    for (const exchange of said) {
      exchange.user = user;
      record(chat, exchange);
      ({ user } = exchange);
    }
    unlink(chat, user);
    if (said.length === 2) chat.messages[said[1].answer].beside = said[0].answer;
    chat.at = said[0].answer;
  }

  /** Return a copy of the pair for a copy of the chat, so that recording one does not change the other. */
  copy() {
    return Object.create(this, { exchanges: { value: this.exchanges.map((exchange) => ({ ...exchange })) } });
  }

  /** Make the two answers branches of the chat, of which the reader sees one, and show that one alone. */
  settle(chat, kept) {
    this.withdraw();
    unlink(chat, kept.user);
    chat.at = kept.answer;
    this.element.replaceWith(kept.turn.element);
  }
}

/** No two answers to a question stand next to each other any more. */
function unlink(chat, user) {
  for (const place of children(chat, user)) {
    const { beside, ...message } = chat.messages[place];
    if (beside !== undefined) chat.messages[place] = message;
  }
}
