// The run's settings as its TOML, and what was changed while it went on.

import type { PageProps } from "../cockpit";
import { Card, Empty, Table } from "../parts";
import { countText, momentText, secondsText } from "../text";

const shown = (value: unknown): string => (value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value));

export function SettingsPage({ run }: PageProps) {
  const head = run.head!;
  return (
    <div class="charts">
      <Card title="Changed while the run went on">
        {head.settings_changed.length ? (
          <Table
            label="Changed settings"
            head={["setting", "from", "to", "by", "at"]}
            rows={head.settings_changed.map((each) => [<code>{each.path}</code>, <code>{shown(each.was)}</code>, <code>{shown(each.value)}</code>, each.by, each.at_s === null ? "–" : each.at_s > 1e9 ? momentText(each.at_s) : secondsText(each.at_s)])}
          />
        ) : (
          <Empty>Nothing was changed.</Empty>
        )}
      </Card>
      <Card title="About this run">
        <Table
          label="About this run"
          head={["", ""]}
          rows={[
            ["started", momentText(head.started_at)],
            ["strategy", head.strategy],
            ["workload", head.workload],
            ["seed", head.seed === null ? "–" : String(head.seed)],
            ["ended", <span class="wraps">{head.ended || (run.goesOn ? "goes on" : "–")}</span>],
            ["tasks granted", countText(head.counters.tasks)],
            ["leases lost", countText(head.counters.leases_lost)],
            ["duplicates", countText(head.counters.duplicate)],
          ]}
        />
      </Card>
      <Card title="Settings" wide>
        {head.config_toml ? <pre tabIndex={0} class={head.config_toml.split("\n").length > 40 ? "long" : ""}>{head.config_toml}</pre> : <Empty>No configuration was recorded.</Empty>}
      </Card>
    </div>
  );
}
