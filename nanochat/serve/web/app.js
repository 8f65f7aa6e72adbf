// The page: an input box, the conversation, and at most one answer at a time.

import { answer, ChatError, loadedModel } from "./client.js";
import { currentLanguage, hasWords, say, switchLanguage, translatePage } from "./i18n.js";
import { keep, kept } from "./kept.js";
import { phrased } from "./phrases.js";
import { description, forgottenLine, ModelTurn, userTurn } from "./view.js";
import { CORPORA, EXAMPLES } from "./words.js";

const find = (id) => document.getElementById(id);
const [scroller, log, welcome, examples] = ["scroller", "log", "welcome", "examples"].map(find);
const [prompt, sendButton, toEnd] = ["prompt", "send", "to-end"].map(find);
const LIVELY = 0.6; // the least temperature of a second answer, or it would be the first one again
const PUBLISHED = "published"; // the stage of a model that was not trained here
const SMOKE = "smoke"; // the tag of the smoke preset's model, which was trained for a few steps
const TOO_LONG = ["context_length_exceeded", "body_too_large"]; // trying again as it is would fail again

let model = null; // the description from /v1/models
let chat = newChat();

/**
 * `exchanges` are the answered questions {question, asked, turn}; the model sees those from index `seen` on. `last` is
 * the last question, answered or not, and may be answered again; `old` is then the answer that another one replaces.
 */
function newChat() {
  return { exchanges: [], seen: 0, context: 0, running: null, last: null };
}

// --- the model ----------------------------------------------------------------------------------

async function loadDescription() {
  try {
    model = await loadedModel();
    document.title = `nanochat · ${model.tag}`;
  } catch {
    model = null;
  }
  showModel();
}

/** Name the model in the bar, describe it in the panel behind the name, and say on the welcome page what it knows. */
function showModel() {
  const { stage, knows } = model ?? {};
  const corpus = model?.corpus && (CORPORA[model.corpus] ?? model.corpus);
  const [name, short, panel] = ["model-name", "model-short", "model-about"].map(find);
  if (model === null) [name, short].forEach((place) => say(place, "offline"));
  else if ((corpus || stage === PUBLISHED) && hasWords(`${stage}badge`)) {
    say(name, `${stage}badge`, { corpus, tag: model.tag });
    if (corpus) say(short, "short", { corpus });
    else say(short, "tagged", { tag: model.tag });
  } else [name, short].forEach((place) => say(place, "smallModel"));
  panel.replaceChildren(...(model ? description(model, corpus) : []));
  find("model").classList.toggle("offline", model === null);
  find("model").hidden = false;
  if (model?.tag === SMOKE) say(find("knows"), "smoke");
  else if (knows) say(find("knows"), "knowsThis", { knows });
  else if (model && hasWords(`${stage}knows`)) say(find("knows"), `${stage}knows`, { corpus, tag: model.tag });
  else if (model) say(find("knows"), corpus ? "knowsCorpus" : "knowsUnknown", { corpus });
  showExamples();
  welcome.classList.remove("waiting");
}

/** The longest answer in tokens: the server's default, but at most half of the context, to leave room for questions. */
function answerTokens() {
  return Math.max(1, Math.min(model.defaults.max_tokens, Math.floor(model.context_length / 2)));
}

// --- sending and stopping ------------------------------------------------------------------------

function messagesOf(here, question) {
  const turns = here.exchanges.slice(here.seen).flatMap(({ question: asked, turn }) => [
    { role: "user", content: asked },
    { role: "assistant", parts: turn.parts },
  ]);
  return [...turns, { role: "user", content: question }];
}

/** Leave the oldest messages out of later requests as well, because they no longer fit, and say so in a line. */
function forget(here, messages) {
  here.seen += messages / 2;
  here.context = model.context_length;
  showForgotten(here);
}

function showForgotten(here) {
  log.querySelector(".forgotten")?.remove();
  if (here.seen) here.exchanges[here.seen - 1].turn.element.after(forgottenLine(here.context));
}

