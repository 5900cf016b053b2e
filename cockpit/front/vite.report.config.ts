// The river of report.html: one script without any library, committed as reports/river.js.
import { defineConfig } from "vite";

export default defineConfig({
  build: {
    outDir: "../../reports",
    emptyOutDir: false,
    copyPublicDir: false,
    target: "es2022",
    lib: { entry: "src/report.ts", formats: ["iife"], name: "river", fileName: () => "river.js" },
  },
});
