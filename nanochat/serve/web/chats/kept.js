// Keeps what belongs to this tab alone, the open chat and the key of its server, so that both survive a reload.

import { readChat } from "./check.js";

const KEY = "nanochat.chat";
const API_KEY = "nanochat.key";
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
