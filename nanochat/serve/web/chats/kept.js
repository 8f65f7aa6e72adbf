// Keeps what belongs to this tab alone, the open chat, its model and the key of its server, so that they survive a reload.

import { readChat } from "./check.js";

const KEY = "nanochat.chat";
const API_KEY = "nanochat.key";
const MODEL = "nanochat.model";
let apiKey = ""; // of this page, where the browser forbids storage

/** Keep the open chat and what stands in the input box. */
export function keep(chat, draft) {
  try {
    sessionStorage.setItem(KEY, JSON.stringify({ chat, draft }));
  } catch {
    // the browser may forbid storage, or have no room left: then the chat lasts until the page is left
  }
}

/** The kept {chat, draft}, or null. */
export function kept() {
  try {
    const { chat, draft } = JSON.parse(sessionStorage.getItem(KEY));
    return { chat: readChat(chat), draft: typeof draft === "string" ? draft : "" };
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

/** The server's key, or an empty text. */
export function keptKey() {
  try {
    return apiKey || sessionStorage.getItem(API_KEY) || "";
  } catch {
    return apiKey;
  }
}

/** Keep the name of the model that the reader talks with. */
export function keepModel(id) {
  try {
    sessionStorage.setItem(MODEL, id);
  } catch {
    // the choice lasts until the page is left
  }
}

/** The name of the model that the reader talks with, or null. */
export function keptModel() {
  try {
    return sessionStorage.getItem(MODEL);
  } catch {
    return null;
  }
}
