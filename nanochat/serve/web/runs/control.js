// Asks the server to describe, forecast, start and stop runs, and to show what they print.

import { request } from "../client.js";
import { currentLanguage } from "../language/i18n.js";

async function post(path, body) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  return (await request(path, options)).json();
}

/** The form of a new run, or of the run of an id: {stage, script, fields, values, processes, most_processes, forecasts}. */
export async function formOf(run) {
  return (await request(`runs/form?run=${encodeURIComponent(run ?? "")}`, { cache: "no-store" })).json();
}

/** What a filled form asks for: `action` is "command", "forecast" or "start". */
export function submit(action, { run, values, processes }) {
  return post(`runs/${action}`, { run, values, processes, language: currentLanguage() });
}

/** Ask a run to save and stop. */
export function stop(run) {
  return post("runs/stop", { run });
}

/** A part of what a run has printed: {from, next, size, text}; without a place, the end. */
export async function logOf(run, place) {
  const query = place === null ? "" : `?from=${place}`;
  return (await request(`runs/log/${run}${query}`, { cache: "no-store" })).json();
}
