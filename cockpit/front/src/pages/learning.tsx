// Every metric against time, updates, bytes and versions; other runs over this one.

import { useEffect, useMemo, useState } from "preact/hooks";
import { get, runPath, type Head, type Refused, type RunRow, type Series } from "../api";
import { Chart, type Curve } from "../charts";
import type { PageProps } from "../cockpit";
import { useAsked } from "../live";
import { Card, Choice, Empty, Loading, Trouble } from "../parts";
import { setQuery } from "../router";
import { isShare, type Quantity } from "../text";

const LIVE_EVERY_S = 2;
const POINTS = 2000;

export type Over = "time" | "updates" | "bytes" | "version";
export const OVERS = [["time", "time"], ["updates", "updates"], ["bytes", "traffic"], ["version", "versions"]] as const;
const QUANTITY: Record<Over, Quantity> = { time: "seconds", updates: "count", bytes: "bytes", version: "count" };

export interface Known {
  head: Head;
  series: Series;
}

export function LearningPage({ run, route }: PageProps) {
  const asked = useAsked<Series>(runPath(run.id, "/series"), { points: POINTS }, run.goesOn ? LIVE_EVERY_S : 0);
  const others = (route.query.get("with") ?? "").split(",").filter(Boolean);
  const { known: overlaid, error } = useKnown(others);
  const head = run.head!;
  const runs = useMemo(() => (asked.data ? [{ head, series: asked.data }, ...overlaid] : []), [head, asked.data, overlaid]); // news come more often
  if (!asked.data) return asked.error ? <Empty>{asked.error.message}</Empty> : <Loading what="the measurements" />;
  return (
    <>
      <Overlays self={run.id} chosen={others} />
      {error && <Trouble error={error} />}
      <Learning runs={runs} />
    </>
  );
}

/** Heads and series of runs that stand still here, and why one of them is missing. */
export function useKnown(ids: string[]): { known: Known[]; error: Refused | null } {
  const [found, set] = useState<{ known: Known[]; error: Refused | null }>({ known: [], error: null });
  const key = ids.join(",");
  useEffect(() => {
    let wanted = true;
    const one = async (id: string): Promise<Known> => {
      const [head, series] = await Promise.all([get<Head>(runPath(id)), get<Series>(runPath(id, "/series"), { points: POINTS })]);
      return { head, series };
    };
    void Promise.allSettled(ids.map(one)).then((each) => {
      const failed = each.find((one) => one.status === "rejected");
      if (wanted) set({ known: each.flatMap((one) => (one.status === "fulfilled" ? [one.value] : [])), error: failed ? (failed.reason as Refused) : null });
    });
    return () => {
      wanted = false;
    };
  }, [key]);
  return found;
}

function Overlays({ self, chosen }: { self: string; chosen: string[] }) {
  const asked = useAsked<{ runs: RunRow[] }>("api/runs");
  const others = (asked.data?.runs ?? []).filter((run) => run.id !== self && run.state !== "unreadable");
  if (!others.length) return null;
  const toggle = (id: string): void => setQuery("with", (chosen.includes(id) ? chosen.filter((each) => each !== id) : [...chosen, id]).join(","));
  return (
    <details class="overlays" open={chosen.length > 0}>
      <summary>Lay other runs over this one</summary>
      <div class="overlay-list">
        {others.map((run) => (
          <label key={run.id}>
            <input type="checkbox" checked={chosen.includes(run.id)} onChange={() => toggle(run.id)} /> {run.title}
          </label>
        ))}
      </div>
    </details>
  );
}

