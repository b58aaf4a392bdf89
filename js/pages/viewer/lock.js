/**
 * Keeps local data on this machine. Before the first local file is read, the page gets a second, stricter policy: the
 * browser then refuses every request except to servers that the page already reads from. Policies of a page can only
 * become stricter, so nothing that runs in the page can lift it.
 */

import { InputError } from "../../src/errors.js";

/** The origins that the page reads from. @type {Set<string>} */
const origins = new Set();
let isLocked = false;

/** Forbids requests to other servers from now on. */
export function lock() {
  if (isLocked) return;
  isLocked = true;
  const policy = `connect-src ${[...origins].join(" ") || "'none'"}`;
  const meta = document.createElement("meta");
  meta.httpEquiv = "Content-Security-Policy";
  meta.content = policy;
  document.head.append(meta);
}

/** Admits a server. Raises `InputError` if local files are open. @param {string} origin */
export function admit(origin) {
  if (isLocked && !origins.has(origin)) {
    throw new InputError(
      `${origin}: expected no local files, because a page that has opened some may not ask servers; reload the page`,
    );
  }
  origins.add(origin);
}
