// Dark or light: as the system has it until somebody says otherwise; what was said is kept.

import { useEffect, useState } from "preact/hooks";

export type Theme = "system" | "light" | "dark";

const KEY = "anabranch.theme";
const THEMES: Theme[] = ["system", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();

function kept(): Theme {
  try {
    const told = localStorage.getItem(KEY) as Theme | null;
    return told && THEMES.includes(told) ? told : "system";
  } catch {
    return "system"; // storage is off: the system's it is
  }
}

let theme = kept();
const root = document.documentElement;

function apply(): void {
  root.dataset.theme = theme === "system" ? (system.matches ? "dark" : "light") : theme;
  for (const listener of listeners) listener();
}

system.addEventListener("change", apply);
apply();

export function setTheme(told: Theme): void {
  theme = told;
  try {
    localStorage.setItem(KEY, told);
  } catch {
    // it holds for this visit
  }
  apply();
}

/** The theme that was asked for, and a number that changes whenever colours do. */
export function useTheme(): { theme: Theme; colours: string; next: Theme } {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = (): void => again((n) => n + 1);
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }, []);
  return { theme, colours: root.dataset.theme ?? "light", next: THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]! };
}
