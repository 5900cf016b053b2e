// The fleet: the server sorts, filters and cuts; only the rows in sight are here.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, Refused, runPath, type Fleet, type FleetRow } from "../api";
import type { PageProps } from "../cockpit";
import { repeated, type Run } from "../live";
import { Empty, Loading, Since, State, Trouble } from "../parts";
import { link, setQuery } from "../router";
import { bytesText, countText, numberText, percentText, secondsText, shortText, words } from "../text";

const CHUNK = 100; // rows asked for at once
const ROW_PX = 34;
const LIVE_EVERY_S = 2;
const TYPED_MS = 100;
const STATES = ["training", "idle", "offline", "quarantined"];

interface Column {
  key: string;
  title: string;
  about: string;
  cell: (row: FleetRow, run: Run) => string;
  minor?: boolean; // not on a narrow screen
}

const COLUMNS: Column[] = [
  { key: "updates", title: "updates", about: "updates of it that were applied", cell: (row) => countText(row.updates) },
  { key: "rejected", title: "rejected", about: "updates of it that were rejected", cell: (row) => countText(row.rejected), minor: true },
  { key: "staleness", title: "staleness", about: "mean, in versions", cell: (row) => numberText(row.staleness) },
  { key: "behind", title: "behind", about: "versions behind the newest", cell: (row) => countText(row.behind), minor: true },
  { key: "speed", title: "task takes", about: "median from grant to push", cell: (row) => secondsText(row.speed_s), minor: true },
  { key: "examples", title: "examples", about: "that its updates were trained on", cell: (row) => shortText(row.examples), minor: true },
  { key: "up", title: "up", about: "bytes that it sent", cell: (row) => bytesText(row.up), minor: true },
  { key: "down", title: "down", about: "bytes that it received", cell: (row) => bytesText(row.down), minor: true },
  { key: "seen", title: "last seen", about: "when it called last", cell: seenText, minor: true },
];

const WIDTH: Column = { key: "width", title: "width", about: "share of the model's numbers that its newest task is of", cell: (row) => percentText(row.width, 0), minor: true };

/** Those of a run: widths only where some task was of a part of the model. */
const columnsOf = (fleet: Fleet): Column[] => (fleet.parts ? [...COLUMNS, WIDTH] : COLUMNS);

function seenText(row: FleetRow, run: Run): string {
  if (row.seen_s === null) return "–";
  return run.goesOn ? `${secondsText(Math.max(0, run.head!.now_s - row.seen_s))} ago` : secondsText(row.seen_s);
}

export function FleetPage({ run, route }: PageProps) {
  const { query } = route;
  const asked = { sort: query.get("sort") ?? "client", order: query.get("order") ?? "asc", filter: query.get("filter") ?? "", state: query.get("state") ?? "" };
  const [filter, type] = useState(asked.filter);
  useEffect(() => {
    const timer = setTimeout(() => filter !== asked.filter && setQuery("filter", filter), TYPED_MS);
    return () => clearTimeout(timer);
  }, [filter]);
  const place = useRef<HTMLDivElement>(null);
  const [seen, setSeen] = useState({ first: 0, last: 40 });
  const { fleet, rows, error, again } = useRows(run, asked, seen);
  const key = JSON.stringify(asked);
  useEffect(() => {
    if (place.current) place.current.scrollTop = 0;
  }, [key]);
  const scrolled = (): void => {
    const element = place.current;
    if (!element) return; // it is being taken away
    const first = Math.max(0, Math.floor(element.scrollTop / ROW_PX) - 5);
    setSeen({ first, last: first + Math.ceil(element.clientHeight / ROW_PX) + 10 });
  };
  useEffect(() => {
    if (!place.current) return;
    const watch = new ResizeObserver(scrolled);
    watch.observe(place.current);
    return () => watch.disconnect();
  }, [!fleet]);
  if (!fleet) return error ? <Trouble error={error} again={again} /> : <Loading what="the fleet" />;
  return (
    <section class="fleet-page">
      <div class="tools">
        <input type="search" class="search" value={filter} placeholder="Filter by name" aria-label="Filter devices by name" onInput={(event) => type(event.currentTarget.value)} />
        <div class="choice" role="group" aria-label="Only devices that are">
          <button type="button" aria-pressed={!asked.state} onClick={() => setQuery("state", "")}>
            all {countText(fleet.total)}
          </button>
          {STATES.filter((state) => state in fleet.states).map((state) => (
            <button type="button" key={state} aria-pressed={asked.state === state} onClick={() => setQuery("state", asked.state === state ? "" : state)}>
              {state === "training" ? words(run.training) : state} {countText(fleet.states[state])}
            </button>
          ))}
        </div>
        <span class="soft count" role="status">
          {fleet.matching === fleet.total ? "" : `${countText(fleet.matching)} match`}
        </span>
      </div>
      {error && <Trouble error={error} again={again} stale />}
      <Since from_s={run.head!.from_s} />
      {fleet.matching === 0 ? (
        <Empty>{fleet.total ? "No device matches. Clear the filter to see all." : "No device has called yet."}</Empty>
      ) : (
        <div class="fleet-scroll" ref={place} onScroll={scrolled} tabIndex={0} role="region" aria-label="Devices; sort by the heads of the columns">
          <div role="table" class={`fleet-table ${fleet.parts ? "with-widths" : ""}`} aria-rowcount={fleet.matching + 1} aria-label="Devices">
            <Head asked={asked} columns={columnsOf(fleet)} />
            <Body columns={columnsOf(fleet)} first={seen.first} last={Math.min(seen.last, fleet.matching)} matching={fleet.matching} rows={rows} run={run} />
          </div>
        </div>
      )}
    </section>
  );
}

