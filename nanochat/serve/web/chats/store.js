// The history: every chat of this browser, in its IndexedDB. Without it, they last until the page is left.

import { readChat } from "./check.js";
import { randomId } from "./tree.js";

const memory = new Map(); // id -> chat, if the browser forbids storage or has no room
const bases = new Map(); // id -> when the chat was last updated as this tab last read or wrote it
const moved = new Map(); // id -> the new id of this tab's copy, if another tab has also changed the chat
const tabs = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("nanochat");
let opened = null; // the promise of the database, or of null

/** Call a function whenever another tab has changed the history. */
export function watch(changed) {
  tabs?.addEventListener("message", changed);
}

function database() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open("nanochat", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
      request.onsuccess = () => {
        request.result.onclose = () => (opened = null); // the browser closes it, for instance to free its disk
        resolve(request.result);
      };
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

/** Run one transaction: it happens as a whole or not at all. The promise fails if the browser refuses it. */
async function transaction(mode, work, retry = true) {
  const base = await database();
  if (base === null) return null;
  try {
    const result = await new Promise((resolve, reject) => {
      const running = base.transaction("chats", mode);
      running.onabort = () => reject(running.error);
      const request = work(running.objectStore("chats"));
      running.oncomplete = () => resolve(request?.result);
    });
    if (mode === "readwrite") tabs?.postMessage("changed");
    return result;
  } catch (failure) {
    if (failure?.name !== "InvalidStateError" || !retry) throw failure;
    opened = null; // the database has been closed
    return transaction(mode, work, false);
  }
}

function readable(value) {
  try {
    return [readChat(value)];
  } catch {
    return []; // a chat that another version of the page has written
  }
}

/** Return all chats, the most recently used one first. */
export async function allChats() {
  const stored = (await transaction("readonly", (chats) => chats.getAll()).catch(() => null)) ?? [];
  const found = [...memory.values(), ...stored.filter(({ id }) => !memory.has(id))];
  return found.flatMap(readable).sort((a, b) => b.updated - a.updated);
}

/** Return the chat with an id as it is stored now, or null: another tab may have changed or removed it. */
export async function oneChat(id) {
  const stored = memory.get(id) ?? (await transaction("readonly", (chats) => chats.get(id)).catch(() => null));
  return stored ? (readable(stored)[0] ?? null) : null;
}

/** Note when the stored chat that this tab copied was last updated, or undefined if it was never stored. */
export function hold({ id }, base) {
  if (memory.has(id)) return; // only this tab has it, and `bases` has its origin
  moved.delete(id);
  bases.set(id, base);
}

/** Return when a chat was last updated at this tab's last access to it, or undefined if there was none. */
export function baseOf(id) {
  return bases.get(id);
}

/** Return the id under which to store this tab's copy of a chat, or null if the stored chat must stay as it is. */
function idFor({ id, updated }, stored) {
  if (moved.has(id)) return moved.get(id);
  const base = bases.get(id);
  if (stored?.updated === base || stored?.updated === updated) return id;
  if (updated === base) return null; // only another tab has changed the chat, or removed it
  moved.set(id, randomId()); // both have changed it, and neither may destroy what the other one added
  return moved.get(id);
}

/**
 * Keep the chat of this tab, unless only another tab has changed it since. Returns {id, kept}: the id of this tab's copy,
 * which is a new one if both have changed the chat, and whether the browser has stored it. Otherwise the chat
 * lasts until the page is left.
 */
export async function saveChat(chat) {
  let copy = structuredClone(chat);
  let written = true;
  try {
    await transaction("readwrite", (store) => {
      const request = store.get(copy.id);
      request.onsuccess = () => {
        const id = idFor(copy, request.result);
        written = id !== null;
        if (!written) return;
        // A title is given in a list, maybe in that of another tab.
        copy = { ...copy, id, title: (memory.get(copy.id) ?? request.result ?? copy).title };
        store.put(copy);
      };
    });
    memory.delete(chat.id);
    const kept = (await database()) !== null;
    if (!kept) memory.set(copy.id, copy);
    if (written) bases.set(copy.id, copy.updated);
    return { id: copy.id, kept };
  } catch {
    memory.set(copy.id, copy);
    return { id: copy.id, kept: false };
  }
}

/** Store all of some chats or none, replacing those with the same ids. Returns false if there is no room for them. */
export async function keepChats(chats) {
  const copies = structuredClone(chats);
  try {
    await transaction("readwrite", (store) => copies.forEach((chat) => store.put(chat)));
  } catch {
    return false;
  }
  const base = await database();
  for (const chat of copies) {
    if (base === null) memory.set(chat.id, chat);
    else memory.delete(chat.id);
  }
  return true;
}

/** Change only the title of a stored chat. Returns false if the browser has no room. */
export async function retitle(id, title) {
  if (memory.has(id)) memory.set(id, { ...memory.get(id), title });
  try {
    await transaction("readwrite", (store) => {
      const request = store.get(id);
      request.onsuccess = () => request.result && store.put({ ...request.result, title });
    });
    return true;
  } catch {
    const stored = await oneChat(id);
    if (stored) memory.set(id, { ...stored, title });
    return false;
  }
}

/** Remove a chat, and return what was stored, or null. */
export async function removeChat(id) {
  const stored = await oneChat(id);
  memory.delete(id);
  await transaction("readwrite", (chats) => void chats.delete(id)).catch(() => null);
  return stored;
}
