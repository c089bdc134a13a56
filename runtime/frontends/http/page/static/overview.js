// The overview: what an engine does, as plots that share a time axis; models; clients.

import { byId, html, say, segments } from "./dom.js";
import { ago, bytes, number, percent, seconds } from "./format.js";
import { Plot } from "./plot.js";

const SPANS = [[120, "2 min"], [300, "5 min"], [600, "10 min"]];
const NUM_CLIENT_LINES = 4;

const column = (name) => (view) => view.column(name);
const over = (name, total) => (view) => {
  const below = view.column(total);
  return view.column(name).map((value, at) => (below[at] > 0 ? value / below[at] : NaN));
};
const percentilesOf = (name) => () => ["p50", "p90", "p99"].map((share) => ({
  label: share, color: share, values: column(`${name}_${share}`),
}));
const bound = (series) => (view) => series(view).map((one) => ({ ...one, values: one.values(view) }));

function plotsOf() {
  return [
    { title: "Tokens a second", hint: "all requests", format: number, series: () => [
      { label: "generated", color: "c1", values: column("generated_tokens") },
      { label: "prompt", color: "c2", values: column("prompt_tokens") }] },
    { title: "Time to first token", hint: "last 10 s", format: seconds, empty: "No first tokens", least: 1e-3,
      series: percentilesOf("first_token") },
    { title: "Between tokens", hint: "last 10 s", format: seconds, empty: "No tokens", least: 1e-4,
      series: percentilesOf("between_tokens") },
    { title: "Queue", hint: "wait of ended requests, last 10 s", format: seconds, empty: "No request ended", least: 1e-3,
      series: percentilesOf("queue") },
    { title: "Sequences", hint: "in the batch, and waiting", format: number, least: 4, series: () => [
      { label: "running", color: "c1", values: column("running") },
      { label: "waiting", color: "c2", values: column("waiting") }] },
    { title: "KV pages", hint: "of the pool", kind: "areas", format: percent, max: 1, series: (view) => [
      { label: "in use", color: "c1", values: () => view.column("kv_pages_used").map((one) => one / view.engine.num_pages) },
      { label: "cached", color: "c3", values: () => view.column("kv_pages_cached").map((one) => one / view.engine.num_pages) }] },
    { title: "Prefix cache hits", hint: "of prompt tokens", format: percent, max: 1, empty: "No prompts",
      series: () => [{ label: "found", color: "c1", values: over("prefix_hits", "prefix_queries") }] },
    { title: "Engine busy", hint: "share of time in steps", kind: "areas", format: percent, max: 1,
      series: () => [{ label: "busy", color: "c1", values: (view) => view.column("busy").map((one) => Math.min(one, 1)) }] },
    { title: "Tokens a step", hint: "batch, prompts included", format: number, least: 4, empty: "No steps", series: () => [
      { label: "a step", color: "c1", values: (view) => {
        const [steps, drawn, prompt] = ["steps", "generated_tokens", "prompt_tokens"].map(view.column);
        return steps.map((one, at) => (one > 0 ? (drawn[at] + prompt[at]) / one : NaN));
      } }] },
    { title: "Requests ended", hint: "a second", kind: "bars", format: number, least: 2, series: () => [
      { label: "finished", color: "c1", values: column("finished") },
      { label: "client left", color: "c5", values: column("left") },
      { label: "failed", color: "c4", values: column("failed") },
      { label: "refused", color: "c2", values: column("refused") }] },
    { title: "Preemptions", hint: "a second", kind: "bars", format: number, least: 2,
      series: () => [{ label: "preempted", color: "c4", values: column("preemptions") }] },
    { title: "Clients", hint: "tokens a second", format: number, least: 4, empty: "No clients", series: clientLines },
    { title: "Drafts accepted", hint: "speculative decoding", format: percent, max: 1, empty: "No drafts", onlyWith: "drafts",
      series: () => [{ label: "accepted", color: "c1", values: over("accepted_drafts", "drafts") }] },
  ];
}

/** The clients that got most in the time shown, and all others together. */
function clientLines(view) {
  const since = view.now - view.span;
  const totals = new Map();
  for (const sample of view.samples) {
    if (sample.at < since) continue;
    for (const [name, value] of Object.entries(sample.clients)) totals.set(name, (totals.get(name) ?? 0) + value);
  }
  const names = [...totals.keys()].sort((a, b) => totals.get(b) - totals.get(a));
  const first = names.slice(0, NUM_CLIENT_LINES).sort();
  const lines = first.map((name, at) => ({
    label: short(name), color: `c${at + 1}`, values: () => view.samples.map((one) => one.clients[name] ?? 0),
  }));
  if (names.length > NUM_CLIENT_LINES) {
    const rest = names.slice(NUM_CLIENT_LINES);
    lines.push({ label: `${rest.length} more`, color: "c5", values: () => view.samples.map((one) =>
      rest.reduce((sum, name) => sum + (one.clients[name] ?? 0), 0)) });
  }
  return lines;
}

