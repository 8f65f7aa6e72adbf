// The page: the input box, scrolling, languages, and the parts of the page put together.

import { compareWith, loadDescription, model, rival, talkWith } from "./about.js";
import { Conversation } from "./chats/conversation.js";
import { keep, kept, keptModels } from "./chats/kept.js";
import { HistoryPanel } from "./chats/panel.js";
import { baseOf, hold, saveChat } from "./chats/store.js";
import { newChat } from "./chats/tree.js";
import { currentLanguage, say, switchLanguage, translatePage } from "./language/i18n.js";
import { phrased } from "./language/phrases.js";
import { showTokens } from "./reply/tokens.js";
import { SettingsDrawer } from "./settings/drawer.js";
import { EXAMPLES } from "./language/names.js";

const find = (id) => document.getElementById(id);
const [scroller, log, welcome, examples] = ["scroller", "log", "welcome", "examples"].map(find);
const [prompt, sendButton, toEnd] = ["prompt", "send", "to-end"].map(find);

const conversation = new Conversation(log, {
  changed,
  follow,
  focus: focusPrompt,
  described,
  giveBack,
  taken: (id) => talkWith(id, described),
});
const panel = new HistoryPanel({
  current: () => conversation.chat,
  open(chat) {
    const { id, updated } = conversation.chat;
    // Another tab may have added to the chat that this one shows.
    const behind = updated === baseOf(id) && chat.updated > updated && !conversation.running;
    if (chat.id !== id || behind) {
      hold(chat, chat.updated);
      conversation.open(chat);
    }
    focusPrompt();
  },
  renamed(chat) {
    if (chat.id !== conversation.chat.id) return;
    conversation.chat.title = chat.title;
    keepTab();
  },
  deleted({ id }) {
    if (id !== conversation.chat.id) return false;
    conversation.discard();
    conversation.open(newChat());
    return true;
  },
});

const drawer = new SettingsDrawer(showContext);
showTokens(scroller, find("token-tip"));

// --- keeping the chat ----------------------------------------------------------------------------

/** Store the chat in the history, or another one that was left, and show what has changed. */
async function changed(chat = conversation.snapshot()) {
  welcome.hidden = !conversation.isEmpty;
  refreshComposer();
  showContext();
  keepTab();
  if (chat.messages.length) await save(chat);
  panel.draw();
}

async function save(chat) {
  const { id, kept } = await saveChat(chat);
  find("not-kept").hidden = kept;
  if (id === chat.id || chat.id !== conversation.chat.id) return;
  conversation.chat.id = id;
  keepTab();
}

/** Keep the open chat over a reload. */
function keepTab(chat = conversation.snapshot()) {
  keep({ chat, base: baseOf(chat.id), draft: prompt.value, unanswered: conversation.unanswered });
}

addEventListener("pagehide", () => {
  const chat = conversation.snapshot(); // one for both, or after a reload the stored one would seem to come from another tab
  keepTab(chat);
  if (chat.messages.length) saveChat(chat);
});

/** Show how much of the context the chat takes, by the usage of its last answer. */
function showContext() {
  const { turn, forgotten, answer } = conversation.shown.at(-1) ?? {};
  const [place, bar, text] = ["context", "context-bar", "context-text"].map(find);
  place.hidden = !turn?.used;
  if (place.hidden) return;
  const context = model?.context_length || conversation.chat.messages[answer].context;
  [bar.max, bar.value] = [context, Math.min(turn.used, context)];
  place.classList.toggle("full", turn.used > 0.85 * context);
  say(text, forgotten ? "contextDropped" : "contextUsed", { used: turn.used, context });
}

function startNewChat() {
  conversation.open(newChat());
  focusPrompt();
}

async function send(text) {
  if (model === null && keptModels()[1]) await loadDescription(described); // the comparison continues as soon as it can
  if (conversation.send(text) && prompt.value === text) prompt.value = ""; // an example leaves a draft there
  refreshComposer();
}

// --- the input box -------------------------------------------------------------------------------

function refreshComposer() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 220)}px`;
  const answering = conversation.running !== null;
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

/** Put a question without an answer into the input box, above what stands there, unless it is there already. */
function giveBack(question) {
  if (!prompt.value.includes(question)) prompt.value = [question, prompt.value].filter(Boolean).join("\n\n");
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
  if (conversation.running) conversation.stop();
  else send(prompt.value);
  focusPrompt();
});
find("new-chat").addEventListener("click", startNewChat);

find("comparing-end").addEventListener("click", () => {
  compareWith(null, described);
  focusPrompt();
});

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
  drawer.draw();
  panel.draw();
}

/** Update the page after the model's description has been loaded, or could not be. */
function described() {
  find("runs-link").hidden = !model?.runs;
  showExamples();
  showContext();
  find("comparing").hidden = rival === null;
  if (rival) say(find("comparing-text"), "comparing", { first: model.id, second: rival.id });
  drawer.draw(); // other models have other defaults
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
const { chat = newChat(), base, draft = "", unanswered = "" } = kept() ?? {};
prompt.value = draft;
giveBack(unanswered);
hold(chat, base);
conversation.open(chat);
focusPrompt();
loadDescription(described);
