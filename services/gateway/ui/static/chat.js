// A small chat over POST v1/chat/completions. What was said is kept in this page only.

import { el, setText } from "./dom.js";
import * as format from "./format.js";
import { key } from "./key.js";
import { sources } from "./phases.js";
import { pathText } from "./requests.js";

const root = document.getElementById("chat");
const parts = {};
const messages = [];
// By the id that this page gave the request: where its path is shown.
const awaited = new Map();
let running = null;
// Counts the conversations: an answer that comes late belongs to none that came after its own.
let conversation = 0;
let onLocked = () => {};

export function setUpChat(locked) {
  onLocked = locked;
  parts.model = el("select", { "aria-label": "Model" });
  parts.log = el("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: "0" }, welcome());
  parts.input = el("textarea", { rows: "2", placeholder: "Ask something", "aria-label": "Message", on: { keydown: onKey } });
  parts.send = el("button", { type: "submit", class: "primary", text: "Send" });
  parts.temperature = el("input", { type: "number", min: "0", max: "2", step: "0.1", value: "0" });
  parts.maxTokens = el("input", { type: "number", min: "1", max: "100000", step: "1", value: "256" });
  root.append(
    el("div", { class: "head" }, el("h2", { id: "chat-title", text: "Chat" }), parts.model,
      el("button", { type: "button", class: "quiet", text: "New", title: "Forget the conversation", on: { click: forget } })),
    parts.log,
    el("form", { on: { submit } }, parts.input,
      el("div", { class: "chat-tools" },
        el("label", {}, "Temperature", parts.temperature), el("label", {}, "Max tokens", parts.maxTokens), parts.send)));
}

const welcome = () => el("p", { class: "empty", text: "Ask the model something, and see which way the request takes." });

export function showChat({ status, requests }) {
  const names = status.model.names;
  if (parts.model.dataset.names !== names.join("\n")) {
    const chosen = parts.model.value;
    parts.model.dataset.names = names.join("\n");
    parts.model.replaceChildren(...names.map((name) => el("option", { value: name, text: name })));
    if (names.includes(chosen)) parts.model.value = chosen;
  }
  for (const row of awaited.size ? requests : []) {
    const show = awaited.get(row.client_request_id);
    if (show && awaited.delete(row.client_request_id)) show(row);
  }
}

function onKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit(event);
  }
}

function forget() {
  running?.abort();
  running = null;
  conversation += 1;
  setText(parts.send, "Send");
  messages.length = 0;
  awaited.clear();
  parts.log.replaceChildren(welcome());
  parts.input.focus();
}

function submit(event) {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = parts.input.value.trim();
  if (!text) return;
  parts.input.value = "";
  messages.push({ role: "user", content: text });
  if (!parts.log.querySelector(".said")) parts.log.replaceChildren();
  say("user", text);
  answer();
}

function say(role, text) {
  const body = el("p", { class: "text", text });
  const foot = el("p", { class: "foot" });
  const node = el("div", { class: `said ${role}` }, el("p", { class: "by", text: role === "user" ? "You" : parts.model.value }), body, foot);
  parts.log.append(node);
  parts.log.scrollTop = parts.log.scrollHeight;
  return { node, body, foot };
}

async function answer() {
  const shown = say("assistant", "");
  const asked = [...messages];
  const id = `ui-${[...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  const turn = { text: "", reasoning: "", usage: null, finish: "", started: performance.now(), first: null };
  const own = conversation;
  const control = (running = new AbortController());
  shown.node.classList.add("is-running");
  setText(parts.send, "Stop");
  awaited.set(id, (row) => setText(shown.foot, footer(turn, row)));
  try {
    await stream(id, asked, turn, shown, control.signal);
    if (!turn.text && !turn.reasoning) setText(shown.foot, `The answer is empty (${turn.finish || "no reason given"}).`);
  } catch (error) {
    failed(error, turn, shown);
    if (error instanceof Refused) awaited.delete(id);
  } finally {
    shown.node.classList.remove("is-running");
    if (running === control) {
      running = null;
      setText(parts.send, "Send");
    }
  }
  if (own !== conversation) return;
  if (turn.text) messages.push({ role: "assistant", content: turn.text });
  else messages.pop();
  if (turn.usage) setText(shown.foot, footer(turn, null));
}

async function stream(id, asked, turn, shown, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST", signal, cache: "no-store",
    headers: { "Content-Type": "application/json", "X-Request-Id": id, ...key.headers() },
    body: JSON.stringify({
      model: parts.model.value, messages: asked, stream: true, stream_options: { include_usage: true },
      temperature: Number(parts.temperature.value) || 0, max_tokens: Math.max(1, Number(parts.maxTokens.value) || 256),
    }),
  });
  if (!response.ok) throw new Refused(response.status, await message(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ") && event !== "data: [DONE]") take(JSON.parse(event.slice(6)), turn);
    const end = parts.log.scrollHeight - parts.log.scrollTop - parts.log.clientHeight < 60;
    setText(shown.body, turn.reasoning ? `${turn.reasoning}\n\n${turn.text}` : turn.text);
    if (end) parts.log.scrollTop = parts.log.scrollHeight;
  }
}

function take(chunk, turn) {
  if (chunk.error) throw new Refused(chunk.error.code, chunk.error.message);
  if (chunk.usage) turn.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const text = choice.delta?.content ?? "";
  const reasoning = choice.delta?.reasoning ?? "";
  if ((text || reasoning) && turn.first === null) turn.first = performance.now();
  turn.text += text;
  turn.reasoning += reasoning;
  turn.finish = choice.finish_reason ?? turn.finish;
}

class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

async function message(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP ${response.status}`;
  }
}

function failed(error, turn, shown) {
  const stopped = error.name === "AbortError";
  shown.node.classList.toggle("is-failed", !stopped);
  setText(shown.foot, stopped ? "Stopped." : error instanceof Refused ? error.message : `The gateway does not answer (${error.message}).`);
  if (error instanceof Refused && error.status === 401) onLocked();
  if (!stopped) turn.usage = null;
}

/** What it took; with the request's own record, also the way it went. */
function footer(turn, row) {
  const told = [];
  const usage = turn.usage;
  if (turn.first !== null) told.push(`first token ${format.seconds((turn.first - turn.started) / 1000)}`);
  if (usage) told.push(`${format.count(usage.prompt_tokens_details?.cached_tokens ?? 0)} of ${format.plural(usage.prompt_tokens, "prompt token")} cached`, format.plural(usage.completion_tokens, "token"));
  if (row) {
    told.push(row.transport && row.transport !== "none" ? `${pathText(row)} over ${row.transport}` : pathText(row));
    if (!usage) told.push(...sources(row).map(([, name, tokens]) => `${format.count(tokens)} ${name}`));
    if (row.finish_reason === "abort") told.unshift("Stopped");
  }
  return told.join(" · ");
}
