// Every node, by pool. A large pool shows a map of all its nodes and those that need a look; the rest on demand.

import { el, keyed, setAttr, setText } from "./dom.js";
import * as format from "./format.js";
import { figures, tip } from "./tip.js";

const root = document.getElementById("nodes");
const note = document.getElementById("nodes-note");
const ROLES = [["prefill", "Prefill"], ["decode", "Decode"], ["kvstore", "Block store"], ["", "Not identified"]];
const COLUMNS = ["Node", "State", "Running", "Waiting", "Blocks", "Hits", "Speed", "Up"];
const FEW = 8;
const SHOWN_OF_MANY = 6;
const open = new Set();
let last = null;

export function showNodes(status) {
  last = status;
  const nodes = status.nodes;
  const ready = nodes.filter((node) => node.state === "ready").length;
  setText(note, nodes.length ? `${ready} of ${format.plural(nodes.length, "node")} ready` : "");
  const pools = ROLES.map(([role, title]) => ({ role, title, nodes: nodes.filter((node) => known(node.role) === role) }))
    .filter((pool) => pool.nodes.length);
  keyed(root, pools.length ? pools : [{ role: "none" }], (pool) => pool.role, createPool, updatePool);
}

const known = (role) => (ROLES.some(([name]) => name === role) ? role : "");

function createPool(pool) {
  if (pool.role === "none") {
    return el("p", { class: "empty", text: "No worker is known yet. They appear here when they register, or when the gateway is started with --decode-nodes and --prefill-nodes." });
  }
  const more = el("button", { type: "button", class: "quiet more", on: { click: () => {
    if (!open.delete(pool.role)) open.add(pool.role);
    showNodes(last);
  } } });
  return el("section", { class: "pool", "aria-label": `${pool.title} nodes` },
    el("div", { class: "pool-head" }, el("h3", { text: pool.title }), el("p", { class: "note" })),
    el("div", { class: "map" }),
    el("table", { class: "nodes" },
      el("thead", {}, el("tr", {}, COLUMNS.map((name) => el("th", { scope: "col", text: name })))),
      el("tbody")),
    more);
}

function updatePool(node, pool) {
  if (pool.role === "none") return;
  const [head, map, table, more] = node.children;
  setText(head.children[1], summary(pool));
  const many = pool.nodes.length > FEW;
  map.hidden = !many;
  if (many) keyed(map, pool.nodes, identity, createCell, updateCell);
  const all = !many || open.has(pool.role);
  const rows = all ? pool.nodes : [...pool.nodes].sort((a, b) => attention(b) - attention(a)).slice(0, SHOWN_OF_MANY);
  keyed(table.tBodies[0], rows, identity, createRow, updateRow);
  more.hidden = !many;
  setText(more, all ? `Show the ${SHOWN_OF_MANY} busiest only` : `Show all ${pool.nodes.length}`);
  setAttr(more, "aria-expanded", String(all));
}

const identity = (node) => `${node.id}/${node.address}`;
const usedShare = (node) => (node.blocks.total ? node.blocks.used / node.blocks.total : 0);
const attention = (node) => (node.state === "ready" ? 0 : 1000) + node.waiting + node.running + usedShare(node);

function summary({ role, nodes }) {
  const sum = (pick) => nodes.reduce((total, node) => total + (pick(node) || 0), 0);
  const parts = [format.plural(nodes.length, "node")];
  const notReady = nodes.filter((node) => node.state !== "ready").length;
  if (notReady) parts.push(`${notReady} not ready`);
  if (role !== "kvstore") parts.push(`${format.count(sum((node) => node.running))} running`, `${format.count(sum((node) => node.waiting))} waiting`);
  const total = sum((node) => node.blocks.total);
  if (total) parts.push(`${format.percent(sum((node) => node.blocks.used) / total)} of blocks used`);
  if (role === "prefill") parts.push(`${format.short(sum((node) => node.prefill_tokens_per_second))} tok/s`);
  return parts.join(" · ");
}

function createCell(node) {
  const cell = el("button", { type: "button", class: "cell", tabindex: "-1" });
  cell.data = node;
  tip(cell, (owner) => details(owner.data));
  return cell;
}

function updateCell(cell, node) {
  cell.data = node;
  cell.style.setProperty("--share", `${Math.round(Math.max(usedShare(node), load(node)) * 100)}%`);
  setAttr(cell, "data-state", node.state);
  setAttr(cell, "aria-label", `${node.id}: ${format.words(node.state)}, ${format.percent(usedShare(node))} of blocks used, ${node.running} running, ${node.waiting} waiting`);
}

