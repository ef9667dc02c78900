#!/bin/sh
# Build and run the C++ test programs plain, under ASan and UBSan, and under TSan.
#
#   tests/native/sanitize.sh [plain|address|thread ...]      default: all three
#
# Needs a directory with direct I/O for scratch files: build/ of the checkout, or TUTTI_SCRATCH.
# Exits 0 if everything passed or was skipped (77) by a machine without io_uring, 1 otherwise.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -gt 0 ] || set -- plain address thread
generator=
if command -v ninja >/dev/null; then generator="-G Ninja"; fi
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1"
export ASAN_OPTIONS="detect_leaks=1 strict_string_checks=1"
export UBSAN_OPTIONS="print_stacktrace=1"
for kind in "$@"; do
    build="$root/build/native-$kind"
    sanitizer=$kind
    [ "$kind" = plain ] && sanitizer=
    # shellcheck disable=SC2086
    cmake -S "$root" -B "$build" $generator -DTUTTI_PYTHON=OFF -DTUTTI_NATIVE_TESTS=ON \
        -DTUTTI_SANITIZE="$sanitizer" >/dev/null
    cmake --build "$build" -j2 >"$build/build.log" 2>&1 || { cat "$build/build.log"; exit 1; }
    if [ ! -x "$build/tests/native/plan_test" ]; then
        echo "sanitize: skipped, liburing or xxhash is missing"
        exit 0
    fi
    for program in plan_test engine_test; do
        echo "== $kind: $program"
        code=0
        # A hang is a failure; the slowest needs about 20 s.
        timeout 120 "$build/tests/native/$program" "${TUTTI_SCRATCH:-$root/build}" || code=$?
        [ "$code" -eq 0 ] || [ "$code" -eq 77 ] || { echo "$program: exit $code"; exit 1; }
    done
done
