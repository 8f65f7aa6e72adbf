// The turns of a conversation: a question, which can be edited, and the model's answer, which grows while it streams.

import { say } from "../language/i18n.js";
import { phrased } from "../language/phrases.js";
import { copyButton, icon, iconButton, make, smallButton } from "./dom.js";
import { redraw } from "./draw.js";
import { TOOL } from "./inline.js";
import { readMarkdown } from "./markdown.js";
import { sawDetails } from "./saw.js";
import { TokenView } from "./tokens.js";

function speaker(key) {
  const name = make("span", "hidden");
  say(name, key);
  return name;
}

/** Make a line that marks the point above which the model no longer sees the messages. */
export function forgottenLine(context) {
  const line = make("p", "forgotten");
  const text = make("span");
  say(text, "forgotten", { context });
  line.append(text);
  return line;
}

/** Make arrows between the branches at one point, "2 / 3"; `go` gets the index of a branch among them. */
function branchArrows(place, count, go) {
  const [before, after] = [iconButton("earlier", "left", () => go(place - 1)), iconButton("later", "right", () => go(place + 1))];
  before.disabled = place === 0;
  after.disabled = place === count - 1;
  return make("span", "branches", before, make("span", "", `${place + 1} / ${count}`), after);
}

/** Focus the arrow of a turn to the branch before or after, or its neighbour at the end. Returns false if it has no arrows. */
export function focusArrow(element, back) {
  const [before, after] = element.querySelectorAll(".branches button");
  const [wanted, other] = back ? [before, after] : [after, before];
  (wanted?.disabled ? other : wanted)?.focus();
  return Boolean(wanted);
}

/** Make the element of a calculator call, which shows the result, and an explanation when opened. */
function toolChip({ expression, result }) {
  const failed = result === null || result === "error"; // the engine's answer to an invalid expression
  const sum = make("code", "", failed ? `${expression} = ?` : `${expression} = ${result}`);
  const summary = make("summary", "", icon("tool"), sum);
  const text = make("p");
  say(text, failed ? "toolFailed" : "toolText", { expression, result });
  say(summary, "toolName", {}, "title");
  return make("details", "tool", summary, text);
}

/** The reader's turn. */
export class UserTurn {
  constructor(text) {
    this.text = text;
    this.bubble = make("div", "bubble", ...phrased(text));
    this.tools = make("div", "tools");
    this.element = make("article", "turn user", speaker("you"), this.bubble, this.tools);
  }

  /** Show arrows between the versions of the question, if there are several. */
  branches(place, count, go) {
    this.tools.querySelector(".branches")?.remove();
    if (count > 1) this.tools.append(branchArrows(place, count, go));
  }

  /** Offer to edit the question; `send` gets the new text, and returns false if it cannot be sent now. */
  offerEdit(send) {
    this.tools.prepend(iconButton("edit", "edit", () => this.#edit(send)));
  }

  #edit(send) {
    const box = make("textarea", "edit");
    const end = (text) => {
      const changed = text.trim() && text !== this.text;
      if (changed && !send(text)) return; // the text stays in the box
      editor.remove();
      this.bubble.hidden = this.tools.hidden = false;
      if (!changed) this.tools.querySelector("button").focus();
    };
    box.value = this.text;
    box.rows = Math.min(8, this.text.split("\n").length + 1);
    say(box, "editBox", {}, "label");
    const editor = make("div", "editor", box, smallButton("editSend", "send", () => end(box.value)),
      smallButton("cancel", "close", () => end("")));
    box.addEventListener("keydown", (key) => {
      if (key.isComposing || key.keyCode === 229) return;
      if (key.key === "Escape" || (key.key === "Enter" && !key.shiftKey)) {
        key.preventDefault();
        end(key.key === "Enter" ? box.value : "");
      }
    });
    this.bubble.hidden = this.tools.hidden = true;
    this.element.append(editor);
    box.focus();
  }
}

/** The model's turn, which grows while the answer streams. */
export class ModelTurn {
  /** If `scored`, the tokens are shown with their probabilities instead of as Markdown. */
  constructor(scored = false) {
    this.scores = scored ? new TokenView() : null;
    this.early = []; // scores that came before the answer, some of them of tokens of the thought
    this.parts = []; // in the form that the API accepts: {type: text, text} and {type: tool, expression, result}
    this.thought = ""; // what it thought before the answer
    this.note = null; // a key in words.js
    this.numbers = null; // [tokens, seconds since the question was sent]
    this.asked = null; // the request's messages, model and chat_template_kwargs, if it was asked since the page was opened
    this.by = ""; // the name of the model, where it is shown
    this.open = true; // until the answer has ended
    this.used = 0; // tokens of the context, of the chat and this answer together
    this.body = make("div", "body streaming");
    this.meta = make("div", "meta");
    this.speaker = speaker("model");
    this.element = make("article", "turn model", this.speaker, this.body, this.meta);
    this.tools = []; // the elements of the calculator calls
  }

