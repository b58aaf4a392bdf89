/** Builds `cjs`, the package for CommonJS, of the modules in `src`: `npm` runs it before it packs or links the package. */

import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const root = dirname(fileURLToPath(import.meta.url));
const target = join(root, "cjs");

/** The modules use few forms of import and export; any other is an error. */
function commonJs(text, file) {
  const late = [];
  const body = text
    .replace(/^import \{([^}]*)\} from ("[^"]+");$/gm, (_, names, from) => {
      return `const {${names.replace(/ as /g, ": ")}} = require(${from});`;
    })
    .replace(/^export \{([^}]*)\} from ("[^"]+");$/gm, (_, names, from) => {
      const list = names.split(",").map((name) => name.trim());
      return `({ ${list.filter(Boolean).map((name) => `${name}: exports.${name}`)} } = require(${from}));`;
    })
    .replace(/^export \* from ("[^"]+");$/gm, "Object.assign(exports, require($1));")
    .replace(/^export ((?:async )?(?:function\*?|class|const) (\w+))/gm, (_, head, name) => {
      late.push(`exports.${name} = ${name};\n`);
      return head;
    })
    .replace(/^export \{\};$/gm, "");
  const odd = /^(?:import|export)\b.*|\bimport\.meta\b|\bimport\(.*(?<!\*\/)$/m.exec(
    body.replace(/\/\*\*[^]*?\*\//g, ""),
  );
  if (odd) throw new Error(`${file}: expected imports and exports of names, found ${odd[0]}`);
  return `"use strict";\n${body}${late.join("")}`;
}

if (process.argv[2] === "wasm") {
  const { default: load } = await import("wabt");
  const text = readFileSync(join(root, "src", "xxh3.wat"), "utf8");
  const { buffer } = (await load()).parseWat("xxh3.wat", text, { simd: true }).toBinary({});
  const code = Buffer.from(buffer).toString("base64");
  const about = "/** The WebAssembly of `xxh3.wat`, in base64: `npm run wasm` makes this module. */";
  writeFileSync(join(root, "src", "xxh3_wasm.js"), `${about}\n\nexport const WASM =\n  "${code}";\n`);
}

rmSync(target, { recursive: true, force: true });
for (const name of readdirSync(join(root, "src"), { recursive: true })) {
  if (!name.endsWith(".js")) continue;
  mkdirSync(dirname(join(target, name)), { recursive: true });
  writeFileSync(join(target, name), commonJs(readFileSync(join(root, "src", name), "utf8"), name));
}
cpSync(join(root, "types"), target, { recursive: true });
writeFileSync(join(target, "package.json"), '{ "type": "commonjs" }\n');
