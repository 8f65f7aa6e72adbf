// The history as one JSON file: written to the reader's downloads, and read back after every chat has been checked.

import { readChat } from "./check.js";
import { allChats, keepChats } from "./store.js";

const FORMAT = "nanochat-chats";
const LARGEST = 50 * 2 ** 20; // bytes

/** Hand all chats to the browser as a download. */
export async function exportChats() {
  const file = { format: FORMAT, version: 1, chats: await allChats() };
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(file, null, 1)], { type: "application/json" }));
  link.download = `nanochat-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/**
 * Add the chats of a file that exportChats has written. Of two chats with one id, the one that was used last stays.
 * Returns {key, values}, a line for the reader; unless that is `imported`, nothing has changed.
 */
export async function importChats(file) {
  if (file.size > LARGEST) return { key: "importHuge", values: { most: LARGEST / 2 ** 20 } };
  let value;
  try {
    value = JSON.parse(await file.text());
  } catch {
    return { key: "importNoJson", values: {} };
  }
  if (value?.format !== FORMAT || !Array.isArray(value.chats)) return { key: "importOther", values: {} };
  if (value.version !== 1) return { key: "importNewer", values: {} };
  const chats = [];
  for (const [place, given] of value.chats.entries()) {
    try {
      chats.push(readChat(given));
    } catch {
      return { key: "importBroken", values: { place: place + 1, count: value.chats.length } };
    }
  }
  if (new Set(chats.map(({ id }) => id)).size < chats.length) return { key: "importTwice", values: {} };
  const here = new Map((await allChats()).map((chat) => [chat.id, chat]));
  const news = chats.filter(({ id, updated }) => !(here.get(id)?.updated >= updated));
  if (!(await keepChats(news))) return { key: "importNoRoom", values: {} };
  return { key: "imported", values: { count: news.length, same: chats.length - news.length } };
}
