#!/usr/bin/env bash
# Build the images and run them for real; `make docker-test` calls this.
#   1. the server's image: no torch, no root
#   2. one server on SQLite, locked down, and the demo's devices outside it: healthy, killed, back, drained
#   3. an App of one's own on top of the client's image, guarded: word by word from docs/deploying.md
#   4. the same with a folder of `anabranch new`, in which there are an authority and papers
#   5. the composition: PostgreSQL, the server, three devices, a cockpit, Prometheus; killed, back, a standby that
#      takes over, drained
#   6. a keeper alone: word by word from docs/privacy.md
#   7. the composition with masked sums: the server, two keepers, four devices; killed, back, drained
# Exit code 69: there is no container engine, and none can be started.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=docker/engine.sh
source docker/engine.sh

VENV="$(realpath "${VENV:-.venv}")"
TORCH="${TORCH:-torch==2.13.0}"
export VENV TORCH PORT="${PORT:-17070}"
export UI_PORT="${UI_PORT:-$((PORT + 10))}"  # not the usual one: the link that is printed must lead there
ADMIN_PORT=$((PORT + 1)) KEEPER_PORT=$((PORT + 5))
NAME=anabranch-test
PATIENCE_S=300  # a busy machine is slow; what works is waited for no longer than it takes
SERVER="" DEMO=""  # the container that serves, and the process of the demo outside
COCKPIT=""  # the container of the composition's
FIGURES=()
COMPOSITION=compose  # of docker/

cleanup() {
  local status=$?
  trap - EXIT
  [ "$status" = 0 ] || what_happened >&2
  [ -z "$DEMO" ] || { kill "$DEMO"; wait "$DEMO"; } 2>/dev/null || true
  remove_all
  stop_engine
  rm -rf "$WORK"
  exit "$status"
}

what_happened() {
  [ ! -f "$WORK/demo.log" ] || tail -n 10 "$WORK/demo.json" "$WORK/demo.log"
  [ -z "$SERVER" ] || docker logs --tail 40 "$SERVER" 2>&1 | sed 's/^/    /'
}

# shellcheck disable=SC2033  # xargs runs the program
remove_all() {  # everything of ours, of an earlier run that was killed as well
  docker ps -aq --filter "name=^$NAME" | xargs -r docker rm -fv || true
  COMPOSE_OVERRIDE="" COMPOSITION=masked/compose compose down -v --remove-orphans || true
  COMPOSE_OVERRIDE="" COMPOSITION=compose every_profile down -v --remove-orphans || true
  docker network ls -q --filter "name=^$NAME" | xargs -r docker network rm || true
  docker volume ls -q --filter "name=^$NAME" | xargs -r docker volume rm || true
} >/dev/null 2>&1

every_profile() { compose --profile standby --profile cockpit --profile metrics "$@"; }

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

wait_for() {  # wait_for COMMAND...
  local deadline=$((SECONDS + PATIENCE_S))
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
serving_inside() { docker exec "$SERVER" anabranch health 127.0.0.1:7071; }  # where the port wants papers
said() { grep -q "$2" <(docker logs "$1" 2>&1); }  # said CONTAINER WORDS
ended() { [ "$(inspect '{{.State.Status}}' "$1")" = exited ]; }
exit_code() { inspect '{{.State.ExitCode}}' "$1"; }
ended_well() {  # ended_well WHAT CONTAINER
  local code
  code="$(exit_code "$2")"
  [ "$code" = 0 ] || SERVER="$2"  # whose last words are shown
  check "$1 ended with exit code $code" [ "$code" = 0 ]
}

field() { "$VENV/bin/python" -c 'import json, sys; print(json.loads(sys.stdin.readlines()[-1])[sys.argv[1]])' "$1"; }
status() { docker exec "$SERVER" anabranch admin status --json | field "$1"; }
reached() { [ "$(status version)" -ge "$1" ]; }
above() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a > b) }'; }  # above A B: is A > B

locked_down() {  # locked_down [CONTAINER]: the server, where none is named
  docker exec "${1:-$SERVER}" sh -c '
    ! touch /opt/file 2>/dev/null && touch /tmp/file && touch /var/lib/anabranch/file || exit 1
    grep -q "^Uid:[[:space:]]*10001[[:space:]]*10001" /proc/1/status &&
    grep -q "^CapEff:[[:space:]]*0*$" /proc/1/status && grep -q "^CapBnd:[[:space:]]*0*$" /proc/1/status &&
    grep -q "^NoNewPrivs:[[:space:]]*1" /proc/1/status'
}