function send(question) {
  if (chat.running || !question.trim()) return;
  const asked = userTurn(question);
  welcome.hidden = true;
  log.append(asked);
  prompt.value = "";
  reply(question, asked);
}

/** Answer the last question again: an answer that failed with the same settings, a finished one by drawing words. */
function sendAgain() {
  const { last } = chat;
  if (chat.running || !last) return;
  const old = chat.exchanges.at(-1)?.asked === last.asked ? chat.exchanges.pop() : null;
  if (old) old.turn.element.hidden = true; // until there is another answer
  if (old !== last) last.turn.element.remove();
  reply(last.question, last.asked, old, Boolean(old && !last.turn.error));
  focusPrompt();
}

async function reply(question, asked, old = null, lively = false) {
  const here = chat;
  const stop = (here.running = new AbortController());
  const turn = new ModelTurn();
  here.last?.turn.withdraw();
  here.last = { question, asked, turn, old };
  asked.classList.remove("unanswered");
  log.append(turn.element);
  log.setAttribute("aria-busy", "true"); // screen readers wait for the whole answer
  refreshComposer();
  follow(true);
  let note = null;
  try {
    if (model === null) await loadDescription();
    if (model === null) throw new ChatError("unreachable");
    const temperature = lively ? Math.max(model.defaults.temperature, LIVELY) : undefined;
    note = await stream(here, turn, answer(messagesOf(here, question), answerTokens(), stop.signal, temperature));
  } catch (failure) {
    if (stop.signal.aborted) note = "stopped";
    else showFailure(failure, turn, question);
  }
  if (here === chat) finish(here, note); // else the user has started a new chat meanwhile
}

function finish(here, note) {
  const { last } = here;
  const { old } = last;
  last.turn.end(note);
  if (last.turn.saidSomething) {
    old?.turn.element.remove();
    here.exchanges.push(last);
  } else if (old) {
    old.turn.element.hidden = false;
    here.exchanges.push(old);
  } else last.asked.classList.add("unanswered");
  if (!last.turn.hopeless) last.turn.offer(sendAgain);
  here.running = null;
  log.removeAttribute("aria-busy");
  keepChat();
  refreshComposer();
  follow();
}

/** Show the pieces of an answer as they arrive; return the note to show below the answer, or null. */
async function stream(here, turn, pieces) {
  const start = performance.now();
  let finish = null;
  for await (const piece of pieces) {
    if (piece.forgotten) forget(here, piece.forgotten);
    if (piece.text) turn.addText(piece.text);
    if (piece.tool) turn.addTool(piece.tool);
    if (piece.tokens) turn.count(piece.tokens, (performance.now() - start) / 1000);
    if (piece.finish) finish = piece.finish;
    follow();
  }
  if (finish === "length") return "length";
  return turn.saidSomething ? null : "noAnswer";
}

function showFailure(failure, turn, question) {
  if (!(failure instanceof ChatError)) console.error(failure);
  const { code = "broken", detail = "", values = {} } = failure;
  const key = hasWords(code) ? code : "failed";
  turn.fail(key, { ...values, detail, context: model?.context_length });
  turn.hopeless = TOO_LONG.includes(code);
  if (turn.hopeless && !prompt.value) prompt.value = question; // to be made shorter
  if (code === "unreachable") loadDescription();
}

function startNewChat() {
  chat.running?.abort();
  chat = newChat();
  keepChat();
  log.replaceChildren();
  log.removeAttribute("aria-busy");
  welcome.hidden = false;
  refreshComposer();
  focusPrompt();
}

// --- keeping the chat over a reload --------------------------------------------------------------

/** Of an answer that has not ended, what has arrived is kept; a question without an answer goes to the input box. */
function keepChat() {
  const { exchanges, seen, context, running, last } = chat;
  const unended = running && (last.turn.saidSomething ? last : last.old);
  const answered = unended ? [...exchanges, unended] : exchanges;
  const draft = prompt.value || (last && !answered.some(({ asked }) => asked === last.asked) ? last.question : "");
  keep({ exchanges: answered.map(recorded), seen, context, draft });
}

