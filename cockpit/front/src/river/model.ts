// What the river shows: versions, threads and the rate of joining. Read from the server; between two readings, the
// records of the stream carry it on, so that a thread moves at once when its device calls.

import type { NewsRecord, River, Verdict } from "../api";

export interface Thread {
  lane: number;
  base: number;
  left: number;
  joined: number | null; // seconds; null while the device trains
  version: number | null;
  staleness: number | null;
  verdict: Verdict;
  weight: number | null;
}

export type By = "time" | "version";

const THREADS_MAX = 6000;
const RATE_S = 1;

export class RiverModel {
  lanes: string[] = [];
  place: number[] = []; // by lane: how far out it is, 0 nearest to the channel
  lanesOf = 0;
  versions: [number, number][] = [[0, 0]];
  threads: Thread[] = [];
  rates: [number, number][] = [];
  stalenessMax = 1;
  thinned = false;
  strangers = false; // has a device called that has no lane yet?
  joins: { at: number; lane: number; step: number }[] = []; // newest joins of the stream, for their ripple
  private lane = new Map<string, number>();
  private joining = 0;

  load(river: River): void {
    const others = river.lanes.join("\n") !== this.lanes.join("\n");
    this.lanes = river.lanes;
    this.lanesOf = river.lanes_of;
    this.lane = new Map(river.lanes.map((client, i) => [client, i]));
    this.versions = river.versions.length ? river.versions : [[0, 0]];
    this.threads = river.threads.map(([lane, base, left, version, joined, staleness, verdict, weight]) => ({ lane, base, left, version, joined, staleness, verdict, weight }));
    this.rates = smoothed(river.rates ?? []);
    this.stalenessMax = Math.max(1, river.staleness_max);
    this.thinned = river.thinned;
    this.strangers = false;
    this.joining = 0;
    if (others) this.place = placed(this.lanes.length, this.threads);
  }

  /** Carries the picture on by what has just happened; true where something did. */
  news(records: NewsRecord[]): boolean {
    for (const record of records) this.record(record);
    if (this.threads.length > THREADS_MAX) this.threads.splice(0, this.threads.length - THREADS_MAX);
    if (this.joins.length > 64) this.joins.splice(0, this.joins.length - 64);
    return records.length > 0;
  }

  private record({ t, kind, client = "", version, verdict, staleness, weight }: NewsRecord): void {
    if (kind === "published" && version !== undefined && version > this.newest[0]) this.versions.push([version, t]);
    if (kind === "decided" && verdict !== "rejected") this.joined(t);
    const lane = this.lane.get(client);
    if (lane === undefined) {
      this.strangers ||= kind === "granted" && this.lanes.length === this.lanesOf;
      return;
    }
    if (kind === "granted" && !this.threads.some((thread) => thread.lane === lane && thread.left === t)) {
      this.threads.push({ lane, base: version ?? this.newest[0], left: t, joined: null, version: null, staleness: null, verdict: "open", weight: null });
    }
    if (kind !== "decided" && kind !== "lease_ended") return;
    const thread = this.threads.findLast((each) => each.lane === lane && each.joined === null && each.left <= t);
    if (!thread) return;
    thread.joined = t;
    thread.verdict = kind === "lease_ended" ? "lost" : verdict === "rejected" || verdict === "held" ? verdict : "applied";
    if (thread.verdict === "lost" || thread.verdict === "rejected") return;
    thread.version = version ?? null;
    thread.staleness = staleness ?? null;
    thread.weight = weight ?? null;
    this.stalenessMax = Math.max(this.stalenessMax, staleness ?? 0);
    this.joins.push({ at: t, lane, step: staleness ?? 0 });
  }

  private joined(t: number): void {
    const last = this.rates.at(-1)?.[0] ?? 0;
    const spacing = Math.max(RATE_S, this.rates.length > 1 ? this.rates[1]![0] - this.rates[0]![0] : 0);
    this.joining += 1;
    if (t - last < spacing) return;
    const before = this.rates.at(-1)?.[1];
    const rate = this.joining / (t - last);
    this.rates.push([t, before === undefined ? rate : (before * 2 + rate) / 3]);
    this.joining = 0;
  }

  get newest(): [number, number] {
    return this.versions[this.versions.length - 1]!;
  }

  /** The version of a moment, with its fraction towards the next one. */
  versionAt(t: number): number {
    const at = lastAtMost(this.versions, t, 1);
    const [version, since] = this.versions[Math.max(0, at)]!;
    const next = this.versions[at + 1];
    if (at < 0) return version;
    return next ? version + Math.min(0.999, (t - since) / Math.max(1e-9, next[1] - since)) * (next[0] - version) : version;
  }

  /** Where a thread leaves the channel and where it comes back, on the axis; an open one ends at `now`. */
  span(thread: Thread, by: By, now: number): [number, number] {
    if (by === "time") return [thread.left, thread.joined ?? Math.max(now, thread.left)];
    if (thread.joined === null) return [thread.base, Math.max(thread.base, this.versionAt(now))];
    return [thread.base, thread.version ?? Math.max(thread.base, this.versionAt(thread.joined))];
  }

  /** Updates that joined, per second, about a moment. */
  rateAt(t: number): number {
    const at = lastAtMost(this.rates, t, 0);
    const here = this.rates[Math.max(0, at)];
    const next = this.rates[at + 1];
    if (!here) return 0;
    if (!next || at < 0) return here[1];
    const share = (t - here[0]) / Math.max(1e-9, next[0] - here[0]);
    return here[1] + share * (next[1] - here[1]);
  }

  /** The moment of a version, for axes that count in versions. */
  timeOf(version: number): number {
    const at = lastAtMost(this.versions, version, 0);
    const here = this.versions[Math.max(0, at)]!;
    const next = this.versions[at + 1];
    return next ? here[1] + ((version - here[0]) / Math.max(1, next[0] - here[0])) * (next[1] - here[1]) : here[1];
  }
}

/** The index of the last row whose `column` is at most `value`, or -1; rows ascend. */
export function lastAtMost(rows: readonly (readonly [number, number])[], value: number, column: 0 | 1): number {
  let low = 0;
  let high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle]![column] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

const NEIGHBOURS = 3; // slots on each side that a rate is smoothed over: the channel widens, it does not flicker
const PASSES = 3;

function smoothed(rates: [number, number][]): [number, number][] {
  let values = rates.map(([, rate]) => rate);
  for (let pass = 0; pass < PASSES; pass += 1) {
    const was = values;
    values = was.map((_, i) => {
      const near = was.slice(Math.max(0, i - NEIGHBOURS), i + NEIGHBOURS + 1);
      return near.reduce((sum, rate) => sum + rate, 0) / near.length;
    });
  }
  return rates.map(([t], i) => [t, values[i]!]);
}

/** The quick near the channel, the slow further out: arms lie in each other, and few cross. */
function placed(lanes: number, threads: Thread[]): number[] {
  const took: number[][] = Array.from({ length: lanes }, () => []);
  for (const { lane, left, joined } of threads) if (joined !== null) took[lane]?.push(joined - left);
  const usual = took.map((each) => each.sort((a, b) => a - b)[each.length >> 1] ?? Infinity);
  const order = usual.map((_, lane) => lane).sort((a, b) => (usual[a]! === usual[b]! ? a - b : usual[a]! - usual[b]!));
  const found: number[] = [];
  order.forEach((lane, at) => (found[lane] = at));
  return found;
}
