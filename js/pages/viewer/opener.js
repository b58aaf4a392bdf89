/** The ways to open something: files, a folder, a URL, a drop. */

import { el } from "../parts/elements.js";
import { admit, lock } from "./lock.js";
import { droppedFiles, fileSource, urlSource } from "./sources.js";

/**
 * Returns the form. `onOpen` gets a promise of a source, or of a URL.
 *
 * @param {string} title
 * @param {(opened: Promise<{source?: any, url?: string}>) => void} onOpen
 */
export function opener(title, onOpen) {
  const pick = (attributes, text) => {
    const input = el("input", { type: "file", hidden: "", ...attributes, onchange: () => {
      const files = Array.from(input.files, (file) => [file.webkitRelativePath || file.name, file]);
      if (files.length) onOpen(openFiles(files));
      input.value = ""; // so that the same file can be picked again
    } });
    return [el("button", { type: "button", class: "act", onclick: () => input.click() }, text), input];
  };
  const url = el("input", { type: "url", placeholder: "https://…/step-00001000 or ….safetensors", "aria-label": `URL: ${title}` });
  const form = el("form", { class: "controls", onsubmit: (event) => {
    event.preventDefault();
    if (url.value.trim()) onOpen(Promise.resolve({ url: url.value.trim() }));
  } }, pick({ multiple: "" }, "Files…"), pick({ webkitdirectory: "" }, "Folder…"), url, el("button", { class: "act" }, "Open URL"));
  const zone = el("section", { class: "opener", "aria-label": title }, el("p", {}, title), form);
  acceptDrops(zone, onOpen);
  return zone;
}

/** Opens what is dropped on an element. @param {HTMLElement} node @param {(opened: Promise<any>) => void} onOpen */
export function acceptDrops(node, onOpen) {
  const mark = (event, isOver) => {
    event.preventDefault();
    event.stopPropagation();
    node.classList.toggle("over", isOver);
  };
  node.addEventListener("dragover", (event) => mark(event, true));
  node.addEventListener("dragleave", (event) => mark(event, false));
  node.addEventListener("drop", (event) => {
    mark(event, false);
    onOpen(droppedFiles(event.dataTransfer).then(openFiles));
  });
}

/** @param {[string, File][]} files */
async function openFiles(files) {
  lock();
  return { source: fileSource(files) };
}

/** Opens a folder or a file on a server. @param {string} text */
export async function openUrl(text) {
  const found = urlSource(text);
  admit(new URL(found.source.place).origin);
  return found;
}
