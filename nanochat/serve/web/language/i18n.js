// The language of the page: writes its texts, and switches between the languages.

import { phrased } from "./phrases.js";
import { WORDS } from "./words.js";

const KEY = "nanochat.language";
const said = new WeakMap(); // element -> values in its texts, so that a switch can write the texts again
let language = remembered() ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");

function remembered() {
  try {
    const kept = localStorage.getItem(KEY);
    return Object.hasOwn(WORDS, kept ?? "") ? kept : null;
  } catch {
    return null; // the browser may forbid storage
  }
}

export function currentLanguage() {
  return language;
}

export function hasWords(key) {
  return Object.hasOwn(WORDS.en, key);
}

/**
 * The text of a key. {name} in the text takes a value: a text, a number, {en, zh} for a text in both languages, or
 * {about} for a large number that is said as "4.9 million".
 */
export function words(key, values = {}) {
  return WORDS[language][key].replace(/\{(\w+)\}/g, (_, name) => {
    const value = values[name];
    if (typeof value === "number") return value.toLocaleString(language);
    return value?.about ? roughly(value.about) : (value?.[language] ?? String(value ?? ""));
  });
}

function roughly(number) {
  const style = { notation: "compact", compactDisplay: "long", maximumSignificantDigits: 2 };
  return new Intl.NumberFormat(language, style).format(number);
}

/** Set the text of an element, or its label, title or placeholder. A language switch translates it. */
export function say(element, key, values = {}, place = "text") {
  element.setAttribute(place === "text" ? "data-i18n" : `data-i18n-${place}`, key);
  said.set(element, { ...said.get(element), [place]: values });
  put(element, key, place);
}

function put(element, key, place) {
  const text = words(key, said.get(element)?.[place]);
  if (place === "text") element.replaceChildren(...phrased(text));
  else element.setAttribute(place === "label" ? "aria-label" : place, text);
}

/** Write every text of the page in the current language. */
export function translatePage() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
  for (const place of ["text", "label", "title", "placeholder"]) {
    const attribute = place === "text" ? "data-i18n" : `data-i18n-${place}`;
    for (const element of document.querySelectorAll(`[${attribute}]`)) put(element, element.getAttribute(attribute), place);
  }
}

export function switchLanguage() {
  language = language === "zh" ? "en" : "zh";
  try {
    localStorage.setItem(KEY, language);
  } catch {
    // without storage, the choice lasts until the page is closed
  }
  translatePage();
}
