#!/usr/bin/env bash
# From a clone to a rising reward: installs what is missing, builds, starts both daemons, teaches SmolLM2-135M-Instruct to add, and
# shows the reward on prompts that it was never trained on, before and after.
#
#   deploy/quickstart.sh [--seed=N] [--steps=N] [--skip_install]
#
# Leaves quickstart-report.json and quickstart-reward.png in the project's root, and the daemons stopped.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

seed=0 steps=15 skip_install=0
while [ $# -gt 0 ]; do
  case $1 in
    --seed=*) seed=${1#*=} ;;
    --seed) seed=${2:?--seed needs a number}; shift ;;
    --steps=*) steps=${1#*=} ;;
    --skip_install) skip_install=1 ;;
    *) sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; echo "unknown argument: $1" >&2; exit 1 ;;
  esac
  shift
done
case $seed$steps in *[!0-9]*) echo "--seed and --steps are whole numbers (got seed='$seed', steps='$steps')" >&2; exit 1 ;; esac

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
build=$root/build/quickstart
work=$build/run
deps=${TANDEM_CACHE:-$HOME/.cache/tandem}/deps

begin=$SECONDS
if [ $skip_install = 0 ]; then
  say "1/4  Dependencies"
  deploy/install_dependencies.sh
fi
install_seconds=$((SECONDS - begin))

begin=$SECONDS
say "2/4  Build"
cmake -S . -B "$build" -G Ninja -DTANDEM_DEPS="$deps" -Wno-dev
cmake --build "$build" --target rollout_server trainer_server tandem
build_seconds=$((SECONDS - begin))

say "3/4  Training"
rm -rf "$work"
mkdir -p "$work"
chmod 700 "$work"
model=$deps/models/SmolLM2-135M-Instruct.Q4_1.gguf
mapfile -t ports < <(python3 - <<'PY'
import socket
sockets = [socket.socket() for _ in range(4)]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets), sep="\n")
PY
)
rollout=127.0.0.1:${ports[0]} trainer=127.0.0.1:${ports[1]}
tandem() { "$build/bin/tandem" --trainer="$trainer" --rollout="$rollout" "$@"; }

# Idle OpenMP threads must sleep: the two daemons take turns on the same cores.
export OMP_WAIT_POLICY=PASSIVE
pids=()
stop() {
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  pids=()
}
trap stop EXIT
common=(--run_dir="$work/pool" --model="$model")
"$build/bin/rollout_server" --listen="$rollout" --metrics="127.0.0.1:${ports[2]}" --peer="$trainer" \
  --data_dir="$work/rollout" "${common[@]}" 2> "$work/rollout_server.log" &
pids+=($!)
"$build/bin/trainer_server" --listen="$trainer" --metrics="127.0.0.1:${ports[3]}" --peer="$rollout" \
  --data_dir="$work/trainer" "${common[@]}" 2> "$work/trainer_server.log" &
pids+=($!)
rollout_pid=${pids[0]} trainer_pid=${pids[1]}

begin=$SECONDS
for _ in $(seq 600); do
  tandem --timeout=2s status > "$work/status.txt" 2>&1 && break
  for pid in "${pids[@]}"; do
    kill -0 "$pid" 2>/dev/null || { echo "a daemon stopped:"; tail -n 5 "$work"/*_server.log; exit 1; }
  done
  sleep 0.2
done
tandem status

# Proportional set size of both processes: memory that they share counts once.
python3 deploy/quickstart/watch_memory.py "$work/peak_bytes" "$rollout_pid" "$trainer_pid" &
pids+=($!)

job=$(tandem --json --set="seed: $seed,num_steps: $steps" submit deploy/quickstart/job.textproto |
  python3 -c 'import json, sys; print(json.loads(sys.stdin.readline())["job"])')
tandem watch "$job"
seconds=$((SECONDS - begin))
tandem --json watch "$job" > "$work/events.jsonl"
tandem --step="$steps" --limit=4 completions "$job" || true
tandem export "$job" "$work/adapter"
stop
trap - EXIT

say "4/4  Result"
python3 deploy/quickstart/report.py --events="$work/events.jsonl" --peak_bytes_file="$work/peak_bytes" --seconds="$seconds" --seed="$seed" \
  --report=quickstart-report.json --plot=quickstart-reward.png
echo "install ${install_seconds} s, build ${build_seconds} s, start and training ${seconds} s"
echo "adapter: ${work#"$root"/}/adapter   logs: ${work#"$root"/}/*.log   report: quickstart-report.json   curve: quickstart-reward.png"
