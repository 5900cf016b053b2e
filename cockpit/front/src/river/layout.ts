// Where things stand: the channel in the middle, lanes above and under it in turn, as arms of a river.

import { SECONDS_STEPS } from "../text";
import type { By, RiverModel, Thread } from "./model";

export interface Window {
  from: number;
  to: number;
}

export interface Layout {
  width: number;
  height: number;
  left: number; // pixels of the names of lanes
  right: number;
  middle: number;
  spacing: number;
  named: boolean;
  lanes: number[]; // y by lane
  x: (at: number) => number;
  at: (x: number) => number;
  halfWidth: (at: number) => number; // of the channel, pixels
}

export const AXIS_PX = 26;
const EDGE_PX = 10;
const NAMED_FROM_PX = 11;
const CHANNEL_LEAST_PX = 5;
const UNDER = 0.4; // of the channel's half width: a thread begins and ends under the water

export function layout(model: RiverModel, by: By, view: Window, width: number, height: number): Layout {
  const sides = Math.max(1, Math.ceil(model.lanes.length / 2));
  const body = height - AXIS_PX;
  const single = model.lanes.length === 1;
  const middle = single ? body * 0.76 : body / 2;
  const channel = Math.min(30, Math.max(10, body * 0.055)); // the greatest half width
  const gap = channel + Math.min(46, Math.max(10, body * 0.05));
  const spacing = Math.min(104, (middle - gap - EDGE_PX) / Math.max(1, sides - 0.5));
  const named = spacing >= NAMED_FROM_PX;
  const left = named ? (width < 560 ? 68 : Math.min(150, 20 + 7 * Math.max(4, ...model.lanes.map((name) => name.length)))) : 12;
  const right = 16;
  const places = model.lanes.map((_, i) => middle + (i % 2 ? 1 : -1) * (single ? middle - EDGE_PX - 6 : gap + (i >> 1) * spacing));
  const lanes = model.lanes.map((_, lane) => places[model.place[lane] ?? lane]!);
  const scale = (width - left - right) / Math.max(1e-9, view.to - view.from);
  const most = Math.max(1e-9, ...model.rates.map(([, rate]) => rate));
  const flows = model.rates.length > 0;
  return {
    width,
    height,
    left,
    right,
    middle,
    spacing,
    named,
    lanes,
    x: (at) => left + (at - view.from) * scale,
    at: (x) => view.from + (x - left) / scale,
    halfWidth: (at) => {
      if (!flows) return channel / 2;
      const t = by === "time" ? at : model.timeOf(at);
      return CHANNEL_LEAST_PX + (channel - CHANNEL_LEAST_PX) * Math.min(1, model.rateAt(t) / most);
    },
  };
}

/** The shape of a thread on the screen. `bend`: how wide its two curves are. */
export interface Shape {
  start: number;
  end: number;
  out: number; // y where it leaves
  lane: number;
  back: number; // y where it comes back
  bend: number;
  closed: boolean; // does it come back?
}

export function shape(model: RiverModel, by: By, at: Layout, thread: Thread, now: number): Shape {
  const [from, to] = model.span(thread, by, now);
  const start = at.x(from);
  const end = at.x(to);
  const lane = at.lanes[thread.lane] ?? at.middle;
  const side = lane < at.middle ? -1 : 1;
  const rise = Math.abs(lane - at.middle);
  const closed = thread.verdict === "applied" || thread.verdict === "held" || thread.verdict === "rejected";
  return {
    start,
    end,
    out: at.middle + side * at.halfWidth(from) * UNDER,
    lane,
    back: at.middle + side * (thread.verdict === "rejected" ? at.halfWidth(to) + 9 : at.halfWidth(to) * UNDER),
    bend: Math.max(1, Math.min((end - start) * (closed ? 0.44 : 0.7), 24 + rise * 0.5)),
    closed,
  };
}

/** The y of a thread at an x of the screen, near enough for a pointer. */
export function heightAt(s: Shape, x: number): number {
  const ease = (share: number): number => share * share * (3 - 2 * share);
  if (x < s.start + s.bend) return s.out + (s.lane - s.out) * ease(Math.max(0, (x - s.start) / s.bend));
  if (s.closed && x > s.end - s.bend) return s.back + (s.lane - s.back) * ease(Math.max(0, (s.end - x) / s.bend));
  return s.lane;
}

const ROUND = [1, 2, 2.5, 5, 10];

/** Round ticks over a range, at most about so many; whole ones for versions. */
export function ticks(view: Window, about: number, whole: boolean): number[] {
  const raw = Math.max((view.to - view.from) / Math.max(1, about), whole ? 1 : 1e-9);
  const power = 10 ** Math.floor(Math.log10(raw));
  const rounds = whole ? ROUND.map((r) => r * power).filter(Number.isInteger) : SECONDS_STEPS;
  const step = rounds.find((s) => s >= raw * (1 - 1e-9)) ?? 10 * power;
  const found: number[] = [];
  for (let tick = Math.ceil(view.from / step - 1e-9) * step; tick <= view.to + 1e-9 * step; tick += step) found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  return found;
}
