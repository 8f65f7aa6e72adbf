// Asks the server what is new, as often as is useful: often while a training runs, at once while there is more to
// read, and never while nobody looks at the page.

import { ChatError, request } from "../client.js";

const OFTEN = 1500; // milliseconds
const SELDOM = 8000;

export class Feed {
  /** `shown` gives the query for the runs that are shown, `took` takes the answer, `failed` the reason of a failure. */
  constructor({ shown, took, failed }) {
    Object.assign(this, { shown, took, failed });
    [this.timer, this.asked, this.tag, this.busy, this.again] = [null, null, null, false, false];
    document.addEventListener("visibilitychange", () => this.look());
  }

  /** Ask now, or as soon as the answer that is under way has arrived. */
  async look() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    if (this.busy) {
      this.again = true;
      return;
    }
    [this.busy, this.again] = [true, false];
    let wait = SELDOM;
    try {
      wait = await this.ask();
    } catch (failure) {
      [this.asked, this.tag] = [null, null];
      if (failure instanceof ChatError) this.failed(failure);
      else reportError(failure);
      if (failure.values?.status === 401) return; // the reader has no key: do not ask for it again and again
    } finally {
      this.busy = false;
    }
    this.timer = setTimeout(() => this.look(), this.again ? 0 : wait);
  }

  async ask() {
    const path = `runs/data?shown=${encodeURIComponent(this.shown())}`;
    const headers = path === this.asked && this.tag ? { "If-None-Match": this.tag } : {};
    const response = await request(path, { headers, cache: "no-store" });
    if (response.status === 304) {
      this.took(null);
    } else {
      this.last = await response.json().catch(() => {
        throw new ChatError("unreachable"); // in the middle of its answer
      });
      [this.asked, this.tag] = [path, response.headers.get("ETag")];
      this.took(this.last);
    }
    if (Object.values(this.last.shown).some((news) => news.behind)) return 0;
    const busy = [...this.last.runs, ...Object.values(this.last.started ?? {})].some(({ state }) => state === "running" || state === "stopping");
    return busy ? OFTEN : SELDOM;
  }
}
