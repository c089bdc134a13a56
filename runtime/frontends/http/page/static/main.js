// The page: which view is shown, what the server's state is, and the key that it may want.

import { byId, html, say } from "./dom.js";
import { duration } from "./format.js";
import { Overview } from "./overview.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { Status, key } from "./status.js";

const VIEWS = ["overview", "requests", "playground"];

const status = new Status(draw);
const overview = new Overview(status);
const requests = new Requests(status);
const playground = new Playground(status, () => askForKey("This server wants an API key."));

function view() {
  const asked = location.hash.slice(1);
  return VIEWS.includes(asked) ? asked : "overview";
}

function show() {
  for (const name of VIEWS) byId(name).hidden = name !== view();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view()}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view()[0].toUpperCase()}${view().slice(1)} · trtc`;
  draw();
}

function draw() {
  drawState();
  const locked = status.failure === "key" || status.failure === "forbidden";
  const blind = (locked || !status.document) && view() !== "playground";
  byId(view()).hidden = blind;
  if (!blind) {
    overview.draw();
    requests.draw();
  }
  playground.draw();
}

function drawState() {
  const [tone, text, notice] = stateOf();
  say(byId("version"), status.document?.trtc_version ?? "");
  const shown = `${tone} ${text}`;
  if (drawState.shown !== shown) {
    drawState.shown = shown;
    byId("state").replaceChildren(html("span", { class: `pill ${tone}` }, text));
  }
  byId("notice").hidden = !notice;
  say(byId("notice"), notice);
  drawGate();
}

/** Tone, a few words, and a sentence where there is something to do. */
function stateOf() {
  const { document, failure } = status;
  if (failure === "gone") {
    const since = duration((Date.now() - status.failedSince) / 1000);
    return ["bad", "no answer", `The server has not answered for ${since}. Its last numbers are shown; this page asks again every few seconds.`];
  }
  if (failure === "key" || failure === "forbidden") return ["warn", "key needed", ""];
  if (failure) return ["bad", "error", failure];
  if (!document) return ["live", "connecting", ""];
  const reasons = [...new Set(document.states.filter((one) => one.is_wanted).map((one) => one.reason).filter(Boolean))];
  if (reasons.includes("draining")) return ["warn", "draining", "The server is shutting down: it ends the requests that run and takes no new ones."];
  if (!reasons.length) return ["good", "ready", ""];
  return ["warn", reasons.length === 1 ? reasons[0].slice(0, 60) : "not ready", ""];
}

function drawGate() {
  const { failure } = status;
  const wanted = (failure === "key" || failure === "forbidden") && (view() !== "playground" || !key.get());
  if (wanted || !failure) byId("gate").hidden = !wanted;
  if (!wanted) return;
  if (failure === "forbidden") say(byId("gate-text"), "This key opens the playground. The plots and requests need one of a tenant with the scope “metrics”.");
  else say(byId("gate-text"), key.get() ? "The server does not know this key, or it has expired." : "The key stays in this tab and is forgotten with it. Plots and requests need the scope “metrics”, the playground needs “inference”.");
}

function askForKey(text) {
  byId("gate").hidden = false;
  say(byId("gate-text"), text);
  byId("key").focus();
}

byId("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  status.askNow();
});
addEventListener("hashchange", () => {
  show();
  byId("main").focus();
});
show();
status.askNow();
