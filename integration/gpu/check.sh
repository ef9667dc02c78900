#!/usr/bin/env bash
# Usage: check.sh [--dry-run] [--json FILE]
#
# GPU-issued NVMe on one GPU: correctness against the software controller, compute-sanitizer on a
# small case, then figures. At most six minutes; no network, no NVMe drive, no kernel module. Needs
# Tutti with its native part, CuPy and NVRTC; compute-sanitizer where it is to be used (on PATH or in
# /usr/local/cuda/bin, or COMPUTE_SANITIZER). PYTHON: the interpreter, .venv's by default.
#
# --dry-run: CPU threads in the place of the GPU's, everything small: tries the script alone.
# --json: where the report goes, gio-check.json by default.
#
# Every step has a limit of its own, and they sum up to less than six minutes. Exit status 0: what
# ran was right; 1: something was wrong, or took too long; 77: there is no GPU, or no CuPy.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

dry=
json=gio-check.json
while [ $# -gt 0 ]; do
    case $1 in
        --dry-run) dry=1 ;;
        --json) json=${2:?--json needs a file}; shift ;;
        *) sed -n '2,5s/^# \?//p' "$0" >&2; exit 2 ;;
    esac
    shift
done
python=${PYTHON:-$here/../../.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || { echo "no Python" >&2; exit 1; }
export PYTHONPATH=$here/../..${PYTHONPATH:+:$PYTHONPATH}

# name:seconds; compute-sanitizer has two more of 50.
steps=(machine:40 queue:25 ring:45 order:20 transport:55 speed:60)
sanitizer_limit=50
options=(--executor cuda)
[ -z "$dry" ] || options=(--executor cpu --quick)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
reports=()
failed=

# Run a command for at most $2 seconds as the step $1, which leaves a report.
step() {
    local name=$1 limit=$2 code=0
    shift 2
    echo "== $name (at most $limit s)"
    timeout -k 5 "$limit" "$@" --json "$work/$name.json" || code=$?
    [ "$code" -ne 77 ] || exit 77
    if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
        echo "FAILED   $name: it took longer than $limit s"
        rm -f "$work/$name.json"
    fi
    [ "$code" -eq 0 ] || failed=1
    reports+=("$name=$work/$name.json")
}

not_run() {
    echo "not run  $1: $2"
    printf '{"checks": [{"check": "%s", "ok": null, "detail": "%s"}]}\n' "$1" "$2" >"$work/$1.json"
    reports+=("$1=$work/$1.json")
}

find_sanitizer() {
    local candidate
    for candidate in "${COMPUTE_SANITIZER:-}" compute-sanitizer \
        /usr/local/cuda/bin/compute-sanitizer; do
        [ -n "$candidate" ] && command -v "$candidate" && return
    done
    return 1
}

sanitize() {
    local tool sanitizer
    sanitizer=$(find_sanitizer) || sanitizer=
    for tool in memcheck racecheck; do
        if [ -n "$dry" ]; then
            not_run "$tool" "a dry run has no GPU"
        elif [ -z "$sanitizer" ]; then
            not_run "$tool" "there is no compute-sanitizer"
        else
            step "$tool" "$sanitizer_limit" "$sanitizer" --tool "$tool" --error-exitcode 3 \
                --target-processes all "$python" "$here/gio_check.py" --executor cuda --quick \
                --sections small
        fi
    done
}

for entry in "${steps[@]}"; do
    [ "${entry%%:*}" != speed ] || sanitize
    step "${entry%%:*}" "${entry##*:}" "$python" "$here/gio_check.py" "${options[@]}" \
        --sections "${entry%%:*}"
done
"$python" "$here/check_report.py" "$json" "${reports[@]}" || failed=1
echo "report: $json"
[ -z "$failed" ]
