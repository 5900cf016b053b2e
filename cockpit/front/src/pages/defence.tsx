// What the run was defended against: rejections, clips, quarantine, and who was rejected how often.

import { useMemo } from "preact/hooks";
import { runPath, type Defence, type Privacy } from "../api";
import { Chart } from "../charts";
import type { PageProps } from "../cockpit";
import { useAsked, type Run } from "../live";
import { Answer, Bars, Card, Empty, Figure, Figures, Table } from "../parts";
import { link } from "../router";
import { countText, numberText, percentText, plural, secondsText, words } from "../text";

const LIVE_EVERY_S = 3;
const SCORES_MAX = 40;
const HEARD_MAX = 20;

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
  const { applied, rejected } = run.head!.counters;
  const decided = applied + rejected;
  const before = rejected - reasons.reduce((sum, [, count]) => sum + count, 0); // this cockpit was not there yet
  const curves = useMemo(() => reasons.slice(0, 8).map(([reason], i) => ({ name: words(reason), x: d.series.time, y: d.series.by_reason[reason] ?? [], hue: i })), [d]);
  return (
    <>
      <Figures>
        <Figure name="Rejected" value={countText(rejected)} remark={decided ? `${percentText(rejected / decided)} of all updates` : "nothing decided yet"} />
        <Figure name="Clipped" value={countText(d.clipped)} remark={d.clipped === null ? "not counted here" : "updates shortened to the bound"} />
        <Figure name="In quarantine" value={countText(d.quarantined.length)} remark={d.quarantined.length ? "no task until released" : "nobody"} />
        <Figure name="Rule" value={rule ? words(rule) : "mean"} remark={rule ? "robust aggregation" : "no robust rule is set"} />
      </Figures>
      <div class="cards">
        <Card title="Rejections by reason" note={before > 0 ? `Why ${plural(before, "other update")} ${before === 1 ? "was" : "were"} rejected, before this cockpit was opened, it was not told.` : undefined}>
          {reasons.length ? <Bars hue={1} rows={reasons.map(([reason, count]) => ({ name: words(reason), value: count, text: countText(count) }))} /> : <Empty>{before > 0 ? "None since this cockpit was opened." : "No update was rejected."}</Empty>}
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
        {d.heard.devices.length > 0 && <Heard of={d.heard} rule={rule ?? ""} run={run} />}
        {d.privacy && <Private of={d.privacy} />}
        {d.scores.length > 0 && (
          <Card title="Share of a device's updates that was rejected" note={d.scores.length > SCORES_MAX ? `The ${SCORES_MAX} highest of ${plural(d.scores.length, "device")}.` : undefined}>
            <Bars hue={3} rows={[...d.scores].sort((a, b) => b.score - a.score).slice(0, SCORES_MAX).map((each) => ({ name: <Device run={run} client={each.client} />, key: each.client, value: each.score, text: percentText(each.score, 0) }))} />
          </Card>
        )}
      </div>
    </>
  );
}

/** Whom the robust rule has heard how much: who is left out again and again is not like the others. */
function Heard({ of, rule, run }: { of: Defence["heard"]; rule: string; run: Run }) {
  const { time, least, middle } = of.series;
  const curves = useMemo(
    () => [
      { name: "median update", x: time, y: middle, hue: 0 },
      { name: "least update", x: time, y: least, hue: 3 },
    ],
    [of],
  );
  const rows = of.devices.slice(0, HEARD_MAX).map((each) => ({
    name: <Device run={run} client={each.client} />,
    key: each.client,
    value: each.heard,
    text: percentText(each.heard, 0),
    title: `mean of ${plural(each.updates, "update")}`,
  }));
  return (
    <>
      <Card title="How much the rule heard of each device" note={`${words(rule)}: the mean over its updates, the least first${of.of > rows.length ? `: ${rows.length} of ${countText(of.of)}` : ""}. Devices whose data are unlike the others' are heard less too.`}>
        <Bars hue={0} most={1} rows={rows} />
      </Card>
      <Card title="How much the rule heard of each version's updates">
        <Chart label="Heard of the updates of each version" curves={curves} x="seconds" y="share" xName="time" fromZero />
      </Card>
    </>
  );
}

/** What a private run promises, and what of that its versions have used so far. */
function Private({ of }: { of: Privacy }) {
  const rows = [
    ["epsilon so far", numberText(of.epsilon_so_far)],
    ["epsilon at the end", numberText(of.epsilon)],
    ["delta", numberText(of.delta)],
    ["clip", `${numberText(of.clip)}, the longest that an update counts`],
    ["noise", `${numberText(of.noise)} clips, ${of.bands === 1 ? "independent" : `correlated over ${of.bands} versions`}`],
    ["participations", `${countText(of.participations_max)} updates of a ${of.unit}, at most`],
    ["separation", `${plural(of.separation, "version")} from one of them to the next`],
  ];
  return (
    <Card title="Differential privacy" note={`For each ${of.unit}, of all versions together.`}>
      <Table label="Differential privacy" head={["", ""]} rows={rows} />
    </Card>
  );
}

const Device = ({ run, client }: { run: Run; client: string }) => <a href={link("run", run.id, "device", client)}>{client}</a>;
