/** Numbers as people read them, in the words of the command line. */

export function number(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value; // nan, inf
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3);
  return String(Number(value.toPrecision(4)));
}
export function bytes(count) {
  if (count === null || count === undefined) return "";
  const units = ["B", "KB", "MB", "GB", "TB", "PB", "EB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) { count /= 1000; unit++; }
  return `${unit ? count.toPrecision(3) : count} ${units[unit]}`;
}
export function duration(seconds) {
  if (seconds < 120) return `${number(seconds)} s`;
  if (seconds < 7200) return `${number(seconds / 60)} min`;
  return seconds < 172800 ? `${number(seconds / 3600)} h` : `${number(seconds / 86400)} d`;
}
/** A time of this machine as `treering ls` prints it: 2026-05-01 12:00:00. */
export function when(seconds) {
  if (!seconds) return "";
  const local = new Date(seconds * 1000);
  return new Date(local - local.getTimezoneOffset() * 60_000).toISOString().slice(0, 19).replace("T", " ");
}
export const counted = (count, one, several = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : several}`;
export const percent = (part) => (part === null || part === undefined ? "" : `${number(100 * part)} %`);
export const names = new Intl.Collator("en", { numeric: true });
export const finite = (value) => typeof value === "number" && Number.isFinite(value);
