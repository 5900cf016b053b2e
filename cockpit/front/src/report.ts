// The river of report.html, without a server: its data stand in the page. Built into reports/river.js.

import type { River } from "./api";
import { draw, inks } from "./river/draw";
import { layout, shape, type Layout, type Window } from "./river/layout";
import { RiverModel, type By, type Thread } from "./river/model";
import { steer } from "./river/pointers";
import { beginning, nearest, neighbour, placed, within } from "./river/window";
import { channelTold, told } from "./river/words";

interface Shown extends River {
  now_s: number;
  version: number;
  units: string;
}

function button(text: string, title: string, act: () => void): HTMLButtonElement {
  const element = document.createElement("button");
  element.type = "button";
  element.textContent = text;
  element.title = title;
  element.addEventListener("click", act);
  return element;
}

function show(figure: HTMLElement): void {
  const data = JSON.parse(figure.querySelector("script")!.textContent!) as Shown;
  const place = figure.querySelector<HTMLElement>(".river-place")!;
  const canvas = place.querySelector("canvas")!;
  const tip = place.querySelector<HTMLElement>(".tip")!;
  const context = canvas.getContext("2d")!;
  const model = new RiverModel();
  model.load(data);
  const now = data.now_s;
  let by: By = "time";
  let lit: Thread | null = null;
  let at: Layout | null = null;
  let ink = inks();
  let waiting = false;

  const whole = (): Window => ({ from: 0, to: by === "time" ? Math.max(1e-3, now) : Math.max(1, data.version) });
  let view = beginning(model, whole(), place.clientWidth).view;

  const again = (): void => {
    if (!waiting) requestAnimationFrame(paint);
    waiting = true;
  };
  const paint = (): void => {
    waiting = false;
    const [width, height] = [place.clientWidth, place.clientHeight];
    if (!width || !height) return;
    const ratio = Math.min(3, devicePixelRatio || 1);
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    at = layout(model, by, view, width, height);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw(context, { model, by, view, at, now, lit, litLane: lit?.lane ?? null, ripples: false }, ink);
    canvas.dataset.threads = String(model.threads.length); // for those who test the picture
    canvas.dataset.window = `${view.from.toPrecision(6)} ${view.to.toPrecision(6)}`;
  };

  const move = (wished: Window): void => {
    view = within(wished, whole());
    again();
  };
  const pan = (share: number): void => move({ from: view.from + (view.to - view.from) * share, to: view.to + (view.to - view.from) * share });
  const zoom = (times: number, about = (view.from + view.to) / 2): void => move({ from: about - (about - view.from) / times, to: about + (view.to - about) / times });
  const showWhole = (): void => {
    view = whole();
    again();
  };

  const tell = (thread: Thread | null, x: number, y: number): void => {
    lit = thread;
    const inChannel = at && !thread && Math.abs(y - at.middle) < at.halfWidth(at.at(x)) + 2;
    tip.hidden = !thread && !inChannel;
    again();
    if (tip.hidden || !at) return;
    tip.textContent = thread ? told(model, thread, null) : channelTold(model, by, at.at(x), data.units === "virtual");
    placed(tip, at, x, y);
  };
  const quiet = (): void => {
    lit = null;
    tip.hidden = true;
    again();
  };

  steer(canvas, () => ({
    hover: (pointer) => (pointer && at ? tell(nearest(model, by, at, now, pointer), pointer.x, pointer.y) : quiet()),
    drag: (pixels) => at && move({ from: view.from + at.at(0) - at.at(pixels), to: view.to + at.at(0) - at.at(pixels) }),
    wheel: (event, x) => {
      // A page of many figures scrolls by the wheel; with Ctrl, Alt or from side to side it steers this one.
      const across = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      if (!at || !(across || event.altKey || event.ctrlKey)) return;
      event.preventDefault();
      if (across) pan((event.deltaX || event.deltaY) / 1500);
      else zoom(Math.exp(-event.deltaY / 300), at.at(x));
    },
    pinch: (times, x) => at && zoom(times, at.at(x)),
    open: () => undefined,
  }));

  /** The next thread of a device, or one of the next device: what a pointer does, by keys. */
  const step = (lanes: number, along: number): void => {
    if (!at) return;
    const next = neighbour(model, by, at, view, lit, lanes, along);
    if (!next) return;
    const [a, b] = model.span(next, by, now);
    const half = (view.to - view.from) / 2;
    if (a < view.from || b > view.to) view = within({ from: (a + b) / 2 - half, to: (a + b) / 2 + half }, whole());
    paint();
    const seen = shape(model, by, at, next, now);
    tell(next, Math.max(at.left, Math.min((seen.start + seen.end) / 2, at.width - 40)), seen.lane);
  };
  const keys: Record<string, () => void> = {
    ArrowLeft: () => pan(-0.15),
    ArrowRight: () => pan(0.15),
    ArrowUp: () => step(-1, 0),
    ArrowDown: () => step(1, 0),
    ",": () => step(0, -1),
    ".": () => step(0, 1),
    "+": () => zoom(1.5),
    "=": () => zoom(1.5),
    "-": () => zoom(1 / 1.5),
    "0": showWhole,
    Escape: quiet,
  };
  canvas.addEventListener("keydown", (event) => {
    const way = event.ctrlKey || event.metaKey || event.altKey ? undefined : keys[event.key];
    if (!way) return;
    event.preventDefault();
    way();
  });

  const tools = document.createElement("div");
  tools.className = "tools";
  const along = (wanted: By, name: string): HTMLButtonElement =>
    button(name, `along ${name}`, () => {
      by = wanted;
      view = by === "time" ? beginning(model, whole(), place.clientWidth).view : whole();
      press();
      quiet();
    });
  const ways = [along("time", "time"), along("version", "versions")] as const;
  const press = (): void => ways.forEach((way, i) => way.setAttribute("aria-pressed", String((i === 0) === (by === "time"))));
  press();
  tools.append(...ways, button("−", "Zoom out: −", () => zoom(1 / 1.6)), button("+", "Zoom in: +, or Alt and the wheel; drag to move", () => zoom(1.6)), button("whole", "The whole run: 0", showWhole));
  figure.append(tools);

  new ResizeObserver(again).observe(place);
  const recolour = (): void => {
    ink = inks();
    paint(); // at once: paper waits for no frame, and is as wide as it is
  };
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", recolour);
  again();
}

for (const figure of document.querySelectorAll<HTMLElement>("figure.river")) show(figure);
