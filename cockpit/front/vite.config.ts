// The build lies in cockpit/static under fixed names and is committed: who installs anabranch needs no node.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, statSync } from "node:fs";
import { join } from "node:path";
import { defineConfig, type Plugin } from "vite";

const BUNDLED = ["preact", "uplot"];
const OF_THE_BUILD = ["index.html", "package-lock.json", "package.json", "src", "tsconfig.json", "vite.config.ts", "vite.report.config.ts"];

const filesOf = (path: string): string[] =>
  statSync(path).isDirectory() ? readdirSync(path).flatMap((name) => filesOf(`${path}/${name}`)) : [path];

// tests/cockpit/test_build.py makes the same sum without node: path, NUL, contents, NUL, in order of the paths.
const sumOfSources = (): string => {
  const sum = createHash("sha256");
  for (const path of OF_THE_BUILD.flatMap(filesOf).sort()) sum.update(`${path}\0`).update(readFileSync(path)).update("\0");
  return sum.digest("hex");
};

const licences = (): string =>
  BUNDLED.map((name) => {
    const folder = join("node_modules", name);
    const told = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    return `${name} ${told.version} (${told.license})\n\n${readFileSync(join(folder, "LICENSE"), "utf8").trim()}\n`;
  }).join(`\n${"-".repeat(72)}\n\n`);

const beside = (): Plugin => ({
  name: "beside-the-bundle",
  generateBundle() {
    this.emitFile({ type: "asset", fileName: "LICENSES.txt", source: licences() });
    this.emitFile({ type: "asset", fileName: "sources.sha256", source: `${sumOfSources()}\n` });
  },
});

export default defineConfig({
  base: "./",
  plugins: [beside()],
  build: {
    outDir: "../static",
    emptyOutDir: true,
    target: "es2022",
    cssTarget: "chrome111",
    modulePreload: false,
    assetsInlineLimit: 0,
    rolldownOptions: {
      output: {
        entryFileNames: "cockpit.js",
        assetFileNames: (asset) => (asset.names[0]?.endsWith(".css") ? "cockpit.css" : "[name][extname]"),
      },
    },
  },
});
