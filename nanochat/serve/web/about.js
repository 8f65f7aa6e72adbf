// The model of the chat, and the one it is compared with: fetches the descriptions of what the server has, names the
// chosen model in the bar, and says on the welcome page what it knows.

import { keepModels, keptModels } from "./chats/kept.js";
import { servedModels } from "./client.js";
import { hasWords, say } from "./language/i18n.js";
import { make } from "./reply/dom.js";
import { CORPORA } from "./language/names.js";

const PUBLISHED = "published"; // the stage of a model that was not trained here
const SMOKE = "smoke"; // the tag of the smoke preset's model, which was trained for a few steps
const find = (id) => document.getElementById(id);

export let model = null; // the description from /v1/models, or null while the server cannot be reached
export let rival = null; // the description of the model that answers each question too, or null
let served = []; // the descriptions of all models of the server, the default one first

/** Load the descriptions and show the chosen one. `changed` is called whenever the model of the chat may be another. */
export async function loadDescription(changed) {
  try {
    served = await servedModels();
  } catch {
    served = [];
  }
  const [id, other] = keptModels();
  choose(id, other, changed);
}

/** Chat with a model by name, and compare it with another. An unknown name means the default model, or no comparison. */
function choose(id, other, changed) {
  model = served.find((one) => one.id === id) ?? served[0] ?? null;
  rival = served.find((one) => one.id === other && one !== model) ?? null;
  if (model) document.title = `nanochat · ${model.tag}`;
  showModel(changed);
  changed();
}

function chooseAndKeep(id, other, changed) {
  keepModels(id, other);
  choose(id, other, changed);
}

/** Chat with a model by name from now on. If it was the second of two that are compared, it becomes the first. */
export function talkWith(id, changed) {
  if (id === model?.id || !served.some((one) => one.id === id)) return;
  chooseAndKeep(id, id === rival?.id ? model.id : (rival?.id ?? ""), changed);
}

/** Let a second model, by name, also answer each question; null ends the comparison. */
export function compareWith(id, changed) {
  chooseAndKeep(model?.id ?? "", id ?? "", changed);
}

/** Return whether a model has learnt to follow a system message; models trained here from scratch have not. */
export function knowsSystem(description) {
  return description?.capabilities.system_message ?? false;
}

/** Return whether a model thinks before it answers unless it is told not to, or null if it has no switch for that. */
export function thinksByDefault(description) {
  return description?.defaults.enable_thinking ?? null;
}

/** Name the model in the bar, describe it in the panel behind the name, and say on the welcome page what it knows. */
function showModel(changed) {
  const { stage, knows } = model ?? {};
  const corpus = model?.corpus && (CORPORA[model.corpus] ?? model.corpus);
  const [name, short, panel] = ["model-name", "model-short", "model-about"].map(find);
  if (model === null) [name, short].forEach((place) => say(place, "offline"));
  else if ((corpus || stage === PUBLISHED) && hasWords(`${stage}badge`)) {
    say(name, `${stage}badge`, { corpus, tag: model.tag });
    if (corpus) say(short, "short", { corpus });
    else say(short, "tagged", { tag: model.tag });
  } else [name, short].forEach((place) => say(place, "smallModel"));
  panel.replaceChildren(...(model ? description(corpus) : []), ...(served.length > 1 ? choices(changed) : []));
  find("model").classList.toggle("offline", model === null);
  find("model").hidden = false;
  if (model?.tag === SMOKE) say(find("knows"), "smoke");
  else if (knows) say(find("knows"), "knowsThis", { knows });
  else if (model && hasWords(`${stage}knows`)) say(find("knows"), `${stage}knows`, { corpus, tag: model.tag });
  else if (model) say(find("knows"), corpus ? "knowsCorpus" : "knowsUnknown", { corpus });
  find("welcome").classList.remove("waiting");
}

/** Return the lines that describe the model, for the panel behind its name. */
function description(corpus) {
  const { stage, tag, step, context_length: context, parameters, others = [] } = model;
  const line = (key, values) => {
    const text = make("p");
    say(text, key, values);
    return text;
  };
  const lines = parameters ? [line("size", { parameters: { about: parameters }, context })] : [];
  if (corpus || stage === PUBLISHED) lines.push(line(stage));
  if (stage !== PUBLISHED) lines.push(line("place", { stage, tag, step }));
  lines.push(line("keeping"));
  if (others.length) lines.push(line("others"), make("ul", "", ...others.map((flags) => make("li", "", make("code", "", flags)))));
  return lines;
}

/** Draw a button for each model of the server, and for each one with which the chosen one can be compared. */
function choices(changed) {
  const others = served.filter(({ id }) => id !== model.id);
  const compare = (id) => compareWith(id === rival?.id ? null : id, changed);
  return [
    ...buttons("served", served, model.id, (id) => talkWith(id, changed)),
    ...buttons("compare", others, rival?.id, compare),
  ];
}

function buttons(key, models, pressed, press) {
  const title = make("p");
  title.id = `models-${key}`;
  say(title, key);
  const list = make("div", key, ...models.map(({ id }) => {
    const button = make("button", "quiet small", make("code", "", id));
    button.type = "button";
    button.setAttribute("aria-pressed", String(id === pressed));
    button.addEventListener("click", () => {
      press(id);
      find("model").open = false;
      find("model").querySelector("summary").focus();
    });
    return button;
  }));
  list.setAttribute("role", "group");
  list.setAttribute("aria-labelledby", title.id);
  return [title, list];
}
