#!/bin/sh
# Build and run the fuzzer of the native planner, batches and memory table, under ASan and UBSan.
#
#   tests/fuzz/native.sh SEED SECONDS ROUNDS
#
# With clang it is coverage-guided (libFuzzer); with another compiler inputs are random. What was
# kept in corpus/native is tried first. Exits 0 if nothing broke, 1 otherwise, 77 without a compiler.
set -eu
seed=$1 seconds=$2 rounds=$3
root=$(cd "$(dirname "$0")/../.." && pwd)
here="$root/tests/fuzz"
build="$root/build/fuzz-native"
mkdir -p "$build"
flags="-std=c++20 -O1 -g -fno-omit-frame-pointer -I$root/csrc/include"
sources="$here/native_fuzz.cc $root/csrc/io/plan.cc $root/csrc/io/batch.cc"
if command -v clang++ >/dev/null && echo 'extern "C" int LLVMFuzzerTestOneInput() { return 0; }' |
    clang++ -x c++ -fsanitize=fuzzer,address - -o "$build/probe" 2>/dev/null; then
    compiler=clang++ kind="-fsanitize=fuzzer,address,undefined" guided=yes
else
    compiler=${CXX:-g++} kind="-fsanitize=address,undefined -DOWN_DRIVER" guided=
    command -v "$compiler" >/dev/null || { echo "native: no compiler"; exit 77; }
fi
program="$build/native_fuzz$guided"
if [ ! -x "$program" ] || [ -n "$(find $sources "$root"/csrc/include -newer "$program")" ]; then
    # shellcheck disable=SC2086
    "$compiler" $flags $kind -fno-sanitize-recover=all $sources -o "$program"
fi
cd "$build"
if [ -z "$guided" ]; then
    echo "native: no clang with libFuzzer here, inputs are random"
    exec "$program" "$seed" "$seconds" "$rounds" "$here"/corpus/native/*
fi
mkdir -p found
exec "$program" -seed="$seed" -max_total_time="${seconds%.*}" -runs=-1 -max_len=600 -timeout=10 \
    -print_final_stats=1 found "$here/corpus/native"