image_size() { printf '%d MB' $(($(docker image inspect -f '{{.Size}}' "$1") / 1000000)); }

kill_and_resume() {  # kill_and_resume WHAT [SERVING]: nothing acknowledged is lost, nobody helps it up
  local before after run start
  before="$(status version)" run="$(status run_id)"
  docker kill -s KILL "$SERVER" >/dev/null
  start="$(now)"
  docker start "$SERVER" >/dev/null
  check "$1: a killed server serves again" wait_for "${2:-serving}"
  figure "$1: serving again after kill -9" "$(since "$start")"
  check "$1: it says that the one before was killed" said "$SERVER" "which had it before, was killed"
  after="$(status version)"
  check "$1: the same run, from version $after (killed after $before)" \
    [ "$(status run_id) $((after >= before))" = "$run 1" ]
}

drain() {  # drain WHAT
  local start
  start="$(now)"
  docker stop -t 30 "$SERVER" >/dev/null
  figure "$1: docker stop drains" "$(since "$start"), exit code $(exit_code "$SERVER")"
  ended_well "$1: docker stop drains, and it" "$SERVER"
  check "$1: it says that it has drained" said "$SERVER" drained
}

# --- the parts ---------------------------------------------------------------------------------------

test_images() {
  build server
  build client
  build keeper
  check "the server's image has neither torch nor flwr" docker run --rm --entrypoint python anabranch-server -c \
    'import importlib.util as u; raise SystemExit(any(u.find_spec(n) for n in ("torch", "flwr")))'
  check "a keeper's has no database of the server's either" docker run --rm --entrypoint python anabranch-keeper -c \
    'import importlib.util as u; raise SystemExit(any(u.find_spec(n) for n in ("torch", "flwr", "sqlalchemy")))'
  check "it does not run as root" [ "$(docker run --rm --entrypoint id anabranch-server -u)" = 10001 ]
  check "nor does a keeper" [ "$(docker run --rm --entrypoint id anabranch-keeper -u)" = 10001 ]
  check "a device knows what its container leaves it of the machine" [ "$(left_to_a_device)" = "1 $((300 << 20))" ]
  figure "image anabranch-server" "$(image_size anabranch-server)"
  figure "image anabranch-client" "$(image_size anabranch-client)"
  figure "image anabranch-keeper" "$(image_size anabranch-keeper)"
}

