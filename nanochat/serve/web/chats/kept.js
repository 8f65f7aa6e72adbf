// Keeps what belongs to this tab alone, the open chat, its models and the key of its server, so that they survive a reload.

import { readChat } from "./check.js";

const KEY = "nanochat.chat";
const API_KEY = "nanochat.key";
const MODEL = "nanochat.model";
const RIVAL = "nanochat.rival";
let apiKey = ""; // of this page, if the browser forbids storage

/** Keep the open chat, the `base` that store.js knows of it, what stands in the input box, and a question without an answer. */
export function keep(state) {
  try {
    sessionStorage.removeItem(KEY); // where there is no room, a reload must not go back to an earlier state
    sessionStorage.setItem(KEY, JSON.stringify(state));
  } catch {
    // the browser may forbid storage, or have no room left: then the chat lasts until the page is left
  }
}

/** Return the kept {chat, base, draft, unanswered}, or null. */
export function kept() {
  const text = (value) => (typeof value === "string" ? value : "");
  try {
    const { chat, base, draft, unanswered } = JSON.parse(sessionStorage.getItem(KEY));
    const time = typeof base === "number" ? base : undefined;
    return { chat: readChat(chat), base: time, draft: text(draft), unanswered: text(unanswered) };
  } catch {
    return null;
  }
}

/** Keep the server's key until the tab is closed. */
export function keepKey(key) {
  apiKey = key;
  try {
    sessionStorage.setItem(API_KEY, key);
  } catch {
    // it lasts until the page is left
  }
}

/** Return the server's key, or "". */
export function keptKey() {
  try {
    return apiKey || sessionStorage.getItem(API_KEY) || "";
  } catch {
    return apiKey;
  }
}

/** Keep the name of the model that the reader talks with, and of the one it is compared with; "" is none. */
export function keepModels(id, rival) {
  try {
    sessionStorage.setItem(MODEL, id);
    sessionStorage.setItem(RIVAL, rival);
  } catch {
    // the choice lasts until the page is left
  }
}

/** Return the names of these two models, with null for one that was not chosen. */
export function keptModels() {
  try {
    return [sessionStorage.getItem(MODEL), sessionStorage.getItem(RIVAL)];
  } catch {
    return [null, null];
  }
}
