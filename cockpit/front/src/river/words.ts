// What the river tells under the pointer.

import { numberText, plural, secondsText } from "../text";
import type { By, RiverModel, Thread } from "./model";

/** What is told of a thread; `now` where the run goes on. */
export function told(model: RiverModel, thread: Thread, now: number | null): string {
  const device = model.lanes[thread.lane] ?? "";
  const took = thread.joined === null ? "" : ` after ${secondsText(thread.joined - thread.left)}`;
  const left = `${device}\nleft version ${thread.base} at ${secondsText(thread.left)}`;
  if (thread.verdict === "open") return `${left}\nstill out${now === null ? " when the run ended" : `, ${secondsText(Math.max(0, now - thread.left))} by now`}`;
  if (thread.verdict === "lost") return `${left}\nlost: its lease ended${took}`;
  if (thread.verdict === "rejected") return `${left}\nrejected${took}`;
  const weight = thread.weight === null ? "" : `, weight ${numberText(thread.weight)}`;
  const counted = thread.verdict === "held" ? "held for the next version" : `counted in version ${thread.version ?? "?"}`;
  return `${left}\n${counted}${took}\n${plural(thread.staleness ?? 0, "version")} stale${weight}`;
}

/** What is told of the channel at a place of the axis. */
export function channelTold(model: RiverModel, by: By, at: number, virtual: boolean): string {
  const t = by === "time" ? at : model.timeOf(at);
  const clock = virtual ? "virtual time " : "";
  return `version ${Math.floor(by === "time" ? model.versionAt(t) : at)}\n${clock}${secondsText(Math.max(0, t))}\n${numberText(model.rateAt(t))} updates a second join`;
}
