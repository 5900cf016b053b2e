// One device: how it stands, its arm of the river, its tasks, what its training said.

import { useMemo } from "preact/hooks";
import { runPath, type Device } from "../api";
import { Chart } from "../charts";
import type { PageProps } from "../cockpit";
import { useAsked, type Run } from "../live";
import { OrderButton } from "../orders";
import { Answer, Card, Empty, Figure, Figures, Since, State, Table } from "../parts";
import { RiverView } from "../river/view";
import { link } from "../router";
import { bytesText, countText, isShare, numberText, percentText, plural, secondsText, words } from "../text";

const LIVE_EVERY_S = 3;

export function DevicePage({ run, session, route }: PageProps) {
  const client = route.parts[3] ?? "";
  const asked = useAsked<Device>(runPath(run.id, `/devices/${encodeURIComponent(client)}`), {}, run.goesOn ? LIVE_EVERY_S : 0);
  return (
    <>
      <div class="device-head">
        <a href={link("run", run.id, "fleet")}>Fleet</a>
        <span aria-hidden="true">/</span>
        <h2>{client}</h2>
        {asked.data && <State of={run.stateOf(asked.data)} />}
        <span class="spread" />
        {asked.data && run.head!.served && (
          <OrderButton run={run} session={session} order={asked.data.quarantined ? "release" : "quarantine"} given={{ client }}>
            {asked.data.quarantined ? "Release" : "Quarantine"}
          </OrderButton>
        )}
      </div>
      <Answer of={asked} what="the device">
        {(device) => <Told device={device} run={run} client={client} />}
      </Answer>
    </>
  );
}

function Told({ device, run, client }: { device: Device; run: Run; client: string }) {
  const seen = device.seen_s === null ? "–" : run.goesOn ? `${secondsText(Math.max(0, run.head!.now_s - device.seen_s))} ago` : `at ${secondsText(device.seen_s)}`;
  return (
    <>
      {device.quarantined && (
        <p class="notice" role="status">
          In quarantine: {device.quarantined}. It gets no task until it is released.
        </p>
      )}
      {device.run_twice && <p class="notice">This device was lately run by two processes at a time. Stop one: they take each other's tasks.</p>}
      <Figures>
        <Figure name="Updates applied" value={countText(device.updates)} remark={device.rejected ? `${countText(device.rejected)} rejected` : "none rejected"} />
        <Figure name="Mean staleness" value={numberText(device.staleness)} remark={device.behind === null ? "versions" : `${plural(device.behind, "version")} behind by now`} />
        <Figure name="A task takes" value={secondsText(device.speed_s)} remark="median, from grant to push" />
        <Figure name="Sent" value={bytesText(device.up)} remark={`${bytesText(device.down)} received`} />
        <Figure name="Examples" value={countText(device.examples)} remark="trained on, all updates" />
        {device.heard !== null && <Figure name="Heard by the rule" value={percentText(device.heard, 0)} remark="of its updates, on average" />}
        {device.width !== null && <Figure name="Width" value={percentText(device.width, 0)} remark="of the model's numbers, its newest task" />}
        <Figure name="Last seen" value={seen} remark={device.lease_until_s === null || !run.goesOn ? device.state !== "training" ? "holds no task" : run.goesOn ? "trains" : "its task was still out" : `its lease lasts until ${secondsText(device.lease_until_s)}`} />
      </Figures>
      <Since from_s={run.head!.from_s} />
      <Card title="Its arm of the river" wide>
        <RiverView run={run} clients={client} compact />
      </Card>
      <Tasks device={device} />
      <Metrics device={device} />
    </>
  );
}

function Tasks({ device }: { device: Device }) {
  if (!device.tasks.length) return <Card title="Tasks"><Empty>It has had no task yet.</Empty></Card>;
  const rows = device.tasks.map((task) => [
    <code title={task.task}>{task.task.slice(0, 8)}</code>,
    countText(task.base),
    secondsText(task.granted_s),
    task.granted_s === null || task.ended_s === null ? "–" : secondsText(task.ended_s - task.granted_s),
    <State of={task.verdict} />,
    task.reason ? words(task.reason) : countText(task.version),
    countText(task.staleness),
    numberText(task.weight),
    bytesText(task.up),
    bytesText(task.down),
  ]);
  return (
    <Card title="Tasks" note={device.tasks_of > device.tasks.length ? `The newest ${device.tasks.length} of ${countText(device.tasks_of)}.` : undefined}>
      <Table label="Its tasks, the newest first" head={["task", "base", "granted", "took", "verdict", "counted in", "staleness", "weight", "up", "down"]} rows={rows} />
    </Card>
  );
}

function Metrics({ device }: { device: Device }) {
  const names = Object.keys(device.metrics).filter((name) => device.metrics[name]!.value.length);
  return (
    <div class="charts">
      {names.map((name) => (
        <MetricChart key={name} name={name} {...device.metrics[name]!} />
      ))}
    </div>
  );
}

function MetricChart({ name, version, value }: { name: string; version: number[]; value: (number | null)[] }) {
  const curves = useMemo(() => [{ name, x: version, y: value }], [version, value]);
  return (
    <Card title={`${name} of its training`}>
      <Chart label={`${name} against versions`} curves={curves} x="count" y={isShare(name) ? "share" : "count"} xName="version" />
    </Card>
  );
}
