#!/usr/bin/env bash
# From a clone to a rising reward: installs what is missing, builds, starts both daemons, teaches SmolLM2-135M-Instruct to add, and
# shows the reward on prompts that it was never trained on, before and after. On the GPU where there is one, else on the CPU.
#
#   deploy/quickstart.sh [--seed=N] [--steps=N] [--skip_install] [--daemon_flags="--device=cpu"] [--rollout_flags="..."]
#
# Leaves quickstart-report.json and quickstart-reward.png in the project's root, and the daemons stopped.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

skip_install=0 run=()
while [ $# -gt 0 ]; do
  case $1 in
    --seed=* | --steps=* | --daemon_flags=* | --rollout_flags=*) run+=("$1") ;;
    --seed) run+=("--seed=${2:?--seed needs a number}"); shift ;;
    --skip_install) skip_install=1 ;;
    *) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; echo "unknown argument: $1" >&2; exit 1 ;;
  esac
  shift
done

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
build=$root/build/quickstart
deps=${TANDEM_CACHE:-$HOME/.cache/tandem}/deps

begin=$SECONDS
if [ $skip_install = 0 ]; then
  say "1/3  Dependencies"
  deploy/install_dependencies.sh
fi
install_seconds=$((SECONDS - begin))

begin=$SECONDS
say "2/3  Build"
cmake -S . -B "$build" -G Ninja -DTANDEM_DEPS="$deps" -Wno-dev
cmake --build "$build" --target rollout_server trainer_server tandem
build_seconds=$((SECONDS - begin))

say "3/3  Training"
deploy/quickstart/run.sh --bin="$build/bin" --model="$deps/models/SmolLM2-135M-Instruct.Q4_1.gguf" --work="$build/run" --reports="$root" \
  ${run[@]+"${run[@]}"}
echo "install ${install_seconds} s, build ${build_seconds} s"
