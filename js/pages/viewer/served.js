/** What `treering view` serves next to the page: Python reads every format, and describes it in its words. */

import { SourceError } from "../../src/errors.js";
import { Tensor } from "../../src/tensor.js";

/**
 * Returns the runs of a directory, the steps of a run, or contents.
 *
 * @param {string} run the name of a run in the directory; empty for the path itself
 */
export async function openServed(run) {
  const about = await asked("about.json", { run }).then((answer) => answer.json());
  const step = (row) => ({ name: row.name, row, open: () => servedContents(run, row.name) });
  const refresh = () => openServed(run);
  if (about.runs) return { place: about.path, runs: about.runs, refresh };
  if (about.steps) return { place: about.path, steps: about.steps.map(step), finished: about.finished, refresh };
  return { place: about.path, contents: await servedContents(run, "") };
}

/** @param {string} run @param {string} step @returns {Promise<import("./contents.js").Contents>} */
async function servedContents(run, step) {
  const about = await asked("contents.json", { run, step }).then((answer) => answer.json());
  const leaves = about.leaves.map(({ path, what, nbytes = 0, dtype = "", shape = null, facts = {} }) => {
    const read = async ({ start, stop }) => {
      const box = start.map((first, axis) => `${first}-${stop[axis]}`).join(",");
      const answer = await asked("values", { run, step, leaf: path, box });
      const lengths = start.map((first, axis) => stop[axis] - first);
      return new Tensor(dtype, lengths, new Uint8Array(await answer.arrayBuffer()));
    };
    const value = async () => (await asked("values", { run, step, leaf: path })).text();
    return { path, what, dtype, shape: shape ?? [], nbytes, facts: Object.entries(facts), read: shape && read, value: shape ? null : value };
  });
  return { ...about, step: about.step ?? undefined, facts: [], leaves, notes: [] };
}

/** Asks the server. Raises `SourceError` with its reason. @param {string} name @param {Record<string, string>} fields */
async function asked(name, fields) {
  const url = new URL(name, location.href.replace(/[?#].*/, ""));
  for (const [field, value] of Object.entries(fields)) url.searchParams.set(field, value);
  const answer = await fetch(url, { cache: "no-store" }).catch(() => null);
  if (answer?.ok) return answer;
  const reason = answer ? (await answer.text()).trim() : "treering view: expected an answer, found none. Start the command again";
  throw new SourceError(reason);
}
