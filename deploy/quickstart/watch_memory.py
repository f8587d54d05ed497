#!/usr/bin/env python3
"""Writes the peak memory of the processes PID... as JSON, until one of them ends.

  watch_memory.py [--metrics=HOST:PORT] FILE PID...

host_bytes: the largest sum of the proportional set sizes; memory that the processes share counts once.
device_bytes, device_pool_bytes, with the metrics of a daemon that runs on a GPU: the most that was in use on the card, as the driver counts
it for all processes, and the part of it that is the pool.
"""
import argparse
import json
import os
import time
import urllib.request


def proportional_bytes(pid):
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def device_bytes(address):
    """In use and of the pool, or None on the CPU."""
    values = {}
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=1) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("tandem_device_memory_bytes{"):
                    name, value = line.rsplit(" ", 1)
                    values[name.split('kind="')[1].split('"')[0]] = int(float(value))
    except OSError:
        return None
    if not {"total", "free", "outside_pool"} <= values.keys():
        return None
    used = values["total"] - values["free"]
    return used, used - values["outside_pool"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metrics")
    parser.add_argument("file")
    parser.add_argument("pids", nargs="+", type=int)
    args = parser.parse_args()

    peak = {}
    while True:
        try:
            now = {"host_bytes": sum(map(proportional_bytes, args.pids))}
        except OSError:
            return
        if args.metrics and (device := device_bytes(args.metrics)):
            now["device_bytes"], now["device_pool_bytes"] = device
        if any(value > peak.get(name, -1) for name, value in now.items()):
            peak |= {name: max(value, peak.get(name, 0)) for name, value in now.items()}
            with open(args.file + ".new", "w") as out:
                json.dump(peak, out)
            os.replace(args.file + ".new", args.file)
        time.sleep(0.25)


if __name__ == "__main__":
    main()
