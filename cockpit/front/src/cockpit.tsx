// The frame around every page: who looks, which run, which page, how the line stands.

import { useEffect, useRef, useState } from "preact/hooks";
import { openSession, Refused, type Head, type Session } from "./api";
import { useRun, type Run } from "./live";
import { OrdersMenu } from "./orders";
import { Compare } from "./pages/compare";
import { DefencePage } from "./pages/defence";
import { DevicePage } from "./pages/device";
import { FleetPage } from "./pages/fleet";
import { LearningPage } from "./pages/learning";
import { RiverPage } from "./pages/river";
import { Runs } from "./pages/runs";
import { ServerPage } from "./pages/server";
import { SettingsPage } from "./pages/settings";
import { WirePage } from "./pages/wire";
import { Loading, State, Trouble } from "./parts";
import { link, useRoute, type Route } from "./router";
import { countText, judged, metricText, namedText, secondsText } from "./text";
import { setTheme, useTheme } from "./theme";

const PAGES = [
  ["river", "River"],
  ["learning", "Learning"],
  ["fleet", "Fleet"],
  ["wire", "Wire"],
  ["server", "Server"],
  ["defence", "Defence"],
  ["settings", "Settings"],
] as const;

export interface PageProps {
  run: Run;
  session: Session;
  route: Route;
}

export function Cockpit() {
  const route = useRoute();
  const [session, setSession] = useState<Session | null>(null);
  const [error, setError] = useState<Refused | null>(null);
  const open = (): void => {
    setError(null);
    openSession().then(setSession, (found: unknown) => setError(found instanceof Refused ? found : new Refused(0, String(found))));
  };
  useEffect(open, []);
  const main = useRef<HTMLElement>(null);
  const page = route.parts.join("/");
  const first = useRef(true);
  // Who goes to another page by keyboard stands at its top, and a screen reader says its name.
  useEffect(() => {
    if (!first.current) main.current?.focus({ preventScroll: true });
    first.current = false;
    scrollTo(0, 0);
  }, [page]);
  const id = route.parts[0] === "run" ? route.parts[1] : undefined;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), main.current?.focus())}>
        To the content
      </a>
      {session && id ? <RunFrame key={id} id={id} session={session} route={route} main={main} /> : <PlainFrame session={session} error={error} open={open} route={route} main={main} />}
    </>
  );
}

type Main = { current: HTMLElement | null };

function PlainFrame({ session, error, open, route, main }: { session: Session | null; error: Refused | null; open: () => void; route: Route; main: Main }) {
  useEffect(() => void (document.title = "anabranch"), []);
  return (
    <>
      <header class="top">
        <Brand />
        <span class="spread" />
        <ThemeSwitch />
      </header>
      <main id="main" class="page" tabIndex={-1} ref={main}>
        {!session && !error && <Loading what="the session" />}
        {error?.status === 401 && <Entrance said={error.message} />}
        {error && error.status !== 401 && <Trouble error={error} again={open} />}
        {session && (route.parts[0] === "compare" ? <Compare ids={(route.query.get("runs") ?? "").split(",").filter(Boolean)} /> : <Runs session={session} />)}
      </main>
    </>
  );
}

const Entrance = ({ said }: { said: string }) => (
  <section class="entrance">
    <h1>This page opens by a link</h1>
    <p>
      The command that began the cockpit (<code>anabranch ui</code>, or <code>anabranch server --ui</code>) has printed a link. Open that one: it works once, and this browser is known from then on.
    </p>
    <p>Has it been used already, or is the browser another one? The command prints the next link as soon as one was used: open the newest. Nothing has to be started again.</p>
    <p class="soft">{said}</p>
  </section>
);

/** The page that is open is seen among all. By `scrollIntoView` the first Tab would go on from there, past the way to the content. */
function bringIntoView(pages: HTMLElement | null): void {
  const open = pages?.querySelector("[aria-current]");
  if (!pages || !open) return;
  const [all, one] = [pages.getBoundingClientRect(), open.getBoundingClientRect()];
  pages.scrollLeft += Math.min(0, one.left - all.left) + Math.max(0, one.right - all.right);
}

function RunFrame({ id, session, route, main }: { id: string; session: Session; route: Route; main: Main }) {
  const run = useRun(id);
  const page = route.parts[2] ?? "river";
  const { head, error } = run;
  const name = PAGES.find(([key]) => key === page)?.[1] ?? (page === "device" ? `Device ${route.parts[3] ?? ""}` : "River");
  useEffect(() => void (document.title = `${head ? head.title : id}: ${name}`), [head === null, name]);
  const pages = useRef<HTMLElement>(null); // on a phone they are wider than the screen
  useEffect(() => bringIntoView(pages.current), [page, head === null]);
  return (
    <>
      <header class="top">
        <Brand />
        <div class="run-name">
          <span class="run-title">{head ? head.title : id}</span>
          {head && (
            <span class="soft about">
              {namedText(head)}
              {head.strategy ? `${head.strategy} on ${head.workload}` : "strategy not known yet"}
              {head.framework ? `, ${head.framework}` : ""}
              {head.kind === "simulated" ? ", simulated" : ""}
            </span>
          )}
        </div>
        {head && <State of={head.given_up ? "given_up" : head.state} />}
        <LineState run={run} />
        <span class="spread" />
        {head && <OrdersMenu run={run} session={session} />}
        <ThemeSwitch />
      </header>
      <nav class="pages" aria-label="Pages of the run" ref={pages}>
        <ul>
          {PAGES.filter(([key]) => key !== "server" || !head || head.served).map(([key, title]) => (
            <li key={key}>
              <a href={link("run", id, key)} aria-current={page === key || (page === "device" && key === "fleet") ? "page" : undefined}>
                {title}
              </a>
            </li>
          ))}
        </ul>
      </nav>
      {head && <Strip run={run} />}
      <main id="main" class={`page ${page}`} tabIndex={-1} ref={main}>
        <h1 class="unseen">
          {name} of {head ? head.title : id}
        </h1>
        {error && <Trouble error={error} again={() => void run.load()} stale={!!head} />}
        {head && !error && <Halted head={head} />}
        {!head && !error && <Loading what="the run" />}
        {head && <Page page={page} run={run} session={session} route={route} />}
      </main>
    </>
  );
}

