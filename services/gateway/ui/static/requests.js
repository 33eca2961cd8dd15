// The waterfall: one line per request, its phases on one scale. Three scales: whole requests, up to the first token
// (what a client waits for), and by the clock. A line opens to a chart by node.

import { showDetails, summary } from "./details.js";
import { el, keyed, setAttr, setText } from "./dom.js";
import * as format from "./format.js";
import { PHASES, drawn, outcome, sources } from "./phases.js";
import { tip } from "./tip.js";

const $ = (id) => document.getElementById(id);
const VIEWS = [["whole", "Whole"], ["first", "First token"], ["clock", "By the clock"]];
const MARKS = { good: "✓", active: "●", "retried active": "↻", retried: "↻", failed: "✕", aborted: "■" };
const SAID = { good: "finished", active: "running", "retried active": "running, moved", retried: "finished after a retry", failed: "failed", aborted: "ended by its client" };
const view = { scale: "whole", only: "all", text: "", open: null };
let last = null;

export function setUpRequests() {
  const choices = VIEWS.map(([name, title]) => el("button", { type: "button", "aria-pressed": String(name === view.scale), text: title, on: { click: (event) => {
    view.scale = name;
    for (const button of event.target.parentNode.children) setAttr(button, "aria-pressed", String(button === event.target));
    showRequests(last);
  } } }));
  $("requests-tools").append(
    el("div", { class: "segmented", role: "group", "aria-label": "Scale" }, choices),
    el("select", { "aria-label": "Which requests", on: { change: (event) => (view.only = event.target.value, showRequests(last)) } },
      [["all", "All"], ["trouble", "Failed or retried"], ["remote", "Handed over"], ["local", "Prefilled by decode"]].map(([value, text]) => el("option", { value, text }))),
    el("input", { type: "search", placeholder: "Id or node", "aria-label": "Filter by request id or node", on: { input: (event) => (view.text = event.target.value.trim().toLowerCase(), showRequests(last)) } }));
  $("legend").append(...Object.entries(PHASES).filter(([, phase]) => phase.lane >= 0).map(([name, phase]) => el("li", {}, el("i", { class: `swatch ${name}` }), phase.name)),
    el("li", {}, el("i", { class: "swatch first" }), "First token"),
    el("li", { class: "apart" }, "Prompt:", el("i", { class: "swatch cached" }), "cached"),
    el("li", {}, el("i", { class: "swatch fetch" }), "fetched"), el("li", {}, el("i", { class: "swatch chunk" }), "computed"));
  $("waterfall").append(el("div", { class: "axis", "aria-hidden": "true" }, el("span"), el("div", { class: "ticks" }), el("span")), el("ol", { class: "rows" }), el("p", { class: "empty" }));
  $("waterfall").children[1].addEventListener("keydown", walk);
}

/** Arrow keys go from line to line; one of them is in the order of the Tab key. */
function walk(event) {
  const lines = [...event.currentTarget.querySelectorAll(".line")];
  const at = lines.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: lines.length - 1 }[event.key];
  if (at < 0 || to === undefined || !lines[to]) return;
  event.preventDefault();
  lines[at].tabIndex = -1;
  lines[to].tabIndex = 0;
  lines[to].focus();
}

const identity = (row) => row.request_id;

function wanted(row) {
  const kind = outcome(row);
  if (view.only === "trouble" && ["good", "active"].includes(kind)) return false;
  if (["remote", "local"].includes(view.only) && row.prefill_mode !== view.only) return false;
  return !view.text || [row.request_id, row.client_request_id, row.prefill_node, row.decode_node, row.routing?.decode].some((name) => name?.toLowerCase().includes(view.text));
}

export function showRequests(feed) {
  if (!feed?.status) return;
  last = feed;
  const now = feed.status.time;
  const active = [...(feed.status.active ?? [])].reverse();
  const all = [...active, ...feed.requests];
  let rows = all.filter(wanted).slice(0, 200);
  if (view.scale === "clock") rows = lately(rows);
  setText($("requests-note"), all.length ? `${rows.length === all.length ? format.plural(all.length, "request") : `${rows.length} of ${format.plural(all.length, "request")}`}, newest first` : "");
  const [axis, list, empty] = $("waterfall").children;
  setAttr($("waterfall"), "data-scale", view.scale);
  axis.hidden = !rows.length;
  empty.hidden = rows.length > 0;
  $("legend").hidden = !all.length;
  setText(empty, all.length ? "No request fits the filter." : "No request yet. Ask something in the chat, or send one to /v1/chat/completions.");
  const scale = scaleOf(rows, now);
  showAxis(axis.children[1], scale);
  keyed(list, rows, identity, createRow, (node, row) => updateRow(node, row, scale, now));
  const lines = [...list.querySelectorAll(".line")];
  if (lines.length && !lines.some((line) => line.tabIndex === 0)) lines[0].tabIndex = 0;
}

/** Those that were there in the last while before the newest ended: enough for a dozen of a usual length. */
function lately(rows) {
  const usual = format.quantile(rows.map((row) => row.seconds).sort((a, b) => a - b), 0.5) ?? 0;
  const until = Math.max(...rows.map(endOf));
  return rows.filter((row) => endOf(row) >= until - Math.max(5, 12 * usual));
}

const endOf = (row) => row.arrival_time + row.seconds;

