// One small plot over time. All plots of a page share their time axis and the place of the read-out.

import { html, say, svg } from "./dom.js";
import { ago } from "./format.js";

const HEIGHT = 128;
const TOP = 8;
const BOTTOM = 18;
const RIGHT = 106; // for the names and values of the series
const LINE = 14; // between two of them

/** The smallest 1, 2, 2.5 or 5 times a power of ten that is not less. */
function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 2.5, 5, 10]) {
    if (step * power >= value * 0.999) return step * power;
  }
  return 10 * power;
}

/** Places for labels near the wanted ones, LINE apart and within the plot. */
function spread(wanted) {
  const order = wanted.map((_, at) => at).sort((a, b) => wanted[a] - wanted[b]);
  const found = [...wanted];
  let least = TOP + 4;
  for (const at of order) {
    found[at] = Math.max(found[at], least);
    least = found[at] + LINE;
  }
  let most = HEIGHT - BOTTOM + 2;
  for (const at of order.reverse()) {
    found[at] = Math.min(found[at], most);
    most = found[at] - LINE;
  }
  return found;
}

export class Plot {
  /**
   * `series`: [{label, color, values(view) -> numbers or NaN}], drawn as `kind`: "lines",
   * "areas" (one upon another) or "bars" (the same). `max`: of the axis; else it follows the data.
   * `empty`: said while there is nothing to show.
   */
  constructor({ title, hint, kind = "lines", series, format, max = 0, least = 0, empty = "Nothing yet" }) {
    Object.assign(this, { title, kind, series, format, max, least, empty });
    this.grid = svg("g", { class: "rules" });
    this.drawing = svg("g");
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
    this.dots = svg("g");
    this.labels = svg("g", { class: "labels" });
    this.svg = svg("svg", { role: "img", height: HEIGHT }, this.grid, this.drawing, this.cursor, this.dots, this.labels);
    this.nothing = html("p", { class: "nothing" }, empty);
    const heading = html("figcaption", {}, html("strong", {}, title), " ", html("span", { class: "muted" }, hint));
    this.element = html("figure", { class: "plot" }, heading, this.svg, this.nothing);
  }

  /** How far before now a place of the plot is, in seconds. */
  agoAt(clientX, span) {
    const box = this.svg.getBoundingClientRect();
    const share = (clientX - box.left) / Math.max(box.width - RIGHT, 1);
    return Math.round(Math.min(Math.max(1 - share, 0), 1) * span);
  }

  /** `view`: {now, span, times, cursor}; cursor: seconds before now, 0 for the last sample. */
  draw(view) {
    const width = Math.max(this.element.clientWidth, 160);
    const first = view.times.findIndex((at) => at >= view.now - view.span - 1);
    const from = first < 0 ? view.times.length : first;
    const x = (at) => (1 - (view.now - at) / view.span) * (width - RIGHT);
    const times = view.times.slice(from);
    const own = this.series(view).map((one) => ({ ...one, values: one.values.slice(from) }));
    const heights = this.kind === "lines" ? own.map((one) => one.values) : stacked(own);
    const top = this.topOf(heights);
    const y = (value) => TOP + (1 - Math.min(value / top, 1)) * (HEIGHT - TOP - BOTTOM);
    const any = own.some((one) => one.values.some((value) => !Number.isNaN(value)));
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.nothing.hidden = any;
    this.drawRules(width, view, top, y);
    this.drawing.replaceChildren(...(any ? this.shapes(own, heights, times.map(x), y, width) : []));
    this.drawReadout(own, heights, times, view, x, y, width);
  }

  topOf(heights) {
    if (this.max) return this.max;
    let most = this.least;
    for (const values of heights) for (const value of values) if (value > most) most = value;
    return niceCeiling(most > 0 ? most : 1);
  }

  drawRules(width, view, top, y) {
    const rules = [];
    for (const share of [0, 0.5, 1]) {
      const at = Math.round(y(share * top)) + 0.5;
      rules.push(svg("line", { x1: 0, x2: width - RIGHT, y1: at, y2: at }));
      if (share) rules.push(svg("text", { x: 0, y: at - 3 }, this.format(share * top)));
    }
    const every = view.span <= 120 ? 30 : view.span <= 300 ? 60 : 120;
    for (let before = 0; before <= view.span; before += every) {
      const at = Math.round((1 - before / view.span) * (width - RIGHT)) + 0.5;
      const anchor = before === 0 ? "end" : before === view.span ? "start" : "middle";
      rules.push(svg("line", { class: "tick", x1: at, x2: at, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 3 }));
      rules.push(svg("text", { x: at, y: HEIGHT - 3, "text-anchor": anchor }, before ? ago(before) : "now"));
    }
    this.grid.replaceChildren(...rules);
  }

