// What the cockpit's server answers, and how it is asked.

export type Numbers = (number | null)[];
export type RunState = "running" | "finished" | "interrupted" | "paused" | "unreadable";
export type Kind = "live" | "simulated";

export interface Session {
  csrf: string;
  operator: string | null;
  orders: boolean;
  runs: 1 | "many" | number;
}

export interface RunRow {
  id: string;
  title: string; // of no other run that is shown
  given_up: boolean; // it has ended because nothing came of it
  name: string;
  strategy: string;
  workload: string;
  kind: Kind;
  framework: string | null; // whose app it runs, where that is none of ours
  served: boolean; // by a server, now: others are read from files
  state: RunState;
  updates: number | null; // null: nobody has read its records yet
  version: number | null;
  metric: string | null;
  best: number | null;
  seed: number | null;
  started_at: number | null;
}

/** What the list says of a run whose files cannot be read. */
export interface Unreadable {
  id: string;
  title: string;
  state: "unreadable";
  why: string;
}

export interface Counters {
  applied: number;
  rejected: number;
  duplicate: number | null;
  tasks: number | null;
  leases_lost: number | null;
  clients: number;
  online: number | null;
  up: number;
  down: number;
  up_raw: number | null;
  down_full: number | null;
}

export interface Metric {
  name: string;
  mode: "max" | "min" | null;
}

export interface SettingChange {
  path: string;
  value: unknown;
  was: unknown;
  by: string;
  at_s: number | null;
}

export interface Head extends RunRow {
  updates: number;
  version: number;
  config: Record<string, unknown>;
  config_toml: string;
  metrics: Metric[];
  judged_by: string | null;
  target: number | null;
  counters: Counters;
  uptime_s: number | null;
  now_s: number;
  from_s: number; // since when each task is known
  ended: string | null;
  settings_changed: SettingChange[];
  units: "virtual" | "real";
}

export interface MetricSeries {
  time: number[];
  version: number[];
  updates: number[];
  bytes: number[];
  value: Numbers;
}

export interface Series {
  time: number[];
  version: Numbers;
  updates: Numbers;
  up: Numbers;
  down: Numbers;
  staleness: Numbers;
  metrics: Record<string, MetricSeries>;
}

export type Verdict = "applied" | "held" | "rejected" | "lost" | "open";
export type ThreadRow = [
  lane: number,
  base: number,
  left_s: number,
  joined_version: number | null,
  joined_s: number | null,
  staleness: number | null,
  verdict: Verdict,
  weight: number | null,
];

export interface River {
  versions: [version: number, time: number][];
  lanes: string[];
  lanes_of: number;
  threads: ThreadRow[];
  staleness_max: number;
  thinned: boolean;
  rates?: [time: number, joined_per_s: number][];
}

export interface FleetRow {
  client: string;
  state: string;
  updates: number;
  rejected: number;
  examples: number | null;
  staleness: number | null;
  up: number | null;
  down: number | null;
  seen_s: number | null;
  behind: number | null;
  speed_s: number | null;
  flaws: number | null;
  heard: number | null;
  width: number | null;
  quarantined: string;
}

export interface Fleet {
  total: number;
  matching: number;
  parts: boolean;
  states: Record<string, number>;
  rows: FleetRow[];
}

export interface Task {
  task: string;
  base: number;
  granted_s: number | null;
  ended_s: number | null;
  version: number | null;
  verdict: Verdict;
  reason: string | null;
  staleness: number | null;
  weight: number | null;
  up: number | null;
  down: number | null;
}

export interface Device extends FleetRow {
  tasks: Task[];
  metrics: Record<string, { version: number[]; value: Numbers }>;
  lease_until_s: number | null;
  run_twice: boolean;
  tasks_of: number;
}