function recorded({ question, turn }) {
  const { parts, note, numbers, error } = turn;
  const cut = error || turn === chat.last.turn && chat.running;
  return { question, parts, note: cut ? "stopped" : note, numbers };
}

addEventListener("pagehide", keepChat);

function showKeptChat() {
  const { exchanges = [], seen = 0, context = 0, draft = "" } = kept() ?? {};
  for (const { question, parts, note, numbers } of exchanges) {
    const [asked, turn] = [userTurn(question), new ModelTurn()];
    for (const part of parts) part.type === "tool" ? turn.addTool(part) : turn.addText(part.text);
    if (numbers) turn.count(...numbers);
    turn.end(note);
    log.append(asked, turn.element);
    chat.last = { question, asked, turn, old: null };
    chat.exchanges.push(chat.last);
  }
  Object.assign(chat, { seen, context });
  showForgotten(chat);
  chat.last?.turn.offer(sendAgain);
  welcome.hidden = exchanges.length > 0;
  prompt.value = draft;
}

// --- the input box -------------------------------------------------------------------------------

function refreshComposer() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 220)}px`;
  const answering = chat.running !== null;
  sendButton.disabled = !answering && !prompt.value.trim();
  sendButton.classList.toggle("halt", answering);
  sendButton.querySelector("use").setAttribute("href", answering ? "#icon-halt" : "#icon-send");
  say(sendButton, answering ? "halt" : "send", {}, "label");
  say(sendButton, answering ? "halt" : "send", {}, "title");
}

/** Put the cursor into the input box, except on touch screens, where a keyboard would cover half of the page. */
function focusPrompt() {
  if (!matchMedia("(pointer: coarse)").matches) prompt.focus();
}

prompt.addEventListener("input", refreshComposer);
prompt.addEventListener("keydown", (key) => {
  // While an input method is composing, Enter accepts its suggestion. Safari ends the composition before this event
  // and marks the event only with key code 229.
  if (key.key !== "Enter" || key.shiftKey || key.isComposing || key.keyCode === 229) return;
  key.preventDefault();
  send(prompt.value);
});
sendButton.addEventListener("click", () => {
  if (chat.running) chat.running.abort();
  else send(prompt.value);
  focusPrompt();
});
find("new-chat").addEventListener("click", startNewChat);

// --- scrolling -----------------------------------------------------------------------------------

let following = true; // until the reader scrolls up

function follow(again = false) {
  following ||= again;
  if (following) scroller.scrollTop = scroller.scrollHeight;
}

scroller.addEventListener("scroll", () => {
  following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
  toEnd.hidden = following;
});
new ResizeObserver(() => follow()).observe(scroller);
toEnd.addEventListener("click", () => follow(true));

// --- languages and examples ----------------------------------------------------------------------

function showLanguage() {
  say(find("language"), "otherLanguage");
  say(find("language"), "otherLanguageLabel", {}, "label");
  showExamples();
}

/** Examples in both languages, the current one first; in the current one only if nobody can say what the model knows. */
function showExamples() {
  const own = currentLanguage();
  const languages = model?.knows ? [own, own === "zh" ? "en" : "zh"] : [own];
  examples.replaceChildren(...languages.flatMap((language) => EXAMPLES[language].map((text) => example(language, text))));
}

function example(language, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.lang = language === "zh" ? "zh-CN" : "en";
  button.append(...phrased(text));
  button.addEventListener("click", () => {
    send(text);
    focusPrompt();
  });
  return button;
}

find("language").addEventListener("click", () => {
  switchLanguage();
  showLanguage();
});

// The panel behind the model's name closes like a menu.
addEventListener("click", ({ target }) => {
  if (!find("model").contains(target)) find("model").open = false;
});
find("model").addEventListener("keydown", ({ key }) => {
  if (key !== "Escape") return;
  find("model").open = false;
  find("model").querySelector("summary").focus();
});

translatePage();
showLanguage();
showKeptChat();
refreshComposer();
focusPrompt();
follow(true);
loadDescription();
