// The page: an input box, the conversation, and at most one answer at a time.

import { answer, ChatError, loadedModel } from "./client.js";
import { currentLanguage, EXAMPLES, hasWords, say, switchLanguage, translatePage } from "./i18n.js";
import { forgottenLine, ModelTurn, userTurn } from "./view.js";

const find = (id) => document.getElementById(id);
const [scroller, log, welcome, examples] = ["scroller", "log", "welcome", "examples"].map(find);
const [prompt, sendButton, toEnd] = ["prompt", "send", "to-end"].map(find);

let model = null; // the description from /v1/models
let chat = newChat();

/** `exchanges` are the finished pairs {question, parts, turn}. The model sees the pairs from index `seen` on. */
function newChat() {
  return { exchanges: [], seen: 0, running: null };
}

// --- the model ----------------------------------------------------------------------------------

async function showModel() {
  const chip = find("model");
  try {
    model = await loadedModel();
    const { tag, stage, step, context_length: context } = model;
    const name = document.createElement("span");
    if (hasWords(stage)) say(name, stage);
    chip.replaceChildren(`${tag} · `, name);
    document.title = `nanochat · ${tag}`;
    say(chip, "about", { tag, stage: { key: stage }, step, context }, "title");
  } catch {
    model = null;
    const text = document.createElement("span");
    say(text, "offline");
    chip.replaceChildren(text);
  }
  chip.classList.toggle("offline", model === null);
  chip.hidden = false;
}

/** The longest answer in tokens: the server's default, but at most half of the context, to leave room for questions. */
function answerTokens() {
  return Math.max(1, Math.min(model.defaults.max_tokens, Math.floor(model.context_length / 2)));
}

// --- sending and stopping ------------------------------------------------------------------------

function messagesOf(here, question) {
  const turns = here.exchanges.slice(here.seen).flatMap(({ question: asked, parts }) => [
    { role: "user", content: asked },
    { role: "assistant", parts },
  ]);
  return [...turns, { role: "user", content: question }];
}

/** Leave the oldest messages out of later requests as well, because they no longer fit, and say so in a line. */
function forget(here, messages) {
  here.seen += messages / 2;
  log.querySelector(".forgotten")?.remove();
  here.exchanges[here.seen - 1].turn.element.after(forgottenLine(model.context_length));
}

async function send(question) {
  if (chat.running || !question.trim()) return;
  const here = chat;
  const stop = (here.running = new AbortController());
  const turn = new ModelTurn();
  const asked = userTurn(question);
  welcome.hidden = true;
  log.append(asked, turn.element);
  log.setAttribute("aria-busy", "true"); // screen readers wait for the whole answer
  prompt.value = "";
  refreshComposer();
  follow(true);
  let note = null;
  try {
    if (model === null) await showModel();
    if (model === null) throw new ChatError("unreachable");
    note = await stream(here, turn, answer(messagesOf(here, question), answerTokens(), stop.signal));
  } catch (failure) {
    if (stop.signal.aborted) note = "stopped";
    else showFailure(failure, turn, question);
  }
  if (here !== chat) return; // the user has started a new chat meanwhile
  turn.end(note);
  if (turn.saidSomething) here.exchanges.push({ question, parts: turn.parts, turn });
  else asked.classList.add("unanswered");
  here.running = null;
  log.removeAttribute("aria-busy");
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
    if (piece.tokens) turn.showSpeed(piece.tokens, (performance.now() - start) / 1000);
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
  if (!turn.saidSomething && !prompt.value) prompt.value = question; // so that the user need not type it again
  if (code === "unreachable") showModel();
}

function startNewChat() {
  chat.running?.abort();
  chat = newChat();
  log.replaceChildren();
  log.removeAttribute("aria-busy");
  welcome.hidden = false;
  refreshComposer();
  focusPrompt();
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
  translatePage();
  say(find("language"), "otherLanguage");
  say(find("language"), "otherLanguageLabel", {}, "label");
  const own = currentLanguage();
  const other = own === "zh" ? "en" : "zh";
  examples.replaceChildren(...[own, other].flatMap((language) => EXAMPLES[language].map((text) => example(language, text))));
}

function example(language, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.lang = language === "zh" ? "zh-CN" : "en";
  button.textContent = text;
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

showLanguage();
refreshComposer();
focusPrompt();
showModel();
