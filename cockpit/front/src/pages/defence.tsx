// What the run was defended against: rejections, clips, quarantine, and who was rejected how often.

import { useMemo } from "preact/hooks";
import { runPath, type Defence } from "../api";
import { Chart } from "../charts";
import type { PageProps } from "../cockpit";
import { useAsked, type Run } from "../live";
import { Answer, Bars, Card, Empty, Figure, Figures, Table } from "../parts";
import { link } from "../router";
import { countText, percentText, plural, secondsText, words } from "../text";

const LIVE_EVERY_S = 3;
const SCORES_MAX = 40;

export function DefencePage({ run }: PageProps) {
  const asked = useAsked<Defence>(runPath(run.id, "/defence"), {}, run.goesOn ? LIVE_EVERY_S : 0);
  return (
    <Answer of={asked} what="the defence">
      {(defence) => <Told defence={defence} run={run} />}
    </Answer>
  );
}

function Told({ defence: d, run }: { defence: Defence; run: Run }) {
  const rule = d.rule === "none" ? null : d.rule;
  const reasons = Object.entries(d.rejected).sort((a, b) => b[1] - a[1]);
  const rejected = reasons.reduce((sum, [, count]) => sum + count, 0);
  const decided = run.head!.counters.applied + run.head!.counters.rejected;
  const curves = useMemo(() => reasons.slice(0, 8).map(([reason], i) => ({ name: words(reason), x: d.series.time, y: d.series.by_reason[reason] ?? [], hue: i })), [d]);
  return (
    <>
      <Figures>
        <Figure name="Rejected" value={countText(rejected)} remark={decided ? `${percentText(rejected / decided)} of all updates` : "nothing decided yet"} />
        <Figure name="Clipped" value={countText(d.clipped)} remark={d.clipped === null ? "no clip is set, or it is not counted" : "updates shortened to the bound"} />
        <Figure name="In quarantine" value={countText(d.quarantined.length)} remark={d.quarantined.length ? "no task until released" : "nobody"} />
        <Figure name="Rule" value={rule ? words(rule) : "mean"} remark={rule ? "robust aggregation" : "no robust rule is set"} />
      </Figures>
      <div class="charts">
        <Card title="Rejections by reason">
          {reasons.length ? <Bars hue={1} rows={reasons.map(([reason, count]) => ({ name: words(reason), value: count, text: countText(count) }))} /> : <Empty>No update was rejected.</Empty>}
        </Card>
        {reasons.length > 0 && d.series.time.length > 0 && (
          <Card title="Rejections along time">
            <Chart label="Rejected updates by reason" curves={curves} x="seconds" y="count" xName="time" stepped fromZero />
          </Card>
        )}
        <Card title="Quarantine">
          {d.quarantined.length ? (
            <Table label="Devices in quarantine" head={["device", "why", "since"]} rows={d.quarantined.map((each) => [<Device run={run} client={each.client} />, each.why, secondsText(each.at_s)])} />
          ) : (
            <Empty>No device is in quarantine.</Empty>
          )}
        </Card>
        <Card title="Flaws" note={d.flaws.length ? "Updates that no honest device sends, and those that the clip has cut." : undefined}>
          {d.flaws.length ? (
            <Table label="Flaws by device" head={["device", "flaws", "shortened"]} rows={d.flaws.map((each) => [<Device run={run} client={each.client} />, countText(each.flaws), countText(each.shortened)])} />
          ) : (
            <Empty>Nothing is known against any device.</Empty>
          )}
        </Card>
        {d.scores.length > 0 && (
          <Card title="Share of a device's updates that was rejected" note={d.scores.length > SCORES_MAX ? `The ${SCORES_MAX} highest of ${plural(d.scores.length, "device")}.` : undefined}>
            <Bars hue={3} rows={[...d.scores].sort((a, b) => b.score - a.score).slice(0, SCORES_MAX).map((each) => ({ name: each.client, value: each.score, text: percentText(each.score) }))} />
          </Card>
        )}
      </div>
    </>
  );
}

const Device = ({ run, client }: { run: Run; client: string }) => <a href={link("run", run.id, "device", client)}>{client}</a>;
