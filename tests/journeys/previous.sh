#!/usr/bin/env bash
# Make previous.tar.gz: what the folders of a federation look like after a release, for the walk of an upgrade.
#   tests/journeys/previous.sh COMMIT        (run it with the commit of a release, and commit what it makes)
# In it: a server's data in the middle of a run, the device's folder with an update that was never sent, a
# federation's authority with a member, and the folder of a simulated run.
set -euo pipefail
cd "$(dirname "$0")/../.."

ROOT="$PWD" COMMIT="$(git rev-parse "$1")" WORK="$(mktemp -d /tmp/anabranch-previous.XXXXXX)"
SERVER=""
trap '[ -z "$SERVER" ] || kill "$SERVER"; rm -rf "$WORK"' EXIT

until_it_says() {  # until_it_says WHAT FILE
  until grep -q "$1" "$2"; do sleep 0.2; done
}

git worktree add -q --detach "$WORK/tree" "$COMMIT"
"$ROOT/.venv/bin/python" -m build --no-isolation --outdir "$WORK/dist" "$WORK/tree" >/dev/null
git worktree remove --force "$WORK/tree"
"$ROOT/.venv/bin/python" - "$WORK" <<'PYTHON'
import sys
from pathlib import Path

sys.path.insert(0, "tests/support")
from blank import borrowing_environment

work = Path(sys.argv[1])
borrowing_environment(next((work / "dist").glob("*.whl")), work / "environment")
PYTHON
PATH="$WORK/environment/bin:$PATH"

mkdir "$WORK/previous"
cd "$WORK/previous"
echo "$COMMIT" >COMMIT
cat >run.toml <<'TOML'
[run]
name = "upgraded"
workload = "synthetic"
updates_max = 24
[fleet]
examples_per_client = 40
[strategy]
name = "fedbuff"
buffer_size = 2
TOML
anabranch simulate run.toml --set fleet.clients=4 --out run
anabranch admin ca init
anabranch admin enrol device-1 >/dev/null
anabranch init synthetic --out model
anabranch server run.toml --model model >"$WORK/server.txt" 2>&1 &
SERVER=$!
until_it_says serving "$WORK/server.txt"
anabranch client synthetic --id device-1 --state-dir device --tasks-max 9
# The last update is trained and in the outbox, but the server is gone.
anabranch client synthetic --id device-1 --state-dir device --step-time 1 >"$WORK/client.txt" 2>&1 &
CLIENT=$!
until_it_says fetched "$WORK/client.txt"
kill -9 "$SERVER"
until_it_says "failed call" "$WORK/client.txt"
kill -9 "$CLIENT"
SERVER=""
find device/outbox -name "*.update" | grep -q . || { echo "the outbox is empty" >&2; exit 1; }
tar --sort=name --owner=0 --group=0 --mtime="@$(git -C "$ROOT" log -1 --format=%ct "$COMMIT")" \
  -cz -C "$WORK" -f "$ROOT/tests/journeys/previous.tar.gz" previous
