#!/usr/bin/env bash
# Set up the virtual environment, and the Debian packages if they can be had. Called by `make setup`.
#   VENV    where the virtual environment goes (.venv)
#   EXTRA   what the environment is for: dev, or libraries (make libraries)
#   TORCH   what to ask pip for; add "--index-url ..." to choose a build
#   PYTHON  the interpreter to start from (the first that is found and is 3.11 or newer)
# With --check it sees only whether the environment is one of PYTHON.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV="${VENV:-.venv}"
EXTRA="${EXTRA:-dev}"
TORCH="${TORCH:-torch==2.13.0}"

say() { printf '==> %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

apt_install() {  # as root only: nobody is asked for a password
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 1
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return
  apt-get update -qq >/dev/null 2>&1 && apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1
}

find_python() {  # prints PYTHON, or else the first interpreter that runs and is new enough
  local candidate candidates=(python3.11 python3.12 python3.13 python3.14 python3)
  for candidate in "${PYTHON:-${candidates[@]}}"; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$candidate" && return
  done
  return 1
}

version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }

check_python() {  # of an environment that is there already
  local there named
  there="$(version_of "$VENV/bin/python")" && named="$(version_of "${PYTHON:-$VENV/bin/python}")" || return 0
  [ "$there" = "$named" ] ||
    die "$VENV has Python $there, and PYTHON=$PYTHON is $named: name another with VENV=.venv-$named, or remove $VENV"
}

make_venv() {
  local python
  python="$(find_python)" || die "no Python 3.11 or newer${PYTHON:+ at PYTHON=$PYTHON}: install one, or name it with PYTHON=/path/to/python3"
  check_python
  "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
  say "virtual environment in $VENV with $("$python" --version)"
  rm -rf "$VENV"
  "$python" -m venv "$VENV" >/dev/null 2>&1 && return
  apt_install python3-venv || true  # Debian keeps the module in a package of its own
  "$python" -m venv "$VENV" || die "$python cannot make a virtual environment: apt-get install python3-venv"
}

install_python_packages() {
  local pip=("$VENV/bin/python" -m pip --disable-pip-version-check)
  # torch first and pinned: the range in pyproject.toml is then satisfied, whichever build this is.
  say "$TORCH"
  # shellcheck disable=SC2086  # TORCH may carry options
  "${pip[@]}" install --quiet --progress-bar off $TORCH
  say "anabranch, editable, with its extra $EXTRA"
  "${pip[@]}" install --quiet --progress-bar off --editable ".[$EXTRA]"
}

install_fashion_mnist() {
  [ -e /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ] && return
  say "Fashion-MNIST (Debian's dataset-fashion-mnist)"
  apt_install dataset-fashion-mnist && return
  say "  cannot be installed here: the demo takes the digits of scikit-learn. To have it:"
  say "  sudo apt-get install dataset-fashion-mnist"
}

[ "${1:-}" != --check ] || { check_python; exit; }
make_venv
install_python_packages
[ "$EXTRA" != dev ] || install_fashion_mnist
say "ready: $("$VENV/bin/python" --version)"
