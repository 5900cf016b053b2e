// The server itself: is it well, and what does it wait for?

import { useMemo } from "preact/hooks";
import { runPath, type Quantiles, type ServerFigures } from "../api";
import { Chart } from "../charts";
import type { PageProps } from "../cockpit";
import { useAsked } from "../live";
import { Answer, Card, Figure, Figures, Table } from "../parts";
import { bytesText, countText, numberText, secondsText, type Quantity } from "../text";

const LIVE_EVERY_S = 2;

export function ServerPage({ run }: PageProps) {
  const asked = useAsked<ServerFigures>(runPath(run.id, "/server"), {}, run.goesOn ? LIVE_EVERY_S : 0);
  return (
    <Answer of={asked} what="the server's figures">
      {(figures) => <Told figures={figures} />}
    </Answer>
  );
}

const milliseconds = (value: number | null | undefined): string => (value === null || value === undefined ? "–" : `${numberText(value)} ms`);
const NAMES: Record<string, [title: string, unit: Quantity]> = {
  queue: ["Pushes waiting to be committed", "count"],
  commit_ms: ["A commit takes, ms", "count"],
  shed: ["Calls shed", "count"],
  memory: ["Memory", "bytes"],
};

function Told({ figures: f }: { figures: ServerFigures }) {
  const full = f.queue !== null && f.queue_max ? f.queue / f.queue_max : 0;
  const shed = (f.shed ?? 0) + (f.refused ?? 0);
  const times: [string, Quantiles | null, (value: number | null | undefined) => string][] = [
    ["commit", f.commit_ms, milliseconds],
    ["fsync", f.fsync_ms, milliseconds],
    ["updates in a batch", f.batch, numberText],
  ];
  return (
    <>
      <Figures>
        <Figure name="Queue" value={countText(f.queue)} remark={f.queue_max ? `of ${countText(f.queue_max)}` : ""} tone={full > 0.8 ? "bad" : ""} />
        <Figure name="Commit" value={milliseconds(f.commit_ms?.p50)} remark={`99 of 100 within ${milliseconds(f.commit_ms?.p99)}`} />
        <Figure name="Calls shed" value={countText(f.shed)} remark={f.refused ? `${countText(f.refused)} refused` : "devices come again by themselves"} tone={shed > 0 ? "warn" : ""} />
        <Figure name="Memory" value={bytesText(f.memory_bytes)} />
        <Figure name="Disk free" value={bytesText(f.disk_free_bytes)} />
        <Figure name="Up for" value={secondsText(f.uptime_s)} remark={f.leader ? `leader: ${f.leader}` : ""} />
      </Figures>
      <div class="charts">
        {Object.entries(NAMES).map(([key, [title, unit]]) => (
          <SeriesChart key={key} title={title} time={f.series.time} values={f.series[key]} unit={unit} />
        ))}
        <Card title="How long things take">
          <Table
            label="Times"
            head={["", "median", "9 of 10 within", "99 of 100 within"]}
            rows={times.map(([name, found, text]) => [name, text(found?.p50), text(found?.p90), text(found?.p99)])}
          />
        </Card>
      </div>
    </>
  );
}

function SeriesChart({ title, time, values, unit }: { title: string; time: number[]; values: (number | null)[] | undefined; unit: Quantity }) {
  const curves = useMemo(() => [{ name: title.toLowerCase(), x: time, y: values ?? [] }], [time, values]);
  if (!values?.some((value) => value !== null)) return null;
  return (
    <Card title={title}>
      <Chart label={title} curves={curves} x="seconds" y={unit} xName="time" fromZero />
    </Card>
  );
}
