// One state per run: its head, and the news of its stream. Whatever page is open, one line to the server carries it.

import { useEffect, useReducer, useState } from "preact/hooks";
import { get, Refused, runPath, type Head, type News, type NewsRecord, type Query } from "./api";

export type Line = "none" | "opening" | "open" | "lost";

const RETRY_S = 3;
const HEAD_EVERY_S = 10;
const SILENT_S = 10; // of a run that goes on there are news every two seconds
export const ANSWER_S = 60; // what was cut silently never answers
const HIDDEN_EVERY_S = 600; // so often a page that nobody sees asks, lest its session ends

export class Run {
  head: Head | null = null;
  error: Refused | null = null;
  line: Line = "none";
  lostAt = 0;
  newsAt = 0; // performance.now() of the newest news
  private newest: News | null = null;
  private readonly listeners = new Set<() => void>();
  private readonly readers = new Set<(records: NewsRecord[], dropped: number) => void>();
  private source: EventSource | null = null;
  private timer = 0;
  private silence = 0;
  private headAt = 0;
  private asked = 0;
  private answered = 0; // the newest question that has an answer
  private users = 0;

  constructor(readonly id: string) {}

  use(listener: () => void): () => void {
    this.listeners.add(listener);
    if (this.users++ === 0) {
      document.addEventListener("visibilitychange", this.seen);
      void this.load();
    }
    return () => {
      this.listeners.delete(listener);
      if (--this.users) return;
      document.removeEventListener("visibilitychange", this.seen);
      this.close();
    };
  }

  // A browser has six lines to a server for all its tabs together: a page that nobody sees leaves its own to the others.
  private readonly seen = (): void => {
    this.close();
    void this.load();
  };

  /** Every record of the stream, as it comes; how many were left out before them. */
  read(reader: (records: NewsRecord[], dropped: number) => void): () => void {
    this.readers.add(reader);
    return () => void this.readers.delete(reader);
  }

  /** Does it go on, so that figures change? */
  get goesOn(): boolean {
    return this.head?.state === "running" || this.head?.state === "paused";
  }

  /** A device's state in words that hold: of a run that goes on no longer it is known that a task was out, not that somebody trains. */
  stateOf(device: { state: string; quarantined: string }): string {
    const state = device.quarantined ? "quarantined" : device.state;
    return state === "training" ? this.training : state;
  }

  get training(): string {
    return this.goesOn ? "training" : "still_out";
  }

  // Answers and news come on lines of their own, in any order: an answer that comes after that of a newer question is
  // left, and news that came while this one was under way is newer than the answer.
  async load(): Promise<void> {
    clearTimeout(this.timer);
    const asked = ++this.asked;
    const from = (this.headAt = performance.now());
    try {
      const head = await get<Head>(runPath(this.id), {}, this.line === "lost" ? AbortSignal.timeout(ANSWER_S * 1000) : undefined);
      if (asked < this.answered) return;
      this.answered = asked;
      this.head = head;
      this.error = null;
      if (this.newest && this.newsAt >= from) this.stands(this.newest);
    } catch (error) {
      if (asked < this.answered) return;
      this.answered = asked;
      this.error = error as Refused;
    }
    if (!this.users) return;
    if (document.hidden) this.later(HIDDEN_EVERY_S);
    else if (this.error?.status === 0) this.later(RETRY_S);
    if (this.mayGoOn && !this.source && !document.hidden) this.open();
    this.told();
  }

