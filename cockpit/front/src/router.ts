// Pages by the address' hash: `#/run/ID/river`, `#/run/ID/device/C`, `#/compare?runs=a,b`.

import { useEffect, useState } from "preact/hooks";

export interface Route {
  parts: string[];
  query: URLSearchParams;
}

export function route(hash = location.hash): Route {
  const [path = "", search = ""] = hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decoded), query: new URLSearchParams(search) };
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export const link = (...parts: string[]): string => `#/${parts.map(encodeURIComponent).join("/")}`;

export function useRoute(): Route {
  const [now, set] = useState(route);
  useEffect(() => {
    const listener = (): void => set(route());
    addEventListener("hashchange", listener);
    return () => removeEventListener("hashchange", listener);
  }, []);
  return now;
}

/** Changes one word of the address' query without a new page in the browser's history. */
export function setQuery(name: string, value: string): void {
  const { parts, query } = route();
  if (value) query.set(name, value);
  else query.delete(name);
  const search = query.toString();
  history.replaceState(null, "", link(...parts) + (search ? `?${search}` : ""));
  dispatchEvent(new HashChangeEvent("hashchange"));
}
