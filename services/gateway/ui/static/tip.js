// One tooltip for the whole page: for what the pointer is over, or what has the keyboard's focus. Escape hides it.

import { el } from "./dom.js";

const box = document.getElementById("tip");
let owner = null;

/** Shows what `content(node)` returns (an element, or null for nothing) while `node` is pointed at or focused. */
export function tip(node, content) {
  node.tipContent = content;
  node.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && show(node, event));
  node.addEventListener("pointermove", (event) => owner === node && place(event.clientX, event.clientY));
  node.addEventListener("pointerleave", () => hide(node));
  node.addEventListener("focus", () => node.matches(":focus-visible") && show(node));
  node.addEventListener("blur", () => hide(node));
}

function show(node, event) {
  const content = node.tipContent(node);
  if (!content) return;
  owner = node;
  box.replaceChildren(content);
  box.hidden = false;
  node.setAttribute("aria-describedby", "tip");
  const at = node.getBoundingClientRect();
  if (event) place(event.clientX, event.clientY);
  else place(at.left + Math.min(at.width / 2, 240), at.bottom - 6);
}

function hide(node) {
  if (owner !== node) return;
  owner = null;
  box.hidden = true;
  node.removeAttribute("aria-describedby");
}

function place(x, y) {
  const { width, height } = box.getBoundingClientRect();
  const left = Math.max(8, Math.min(x + 14, innerWidth - width - 8));
  const top = y + 16 + height > innerHeight - 8 ? Math.max(8, y - height - 12) : y + 16;
  box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

/** Called after each refresh: what the tooltip tells may have changed, or be gone. */
export function refreshTip() {
  if (!owner) return;
  if (!owner.isConnected) hide(owner);
  else box.replaceChildren(owner.tipContent(owner));
}

document.addEventListener("keydown", (event) => event.key === "Escape" && owner && hide(owner));

/** Title, then name and value in two columns. Pairs with an empty value are left out. */
export function figures(title, pairs) {
  const known = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return el("div", {}, el("strong", { text: title }),
    el("dl", {}, known.map(([name, value]) => [el("dt", { text: name }), el("dd", { text: value })])));
}
