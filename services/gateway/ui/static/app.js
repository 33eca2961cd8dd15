// Puts the page together: one feed, and everything that shows it.

import { setUpChat, showChat } from "./chat.js";
import { el, keyed, setAttr, setText } from "./dom.js";
import * as format from "./format.js";
import { key } from "./key.js";
import { showNodes } from "./nodes.js";
import { showQueues, showRouting, showTransfers } from "./queues.js";
import { setUpRequests, showRequests } from "./requests.js";
import { StatusFeed } from "./status.js";
import { showTiles } from "./tiles.js";
import { refreshTip } from "./tip.js";

const $ = (id) => document.getElementById(id);
const feed = new StatusFeed(refresh);
let asksForKey = false;
let drawnStatus = null;

function refresh() {
  showLive();
  showNotices();
  document.body.classList.toggle("is-stale", feed.state === "away" || feed.state === "locked");
  document.body.classList.toggle("is-waiting", feed.status === null);
  if (feed.status === null || feed.status === drawnStatus) return;
  drawnStatus = feed.status;
  showFacts(feed.status);
  showTiles(feed);
  showNodes(feed.status);
  showRequests(feed);
  showQueues(feed.status);
  showRouting(feed);
  showTransfers(feed);
  showChat(feed);
  refreshTip();
}

function showFacts({ gateway, model }) {
  const facts = [
    { name: "state", text: format.words(gateway.state), state: gateway.state },
    { name: "model", text: model.names[0] },
    { name: "version", text: `${gateway.id} · v${gateway.version} · up ${format.age(gateway.uptime_seconds)}` },
  ];
  keyed($("facts"), facts, (fact) => fact.name, (fact) => el("span", { class: fact.name }), (node, fact) => {
    setText(node, fact.text);
    if (fact.state) setAttr(node, "data-state", fact.state);
  });
  document.title = gateway.state === "ready" ? `${model.names[0]} · biphase` : `${format.words(gateway.state)} · biphase`;
}

const LIVE = { connecting: "Connecting", live: "Live", away: "No answer", locked: "Locked", paused: "Paused", hidden: "Paused" };

function showLive() {
  setText($("live"), LIVE[feed.state]);
  setAttr($("live"), "data-state", feed.state);
}

function showNotices() {
  const notices = [];
  if (feed.state === "away") notices.push("away");
  if (feed.state === "locked" || asksForKey) notices.push("locked");
  if (feed.status?.gateway.state === "waiting_for_workers" && feed.state !== "away") notices.push("workers");
  if (feed.status?.gateway.state === "draining") notices.push("draining");
  keyed($("notices"), notices, (name) => name, createNotice, updateNotice);
}

function createNotice(name) {
  if (name === "locked") return keyForm();
  const again = name === "away" && el("button", { type: "button", text: "Try now", on: { click: () => feed.wake() } });
  return el("div", { class: name === "away" ? "notice bad" : "notice" }, el("span"), again);
}

function updateNotice(node, name) {
  if (name === "locked") return;
  const texts = {
    away: () => `The gateway does not answer: ${feed.error}. Next try ${feed.running ? "now" : `in ${Math.max(1, Math.round((feed.nextTry - Date.now()) / 1000))} s`}.${feed.status ? " What is shown is what was last known." : ""}`,
    workers: () => "The gateway waits for a decode worker; requests are refused until one is there.",
    draining: () => "The gateway is draining: it ends what is running and takes nothing new.",
  };
  setText(node.firstChild, texts[name]());
}

function keyForm() {
  const input = el("input", { type: "password", id: "key", autocomplete: "off", required: true, "aria-label": "API key" });
  const submit = (event) => {
    event.preventDefault();
    key.set(input.value);
    asksForKey = false;
    feed.state = "connecting";
    feed.wake();
    refresh();
  };
  return el("form", { class: "notice", on: { submit } },
    el("label", { for: "key", text: key.isSet ? "This API key is not accepted." : "This gateway asks for an API key." }),
    input, el("button", { type: "submit", text: "Use it" }), el("span", { class: "note", text: "Kept until this tab is closed." }));
}

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  setAttr(document.documentElement, "data-theme", theme === "auto" ? null : theme);
  setText($("theme"), `Theme: ${theme}`);
  try {
    localStorage.setItem("biphase-theme", theme);
  } catch {
    // It holds for this visit.
  }
}

function storedTheme() {
  try {
    const theme = localStorage.getItem("biphase-theme");
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}

let theme = storedTheme();
setTheme(theme);
$("theme").addEventListener("click", () => setTheme((theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length])));
$("pause").addEventListener("click", () => {
  feed.pause(!feed.paused);
  setAttr($("pause"), "aria-pressed", String(feed.paused));
  setText($("pause"), feed.paused ? "Go on" : "Pause");
});
setUpRequests();
setUpChat(() => {
  asksForKey = true;
  refresh();
});
document.body.classList.add("is-waiting");
// The countdown of a notice.
setInterval(() => feed.state === "away" && showNotices(), 1000);
feed.start();