  /** The turn of an answer that has ended, from its message in tree.js. */
  static of({ parts, thought, note, numbers, used, model }) {
    const turn = new ModelTurn();
    if (model) turn.name(model);
    turn.whole = true;
    if (thought) turn.addThought(thought);
    for (const part of parts) part.type === "tool" ? turn.addTool(part) : turn.addText(part.text);
    [turn.numbers, turn.used] = [numbers, used];
    turn.end(note);
    return turn;
  }

  /** Show which model answers, where there are two. */
  name(model) {
    this.by = model;
    say(this.speaker, "modelNamed", { model });
    const shown = make("p", "by", model);
    shown.setAttribute("aria-hidden", "true"); // the speaker's name says it
    this.speaker.after(shown);
  }

  get text() {
    return this.parts.filter((part) => part.type === "text").map((part) => part.text).join("");
  }

  get answered() {
    return this.parts.some((part) => part.type === "tool" || part.text.trim());
  }

  /** Whether there is anything to keep: an answer, or a thought that was stopped or cut off before its answer. */
  get saidSomething() {
    return this.answered || this.thought.trim() !== "";
  }

  /** Add to the thought, which stands folded above the answer. Its name says whether the model is still thinking. */
  addThought(text) {
    if (!this.thought) {
      this.thoughtName = make("span");
      this.thoughtText = document.createTextNode("");
      const summary = make("summary", "", icon("thought"), this.thoughtName);
      this.body.before(make("details", "thought", summary, make("div", "", this.thoughtText)));
    }
    this.thought += text;
    this.thoughtText.appendData(text);
    this.#nameThought();
  }

  #nameThought() {
    const key = this.open && !this.answered ? "thinking" : "thoughts";
    if (this.thought && this.thoughtName.dataset.i18n !== key) say(this.thoughtName, key);
  }

  addText(text) {
    this.#addEarly(text);
    const last = this.parts.at(-1);
    if (last?.type === "text") last.text += text;
    else this.parts.push({ type: "text", text });
    this.#draw(true);
  }

  addTool({ expression, result }) {
    this.#addEarly("");
    this.parts.push({ type: "tool", expression, result });
    this.tools.push(toolChip({ expression, result }));
    if (this.scores) this.body.append(this.tools.at(-1));
    this.#draw(true);
  }

  /** Show tokens with their probabilities, as the API describes them; nothing if the turn shows Markdown. */
  addScores(scores) {
    if (this.scores && this.parts.length) this.scores.add(scores, this.body);
    else if (this.scores) this.early.push(...scores);
  }

