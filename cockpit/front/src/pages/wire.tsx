// What travelled: up and down, codec by codec, against the same bytes raw.

import { useMemo } from "preact/hooks";
import { runPath, type Head, type Wire } from "../api";
import { Chart } from "../charts";
import type { PageProps } from "../cockpit";
import { useAsked } from "../live";
import { Answer, Card, Empty, Figure, Figures, Table } from "../parts";
import { bytesText, countText, numberText, plural } from "../text";

const LIVE_EVERY_S = 3;

export function WirePage({ run }: PageProps) {
  const asked = useAsked<Wire>(runPath(run.id, "/wire"), {}, run.goesOn ? LIVE_EVERY_S : 0);
  return (
    <Answer of={asked} what="the wire">
      {(wire) => <Told wire={wire} head={run.head!} />}
    </Answer>
  );
}

const saved = (sent: number, raw: number | null): string => {
  if (!raw || !sent || Math.abs(raw / sent - 1) < 0.005) return "as large as raw";
  return raw > sent ? `${numberText(raw / sent)}x less than raw` : `${numberText(sent / raw)}x more than raw`;
};

function Told({ wire, head }: { wire: Wire; head: Head }) {
  // A server counts bytes from its start on, and updates from the run's: a mean is of the updates whose bytes are known.
  const updates = wire.codecs.reduce((sum, each) => sum + each.updates, 0);
  const bytes = wire.codecs.reduce((sum, each) => sum + each.bytes, 0);
  const raw = wire.codecs.reduce((sum, each) => sum + (each.raw ?? 0), 0);
  const since = head.from_s > 0 ? ", since the server started" : "";
  const curves = useMemo(() => {
    const { time, up, down, up_raw } = wire.series;
    return [
      { name: "up", x: time, y: up, hue: 0 },
      { name: "down", x: time, y: down, hue: 1 },
      ...(up_raw?.some((value) => value !== null) ? [{ name: "up, were it raw", x: time, y: up_raw, hue: 0, dashed: true }] : []),
    ];
  }, [wire.series]);
  return (
    <>
      <Figures>
        <Figure name="Up" value={bytesText(wire.up)} remark={saved(wire.up, wire.up_raw) + since} />
        <Figure name="Down" value={bytesText(wire.down)} remark={saved(wire.down, wire.down_full) + since} />
        <Figure name="An update, up" value={updates ? bytesText(bytes / updates) : "–"} remark={`mean of ${plural(updates, "update")}`} />
        <Figure name="An update, raw" value={updates && raw ? bytesText(raw / updates) : "–"} remark="were nothing compressed" />
      </Figures>
      <div class="charts">
        <Card title="Traffic so far">
          {wire.series.time.length ? <Chart label="Bytes since the start" curves={curves} x="seconds" y="bytes" xName={head.units === "virtual" ? "virtual time" : "time"} fromZero /> : <Empty>Nothing has travelled yet.</Empty>}
        </Card>
        <Card title="Codec by codec" note={wire.codecs.length ? "The bytes that updates took on their way up." : undefined}>
          {wire.codecs.length ? (
            <Table
              label="Codecs"
              head={["codec", "updates", "sent", "raw", "smaller"]}
              rows={wire.codecs.map((each) => [<code>{each.codec}</code>, countText(each.updates), bytesText(each.bytes), bytesText(each.raw), each.ratio === null ? "–" : `${numberText(each.ratio)}x`])}
            />
          ) : (
            <Empty>No update has travelled yet.</Empty>
          )}
        </Card>
        <Card title="Compression's schedule" note={wire.schedule.length ? "What a task travels by, from which version on." : undefined}>
          {wire.schedule.length ? (
            <Table label="Schedule" head={["from version", "up", "down"]} rows={wire.schedule.map((each) => [countText(each.version), <code>{each.uplink}</code>, <code>{each.downlink}</code>])} />
          ) : (
            <Empty>{head.served ? "A server does not tell it: by what updates came stands beside, by codec." : "No record says by what updates and models travelled."} <code>uplink.codec</code> and <code>downlink.codec</code> of the settings choose it.</Empty>
          )}
        </Card>
      </div>
    </>
  );
}
