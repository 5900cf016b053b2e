// The river on a canvas.

import { colour, stalenessScale, stalenessStep } from "../colours";
import { tickTexts } from "../text";
import { AXIS_PX, shape, ticks, type Layout, type Shape, type Window } from "./layout";
import { lastAtMost, type By, type RiverModel, type Thread } from "./model";

export interface Scene {
  model: RiverModel;
  by: By;
  view: Window;
  at: Layout;
  now: number;
  lit: Thread | null;
  litLane: number | null;
  ripples: boolean;
}

export interface Inks {
  scale: string[];
  water: string;
  waterEdge: string;
  waterInk: string;
  soft: string;
  ink: string;
  grid: string;
  card: string;
  bad: string;
  open: string;
}

export const inks = (): Inks => ({
  scale: stalenessScale(),
  water: colour("water"),
  waterEdge: colour("water-edge"),
  waterInk: colour("water-ink"),
  soft: colour("soft"),
  ink: colour("ink"),
  grid: colour("grid"),
  card: colour("card"),
  bad: colour("bad"),
  open: colour("open"),
});

const FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const RIPPLE_S = 0.9;
const CHUNK = 48; // threads of one colour in a stroke: few enough that they show through each other

export function draw(c: CanvasRenderingContext2D, scene: Scene, ink: Inks): void {
  const { at } = scene;
  c.clearRect(0, 0, at.width, at.height);
  grid(c, scene, ink);
  c.save();
  c.beginPath();
  c.rect(at.left - 6, 0, at.width - at.left - at.right + 16, at.height - AXIS_PX);
  c.clip();
  threads(c, scene, ink);
  channel(c, scene, ink);
  if (scene.lit) thread(c, scene, ink, scene.lit);
  c.restore();
  names(c, scene, ink);
}

function grid(c: CanvasRenderingContext2D, { by, view, at, litLane, now, model }: Scene, ink: Inks): void {
  const found = ticks(view, (at.width - at.left) / 110, by === "version");
  const texts = tickTexts(found, by === "time" ? "seconds" : "count");
  c.font = `11px ${FONT}`;
  c.fillStyle = ink.soft;
  c.strokeStyle = ink.grid;
  c.lineWidth = 1;
  c.textAlign = "center";
  found.forEach((tick, i) => {
    const x = Math.round(at.x(tick)) + 0.5;
    if (x < Math.max(at.left - 2, 22) || x > at.width - at.right + 4) return;
    line(c, x, 0, x, at.height - AXIS_PX);
    c.fillText(by === "version" ? `v${texts[i]}` : texts[i]!, x, at.height - 8);
  });
  if (at.spacing >= 5) {
    at.lanes.forEach((y, lane) => {
      c.strokeStyle = lane === litLane ? ink.soft : ink.grid;
      line(c, at.left, y, at.width - at.right, y);
    });
  }
  const edge = at.x(by === "time" ? now : model.versionAt(now));
  if (edge < at.width - at.right - 1) {
    c.strokeStyle = ink.soft;
    c.setLineDash([2, 4]);
    line(c, edge, 0, edge, at.height - AXIS_PX);
    c.setLineDash([]);
  }
}

function line(c: CanvasRenderingContext2D, x0: number, y0: number, x1: number, y1: number): void {
  c.beginPath();
  c.moveTo(x0, y0);
  c.lineTo(x1, y1);
  c.stroke();
}

function path(c: CanvasRenderingContext2D, s: Shape): void {
  const { start, end, out, lane, back, bend } = s;
  c.moveTo(start, out);
  c.bezierCurveTo(start + bend / 2, out, start + bend / 2, lane, start + bend, lane);
  if (s.closed) {
    c.lineTo(end - bend, lane);
    c.bezierCurveTo(end - bend / 2, lane, end - bend / 2, back, end, back);
  } else c.lineTo(Math.max(end, start + bend), lane);
}

interface Seen {
  thread: Thread;
  shape: Shape;
}

function seen({ model, by, at, now }: Scene): Seen[] {
  const found: Seen[] = [];
  for (const each of model.threads) {
    const s = shape(model, by, at, each, now);
    if (s.end >= at.left - 4 && s.start <= at.width) found.push({ thread: each, shape: s });
  }
  return found;
}

