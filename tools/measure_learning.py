#!/usr/bin/env python3
"""Does a real model learn something harder than the quickstart's sums? Sums and differences of numbers up to 20, 50 and 99, say.

Starts a pair, trains, and prints as JSON: reward of each step, the held-out rewards, what the trainer's elastic memory peaked at
after step 3 and after the last one, and the time by stage. Several may run side by side: each has its own pool.

    tools/measure_learning.py --bin build/bin --model SmolLM2-135M-Instruct.Q4_1.gguf --weights=nf4 --seed=1 --steps=200
"""
import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

from measure_restart import Pair, free_ports

JOB = """name: "sums-and-differences"
seed: {seed}
num_steps: {steps}
data {{ path: "train.jsonl" system_prompt: "You are a calculator." apply_chat_template: true }}
rollout {{ prompts_per_step: {prompts} group_size: {group_size} sampling {{ temperature: 1 max_tokens: 24 }} }}
rewards {{ name: "correct" weight: 0.8 numeric_answer {{ answer_field: "answer" must_end: true }} }}
rewards {{ name: "ended" weight: 0.2 ended_by_itself {{}} }}
loss {{ preset: LOSS_PRESET_DAPO }}
adapter {{ rank: {rank} alpha: {alpha} }}
optimizer {{ learning_rate: {learning_rate} warmup_steps: 5 max_grad_norm: 1 schedule: {schedule} }}
checkpoint {{ interval_steps: 100 }}
evaluation {{ path: "held_out.jsonl" interval_steps: 50 }}
{more}
"""
NUM_HELD_OUT, MAX_TRAINED = 256, 8192


def write_data(directory, bounds, operations):
    """Each bound makes an equal share of the draws. The same rows for every seed of the job; no held-out row is trained on."""
    draw = random.Random(0)

    def row(bound):
        a, b, is_sum = draw.randint(1, bound), draw.randint(1, bound), draw.choice(operations) == "+"
        return {"prompt": f"{a} {'+' if is_sum else '-'} {b} = ?", "answer": a + b if is_sum else a - b}

    rows = {}
    num_rows = min(NUM_HELD_OUT + MAX_TRAINED, max(bounds)**2 * len(operations) * 3 // 4)  # at most three quarters of what there are
    while len(rows) < num_rows:
        made = row(draw.choice(bounds))
        rows[made["prompt"]] = made
    rows = list(rows.values())
    for name, part in (("held_out", rows[:NUM_HELD_OUT]), ("train", rows[NUM_HELD_OUT:])):
        with open(os.path.join(directory, name + ".jsonl"), "w") as out:
            out.writelines(json.dumps(each) + "\n" for each in part)


def trainer_peak_mib(metrics_port, job):
    """Of the job's passes in the elastic region since it began, by the ledger; None when the job is over."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("tandem_plan_peak_bytes{") and f'job="{job}"' in line and 'owner="activations"' in line:
                return float(line.rsplit(" ", 1)[1]) / 2**20
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pool_bytes", default="6GiB")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=16, help="a step")
    parser.add_argument("--group_size", type=int, default=16)
    parser.add_argument("--bounds", type=int, nargs="+", default=[20, 50, 99], help="of the numbers")
    parser.add_argument("--operations", default="+-")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters; alpha is twice it")
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--schedule", default="LEARNING_RATE_SCHEDULE_CONSTANT")
    parser.add_argument("--more", default="", help="job text that comes last, as 'loss { preset: LOSS_PRESET_DR_GRPO }'")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="tandem-learning-") as directory:
        write_data(directory, args.bounds, args.operations)
        job = os.path.join(directory, "job.textproto")
        with open(job, "w") as out:
            out.write(JOB.format(alpha=2 * args.rank, **vars(args)))
        (metrics_port,) = free_ports(1)
        common = [f"--model={args.model}", f"--weights={args.weights}", f"--device={args.device}", f"--pool_bytes={args.pool_bytes}"]
        pair = Pair(args.bin, directory, common)
        try:
            begins = {"rollout_server": pair.start("rollout_server")}
            pair.flags = common + [f"--metrics=127.0.0.1:{metrics_port}"]
            begins["trainer_server"] = pair.start("trainer_server")
            for name, begin in begins.items():
                pair.wait(name, begin, 120)
            begin = time.monotonic()
            name = json.loads(pair.ask("submit", job, "--json").splitlines()[0])["job"]
            peaks = []
            watch = subprocess.Popen(pair.client("watch", name, "--json"), stdout=subprocess.PIPE, text=True)
            for line in watch.stdout:
                event = json.loads(line)
                if isinstance(event.get("step"), dict) and int(event["step"]["step"]) >= 3:
                    peaks.append(trainer_peak_mib(metrics_port, name))
            if watch.wait() != 0:
                sys.exit(pair.log("trainer_server")[-2000:])
            seconds = time.monotonic() - begin
            peaks = [peak for peak in peaks if peak is not None]
            with open(os.path.join(directory, "trainer_server", "jobs", name, "history.jsonl")) as history:
                lines = [json.loads(line) for line in history]
        finally:
            pair.end()
        steps = [line for line in lines if line["kind"] == "step"]
        differences = [s[key] for s in steps if (key := "sampling/sampling_logp_difference/mean") in s]  # a step that skips all has none
        times = {stage: round(sum(step["times"].get(stage, 0) for step in steps), 2) for stage in steps[-1]["times"]}
        print(json.dumps({
            "weights": args.weights, "seed": args.seed, "rank": args.rank, "bounds": args.bounds, "operations": args.operations,
            "learning_rate": args.learning_rate, "schedule": args.schedule, "seconds": round(seconds, 1),
            "peak_mib_after_step_3_and_at_last": [peaks[0], peaks[-1]],
            "held_out": [[line["step"], round(line["reward"], 4), round(line["rewards/correct/mean"], 4)]
                         for line in lines if line["kind"] == "evaluation"],
            "reward": [round(step["reward"], 4) for step in steps],
            "sampling_logp_difference": round(statistics.mean(differences), 5),
            "times": times}))


main()
