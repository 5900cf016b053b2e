// Every run that the server of this page knows.

import { useEffect, useState } from "preact/hooks";
import type { RunRow, Session, Unreadable } from "../api";
import { useAsked } from "../live";
import { Answer, Empty, State } from "../parts";
import { link } from "../router";
import { countText, judged, metricText, momentText, namedText } from "../text";

const EVERY_S = 5;
const COMPARED_MAX = 8;

export function Runs({ session }: { session: Session }) {
  const asked = useAsked<{ runs: (RunRow | Unreadable)[] }>("api/runs", {}, EVERY_S);
  useEffect(() => {
    const only = asked.data?.runs.length === 1 && session.runs === 1 ? asked.data.runs[0] : undefined;
    if (only) location.replace(link("run", only.id, "river"));
  }, [asked.data]);
  return (
    <>
      <h1>Runs</h1>
      <Answer of={asked} what="the runs">
        {({ runs }) => (runs.length ? <Rows runs={runs} /> : <Empty>There is no run here yet. <code>anabranch simulate digits --out runs/first</code> makes one; this page finds it.</Empty>)}
      </Answer>
    </>
  );
}

function Rows({ runs: all }: { runs: (RunRow | Unreadable)[] }) {
  const runs = all.filter((run): run is RunRow => run.state !== "unreadable");
  const unread = all.filter((run): run is Unreadable => run.state === "unreadable");
  const [chosen, choose] = useState<string[]>([]);
  const toggle = (id: string): void => choose(chosen.includes(id) ? chosen.filter((each) => each !== id) : [...chosen, id].slice(-COMPARED_MAX));
  return (
    <>
      {runs.length > 1 && (
        <p class="compare-bar">
          {chosen.length > 1 ? (
            <>
              <a class="button" href={`${link("compare")}?runs=${chosen.map(encodeURIComponent).join(",")}`}>
                Put {chosen.length} runs side by side
              </a>
              {chosen.length === COMPARED_MAX && <span class="soft"> These are the most: the next one takes the place of the first.</span>}
            </>
          ) : (
            <span class="soft">Choose two runs or more to put them side by side.</span>
          )}
        </p>
      )}
      <ul class="runs">
        {runs.map((run) => (
          <li key={run.id} class="card run">
            <div class="run-head">
              {runs.length > 1 && <input type="checkbox" checked={chosen.includes(run.id)} onChange={() => toggle(run.id)} aria-label={`Compare ${run.title}`} />}
              <h2>
                <a href={link("run", run.id, "river")}>{run.title}</a>
              </h2>
              <State of={run.given_up ? "given_up" : run.state} />
            </div>
            <p class="soft">
              {namedText(run)}
              {[run.strategy && `${run.strategy} on ${run.workload}`, run.framework, run.kind, run.seed === null ? "" : `seed ${run.seed}`].filter(Boolean).join(", ")}
            </p>
            <dl class="run-figures">
              <div>
                <dt>best {judged(run.metric)}</dt>
                <dd>{metricText(run.metric ?? "", run.best)}</dd>
              </div>
              <div>
                <dt>versions</dt>
                <dd>{countText(run.version)}</dd>
              </div>
              <div>
                <dt>updates</dt>
                <dd>{countText(run.updates)}</dd>
              </div>
              <div>
                <dt>started</dt>
                <dd class="small">{momentText(run.started_at)}</dd>
              </div>
            </dl>
          </li>
        ))}
        {unread.map((run) => (
          <li key={run.id} class="card run">
            <div class="run-head">
              <h2>{run.title}</h2>
              <State of="unreadable" />
            </div>
            <p class="soft">{run.why}</p>
          </li>
        ))}
      </ul>
    </>
  );
}
