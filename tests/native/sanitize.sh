#!/bin/sh
# Build and run the C++ test programs plain, under ASan and UBSan, and under TSan; then the Python
# extension under ASan and UBSan with the tests that move bytes through it.
#
#   tests/native/sanitize.sh [plain|address|thread|python ...]      default: all four
#
# Needs a directory with direct I/O for scratch files: build/ of the checkout, or TUTTI_SCRATCH.
# Exits 0 if everything passed or was skipped (77) by a machine without io_uring, 1 otherwise.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -gt 0 ] || set -- plain address thread python
generator=
if command -v ninja >/dev/null; then generator="-G Ninja"; fi
export TSAN_OPTIONS="halt_on_error=1 second_deadlock_stack=1"
export ASAN_OPTIONS="detect_leaks=1 strict_string_checks=1"
export UBSAN_OPTIONS="print_stacktrace=1"

# Leaks are not looked for: the interpreter has many of its own.
run_python() {
    python="$root/.venv/bin/python"
    build="$root/build/native-python-address"
    # shellcheck disable=SC2086
    cmake -S "$root" -B "$build" $generator -DTUTTI_SANITIZE=address \
        -DPython_EXECUTABLE="$python" -DPython_ROOT_DIR="$root/.venv" >/dev/null
    cmake --build "$build" -j2 --target _native >"$build/build.log" 2>&1 ||
        { cat "$build/build.log"; exit 1; }
    compiler=${CXX:-c++}
    preload=
    for library in libasan.so libubsan.so libstdc++.so; do
        preload="$preload $("$compiler" -print-file-name=$library)"
    done
    echo "== python: the extension"
    (
        cd "$root"
        TUTTI_NATIVE=$(ls "$build"/_native*.so)
        export TUTTI_NATIVE
        # The allocator of the C library, so that what Python allocates is guarded too.
        PYTHONPATH="$root/tests/native" PYTHONMALLOC=malloc ASAN_OPTIONS="detect_leaks=0" \
            LD_PRELOAD="$preload" timeout 900 "$python" -m pytest -q -p other_native \
            -p no:cacheprovider -k "not fast_enough" tests/native/test_uring.py \
            tests/native/test_copy.py tests/native/test_hash.py tests/unit/test_concurrency.py
    )
}

for kind in "$@"; do
    if [ "$kind" = python ]; then
        run_python
        continue
    fi
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
    for program in plan_test engine_test nvme_test nvme_test_shaken gio_test gio_test_shaken; do
        echo "== $kind: $program"
        code=0
        # A hang is a failure; the slowest needs about 90 s on two busy cores.
        timeout 300 "$build/tests/native/$program" "${TUTTI_SCRATCH:-$root/build}" || code=$?
        [ "$code" -eq 0 ] || [ "$code" -eq 77 ] || { echo "$program: exit $code"; exit 1; }
    done
done
