// Keeps the chat of this tab, and the key of its server, in the browser, so that they survive a reload.

const KEY = "nanochat.chat";
const API_KEY = "nanochat.key";
let apiKey = ""; // of this page, where the browser forbids storage

/** Keep a chat: {exchanges: [{question, parts, note, numbers}], seen, context, draft}. */
export function keep(chat) {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(chat));
  } catch {
    // the browser may forbid storage, or have no room left: then the chat lasts until the page is left
  }
}

/** The kept chat, or null. */
export function kept() {
  try {
    const chat = JSON.parse(sessionStorage.getItem(KEY));
    return chat.exchanges.every(isExchange) && chat.seen >= 0 && chat.seen <= chat.exchanges.length ? chat : null;
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

function isExchange({ question, parts }) {
  return typeof question === "string" && parts.every(({ type, text }) => type === "tool" || typeof text === "string");
}
