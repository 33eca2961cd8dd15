// What a request's timeline is made of: names, colours and sums of its phases. No elements here.

export const PHASES = {
  prepare: { name: "Prepare", lane: 0 },
  queue: { name: "Gateway queue", lane: 0 },
  worker_queue: { name: "Worker queue", lane: 0 },
  fetch: { name: "Prefix fetch", lane: 1 },
  chunk: { name: "Prefill chunk", lane: 0 },
  read: { name: "Transfer", lane: 1 },
  exposed: { name: "Exposed transfer", lane: 0 },
  decode: { name: "Decode", lane: 0 },
  lost: { name: "Lost or retried", lane: 0 },
  handoff: { name: "Hand-off", lane: -1 },
};

/** In the order in which they are painted: what comes later lies above. */
const PAINT = ["lost", "prepare", "queue", "worker_queue", "chunk", "exposed", "decode", "fetch", "read"];

/** The spans to draw; a hand-off only where it failed, as lost time. */
export function drawn(row) {
  const spans = (row.timeline ?? [])
    .map((span) => (span.phase === "handoff" && span.error_code ? { ...span, phase: "lost" } : span))
    .filter((span) => PHASES[span.phase]?.lane >= 0);
  let chunk = 0;
  return spans
    .map((span) => (span.phase === "chunk" ? { ...span, odd: chunk++ % 2 === 1 } : span))
    .sort((a, b) => PAINT.indexOf(a.phase) - PAINT.indexOf(b.phase));
}

export const spansOf = (row, phase) => (row.timeline ?? []).filter((span) => span.phase === phase && !span.error_code);

export const sumOf = (row, phase) => spansOf(row, phase).reduce((sum, span) => sum + span.end - span.start, 0);

/** Workers that failed it, as [node, code]. */
export const losses = (row) => (row.timeline ?? []).filter((span) => span.error_code && span.phase !== "read").map((span) => [span.node, span.error_code]);

/** "active", "failed", "aborted", "retried" (it was moved, or a prefill worker failed it) or "good". */
export function outcome(row) {
  if (!row.finish_reason) return losses(row).length ? "retried active" : "active";
  if (row.finish_reason === "error") return "failed";
  if (row.finish_reason === "abort") return "aborted";
  return row.num_moves || row.num_prefill_failures ? "retried" : "good";
}

/** Where the prompt's tokens came from; empty for a request without a report. */
export function sources(row) {
  if (row.prefill_mode === undefined) return [];
  return [
    ["decode", "cached at decode", row.num_cached_tokens],
    ["prefill", "cached at prefill", row.num_prefill_cached_tokens],
    ["external", "read from a third node", row.num_external_tokens],
    ["computed", "computed", row.num_computed_tokens],
  ].filter(([, , tokens]) => tokens > 0);
}
