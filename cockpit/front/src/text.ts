// Numbers with their units as short texts, as the reports write them.

export const NOTHING = "–";
const LONG = 1e12; // from here on, and under the least step, numbers are told by their power of ten
const LEAST_STEP = 1e-6;

type Unit = readonly [size: number, name: string, least: number];

const SECONDS: Unit[] = [[1, "s", 0], [60, "min", 120], [3600, "h", 7200], [86400, "d", 172800]];
const COUNTS: Unit[] = [[1, "", 0], [1e3, "K", 1e5], [1e6, "M", 1e6], [1e9, "B", 1e9]];
const BYTES: Unit[] = ["B", "kB", "MB", "GB", "TB", "PB"].map((name, i) => [1e3 ** i, name, 1e3 ** i]);

/** Steps between ticks of time that read well in their unit. */
export const SECONDS_STEPS = [
  ...[-6, -5, -4, -3, -2, -1].flatMap((power) => [1, 2, 5].map((m) => m * 10 ** power)),
  ...[1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200],
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map((days) => days * 86400),
];

export type Quantity = "count" | "seconds" | "bytes" | "share";

const known = (value: number | null | undefined): value is number => value !== null && value !== undefined && !Number.isNaN(value);

const unitFor = (largest: number, units: Unit[]): Unit => units.findLast((unit) => largest >= unit[2]) ?? units[0]!;

/** So many significant digits, or all of the whole part: `0.0312`, `4.20`, `1,234`. */
export function numberText(value: number | null | undefined, digits = 3): string {
  if (!known(value)) return NOTHING;
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const magnitude = Math.floor(Math.log10(Math.abs(value)));
  if (magnitude < -4 || Math.abs(value) >= LONG) return value.toExponential(2);
  const decimals = Math.max(0, digits - 1 - magnitude);
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

export const countText = (value: number | null | undefined): string =>
  known(value) ? Math.round(value).toLocaleString("en") : NOTHING;

const withUnit = (value: number | null | undefined, units: Unit[]): string => {
  if (!known(value)) return NOTHING;
  const [size, name] = unitFor(Math.abs(value), units);
  return `${name === "B" ? countText(value) : numberText(value / size)} ${name}`;
};

export const bytesText = (value: number | null | undefined): string => withUnit(value, BYTES);
export const secondsText = (value: number | null | undefined): string => withUnit(value, SECONDS);
export const percentText = (value: number | null | undefined, digits = 2): string =>
  known(value) ? `${(100 * value).toFixed(digits)} %` : NOTHING;

/** A number as short as it goes: `12.3k`. */
export function shortText(value: number | null | undefined): string {
  if (!known(value)) return NOTHING;
  if (Math.abs(value) < 10000) return countText(value);
  return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
}

/** The texts of an axis' ticks, all in one unit, with as many decimals as the step needs. */
export function tickTexts(ticks: number[], quantity: Quantity): string[] {
  const largest = Math.max(...ticks.map(Math.abs), 0);
  const step = ticks.length > 1 ? Math.abs(ticks[1]! - ticks[0]!) : largest;
  const [size, name] = tickUnit(largest, step, quantity);
  if (largest >= LONG * size || (step > 0 && step < LEAST_STEP * size)) {
    const digits = Math.max(0, Math.floor(Math.log10(largest)) - Math.floor(Math.log10(step)));
    return ticks.map((tick) => (tick ? (tick / size).toExponential(Math.min(digits, 15)) : "0") + name);
  }
  let decimals = 0;
  while (decimals < 6 && Math.abs(Math.round((step / size) * 10 ** decimals) / 10 ** decimals - step / size) > (1e-6 * step) / size) decimals += 1;
  return ticks.map((tick) => (tick / size).toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }) + name);
}

function tickUnit(largest: number, step: number, quantity: Quantity): readonly [size: number, ending: string] {
  if (quantity === "share") return [0.01, " %"];
  if (quantity === "count") {
    const [size, name] = largest < LONG ? unitFor(largest, COUNTS) : COUNTS[0]!;
    return [size, name];
  }
  // Five seconds are no round part of a minute: then the whole axis is in seconds.
  const round = ([size, , least]: Unit): boolean => largest >= least && Math.abs((4 * step) / size - Math.round((4 * step) / size)) < 1e-6;
  const [size, name] = quantity === "bytes" ? unitFor(largest, BYTES) : (SECONDS.filter(round).at(-1) ?? SECONDS[0]!);
  return [size, ` ${name}`];
}

export function quantityText(value: number | null | undefined, quantity: Quantity): string {
  if (quantity === "bytes") return bytesText(value);
  if (quantity === "seconds") return secondsText(value);
  if (quantity === "share") return percentText(value);
  return Number.isInteger(value) && Math.abs(value!) < LONG ? countText(value) : numberText(value, 4);
}

/** A metric's value: accuracies, and what else lies from 0 to 1 by its name, in per cent. */
export const isShare = (metric: string): boolean => /accuracy|precision|recall|f1|auc/i.test(metric);
export const metricText = (metric: string, value: number | null | undefined): string =>
  isShare(metric) ? percentText(value) : numberText(value, 4);

/** Unix seconds as a person's date and clock. */
export function momentText(at: number | null | undefined): string {
  if (!known(at)) return NOTHING;
  const moment = new Date(at * 1000);
  const year = moment.getFullYear() === new Date().getFullYear() ? {} : { year: "numeric" as const };
  return moment.toLocaleString(undefined, { day: "numeric", month: "short", ...year, hour: "2-digit", minute: "2-digit", hour12: false });
}

/** What a run is judged by, where that is known yet. */
export const judged = (metric: string | null): string => (metric && metric !== "auto" ? metric : "");

export const words = (name: string): string => name.replaceAll("_", " ");

/** What a run is named in its settings, where its title does not say so: many runs of one file are named alike. */
export const namedText = (run: { title: string; name: string; workload: string }): string => (run.name && run.name !== run.workload && run.name !== run.title ? `${run.name}: ` : "");

export const plural = (count: number, one: string, many = `${one}s`): string => `${countText(count)} ${count === 1 ? one : many}`;
