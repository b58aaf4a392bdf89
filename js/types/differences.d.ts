import type { OpenOptions } from "./index.js";

/** The option of `open` with which a page reads differences, as in published weights. In Node they are always read. */
export const differences: NonNullable<OpenOptions["differences"]>;
