// Which part of the river is shown, and what of it is under a pointer.

import { heightAt, shape, type Layout, type Window } from "./layout";
import type { By, RiverModel, Thread } from "./model";
import type { Pointer } from "./pointers";

const NEAR_PX = 8;
const THREADS_WHOLE = { few: 18, many: 4 }; // by lane: with more, a finished run is not shown whole to begin with
const MANY_LANES = 24;
const GENERATIONS = { few: 9, many: 3 }; // how many tasks of a device a window is wide

/** The first window: of a finished run the whole where it can be read. `span`: the last few tasks of a device, no less than `least`. */
export function beginning(model: RiverModel, end: Window, width: number, least = 1e-3): { span: number; view: Window } {
  const crowd = model.lanes.length > MANY_LANES ? "many" : "few";
  const lasting = model.threads.filter((t) => t.joined !== null).map((t) => t.joined! - t.left).sort((a, b) => a - b);
  const usual = lasting[Math.floor(lasting.length * 0.7)] ?? end.to / 10;
  const wide = Math.min(1.6, Math.max(0.4, width / 1100));
  const span = Math.max(least, Math.min(usual * GENERATIONS[crowd] * wide, Math.max(end.to, usual)));
  const busy = model.threads.length / Math.max(1, model.lanes.length) > THREADS_WHOLE[crowd] * wide;
  return { span, view: busy ? { from: Math.max(0, end.to - span * 1.5), to: end.to } : end };
}

/** A window that somebody wishes, kept to the run: `end` is the whole of it. */
export function within(view: Window, end: Window): Window {
  const room = Math.max(end.to * 1.05, 1e-3);
  const span = Math.min(room, Math.max(view.to - view.from, room / 1e6));
  const from = Math.max(-0.02 * span, Math.min(view.from, room - span * 0.5));
  return { from, to: from + span };
}

/** The thread under a pointer, if one is near. */
export function nearest(model: RiverModel, by: By, at: Layout, now: number, { x, y }: Pointer): Thread | null {
  let best: Thread | null = null;
  let distance = NEAR_PX;
  for (const each of model.threads) {
    const found = shape(model, by, at, each, now);
    if (x < found.start - 2 || x > Math.max(found.end, found.start + found.bend) + 4) continue;
    const away = Math.abs(heightAt(found, x) - y);
    if (away < distance) [best, distance] = [each, away];
  }
  return best;
}

/** Puts a tip beside a place, inside the picture. */
export function placed(tip: HTMLElement, at: Layout, x: number, y: number): void {
  const { offsetWidth: w, offsetHeight: h } = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 14, at.width - w - 6))}px`;
  tip.style.top = `${y + h + 22 > at.height ? Math.max(2, y - h - 12) : y + 14}px`;
}

/** The next thread of a device, or one of the next device in the order of the lanes: what keys choose. */
export function neighbour(model: RiverModel, by: By, at: Layout, view: Window, lit: Thread | null, lanes: number, along: number): Thread | undefined {
  const order = model.lanes.map((_, lane) => lane).sort((a, b) => at.lanes[a]! - at.lanes[b]!);
  const lane = lit ? order[(order.indexOf(lit.lane) + lanes + order.length) % order.length]! : order[0]!;
  const of = model.threads.filter((each) => each.lane === lane).sort((a, b) => a.left - b.left);
  const middle = by === "time" ? (view.from + view.to) / 2 : model.timeOf((view.from + view.to) / 2);
  const from = lit && !lanes ? of.indexOf(lit) + along : of.findLastIndex((each) => each.left <= (lit?.left ?? middle));
  return of[Math.max(0, Math.min(of.length - 1, from))];
}