function Page({ page, ...props }: PageProps & { page: string }) {
  if (page === "learning") return <LearningPage {...props} />;
  if (page === "fleet") return <FleetPage {...props} />;
  if (page === "device") return <DevicePage {...props} />;
  if (page === "wire") return <WirePage {...props} />;
  if (page === "server") return <ServerPage {...props} />;
  if (page === "defence") return <DefencePage {...props} />;
  return page === "settings" ? <SettingsPage {...props} /> : <RiverPage {...props} />;
}

/** The run's figures, on every page in the same place. */
function Strip({ run }: { run: Run }) {
  const head = run.head!;
  const { counters } = head;
  const decided = counters.applied + counters.rejected;
  const metric = judged(head.judged_by ?? head.metric);
  return (
    <section aria-label="The run by now">
      <dl class="strip">
      <Item name="version" value={countText(head.version)} />
      <Item name="updates" value={countText(counters.applied)} />
      <Item name="rejected" value={decided ? `${countText(counters.rejected)} (${((100 * counters.rejected) / decided).toFixed(1)} %)` : "0"} />
      <Item name={head.served && run.goesOn ? "devices online" : "devices"} value={counters.online !== null && run.goesOn ? `${countText(counters.online)} of ${countText(counters.clients)}` : countText(counters.clients)} />
      {metric && <Item name={`best ${metric}`} value={metricText(metric, head.best)} remark={head.target === null ? "" : `target ${metricText(metric, head.target)}`} />}
      <Item name={head.units === "virtual" ? "virtual time" : "time"} value={secondsText(head.now_s)} />
    </dl>
    </section>
  );
}

const Item = ({ name, value, remark }: { name: string; value: string; remark?: string }) => (
  <div>
    <dt>{name}</dt>
    <dd>
      {value}
      {remark && <small> {remark}</small>}
    </dd>
  </div>
);

const Brand = () => (
  <a class="brand" href="#/" aria-label="anabranch: all runs">
    <svg viewBox="0 0 32 32" aria-hidden="true">
      <path class="brand-water" d="M0 16h32" />
      <path class="brand-stale" d="M2 16c7 0 5-10 12-10s6 10 14 10" />
      <path class="brand-fresh" d="M6 16c6 0 4 9 10 9s5-9 12-9" />
    </svg>
    <span>anabranch</span>
  </a>
);

const LINES = { none: "", opening: "opening the line", open: "live", lost: "line lost" };

/** Why a run stands still or was given up, where somebody has said so. */
function Halted({ head }: { head: Head }) {
  const interrupted = head.state === "interrupted";
  if (!(interrupted || head.given_up) || !head.ended || head.ended === head.state) return null;
  return (
    <div class="notice" role="status">
      <p>
        {head.given_up && "This run was given up: "}
        {head.ended}
        {interrupted && head.served && ". Its server is asked again every second; what stands here is what it said last."}
      </p>
    </div>
  );
}

function LineState({ run }: { run: Run }) {
  if (run.line === "open" && !run.goesOn) return null;
  const since = run.line === "lost" ? new Date(run.lostAt).toLocaleTimeString() : "";
  return (
    <span class={`line ${run.line}`} role="status" title={since ? `since ${since}` : undefined}>
      {LINES[run.line]}
      {since && <span> since {since}: trying again</span>}
    </span>
  );
}

const GLYPHS = {
  system: "M8 1.5a6.5 6.5 0 1 0 0 13zM8 1.5a6.5 6.5 0 0 1 0 13",
  light: "M8 5a3 3 0 1 0 .01 0zM8 1v1.6M8 13.4V15M1 8h1.6M13.4 8H15M3.1 3.1l1.1 1.1M11.8 11.8l1.1 1.1M3.1 12.9l1.1-1.1M11.8 4.2l1.1-1.1",
  dark: "M13.5 10A6 6 0 0 1 6 2.5a6 6 0 1 0 7.5 7.5z",
};

function ThemeSwitch() {
  const { theme, next } = useTheme();
  const names = { system: "as the system", light: "light", dark: "dark" };
  return (
    <button type="button" class="theme" onClick={() => setTheme(next)} title={`Colours: ${names[theme]}`} aria-label={`Colours: ${names[theme]}. Change to ${names[next]}`}>
      <svg viewBox="0 0 16 16" aria-hidden="true" class={theme}>
        <path d={GLYPHS[theme]} />
      </svg>
    </button>
  );
}