  private later(seconds: number): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.load(), seconds * 1000);
  }

  private open(): void {
    const source = new EventSource(runPath(this.id, "/stream"));
    this.source = source;
    this.line = "opening";
    this.heard();
    source.onopen = () => {
      this.line = "open";
      this.lostAt = 0;
      this.heard();
      for (const reader of this.readers) reader([], 1); // what happened while there was no line
      this.told();
    };
    source.addEventListener("news", (event) => this.news(JSON.parse((event as MessageEvent<string>).data) as News));
    source.addEventListener("ended", () => {
      this.close();
      void this.load();
    });
    source.onerror = () => this.lost(source);
  }

  // Who cuts a line silently, a laptop that slept or a gateway, leaves it open here.
  private heard(): void {
    clearTimeout(this.silence);
    this.silence = window.setTimeout(() => {
      if (!this.source || !this.goesOn) return;
      this.source.close();
      this.lost(this.source);
    }, SILENT_S * 1000);
  }

  private news(news: News): void {
    this.line = "open";
    this.heard();
    this.newsAt = performance.now();
    this.newest = news;
    // Why, the head says; of a server that is away the first reason is seldom the one that stays.
    const other = news.state !== this.head?.state || news.state === "interrupted";
    this.stands(news);
    for (const reader of this.readers) reader(news.records, news.dropped);
    const changed = news.records.some((r) => r.kind === "evaluated" || r.kind === "settings_changed");
    if (other || this.newsAt - this.headAt > (changed ? 1 : HEAD_EVERY_S) * 1000) void this.load();
    this.told();
  }

  // A run whose server is away may come back: it is listened for, too.
  private get mayGoOn(): boolean {
    return this.goesOn || (!!this.head?.served && this.head.state === "interrupted");
  }

  private stands({ now_s, version, counters, state }: News): void {
    if (this.head) Object.assign(this.head, { now_s, version, state, counters: { ...this.head.counters, ...counters }, updates: counters.applied });
  }

  // A browser tries again by itself, unless it was refused: then it is done here.
  private lost(source: EventSource): void {
    this.lostAt ||= Date.now(); // however often it was opened in vain
    this.line = "lost";
    if (source.readyState === EventSource.CLOSED) {
      this.source = null;
      this.later(RETRY_S);
    }
    this.told();
  }

  private close(): void {
    clearTimeout(this.timer);
    clearTimeout(this.silence);
    this.source?.close();
    this.source = null;
    this.line = "none";
    this.lostAt = 0;
  }

  private told(): void {
    for (const listener of this.listeners) listener();
  }
}

const runs = new Map<string, Run>();

export function useRun(id: string): Run {
  const [, again] = useReducer((n: number) => n + 1, 0);
  const run = runs.get(id) ?? new Run(id);
  runs.set(id, run);
  useEffect(() => run.use(() => again(0)), [run]);
  return run;
}

export interface Asked<T> {
  data: T | null;
  error: Refused | null;
  again: () => void;
}

/** Asks now, and again so many seconds after each answer, where somebody sees the page (0: never again). Returns its end.

Over a slow line an answer takes longer than that: it is waited for. */
export function repeated(ask: (signal: AbortSignal) => Promise<unknown>, every_s: number): () => void {
  let asking = new AbortController();
  let timer = 0;
  let over = false;
  const again = async (): Promise<void> => {
    if (!document.hidden || !timer) {
      const control = (asking = new AbortController());
      const late = setTimeout(() => control.abort(new DOMException("no answer has come", "TimeoutError")), ANSWER_S * 1000);
      await ask(control.signal);
      clearTimeout(late);
    }
    if (every_s && !over) timer = window.setTimeout(() => void again(), every_s * 1000);
  };
  void again();
  return () => {
    over = true;
    clearTimeout(timer);
    asking.abort();
  };
}

/** An answer of the server, asked for `repeated`ly; the last one stays until the next is there. */
export function useAsked<T>(path: string, query: Query = {}, every_s = 0): Asked<T> {
  const [answer, set] = useState<{ data: T | null; error: Refused | null; path: string }>({ data: null, error: null, path });
  const [round, again] = useReducer((n: number) => n + 1, 0);
  const key = JSON.stringify([path, query]);
  useEffect(
    () =>
      repeated(async (signal) => {
        try {
          const data = await get<T>(path, query, signal);
          if (!signal.aborted) set({ data, error: null, path });
        } catch (error) {
          if (error instanceof Refused) set((was) => ({ data: was.path === path ? was.data : null, error, path }));
        }
      }, every_s),
    [key, every_s, round],
  );
  return { data: answer.path === path ? answer.data : null, error: answer.error, again: () => again(0) };
}
