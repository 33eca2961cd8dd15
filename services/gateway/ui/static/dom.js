// Elements, made from data. Text goes in as text nodes only: nothing that a server or a model says can become HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: class, text, on: {event: handler}, and attributes by name; null and false are left out. */
export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "class") node.setAttribute("class", value);
    else if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Sets text only where it differs, so that a selection in it survives a refresh. */
export function setText(node, text) {
  const wanted = text === null || text === undefined ? "" : String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setAttr(node, name, value) {
  if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** One child per item, in order; a child whose key is there already is kept and updated. */
export function keyed(parent, items, key, create, update) {
  const known = parent.keyedChildren ?? (parent.keyedChildren = new Map());
  const wanted = new Set();
  let place = parent.firstChild;
  for (const item of items) {
    const id = key(item);
    if (wanted.has(id)) continue;
    wanted.add(id);
    let node = known.get(id);
    if (!node) known.set(id, (node = create(item)));
    update(node, item);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  }
  for (const [id, node] of known) {
    if (wanted.has(id)) continue;
    known.delete(id);
    node.remove();
  }
}
