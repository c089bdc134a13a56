// An answer as it comes: its text, or its tokens in colours of their probabilities.

import { html } from "./dom.js";
import { percent } from "./format.js";

const STEPS = [0.9, 0.7, 0.5, 0.3, 0.1];

/** p0, the likely ones, to p5. */
function colorOf(logprob) {
  const probability = Math.exp(logprob);
  const at = STEPS.findIndex((least) => probability >= least);
  return `p${at < 0 ? STEPS.length : at}`;
}

export class Answer {
  constructor(role) {
    this.text = "";
    this.body = html("div", { class: "text" });
    this.readout = html("div", { class: "readout", hidden: true });
    this.foot = html("p", { class: "foot muted numbers" });
    this.element = html("article", { class: `turn ${role}` }, html("h2", { class: "who" }, role), this.body, this.readout, this.foot);
    this.waiting = []; // tokens whose text has not come yet: it may be part of a character, or of a stop string
    this.unshown = "";
    this.tokens = [];
  }

  /** `entries`: [{token, logprob, top: [[token, logprob]]}], empty without log-probabilities. */
  add(text, entries) {
    this.text += text;
    if (!entries.length && !this.tokens.length && !this.waiting.length) {
      this.body.append(text);
      return;
    }
    this.unshown += text;
    this.waiting.push(...entries);
    while (this.waiting.length && this.unshown && this.unshown.startsWith(this.waiting[0].token)) {
      const entry = this.waiting.shift();
      this.show(entry, entry.token);
      this.unshown = this.unshown.slice(entry.token.length);
    }
    // Tokens that are parts of characters have no text of their own: they are shown as one.
    if (this.waiting.length && this.unshown && !this.waiting[0].token.startsWith(this.unshown)) this.flush();
  }

  /** Nothing more comes. */
  end(foot) {
    this.flush();
    this.foot.textContent = foot;
  }

  fail(message) {
    this.flush();
    this.element.append(html("p", { class: "error", role: "alert" }, message));
  }

  flush() {
    if (this.unshown) {
      const entry = this.waiting.at(-1);
      if (entry) this.show(entry, this.unshown);
      else this.body.append(this.unshown);
    }
    this.unshown = "";
    this.waiting = [];
  }

  show(entry, text) {
    const at = this.tokens.length;
    const token = html("span", {
      class: `token ${colorOf(entry.logprob)}`, tabindex: at ? -1 : 0, role: "button",
      "aria-label": `${text.trim() || "space"}, ${percent(Math.exp(entry.logprob))}`,
      onfocus: () => this.read(at), onpointerenter: () => this.read(at),
      onkeydown: (event) => this.move(event, at),
    }, text);
    this.tokens.push({ entry, text, element: token });
    this.body.append(token);
  }

  move(event, at) {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (to === undefined || !this.tokens[to]) return;
    event.preventDefault();
    this.tokens[at].element.tabIndex = -1;
    this.tokens[to].element.tabIndex = 0;
    this.tokens[to].element.focus();
  }

  read(at) {
    const { entry, text } = this.tokens[at];
    const others = entry.top.map(([token, logprob]) => html("li", { class: token === entry.token ? "chosen" : null },
      html("code", {}, visible(token)), html("meter", { min: 0, max: 1, value: Math.exp(logprob), "aria-hidden": "true" }),
      html("span", { class: "numbers" }, percent(Math.exp(logprob)))));
    this.readout.hidden = false;
    this.readout.replaceChildren(
      html("p", {}, html("code", {}, visible(text)), html("span", { class: "numbers" }, ` ${percent(Math.exp(entry.logprob))} · log ${entry.logprob < 0 ? "−" : ""}${Math.abs(entry.logprob).toFixed(3)}`)),
      html("ol", {}, ...others));
  }
}

function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣") || "∅";
}

export function legend() {
  const names = ["≥ 90%", "70", "50", "30", "10", "< 10%"];
  return html("p", { class: "legend", "aria-label": "Colours of probabilities" },
    ...names.map((name, at) => html("span", { class: `token p${at}` }, name)));
}
