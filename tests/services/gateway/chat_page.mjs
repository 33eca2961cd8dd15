// Drives the page's chat.js by hand: elements with no more to them than it uses, and a gateway that says what it is told.

import assert from "node:assert";
import { pathToFileURL } from "node:url";

class Element {
  constructor() {
    Object.assign(this, { children: [], handlers: {}, attributes: {}, dataset: {}, textContent: "", value: "" });
    const classes = new Set();
    this.classList = {
      add: (name) => classes.add(name),
      remove: (name) => classes.delete(name),
      toggle: (name, on) => (on ? classes.add(name) : classes.delete(name)),
    };
  }
  setAttribute(name, value) { this.attributes[name] = value; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  addEventListener(name, handler) { this.handlers[name] = handler; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  querySelector() { return this.children.find((child) => child.attributes.class?.startsWith("said")) ?? null; }
  focus() {}
  all() { return [this, ...this.children.flatMap((child) => (typeof child === "string" ? [] : child.all()))]; }
}

const root = new Element();
globalThis.document = {
  createElement: () => new Element(),
  getElementById: (id) => (id === "chat" ? root : new Element()),
  addEventListener() {},
};

// Every request to the gateway, the newest last: what it was sent, and a way to answer.
const asked = [];
globalThis.fetch = async (_, { body, signal }) => {
  const encoder = new TextEncoder();
  let controller;
  const stream = new ReadableStream({ start: (given) => (controller = given) });
  signal.addEventListener("abort", () => controller.error(signal.reason));
  const say = (text) => controller.enqueue(encoder.encode(`data: ${JSON.stringify({ choices: [{ delta: { content: text } }] })}\n\n`));
  asked.push({ messages: JSON.parse(body).messages, say, end: () => controller.close() });
  return { ok: true, body: stream };
};

const { setUpChat } = await import(pathToFileURL(process.argv[2]));
setUpChat(() => {});
const part = (holds) => root.all().find(holds);
const input = part((node) => node.attributes.placeholder);
const send = part((node) => node.attributes.type === "submit");
const form = part((node) => node.handlers.submit);
const begin = part((node) => node.attributes.title === "Forget the conversation");
const settle = () => new Promise((done) => setTimeout(done, 20));

async function ask(text) {
  input.value = text;
  form.handlers.submit({ preventDefault() {} });
  await settle();
  return asked.at(-1);
}

const first = await ask("one");
first.say("an old ans");
await settle();
begin.handlers.click();
await settle();
const second = await ask("two");
assert.deepStrictEqual(second.messages, [{ role: "user", content: "two" }]);
second.say("half");
await settle();
// Asked again at once, while the one that was given up has not ended yet.
begin.handlers.click();
const third = await ask("three");
assert.deepStrictEqual(third.messages, [{ role: "user", content: "three" }]);
assert.strictEqual(send.textContent, "Stop");
third.say("whole");
third.end();
await settle();
assert.strictEqual(send.textContent, "Send");
const fourth = await ask("four");
assert.deepStrictEqual(fourth.messages, [
  { role: "user", content: "three" }, { role: "assistant", content: "whole" }, { role: "user", content: "four" },
]);
fourth.say("part");
await settle();
form.handlers.submit({ preventDefault() {} });
await settle();
assert.strictEqual(send.textContent, "Send");
const fifth = await ask("five");
assert.deepStrictEqual(fifth.messages.slice(-2), [{ role: "assistant", content: "part" }, { role: "user", content: "five" }]);
fifth.end();
