// The panel of the history: the chats by day, with search, rename, delete and undo, and the history as a file.

import { currentLanguage, say, words } from "../language/i18n.js";
import { iconButton, make } from "../reply/dom.js";
import { exportChats, importChats } from "./files.js";
import { allChats, keepChats, oneChat, removeChat, retitle, watch } from "./store.js";
import { textOf, titleOf } from "./tree.js";

const find = (id) => document.getElementById(id);
const wide = matchMedia("(min-width: 64rem)"); // then the panel is next to the chat, else it covers the chat
const OPEN = "nanochat.history";
const SHOWN = 200; // chats in the list; a search finds the others

/** `page` has open(chat), current() for the open chat, renamed(chat) and deleted(chat). */
export class HistoryPanel {
  constructor(page) {
    this.page = page;
    this.panel = find("history");
    this.list = find("history-list");
    this.search = find("history-search");
    this.renaming = false; // whether the list holds a box for a new title
    this.search.addEventListener("input", () => this.draw());
    find("history-toggle").addEventListener("click", () => (this.panel.open ? this.close() : this.show()));
    find("history-close").addEventListener("click", () => this.close());
    find("history-export").addEventListener("click", exportChats);
    find("history-import").addEventListener("click", () => find("history-file").click());
    find("history-file").addEventListener("change", () => this.#import());
    this.panel.addEventListener("close", () => this.#closed());
    this.panel.addEventListener("click", ({ target }) => {
      if (target === this.panel && !wide.matches) this.close(); // outside the panel, on its backdrop
    });
    wide.addEventListener("change", () => this.panel.close());
    watch(() => this.draw());
    if (wide.matches && remembered()) this.show(false);
  }

  show(focus = true) {
    this.tell(null);
    if (wide.matches) this.panel.show();
    else this.panel.showModal();
    document.body.classList.toggle("docked", wide.matches);
    find("history-toggle").setAttribute("aria-expanded", "true");
    if (wide.matches) remember("open");
    if (focus && !matchMedia("(pointer: coarse)").matches) this.search.focus();
    this.draw();
  }

  close() {
    if (wide.matches) remember("");
    this.panel.close();
    find("history-toggle").focus();
  }

  #closed() {
    document.body.classList.remove("docked");
    find("history-toggle").setAttribute("aria-expanded", "false");
  }

  /** Show a message below the list, such as what was imported. `undo` adds a button that undoes a deletion. */
  tell(key, values = {}, undo = null) {
    const [place, line] = [find("history-told"), make("span")];
    place.replaceChildren();
    if (!key) return;
    say(line, key, values);
    place.append(line);
    if (undo) place.append(textButton("undo", undo));
  }

  /** Draw the chats that contain every word of the search. */
  async draw() {
    if (!this.panel.open) return;
    const wanted = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chats = (await allChats()).filter((chat) => matches(chat, wanted));
    if (this.renaming) return; // the box would go, and half a title would be kept; the end of renaming draws the list
    const nodes = [];
    let [day, items] = ["", null];
    for (const chat of chats.slice(0, SHOWN)) {
      const own = dayOf(chat.updated);
      if (own !== day) nodes.push(make("h3", "", own), (items = make("ul")));
      items.append(this.#item(chat));
      day = own;
    }
    if (!nodes.length) nodes.push(line(wanted.length ? "historyNothing" : "historyEmpty"));
    if (chats.length > SHOWN) nodes.push(line("historyMore", { count: chats.length - SHOWN }));
    const held = this.list.contains(document.activeElement) && document.activeElement.closest(".chat");
    const place = held ? [...held.children].indexOf(document.activeElement) : 0;
    this.list.replaceChildren(...nodes);
    if (held) this.#focus(held.dataset.id, place);
  }

  #item(chat) {
    const title = titleOf(chat);
    const open = make("button", "open", title);
    open.type = "button";
    open.title = title;
    open.addEventListener("click", () => this.#open(chat.id));
    if (chat.id === this.page.current().id) open.setAttribute("aria-current", "true");
    const item = make("li", "chat", open);
    item.dataset.id = chat.id;
    const rename = iconButton("rename", "edit", () => this.#rename(chat, item), { title });
    item.append(rename, iconButton("delete", "bin", () => this.#delete(chat), { title }));
    return item;
  }

  /** Open a chat as it is stored now: another tab may have changed it since the list was drawn. */
  async #open(id) {
    if (!wide.matches) this.close();
    const chat = await oneChat(id);
    if (chat) this.page.open(chat);
    else await this.draw();
  }

  #rename(chat, item) {
    const box = make("input", "rename");
    box.value = titleOf(chat);
    box.maxLength = 200;
    say(box, "newTitle", {}, "label");
    let ended = false;
    const end = async (save) => {
      if (ended) return;
      ended = true;
      this.renaming = false;
      if (save && box.value.trim() !== titleOf(chat)) {
        chat.title = box.value.trim();
        if (!(await retitle(chat.id, chat.title))) this.tell("notKept");
        this.page.renamed(chat);
      }
      await this.draw();
    };
    box.addEventListener("keydown", (key) => {
      if (key.isComposing || key.keyCode === 229 || !["Enter", "Escape"].includes(key.key)) return;
      key.preventDefault();
      key.stopPropagation();
      end(key.key === "Enter").then(() => this.#focus(chat.id));
    });
    box.addEventListener("blur", () => end(true));
    item.replaceChildren(box);
    this.renaming = true;
    box.select();
  }

  /** Focus a chat of the list: its title, or the button at another place of it. */
  #focus(id, place = 0) {
    (this.list.querySelector(`[data-id="${id}"]`)?.children[place] ?? this.search).focus();
  }

  async #delete(listed) {
    const reopen = this.page.deleted(listed); // at once: a reload keeps what is open
    const chat = (await removeChat(listed.id)) ?? listed;
    await this.draw();
    this.tell("deleted", { title: titleOf(chat) }, () => this.#undo(chat, reopen));
    find("history-told").querySelector("button").focus();
  }

  async #undo(chat, reopen) {
    const title = titleOf(chat);
    if (!(await keepChats([chat]))) {
      this.tell("notRestored", { title }, () => this.#undo(chat, reopen));
      return find("history-told").querySelector("button").focus();
    }
    this.tell("restored", { title });
    if (reopen) this.page.open(chat);
    await this.draw();
    this.#focus(chat.id);
  }

  async #import() {
    const [file] = find("history-file").files;
    if (!file) return;
    const { key, values } = await importChats(file);
    find("history-file").value = ""; // so that the same file may be chosen again
    this.tell(key, values);
    await this.draw();
  }
}

function remembered() {
  try {
    return localStorage.getItem(OPEN) === "open";
  } catch {
    return false; // the browser may forbid storage
  }
}

function remember(state) {
  try {
    localStorage.setItem(OPEN, state);
  } catch {
    // then the panel is closed again after a reload
  }
}

function matches(chat, wanted) {
  if (!wanted.length) return true;
  const all = [titleOf(chat), ...chat.messages.map(textOf)].join("\n").toLowerCase();
  return wanted.every((word) => all.includes(word));
}

/** Return the day of a time in words: today, yesterday, or its date. */
function dayOf(time) {
  const day = new Date(time).toDateString();
  const now = new Date();
  if (day === now.toDateString()) return words("today");
  now.setDate(now.getDate() - 1); // a day may have 23 or 25 hours
  if (day === now.toDateString()) return words("yesterday");
  const style = { year: "numeric", month: "long", day: "numeric" };
  return new Date(time).toLocaleDateString(currentLanguage() === "zh" ? "zh-CN" : "en", style);
}

function line(key, values = {}) {
  const text = make("p", "soft");
  say(text, key, values);
  return text;
}

function textButton(key, press) {
  const button = make("button", "quiet small");
  button.type = "button";
  say(button, key);
  button.addEventListener("click", press);
  return button;
}
