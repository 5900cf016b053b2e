// The river as one sees and steers it: wheel, drag, pinch, keys; what is under the pointer is told in words.

import { useEffect, useMemo, useReducer, useRef, useState } from "preact/hooks";
import { get, Refused, runPath, type River } from "../api";
import { reducedMotion } from "../colours";
import { ANSWER_S, type Run } from "../live";
import { Choice, Loading, Table, Trouble } from "../parts";
import { link } from "../router";
import { countText, numberText, plural, secondsText } from "../text";
import { useTheme } from "../theme";
import { draw, inks } from "./draw";
import { layout, shape, type Layout, type Window } from "./layout";
import { RiverModel, type By, type Thread } from "./model";
import { steer, type Pointer, type Steering } from "./pointers";
import { beginning, nearest, neighbour, placed, within } from "./window";
import { channelTold, told } from "./words";

const LIMIT = 4000;
const LANES_MAX = 200;
const READ_EVERY_S = 5;
const FOLLOWED_S = 10; // at least, where seconds are real ones: less passes before it is read
const FRAME_MS = { few: 16, many: 50 };
const TABLE_ROWS = 100;
const BY = [["time", "time"], ["version", "versions"]] as const;

export function RiverView({ run, clients, compact }: { run: Run; clients?: string; compact?: boolean }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const place = useRef<HTMLDivElement>(null);
  const tip = useRef<HTMLDivElement>(null);
  const { colours } = useTheme();
  const ink = useMemo(inks, [colours]);
  const [by, setBy] = useState<By>("time");
  const [error, setError] = useState<Refused | null>(null);
  const [loaded, setLoaded] = useState(false);
  // A wish, which waits where nothing goes on: a server that was away comes back.
  const [wished, setFollow] = useState(true);
  const follow = wished && run.goesOn;
  const [lit, setLit] = useState<Thread | null>(null);
  const [, again] = useReducer((n: number) => n + 1, 0);
  const it = useRef({ model: new RiverModel(), view: { from: 0, to: 1 } as Window, span: 0, now: 0, asked: 0, dirty: true, reading: false, at: null as Layout | null, touched: false, went: false });
  const s = it.current;
  const state = useRef({ by, follow, wished, lit, ink });
  state.current = { by, follow, wished, lit, ink };
  s.dirty = true;

  const whole = (): Window => ({ from: 0, to: by === "time" ? Math.max(1e-3, run.head?.now_s ?? 1) : Math.max(1, run.head?.version ?? 1) });

  const read = async (): Promise<void> => {
    if (s.reading || !run.head) return;
    s.reading = true;
    try {
      const height = place.current?.clientHeight ?? 600;
      const lanes = clients ? 1 : run.head.counters.clients <= LANES_MAX ? LANES_MAX : Math.min(LANES_MAX, Math.max(24, Math.floor(height / 8)));
      const zoomed = s.touched && state.current.by === by;
      const { from, to } = s.view;
      const range = zoomed && !state.current.follow ? { from: from - (to - from) * 0.1, to } : {};
      const river = await get<River>(runPath(run.id, "/river"), { by, lanes, limit: LIMIT, clients, ...range }, AbortSignal.timeout(ANSWER_S * 1000));
      const first = !s.asked;
      s.model.load(river);
      s.asked = performance.now();
      begin(first);
      setLit((was) => (was ? (s.model.threads.find((t) => t.lane === was.lane && t.left === was.left) ?? null) : null));
      setError(null);
      setLoaded(true);
      again(0); // the model is no state of ours: a first device, read on a quiet run, would not be shown
    } catch (found) {
      if (found instanceof Refused) setError(found);
    } finally {
      s.reading = false;
      s.dirty = true;
    }
  };

  // A page that was opened with the run knows how long tasks are once they have ended: what it follows widens.
  const begin = (first: boolean): void => {
    const end = whole();
    const least = run.goesOn && run.head?.units === "real" ? FOLLOWED_S : undefined;
    const { span, view } = beginning(s.model, end, place.current?.clientWidth ?? 1100, least);
    s.span = Math.max(first ? 0 : s.span, span);
    if (!first) return;
    s.now = run.head?.now_s ?? 0;
    const live = run.goesOn && by === "time";
    s.view = live ? { from: end.to - s.span, to: end.to } : by === "time" ? view : end;
  };

  useEffect(() => {
    s.asked = 0;
    s.touched = false;
    void read();
    setFollow(true);
  }, [by, clients, run.id, run.head === null]);

  useEffect(() => {
    const timer = setInterval(() => run.goesOn && !document.hidden && void read(), READ_EVERY_S * 1000);
    const stop = run.read((records, dropped) => {
      if (s.model.news(records)) s.dirty = true;
      if ((dropped || s.model.strangers) && performance.now() - s.asked > 1000) void read();
    });
    return () => {
      clearInterval(timer);
      stop();
    };
  }, [run.id, by, clients]);

  useEffect(() => {
    const element = canvas.current!;
    const context = element.getContext("2d")!;
    let frame = 0;
    let last = 0;
    const watch = new ResizeObserver(() => (s.dirty = true));
    watch.observe(place.current!);
    const step = (at: number): void => {
      frame = requestAnimationFrame(step);
      const moving = run.goesOn && run.line === "open" && !reducedMotion.matches;
      if (!s.dirty && (!moving || at - last < (s.model.threads.length > 1500 ? FRAME_MS.many : FRAME_MS.few))) return;
      last = at;
      s.dirty = false;
      const { by, wished, lit, ink } = state.current;
      const box = place.current;
      if (!box) return; // it is being taken away
      const [width, height] = [box.clientWidth, box.clientHeight];
      if (!width || !height) return;
      const ratio = Math.min(3, devicePixelRatio || 1);
      if (element.width !== Math.round(width * ratio) || element.height !== Math.round(height * ratio)) {
        element.width = Math.round(width * ratio);
        element.height = Math.round(height * ratio);
      }
      s.now = clock(run, s.now, moving);
      if (wished && (run.goesOn || s.went)) {
        const end = by === "time" ? s.now : s.model.versionAt(s.now);
        const span = by === "time" && !s.touched ? s.span : s.view.to - s.view.from;
        s.view = { from: Math.max(0, end - span * 0.97), to: Math.max(end + span * 0.03, span) };
      }
      s.went = run.goesOn; // where it stops, its clock was ahead of it: once more, to its end
      s.at = layout(s.model, by, s.view, width, height);
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      draw(context, { model: s.model, by, view: s.view, at: s.at, now: s.now, lit, litLane: lit?.lane ?? null, ripples: moving }, ink);
      element.dataset.threads = String(s.model.threads.length); // for those who test the picture
      element.dataset.drawn = String(Number(element.dataset.drawn ?? 0) + 1);
      element.dataset.window = `${s.view.from.toPrecision(6)} ${s.view.to.toPrecision(6)}`;
    };
    frame = requestAnimationFrame(step);
    return () => {
      cancelAnimationFrame(frame);
      watch.disconnect();
    };
  }, [run.id]);

  const moved = (view: Window): void => {
    s.view = within(view, whole());
    s.touched = true;
    s.dirty = true;
    if (s.model.thinned) later(read);
  };
  const zoom = (times: number, at?: number): void => {
    const { from, to } = s.view;
    const about = at ?? (follow ? to : (from + to) / 2);
    moved({ from: about - (about - from) / times, to: about + (to - about) / times });
  };
  const pan = (share: number): void => {
    setFollow(false);
    const by_ = (s.view.to - s.view.from) * share;
    moved({ from: s.view.from + by_, to: s.view.to + by_ });
  };
  const showWhole = (): void => {
    setFollow(false);
    s.view = whole();
    s.touched = false;
    s.dirty = true;
    if (s.model.thinned) void read();
  };
  const later = useLater(250);

  const under = (pointer: Pointer): Thread | null => (s.at ? nearest(s.model, by, s.at, s.now, pointer) : null);
  const now = (): number | null => (run.goesOn ? run.head!.now_s : null);

  const showTip = (thread: Thread | null, pointer: Pointer | null): void => {
    const element = tip.current;
    if (!element) return; // it is being taken away
    const inChannel = !thread && pointer && s.at && Math.abs(pointer.y - s.at.middle) < s.at.halfWidth(s.at.at(pointer.x)) + 2;
    element.hidden = !thread && !inChannel;
    if (element.hidden || !s.at) return;
    element.textContent = thread ? told(s.model, thread, now()) : channelTold(s.model, by, s.at.at(pointer!.x), run.head?.units === "virtual");
    const seen = thread ? shape(s.model, by, s.at, thread, s.now) : null;
    const x = pointer?.x ?? Math.max(s.at.left, Math.min((seen!.start + seen!.end) / 2, s.at.width - 40));
    const y = pointer?.y ?? seen!.lane;
    placed(element, s.at, x, y);
  };

  usePointers(canvas, {
    hover: (pointer) => {
      const found = pointer && under(pointer);
      if (found !== state.current.lit) setLit(found ?? null);
      showTip(found ?? null, pointer);
    },
    drag: (pixels) => {
      if (!s.at) return;
      setFollow(false);
      const by_ = s.at.at(0) - s.at.at(pixels);
      moved({ from: s.view.from + by_, to: s.view.to + by_ });
    },
    wheel: (event, x) => {
      if (!s.at || event.ctrlKey) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) pan((event.deltaX || event.deltaY) / 1500);
      else zoom(Math.exp(-event.deltaY / 500), state.current.follow ? s.view.to : s.at.at(x));
    },
    pinch: (times, x) => s.at && zoom(times, s.at.at(x)),
    open: (pointer) => {
      const found = under(pointer);
      if (found) location.hash = link("run", run.id, "device", s.model.lanes[found.lane]!);
    },
  });

  const step = (lanes: number, along: number): void => {
    const { model, at } = s;
    const next = at ? neighbour(model, by, at, s.view, lit, lanes, along) : undefined;
    if (!next) return;
    const [a, b] = model.span(next, by, s.now);
    const span = s.view.to - s.view.from;
    if (a < s.view.from || b > s.view.to) {
      setFollow(false);
      moved({ from: (a + b) / 2 - span / 2, to: (a + b) / 2 + span / 2 });
    }
    setLit(next);
    s.dirty = true;
    requestAnimationFrame(() => showTip(next, null));
  };

  const key = (event: KeyboardEvent): void => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const ways: Record<string, () => void> = {
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
      Home: showWhole,
      f: () => setFollow(true),
      End: () => setFollow(true),
      Enter: () => lit && (location.hash = link("run", run.id, "device", s.model.lanes[lit.lane]!)),
      Escape: () => {
        setLit(null);
        showTip(null, null);
      },
    };
    const way = ways[event.key];
    if (!way) return;
    event.preventDefault();
    way();
    again(0);
  };

  const { model } = s;
  const count = model.lanesOf > model.lanes.length ? `${model.lanes.length} of ${plural(model.lanesOf, "device")}, the channel all of them` : plural(model.lanes.length, "device");
  return (
    <section class={compact ? "river compact" : "river"} aria-label="The river">
      <div class="tools">
        <Choice label="Along" of={BY} value={by} set={setBy} />
        <span class="choice" role="group" aria-label="Zoom">
          <button type="button" onClick={() => zoom(1 / 1.6)} aria-label="Zoom out" title="Zoom out: −">−</button>
          <button type="button" onClick={() => zoom(1.6)} aria-label="Zoom in" title="Zoom in: +">+</button>
          <button type="button" onClick={showWhole} title="The whole run: 0">whole</button>
        </span>
        {run.goesOn && (
          <button type="button" class="single" aria-pressed={follow} onClick={() => setFollow(!follow)} title="Follow what happens now: f">
            follow
          </button>
        )}
        <Legend largest={model.stalenessMax} />
        {!compact && loaded && <span class="soft count">{count}</span>}
      </div>
      {error && <Trouble error={error} again={() => void read()} stale={loaded} />}
      <div class="river-place" ref={place}>
        {!loaded && !error && <Loading what="the river" />}
        {loaded && !model.lanesOf && <p class="empty dry">No device has called yet. One begins with <code>anabranch client APP --server HOST:PORT</code>; it shows here at once.</p>}
        <canvas
          ref={canvas}
          tabIndex={0}
          role="application"
          aria-roledescription="picture of the run"
          aria-label={`Versions along ${by === "time" ? "time" : "their numbers"}; ${count}. Arrows left and right move, plus and minus zoom, up and down choose a device, comma and full stop an update, Enter opens the device. The same stands in the table below.`}
          onKeyDown={key}
          onBlur={() => showTip(null, null)}
        />
        <div class="tip" ref={tip} hidden />
        <p class="unseen" role="status">
          {lit ? told(model, lit, now()) : ""}
        </p>
      </div>
      {loaded && <AsTable model={model} run={run} />}
    </section>
  );
}

