// The playground: a conversation or a completion, by the server's own OpenAI API.

import { Answer, legend } from "./answer.js";
import { byId, html, say, segments } from "./dom.js";
import { seconds } from "./format.js";
import { events } from "./sse.js";
import { key } from "./status.js";

const NUMBERS = [
  ["max_tokens", "Max tokens", { min: 1, step: 1, placeholder: "model's" }, "256"],
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05, placeholder: "model's" }, ""],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05, placeholder: "model's" }, ""],
  ["top_k", "Top k", { min: 0, step: 1, placeholder: "model's" }, ""],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01, placeholder: "model's" }, ""],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, step: 0.05, placeholder: "model's" }, ""],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1, placeholder: "model's" }, ""],
  ["seed", "Seed", { step: 1, placeholder: "random" }, ""],
];
const TOP_LOGPROBS = 5;

export class Playground {
  constructor(status, onKeyNeeded) {
    this.status = status;
    this.onKeyNeeded = onKeyNeeded;
    this.mode = "chat";
    this.turns = []; // {role, content} of the conversation
    this.controller = null;
    this.buildOptions();
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && this.mode === "chat") {
        event.preventDefault();
        this.send();
      }
    });
    byId("playground").addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    if (matchMedia("(max-width: 52rem)").matches) byId("settings").open = false;
    this.clear();
  }

  buildOptions() {
    const modes = html("fieldset", { class: "segments" }, html("legend", { class: "visually-hidden" }, "Mode"));
    segments(modes, "mode", [["chat", "Chat"], ["completion", "Completion"]], this.mode, (mode) => {
      this.mode = mode;
      this.clear();
    });
    this.model = html("select", { id: "model" });
    this.system = html("textarea", { id: "system", rows: 2, placeholder: "none" });
    this.stops = html("input", { id: "stop-at", type: "text", placeholder: "none", autocomplete: "off" });
    this.logprobs = html("input", { id: "logprobs", type: "checkbox" });
    const field = (label, control) => html("div", { class: "field" }, html("label", { for: control.id }, label), control);
    this.systemField = field("System prompt", this.system);
    this.numbers = NUMBERS.map(([name, label, attributes, value]) => {
      const input = html("input", { id: name, type: "number", inputmode: "decimal", value, ...attributes });
      return { name, input, element: field(label, input) };
    });
    byId("options").append(modes, field("Model", this.model), this.systemField,
      html("div", { class: "pairs" }, ...this.numbers.map((one) => one.element)),
      field("Stop string", this.stops),
      html("div", { class: "check" }, this.logprobs, html("label", { for: "logprobs" }, "Colour tokens by probability")), legend());
    byId("options").addEventListener("submit", (event) => event.preventDefault());
  }

  async draw() {
    if (byId("playground").hidden) return;
    const engines = this.status.document?.engines;
    const names = engines ? engines.map((one) => one.name) : await this.askModels();
    const shown = names.join("\n");
    if (shown !== this.namesShown) {
      this.namesShown = shown;
      const chosen = this.model.value;
      this.model.replaceChildren(...names.map((one) => html("option", { value: one }, one)));
      if (names.includes(chosen)) this.model.value = chosen;
    }
    byId("send").disabled = this.controller !== null || !names.length;
  }

  /** Without leave to read the status: what the key may use. */
  async askModels() {
    if (this.modelsAsked && this.modelsKey === key.get() && this.names) return this.names;
    if (this.modelsAsked > Date.now() - 3000 && this.modelsKey === key.get()) return [];
    this.modelsAsked = Date.now();
    this.modelsKey = key.get();
    this.names = null;
    try {
      const answer = await fetch("/v1/models", { headers: key.headers() });
      if (answer.ok) this.names = (await answer.json()).data.map((one) => one.id);
    } catch {
      return [];
    }
    return this.names ?? [];
  }

  clear() {
    this.stop();
    this.turns = [];
    this.systemField.hidden = this.mode !== "chat";
    say(byId("prompt-label"), this.mode === "chat" ? "Message" : "Prompt");
    say(byId("clear"), this.mode === "chat" ? "New conversation" : "Clear");
    say(byId("speed"), "");
    byId("log").replaceChildren(html("p", { class: "empty" },
      this.mode === "chat" ? "Send a message. Enter sends, Shift+Enter begins a line, Escape stops the answer."
        : "Send a prompt, and the model goes on from its end."));
  }

  stop() {
    this.controller?.abort();
  }

  async send() {
    const text = byId("prompt").value;
    if (!text || this.controller) return;
    const log = byId("log");
    if (log.querySelector(".empty") || this.mode === "completion") log.replaceChildren();
    const asked = new Answer(this.mode === "chat" ? "user" : "prompt");
    asked.add(text, []);
    const answer = new Answer(this.mode === "chat" ? "assistant" : "completion");
    log.append(asked.element, answer.element);
    if (this.mode === "chat") {
      this.turns.push({ role: "user", content: text });
      byId("prompt").value = "";
    }
    this.controller = new AbortController();
    this.busy(true);
    try {
      await this.stream(answer);
    } catch (error) {
      if (error.name === "AbortError") answer.end(`${answer.summary ?? ""}stopped`);
      else answer.fail(error instanceof TypeError ? "The server does not answer." : error.message);
    }
    this.controller = null;
    this.busy(false);
    if (this.mode === "chat" && answer.text) this.turns.push({ role: "assistant", content: answer.text });
    else if (this.mode === "chat") this.turns.pop();
  }

  busy(busy) {
    byId("log").setAttribute("aria-busy", busy);
    byId("send").disabled = busy;
    byId("stop").disabled = !busy;
  }

  body() {
    const body = { model: this.model.value, stream: true, stream_options: { include_usage: true } };
    for (const { name, input } of this.numbers) {
      if (input.value !== "") body[name] = Number(input.value);
    }
    if (this.stops.value) body.stop = [this.stops.value.replaceAll("\\n", "\n")];
    if (this.mode === "completion") {
      body.prompt = byId("prompt").value;
      if (this.logprobs.checked) body.logprobs = TOP_LOGPROBS;
      return body;
    }
    const system = this.system.value.trim();
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...this.turns];
    if (this.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
    return body;
  }

  async stream(answer) {
    const began = performance.now();
    const response = await fetch(this.mode === "chat" ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST", signal: this.controller.signal, body: JSON.stringify(this.body()),
      headers: { "content-type": "application/json", ...key.headers() },
    });
    if (!response.ok) {
      if (response.status === 401) this.onKeyNeeded();
      const said = await response.json().catch(() => null);
      throw new Error(said?.error?.message ?? `The server answered ${response.status}.`);
    }
    let first = 0;
    let last = 0;
    let pieces = 0;
    let usage = null;
    let reason = "";
    const log = byId("log");
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const text = choice.delta ? choice.delta.content ?? "" : choice.text;
      const entries = choice.delta ? chatEntries(choice.logprobs) : completionEntries(choice.logprobs);
      reason = choice.finish_reason ?? reason;
      if (!text && !entries.length) continue;
      last = performance.now();
      first ||= last;
      pieces += entries.length || 1;
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      answer.add(text, entries);
      if (follows) log.scrollTop = log.scrollHeight;
      answer.summary = summary(pieces, began, first, last);
      say(byId("speed"), speed(pieces, first, last));
    }
    const tokens = usage?.completion_tokens ?? pieces;
    answer.end(`${summary(tokens, began, first, last)}${reason}`);
    say(byId("speed"), speed(tokens, first, last));
  }
}

function speed(tokens, first, last) {
  return last > first ? `${(((tokens - 1) * 1000) / (last - first)).toFixed(1)} tokens/s` : "";
}

function summary(tokens, began, first, last) {
  const parts = [`${tokens} tokens`, speed(tokens, first, last), first ? `first after ${seconds((first - began) / 1000)}` : ""];
  return parts.filter(Boolean).map((one) => `${one} · `).join("");
}

function chatEntries(logprobs) {
  return (logprobs?.content ?? []).map((one) => ({
    token: one.token, logprob: one.logprob, top: one.top_logprobs.map((other) => [other.token, other.logprob]),
  }));
}

function completionEntries(logprobs) {
  return (logprobs?.tokens ?? []).map((token, at) => ({
    token, logprob: logprobs.token_logprobs[at] ?? 0, top: Object.entries(logprobs.top_logprobs[at] ?? {}),
  }));
}
