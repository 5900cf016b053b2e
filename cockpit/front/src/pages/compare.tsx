// Runs side by side: their figures as a table, their measurements over each other.

import { Empty, Loading, Table, Trouble } from "../parts";
import { link } from "../router";
import { bytesText, countText, metricText, plural, secondsText } from "../text";
import { Learning, useKnown } from "./learning";

export function Compare({ ids }: { ids: string[] }) {
  const { known: runs, error } = useKnown(ids);
  if (!ids.length) return <Empty>No run was chosen. <a href="#/">Choose some</a>.</Empty>;
  if (!runs.length) return error ? <Trouble error={error} /> : <Loading what="the runs" />;
  const rows = runs.map(({ head }) => [
    <a href={link("run", head.id, "river")}>{head.title}</a>,
    head.strategy,
    head.judged_by ? `${head.judged_by} ${metricText(head.judged_by, head.best)}` : "–",
    countText(head.version),
    countText(head.counters.applied),
    countText(head.counters.rejected),
    secondsText(head.now_s),
    bytesText(head.counters.up),
    bytesText(head.counters.down),
  ]);
  return (
    <>
      <h1>{plural(runs.length, "run")} side by side</h1>
      {error && <Trouble error={error} />}
      <section class="card">
        <Table label="The runs' figures" head={["run", "strategy", "best", "versions", "updates", "rejected", "time", "up", "down"]} rows={rows} />
      </section>
      <Learning runs={runs} />
    </>
  );
}
