#!/usr/bin/env python3
"""Turns the events of a finished job (`tandem --json watch JOB`) into a table and a JSON report."""
import argparse
import json
import sys


def named(values):
    return {v["name"]: v["value"] for v in values}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", required=True)
    parser.add_argument("--memory", required=True, help="what watch_memory.py wrote")
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--report", required=True)
    args = parser.parse_args()

    num_steps, evaluations = 0, []
    with open(args.events) as events:
        for line in events:
            event = json.loads(line)
            if "step" in event:
                num_steps += 1
            elif "evaluation" in event:
                evaluations.append(event["evaluation"])
    if not num_steps or len(evaluations) < 2:
        sys.exit(f"{args.events}: {num_steps} steps and {len(evaluations)} evaluations; a finished job has steps and two evaluations")
    with open(args.memory) as peak:
        memory = json.load(peak)
    is_on_gpu = "device_bytes" in memory

    def rewards(evaluation):
        return {"total": evaluation["reward"], **named(evaluation["rewards"])}

    before, after = rewards(evaluations[0]), rewards(evaluations[-1])
    # peak_bytes is host memory; what is in use on a GPU counts all processes on it.
    report = {"reward_before": before, "reward_after": after, "seconds": args.seconds, "device": "cuda" if is_on_gpu else "cpu",
              "peak_bytes": memory["host_bytes"], "seed": args.seed, "steps": num_steps, "held_out_prompts": evaluations[0]["num_prompts"]}
    if is_on_gpu:
        report |= {"device_peak_bytes": memory["device_bytes"], "device_pool_bytes": memory["device_pool_bytes"]}
    with open(args.report, "w") as out:
        json.dump(report, out, indent=2)
        out.write("\n")

    print(f"{'held-out reward':<18}{'before':>8}{'after':>8}{'gain':>8}")
    for name in before:
        print(f"{name:<18}{before[name]:>8.3f}{after[name]:>8.3f}{after[name] - before[name]:>+8.3f}")
    print(f"{evaluations[0]['num_prompts']} prompts, {num_steps} steps, {args.seconds} s, peak {memory['host_bytes'] / 2**20:.0f} MiB of host memory "
          "for both daemons")
    if is_on_gpu:
        print(f"GPU: peak {memory['device_bytes'] / 2**20:.0f} MiB in use on the card, all processes; the pool is "
              f"{memory['device_pool_bytes'] / 2**20:.0f} MiB of it")


main()
