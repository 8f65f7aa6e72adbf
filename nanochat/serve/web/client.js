// The client of the server's API: loads the model's description, and streams answers.

import { words } from "./language/i18n.js";
import { keepKey, keptKey } from "./chats/kept.js";
import { events } from "./sse.js";

/** A failed request. i18n.js has a text for most codes; `detail` is the server's own message. */
export class ChatError extends Error {
  constructor(code, detail = "", values = {}) {
    super(detail || code);
    this.code = code;
    this.detail = detail;
    this.values = values;
  }
}

async function refusal(response) {
  const values = { status: response.status, seconds: Number(response.headers.get("Retry-After")) || 5 };
  try {
    const { error } = await response.json();
    return new ChatError(error.code, error.message, { ...values, param: error.param });
  } catch {
    return new ChatError("http", "", values);
  }
}

// A server that made a key for this start prints an address that ends with it. It stays in this tab, and leaves the address.
function takeKey() {
  const told = /^#key=([\x21-\x7e]+)$/.exec(location.hash);
  if (!told) return false;
  keepKey(told[1]);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}
takeKey();
addEventListener("hashchange", () => takeKey() && location.reload()); // the address was entered where the page is open

/** Fetch a path of this server, with its key if it asks for one. Throws ChatError if it refuses; 304 is not a refusal. */
export async function request(path, options) {
  const key = keptKey();
  const headers = key ? { ...options.headers, Authorization: `Bearer ${key}` } : options.headers;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (failure) {
    if (failure.name === "AbortError") throw failure;
    throw new ChatError("unreachable");
  }
  if (response.status === 401 && (keptKey() !== key || askForKey())) return request(path, options);
  if (!response.ok && response.status !== 304) throw await refusal(response);
  return response;
}

/**
 * Ask for the key of a server that was started with --api_key. Returns false if the reader gives none. A header carries only
 * visible ASCII: with another key, such as one in curly quotes, each request would fail before it is sent.
 */
function askForKey() {
  for (;;) {
    const key = window.prompt(words("askKey"))?.trim();
    if (!key) return false;
    if (!/^[\x21-\x7e]+$/.test(key)) continue;
    keepKey(key);
    return true;
  }
}

/**
 * Describes the served models, the default one first: {id, stage, tag, step, context_length, defaults, capabilities,
 * corpus, parameters, knows, others} of each.
 */
export async function servedModels() {
  const response = await request("v1/models", { cache: "no-store" });
  return (await response.json()).data;
}

async function post(path, body) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return (await request(path, options)).json();
}

/**
 * The prompt that the server makes of {messages, model, chat_template_kwargs}: the `count` of its tokens, and `runs`, the parts
 * {text, special} that it consists of. A special token is a part of its own; a text that only spells one is not special.
 */
export async function promptOf(asked) {
  const { model } = asked;
  const info = await request(`tokenizer_info?model=${encodeURIComponent(model)}`, {});
  const marks = (await info.json()).added_tokens_decoder;
  const { count, tokens, token_strs } = await post("tokenize", { ...asked, return_token_strs: true });
  const runs = [];
  tokens.forEach((token, place) => {
    const special = Object.hasOwn(marks, token);
    if (special || !runs.length || runs.at(-1).special) runs.push({ text: "", special, tokens: [] });
    runs.at(-1).text += token_strs[place];
    runs.at(-1).tokens.push(token);
  });
  for (const run of runs) {
    // A character may consist of several tokens, none of which is a text by itself.
    if (run.text.includes("\ufffd")) run.text = (await post("detokenize", { tokens: run.tokens, model })).prompt;
  }
  return { count, runs };
}

/**
 * Streams an answer. Yields {thought}, {text}, {tool: {expression, result}}, {tokens, used} and {scores} as they arrive, and
 * {finish} at the end; `used` counts the tokens of prompt and answer together, and scores are the API's logprobs. If the oldest messages did not fit into the model's
 * context, {forgotten} comes first with their number. To stop the answer, abort the signal: that closes the connection,
 * and the server stops computing. `settings` are the API's fields, such as max_tokens; the server knows the defaults.
 */
export async function* answer(messages, settings, signal) {
  const stream_options = { include_usage: true, continuous_usage_stats: true };
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ messages, ...settings, truncation: "auto", stream: true, stream_options }),
    signal,
  });
  let [started, finished] = [false, false];
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ChatError(chunk.error.code, chunk.error.message);
      if (!started && chunk.truncated_messages) yield { forgotten: chunk.truncated_messages };
      started = true;
      if (chunk.usage) {
        yield { tokens: chunk.usage.completion_tokens, used: chunk.usage.total_tokens };
      }
      const choice = chunk.choices[0];
      if (choice?.logprobs?.content) yield { scores: choice.logprobs.content };
      if (choice?.delta.reasoning_content) yield { thought: choice.delta.reasoning_content };
      if (choice?.delta.content) yield { text: choice.delta.content };
      if (choice?.delta.tool) yield { tool: choice.delta.tool };
      if (choice?.finish_reason) {
        finished = true;
        yield { finish: choice.finish_reason };
      }
    }
  } catch (failure) {
    if (failure instanceof ChatError || failure.name === "AbortError") throw failure;
    throw new ChatError("broken");
  }
  if (!finished) throw new ChatError("broken");
}
