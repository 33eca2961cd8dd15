// The key figures on top, each with its last two minutes.

import { el, keyed, setAttr, setText, svg } from "./dom.js";
import * as format from "./format.js";

const root = document.getElementById("tiles");
const [WIDTH, HEIGHT] = [120, 26];
const RATE_SAMPLES = 5;
const MIN_SAMPLES = 30;

export function showTiles(feed) {
  keyed(root, tiles(feed), (item) => item.name, create, update);
}

function tiles({ status, samples, requests }) {
  const { gateway, totals } = status;
  const ttft = requests.map((row) => row.ttft_seconds).filter(format.isNumber).sort((a, b) => a - b);
  const exposed = requests.filter((row) => row.num_transferred_tokens).map((row) => row.exposed_transfer_seconds).sort((a, b) => a - b);
  const hits = totals.num_prompt_tokens ? totals.num_cached_tokens / totals.num_prompt_tokens : null;
  return [
    { name: "In progress", value: format.count(status.num_active),
      note: gateway.waiting ? `${format.count(gateway.waiting)} waiting` : "none waiting", warn: gateway.waiting > 0,
      series: samples.map((sample) => sample.active) },
    { name: "Requests", value: `${format.rate(mean(samples, "requestRate"))}/s`,
      note: totals.num_failed ? `${format.short(totals.num_finished)} in all, ${format.short(totals.num_failed)} failed` : `${format.short(totals.num_finished)} in all, none failed`,
      bad: requests.some((row) => row.finish_reason === "error" && row.arrival_time > status.time - 120), series: samples.map((sample) => sample.requestRate) },
    { name: "Output", value: `${format.rate(mean(samples, "tokenRate"))} tok/s`,
      note: `${format.short(totals.num_output_tokens)} tokens in all`, series: samples.map((sample) => sample.tokenRate) },
    { name: "First token", value: format.seconds(format.quantile(ttft, 0.5)),
      note: ttft.length ? `p95 ${format.seconds(format.quantile(ttft, 0.95))}` : "no request yet",
      series: samples.map((sample) => sample.ttft) },
    { name: "Cache hits", value: format.percent(hits),
      note: `${format.short(totals.num_cached_tokens)} of ${format.short(totals.num_prompt_tokens)} tokens`, series: [] },
    { name: "Exposed transfer", value: format.seconds(format.quantile(exposed, 0.5)),
      note: exposed.length ? `p95 ${format.seconds(format.quantile(exposed, 0.95))}` : "no hand-off yet", series: [] },
  ];
}

function mean(samples, name) {
  const last = samples.slice(-RATE_SAMPLES);
  return last.length > 1 ? last.reduce((sum, sample) => sum + sample[name], 0) / last.length : null;
}

function create(item) {
  return el("div", { class: "tile" },
    el("span", { class: "tile-name", text: item.name }),
    el("span", { class: "tile-value" }),
    el("span", { class: "tile-note" }),
    svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("path", { class: "spark-area" }), svg("path", { class: "spark-line" })));
}

function update(node, item) {
  const [, value, note, chart] = node.children;
  setText(value, item.value);
  setText(note, item.note);
  note.classList.toggle("is-warn", Boolean(item.warn));
  note.classList.toggle("is-bad", Boolean(item.bad));
  const line = path(item.series);
  setAttr(chart.children[1], "d", line);
  setAttr(chart.children[0], "d", line && `${line}V${HEIGHT}H${line.slice(1, line.indexOf(" "))}Z`);
}

/** The newest sample at the right edge; the first half minute already takes the whole width. */
function path(series) {
  const top = Math.max(...series.filter(format.isNumber), 1e-9);
  if (series.length < 2) return "";
  const step = WIDTH / Math.max(MIN_SAMPLES, series.length - 1);
  const start = WIDTH - (series.length - 1) * step;
  return series.map((value, place) => `${place ? "L" : "M"}${(start + place * step).toFixed(1)} ${(HEIGHT - 1 - ((value ?? 0) / top) * (HEIGHT - 3)).toFixed(1)}`).join("");
}