/** The run's clock: what the server told last, carried on where its seconds are real ones. */
function clock(run: Run, was: number, moving: boolean): number {
  const { head } = run;
  if (!head) return was;
  const told = head.now_s;
  if (!moving || head.state !== "running") return told;
  if (head.units === "real") return Math.max(was, Math.min(told + (performance.now() - run.newsAt) / 1000, told + 2));
  return was > told || told - was > 1e6 ? told : was + (told - was) * 0.12;
}

function Legend({ largest }: { largest: number }) {
  return (
    <ul class="legend" aria-label="What colours and marks mean">
      <li>
        <span>fresh</span>
        <svg class="ramp" viewBox="0 0 84 8" aria-hidden="true">
          {[0, 1, 2, 3, 4, 5, 6].map((i) => (
            <rect key={i} class={`stale-${i}`} x={i * 12} width="12" height="8" />
          ))}
        </svg>
        <span>{countText(largest)} stale</span>
      </li>
      <li>
        <svg class="mark bad" viewBox="0 0 12 12" aria-hidden="true"><path d="M2 2l8 8M10 2l-8 8" /></svg>rejected
      </li>
      <li>
        <svg class="mark" viewBox="0 0 12 12" aria-hidden="true"><circle cx="6" cy="6" r="4" /></svg>lost
      </li>
      <li>
        <svg class="mark held" viewBox="0 0 12 12" aria-hidden="true"><path d="M6 1l5 5-5 5-5-5z" /></svg>in no version yet
      </li>
      <li>
        <svg class="mark out" viewBox="0 0 12 12" aria-hidden="true"><circle cx="6" cy="6" r="3.5" /></svg>still out
      </li>
    </ul>
  );
}

