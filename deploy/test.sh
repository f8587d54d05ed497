#!/bin/bash
# Installs what is missing, configures, builds and runs the tests. Ends with one line: 'N passed, N failed[, N skipped]', counting test cases.
# Fails if a test fails.
#
#   deploy/test.sh [--preset=NAME] [--label=REGEX]
#     --preset  one of CMakePresets.json; default: cuda where its dependencies are (a GPU or a CUDA toolkit), else cpu
#     --label   only tests whose label matches: unit, system, learn, gpu; those of gpu skip, and say why, where no GPU is
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

preset= label=
for argument in "$@"; do
  case $argument in
    --preset=*) preset=${argument#*=} ;;
    --label=*) label=${argument#*=} ;;
    *) echo "test.sh: unknown argument '$argument'; known are --preset=NAME, --label=REGEX" >&2; exit 2 ;;
  esac
done

deploy/install_dependencies.sh --checks
if [ -z "$preset" ]; then
  preset=cpu
  deps=${TANDEM_CACHE:-$HOME/.cache/tandem}/deps
  if [ -e "$deps/torch/lib/libtorch_cuda.so" ]; then
    for nvcc in "$deps/nvidia/cu13/bin/nvcc" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
      if [ -x "$nvcc" ]; then preset=cuda; break; fi
    done
  fi
fi

# Compiler results are the same in whatever folder the clone lies.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
# A file that includes LibTorch takes 1.5 GB to compile.
memory_gib=$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo)
jobs=$(nproc)
if [ "$jobs" -gt $((memory_gib / 2)) ]; then jobs=$((memory_gib > 3 ? memory_gib / 2 : 1)); fi

build=build/$preset
begin=$SECONDS
cmake --preset "$preset" -Wno-dev > /dev/null
cmake --build "$build" -j "$jobs"
echo "Built $preset in $((SECONDS - begin)) s"

rm -rf "$build/test_results"
mkdir -p "$build/test_results"
status=0
GTEST_OUTPUT=xml:$root/$build/test_results/ ctest --preset "$preset" -j 2 ${label:+-L "$label"} --no-tests=error \
  --output-junit "$root/$build/test_results/ctest.junit" || status=$?
python3 tools/count_tests.py "$build/test_results" || status=$?
exit "$status"
