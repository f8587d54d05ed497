#!/usr/bin/env bash
# The quickstart's job with binaries that are there: starts both daemons, teaches SmolLM2-135M-Instruct to add, stops them, reports. It runs
# on the GPU where there is one, else on the CPU.
#
#   run.sh --bin=DIR --model=FILE --work=DIR --reports=DIR [--seed=N] [--steps=N] [--daemon_flags="..."] [--rollout_flags="..."]
#     --bin           folder of rollout_server, trainer_server and tandem
#     --model         the model's GGUF file or folder
#     --work          emptied; logs, checkpoints and the adapter
#     --reports       gets quickstart-report.json and quickstart-reward.png
#     --daemon_flags  for both daemons, as --daemon_flags="--device=cpu" or "--weights=fp8"
#     --rollout_flags for the rollout server alone, as --rollout_flags="--kv_cache_dtype=fp8"
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

bin= model= work= reports= seed=0 steps=15 daemon_flags=() rollout_flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --bin=*) bin=${1#*=} ;;
    --model=*) model=${1#*=} ;;
    --work=*) work=${1#*=} ;;
    --reports=*) reports=${1#*=} ;;
    --seed=*) seed=${1#*=} ;;
    --steps=*) steps=${1#*=} ;;
    --daemon_flags=*) read -ra daemon_flags <<< "${1#*=}" ;;
    --rollout_flags=*) read -ra rollout_flags <<< "${1#*=}" ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; echo "unknown argument: $1" >&2; exit 1 ;;
  esac
  shift
done
if [ -z "$bin" ] || [ -z "$model" ] || [ -z "$work" ] || [ -z "$reports" ]; then
  echo "run.sh: --bin, --model, --work and --reports are needed" >&2; exit 1
fi
case $seed$steps in *[!0-9]*) echo "--seed and --steps are whole numbers (got seed='$seed', steps='$steps')" >&2; exit 1 ;; esac

rm -rf "$work"
mkdir -p "$work" "$reports"
chmod 700 "$work"
mapfile -t ports < <(python3 - <<'PY'
import socket
sockets = [socket.socket() for _ in range(5)]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets), sep="\n")
PY
)
rollout=127.0.0.1:${ports[0]} trainer=127.0.0.1:${ports[1]}
tandem() { "$bin/tandem" --trainer="$trainer" --rollout="$rollout" "$@"; }

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
# Without it the pool is all of the GPU's free memory.
if "$here/../has_gpu.sh"; then common+=(--pool_bytes=6GiB); fi
common+=(${daemon_flags[@]+"${daemon_flags[@]}"})
"$bin/rollout_server" --listen="$rollout" --metrics="127.0.0.1:${ports[2]}" --peer="$trainer" \
  --data_dir="$work/rollout" "${common[@]}" ${rollout_flags[@]+"${rollout_flags[@]}"} 2> "$work/rollout_server.log" &
pids+=($!)
"$bin/trainer_server" --listen="$trainer" --metrics="127.0.0.1:${ports[3]}" --http_address="127.0.0.1:${ports[4]}" --peer="$rollout" \
  --data_dir="$work/trainer" "${common[@]}" 2> "$work/trainer_server.log" &
pids+=($!)
rollout_pid=${pids[0]} trainer_pid=${pids[1]}

begin=$SECONDS
ready=no
for _ in $(seq 600); do
  if tandem --timeout=2s status > "$work/status.txt" 2>&1; then ready=yes; break; fi
  for pid in "${pids[@]}"; do
    kill -0 "$pid" 2>/dev/null || { echo "a daemon stopped:" >&2; tail -n 5 "$work"/*_server.log >&2; exit 1; }
  done
  sleep 0.2
done
if [ $ready = no ]; then echo "the daemons did not answer in two minutes:" >&2; cat "$work/status.txt" >&2; exit 1; fi
cat "$work/status.txt"
echo "live page: http://127.0.0.1:${ports[4]}/"

python3 "$here/watch_memory.py" --metrics="127.0.0.1:${ports[2]}" "$work/memory.json" "$rollout_pid" "$trainer_pid" &
pids+=($!)

job=$(tandem --json --set="seed: $seed,num_steps: $steps" submit "$here/job.textproto" |
  python3 -c 'import json, sys; print(json.loads(sys.stdin.readline())["job"])')
tandem watch "$job"
seconds=$((SECONDS - begin))
tandem --json watch "$job" > "$work/events.jsonl"
tandem --step="$steps" --limit=4 completions "$job" || true
tandem export "$job" "$work/adapter"
tandem --metrics=reward plot "$job" > "$work/curve.txt" || true
tandem --metrics=reward --png="$reports/quickstart-reward.png" plot "$job" > /dev/null || true
stop
trap - EXIT

python3 "$here/report.py" --events="$work/events.jsonl" --memory="$work/memory.json" --seconds="$seconds" --seed="$seed" \
  --report="$reports/quickstart-report.json"
cat "$work/curve.txt"
echo "start and training ${seconds} s   adapter: $work/adapter   logs: $work/*.log   report and curve: $reports/quickstart-re*"
