#!/usr/bin/env bash
# A container engine for docker/test.sh, which sources this file. An engine that answers is used as it
# is, with the images of the registry. Where there is none, root gets one for the length of the test: its
# own socket and data, no default bridge, no iptables rule, no forwarding, and base images made by
# debootstrap instead of pulled ones.

CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/anabranch"
ENGINE="" ENGINE_PID=""  # folder and process of the engine that we started; empty when there was one already

say() { printf '==> %s\n' "$*"; }
die() { printf 'docker-test: %s\n' "$*" >&2; exit 1; }

quietly() {  # quietly COMMAND...: what it says is shown only if it fails
  local log
  log="$(mktemp)"
  "$@" >"$log" 2>&1 || { tail -n 40 "$log" >&2; rm "$log"; die "failed: $*"; }
  rm "$log"
}

need() {  # need COMMAND PACKAGE: install PACKAGE unless COMMAND is there
  command -v "$1" >/dev/null && return
  say "installing $2"
  apt-get install -y -qq --no-install-recommends "$2" >/dev/null 2>&1 && return
  quietly apt-get update -qq
  quietly apt-get install -y -qq --no-install-recommends "$2"
}

start_engine() {
  if docker info >/dev/null 2>&1; then
    export BASE="${BASE:-python:3.12-slim}" POSTGRES_IMAGE="${POSTGRES_IMAGE:-postgres:17}"
    return
  fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    die "no container engine answers, and only root on Debian can start one here"
  fi
  need dockerd docker.io
  need debootstrap debootstrap
  need docker-compose docker-compose
  ENGINE="$(mktemp -d /tmp/anabranch-engine.XXXXXX)"
  cat >"$ENGINE/dockerd.json" <<JSON
{"data-root": "$ENGINE/data", "exec-root": "$ENGINE/exec", "pidfile": "$ENGINE/pid",
 "hosts": ["unix://$ENGINE/docker.sock"],
 "bridge": "none", "iptables": false, "ip-forward": false, "ip-masq": false}
JSON
  say "starting an engine in $ENGINE"
  dockerd --config-file "$ENGINE/dockerd.json" >"$ENGINE/log" 2>&1 &
  ENGINE_PID=$!
  # The classic builder: BuildKit is a plug-in that Debian's client does not carry.
  export DOCKER_HOST="unix://$ENGINE/docker.sock" DOCKER_BUILDKIT=0 COMPOSE_DOCKER_CLI_BUILD=0
  # No container here needs to reach further than its own network: the warning is no news.
  docker() { command docker "$@" 2> >(grep -v 'IPv4 forwarding is disabled' >&2); }
  for _ in $(seq 100); do docker info >/dev/null 2>&1 && break; sleep 0.2; done
  docker info >/dev/null 2>&1 || { tail -20 "$ENGINE/log" >&2; die "the engine does not start"; }
  export BASE=anabranch-base PIP_NO_INDEX=1 POSTGRES_IMAGE=anabranch-postgres
  make_base "$BASE" python3,python3-venv,ca-certificates
  make_base anabranch-postgres-base postgresql
  quietly docker build -t "$POSTGRES_IMAGE" docker/postgres
}

stop_engine() {
  [ -n "$ENGINE_PID" ] || return 0
  kill "$ENGINE_PID" 2>/dev/null || true
  wait "$ENGINE_PID" 2>/dev/null || true
  rm -rf "$ENGINE"
}

make_base() {  # make_base IMAGE PACKAGES: a minimal Debian with PACKAGES, kept as a tarball
  local tarball="$CACHE/$1.tar" tree
  if [ ! -f "$tarball" ]; then
    say "making $1 with debootstrap (about a minute, once)"
    mkdir -p "$CACHE"
    tree="$(mktemp -d /tmp/anabranch-base.XXXXXX)"
    debootstrap --variant=minbase --include="$2" bookworm "$tree" >"$CACHE/$1.log" 2>&1 ||
      die "debootstrap failed: $CACHE/$1.log"
    rm -rf "$tree"/var/cache/apt/archives/*.deb "$tree"/var/lib/apt/lists/*
    tar -C "$tree" -cf "$tarball.part" .
    mv "$tarball.part" "$tarball"
    rm -rf "$tree"
  fi
  docker import "$tarball" "$1" >/dev/null
}

fill_wheels() {  # fill_wheels REQUIREMENT...: what an image needs, for the Python of the base
  [ -n "${PIP_NO_INDEX:-}" ] || return 0
  local python
  python="$(docker run --rm "$BASE" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)"
  say "wheels for Python $python"
  quietly env -u PIP_NO_INDEX "$VENV/bin/python" -m pip --disable-pip-version-check download --quiet \
    --progress-bar off --dest docker/wheels --only-binary=:all: --python-version "$python" \
    --platform "manylinux_2_28_$(uname -m)" --platform "manylinux_2_17_$(uname -m)" \
    --platform "manylinux2014_$(uname -m)" "setuptools>=77" "$@"
}

build() {  # build NAME: the image anabranch-NAME
  say "building anabranch-$1"
  quietly docker build --build-arg BASE="$BASE" --build-arg PIP_NO_INDEX="${PIP_NO_INDEX:-}" \
    --build-arg TORCH="$TORCH" -f "docker/$1.Dockerfile" -t "anabranch-$1" .
}

compose() {  # the plug-in where there is one, else the program
  local command=(docker-compose)
  docker compose version >/dev/null 2>&1 && command=(docker compose)
  "${command[@]}" -f docker/compose.yaml -p anabranch-test "$@"
}
