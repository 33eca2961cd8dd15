// Where requests wait, how routing decided, and what moves blocks between nodes.

import { el, keyed, setAttr, setText } from "./dom.js";
import * as format from "./format.js";

const MANY = 12;
const $ = (id) => document.getElementById(id);
let bytesBefore = new Map();
let timeBefore = 0;
let showAllTransfers = false;
let lastFeed = null;

/** Rows of name, bar and amount. */
function meters(root, items, empty) {
  if (!items.length) {
    keyed(root, [{ name: "" }], () => "empty", () => el("p", { class: "empty" }), (node) => setText(node, empty));
    return;
  }
  keyed(root, items, (item) => item.name,
    () => el("div", { class: "meter" }, el("span", { class: "meter-name" }), el("span", { class: "bar" }, el("i")), el("span", { class: "meter-value" }), el("span", { class: "meter-note" })),
    (node, item) => {
      const [name, bar, value, note] = node.children;
      setText(name, item.name);
      bar.firstChild.style.width = `${Math.min(1, item.share || 0) * 100}%`;
      bar.classList.toggle("is-full", Boolean(item.warn));
      setText(value, item.value);
      setText(note, item.note ?? "");
    });
}

export function showQueues(status) {
  const { gateway, nodes } = status;
  const pool = (role) => nodes.filter((node) => node.role === role);
  const sum = (list, pick) => list.reduce((total, node) => total + (pick(node) || 0), 0);
  const items = [
    { name: "Gateway", value: format.count(gateway.waiting), share: gateway.waiting / (gateway.max_waiting || 1),
      warn: gateway.waiting > 0.8 * gateway.max_waiting, note: `of ${format.count(gateway.max_waiting)} that may wait for a place` },
  ];
  const prefill = pool("prefill");
  if (prefill.length) {
    const tokens = sum(prefill, (node) => node.queued_prefill_tokens);
    const speed = sum(prefill, (node) => node.prefill_tokens_per_second);
    items.push({ name: "Prefill", value: format.count(sum(prefill, (node) => node.waiting)), share: speed ? tokens / speed / 5 : 0,
      note: tokens ? `${format.short(tokens)} prompt tokens${speed ? `, ${format.seconds(tokens / speed)} of work` : ""}` : "no prompt waits" });
  }
  const decode = pool("decode");
  const [running, places] = [sum(decode, (node) => node.running), sum(decode, (node) => node.max_running)];
  items.push({ name: "Decode", value: format.count(sum(decode, (node) => node.waiting)), share: places ? running / places : 0,
    warn: places > 0 && running >= places, note: `${format.count(running)} of ${format.count(places)} places in use` });
  const remote = sum(decode, (node) => node.waiting_for_remote_kv);
  items.push({ name: "For blocks", value: format.count(remote), share: places ? remote / places : 0, note: "prompts that are prefilled elsewhere" });
  meters($("queues"), items, "");
}

const REASONS = {
  cheapest: "lowest cost", cached: "a prefix is cached there", no_prefill_worker: "no prefill worker",
  prefill_busy: "prefill pool busy, decode alone", round_robin: "in turn", least_loaded: "least loaded",
};

export const reasonText = (reason) => REASONS[reason] ?? format.words(reason);

export function showRouting(feed) {
  const { status, requests } = feed;
  const decisions = Object.entries(status.routing?.decisions ?? {});
  const total = decisions.reduce((sum, [, number]) => sum + number, 0);
  setText($("routing-note"), total ? `${format.plural(total, "placement")}, policy ${status.routing.policy}` : "");
  const rows = decisions.map(([reason, number]) => ({ name: reasonText(reason), value: format.short(number), share: number / total, note: "" }));
  const modes = new Map();
  for (const row of requests) if (row.prefill_mode) {
    const name = row.prefill_mode === "remote" ? "Prefilled by the pool" : `Prefilled by decode: ${format.words(row.reason)}`;
    modes.set(name, (modes.get(name) ?? 0) + 1);
  }
  for (const [name, number] of modes) rows.push({ name, value: format.count(number), share: number / requests.length, note: "" });
  meters($("routing"), rows, "Nothing has been routed yet.");
}

