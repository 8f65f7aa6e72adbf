// The history: every chat of this browser, in its IndexedDB. Without one, the chats last until the page is left.

import { readChat } from "./check.js";

const memory = new Map(); // id -> chat, where the browser forbids storage
let opened = null; // the promise of the database, or of null

function database() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open("nanochat", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

/** Run one transaction: it happens as a whole or not at all. The promise fails if the browser refuses it. */
async function transaction(mode, work) {
  const base = await database();
  if (base === null) return null;
  return new Promise((resolve, reject) => {
    const running = base.transaction("chats", mode);
    const request = work(running.objectStore("chats"));
    running.oncomplete = () => resolve(request?.result);
    running.onabort = running.onerror = () => reject(running.error);
  });
}

function readable(value) {
  try {
    return [readChat(value)];
  } catch {
    return []; // a chat that another version of the page has written
  }
}

/** Every chat, the one that was used last first. */
export async function allChats() {
  const found = (await transaction("readonly", (chats) => chats.getAll()).catch(() => null)) ?? [...memory.values()];
  return found.flatMap(readable).sort((a, b) => b.updated - a.updated);
}

/** Keep chats, all or none, in place of those with the same ids. False if the browser has no room for them. */
export async function keepChats(chats) {
  const copies = structuredClone(chats);
  try {
    await transaction("readwrite", (store) => copies.forEach((chat) => store.put(chat)));
  } catch {
    return false;
  }
  if ((await database()) === null) copies.forEach((chat) => memory.set(chat.id, chat));
  return true;
}

/** Remove a chat. */
export async function removeChat(id) {
  memory.delete(id);
  await transaction("readwrite", (chats) => void chats.delete(id)).catch(() => null);
}