export function short(client) {
  const name = client.replace(/^tenant /, "");
  return name.length > 9 ? `${name.slice(0, 8)}…` : name;
}

export class Overview {
  constructor(status) {
    this.status = status;
    this.span = 120;
    this.cursor = 0;
    this.paused = false;
    this.engine = "";
    this.frozen = null;
    this.plots = plotsOf().map(({ series, ...rest }) => ({ ...rest, plot: new Plot({ ...rest, series: bound(series) }) }));
    byId("plots").replaceChildren(...this.plots.map((one) => one.plot.element));
    this.slider = byId("cursor");
    this.slider.addEventListener("input", () => this.readAt(-Number(this.slider.value)));
    byId("pause").addEventListener("click", () => this.pause(!this.paused));
    segments(byId("windows"), "window", SPANS, this.span, (span) => {
      this.span = span;
      this.readAt(0);
    });
    for (const { plot } of this.plots) {
      plot.svg.addEventListener("pointermove", (event) => this.readAt(plot.agoAt(event.clientX, this.span)));
      plot.svg.addEventListener("pointerdown", (event) => this.readAt(plot.agoAt(event.clientX, this.span)));
      plot.svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.readAt(0));
    }
    new ResizeObserver(() => this.drawPlots()).observe(byId("plots"));
  }

  readAt(before) {
    this.cursor = Math.min(before, this.span);
    this.drawPlots();
  }

  pause(paused) {
    this.paused = paused;
    this.frozen = null;
    byId("pause").setAttribute("aria-pressed", paused);
    say(byId("pause"), paused ? "Go on" : "Pause");
    this.draw();
  }

  draw() {
    const { document } = this.status;
    if (!document) return;
    this.chooseEngine(document);
    this.drawPlots();
    this.drawModels(document);
    this.drawClients(document);
  }

  chooseEngine(document) {
    const names = document.states.map((one) => one.name);
    const shown = names.join("\n");
    if (!names.includes(this.engine)) this.engine = names[0] ?? "";
    if (shown !== this.namesShown) {
      this.namesShown = shown;
      byId("engines").hidden = names.length < 2;
      segments(byId("engines"), "engine", names.map((one) => [one, one]), this.engine, (name) => {
        this.engine = name;
        this.frozen = null;
        this.draw();
      });
    }
  }

  view() {
    if (this.paused && this.frozen) return { ...this.frozen, span: this.span, cursor: this.cursor };
    const { document, samples } = this.status;
    const times = [...this.status.times];
    const kept = [...samples];
    const columns = new Map();
    const read = (name) => {
      if (!columns.has(name)) columns.set(name, this.status.column(this.engine, name).slice(0, times.length));
      return columns.get(name);
    };
    const engine = document.engines.find((one) => one.name === this.engine) ?? { num_pages: 1 };
    const now = times.at(-1) ?? document.now;
    const view = { now, times, samples: kept, engine, column: read, span: this.span, cursor: this.cursor };
    if (this.paused) {
      for (const name of document.columns) read(name);
      this.frozen = view;
    }
    return view;
  }

  drawPlots() {
    if (!this.status.document || byId("overview").hidden) return;
    const view = this.view();
    for (const { plot, onlyWith } of this.plots) {
      plot.element.hidden = onlyWith !== undefined && !view.column(onlyWith).some((one) => one > 0);
      if (!plot.element.hidden) plot.draw(view);
    }
    this.drawCursor(view);
    this.drawTiles(view);
  }

  drawCursor(view) {
    this.slider.min = -this.span;
    this.slider.value = -this.cursor;
    const wall = new Date(Date.now() - (this.status.document.now - view.now + this.cursor) * 1000);
    const clock = wall.toLocaleTimeString("en-GB");
    const text = this.cursor ? `${clock} (${ago(this.cursor)})` : this.paused ? `paused at ${clock}` : "now";
    say(byId("cursor-text"), text);
    this.slider.setAttribute("aria-valuetext", text);
  }

  drawTiles(view) {
    const last = (name) => view.column(name).at(-1) ?? NaN;
    const recent = (name) => view.column(name).slice(-60).reduce((sum, one) => sum + (one || 0), 0);
    const queries = recent("prefix_queries");
    const tiles = [
      ["Generated", number(last("generated_tokens")), "tokens/s"],
      ["First token", seconds(last("first_token_p50")), "median"],
      ["Between tokens", seconds(last("between_tokens_p50")), "median"],
      ["Running", number(last("running")), `${number(last("waiting"))} waiting`],
      ["KV pages", percent(last("kv_pages_used") / view.engine.num_pages), "in use"],
      ["Prefix hits", percent(queries ? recent("prefix_hits") / queries : NaN), "last minute"],
    ];
    const list = byId("tiles");
    if (!list.children.length) {
      list.append(...tiles.map(([name]) => html("div", {}, html("dt", {}, name),
        html("dd", {}, html("span", { class: "big" }), " ", html("span", { class: "muted" })))));
    }
    tiles.forEach(([, value, unit], at) => {
      const [big, small] = list.children[at].querySelectorAll("span");
      say(big, value);
      say(small, unit);
    });
  }

  drawModels(document) {
    const shown = JSON.stringify([document.states, document.engines]);
    if (shown === this.modelsShown) return; // so that focus and selection stay
    this.modelsShown = shown;
    byId("models").replaceChildren(...document.states.map((state) =>
      modelCard(state, document.engines.find((one) => one.name === state.name))));
  }

  drawClients(document) {
    const heads = ["Client", "Running", "Requests", "Left", "Failed", "Refused", "Prompt tokens", "Completion tokens"];
    const table = byId("clients");
    if (!table.tHead) {
      table.append(html("thead", {}, html("tr", {}, ...heads.map((one, at) =>
        html("th", { scope: "col", class: at ? "number" : null }, one)))), html("tbody"));
    }
    const rows = [...document.clients].sort((a, b) => b.completion_tokens - a.completion_tokens).map((one) =>
      html("tr", {}, html("th", { scope: "row" }, one.name),
        ...[one.running, one.requests, one.left, one.failed, one.refused, one.prompt_tokens, one.completion_tokens].map((value) =>
          html("td", { class: "number" }, value.toLocaleString("en-US")))));
    if (!rows.length) rows.push(html("tr", {}, html("td", { colspan: heads.length, class: "empty" }, "No client has asked for anything yet.")));
    table.tBodies[0].replaceChildren(...rows);
  }
}

