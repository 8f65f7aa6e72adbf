// The tokens of an answer, each with its probability and the most likely others, on hover, focus or tap.

import { currentLanguage, words } from "../language/i18n.js";
import { make } from "./dom.js";

const LEVELS = [[0.2, "unlikely"], [0.5, "open"], [0.9, "likely"]]; // a probability below it underlines the token
const details = new WeakMap(); // element of a token -> the tokens behind it, as the API describes them

export class TokenView {
  constructor() {
    this.decoder = new TextDecoder();
    this.waiting = []; // tokens that end in the middle of a character, which the next token completes
  }

  /** Append the tokens to an element. Tokens that share a character are one element. */
  add(scores, body) {
    for (const score of scores) {
      this.waiting.push(score);
      const text = this.decoder.decode(new Uint8Array(score.bytes ?? []), { stream: true });
      if (!text) continue;
      const probability = Math.exp(this.waiting.reduce((sum, { logprob }) => sum + logprob, 0));
      const level = LEVELS.find(([most]) => probability < most)?.[1] ?? "";
      const token = make("span", `token ${level}`.trim(), text);
      token.tabIndex = body.querySelector(".token") ? -1 : 0; // arrow keys lead from one token to the next
      details.set(token, this.waiting);
      this.waiting = [];
      body.append(token);
    }
  }
}

/** Let the tokens inside an element show their details in `tip`. */
export function showTokens(area, tip) {
  let shown = null;
  const hide = () => {
    shown?.removeAttribute("aria-describedby");
    shown = null;
    tip.hidden = true;
  };
  const show = (token) => {
    hide();
    shown = token;
    token.setAttribute("aria-describedby", tip.id);
    tip.replaceChildren(...details.get(token).map(describe));
    tip.hidden = false;
    const box = token.getClientRects()[0];
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
    tip.style.top = `${box.top - height - 6 > 8 ? box.top - height - 6 : box.bottom + 6}px`;
  };
  for (const kind of ["pointerover", "focusin", "click"]) {
    area.addEventListener(kind, ({ target }) => {
      const token = target.closest(".token");
      if (token && details.has(token)) show(token);
      else if (kind !== "focusin") hide();
    });
  }
  area.addEventListener("focusout", hide);
  area.addEventListener("scroll", hide, { passive: true });
  area.addEventListener("pointerleave", hide);
  area.addEventListener("keydown", (key) => {
    const token = key.target.closest(".token");
    if (!token) return;
    if (key.key === "Escape") hide();
    const side = { ArrowLeft: "previousElementSibling", ArrowRight: "nextElementSibling" }[key.key];
    let next = side && token[side];
    while (next && !next.matches(".token")) next = next[side];
    if (!next) return;
    key.preventDefault();
    [token.tabIndex, next.tabIndex] = [-1, 0];
    next.focus();
  });
}

/** Describe a token: its probability, and the most likely tokens at its position. */
function describe({ token, logprob, top_logprobs: others }) {
  const rows = others.map((other) => row(other, other.token === token));
  if (!others.some((other) => other.token === token)) rows.unshift(row({ token, logprob }, true));
  return make("table", "", make("caption", "", words("tokenLikely")), make("tbody", "", ...rows));
}

function row({ token, logprob }, chosen) {
  const share = Math.exp(logprob).toLocaleString(currentLanguage(), { style: "percent", maximumFractionDigits: 1 });
  const spelled = make("code", "", token.replaceAll(" ", "␣").replaceAll("\n", "⏎"));
  return make("tr", chosen ? "chosen" : "", make("th", "", spelled), make("td", "", share));
}
