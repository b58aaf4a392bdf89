/** Elements. Text from a file is only ever set as text. */

export function add(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
export const el = (tag, attributes = {}, ...children) => add(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  add(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

/** Returns a text in which every control character and change of direction shows as its number. @param {string} text */
export function printable(text) {
  return text.replace(/[\p{C}\u2028\u2029]/gu, (one) => `\\u{${one.codePointAt(0).toString(16)}}`);
}
