// One request in full: the tooltip's figures, and the chart by node that a line opens to.

import { el } from "./dom.js";
import * as format from "./format.js";
import { PHASES, drawn, losses, outcome, sources, spansOf, sumOf } from "./phases.js";
import { reasonText } from "./queues.js";
import { figures } from "./tip.js";

/** Pairs of name and text. */
function facts(row) {
  const chunks = spansOf(row, "chunk").length;
  const reads = row.transfer_bytes ?? 0;
  const decode = format.isNumber(row.ttft_seconds) ? row.seconds - row.ttft_seconds : null;
  const speed = decode > 0 && row.num_output_tokens > 1 ? `, ${format.rate((row.num_output_tokens - 1) / decode)} tok/s` : "";
  const waited = sumOf(row, "queue");
  return [
    ["Ended", row.finish_reason ? (row.error_code ? `error: ${format.words(row.error_code)}` : row.finish_reason) : "still running"],
    ["Workers that failed it", losses(row).map(([node, code]) => `${node} (${format.words(code)})`).join(", ")],
    ["Moved", row.num_moves ? format.plural(row.num_moves, "time") : ""],
    ["Prompt", `${format.count(row.num_prompt_tokens)} tokens${sources(row).length ? ": " : ""}${sources(row).map(([, name, tokens]) => `${format.count(tokens)} ${name}`).join(", ")}`],
    ["Output", `${format.count(row.num_output_tokens)} tokens${speed}`],
    ["Path", path(row)],
    ["Routing", row.routing ? reasonText(row.routing.reason) : ""],
    ["Prepare and queue", `${format.seconds(sumOf(row, "prepare"))}, ${format.seconds(waited)}`],
    ["Worker queues", row.worker_queue_seconds !== undefined ? format.seconds(row.worker_queue_seconds) : ""],
    ["Prefill", row.prefill_seconds !== undefined ? `${format.seconds(row.prefill_seconds)}${chunks ? ` in ${format.plural(chunks, "chunk")}` : ""}` : ""],
    ["Transfer", reads ? `${format.bytes(reads)} over ${row.transport}${row.transfer_seconds > 0 ? `, ${format.rate(reads / row.transfer_seconds / 1e9)} GB/s` : ""}` : ""],
    ["Exposed", reads ? format.seconds(row.exposed_transfer_seconds) : ""],
    ["Preemptions", row.num_preemptions ? format.count(row.num_preemptions) : ""],
    ["First token", format.seconds(row.ttft_seconds)],
    ["In all", format.seconds(row.seconds)],
  ];
}

export const summary = (row) => figures(row.request_id, facts(row));

function path(row) {
  if (!row.prefill_mode) return row.routing?.decode ?? "";
  const why = format.words(row.reason);
  return row.prefill_mode === "remote" ? `${row.prefill_node} → ${row.decode_node} (${why})` : `${row.decode_node} alone (${why})`;
}

export function showDetails(row) {
  const numbers = Object.entries(row.routing?.numbers ?? {});
  return el("div", { class: "details" },
    chart(row, row.ttft_seconds ?? row.seconds, outcome(row) === "active" ? "So far" : "Up to the first token"),
    el("div", { class: "detail-columns" },
      figures(row.client_request_id ? `${row.request_id}, the client's ${row.client_request_id}` : row.request_id, facts(row)),
      numbers.length > 0 && figures(`Routing: ${reasonText(row.routing.reason)}`, [
        ["Candidates", row.routing.prefill.join(", ")],
        ...numbers.map(([name, value]) => [format.words(name.replace(/_seconds$/, "")), name.endsWith("_seconds") ? format.seconds(value) : format.short(value)]),
      ])));
}

/** A lane for each node, on one scale from the arrival to `until` seconds. */
function chart(row, until, title) {
  const spans = drawn(row).filter((span) => span.start <= until);
  const nodes = [...new Set(spans.map((span) => span.node ?? "gateway"))].sort((a, b) => (a === "gateway" ? -1 : b === "gateway" ? 1 : first(spans, a) - first(spans, b)));
  const length = until || 1e-9;
  return el("figure", { class: "swim" },
    el("figcaption", { text: `${title}: ${format.seconds(until)}` }),
    nodes.map((node) => el("div", { class: "swim-lane" }, el("span", { class: "swim-name", text: node }),
      el("span", { class: "swim-track" }, spans.filter((span) => (span.node ?? "gateway") === node).map((span) => {
        const bar = el("i", { class: `${span.phase}${span.odd ? " odd" : ""} lane${PHASES[span.phase].lane}`, title: spanText(span) });
        bar.style.left = `${(span.start / length) * 100}%`;
        bar.style.width = `${((Math.min(span.end, until) - span.start) / length) * 100}%`;
        return bar;
      })))));
}

const first = (spans, node) => Math.min(...spans.filter((span) => span.node === node).map((span) => span.start));

function spanText(span) {
  const parts = [`${PHASES[span.phase].name}: ${format.seconds(span.end - span.start)}, from ${format.seconds(span.start)} on`];
  if (span.tokens) parts.push(format.plural(span.tokens, "token"));
  if (span.bytes) parts.push(format.bytes(span.bytes));
  if (span.error_code) parts.push(`ended by: ${format.words(span.error_code)}`);
  return parts.join(", ");
}
