#!/usr/bin/env bash
# A container engine for docker/test.sh, which sources this file. An engine that answers is used as it
# is, with the images of the registry. Where there is none, root gets one for the length of the test, in
# namespaces of its own: processes, mounts and networks end with it, however it ends, and no port, bridge
# or iptables rule of the machine is touched. Its base images are made by debootstrap, not pulled.
#
# Exit code 69: no engine is here and none can be started; one line on standard error says why.

CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/anabranch"
UNAVAILABLE=69  # EX_UNAVAILABLE of sysexits.h

say() { printf '==> %s\n' "$*"; }
die() { printf 'docker-test: %s\n' "$*" >&2; exit 1; }
no_engine() { printf 'docker-test: no container engine: %s\n' "$*" >&2; exit "$UNAVAILABLE"; }

quietly() {  # quietly COMMAND...: what it says is shown only if it fails
  local log
  log="$(mktemp)"
  "$@" >"$log" 2>&1 || { tail -n 40 "$log" >&2; rm "$log"; die "failed: $*"; }
  rm "$log"
}

with_engine() {  # with_engine COMMAND: run it where an engine answers, with BASE and POSTGRES_IMAGE set
  if docker info >/dev/null 2>&1; then
    export BASE="${BASE:-python:3.12-slim}" POSTGRES_IMAGE="${POSTGRES_IMAGE:-postgres:17}"
    "$@"
  else
    prepare_engine
    unshare --net --pid --mount-proc --fork --kill-child "$@" &
    wait "$!"
  fi
}

# --- outside: what needs the network ------------------------------------------------------------

need() {  # need COMMAND PACKAGE: install PACKAGE unless COMMAND is there
  command -v "$1" >/dev/null && return
  say "installing $2"
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y -qq --no-install-recommends "$2" >/dev/null 2>&1 && return
  apt-get update -qq >/dev/null 2>&1 || true
  apt-get install -y -qq --no-install-recommends "$2" >/dev/null 2>&1 || no_engine "$2 cannot be installed"
}

prepare_engine() {
  [ "$(id -u)" = 0 ] || no_engine "none answers, and only root can start one"
  command -v apt-get >/dev/null || no_engine "none answers, and one is started on Debian only"
  unshare --net --pid --mount-proc --fork true 2>/dev/null || no_engine "namespaces are not allowed here"
  need dockerd docker.io
  need docker docker-cli  # where it is a package of its own
  need docker-compose docker-compose
  need debootstrap debootstrap
  need ip iproute2
  clear_leftovers
  ENGINE="$(mktemp -d /tmp/anabranch-engine.XXXXXX)"
  trap leave_engine EXIT
  trap 'exit 130' INT TERM
  exec 8>"$ENGINE/lock"
  flock 8  # for as long as this process, or one that it started, lives
  # The classic builder: BuildKit is a plug-in that Debian's client does not carry.
  export ENGINE DOCKER_HOST="unix://$ENGINE/docker.sock" DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0
  export BASE=anabranch-base POSTGRES_IMAGE=anabranch-postgres PROMETHEUS_IMAGE=anabranch-prometheus PIP_NO_INDEX=1
  make_base "$BASE" python3,python3-venv,ca-certificates &
  make_base anabranch-postgres-base postgresql
  make_base anabranch-prometheus-base prometheus
  wait "$!"
  download_wheels
}

