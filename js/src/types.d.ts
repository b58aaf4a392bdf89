/** Types that contain themselves, which JSDoc cannot say. */

import type { Float } from "./float.js";

/** A JSON value of the format: see `json.js`. */
export type Json = null | boolean | number | bigint | string | Float | Json[] | Map<string, Json>;

/** A key of a container. A tuple is a list. */
export type Key = string | boolean | number | bigint | Float | Uint8Array | readonly Key[];
