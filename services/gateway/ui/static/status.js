// Follows GET status: asks every second, backs off while nobody answers, rests while the tab is hidden.
// Keeps what the page shows of the past: finished requests, and a sample of the key figures for each answer.

import { key } from "./key.js";

const EVERY_MS = 1000;
const TIMEOUT_MS = 8000;
const MAX_WAIT_MS = 15000;
const MAX_REQUESTS = 200;
const MAX_SAMPLES = 120;

export class StatusFeed {
  /** `onChange` is called after each answer and each change of `state`. */
  constructor(onChange) {
    this.onChange = onChange;
    this.status = null;
    this.requests = [];
    this.samples = [];
    // "connecting", "live", "away" (error and nextTry say more), "locked" (a key is asked for), "paused", "hidden".
    this.state = "connecting";
    this.error = "";
    this.nextTry = 0;
    this.paused = false;
    this.failures = 0;
    this.timer = 0;
    this.running = null;
    document.addEventListener("visibilitychange", () => this.wake());
  }

  start() {
    this.ask();
  }

  /** Asks now, if it may. */
  wake() {
    clearTimeout(this.timer);
    if (this.paused || document.hidden) this.change(this.paused ? "paused" : "hidden");
    else this.ask();
  }

  pause(paused) {
    this.paused = paused;
    this.wake();
  }

  change(state) {
    this.state = state;
    this.onChange(this);
  }

  async ask() {
    if (this.running) return;
    clearTimeout(this.timer);
    this.running = new AbortController();
    const timeout = setTimeout(() => this.running.abort(), TIMEOUT_MS);
    try {
      this.take(await this.fetch(this.running.signal));
    } catch (error) {
      this.failed(error);
    } finally {
      clearTimeout(timeout);
      this.running = null;
    }
    if (this.paused || document.hidden) this.change(this.paused ? "paused" : "hidden");
    else if (this.state !== "locked") this.timer = setTimeout(() => this.ask(), this.failures ? this.nextTry - Date.now() : EVERY_MS);
  }

  async fetch(signal) {
    const after = this.status ? (this.requests[0]?.number ?? 0) : 0;
    const address = `status?limit=${MAX_REQUESTS}&after=${after}`;
    const answer = await fetch(address, { headers: key.headers(), cache: "no-store", signal });
    if (answer.status === 401) throw new Locked();
    if (!answer.ok) throw new Error(`the gateway answered HTTP ${answer.status}`);
    const status = await answer.json();
    const before = this.status?.gateway.incarnation;
    if (after && before !== status.gateway.incarnation) {
      // Another life of the gateway: it counts from one again.
      this.requests = [];
      this.samples = [];
      this.status = null;
      return this.fetch(signal);
    }
    return status;
  }

  take(status) {
    this.requests = [...(status.requests ?? []), ...this.requests].slice(0, MAX_REQUESTS);
    this.status = status;
    this.failures = 0;
    this.error = "";
    this.samples.push(sample(status, this.samples.at(-1), this.requests));
    if (this.samples.length > MAX_SAMPLES) this.samples.shift();
    this.change("live");
  }

  failed(error) {
    if (error instanceof Locked) {
      this.change("locked");
      return;
    }
    this.failures += 1;
    this.error = error.name === "AbortError" ? "it did not answer in time" : error.message;
    // Doubles, and spreads: many pages shall not come back in one moment.
    const wait = Math.min(MAX_WAIT_MS, EVERY_MS * 2 ** (this.failures - 1)) * (0.8 + 0.4 * Math.random());
    this.nextTry = Date.now() + wait;
    this.change("away");
  }
}

class Locked extends Error {}

function sample(status, before, requests) {
  const totals = status.totals ?? {};
  const now = {
    time: status.time,
    active: status.num_active ?? status.gateway.running + status.gateway.waiting,
    finished: totals.num_finished ?? 0,
    tokens: totals.num_output_tokens ?? 0,
    requestRate: 0,
    tokenRate: 0,
    ttft: null,
  };
  const passed = before ? now.time - before.time : 0;
  if (passed > 0 && now.finished >= before.finished) {
    now.requestRate = (now.finished - before.finished) / passed;
    now.tokenRate = (now.tokens - before.tokens) / passed;
  }
  const fresh = requests.filter((row) => row.ttft_seconds !== null && row.arrival_time > status.time - 60);
  if (fresh.length) now.ttft = fresh.reduce((sum, row) => sum + row.ttft_seconds, 0) / fresh.length;
  return now;
}