interface Query {
  sort: string;
  order: string;
  filter: string;
  state: string;
}

function Head({ asked, columns }: { asked: Query; columns: Column[] }) {
  const sort = (key: string): void => {
    const down = asked.sort === key && asked.order === "asc";
    setQuery("sort", key);
    setQuery("order", down || (asked.sort !== key && key !== "client" && key !== "state") ? "desc" : "asc");
  };
  const heads = [{ key: "client", title: "device", about: "by its name" }, { key: "state", title: "state", about: "" }, ...columns];
  return (
    <div role="rowgroup" class="fleet-head">
      <div role="row" class="fleet-row" aria-rowindex={1}>
        {heads.map((each) => {
          const on = asked.sort === each.key;
          return (
            <div role="columnheader" key={each.key} class={"minor" in each && each.minor ? "minor" : ""} aria-sort={on ? (asked.order === "asc" ? "ascending" : "descending") : "none"}>
              <button type="button" onClick={() => sort(each.key)} title={each.about}>
                {each.title}
                <span aria-hidden="true">{on ? (asked.order === "asc" ? " ▲" : " ▼") : ""}</span>
              </button>
            </div>
          );
        })}
      </div>
    </div>
  );
}

function Body({ columns, first, last, matching, rows, run }: { columns: Column[]; first: number; last: number; matching: number; rows: (at: number) => FleetRow | undefined; run: Run }) {
  const body = useRef<HTMLDivElement>(null);
  const inner = useRef<HTMLDivElement>(null);
  useEffect(() => {
    body.current!.style.height = `${matching * ROW_PX}px`;
    inner.current!.style.transform = `translateY(${first * ROW_PX}px)`;
  }, [first, matching]);
  const key = (event: KeyboardEvent): void => {
    const way = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const links = [...inner.current!.querySelectorAll<HTMLAnchorElement>("a")];
    const at = links.indexOf(document.activeElement as HTMLAnchorElement);
    if (!way || at < 0) return;
    event.preventDefault();
    links[at + way]?.focus();
  };
  return (
    <div role="rowgroup" ref={body} class="fleet-body">
      <div role="presentation" ref={inner} onKeyDown={key}>
        {Array.from({ length: Math.max(0, last - first) }, (_, i) => {
          const row = rows(first + i);
          return (
            <div role="row" class={`fleet-row ${row?.quarantined ? "bad" : ""}`} key={row?.client ?? `at ${first + i}`} aria-rowindex={first + i + 2}>
              {row ? <Cells row={row} run={run} columns={columns} /> : <div role="cell" class="soft">…</div>}
            </div>
          );
        })}
      </div>
    </div>
  );
}

const Cells = ({ row, run, columns }: { row: FleetRow; run: Run; columns: Column[] }) => (
  <>
    <div role="cell">
      <a href={link("run", run.id, "device", row.client)}>{row.client}</a>
    </div>
    <div role="cell" title={row.quarantined || undefined}>
      <State of={run.stateOf(row)} />
    </div>
    {columns.map((column) => (
      <div role="cell" key={column.key} class={column.minor ? "number minor" : "number"}>
        {column.cell(row, run)}
      </div>
    ))}
  </>
);

/** The chunks of rows about those in sight; while the run goes on they are asked for again and again. */
function useRows(run: Run, asked: Query, seen: { first: number; last: number }) {
  const [, told] = useState(0);
  const [error, setError] = useState<Refused | null>(null);
  const [fleet, setFleet] = useState<Fleet | null>(null);
  const key = JSON.stringify(asked);
  const chunks = useMemo(() => new Map<number, FleetRow[]>(), [key, run.id]);
  const wanted = [...new Set([Math.floor(seen.first / CHUNK), Math.floor(seen.last / CHUNK)])];
  const ask = async (chunk: number, signal?: AbortSignal): Promise<void> => {
    try {
      const found = await get<Fleet>(runPath(run.id, "/fleet"), { ...asked, offset: chunk * CHUNK, limit: CHUNK }, signal);
      chunks.set(chunk, found.rows);
      if (current.current === chunks) setFleet(found);
      setError(null);
      told((n) => n + 1);
    } catch (failed) {
      if (failed instanceof Refused) setError(failed);
    }
  };
  const current = useRef(chunks);
  current.current = chunks;
  useEffect(() => {
    let first = true; // what is here already is as old as that, at most
    return repeated(async (signal) => {
      const due = wanted.filter((chunk) => !first || !chunks.has(chunk));
      first = false;
      await Promise.all(due.map((chunk) => ask(chunk, signal)));
    }, run.goesOn ? LIVE_EVERY_S : 0);
  }, [chunks, wanted.join(), run.goesOn]);
  return { fleet, error, rows: (at: number) => chunks.get(Math.floor(at / CHUNK))?.[at % CHUNK], again: () => wanted.forEach((chunk) => void ask(chunk)) };
}
