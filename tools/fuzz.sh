#!/bin/bash
# Feeds every reader of foreign bytes with what libFuzzer makes up, under address and undefined-behaviour sanitizer: one after the other, on one
# core. Builds the preset cpu-fuzz first.
#
#   tools/fuzz.sh [--seconds=N] [--folder=DIR] [TARGET...]
#     --seconds  for each target, default 60
#     --folder   where corpora, logs and finds lie, default build/cpu-fuzz/fuzz; what is there is gone on with
#     TARGET     of tests/fuzz/fuzz_target.cc; default: all
# Prints a line a target: inputs tried, edges covered, what was found. Fails if anything was. An input that was found goes, as small as it
# can be made, into tests/fuzz/corpus/TARGET, where the test tandem_fuzz_test reads it each time.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

seconds=60 folder=build/cpu-fuzz/fuzz targets=()
for argument in "$@"; do
  case $argument in
    --seconds=*) seconds=${argument#*=} ;;
    --folder=*) folder=${argument#*=} ;;
    -*) echo "fuzz.sh: unknown argument '$argument'; known are --seconds=N, --folder=DIR" >&2; exit 2 ;;
    *) targets+=("$argument") ;;
  esac
done

cmake --preset cpu-fuzz -Wno-dev > /dev/null
cmake --build --preset cpu-fuzz
fuzzer=$root/build/cpu-fuzz/bin/tandem_fuzz
if [ ${#targets[@]} = 0 ]; then read -r -a targets <<< "$("$fuzzer" 2>&1 | sed -n 's/.*one of: //p')"; fi

export ASAN_OPTIONS=allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 OMP_NUM_THREADS=1
status=0
for target in "${targets[@]}"; do
  corpus=$folder/corpus/$target log=$folder/$target.log
  mkdir -p "$corpus" "$folder/found"
  "$fuzzer" --target="$target" "$corpus" -runs=1 > "$log" 2>&1 || true    # writes seeds and dictionary
  words=()
  if [ -s "$corpus.dict" ]; then words=(-dict="$corpus.dict"); fi
  result=ok
  nice "$fuzzer" --target="$target" "$corpus" "${words[@]}" -max_total_time="$seconds" -timeout=100 -rss_limit_mb=2048 -malloc_limit_mb=1024 \
    -max_len=65536 -print_final_stats=1 -artifact_prefix="$folder/found/$target-" > "$log" 2>&1 || result=FOUND
  tried=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  edges=$(grep -oE 'cov: [0-9]+' "$log" | tail -1 | cut -d ' ' -f 2)
  printf '%-20s %10s inputs %7s edges  %s\n' "$target" "${tried:-0}" "${edges:-0}" "$result"
  if [ "$result" = FOUND ]; then
    grep -E 'ERROR|runtime error|is false' "$log" | head -3 >&2 || true
    status=1
  fi
done
exit "$status"