export function showTransfers(feed) {
  lastFeed = feed;
  const { status, requests } = feed;
  const passed = status.time - timeBefore;
  const seen = new Map();
  const pairs = [];
  for (const node of status.nodes) for (const peer of node.peers ?? []) {
    const name = `${peer.id} ${node.id}`;
    seen.set(name, peer.bytes_read);
    const before = bytesBefore.get(name);
    const speed = before !== undefined && passed > 0 && peer.bytes_read >= before ? (peer.bytes_read - before) / passed : 0;
    pairs.push({ name, from: peer.id, to: node.id, transport: peer.transport, gigabytes: peer.gigabytes_per_second, bytes: peer.bytes_read, speed });
  }
  if (passed > 0) [bytesBefore, timeBefore] = [seen, status.time];
  const exposed = new Map();
  for (const row of requests) if (row.num_transferred_tokens) {
    const name = `${row.prefill_node} ${row.decode_node}`;
    exposed.set(name, [...(exposed.get(name) ?? []), row.exposed_transfer_seconds]);
  }
  for (const pair of pairs) pair.exposed = (exposed.get(pair.name) ?? []).sort((a, b) => a - b);
  pairs.sort((a, b) => b.speed - a.speed || b.bytes - a.bytes || a.name.localeCompare(b.name));
  const all = pairs.reduce((sum, pair) => sum + pair.bytes, 0);
  setText($("transfers-note"), pairs.length ? `${format.plural(pairs.length, "pair")} of nodes, ${format.bytes(all)} read` : "");
  const root = $("transfers");
  if (!pairs.length) {
    meters(root, [], "No blocks have moved between nodes yet.");
    return;
  }
  keyed(root, [{ id: "table" }], (item) => item.id, createTable, (node) => {
    const shown = showAllTransfers ? pairs : pairs.slice(0, MANY);
    keyed(node.firstChild.tBodies[0], shown, (pair) => pair.name, createPair, updatePair);
    const more = node.lastChild;
    more.hidden = pairs.length <= MANY;
    setText(more, showAllTransfers ? `Show the ${MANY} busiest only` : `Show all ${pairs.length}`);
    setAttr(more, "aria-expanded", String(showAllTransfers));
  });
}

const TRANSFER_COLUMNS = ["Route", "Over", "Tested", "Now", "Read", "Exposed p50", "p95"];

function createTable() {
  return el("div", {},
    el("table", { class: "nodes transfers" },
      el("thead", {}, el("tr", {}, TRANSFER_COLUMNS.map((name) => el("th", { scope: "col", text: name })))), el("tbody")),
    el("button", { type: "button", class: "quiet more", on: { click: () => {
      showAllTransfers = !showAllTransfers;
      showTransfers(lastFeed);
    } } }));
}

function createPair(pair) {
  return el("tr", {},
    el("th", { scope: "row", class: "id" }, el("span", { text: pair.from }), el("span", { class: "arrow", text: " → " }), el("span", { text: pair.to })),
    ...TRANSFER_COLUMNS.slice(1).map((name) => el("td", { "data-name": name, class: "number" })));
}

function updatePair(row, pair) {
  const [, over, tested, now, read, median, high] = row.children;
  setText(over, pair.transport);
  setText(tested, pair.gigabytes ? `${format.rate(pair.gigabytes)} GB/s` : "–");
  setText(now, pair.speed ? `${format.bytes(pair.speed)}/s` : "–");
  setText(read, format.bytes(pair.bytes));
  setText(median, format.seconds(format.quantile(pair.exposed, 0.5)));
  setText(high, format.seconds(format.quantile(pair.exposed, 0.95)));
}
