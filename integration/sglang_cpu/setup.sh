#!/usr/bin/env bash
# Usage: setup.sh VENV
#
# Makes VENV able to run SGLang 0.5.23 with HiCache on a CPU: the pins of requirements.txt, the
# stand-ins of standins/, and SGLang's page hash compiled. Creates VENV when it isn't there (with
# $PYTHON, python3.11 by default); leaves other packages in it alone.
#
# Idempotent: a stamp in VENV, keyed by the hash of every input, makes a second run take no time.
# A fresh environment is a download of about 600 MB, 3-5 minutes.
# TORCH_INDEX_URL: where to find torch 2.13.0+cpu (PyTorch's index of CPU wheels, say) if pip's own
# configuration doesn't know it.
set -euo pipefail

venv=$(realpath -m -- "${1:?usage: setup.sh VENV}")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
torch_index=${TORCH_INDEX_URL:-}
attempts_max=4

say() { printf '[sglang_cpu] %s\n' "$*"; }
fail() { printf '[sglang_cpu] %s\n' "$*" >&2; exit 1; }

# SGLang compiles its page hash with these; everything else is a wheel.
require_build_tools() {
    local missing=()
    command -v g++ >/dev/null || missing+=(g++)
    command -v ninja >/dev/null || missing+=(ninja-build)
    [ -e /usr/include/openssl/evp.h ] || pkg-config --exists libcrypto 2>/dev/null ||
        missing+=(libssl-dev)
    [ ${#missing[@]} -eq 0 ] || fail "missing system packages: apt-get install -y ${missing[*]}"
}

# The hash of every input: scripts, pins, stand-ins, and which interpreter runs them.
input_hash() {
    (
        cd "$here"
        find setup.sh requirements.txt standins -type f -not -path '*/__pycache__/*' -print0 |
            sort -z | xargs -0 sha256sum
        "$venv/bin/python" -c 'import sys; print(sys.version, sys.prefix)'
    ) | sha256sum | cut -d' ' -f1
}

# pip install, again after a pause when the network fails. From the second attempt on TORCH_INDEX_URL
# is searched too: the first stays with whatever pip is configured for.
pip_install() {
    local attempt extra=()
    for ((attempt = 1; attempt <= attempts_max; attempt++)); do
        if "$venv/bin/python" -m pip --disable-pip-version-check install --no-deps \
            --retries 3 --timeout 60 "${extra[@]}" "$@" |
            sed -u -E '/^Requirement already satisfied|^Looking in |━/d; s/^(.{100}).+/\1.../; s/^/    /'; then
            return 0
        fi
        say "pip failed (attempt $attempt of $attempts_max)"
        [ -z "$torch_index" ] || extra=(--extra-index-url "$torch_index")
        [ "$attempt" -eq "$attempts_max" ] || sleep $((attempt * 3))
    done
    fail "pip could not install: $* (for torch 2.13.0+cpu, TORCH_INDEX_URL may name an index)"
}

install_standins() {
    # Built from a copy, so that no build/ or egg-info is left in the sources.
    local copy
    copy=$(mktemp -d)
    cp -r "$here/standins" "$copy/"
    pip_install --no-build-isolation --force-reinstall "$copy/standins"
    rm -rf "$copy"
}

# Built now, not inside the first request; kept in torch's extension cache, keyed by its sources.
compile_page_hash() {
    "$venv/bin/python" -W ignore -c '
from sglang.srt.mem_cache.utils import get_storage_hash_str
assert len(get_storage_hash_str([1, 2], None, page_size=1)) == 2'
}

require_build_tools
if [ ! -x "$venv/bin/python" ]; then
    say "creating $venv"
    "${PYTHON:-python3.11}" -m venv "$venv"
fi
[ "$("$venv/bin/python" -c 'import sys; print(*sys.version_info[:2], sep=".")')" = 3.11 ] ||
    fail "$venv isn't Python 3.11, the only version the pinned sglang is run with"

stamp=$venv/.tutti-sglang-cpu
wanted=$(input_hash)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say "up to date: $venv"
    exit 0
fi
rm -f "$stamp"
say "1/3 pinned packages ($(grep -c == "$here/requirements.txt"))"
pip_install -r "$here/requirements.txt"
say "2/3 stand-ins"
install_standins
say "3/3 SGLang's page hash (C++, about 20 s the first time)"
compile_page_hash
echo "$wanted" > "$stamp"
say "ready: $venv ($(du -sm "$venv" | cut -f1) MB)"
