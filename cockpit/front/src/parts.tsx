// What every page is made of: cards, figures, states, marks.

import type { ComponentChildren } from "preact";
import type { Refused } from "./api";
import type { Asked } from "./live";
import { secondsText, words } from "./text";

export function Card({ title, aside, note, wide, children }: { title: string; aside?: ComponentChildren; note?: ComponentChildren; wide?: boolean; children: ComponentChildren }) {
  return (
    <section class={wide ? "card wide" : "card"}>
      <header class="card-head">
        <h2>{title}</h2>
        {aside}
      </header>
      {children}
      {note && <p class="note">{note}</p>}
    </section>
  );
}

export function Figure({ name, value, remark, tone }: { name: string; value: ComponentChildren; remark?: ComponentChildren; tone?: string }) {
  return (
    <div class={`figure ${tone ?? ""}`}>
      <dt>{name}</dt>
      <dd>
        <strong>{value}</strong>
        {remark && <small>{remark}</small>}
      </dd>
    </div>
  );
}

export const Figures = ({ children }: { children: ComponentChildren }) => <dl class="figures">{children}</dl>;

export const Empty = ({ children }: { children: ComponentChildren }) => <p class="empty">{children}</p>;

/** A page's answer: it, or why there is none yet. */
export function Answer<T>({ of, what, children }: { of: Asked<T>; what: string; children: (data: T) => ComponentChildren }) {
  if (of.data) {
    return (
      <>
        {of.error && <Trouble error={of.error} again={of.again} stale />}
        {children(of.data)}
      </>
    );
  }
  if (of.error) return <Trouble error={of.error} again={of.again} />;
  return <Loading what={what} />;
}

/** From when on the cockpit knows each task, where that is not from the start. */
export const Since = ({ from_s }: { from_s: number }) =>
  from_s > 0 ? <p class="note">Bytes, examples, staleness and how long a task takes are of what happened since {secondsText(from_s)} of the run: of what was before, this cockpit was told the counts alone.</p> : null;

export const Loading = ({ what }: { what: string }) => (
  <p class="empty loading" aria-busy="true">
    Reading {what} …
  </p>
);

export function Trouble({ error, again, stale }: { error: Refused; again?: () => void; stale?: boolean }) {
  return (
    <div class={error.status === 404 ? "notice plain" : "notice"} role="status">
      <p>
        {stale ? `${error.message.replace(/\.?$/, ".")} What stands here is what was read last.` : error.message}
      </p>
      {again && error.status !== 404 && (
        <button type="button" onClick={again}>
          Try again
        </button>
      )}
    </div>
  );
}

const MARKS: Record<string, string> = {
  running: "M2 1l8 5-8 5z",
  training: "M2 1l8 5-8 5z",
  finished: "M1 6.5l3.5 3.5L11 2.5",
  applied: "M1 6.5l3.5 3.5L11 2.5",
  paused: "M3 1v10M9 1v10",
  interrupted: "M2 2l8 8M10 2l-8 8",
  given_up: "M2 2l8 8M10 2l-8 8",
  rejected: "M2 2l8 8M10 2l-8 8",
  unreadable: "M6 1l5 10H1zM6 5v3",
  quarantined: "M6 1l5 10H1zM6 5v3",
  idle: "M2 6h8",
  offline: "M6 2a4 4 0 1 0 .01 0z",
  lost: "M6 2a4 4 0 1 0 .01 0z",
  held: "M6 1l5 5-5 5-5-5z",
  still_out: "M6 4a2 2 0 1 0 .01 0z",
  open: "M6 4a2 2 0 1 0 .01 0z",
};

/** A state by its word and its own mark: never by colour alone. */
export function State({ of }: { of: string }) {
  return (
    <span class={`state ${of}`}>
      <svg viewBox="0 0 12 12" aria-hidden="true">
        <path d={MARKS[of] ?? MARKS.idle} />
      </svg>
      {words(of)}
    </span>
  );
}

/** One of a few ways to look: buttons of which one is pressed. */
export function Choice<T extends string>({ label, of, value, set }: { label: string; of: readonly (readonly [T, string])[]; value: T; set: (value: T) => void }) {
  return (
    <div class="choice" role="group" aria-label={label}>
      {of.map(([each, name]) => (
        <button type="button" key={each} aria-pressed={each === value} onClick={() => set(each)}>
          {name}
        </button>
      ))}
    </div>
  );
}

interface Bar {
  name: ComponentChildren;
  key?: string; // where the name is no text
  value: number;
  text: string;
  title?: string;
}

/** Bars of named numbers; `most` is the whole width, or else the longest is. */
export function Bars({ rows, hue = 0, most: whole }: { rows: Bar[]; hue?: number; most?: number }) {
  const most = whole ?? Math.max(1e-12, ...rows.map((row) => row.value));
  return (
    <ul class="bars">
      {rows.map((row) => (
        <li key={row.key ?? String(row.name)} title={row.title}>
          <span class="bar-name">{row.name}</span>
          <svg class={`bar c${hue}`} aria-hidden="true" preserveAspectRatio="none" viewBox="0 0 100 8">
            <rect width={(100 * row.value) / most} height="8" rx="0" />
          </svg>
          <span class="bar-value">{row.text}</span>
        </li>
      ))}
    </ul>
  );
}

export function Table({ head, rows, label }: { head: string[]; rows: ComponentChildren[][]; label: string }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>
      <table>
        <thead hidden={!head.some(Boolean)}>
          <tr>
            {head.map((name) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row, i) => (
            <tr key={i}>
              {row.map((cell, j) => (
                <td key={j}>{cell}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