const tone = (thread: Thread, model: RiverModel, ink: Inks): string =>
  thread.verdict === "rejected" ? ink.bad : thread.staleness === null ? ink.open : ink.scale[stalenessStep(thread.staleness, model.stalenessMax)]!;

function threads(c: CanvasRenderingContext2D, scene: Scene, ink: Inks): void {
  const { at, model, lit } = scene;
  const found = seen(scene);
  const width = Math.max(0.7, Math.min(2.4, at.spacing / 7));
  const crowd = Math.max(1, found.length / 500);
  const alpha = Math.max(0.2, 0.95 / Math.sqrt(crowd)) * (lit ? 0.35 : 1);
  const byTone = new Map<string, Seen[]>();
  for (const each of found) {
    const key = tone(each.thread, model, ink);
    const group = byTone.get(key);
    if (group) group.push(each);
    else byTone.set(key, [each]);
  }
  c.lineJoin = "round";
  // The fresh first, so that the stale, which are fewer, stand over them.
  const order = [ink.open, ...ink.scale, ink.bad];
  for (const [stroke, group] of [...byTone].sort((a, b) => order.indexOf(a[0]) - order.indexOf(b[0]))) {
    c.strokeStyle = stroke;
    c.lineWidth = width;
    c.globalAlpha = stroke === ink.open ? Math.max(alpha, 0.5) : alpha;
    for (let i = 0; i < group.length; i += CHUNK) {
      c.beginPath();
      for (const each of group.slice(i, i + CHUNK)) path(c, each.shape);
      c.stroke();
    }
  }
  c.globalAlpha = lit ? 0.5 : 1;
  const size = Math.max(2, Math.min(4.5, at.spacing / 4));
  for (const each of found) mark(c, each, ink, size);
  c.globalAlpha = 1;
}

/** How a thread ends, by shape: a cross where it was rejected, a ring where it was lost, a dot where it is now. */
function mark(c: CanvasRenderingContext2D, { thread: { verdict }, shape: s }: Seen, ink: Inks, size: number): void {
  if (verdict === "applied") return;
  c.lineWidth = Math.max(1.2, size / 2.4);
  c.beginPath();
  if (verdict === "rejected") {
    c.strokeStyle = ink.bad;
    c.moveTo(s.end - size, s.back - size);
    c.lineTo(s.end + size, s.back + size);
    c.moveTo(s.end + size, s.back - size);
    c.lineTo(s.end - size, s.back + size);
    c.stroke();
  } else if (verdict === "lost") {
    c.strokeStyle = ink.soft;
    c.fillStyle = ink.card;
    c.arc(Math.max(s.end, s.start + s.bend), s.lane, size, 0, 7);
    c.fill();
    c.stroke();
  } else if (verdict === "held") {
    c.fillStyle = ink.ink;
    c.moveTo(s.end, s.back - size);
    c.lineTo(s.end + size, s.back);
    c.lineTo(s.end, s.back + size);
    c.lineTo(s.end - size, s.back);
    c.fill();
  } else {
    c.fillStyle = ink.open;
    c.arc(Math.max(s.end, s.start + s.bend), s.lane, size * 0.8, 0, 7);
    c.fill();
  }
}

function channel(c: CanvasRenderingContext2D, scene: Scene, ink: Inks): void {
  const { at, by, model, now, ripples } = scene;
  const edge = Math.min(at.x(by === "time" ? now : model.versionAt(now)), at.width);
  const start = Math.max(at.x(0), at.left - 6);
  if (edge <= start) return;
  const step = 4;
  const half: [number, number][] = [];
  for (let x = start; x < edge + step; x += step) half.push([Math.min(x, edge), at.halfWidth(at.at(Math.min(x, edge)))]);
  c.beginPath();
  half.forEach(([x, h], i) => (i ? c.lineTo(x, at.middle - h) : c.moveTo(x, at.middle - h)));
  for (const [x, h] of half.reverse()) c.lineTo(x, at.middle + h);
  c.closePath();
  c.fillStyle = ink.water;
  c.fill();
  c.strokeStyle = ink.waterEdge;
  c.lineWidth = 1;
  c.stroke();
  versions(c, scene, ink, edge);
  if (ripples && by === "time") rings(c, scene, ink);
}

