#!/usr/bin/env python3
"""A whole step through both daemons, of random weights: generation, training, and the memory that it takes.

Asks `tandem plan` what the job needs, starts the pair with just that, submits the job, and prints as JSON: planned and used
memory (on a GPU what the driver counts on the whole card, less what was in use before; on the CPU the proportional set size of
both), and the history of each step with its time by stage. Completions run to their full length; no group is skipped.

    tools/measure_training.py --bin build/bin --shape=llama-3.1-8b --weights=nf4 --kv_cache_dtype=fp8 --prompt=512 --tokens=20480
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

DEPLOY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "deploy")
sys.path.append(os.path.join(DEPLOY, "quickstart"))

from measure_restart import Pair  # noqa: E402
from watch_memory import proportional_bytes  # noqa: E402

JOB = """name: "measured"
num_steps: {steps}
data {{ path: "prompts.jsonl" }}
rollout {{
  prompts_per_step: {prompts}
  group_size: {group_size}
  sampling {{ temperature: 1 max_tokens: {tokens} ignore_end_tokens: true }}
}}
rewards {{ weight: 1 ended_by_itself {{}} }}
batch {{ score_prompts: {score_prompts} }}
loss {{ preset: LOSS_PRESET_BNPO }}  # the one that skips no group, though all rewards are alike
adapter {{ rank: {rank} alpha: {rank} }}
optimizer {{ learning_rate: 1e-5 }}
"""


def card_mib():
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    answer = subprocess.run(["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True)
    return int(answer.stdout.splitlines()[0])


class Peak(threading.Thread):
    """The largest of what `read` returns, four times a second, until stopped."""

    def __init__(self, read):
        super().__init__(daemon=True)
        self.read, self.mib, self.is_stopped = read, 0, threading.Event()
        self.start()

    def run(self):
        while not self.is_stopped.wait(0.25):
            try:
                self.mib = max(self.mib, self.read())
            except OSError:
                return

    def stop(self):
        self.is_stopped.set()
        self.join()
        return self.mib


def start(args, directory, more):
    common = [f"--random_weights={args.shape}", f"--weights={args.weights}", f"--device={args.device}", *more]
    pair = Pair(args.bin, directory, common)
    for name in ("rollout_server", "trainer_server"):
        pair.flags = list(common)
        if name == "rollout_server":
            pair.flags.append(f"--kv_cache_dtype={args.kv_cache_dtype}")
            if args.live_sequences:
                pair.flags.append(f"--max_sequences={args.live_sequences}")
            pair.flags += args.rollout_flags.split()
        else:
            pair.flags += args.trainer_flags.split()
        pair.begin = pair.start(name)
    for name in ("rollout_server", "trainer_server"):
        pair.wait(name, pair.begin, args.start_limit)
    return pair


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv_cache_dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=20480, help="tokens of each completion")
    parser.add_argument("--live_sequences", type=int, default=0, help="generated at a time; 0: as many as the server runs")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--score_prompts", action="store_const", const="true", default="false", help="every position goes through the head")
    parser.add_argument("--rollout_flags", default="", help="of the rollout server alone, as --rollout_flags='--max_adapter_rank=16'")
    parser.add_argument("--trainer_flags", default="", help="of the trainer alone, as --trainer_flags='--host_bytes=64GiB'")
    parser.add_argument("--pool_bytes", help="instead of what the plan asks for")
    parser.add_argument("--start_limit", type=float, default=300, help="seconds that a daemon may take to serve")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        job = os.path.join(directory, "job.textproto")
        with open(job, "w") as out:
            out.write(JOB.format(**vars(args)))
        with open(os.path.join(directory, "prompts.jsonl"), "w") as out:
            for i in range(args.prompts):  # the random shapes' tokenizer has a token a byte
                out.write(json.dumps({"prompt": (f"{i} " + "word " * args.prompt)[:args.prompt]}) + "\n")
        is_gpu = args.device != "cpu" and subprocess.run(["sh", os.path.join(DEPLOY, "has_gpu.sh")]).returncode == 0
        before = card_mib() if is_gpu else 0

        pair = start(args, directory, [f"--pool_bytes={args.pool_bytes}"] if args.pool_bytes else [])
        try:
            plan = json.loads(pair.ask("plan", job, "--json"))
        finally:
            pair.end()
        memory = plan["memory"]
        asked = [f"--pool_bytes={args.pool_bytes or memory['asked_pool_bytes']}",
                 f"--rollout_standing_bytes={memory['asked_rollout_standing_bytes']}",
                 f"--trainer_standing_bytes={memory['asked_trainer_standing_bytes']}"]

        pair = start(args, directory, asked)
        peak = Peak(card_mib if is_gpu else lambda: sum(proportional_bytes(process.pid) for process in pair.processes.values()) >> 20)
        try:
            memory = json.loads(pair.ask("plan", job, "--json"))["memory"]
            begin = time.monotonic()
            name = json.loads(pair.ask("submit", job, "--json"))["job"]
            pair.ask("watch", name, "--json")
            seconds = time.monotonic() - begin
            peak_mib = peak.stop()
            with open(os.path.join(directory, "trainer_server", "jobs", name, "history.jsonl")) as history:
                steps = [json.loads(line) for line in history]
        finally:
            pair.end()
        print(json.dumps({
            "shape": args.shape, "weights": args.weights, "kv_cache_dtype": args.kv_cache_dtype, "flags": asked,
            "rollout_flags": args.rollout_flags, "trainer_flags": args.trainer_flags, "completions": args.prompts * args.group_size, "tokens": args.tokens, "prompt": args.prompt,
            "peak_mib": peak_mib - before, "before_mib": before, "seconds": round(seconds, 2),
            "largest_context_tokens": memory["largest_context_tokens"],
            "planned_mib": {owner["owner"]: [int(owner["generation_bytes"]) >> 20, int(owner["training_bytes"]) >> 20]
                            for owner in memory["owners"]}, "steps": [{"step": step["step"], "times": step["times"]} for step in steps],
        }, indent=1))


main()