left_to_a_device() {  # cores and bytes of memory
  docker run --rm --cpus 0.5 --memory 300m --entrypoint python anabranch-client -c \
    'from anabranch.support.allowance import cores, memory_bytes; print(cores(), memory_bytes())'
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
  check "alone: the server serves" wait_for serving
  figure "alone: serving after" "$(since "$start")"
  check "alone: Docker calls it healthy" wait_for healthy
  figure "alone: healthy after" "$(since "$start")"
  check "alone: no root, no capability, no new privileges, a read-only file system" locked_down

  say "the demo outside: three devices and an evaluator"
  anabranch demo --workload digits --clients 3 --server "127.0.0.1:$PORT" --admin "127.0.0.1:$ADMIN_PORT" \
    --out "$WORK/demo" --json >"$WORK/demo.json" 2>"$WORK/demo.log" &
  DEMO=$!
  check "alone: versions grow" wait_for reached 5
  kill_and_resume alone
  wait "$DEMO" || die "FAILED: the demo"
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

page() {  # page PAGE HEADING LANGUAGE [WORD=OTHER...]
  "$VENV/bin/python" docker/page.py "docs/$1" "$2" "$3" "my-=$NAME-" "${@:4}"
}

typed() {  # typed FOLDER: its file `commands`, by a reader who is in that folder
  pushd "$1" >/dev/null
  # shellcheck source=/dev/null
  source commands >commands.log 2>&1 || { cat commands.log >&2; die "FAILED: the commands of the page"; }
  popd >/dev/null
}

# shellcheck disable=SC2034  # for the commands of the page
invited() { TOKEN="$(field token <<<"$1")" HEX="$(field ca_sha256 <<<"$1")"; }  # invited ANSWER-OF-ENROL

test_own_app() {
  local folder="$WORK/own"
  mkdir "$folder"
  page deploying.md "An App of your own" dockerfile >"$folder/Dockerfile"
  page deploying.md "An App of your own" python >"$folder/app.py"
  federation_of "own App" "$folder"
  docker start "$SERVER" >/dev/null
  check "own App: its server serves again" wait_for reached 1
  test_backup
  SERVER=""
  remove_all
}

federation_of() {  # federation_of WHAT FOLDER [WORD=OTHER...]: with the App in it, by the commands of the page
  local folder="$2" start device
  # The reader takes TOKEN and HEX from what `enrol` prints.
  # shellcheck disable=SC2016  # the commands run later
  page deploying.md "An App of your own" console "${@:3}" | sed -E \
    -e 's/^(.* admin enrol .*)$/invited "$(\1 --json)"/' -e 's/\b(TOKEN|HEX)\b/"$\1"/g' >"$folder/commands"
  say "$1: $(wc -l <"$folder/commands") commands of docs/deploying.md"
  start="$(now)"
  typed "$folder"
  SERVER="$NAME-server"
  check "$1: its devices join, with certificates" wait_for reached 1
  for device in "$NAME-device-0" "$NAME-device-1"; do
    check "$1: $device ends with the run" wait_for ended "$device"
    ended_well "$1: $device" "$device"
  done
  check "$1: all 60 updates are in" [ "$(status updates_applied)" = 60 ]
  figure "$1: from its Dockerfile to the end of its run" "$(since "$start")"
  drain "$1"
}

test_new_folder() {
  local folder="$WORK/mine"
  anabranch new "$folder" >/dev/null
  (cd "$folder" && anabranch admin ca init && anabranch admin operator me --out me) >/dev/null
  check "new folder: there are keys in it" grep -rq "PRIVATE KEY" "$folder"
  federation_of "new folder" "$folder" "/app.py:App=/app/app.py:app"
  check "new folder: its image has its App" in_own_image 'test -r /app/app.py'
  check "new folder: its image has no key" in_own_image '! grep -rq "PRIVATE KEY" /app && ! test -e /app/me'
  SERVER=""
  remove_all
}

in_own_image() { docker run --rm --network none --entrypoint sh "$NAME-device" -c "$1"; }

test_backup() {  # into a new container, by the commands of the page
  local folder="$WORK/backup" run version
  run="$(status run_id)" version="$(status version)"
  mkdir "$folder"
  page deploying.md "The backup of a container" console >"$folder/commands"
  say "a backup: $(wc -l <"$folder/commands") commands of docs/deploying.md"
  typed "$folder"
  check "backup: the new container serves" wait_for reached "$version"
  check "backup: the same run, at version $version" [ "$(status run_id) $(status version)" = "$run $version" ]
  check "backup: it knows its members" grep -q device-1 "$folder/commands.log"
  drain "backup"
}

test_composition() {
  local start accuracy id
  # Its own budget of updates would end the run on a fast machine before the last check.
  COMPOSE_OVERRIDE="$WORK/override.yaml"
  cat >"$COMPOSE_OVERRIDE" <<YAML
services:
  server: {environment: {ANABRANCH_RUN_UPDATES_MAX: "1000000"}}
  standby: {environment: {ANABRANCH_RUN_UPDATES_MAX: "1000000"}}
YAML
  start="$(now)"
  quietly compose up -d --no-build
  SERVER="$(compose ps -q server)"
  check "composed: all services start" [ -n "$SERVER" ]
  figure "composed: server healthy, devices started after" "$(since "$start")"
  check "composed: no root, no capability, no new privileges, a read-only file system" locked_down
  check "composed: versions grow" wait_for reached 5
  test_cockpit
  test_metrics
  kill_and_resume composed
  quietly every_profile restart cockpit  # it lives in the network of the server's container
  check "cockpit: started again with the server, it sees the run" wait_for visited
  check "composed: all three devices come back" grown 10
  accuracy="$(anabranch evaluate digits --server "127.0.0.1:$PORT" --once --json | field accuracy | cut -c-6)"
  check "composed: a follower outside measures accuracy $accuracy" above "$accuracy" 0.5
  test_standby
  figure "composed: version, updates, accuracy" "$(status version), $(status updates_applied), $accuracy"
  drain "composed, under load"
  # shellcheck disable=SC2016  # for the shell in the container
  check "composed: its data verify on PostgreSQL" quietly compose run --rm --no-deps --entrypoint sh server -c \
    'anabranch verify /var/lib/anabranch --database "$ANABRANCH_SERVER_DATABASE"'
  start="$(now)"
  quietly every_profile stop
  figure "composed: the rest stops" "$(since "$start")"
  for id in $(every_profile ps -aq); do
    ended_well "composed: $(inspect '{{.Name}}' "$id" | tr -d /)" "$id"
  done
  SERVER=""
}

test_cockpit() {  # a browser comes by the newest link
  quietly every_profile build cockpit
  quietly every_profile up -d --no-build --no-deps cockpit
  COCKPIT="$(every_profile ps -q cockpit)"
  check "cockpit: a browser sees the run" wait_for visited
  check "cockpit: no root, no capability, no new privileges, a read-only file system" locked_down "$COCKPIT"
}

visited() {
  local link
  link="$(docker logs "$COCKPIT" 2>&1 | grep -o "https://localhost:.*" | tail -n 1)"
  docker cp "$COCKPIT:/var/lib/anabranch/certificate.pem" "$WORK/cockpit.pem"
  [[ "$("$VENV/bin/python" docker/visit.py "$link" "$WORK/cockpit.pem")" =~ ^running\ [1-9] ]]
}

test_metrics() {
  local prometheus
  quietly every_profile up -d --no-build --no-deps prometheus
  prometheus="$(every_profile ps -q prometheus)"
  check "metrics: Prometheus takes the rules, and reads the server" wait_for counted "$prometheus" 'anabranch_version > 0'
}

counted() {  # counted PROMETHEUS EXPRESSION: it holds of something
  docker exec "$1" promtool query instant http://127.0.0.1:9090 "$2" | grep -q .
}

grown() {  # grown BY [DEVICES]: versions grow by so many, and all devices are there
  local from
  from="$(status version)"
  wait_for reached $((from + $1)) && [ "$(status clients)" = "${2:-3}" ]
}

test_standby() {  # the leader is killed, the standby leads, and hands the run back
  local leader="$SERVER" standby before run start
  quietly compose --profile standby up -d --no-build standby
  standby="$(compose --profile standby ps -q standby)"
  check "standby: it stands by" wait_for said "$standby" "standing by"
  before="$(status version)" run="$(status run_id)"
  docker kill -s KILL "$leader" >/dev/null
  start="$(now)" SERVER="$standby"
  check "standby: it takes over from a killed leader" wait_for reached "$before"
  figure "standby: leads after kill -9 of the leader" "$(since "$start")"
  check "standby: the same run" [ "$(status run_id)" = "$run" ]
  check "standby: all three devices go on" grown 10
  docker start "$leader" >/dev/null
  check "standby: the former leader stands by" wait_for stands_by "$leader"
  drain "standby, under load"
  SERVER="$leader"
  check "standby: drained, it hands the run back" wait_for reached "$before"
  check "standby: all three devices go on again" grown 10
}

stands_by() {  # stands_by CONTAINER: since its last start
  grep -q "standing by" <(docker logs --since "$(inspect '{{.State.StartedAt}}' "$1")" "$1" 2>&1)
}

test_keeper() {
  local folder="$WORK/keeper" start name
  SERVER="$NAME-keeper"
  mkdir "$folder"
  anabranch admin ca init --folder "$WORK/authority" >/dev/null
  install -m 644 "$WORK/authority/ca.pem" "$folder/ca.pem"
  page privacy.md "A keeper in a container" console "-p 7075=-p 127.0.0.1:$KEEPER_PORT" >"$folder/commands"
  say "a keeper: $(wc -l <"$folder/commands") commands of docs/privacy.md"
  start="$(now)"
  typed "$folder"
  check "keeper: Docker calls it healthy" wait_for healthy
  figure "keeper: made and healthy after" "$(since "$start")"
  check "keeper: no root, no capability, no new privileges, a read-only file system" locked_down
  name="$(shown)"
  check "keeper: its name is that which it was made with" grep -q "^keeper: $name$" "$folder/commands.log"
  docker kill -s KILL "$SERVER" >/dev/null
  docker start "$SERVER" >/dev/null
  check "keeper: a killed one comes again" wait_for docker exec "$SERVER" anabranch keeper health
  check "keeper: under the same name" [ "$(shown)" = "$name" ]
  start="$(now)"
  docker stop -t 30 "$SERVER" >/dev/null
  figure "keeper: docker stop" "$(since "$start"), exit code $(exit_code "$SERVER")"
  ended_well "keeper: docker stop ends it, and it" "$SERVER"
  SERVER=""
  remove_all
}

shown() { docker exec "$SERVER" anabranch keeper show | sed -n 's/^keeper: //p'; }

test_masked() {
  local start keeper other before id
  COMPOSITION=masked/compose
  COMPOSE_OVERRIDE="$WORK/endless.yaml"
  printf 'services: {server: {environment: {ANABRANCH_RUN_UPDATES_MAX: "1000000"}}}\n' >"$COMPOSE_OVERRIDE"
  start="$(now)"
  quietly compose up -d --no-build
  SERVER="$(compose ps -q server)" keeper="$(compose ps -q keeper-1)"
  other="$(compose exec -T keeper-2 anabranch keeper show | sed -n 's/^keeper: //p')"
  figure "masked: keepers and server healthy, devices started after" "$(since "$start")"
  check "masked: no root, no capability, no new privileges, a read-only file system" locked_down
  check "masked: nor has a keeper" locked_down "$keeper"
  check "masked: sums become versions, of all four devices" grown 5 4
  figure "masked: five versions after" "$(since "$start")"
  check "masked: each keeper has answered" [ "$(sums 'all(k["answered"] for k in keepers)')" = True ]
  check "masked: devices do not reach a keeper" out_of_reach keeper-1
  docker kill -s KILL "$keeper" >/dev/null
  check "masked: while a keeper is away updates are taken, and sums wait" wait_for held_up "$other"
  before="$(status version)"
  kill_and_resume masked serving_inside
  check "masked: what waited waits still" wait_for held_up "$other"
  check "masked: without the keeper no sum was published" [ "$(status version)" = "$before" ]
  start="$(now)"
  docker start "$keeper" >/dev/null
  check "masked: it comes again, and sums go on" grown 5 4
  figure "masked: five versions after its start" "$(since "$start")"
  figure "masked: peak memory of a keeper" \
    "$(docker exec "$keeper" awk '/^VmHWM/ { printf "%d MB", $2 / 1000 }' /proc/1/status)"
  figure "masked: version, updates" "$(status version), $(status updates_applied)"
  drain "masked, under load"
  # shellcheck disable=SC2016  # for the shell in the container
  check "masked: its data verify, signatures and all" quietly compose run --rm --no-deps --entrypoint sh server -c \
    'anabranch verify /var/lib/anabranch --ca-sha256 "$(cat /handed/ca.sha256)"'
  start="$(now)"
  quietly compose stop
  figure "masked: the rest stops" "$(since "$start")"
  for id in $(compose ps -aq); do
    ended_well "masked: $(inspect '{{.Name}}' "$id" | tr -d /)" "$id"
  done
  SERVER=""
}

sums() {  # sums EXPRESSION: of how masked sums stand
  docker exec "$SERVER" anabranch admin status --json | "$VENV/bin/python" -c \
    'import json, sys; print(eval(sys.argv[1], json.loads(sys.stdin.readlines()[-1])["masked_sums"]))' "$1"
}
held_up() {  # held_up KEEPER: the next sum waits for the other one alone
  [ "$(sums "[w['answered'] for w in waiting][:1] == [['$1']] and any(k['trouble'] for k in keepers)")" = True ]
}

out_of_reach() {  # out_of_reach NAME: from where the devices are
  ! docker exec "$(compose ps -q device-0)" python3 -c \
    'import socket, sys; socket.create_connection((sys.argv[1], 7075), 5)' "$1" 2>/dev/null
}

if [ "${1:-}" != --inside ]; then
  with_engine "$0" --inside
  exit
fi
WORK="$(mktemp -d "${ENGINE:-/tmp}/anabranch-docker.XXXXXX")"
trap cleanup EXIT
trap 'exit 130' INT TERM
start="$(now)"
start_engine
remove_all
test_images
test_server
test_own_app
test_new_folder
test_composition
remove_all
test_keeper
test_masked
say "the containers pass, after $(since "$start")"
printf '    %s\n' "${FIGURES[@]}"