function modelCard(state, engine) {
  const ready = !state.reason;
  const heading = html("header", {},
    html("h3", {}, state.name),
    html("span", { class: `pill ${ready ? "good" : "warn"}` }, ready ? "ready" : `${state.state.toLowerCase()}: ${state.reason}`));
  if (!engine) return html("article", { class: "card" }, heading);
  const row = (name, ...value) => html("div", {}, html("dt", {}, name), html("dd", {}, ...value));
  return html("article", { class: "card" }, heading, html("dl", {},
    row("Digest", html("code", { class: "digest" }, engine.digest)),
    row("Model", `${engine.model}, ${engine.family}${engine.num_parameters ? `, ${number(engine.num_parameters)} parameters` : ""}`),
    row("Weights", `${engine.scheme}, KV ${engine.kv_dtype}${engine.has_dummy_weights ? ", random weights" : ""}`),
    row("Target", engine.target),
    row("Limits", `${engine.max_seq_len.toLocaleString("en-US")} tokens a sequence, ${engine.max_batch_size} sequences and ${engine.max_num_tokens.toLocaleString("en-US")} tokens a step`),
    row("KV pool", `${engine.num_pages.toLocaleString("en-US")} pages of ${engine.page_size} tokens${engine.page_bytes ? `, ${bytes(engine.num_pages * engine.page_bytes)}` : ""}`),
    row("Canaries", engine.num_canaries ? `${engine.num_canaries} checked at the start` : "none: its tokens were not checked"),
    row("Accuracy", ...accuracy(engine.accuracy)),
  ));
}

function accuracy(facts) {
  if (!facts) return ["not measured"];
  const parts = [`perplexity ${facts.perplexity.toPrecision(4)}`];
  if (facts.reference_perplexity !== null) {
    const change = facts.perplexity / facts.reference_perplexity - 1;
    parts.push(`unquantised ${facts.reference_perplexity.toPrecision(4)} (${change < 0 ? "−" : "+"}${Math.abs(change * 100).toFixed(2)}%)`);
  }
  if (facts.kl !== null) parts.push(`KL ${facts.kl.toPrecision(2)} nats`);
  if (facts.top1 !== null) parts.push(`same top token ${(facts.top1 * 100).toFixed(1)}%`);
  return [parts.join(" · "), html("span", { class: "muted block" },
    `${facts.tokens.toLocaleString("en-US")} tokens of ${facts.text}, measured on ${facts.measured_on}`)];
}
