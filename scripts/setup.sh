#!/usr/bin/env bash
# Usage: setup.sh core|full
#
# Makes .venv able to build, check and test Tutti (core), and to run SGLang on a CPU too (full).
# Installs missing system packages with apt when root; otherwise says which ones to install.
# Idempotent: stamps in .venv make a second run take about a second.
# PYTHON: the interpreter to use (python3.11 by default, then python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scope=${1:?usage: setup.sh core|full}
venv=.venv
packages=(g++ make cmake pkg-config ninja-build libssl-dev liburing-dev libxxhash-dev fio)

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] %s\n' "$*" >&2; exit 1; }

find_python() {
    for candidate in "${PYTHON:-python3.11}" python3; do
        if command -v "$candidate" >/dev/null; then
            "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || continue
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 is needed: apt-get install -y python3 (Debian 12), or set PYTHON"
}

missing_packages() {
    local package
    for package in "${packages[@]}"; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            echo "$package"
    done
    # Debian's own interpreter comes without headers and without venv.
    "$python" -c 'import sysconfig, os, sys
sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || echo python3-dev
    "$python" -c 'import ensurepip' 2>/dev/null || echo python3-venv
}

install_packages() {
    local missing
    mapfile -t missing < <(missing_packages)
    [ ${#missing[@]} -eq 0 ] && return
    command -v apt-get >/dev/null || fail "install the equivalents of: ${missing[*]}"
    [ "$(id -u)" -eq 0 ] || fail "run as root: apt-get install -y ${missing[*]}"
    say "apt-get install ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
}

hash_of() { cat "$@" | sha256sum | cut -d' ' -f1; }

# Run `$3...` unless stamp $1 says it was done for the inputs of hash $2.
once() {
    local stamp=$venv/.tutti-$1 wanted=$2
    shift 2
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
    rm -f "$stamp"
    "$@"
    echo "$wanted" >"$stamp"
}

pip_install() {
    local attempt
    for attempt in 1 2 3; do
        "$venv/bin/python" -m pip --disable-pip-version-check install -q "$@" && return
        say "pip failed (attempt $attempt of 3)"
        sleep $((attempt * 3))
    done
    fail "pip could not install: $*"
}

install_tools() {
    say "development tools"
    pip_install --no-deps -r requirements-dev.txt
}

# With SGLang's environment every dependency is pinned there; alone, pip resolves the ranges.
install_tutti() {
    say "building and installing tutti (editable)"
    local deps=()
    [ "$scope" = full ] && deps=(--no-deps)
    pip_install "${deps[@]}" --no-build-isolation -e . -Cbuild-dir=build/dev
}

python=$(find_python)
install_packages
[ -x $venv/bin/python ] || { say "creating $venv"; "$python" -m venv $venv; }
[ "$scope" = full ] && PYTHON=$python bash integration/sglang_cpu/setup.sh $venv
once tools "$(hash_of requirements-dev.txt)" install_tools
mapfile -t sources < <(find csrc CMakeLists.txt pyproject.toml -type f | sort)
once build "$(hash_of "${sources[@]}")" install_tutti
say "ready: $venv"
