// Keeps the chat of this tab in the browser, so that it survives a reload. The server stores nothing.

const KEY = "nanochat.chat";

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

function isExchange({ question, parts }) {
  return typeof question === "string" && parts.every(({ type, text }) => type === "tool" || typeof text === "string");
}
