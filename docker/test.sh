#!/usr/bin/env bash
# Build the images and run them for real; `make docker-test` calls this.
#   1. the server's image: no torch, no root, a read-only file system, no capability
#   2. devices outside train against it; a killed server comes back where it was; `docker stop` drains
#   3. the composition: PostgreSQL, the server, three devices in containers of their own
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=docker/engine.sh
source docker/engine.sh

VENV="$(realpath "${VENV:-.venv}")"
TORCH="${TORCH:-torch==2.13.0}"
WORK="$(mktemp -d /tmp/anabranch-docker.XXXXXX)"
export VENV TORCH PORT="${PORT:-17070}"

cleanup() {
  local status=$?
  trap - EXIT
  [ "$status" = 0 ] || docker logs --tail 40 anabranch-test 2>/dev/null || true
  # shellcheck disable=SC2046
  kill $(jobs -p | grep -vx "$(cat "$ENGINE/pid" 2>/dev/null || echo none)") 2>/dev/null || true
  docker rm -fv anabranch-test >/dev/null 2>&1 || true
  compose down -v --remove-orphans >/dev/null 2>&1 || true
  docker volume rm anabranch-test >/dev/null 2>&1 || true
  rm -f docker/wheels/*.whl
  stop_engine
  rm -rf "$WORK"
  exit "$status"
}
trap cleanup EXIT

anabranch() { "$VENV/bin/anabranch" "$@"; }

check() {  # check WHAT COMMAND...: say what holds, or stop
  local what="$1"
  shift
  "$@" || die "FAILED: $what"
  say "ok: $what"
}

wait_for() {  # wait_for SECONDS COMMAND...
  local deadline=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || return 1
    sleep 0.5
  done
}

healthy() { [ "$(docker inspect -f '{{.State.Health.Status}}' "$1")" = healthy ]; }

test_image() {
  fill_wheels ".[server,postgresql]"
  build server
  check "the server's image has neither torch nor flwr" docker run --rm --entrypoint python anabranch-server -c \
    'import importlib.util as u; raise SystemExit(any(u.find_spec(n) for n in ("torch", "flwr")))'
  check "the server does not run as root" \
    [ "$(docker run --rm --entrypoint id anabranch-server -u)" = 10001 ]
}

start_server() {
  docker run -d --name anabranch-test -p "127.0.0.1:$PORT:7070" \
    --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --memory 1g \
    -v anabranch-test:/var/lib/anabranch -v "$WORK/model:/model:ro" \
    anabranch-server --model /model >/dev/null
}

test_server() {
  anabranch init digits --out "$WORK/model" >/dev/null
  chmod -R a+rX "$WORK"
  start_server
  check "the server becomes healthy, read-only and without capabilities" wait_for 60 healthy anabranch-test
  check "devices outside the container train with it" \
    anabranch demo --server-address "127.0.0.1:$PORT" --out "$WORK/demo"
  docker kill -s KILL anabranch-test >/dev/null
  docker start anabranch-test >/dev/null
  check "a killed server comes back" wait_for 60 healthy anabranch-test
  docker stop -t 30 anabranch-test >/dev/null
  check "docker stop drains" [ "$(docker inspect -f '{{.State.ExitCode}}' anabranch-test)" = 0 ]
}

test_composition() {
  fill_wheels "$TORCH" ".[client,workloads]"
  build client
  compose up -d
  check "the composed server becomes healthy" wait_for 120 healthy anabranch-test_server_1
}

start_engine
test_image
test_server
test_composition
say "the containers pass"