export function Learning({ runs }: { runs: Known[] }) {
  const [over, setOver] = useState<Over>("time");
  const names = useMemo(() => metricNames(runs), [runs]);
  const virtual = runs.some(({ head }) => head.units === "virtual");
  const xName = { time: virtual ? "virtual time" : "time", updates: "updates", bytes: "up and down", version: "version" }[over];
  return (
    <>
      <div class="tools">
        <Choice label="Against" of={OVERS} value={over} set={setOver} />
        {runs.length > 1 && <RunKey runs={runs} />}
      </div>
      {!names.length && <Empty>No version of this run was evaluated yet. A follower measures it: <code>anabranch evaluate APP --admin HOST:PORT</code>; a simulation measures by itself.</Empty>}
      <div class="charts">
        {names.map((name) => (
          <MetricCard key={name} name={name} runs={runs} over={over} xName={xName} />
        ))}
        <SeriesCard title="Staleness of what was applied" runs={runs} over={over} xName={xName} of={(s) => s.staleness} unit="count" />
        <SeriesCard title="Updates applied" runs={runs} over={over} xName={xName} of={(s) => s.updates} unit="count" stepped />
        <SeriesCard title="Bytes up and down" runs={runs} over={over} xName={xName} of={traffic} unit="bytes" />
        <SeriesCard title="Versions" runs={runs} over={over} xName={xName} of={(s) => s.version} unit="count" stepped />
      </div>
    </>
  );
}

const RunKey = ({ runs }: { runs: Known[] }) => (
  <ul class="legend" aria-label="Runs">
    {runs.map(({ head }, i) => (
      <li key={head.id}>
        <i class={`key c${i % 8}`} />
        {head.title}
      </li>
    ))}
  </ul>
);

/** What the run is judged by first, then accuracies, losses and the rest by their names. */
function metricNames(runs: Known[]): string[] {
  const found = new Set(runs.flatMap(({ series }) => Object.keys(series.metrics)));
  const judged = runs[0]?.head.judged_by;
  const rank = (name: string): number => (name === judged ? 0 : name === "accuracy" ? 1 : name === "loss" ? 2 : 3);
  return [...found].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

function MetricCard({ name, runs, over, xName }: { name: string; runs: Known[]; over: Over; xName: string }) {
  const curves = useMemo(
    () =>
      runs.flatMap(({ head, series }, i): Curve[] => {
        const metric = series.metrics[name];
        return metric?.value.length ? [{ name: runs.length > 1 ? head.title : name, x: metric[over], y: metric.value, hue: i % 8 }] : [];
      }),
    [runs, name, over],
  );
  const first = runs[0]!.head;
  const target = name === first.judged_by ? first.target : null;
  const told = first.metrics.find((metric) => metric.name === name)?.mode;
  const note = [told ? (told === "max" ? "More is better." : "Less is better.") : "", target === null ? "" : "The dashed line is the target."].filter(Boolean).join(" ");
  return (
    <Card title={name} note={note}>
      <Chart label={`${name} against ${xName}`} curves={curves} x={QUANTITY[over]} y={isShare(name) ? "share" : "count"} xName={xName} target={target} />
    </Card>
  );
}

const traffic = (series: Series): (number | null)[] => series.up.map((up, i) => (up === null || series.down[i] == null ? null : up + series.down[i]));

interface SeriesCardProps {
  title: string;
  runs: Known[];
  over: Over;
  xName: string;
  of: (series: Series) => (number | null)[];
  unit: Quantity;
  stepped?: boolean;
}

function SeriesCard({ title, runs, over, xName, of, unit, stepped }: SeriesCardProps) {
  const curves = useMemo(
    () => runs.map(({ head, series }, i): Curve => ({ name: runs.length > 1 ? head.title : title.toLowerCase(), x: places(series, over), y: of(series), hue: i % 8 })).filter((curve) => curve.x.length > 0),
    [runs, over],
  );
  if (!curves.length) return null;
  return (
    <Card title={title}>
      <Chart label={`${title} against ${xName}`} curves={curves} x={QUANTITY[over]} y={unit} xName={xName} fromZero {...(stepped ? { stepped } : {})} />
    </Card>
  );
}

/** Where each point stands on the chosen axis; what is unknown stays where the last one was. */
function places(series: Series, over: Over): number[] {
  const raw = over === "time" ? series.time : over === "version" ? series.version : over === "updates" ? series.updates : traffic(series);
  let last = 0;
  return raw.map((value) => (last = Math.max(last, value ?? last)));
}
