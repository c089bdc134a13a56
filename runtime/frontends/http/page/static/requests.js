// Requests that run and that ended last: what each waited for, and when its tokens came.

import { byId, html, say, svg } from "./dom.js";
import { seconds } from "./format.js";
import { short } from "./overview.js";

const MAX_ROWS = 60;

/** The phases of a request that are over or run, in seconds since its arrival. */
function phases(one, until) {
  const found = [];
  const first = one.first_token_s;
  const scheduled = one.scheduled_s;
  if (scheduled !== null) found.push(["queue", 0, scheduled]);
  if (first === null) found.push([scheduled === null ? "unknown" : "prefill", scheduled ?? 0, until]);
  else {
    found.push([scheduled === null ? "unknown" : "prefill", scheduled ?? 0, first]);
    found.push(["decode", first, one.last_token_s ?? first]);
  }
  return found;
}

const NAMES = { queue: "queue", prefill: "prefill", decode: "decode", unknown: "queue and prefill" };

function bar(one, until, longest) {
  const percent = (value) => `${((value / longest) * 100).toFixed(3)}%`;
  return svg("svg", { class: "bar-line", height: 14, role: "presentation" }, ...phases(one, until).map(([name, from, to]) =>
    svg("rect", { class: name, x: percent(from), y: name === "decode" ? 3 : 5, height: name === "decode" ? 8 : 4, width: percent(Math.max(to - from, longest * 0.002)), rx: 1 })));
}

export class Requests {
  constructor(status) {
    this.status = status;
    this.open = 0; // number of the request whose details are shown
    this.rows = new Map();
    byId("filter").addEventListener("input", () => this.draw());
  }

  draw() {
    const { document } = this.status;
    if (!document || byId("requests").hidden) return;
    const all = [...document.running, ...[...this.status.ended.values()].reverse()];
    const wanted = byId("filter").value.trim().toLowerCase();
    const list = all.filter((one) =>
      `${one.request_id} ${one.client} ${one.model} ${outcome(one)}`.toLowerCase().includes(wanted)).slice(0, MAX_ROWS);
    byId("timelines").hidden = !list.length;
    byId("requests-empty").hidden = list.length > 0;
    say(byId("requests-empty"), all.length ? "No request matches the filter." : "No requests yet. Send one, from the playground for example.");
    const until = (one) => one.ended_s ?? document.now - one.arrived_at;
    const longest = Math.max(...list.map(until), 1e-6);
    const rows = list.flatMap((one) => this.rowsOf(one, until(one), longest));
    place(byId("timelines").tBodies[0], rows);
  }

  rowsOf(one, until, longest) {
    const isOpen = this.open === one.number;
    const shown = JSON.stringify([one.ended_s === null ? until : one.ended_s, one.completion_tokens, longest, isOpen]);
    const before = this.rows.get(one.number);
    if (before?.shown === shown) return before.elements;
    const id = `request-${one.number}`;
    const toggle = before?.toggle ?? html("button", { type: "button", class: "link", "aria-controls": id, onclick: () => {
      this.open = this.open === one.number ? 0 : one.number;
      this.draw();
    }, title: one.request_id }, nameOf(one.request_id));
    toggle.setAttribute("aria-expanded", isOpen);
    const cells = [
      html("td", { class: "wide", title: one.client }, short(one.client)),
      html("td", { class: "number wide" }, String(one.prompt_tokens)),
      html("td", { class: "number" }, String(one.completion_tokens)),
      html("td", { class: "number wide" }, seconds(one.first_token_s)),
      html("td", { class: "number" }, seconds(until)),
      html("td", { class: "bars" }, bar(one, until, longest)),
      html("td", {}, html("span", { class: `pill ${tone(one)}` }, outcome(one))),
    ];
    const row = before?.elements[0] ?? html("tr", {}, html("th", { scope: "row" }, toggle));
    while (row.children.length > 1) row.lastElementChild.remove(); // the first one keeps its focus
    row.append(...cells);
    const elements = isOpen ? [row, html("tr", { class: "details", id }, html("td", { colspan: 8 }, details(one, until)))] : [row];
    this.rows.set(one.number, { shown, elements, toggle });
    if (this.rows.size > 1024) this.rows.clear();
    return elements;
  }
}

/** Put these rows into the body, and move only those that are elsewhere: focus stays. */
function place(body, rows) {
  const kept = new Set(rows);
  for (const row of [...body.children]) if (!kept.has(row)) row.remove();
  rows.forEach((row, at) => {
    if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
  });
}

/** Ids that the server has drawn differ in their first digits. */
function nameOf(id) {
  const drawn = /^(?:[a-z]+-)?([0-9a-f]{8})[0-9a-f]{16,}$/.exec(id);
  return drawn ? drawn[1] : id;
}

function outcome(one) {
  if (!one.outcome) return one.first_token_s === null ? "waiting" : "running";
  return one.outcome === "ok" ? one.finish_reasons.join(", ") || "ok" : one.outcome;
}

function tone(one) {
  if (!one.outcome) return "live";
  return one.outcome === "ok" && !one.finish_reasons.includes("aborted") ? "plain" : "warn";
}

function details(one, until) {
  const width = 1000;
  const x = (value) => (value / Math.max(until, 1e-9)) * width;
  const shapes = phases(one, until).map(([name, from, to]) =>
    svg("rect", { class: name, x: x(from), y: 18, width: Math.max(x(to) - x(from), 1), height: 12 }));
  const marks = one.marks.map((at) => svg("line", { class: "mark", x1: x(at), x2: x(at), y1: 6, y2: 18 }));
  const drawing = svg("svg", { class: "long", viewBox: `0 0 ${width} 34`, preserveAspectRatio: "none", role: "img",
    "aria-label": phases(one, until).map(([name, from, to]) => `${NAMES[name]} ${seconds(to - from)}`).join(", ") }, ...shapes, ...marks);
  const decode = one.first_token_s === null ? 0 : one.last_token_s - one.first_token_s;
  const facts = [
    ["Request", one.request_id], ["Client", one.client], ["Model", one.model],
    ["Prompt", `${one.prompt_tokens} tokens${one.cached_prompt_tokens === null ? "" : `, ${one.cached_prompt_tokens} of them cached`}`],
    ["Completion", `${one.completion_tokens} tokens`],
    ["Admitted after", seconds(one.admitted_s)],
    ...phases(one, until).map(([name, from, to]) => [NAMES[name][0].toUpperCase() + NAMES[name].slice(1), seconds(to - from)]),
    ["Time to first token", seconds(one.first_token_s)],
    ["Decode speed", decode > 0 ? `${((one.completion_tokens - 1) / decode).toFixed(1)} tokens/s` : "–"],
    ["Outcome", outcome(one)],
  ];
  return html("div", { class: "facts" }, drawing,
    html("p", { class: "axis muted numbers" }, html("span", {}, "0 s"), html("span", {}, `ticks: tokens that came${one.marks.length >= 32 && one.completion_tokens > one.marks.length ? " (some left out)" : ""}`), html("span", {}, seconds(until))),
    html("dl", {}, ...facts.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, value)))));
}
