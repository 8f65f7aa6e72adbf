// The loaded model: fetches its description, names it in the bar, and says on the welcome page what it knows.

import { loadedModel } from "./client.js";
import { hasWords, say } from "./language/i18n.js";
import { make } from "./reply/dom.js";
import { CORPORA } from "./words.js";

const PUBLISHED = "published"; // the stage of a model that was not trained here
const SMOKE = "smoke"; // the tag of the smoke preset's model, which was trained for a few steps
const find = (id) => document.getElementById(id);

export let model = null; // the description from /v1/models, or null while the server cannot be reached

/** Load the description and show it. `changed` is called afterwards, whether the server answered or not. */
export async function loadDescription(changed) {
  try {
    model = await loadedModel();
    document.title = `nanochat · ${model.tag}`;
  } catch {
    model = null;
  }
  showModel();
  changed();
}

/** Whether the model has learnt to follow a system message: those that are trained here from scratch have not. */
export function knowsSystem() {
  return [PUBLISHED, "tune"].includes(model?.stage);
}

/** Name the model in the bar, describe it in the panel behind the name, and say on the welcome page what it knows. */
function showModel() {
  const { stage, knows } = model ?? {};
  const corpus = model?.corpus && (CORPORA[model.corpus] ?? model.corpus);
  const [name, short, panel] = ["model-name", "model-short", "model-about"].map(find);
  if (model === null) [name, short].forEach((place) => say(place, "offline"));
  else if ((corpus || stage === PUBLISHED) && hasWords(`${stage}badge`)) {
    say(name, `${stage}badge`, { corpus, tag: model.tag });
    if (corpus) say(short, "short", { corpus });
    else say(short, "tagged", { tag: model.tag });
  } else [name, short].forEach((place) => say(place, "smallModel"));
  panel.replaceChildren(...(model ? description(corpus) : []));
  find("model").classList.toggle("offline", model === null);
  find("model").hidden = false;
  if (model?.tag === SMOKE) say(find("knows"), "smoke");
  else if (knows) say(find("knows"), "knowsThis", { knows });
  else if (model && hasWords(`${stage}knows`)) say(find("knows"), `${stage}knows`, { corpus, tag: model.tag });
  else if (model) say(find("knows"), corpus ? "knowsCorpus" : "knowsUnknown", { corpus });
  find("welcome").classList.remove("waiting");
}

/** The lines that describe the model, for the panel behind its name. */
function description(corpus) {
  const { stage, tag, step, context_length: context, parameters, others = [] } = model;
  const line = (key, values) => {
    const text = make("p");
    say(text, key, values);
    return text;
  };
  const lines = parameters ? [line("size", { parameters: { about: parameters }, context })] : [];
  if (corpus || stage === PUBLISHED) lines.push(line(stage));
  lines.push(line("place", { stage, tag, step }), line("keeping"));
  if (others.length) lines.push(line("others"), make("ul", "", ...others.map((flags) => make("li", "", make("code", "", flags)))));
  return lines;
}