/** `from` and `length` in seconds: of the clock, or of each request's own time. */
function scaleOf(rows, now) {
  if (view.scale === "clock") {
    const from = Math.min(...rows.map((row) => row.arrival_time), now);
    const until = Math.max(...rows.map(endOf), from + 0.1);
    return { clock: true, from, length: until - from, now };
  }
  const lengths = rows.map((row) => (view.scale === "first" ? (row.ttft_seconds ?? row.seconds) : row.seconds)).sort((a, b) => a - b);
  const longest = lengths.at(-1) ?? 1;
  // A few that are far longer than the rest run out of the picture: they shall not press all others together.
  const most = (format.quantile(lengths, 0.9) ?? 1) * 1.6;
  return { clock: false, from: 0, length: Math.max(0.005, longest > 2 * most ? most : longest) * 1.02, now };
}

function showAxis(node, scale) {
  const step = niceStep(scale.length / Math.max(2, Math.min(8, node.clientWidth / 90)));
  const ticks = [];
  for (let at = 0; at < scale.length * 0.95; at += step) ticks.push(at);
  const offset = scale.clock ? scale.length % step : 0;
  keyed(node, ticks, (at) => at, () => el("span"), (tick, at) => {
    tick.style.left = `${((at + offset) / scale.length) * 100}%`;
    setText(tick, !scale.clock ? (at === 0 ? "0" : tickText(at, step)) : `−${format.age(scale.length - at - offset)}`);
  });
}

const tickText = (at, step) => (step < 1 ? `${Math.round(at * 1000).toLocaleString("en-US")} ms` : format.span(at));

function niceStep(rough) {
  for (const minutes of [60, 120, 300, 600, 1800, 3600]) if (rough > 30 && rough <= minutes) return minutes;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
}

function createRow(row) {
  const line = el("button", { type: "button", class: "line", tabindex: "-1", "aria-expanded": "false", on: { click: () => toggle(row.request_id) } },
    el("span", { class: "mark" }),
    el("span", { class: "who" }, el("span", { class: "when" }), el("span", { class: "tokens" }), el("span", { class: "mix" }), el("span", { class: "path" })),
    el("span", { class: "track" }, el("span", { class: "span-box" })),
    el("span", { class: "total" }));
  const node = el("li", {}, line);
  tip(line, () => (view.open === row.request_id ? null : summary(node.row)));
  return node;
}

function toggle(id) {
  view.open = view.open === id ? null : id;
  showRequests(last);
}

function updateRow(node, row, scale, now) {
  const line = node.firstChild;
  const [mark, who, track, total] = line.children;
  const kind = outcome(row);
  const fresh = node.row?.timeline !== row.timeline;
  node.row = row;
  if (fresh) {
    setAttr(node, "class", kind);
    setText(mark, MARKS[kind]);
    setText(who.children[1], `${format.short(row.num_prompt_tokens)} → ${format.short(row.num_output_tokens)}`);
    const known = sources(row);
    who.children[2].replaceChildren(...known.map(([name, , tokens]) => {
      const part = el("i", { class: name });
      part.style.flexGrow = String(tokens);
      return part;
    }));
    setText(who.children[3], row.error_code ? format.words(row.error_code) : pathText(row));
    setAttr(line, "aria-label", `${SAID[kind]}, ${row.num_prompt_tokens} prompt tokens, ${row.num_output_tokens} output tokens, ${pathText(row)}, first token after ${format.seconds(row.ttft_seconds)}, ${format.seconds(row.seconds)} in all`);
    paint(track.firstChild, row);
  }
  setText(total, format.seconds(view.scale === "first" ? row.ttft_seconds : row.seconds));
  setText(who.children[0], row.finish_reason ? format.age(now - row.arrival_time - row.seconds) : "now");
  const box = track.firstChild;
  const start = scale.clock ? row.arrival_time - scale.from : 0;
  box.style.left = `${(start / scale.length) * 100}%`;
  box.style.width = `max(2px, ${(row.seconds / scale.length) * 100}%)`;
  track.classList.toggle("is-cut", row.seconds > scale.length * 1.001 && view.scale === "whole");
  const isOpen = view.open === row.request_id;
  setAttr(line, "aria-expanded", String(isOpen));
  if (isOpen && (fresh || !node.children[1])) {
    node.children[1]?.remove();
    node.append(showDetails(row));
  } else if (!isOpen) node.children[1]?.remove();
}

export function pathText(row) {
  const decode = row.decode_node ?? row.routing?.decode;
  if (!decode) return row.finish_reason ? "no worker" : "waits for a worker";
  const prefill = row.prefill_mode ? row.prefill_node : row.routing?.prefill?.[0];
  return prefill && prefill !== decode ? `${prefill} → ${decode}` : decode;
}

/** The phases, as parts of the request's own length. */
function paint(box, row) {
  const length = row.seconds || 1e-9;
  const parts = drawn(row).map((span) => {
    const part = el("i", { class: `${span.phase}${span.odd ? " odd" : ""} lane${PHASES[span.phase].lane}` });
    part.style.left = `${(span.start / length) * 100}%`;
    part.style.width = `${((span.end - span.start) / length) * 100}%`;
    return part;
  });
  if (format.isNumber(row.ttft_seconds)) {
    const first = el("i", { class: "first" });
    first.style.left = `${(row.ttft_seconds / length) * 100}%`;
    parts.push(first);
  }
  box.replaceChildren(...parts);
}
