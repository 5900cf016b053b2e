// Orders, each asked twice: the server says what will come of it, then it is given.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { post, Refused, runPath, type Session } from "./api";
import type { Run } from "./live";

export type Order = "pause" | "resume" | "quarantine" | "release" | "rollback" | "set";
type Given = Record<string, string | number>;

interface Field {
  name: string;
  label: string;
  hint: string;
  number?: boolean;
  optional?: boolean;
}

const FIELDS: Record<Order, Field[]> = {
  pause: [],
  resume: [],
  quarantine: [
    { name: "client", label: "Device", hint: "its name" },
    { name: "why", label: "Why", hint: "for the log, and for who releases it", optional: true },
  ],
  release: [{ name: "client", label: "Device", hint: "its name" }],
  rollback: [
    { name: "to_version", label: "After version", hint: "updates that came after it are left out", number: true },
    { name: "without", label: "Without the updates of", hint: "devices, with commas; none: of everybody", optional: true },
  ],
  set: [
    { name: "path", label: "Setting", hint: "table.key, such as run.updates_max" },
    { name: "value", label: "Value", hint: "as it stands in TOML" },
  ],
};
const TITLES: Record<Order, string> = {
  pause: "Pause the run",
  resume: "Resume the run",
  quarantine: "Put a device in quarantine",
  release: "Release a device",
  rollback: "Roll back",
  set: "Change a setting",
};

/** Why orders cannot be given here; empty where they can. */
const barred = (run: Run, session: Session): string => {
  if (!run.head?.served) return "This run is read from its files: there is no server to give orders to.";
  return session.orders ? "" : "This session may look, not give orders: they need an operator's identity (--identity).";
};

export function OrdersMenu({ run, session }: { run: Run; session: Session }) {
  const [order, set] = useState<Order | null>(null);
  const menu = useRef<HTMLDetailsElement>(null);
  const why = barred(run, session);
  const paused = run.head!.state === "paused";
  const orders: Order[] = [paused ? "resume" : "pause", "quarantine", "release", "rollback", "set"];
  useEffect(() => {
    const away = (event: Event): void => {
      const inside = event.target instanceof Node && menu.current?.contains(event.target);
      if (menu.current && (!inside || (event instanceof KeyboardEvent && event.key === "Escape"))) menu.current.open = false;
    };
    addEventListener("pointerdown", away);
    addEventListener("keydown", away);
    return () => {
      removeEventListener("pointerdown", away);
      removeEventListener("keydown", away);
    };
  }, []);
  return (
    <>
      <details class="orders" ref={menu}>
        <summary>Orders</summary>
        <div class="orders-list">
          {orders.map((each) => (
            <button
              type="button"
              key={each}
              disabled={!!why}
              onClick={() => {
                menu.current!.open = false;
                set(each);
              }}
            >
              {TITLES[each]}
            </button>
          ))}
          <a href={runPath(run.id, "/export")} download>
            Export the newest model
          </a>
          {why && <p class="note">{why}</p>}
        </div>
      </details>
      {order && <OrderDialog run={run} order={order} given={{}} close={() => set(null)} />}
    </>
  );
}

export function OrderButton({ run, session, order, given, children }: { run: Run; session: Session; order: Order; given: Given; children: ComponentChildren }) {
  const [open, set] = useState(false);
  const why = barred(run, session);
  return (
    <>
      <button type="button" class="single" disabled={!!why} title={why || undefined} onClick={() => set(true)}>
        {children}
      </button>
      {open && <OrderDialog run={run} order={order} given={given} close={() => set(false)} />}
    </>
  );
}

const told = (values: Given): Given => Object.fromEntries(Object.entries(values).filter(([, value]) => value !== ""));

/** What the server is told of an order: the form's values, as the order has them. */
function argumentsOf(order: Order, values: Given): Record<string, unknown> {
  if (order === "set") return { settings: { [String(values.path).trim()]: tomlValue(String(values.value).trim()) } };
  if (order !== "rollback") return told(values);
  const without = String(values.without ?? "").split(/[\s,]+/).filter(Boolean);
  return { to_version: values.to_version, ...(without.length ? { without } : { everyone: true }) };
}

const WHOLE_OR_DECIMAL = /^[+-]?\d+(_\d+)*(\.\d+(_\d+)*)?([eE][+-]?\d+)?$/;

/** `0.5`, `1_000`, `true`, `"a"`, `'a'` as TOML has them; what is none of these is a word. */
function tomlValue(text: string): unknown {
  if (WHOLE_OR_DECIMAL.test(text)) return Number(text.replaceAll("_", ""));
  if (/^'[^']*'$/.test(text)) return text.slice(1, -1);
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

interface Asked {
  confirm: string;
  says: string;
}

function OrderDialog({ run, order, given, close }: { run: Run; order: Order; given: Given; close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const fields = FIELDS[order].filter((field) => !(field.name in given));
  const [values, setValues] = useState<Given>(given);
  const [asked, setAsked] = useState<Asked | null>(null);
  const [done, setDone] = useState("");
  const [error, setError] = useState("");
  const [waiting, setWaiting] = useState(false);

  const call = async (body: unknown): Promise<void> => {
    setWaiting(true);
    setError("");
    try {
      const said = await post<Partial<Asked> & { done?: string }>(runPath(run.id, "/orders"), body);
      if (said.done !== undefined) {
        setDone(said.done || "Done.");
        void run.load();
      } else setAsked(said as Asked);
    } catch (found) {
      setError(found instanceof Refused ? found.message : String(found));
      setAsked(null);
    } finally {
      setWaiting(false);
    }
  };
  const ask = (): Promise<void> => call({ order, arguments: argumentsOf(order, values) });
  useEffect(() => {
    dialog.current?.showModal();
    if (!fields.length) void ask();
  }, []);

  const submit = (event: Event): void => {
    event.preventDefault();
    if (waiting) return;
    if (done) dialog.current?.close();
    else void (asked ? call({ confirm: asked.confirm }) : ask());
  };
  const type = (field: Field, text: string): void => setValues({ ...values, [field.name]: field.number && text !== "" ? Number(text) : text });
  return (
    <dialog ref={dialog} class="order" aria-labelledby="order-title" onClose={close}>
      <form onSubmit={submit}>
        <h2 id="order-title">{TITLES[order]}</h2>
        {!asked &&
          !done &&
          fields.map((field, i) => (
            <label key={field.name}>
              {field.label}
              <Input field={field} first={i === 0} value={values[field.name] ?? ""} type={type} />
            </label>
          ))}
        <div role="status">
          {asked && !done && <p class="says">{asked.says}</p>}
          {done && <p class="says">{done}</p>}
          {waiting && <p class="soft">Asking the server …</p>}
          {error && <p class="notice">{error}</p>}
        </div>
        <div class="answers">
          {!done && (
            <button type="button" onClick={() => dialog.current?.close()}>
              {asked ? "No, leave it" : "Close"}
            </button>
          )}
          {(asked || done || fields.length > 0 || error) && (
            <button type="submit" class={asked && !done ? "firm danger" : "firm"} disabled={waiting}>
              {done ? "Close" : asked ? "Yes, do it" : "Go on"}
            </button>
          )}
        </div>
      </form>
    </dialog>
  );
}

function Input({ field, first, value, type }: { field: Field; first: boolean; value: string | number; type: (field: Field, text: string) => void }) {
  const shared = { autoFocus: first, required: !field.optional, value, placeholder: field.hint, onInput: (event: { currentTarget: HTMLInputElement }) => type(field, event.currentTarget.value) };
  return field.number ? <input type="number" min={0} {...shared} /> : <input {...shared} />;
}