const load = (node) => (node.max_running ? Math.min(1, node.running / node.max_running) : 0);

function createRow(node) {
  const row = el("tr", { tabindex: "0" },
    el("th", { scope: "row", class: "id" }),
    el("td", {}, el("span", { class: "state" })),
    ...COLUMNS.slice(2).map((name) => el("td", { "data-name": name, class: "number" }, el("span", { class: "amount" }), ["Running", "Blocks"].includes(name) && el("span", { class: "bar" }, el("i"), el("i")))));
  row.data = node;
  tip(row, (owner) => details(owner.data));
  return row;
}

function updateRow(row, node) {
  row.data = node;
  const [id, state, running, waiting, blocks, hits, speed, up] = row.children;
  setText(id, node.id || node.address);
  setText(state.firstChild, format.words(node.state));
  setAttr(state.firstChild, "data-state", node.state);
  const store = node.role === "kvstore";
  amount(running, store ? "" : format.count(node.running), load(node));
  amount(waiting, store ? "" : format.count(node.waiting + node.waiting_for_remote_kv));
  waiting.classList.toggle("is-warn", node.waiting > 0);
  const cached = node.blocks.total ? node.blocks.cached / node.blocks.total : 0;
  amount(blocks, node.blocks.total ? `${format.short(node.blocks.used)} / ${format.short(node.blocks.total)}` : "", usedShare(node), cached);
  amount(hits, store ? "" : format.percent(hitRate(node)));
  amount(speed, speedOf(node));
  amount(up, format.age(node.uptime_seconds));
}

function amount(cell, text, share = 0, second = 0) {
  setText(cell.firstChild, text);
  const bar = cell.children[1];
  if (!bar) return;
  bar.hidden = text === "";
  bar.children[0].style.width = `${share * 100}%`;
  bar.children[1].style.width = `${second * 100}%`;
  bar.classList.toggle("is-full", share > 0.9);
}

const hitRate = (node) => (node.prefix_cache_queries_tokens ? node.prefix_cache_hits_tokens / node.prefix_cache_queries_tokens : null);

function speedOf(node) {
  if (node.role === "decode" && node.decode_step_seconds) return `${format.seconds(node.decode_step_seconds)}/step`;
  if (node.prefill_tokens_per_second) return `${format.short(node.prefill_tokens_per_second)} tok/s`;
  return node.role === "kvstore" ? "" : "–";
}

function details(node) {
  const { blocks } = node;
  return figures(node.id || node.address, [
    ["State", node.refused ? `refused: ${node.refused}` : format.words(node.state)],
    ["Address", node.address],
    ["Process", node.pid ? `${node.pid}, version ${node.version}, up ${format.span(node.uptime_seconds)}` : ""],
    ["Running", node.max_running && node.role !== "kvstore" ? `${format.count(node.running)} of ${format.count(node.max_running)}` : ""],
    ["Waiting", node.role === "kvstore" ? "" : `${format.count(node.waiting)}, ${format.count(node.waiting_for_remote_kv)} for blocks`],
    ["Prompt tokens queued", node.queued_prefill_tokens ? format.count(node.queued_prefill_tokens) : ""],
    ["Blocks", blocks.total ? `${format.count(blocks.used)} used, ${format.count(blocks.cached)} cached of ${format.count(blocks.total)}` : ""],
    ["Leased, draining", blocks.total ? `${format.count(blocks.leased)}, ${format.count(blocks.draining)}` : ""],
    ["Cache hits", node.prefix_cache_queries_tokens ? `${format.short(node.prefix_cache_hits_tokens)} of ${format.short(node.prefix_cache_queries_tokens)} tokens` : ""],
    ["Prefill", node.prefill_tokens_per_second ? `${format.count(node.prefill_tokens_per_second)} tokens/s` : ""],
    ["Decode step", node.decode_step_seconds ? format.seconds(node.decode_step_seconds) : ""],
    ["Preemptions", node.preemptions ? format.count(node.preemptions) : ""],
    ["KV cache", node.kv_dtype ? `${node.kv_dtype}, ${node.block_size} tokens a block` : ""],
    ...Object.entries(node.counters ?? {}).filter(([, value]) => value).slice(0, 12).map(([name, value]) => [format.words(name), format.short(value)]),
  ]);
}
