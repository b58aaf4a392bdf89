/** The filter of paths. */

// What is typed: parts of paths in any order, with * for anything.
export function matches(path, typed) {
  return typed.toLowerCase().split(/\s+/).filter(Boolean).every((word) => {
    const parts = word.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&"));
    return new RegExp(parts.join(".*")).test(path.toLowerCase());
  });
}
