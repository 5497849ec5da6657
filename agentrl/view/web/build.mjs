// Bundles the page into ../page: app.js, app.css, LICENSES.txt. `npm ci && npm run build`.

import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const names = [...readdirSync("src").sort().map((name) => `src/${name}`), "build.mjs", "package-lock.json"];
const hash = createHash("sha256");
for (const name of names) hash.update(name).update("\0").update(readFileSync(name)).update("\0");
const banner = `/* agentrl view; made from agentrl/view/web by npm run build; sources sha256 ${hash.digest("hex")}; licences: LICENSES.txt */`;

await build({
  entryPoints: { app: "src/main.js" },
  outdir: "../page",
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome111", "firefox113", "safari16.4"],
  charset: "ascii",
  legalComments: "none",
  banner: { js: banner },
});
await build({ entryPoints: { app: "src/style.css" }, outdir: "../page", bundle: true, minify: true, banner: { css: banner } });

const licences = ["preact", "htm", "uplot", "highlight.js"].map((name) => {
  const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`));
  return `${name} ${version} (${license})\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`;
});
writeFileSync("../page/LICENSES.txt", licences.join(`\n${"-".repeat(80)}\n\n`));