  /** Show the tokens that came before the answer; after a thought only the last ones, as many as `text` takes. */
  #addEarly(text) {
    let first = this.thought ? this.early.length : 0;
    for (let bytes = new TextEncoder().encode(text).length; first > 0 && bytes > 0; bytes -= this.early[first].bytes.length) first -= 1;
    this.scores?.add(this.early.slice(first), this.body);
    this.early = [];
  }

  /** Draw what has arrived. While the answer is `open`, what has begun counts as if it ended here. */
  #draw(open) {
    if (this.whole) return; // it will be drawn once
    this.#nameThought();
    if (this.scores) {
      this.body.classList.add("tokens");
      return; // the scores of a text come after the text
    }
    const texts = this.parts.map((part) => (part.type === "tool" ? TOOL : part.text.replaceAll(TOOL, "\ufffd")));
    redraw(this.body, readMarkdown(texts.join("").trim(), open), this.tools);
  }

  /** Keep how many tokens have arrived and how long that took; the details below the answer show both. */
  count(tokens, seconds) {
    this.numbers = [tokens, seconds];
  }

  #details() {
    const [tokens, seconds] = this.numbers;
    const [amount, speed, rate] = [make("span"), make("span"), tokens / Math.max(seconds, 1e-3)];
    say(amount, tokens === 1 ? "oneToken" : "tokens", { count: tokens });
    say(speed, "rate", { rate: rate < 10 ? Math.round(rate * 10) / 10 : Math.round(rate) });
    const summary = make("summary", "quiet small", icon("numbers"));
    say(summary, "numbers", {}, "label");
    say(summary, "numbers", {}, "title");
    return make("details", "numbers", summary, make("span", "", amount, " · ", speed));
  }

  /** Finish the turn. `note` is a key in words.js, or null. */
  end(note) {
    this.note = note;
    this.open = this.whole = false;
    this.#draw(false);
    this.body.classList.remove("streaming");
    if (note) {
      const text = make("span", "note");
      say(text, note);
      this.meta.append(text);
    }
    if (this.text.trim()) this.meta.append(copyButton(() => this.text.trim()));
    if (this.numbers) this.meta.append(this.#details());
    if (this.asked && this.saidSomething) this.meta.append(sawDetails(this.asked));
  }

  /** Show arrows between the answers to one question, if there are several. */
  branches(place, count, go) {
    this.meta.querySelector(".branches")?.remove();
    if (count > 1) this.meta.prepend(branchArrows(place, count, go));
  }

  /** Offer to answer the question again; `withdraw` removes the offers. */
  offer(press) {
    this.withdraw();
    this.again = smallButton(this.error ? "retry" : "anew", "again", press);
    if (!this.error) say(this.again, "anewTitle", {}, "title");
    if (this.error) this.error.append(this.again);
    else this.meta.insertBefore(this.again, this.meta.querySelector(".numbers"));
  }

  /** Offer to continue an answer that was cut short. */
  offerMore(press) {
    this.more = smallButton("carryOn", "down", press);
    this.meta.insertBefore(this.more, this.meta.querySelector(".numbers"));
  }

  /** Offer to continue the chat from this answer, one of two. */
  offerTake(press) {
    this.take = smallButton("take", "check", press);
    this.take.classList.add("take");
    say(this.take, "takeNamed", { model: this.by }, "label");
    this.meta.prepend(this.take);
  }

  withdraw() {
    for (const button of [this.again, this.more, this.take]) button?.remove();
  }

  /** Grow again, after the turn has ended. Without `scored`, tokens become Markdown: what comes has no probabilities. */
  resume(scored) {
    if (this.scores && !scored) {
      this.scores = null;
      this.body.classList.remove("tokens");
      this.body.replaceChildren();
      this.#draw(true);
    }
    this.note = null;
    this.open = true;
    this.error?.remove();
    this.error = undefined;
    this.meta.replaceChildren();
    this.body.classList.add("streaming");
  }

  fail(key, values) {
    const text = make("p");
    say(text, key, values);
    text.setAttribute("role", "alert");
    this.error = make("div", "error", text);
    this.meta.before(this.error);
    if (!this.answered) this.body.remove();
  }
}
