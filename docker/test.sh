#!/usr/bin/env bash
# Build the images and run them for real; `make docker-test` calls this.
#   1. the server's image: no torch, no root
#   2. one server on SQLite, locked down, and the demo's devices outside it: healthy, killed, back, drained
#   3. the composition: PostgreSQL, the server, three devices; killed, back, drained under load
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=docker/engine.sh
source docker/engine.sh

VENV="$(realpath "${VENV:-.venv}")"
TORCH="${TORCH:-torch==2.13.0}"
WORK="$(mktemp -d /tmp/anabranch-docker.XXXXXX)"
NAME=anabranch-test
SERVER="" DEMO=""  # the container that serves, and the process of the demo outside
FIGURES=()
export VENV TORCH PORT="${PORT:-17070}"
ADMIN_PORT=$((PORT + 1))

cleanup() {
  local status=$?
  trap - EXIT
  [ "$status" = 0 ] || [ -z "$SERVER" ] || docker logs --tail 40 "$SERVER" 2>&1 | sed 's/^/    /' >&2 || true
  [ -z "$DEMO" ] || { kill "$DEMO"; wait "$DEMO"; } 2>/dev/null || true
  docker rm -fv "$NAME" >/dev/null 2>&1 || true
  docker volume rm "$NAME" >/dev/null 2>&1 || true
  docker network rm "$NAME" >/dev/null 2>&1 || true
  compose down -v --remove-orphans >/dev/null 2>&1 || true
  rm -f docker/wheels/*.whl
  stop_engine
  rm -rf "$WORK"
  exit "$status"
}
trap cleanup EXIT

# --- saying, waiting, measuring ----------------------------------------------------------------

check() {  # check WHAT COMMAND...: say what holds, or stop
  local what="$1"
  shift
  "$@" || die "FAILED: $what"
  say "ok: $what"
}

figure() { FIGURES+=("$(printf '%-49s %s' "$1" "$2")"); }

now() { date +%s%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.1f s", (b - a) / 1e9 }'; }

wait_for() {  # wait_for SECONDS COMMAND...
  local deadline=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || return 1
    sleep 0.2
  done
}

# --- asking the server and its container ----------------------------------------------------------

anabranch() { "$VENV/bin/anabranch" "$@"; }
inspect() { docker inspect -f "$1" "$2"; }
healthy() { [ "$(inspect '{{.State.Health.Status}}' "$SERVER")" = healthy ]; }
serving() { anabranch health "127.0.0.1:$PORT"; }
exit_code() { inspect '{{.State.ExitCode}}' "$1"; }

field() { "$VENV/bin/python" -c 'import json, sys; print(json.loads(sys.stdin.readlines()[-1])[sys.argv[1]])' "$1"; }
status() { docker exec "$SERVER" anabranch admin status --json | field "$1"; }
reached() { [ "$(status version)" -ge "$1" ]; }
above() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a > b) }'; }  # above A B: is A > B

locked_down() {
  docker exec "$SERVER" sh -c '
    ! touch /opt/file 2>/dev/null && touch /tmp/file && touch /var/lib/anabranch/file || exit 1
    grep -q "^Uid:[[:space:]]*10001[[:space:]]*10001" /proc/1/status &&
    grep -q "^CapEff:[[:space:]]*0*$" /proc/1/status && grep -q "^CapBnd:[[:space:]]*0*$" /proc/1/status &&
    grep -q "^NoNewPrivs:[[:space:]]*1" /proc/1/status'
}

image_size() {  # image_size IMAGE: what lies on the disk, and what would be pulled
  local disk
  disk="$(docker image inspect -f '{{.Size}}' "$1")"
  printf '%d MB, %d MB compressed' $((disk / 1000000)) $(($(docker save "$1" | gzip -1 | wc -c) / 1000000))
}

kill_and_resume() {  # kill_and_resume WHAT: nothing acknowledged is lost, nobody helps it up
  local before after run start
  before="$(status version)" run="$(status run_id)"
  docker kill -s KILL "$SERVER" >/dev/null
  start="$(now)"
  docker start "$SERVER" >/dev/null
  check "$1: a killed server serves again" wait_for 60 serving
  figure "$1: serving again after kill -9" "$(since "$start")"
  after="$(status version)"
  check "$1: the same run, from version $after (killed after $before)" \
    [ "$(status run_id) $((after >= before))" = "$run 1" ]
}

drain() {  # drain WHAT
  local start
  start="$(now)"
  docker stop -t 30 "$SERVER" >/dev/null
  figure "$1: docker stop drains" "$(since "$start"), exit code $(exit_code "$SERVER")"
  check "$1: docker stop drains with exit code 0" [ "$(exit_code "$SERVER")" = 0 ]
  check "$1: its last word is that it has drained" grep -q drained <(docker logs --tail 3 "$SERVER" 2>&1)
}

# --- the three parts --------------------------------------------------------------------------------

test_image() {
  fill_wheels ".[server,postgresql]"
  build server
  check "the server's image has neither torch nor flwr" docker run --rm --entrypoint python anabranch-server -c \
    'import importlib.util as u; raise SystemExit(any(u.find_spec(n) for n in ("torch", "flwr")))'
  check "it does not run as root" [ "$(docker run --rm --entrypoint id anabranch-server -u)" = 10001 ]
  figure "image anabranch-server" "$(image_size anabranch-server)"
}

start_server() {
  docker network create "$NAME" >/dev/null
  docker run -d --name "$NAME" --network "$NAME" --memory 512m \
    -p "127.0.0.1:$PORT:7070" -p "127.0.0.1:$ADMIN_PORT:7071" \
    --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
    -v "$NAME:/var/lib/anabranch" -v "$WORK/model:/model:ro" \
    -v "$PWD/docker/federation.toml:/federation.toml:ro" \
    anabranch-server /federation.toml --model /model --insecure --admin-address 0.0.0.0:7071 \
    --set run.updates_max=120 >/dev/null
  SERVER="$NAME"
}

in_its_image() {  # in_its_image ARGUMENTS...: the command line of the server's image, on its volume
  docker run --rm --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --network none \
    -v "$NAME:/var/lib/anabranch" --entrypoint anabranch anabranch-server "$@"
}

test_server() {
  local start accuracy
  anabranch init digits --out "$WORK/model" >/dev/null
  chmod -R a+rX "$WORK"
  start="$(now)"
  start_server
  check "alone: the server serves" wait_for 60 serving
  figure "alone: serving after" "$(since "$start")"
  check "alone: Docker calls it healthy" wait_for 60 healthy
  figure "alone: healthy after" "$(since "$start")"
  check "alone: no root, no capability, no new privileges, a read-only file system" locked_down

  say "the demo outside: three devices and an evaluator"
  anabranch demo --workload digits --clients 3 --server "127.0.0.1:$PORT" --admin "127.0.0.1:$ADMIN_PORT" \
    --out "$WORK/demo" --json >"$WORK/demo.json" 2>"$WORK/demo.log" &
  DEMO=$!
  check "alone: versions grow" wait_for 120 reached 5
  kill_and_resume alone
  wait "$DEMO" || { tail -n 5 "$WORK/demo.json" "$WORK/demo.log" >&2; die "FAILED: the demo"; }
  DEMO=""
  accuracy="$(field final_accuracy <"$WORK/demo.json" | cut -c-6)"
  check "alone: the demo ends by its budget, with accuracy $accuracy" above "$accuracy" 0.8
  check "alone: all 120 updates are in" [ "$(status updates_applied)" = 120 ]
  figure "alone: version, updates, accuracy" "$(status version), $(status updates_applied), $accuracy"
  figure "alone: peak memory of the server" \
    "$(docker exec "$SERVER" awk '/^VmHWM/ { printf "%d MB", $2 / 1000 }' /proc/1/status)"
  drain alone
  check "alone: its data verify" quietly in_its_image verify /var/lib/anabranch
  check "alone: its data make a report" quietly in_its_image report /var/lib/anabranch
  docker rm -v "$SERVER" >/dev/null
  SERVER=""
}

test_composition() {
  local start version accuracy id
  fill_wheels "$TORCH" ".[client,workloads]"
  build client
  figure "image anabranch-client" "$(image_size anabranch-client)"
  start="$(now)"
  quietly compose up -d --no-build
  SERVER="$(compose ps -q server)"
  check "composed: all services start" [ -n "$SERVER" ]
  figure "composed: server healthy, devices started after" "$(since "$start")"
  check "composed: no root, no capability, no new privileges, a read-only file system" locked_down
  check "composed: versions grow" wait_for 120 reached 5
  kill_and_resume composed
  version="$(status version)"
  check "composed: versions grow again" wait_for 120 reached $((version + 10))
  check "composed: all three devices came back" [ "$(status clients)" = 3 ]
  accuracy="$(anabranch evaluate digits --server "127.0.0.1:$PORT" --once --json | field accuracy | cut -c-6)"
  check "composed: a follower outside measures accuracy $accuracy" above "$accuracy" 0.5
  figure "composed: version, updates, accuracy" "$(status version), $(status updates_applied), $accuracy"
  drain "composed, under load"
  # shellcheck disable=SC2016  # for the shell in the container
  check "composed: its data verify on PostgreSQL" quietly compose run --rm --no-deps --entrypoint sh server -c \
    'anabranch verify /var/lib/anabranch --database "$ANABRANCH_SERVER_DATABASE"'
  start="$(now)"
  quietly compose stop
  figure "composed: the rest stops" "$(since "$start")"
  for id in $(compose ps -aq); do
    check "composed: $(inspect '{{.Name}}' "$id" | tr -d /) ended with exit code 0" [ "$(exit_code "$id")" = 0 ]
  done
  SERVER=""
}

start="$(now)"
start_engine
test_image
test_server
test_composition
say "the containers pass, after $(since "$start")"
printf '    %s\n' "${FIGURES[@]}"