leave_engine() {  # whatever still runs inside ends here
  { kill -KILL "$!" && wait "$!"; } 2>/dev/null || true
  rm -rf "$ENGINE"
  rm -f docker/wheels/*.whl
}

clear_leftovers() {  # of runs that were killed: nobody holds their lock
  local folder
  for folder in /tmp/anabranch-engine.*; do
    [ -d "$folder" ] && flock -n "$folder/lock" true && rm -rf "$folder"
  done
  rm -f docker/wheels/*.whl
}

make_base() {  # make_base IMAGE PACKAGES: a minimal Debian with PACKAGES, kept as a tarball
  local tarball="$CACHE/$1.tar" tree
  [ ! -f "$tarball" ] || return 0
  say "making $1 with debootstrap (about a minute, once)"
  mkdir -p "$CACHE"
  tree="$(mktemp -d "$ENGINE/tree.XXXXXX")"
  # In memory, in a mount of its own: quicker, and gone with it.
  # shellcheck disable=SC2016  # for that shell
  unshare --mount sh -euc '
    mount -t tmpfs tmpfs "$1"
    debootstrap --variant=minbase --include="$2" bookworm "$1"
    rm -rf "$1"/var/cache/apt/archives/*.deb "$1"/var/lib/apt/lists/*
    tar -C "$1" -cf "$3" .' sh "$tree" "$2" "$tarball.part" >"$CACHE/$1.log" 2>&1 ||
    no_engine "debootstrap cannot make a base image: $(tail -n 1 "$CACHE/$1.log") ($CACHE/$1.log)"
  mv "$tarball.part" "$tarball"
}

download_wheels() {  # what the images are made of, for the Python of the base
  local python
  python="$(tar -tf "$CACHE/$BASE.tar" | sed -n 's|^\./usr/bin/python\(3\.[0-9]*\)$|\1|p')"
  say "wheels for Python $python"
  # shellcheck disable=SC2086  # TORCH may carry options
  quietly env -u PIP_NO_INDEX "$VENV/bin/python" -m pip --disable-pip-version-check download --quiet \
    --progress-bar off --dest docker/wheels --only-binary=:all: --python-version "$python" \
    --platform "manylinux_2_28_$(uname -m)" --platform "manylinux_2_17_$(uname -m)" \
    --platform "manylinux2014_$(uname -m)" "setuptools>=77" $TORCH ".[server,postgresql,keeper,client,workloads,blake3,cockpit]"
}

# --- inside: the engine itself --------------------------------------------------------------------

DATA_GIB=12  # what the images take while they are built, and some more

start_engine() {
  [ -n "${ENGINE:-}" ] || return 0
  mkdir "$ENGINE/data"
  if awk -v need="$DATA_GIB" '/^MemAvailable/ { exit $2 / 2^20 < 1.25 * need }' /proc/meminfo; then
    mount -t tmpfs -o "size=${DATA_GIB}g" tmpfs "$ENGINE/data"  # quicker, and gone with the namespace
  fi
  cat >"$ENGINE/dockerd.json" <<JSON
{"data-root": "$ENGINE/data", "exec-root": "$ENGINE/exec", "pidfile": "$ENGINE/pid",
 "hosts": ["$DOCKER_HOST"],
 "bridge": "none", "iptables": false, "ip-forward": false, "ip-masq": false}
JSON
  ip link set lo up
  dockerd --config-file "$ENGINE/dockerd.json" >"$ENGINE/log" 2>&1 &
  ENGINE_PID=$!
  # No container here needs to reach further than its own network: the warning is no news.
  docker() { command docker "$@" 2> >(grep -v 'IPv4 forwarding is disabled' >&2); }
  until docker info >/dev/null 2>&1; do
    kill -0 "$ENGINE_PID" 2>/dev/null || no_engine "dockerd does not start: $(tail -n 1 "$ENGINE/log")"
    sleep 0.2
  done
  docker import "$CACHE/$BASE.tar" "$BASE" >/dev/null
  local stand_in
  for stand_in in postgres prometheus; do
    docker import "$CACHE/anabranch-$stand_in-base.tar" "anabranch-$stand_in-base" >/dev/null
    quietly docker build -t "anabranch-$stand_in" "docker/$stand_in"
  done
}

stop_engine() {
  [ -n "${ENGINE_PID:-}" ] || return 0
  kill "$ENGINE_PID" 2>/dev/null || true
  wait "$ENGINE_PID" 2>/dev/null || true
}

build() {  # build NAME: the image anabranch-NAME
  say "building anabranch-$1"
  quietly docker build --build-arg BASE="$BASE" --build-arg PIP_NO_INDEX="${PIP_NO_INDEX:-}" \
    --build-arg TORCH="$TORCH" -f "docker/$1.Dockerfile" -t "anabranch-$1" .
}

compose() {  # the plug-in where there is one, else the program
  local command=(docker-compose)
  docker compose version >/dev/null 2>&1 && command=(docker compose)
  "${command[@]}" -f "docker/$COMPOSITION.yaml" ${COMPOSE_OVERRIDE:+-f "$COMPOSE_OVERRIDE"} -p anabranch-test "$@"
}