function AsTable({ model, run }: { model: RiverModel; run: Run }) {
  const [open, set] = useState(false);
  const newest = open ? model.threads.toSorted((a, b) => (b.joined ?? b.left) - (a.joined ?? a.left)).slice(0, TABLE_ROWS) : [];
  const rows = newest.map((t) => {
    const device = model.lanes[t.lane] ?? "";
    return [
      <a href={link("run", run.id, "device", device)}>{device}</a>,
      String(t.base),
      secondsText(t.left),
      t.version === null ? "–" : String(t.version),
      t.joined === null ? "–" : secondsText(t.joined),
      t.verdict === "open" ? "still out" : t.verdict,
      t.staleness === null ? "–" : String(t.staleness),
      numberText(t.weight),
    ];
  });
  return (
    <details class="as-table" onToggle={(event) => set(event.currentTarget.open)}>
      <summary>The same as a table: the newest {TABLE_ROWS} updates</summary>
      {open && <Table label="The newest updates" head={["device", "left version", "at", "counted in", "at", "verdict", "staleness", "weight"]} rows={rows} />}
    </details>
  );
}

/** Runs the last of many calls, once they pause. */
function useLater(ms: number): (call: () => unknown) => void {
  const timer = useRef(0);
  useEffect(() => () => clearTimeout(timer.current), []);
  return (call) => {
    clearTimeout(timer.current);
    timer.current = window.setTimeout(call, ms);
  };
}

function usePointers(canvas: { current: HTMLCanvasElement | null }, ways: Steering): void {
  const now = useRef(ways);
  now.current = ways;
  useEffect(() => steer(canvas.current!, () => now.current), []);
}
