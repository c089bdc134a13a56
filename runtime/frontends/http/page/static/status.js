// What the server says of itself, asked for once a second, and kept for as long as it is shown.

const EVERY_MS = 1000;
const LONGEST_WAIT_MS = 5000;
const MAX_ENDED = 256;
const KEY = "trtc-key";

/** The API key, which stays in this tab and is forgotten with it. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
  headers: () => (key.get() ? { authorization: `Bearer ${key.get()}` } : {}),
};

export class Status {
  /** `onChange` is called after each answer and each failure. */
  constructor(onChange) {
    this.onChange = onChange;
    this.document = null;
    this.failure = ""; // "", "gone", "key", "forbidden", or what the server said
    this.failedSince = 0;
    this.times = []; // of the samples, on the server's clock
    this.samples = [];
    this.ended = new Map(); // requests by number
    this.wait = EVERY_MS;
    this.timer = 0;
    this.asking = false;
    document.addEventListener("visibilitychange", () => this.askNow());
  }

  /** Ask at once, and then each second. */
  askNow() {
    clearTimeout(this.timer);
    if (!document.hidden && !this.asking) this.ask();
  }

  async ask() {
    this.asking = true;
    try {
      const after = this.document?.num_samples ?? 0;
      const answer = await fetch(`/trtc/status?after=${after}`, {
        headers: key.headers(), cache: "no-store", signal: AbortSignal.timeout(10_000),
      });
      if (answer.ok) this.take(await answer.json());
      else await this.refused(answer);
    } catch {
      this.fail("gone");
    }
    this.asking = false;
    this.onChange();
    clearTimeout(this.timer);
    if (!document.hidden) this.timer = setTimeout(() => this.ask(), this.wait);
  }

  async refused(answer) {
    if (answer.status === 401) this.fail("key");
    else if (answer.status === 403) this.fail("forbidden");
    else {
      const said = await answer.json().catch(() => ({}));
      this.fail(String(said.status ?? `the server answered ${answer.status}`));
    }
  }

  fail(failure) {
    if (!this.failure) this.failedSince = Date.now();
    this.failure = failure;
    this.wait = Math.min(this.wait * 1.5, LONGEST_WAIT_MS);
  }

  take(document) {
    if (this.document?.started !== document.started) this.forget(document);
    this.document = document;
    this.failure = "";
    this.wait = EVERY_MS;
    for (const sample of document.samples) {
      if (this.times.length && sample.at <= this.times.at(-1)) continue;
      this.times.push(sample.at);
      this.samples.push(sample);
    }
    const surplus = this.times.length - document.max_samples;
    if (surplus > 0) {
      this.times.splice(0, surplus);
      this.samples.splice(0, surplus);
    }
    for (const one of document.ended) this.ended.set(one.number, one);
    for (const number of this.ended.keys()) {
      if (this.ended.size <= MAX_ENDED) break;
      this.ended.delete(number);
    }
  }

  /** The server is another one than before: its clock and its numbers are too. */
  forget(document) {
    this.times = [];
    this.samples = [];
    this.ended.clear();
    this.columns = new Map(document.columns.map((name, at) => [name, at]));
  }

  /** The values of an engine's column, NaN where there is none. */
  column(engine, name) {
    const at = this.columns.get(name);
    return this.samples.map((sample) => sample.engines[engine]?.[at] ?? NaN);
  }
}