  shapes(own, heights, xs, y, width) {
    if (this.kind === "lines") {
      return own.map((one) => svg("path", { class: `line ${one.color}`, d: linePath(xs, one.values, y) }));
    }
    const zero = y(0);
    return own.map((one, at) => {
      const below = at ? heights[at - 1] : one.values.map(() => 0);
      if (this.kind === "bars") {
        const d = barPath(xs, one.values, heights[at], y, Math.max((width - RIGHT) / 300, 1.5));
        return svg("path", { class: `bar ${one.color}`, d });
      }
      return svg("g", {},
        svg("path", { class: `area ${one.color}`, d: areaPath(xs, below, heights[at], y, zero) }),
        svg("path", { class: `line ${one.color}`, d: linePath(xs, heights[at], y) }));
    });
  }

  drawReadout(own, heights, times, view, x, y, width) {
    const at = nearest(times, view.now - view.cursor);
    const all = own.map((one, index) => ({
      ...one, value: one.values[at] ?? NaN, height: heights[index][at] ?? NaN,
    }));
    const shown = all.filter((one) => !Number.isNaN(one.value));
    this.cursor.toggleAttribute("hidden", !view.cursor);
    const place = at < 0 ? x(view.now - view.cursor) : x(times[at]);
    this.cursor.setAttribute("x1", place);
    this.cursor.setAttribute("x2", place);
    const named = this.nothing.hidden ? all : [];
    const places = spread(named.map((one) => y(one.height || 0) + 4));
    this.labels.replaceChildren(...named.map((one, index) =>
      svg("text", { x: width - RIGHT + 8, y: places[index], class: one.color },
        svg("tspan", { class: "value" }, this.format(one.value)), ` ${one.label}`)));
    this.dots.replaceChildren(...shown.map((one) =>
      svg("circle", { cx: place, cy: y(one.height), r: 2.5, class: `dot ${one.color}` })));
    const said = shown.map((one) => `${one.label} ${this.format(one.value)}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${said || this.empty}`);
    say(this.nothing, this.empty);
  }
}

function nearest(times, wanted) {
  let best = -1;
  for (let at = 0; at < times.length; at += 1) {
    if (best < 0 || Math.abs(times[at] - wanted) < Math.abs(times[best] - wanted)) best = at;
  }
  return best >= 0 && Math.abs(times[best] - wanted) <= 3 ? best : -1;
}

function stacked(series) {
  let below = null;
  return series.map((one) => {
    below = one.values.map((value, at) => value + (below ? below[at] : 0));
    return below;
  });
}

function linePath(xs, values, y) {
  let d = "";
  let drawn = false;
  for (let at = 0; at < values.length; at += 1) {
    if (Number.isNaN(values[at])) {
      drawn = false;
      continue;
    }
    d += `${drawn ? "L" : "M"}${xs[at].toFixed(1)} ${y(values[at]).toFixed(1)}`;
    if (!drawn) d += "h0";
    drawn = true;
  }
  return d;
}

function areaPath(xs, below, above, y, zero) {
  const there = xs.map((_, at) => at).filter((at) => !Number.isNaN(above[at]));
  if (!there.length) return "";
  const point = (at, values) => `${xs[at].toFixed(1)} ${Number.isNaN(values[at]) ? zero : y(values[at]).toFixed(1)}`;
  const upper = there.map((at) => point(at, above));
  const lower = there.reverse().map((at) => point(at, below));
  return `M${upper.join("L")}L${lower.join("L")}Z`;
}

function barPath(xs, values, tops, y, width) {
  let d = "";
  for (let at = 0; at < values.length; at += 1) {
    if (!(values[at] > 0)) continue;
    const high = y(tops[at]);
    const low = y(tops[at] - values[at]);
    d += `M${(xs[at] - width / 2).toFixed(1)} ${low.toFixed(1)}V${high.toFixed(1)}h${width.toFixed(1)}V${low.toFixed(1)}Z`;
  }
  return d;
}
