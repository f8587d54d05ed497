#!/usr/bin/env python3
"""Tandem beside PyTorch + transformers + peft: the same GRPO steps of the same model on this machine, one after the other.

  compare_with_transformers.py --bin BUILD/bin --gguf FILE --python PYTHON_WITH_TORCH [--new_tokens 64] [--threads 2] [--json]

Both sides generate 8 prompts x 8 completions of exactly --new_tokens tokens (end tokens ignored) at temperature 1 with an unmerged LoRA of
rank 8 on all seven linears, in fp32, and train one step on them. Tandem's figures come from its real daemons: the job's history, and
the proportional set size of both processes. The best of the steps counts on both sides, the first (warm-up) apart.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from measure_restart import free_ports

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

JOB = """
name: "compare" seed: 1 num_steps: %(steps)d
data { path: "rows.jsonl" system_prompt: "You are a calculator." apply_chat_template: true no_shuffle: true }
rollout { prompts_per_step: 8 group_size: 8 sampling { temperature: 1 max_tokens: %(new_tokens)d ignore_end_tokens: true } }
rewards { name: "distance" weight: 1 numeric_distance { answer_field: "answer" scale: 10 } }
loss { preset: LOSS_PRESET_DAPO }
adapter { rank: 8 alpha: 16 }
optimizer { learning_rate: 5e-4 }
checkpoint { interval_steps: 1000 }
"""


def run_tandem(args, folder):
    ports = free_ports(4)
    rollout, trainer = f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"
    environment = dict(os.environ, OMP_NUM_THREADS=str(args.threads), OMP_WAIT_POLICY="PASSIVE")
    daemons = []
    for name, listen, peer, metrics in (("rollout_server", rollout, trainer, ports[2]), ("trainer_server", trainer, rollout, ports[3])):
        log = open(os.path.join(folder, name + ".log"), "w")
        daemons.append(subprocess.Popen(
            [os.path.join(args.bin, name), f"--listen={listen}", f"--peer={peer}", f"--metrics=127.0.0.1:{metrics}", f"--run_dir={folder}/pool",
             f"--data_dir={folder}/{name}", f"--model={args.gguf}"], stderr=log, env=environment))
    memory = None
    try:
        def tandem(*words, **options):
            return subprocess.run([os.path.join(args.bin, "tandem"), f"--trainer={trainer}", f"--rollout={rollout}", "--json", *words],
                                  capture_output=True, text=True, **options)

        for _ in range(300):
            if tandem("--timeout=2s", "status").returncode == 0:
                break
            time.sleep(0.2)
        with open(os.path.join(folder, "rows.jsonl"), "w") as rows:
            for i in range(8):
                rows.write(json.dumps({"prompt": f"{i + 2} + {i + 5} = ?", "answer": 2 * i + 7}) + "\n")
        with open(os.path.join(folder, "job.textproto"), "w") as job:
            job.write(JOB % {"steps": args.steps, "new_tokens": args.new_tokens})
        memory = subprocess.Popen([sys.executable, os.path.join(ROOT, "deploy/quickstart/watch_memory.py"), os.path.join(folder, "peak.json"),
                                   *(str(d.pid) for d in daemons)])
        submitted = tandem("submit", os.path.join(folder, "job.textproto"))
        if submitted.returncode != 0:
            sys.exit(submitted.stderr)
        job = json.loads(submitted.stdout.splitlines()[0])["job"]
        watched = tandem("watch", job, timeout=1800)
        if watched.returncode != 0:
            sys.exit(watched.stderr)
        steps = []
        for line in watched.stdout.splitlines():
            event = json.loads(line)
            if "step" in event:
                steps.append({v["name"]: v["value"] for v in event["step"]["values"]})
        with open(os.path.join(folder, "peak.json")) as peak:
            peak_bytes = json.load(peak)["host_bytes"]
    finally:
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=30)
        if memory is not None:
            memory.wait(timeout=30)
    warm = steps[1:]
    tokens = 64 * args.new_tokens
    generation = min(s["rollout_seconds"] for s in warm)
    training = min(s["train_seconds"] for s in warm)
    return {"generation_seconds": generation, "generation_tokens_per_second": tokens / generation, "training_seconds": training,
            "training_tokens_per_second": tokens / training, "peak_bytes": peak_bytes}


def run_torch(args, extra):
    out = subprocess.run([args.python, os.path.join(ROOT, "tools/torch_baseline.py"), "--gguf", args.gguf, "--new_tokens", str(args.new_tokens),
                          "--threads", str(args.threads), "--steps", str(args.steps), *extra],
                         capture_output=True, text=True, timeout=3600, env=dict(os.environ, OMP_NUM_THREADS=str(args.threads)))
    if out.returncode != 0:
        sys.exit(out.stderr[-2000:])
    return json.loads(out.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--python", required=True)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.gguf = os.path.abspath(args.gguf)
    with tempfile.TemporaryDirectory() as folder:
        rows = {"tandem": run_tandem(args, folder)}
    rows["transformers + peft"] = run_torch(args, [])
    rows["transformers + peft, checkpointing"] = run_torch(args, ["--checkpointing"])
    if args.json:
        print(json.dumps(rows))
        return
    print(f"64 completions of {args.new_tokens} tokens, {args.threads} threads, fp32")
    print(f"{'':<36}{'generation':>16}{'training':>16}{'peak memory':>14}")
    for name, row in rows.items():
        print(f"{name:<36}{row['generation_tokens_per_second']:>10.0f} tok/s{row['training_tokens_per_second']:>10.0f} tok/s"
              f"{row['peak_bytes'] / 2**20:>10.0f} MiB")


main()
