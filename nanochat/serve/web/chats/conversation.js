// The open chat: shows the branch that the reader is on, and asks one question at a time.

import { model, rival } from "../about.js";
import { focusArrow, forgottenLine, UserTurn } from "../reply/turn.js";
import { current } from "../settings/values.js";
import { ask, newExchange, readExchange, record, turnAt, unansweredOf } from "./exchange.js";
import { Pair } from "./pair.js";
import { besideAt, children, newChat, newestEnd, pathTo } from "./tree.js";

/**
 * `shown` holds the answered exchanges on the page, as exchange.js describes them. `last` is the last exchange, answered
 * or not, which may be answered again. `pair` holds the last two answers if two models have answered, and `last` is one
 * of them.
 */
export class Conversation {
  /**
   * `page` has changed(), called when the chat or the state has changed, described(), follow(again), focus(),
   * giveBack(text) and taken(name), called with the model whose answer the reader continues from.
   */
  constructor(log, page) {
    this.log = log;
    this.page = page;
    this.asking = {
      ...page,
      forgot: (exchange) => {
        if (exchange === this.last) this.#showForgotten(exchange.forgotten, exchange.by.context_length);
      },
      ended: () => this.page.changed(),
    };
    this.#empty(newChat());
  }

  #empty(chat) {
    Object.assign(this, { chat, shown: [], last: null, running: null, pair: null });
  }

  get isEmpty() {
    return this.log.childElementCount === 0;
  }

  /** Show a chat at the branch where it was left. An answer in progress is kept, or its question is returned to the input. */
  open(chat) {
    this.page.giveBack(this.unanswered);
    if (this.running) {
      const left = this.snapshot();
      this.running.abort();
      this.page.changed(left);
    }
    this.#empty(chat);
    this.#draw();
    this.page.changed();
  }

  /** Stop the answer in progress, and discard it together with its question. */
  discard() {
    this.running?.abort();
    this.running = this.last = this.pair = null;
  }

  #draw() {
    const { chat } = this;
    chat.at = newestEnd(chat, chat.at);
    this.shown = [];
    this.log.replaceChildren();
    this.log.removeAttribute("aria-busy");
    this.pair = null;
    const beside = chat.at < 0 ? null : besideAt(chat, chat.at);
    if (beside) [chat.at] = beside;
    const path = pathTo(chat, chat.at);
    for (let place = 0; place + 1 < path.length; place += 2) {
      const [user, answered] = path.slice(place, place + 2);
      const asked = this.#question(chat.messages[user].text);
      const entry = readExchange(chat, asked, answered);
      const paired = beside && answered === chat.at;
      if (paired) this.pair = new Pair([entry, readExchange(chat, asked, beside[1])], [...this.shown]);
      this.log.append(asked.element, paired ? this.pair.element : entry.turn.element);
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
      const own = all.indexOf(place);
      where.branches(own, all.length, (next) => this.#goTo(all[next], next < own));
    };
    put(asked, user, this.chat.messages[user].parent);
    if (!this.pair?.exchanges.some((one) => one.turn === turn)) put(turn, answered, user);
  }

  /** Show the branch of a message, and leave the focus on the arrow that led there. */
  #goTo(place, back) {
    if (this.running) return;
    this.chat.at = newestEnd(this.chat, place);
    this.#draw();
    this.page.changed();
    const turn = turnAt(this.shown, place);
    if (!turn || !focusArrow(turn.element, back)) this.page.focus(); // two answers next to each other have no arrows
  }

  #offer() {
    const { last, pair } = this;
    if (pair) return pair.offer((exchange) => this.#take(exchange), (exchange) => this.#both([pair.renew(exchange)]));
    if (!last || last.turn.hopeless) return;
    last.turn.offer(() => this.again());
    const whole = last.turn.parts.at(-1)?.type === "text"; // not in the middle of a calculation
    if (whole && ["length", "stopped"].includes(last.turn.note)) last.turn.offerMore(() => this.carryOn());
  }

  #showForgotten(exchanges, context) {
    this.log.querySelector(".forgotten")?.remove();
    if (exchanges) this.shown[exchanges - 1]?.turn.element.after(forgottenLine(context));
  }

  /** Return how many exchanges the model no longer saw before the next question, and mark that point. */
  #forgottenSoFar() {
    const { forgotten = 0, answer: answered } = this.shown.at(-1) ?? {};
    this.#showForgotten(forgotten, this.chat.messages[answered]?.context);
    return forgotten;
  }

  // --- asking ------------------------------------------------------------------------------------

  /** Ask a question at the end of the chat. */
  send(question) {
    if (this.running || !question.trim()) return false;
    if (this.pair) this.#settle(this.pair.said[0]);
    const asked = this.#question(question);
    this.log.append(asked.element);
    if (rival) this.#compare(asked);
    else this.#reply({ asked, user: null, parent: this.chat.at });
    return true;
  }

  /** Ask an edited question in place of one on the page. A question that was answered stays on its own branch. */
  #edit(asked, text) {
    if (this.running) return false;
    const stays = Node.DOCUMENT_POSITION_FOLLOWING; // everything before the question
    this.shown = this.shown.filter((entry) => entry.asked.element.compareDocumentPosition(asked.element) & stays);
    while (asked.element.nextSibling) asked.element.nextSibling.remove();
    asked.element.remove();
    this.chat.at = this.shown.at(-1)?.answer ?? -1;
    this.last = this.pair = null;
    this.send(text);
    this.page.focus();
    return true;
  }

  /** Answer the last question again: with the same settings after a failure, else by sampling another answer. */
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
    last.turn.resume(current().logprobs);
    last.by = null; // the model of the chat may be another one by now
    this.#run(last, { more: { continue_final_message: true } });
    this.page.focus();
  }

  #reply({ asked, user, parent, old = null, lively = false }) {
    const forgotten = this.#forgottenSoFar();
    const exchange = newExchange({ asked, user, parent, old, forgotten });
    this.last?.turn.withdraw();
    asked.element.classList.remove("unanswered");
    this.log.append(exchange.turn.element);
    this.#run(exchange, { lively, before: old ? children(this.chat, user).length : 0 });
  }

  /** Ask for the answer of an exchange, or for more of it. */
  async #run(last, request) {
    const stop = new AbortController();
    this.#begin(stop, last);
    const note = await ask(last, { earlier: this.shown, ...request }, stop.signal, this.asking);
    if (stop === this.running) this.#finish(note); // else the reader has opened another chat meanwhile
  }

  /** Begin an answer, which `running` can abort. */
  #begin(running, last) {
    Object.assign(this, { running, last });
    this.log.setAttribute("aria-busy", "true"); // screen readers wait for the whole answer
    this.page.changed();
    this.page.follow(true);
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
      this.#showForgotten(old.forgotten, this.chat.messages[old.answer].context);
    } else last.asked.element.classList.add("unanswered");
    this.#end();
  }

  #end() {
    this.#offer();
    this.log.removeAttribute("aria-busy");
    this.page.changed();
    this.page.follow();
  }

  // --- two models --------------------------------------------------------------------------------

  /** Ask the model of the chat and its rival the same question. */
  #compare(asked) {
    const forgotten = this.#forgottenSoFar();
    const both = [model, rival].map((by) => newExchange({ asked, parent: this.chat.at, forgotten, by }));
    this.last?.turn.withdraw();
    this.pair = new Pair(both, [...this.shown]);
    this.log.append(this.pair.element);
    this.#both(both);
  }

  /** Ask for the answers of the pair, or for one of them again. */
  async #both(exchanges) {
    const { pair } = this;
    if (this.running) return;
    pair.withdraw();
    pair.exchanges[0].asked.element.classList.remove("unanswered");
    this.#begin(pair, pair.exchanges[0]);
    const running = pair.run(exchanges, this.asking);
    this.page.follow(true); // the Stop buttons of the answers have moved the end of the page
    await running;
    if (pair !== this.running) return; // the reader has opened another chat meanwhile
    this.running = null;
    pair.record(this.chat);
    const [first] = pair.said;
    this.shown = first ? [...pair.earlier, first] : pair.earlier;
    this.last = first ?? pair.exchanges[0];
    if (first) this.#arrows(first);
    else this.last.asked.element.classList.add("unanswered");
    this.#end();
  }

  /** Continue from one of two answers. */
  #take(exchange) {
    if (this.running) return;
    this.#settle(exchange);
    this.page.taken(exchange.turn.by);
    this.#offer();
    this.page.changed();
    this.page.focus();
  }

  /** Show one of two answers alone; the other one becomes a branch. Two that failed stay as they are. */
  #settle(kept) {
    const { pair } = this;
    this.pair = null;
    if (!kept) return pair.withdraw();
    pair.settle(this.chat, kept);
    this.shown[this.shown.length - 1] = this.last = kept;
    this.#arrows(kept);
    this.#showForgotten(kept.forgotten, this.chat.messages[kept.answer].context);
  }

  // --- keeping -----------------------------------------------------------------------------------

  /** Return the chat as it is now, with what has arrived of an answer in progress. */
  snapshot() {
    const { chat, last, running, pair } = this;
    const copy = { ...chat, messages: [...chat.messages] };
    if (running && pair) pair.copy().record(copy);
    else if (running && last.turn.saidSomething) record(copy, { ...last });
    else return chat;
    return copy;
  }

  /** Return the text of a question without an answer, which would be lost with the page. */
  get unanswered() {
    return unansweredOf(this);
  }
}