/** A bar across the channel where a version was published, and its number where there is room. */
function versions(c: CanvasRenderingContext2D, { at, by, model, view }: Scene, ink: Inks, edge: number): void {
  const place = (row: [number, number]): number => at.x(by === "time" ? row[1] : row[0]);
  const first = Math.max(0, lastAtMost(model.versions, view.from, by === "time" ? 1 : 0));
  const shown = model.versions.slice(first).filter((row) => place(row) <= edge);
  const room = (edge - Math.max(at.left, place(shown[0] ?? [0, 0]))) / Math.max(1, shown.length);
  if (room >= 2.5) {
    c.strokeStyle = ink.waterEdge;
    c.lineWidth = 1;
    c.beginPath();
    for (const row of shown) {
      const x = Math.round(place(row)) + 0.5;
      const h = at.halfWidth(by === "time" ? row[1] : row[0]);
      c.moveTo(x, at.middle - h);
      c.lineTo(x, at.middle + h);
    }
    c.stroke();
  }
  c.font = `600 11px ${FONT}`;
  c.textAlign = "left";
  let free = at.left;
  let every = 1;
  for (const round of [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000]) {
    every = round;
    if (room * round >= 46) break;
  }
  for (const row of shown) {
    const x = place(row) + 4;
    if (row[0] % every || x < free) continue;
    const text = `v${row[0]}`;
    const width = c.measureText(text).width;
    if (x + width > edge) break;
    const thin = at.halfWidth(at.at(x)) < 7;
    c.lineWidth = 3;
    c.lineJoin = "round";
    c.strokeStyle = ink.water;
    if (thin) c.strokeStyle = ink.card;
    c.strokeText(text, x, at.middle + 4);
    c.fillStyle = ink.waterInk;
    c.fillText(text, x, at.middle + 4);
    free = x + width + 14;
  }
}

function rings(c: CanvasRenderingContext2D, { at, model, now }: Scene, ink: Inks): void {
  for (const { at: t, lane, step } of model.joins) {
    const age = (now - t) / RIPPLE_S;
    if (age < 0 || age > 1) continue;
    const y = at.middle + ((at.lanes[lane] ?? 0) < at.middle ? -1 : 1) * at.halfWidth(t);
    c.globalAlpha = 1 - age;
    c.strokeStyle = ink.scale[stalenessStep(step, model.stalenessMax)]!;
    c.lineWidth = 2;
    c.beginPath();
    c.arc(at.x(t), y, 3 + 12 * age, 0, 7);
    c.stroke();
  }
  c.globalAlpha = 1;
}

function thread(c: CanvasRenderingContext2D, scene: Scene, ink: Inks, lit: Thread): void {
  const s = shape(scene.model, scene.by, scene.at, lit, scene.now);
  for (const [stroke, width] of [[ink.card, 7], [ink.ink, 4.5], [tone(lit, scene.model, ink), 3]] as const) {
    c.strokeStyle = stroke;
    c.lineWidth = width;
    c.beginPath();
    path(c, s);
    c.stroke();
  }
  mark(c, { thread: lit, shape: s }, ink, 5);
}

function names(c: CanvasRenderingContext2D, { at, model, litLane }: Scene, ink: Inks): void {
  if (!at.named) return;
  const room = at.left - 14;
  const size = Math.max(9.5, Math.min(12, at.spacing - 1));
  c.textAlign = "left";
  model.lanes.forEach((name, lane) => {
    c.font = `${lane === litLane ? 600 : 400} ${size}px ${FONT}`;
    c.fillStyle = lane === litLane ? ink.ink : ink.soft;
    c.fillText(clipped(c, name, room), 4, at.lanes[lane]! + size * 0.35);
  });
}

/** The text, or its two ends about an ellipsis: names of devices often differ in their end. */
function clipped(c: CanvasRenderingContext2D, text: string, room: number): string {
  if (c.measureText(text).width <= room) return text;
  for (let kept = text.length - 1; kept > 2; kept -= 1) {
    const tail = kept >> 1;
    const short = `${text.slice(0, kept - tail)}…${text.slice(-tail)}`;
    if (c.measureText(short).width <= room) return short;
  }
  return text.slice(0, 2);
}
