#!/bin/bash
# Teaches SmolLM2-135M-Instruct to add with the binaries of this package, on the GPU where there is one, and shows the reward before and after.
#
#   run_quickstart.sh [--model=FILE] [--work=DIR] [--seed=N] [--steps=N] [--daemon_flags="--weights=fp8"] [--rollout_flags="--kv_cache_dtype=fp8"]
#     --model  SmolLM2-135M-Instruct.Q4_1.gguf; default: in ~/.cache/tandem (TANDEM_CACHE moves it), fetched by pip if it is not there
#     --work   default ./tandem-quickstart; gets logs, the adapter, quickstart-report.json and quickstart-reward.png
set -euo pipefail
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

deps=${TANDEM_CACHE:-$HOME/.cache/tandem}/deps
model= work=tandem-quickstart run=()
for argument in "$@"; do
  case $argument in
    --model=*) model=${argument#*=} ;;
    --work=*) work=${argument#*=} ;;
    --seed=* | --steps=* | --daemon_flags=* | --rollout_flags=*) run+=("$argument") ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; echo "unknown argument: $argument" >&2; exit 1 ;;
  esac
done
if [ -z "$model" ]; then
  model=$deps/models/SmolLM2-135M-Instruct.Q4_1.gguf
  if [ ! -e "$model" ]; then python3 "$root/share/fetch_deps.py" --dest "$deps" --set model; fi
fi
work=$(realpath -m "$work")
exec "$root/share/quickstart/run.sh" --bin="$root/bin" --model="$model" --work="$work/run" --reports="$work" ${run[@]+"${run[@]}"}