export interface Wire {
  up: number;
  down: number;
  up_raw: number | null;
  down_full: number | null;
  series: { time: number[]; up: Numbers; down: Numbers; up_raw?: Numbers };
  codecs: { codec: string; updates: number; bytes: number; raw: number | null; ratio: number | null }[];
  schedule: { version: number; uplink: string; downlink: string }[];
}

export interface Quantiles {
  p50: number | null;
  p90: number | null;
  p99: number | null;
}

export interface ServerFigures {
  queue: number | null;
  queue_max: number | null;
  commit_ms: Quantiles | null;
  fsync_ms: Quantiles | null;
  batch: Quantiles | null;
  shed: number | null;
  refused: number | null;
  memory_bytes: number | null;
  leader: string | null;
  disk_free_bytes: number | null;
  uptime_s: number | null;
  series: Record<string, Numbers> & { time: number[] };
}

export interface Defence {
  rejected: Record<string, number>;
  series: { time: number[]; by_reason: Record<string, Numbers> };
  clipped: number | null; // null: not known
  quarantined: { client: string; why: string; at_s: number | null }[];
  flaws: { client: string; flaws: number; shortened: number }[];
  rule: string | null;
  heard: { of: number; devices: { client: string; heard: number; updates: number }[]; series: { time: number[]; version: number[]; least: Numbers; middle: Numbers } };
  scores: { client: string; score: number }[];
  privacy: Privacy | null;
}

/** What a private run promises. */
export interface Privacy {
  epsilon: number;
  delta: number;
  epsilon_so_far: number;
  unit: string;
  mechanism: string;
  clip: number;
  noise: number;
  bands: number;
  participations_max: number;
  separation: number;
}

export interface NewsRecord {
  t: number;
  kind: string;
  client?: string;
  version?: number;
  verdict?: Verdict;
  staleness?: number | null;
  weight?: number | null;
  reason?: string;
  metrics?: Record<string, number | null>;
}

export interface News {
  now_s: number;
  version: number;
  counters: Counters;
  state: RunState;
  records: NewsRecord[];
  dropped: number;
}

/** An answer that is none: `status` 0 where the server was not reached at all. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    said: string,
  ) {
    super(said);
  }
}

const UNREACHED = "The cockpit's server does not answer. Is `anabranch ui`, or the server that began it, still running?";

async function answered<T>(address: string, init?: RequestInit): Promise<T> {
  const unreached = (error: unknown): never => {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Refused(0, UNREACHED);
  };
  const answer = await fetch(address, { credentials: "same-origin", ...init }).catch(unreached);
  if (answer.ok) return (await answer.json().catch(unreached)) as T; // a line may be cut in the midst of an answer
  const said: unknown = await answer.json().catch(() => null);
  throw new Refused(answer.status, (said as { error?: string } | null)?.error ?? `The server answered ${answer.status}.`);
}

export type Query = Record<string, string | number | null | undefined>;

export function address(path: string, query: Query = {}): string {
  const told = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(told.map(([key, value]) => [key, String(value)])).toString();
  return search ? `${path}?${search}` : path;
}

export const runPath = (run: string, rest = ""): string => `api/runs/${encodeURIComponent(run)}${rest}`;

export const get = <T>(path: string, query?: Query, signal?: AbortSignal): Promise<T> =>
  answered<T>(address(path, query), signal ? { signal } : {});

let csrf = "";

export async function openSession(): Promise<Session> {
  const session = await get<Session>("api/session");
  csrf = session.csrf;
  return session;
}

const posted = <T>(path: string, body: unknown): Promise<T> =>
  answered<T>(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Anabranch": csrf },
    body: JSON.stringify(body),
  });

/** An order. Where somebody has logged in anew meanwhile, in another window, the session's word is another now. */
export async function post<T>(path: string, body: unknown): Promise<T> {
  const was = csrf;
  try {
    return await posted<T>(path, body);
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 403) throw error;
    await openSession();
    if (csrf === was) throw error;
    return posted<T>(path, body);
  }
}
