// The colours of the style sheet, as the theme of now has them: for what is drawn on a canvas.

const root = document.documentElement;

/** A colour of style.css by its name, as the theme of now has it. */
export const colour = (name: string): string => getComputedStyle(root).getPropertyValue(`--${name}`).trim();

export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

const STEPS = 7;

/** The scale of staleness, from fresh to stale, of the theme of now. */
export const stalenessScale = (): string[] => Array.from({ length: STEPS }, (_, i) => colour(`stale-${i}`));

/** Where a staleness stands on the scale. By the root: most updates are nearly fresh, a few very old. */
export const stalenessStep = (staleness: number, largest: number): number =>
  Math.min(STEPS - 1, Math.floor(Math.sqrt(staleness / Math.max(1, largest)) * (STEPS - 1) + 0.5));
