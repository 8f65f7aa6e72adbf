// What the model saw: the tokens of a prompt as text, with the special tokens that frame the messages set apart.

import { ChatError, promptOf } from "../client.js";
import { hasWords, say } from "../language/i18n.js";
import { icon, make } from "./dom.js";

/** Make a fold-out with the prompt of a request: its messages, model and chat_template_kwargs. Opening it fetches the prompt. */
export function sawDetails(asked) {
  const summary = make("summary", "quiet small", icon("eye"));
  for (const place of ["label", "title"]) say(summary, "saw", {}, place);
  const [told, prompt] = [make("p", "told"), make("pre", "prompt")];
  const details = make("details", "saw", summary, told, prompt);
  prompt.tabIndex = 0; // so that the arrow keys scroll it
  say(prompt, "saw", {}, "label");
  prompt.setAttribute("role", "region");
  prompt.hidden = true;
  details.addEventListener("toggle", async () => {
    if (!details.open || !prompt.hidden) return;
    say(told, "sawLoading");
    try {
      const { count, runs } = await promptOf(asked);
      prompt.replaceChildren(...runs.map(({ text, special }) => (special ? make("mark", "", text) : text)));
      prompt.hidden = false;
      say(told, "sawTokens", { count });
    } catch (failure) {
      if (!(failure instanceof ChatError)) throw failure;
      const { code, detail, values } = failure;
      if (hasWords(code)) say(told, code, values);
      else say(told, "failed", { ...values, detail });
    }
  });
  return details;
}
