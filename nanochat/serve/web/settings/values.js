// The reader's settings, kept on the device: what a request asks for beyond the server's own defaults.

import { knowsSystem, thinksByDefault } from "../about.js";

const KEY = "nanochat.settings";
const LIVELY = 0.6; // the least temperature of a second answer, or it would be the first one again
const ALTERNATIVES = 5; // most likely tokens to show with each token

/** The numbers: their names in the API, their bounds and the step of their input boxes. */
export const NUMBERS = [
  { name: "temperature", low: 0, high: 2, step: 0.05 },
  { name: "top_k", low: 0, high: 1_000_000, step: 1 },
  { name: "top_p", low: 0.01, high: 1, step: 0.01 },
  { name: "min_p", low: 0, high: 1, step: 0.01 },
  { name: "max_tokens", low: 1, high: 1_000_000, step: 1 },
  { name: "seed", low: 0, high: 2 ** 31 - 1, step: 1 },
];

let settings = kept();

function kept() {
  try {
    return readSettings(JSON.parse(localStorage.getItem(KEY)) ?? {});
  } catch {
    return {}; // the browser may forbid storage, or keep something else under this name
  }
}

/** The valid settings of a value: the numbers by name, `system`, a text, `think`, true or false, and `logprobs`, true. */
export function readSettings(value) {
  const read = {};
  for (const { name, low, high, step } of NUMBERS) {
    const number = value[name];
    if (typeof number === "number" && number >= low && number <= high && (step < 1 || Number.isInteger(number))) read[name] = number;
  }
  if (typeof value.system === "string" && value.system.trim()) read.system = value.system;
  if (typeof value.think === "boolean") read.think = value.think;
  if (value.logprobs === true) read.logprobs = true;
  return read;
}

/** Return the settings that differ from the server's defaults. */
export function current() {
  return settings;
}

/** Change settings; undefined goes back to the default. */
export function change(changes) {
  settings = readSettings({ ...settings, ...changes });
  try {
    localStorage.setItem(KEY, JSON.stringify(readSettings({ ...kept(), ...changes }))); // another tab may have kept more
  } catch {
    // without storage, they last until the page is left
  }
}

/** Go back to the server's defaults. */
export function reset() {
  change(Object.fromEntries(Object.keys({ ...kept(), ...settings }).map((name) => [name, undefined])));
}

/** Return the longest answer in tokens: the server's default, but at most half of the context, to leave room for questions. */
export function defaultTokens(model) {
  return Math.max(1, Math.min(model.defaults.max_tokens, Math.floor(model.context_length / 2)));
}

/** Return how many tokens an answer may have: at most three quarters of the context, or the chat before it would be left out. */
function longest({ context_length: context }) {
  return Math.max(1, context - Math.floor(context / 4));
}

/**
 * The fields of a request to a model. A `lively` answer draws its words although the first one may not have; a chosen seed moves
 * on by the number of answers `before`, as it would give the same answer again.
 */
export function requestSettings(model, lively, before) {
  const { system, think, logprobs, seed, max_tokens, temperature, top_k, ...numbers } = settings;
  return {
    ...numbers,
    model: model.id,
    top_k: top_k && Math.min(top_k, model.vocab_size),
    temperature: lively ? Math.max(temperature ?? model.defaults.temperature, LIVELY) : temperature,
    seed: seed === undefined ? undefined : seed + before,
    max_tokens: max_tokens ? Math.min(max_tokens, longest(model)) : defaultTokens(model),
    ...(logprobs && { logprobs: true, top_logprobs: ALTERNATIVES }),
    ...templateSettings(model),
  };
}

/** Return the fields of a request to a model that change how its chat template writes the prompt. */
export function templateSettings(model) {
  const { think } = settings;
  if (think === undefined || thinksByDefault(model) === null) return {};
  return { chat_template_kwargs: { enable_thinking: think } };
}

/** Return the system message of a chat with a model, as a list of at most one message. */
export function systemMessage(model) {
  return settings.system && knowsSystem(model) ? [{ role: "system", content: settings.system }] : [];
}
