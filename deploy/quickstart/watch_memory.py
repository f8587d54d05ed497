#!/usr/bin/env python3
"""Writes the largest sum of the proportional set sizes of some processes to a file, until they end: watch_memory.py FILE PID..."""
import os
import sys
import time


def proportional_bytes(pid):
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        for line in rollup:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def main():
    target, pids = sys.argv[1], sys.argv[2:]
    peak = 0
    while True:
        total = 0
        for pid in pids:
            try:
                total += proportional_bytes(pid)
            except OSError:
                return
        if total > peak:
            peak = total
            with open(target + ".new", "w") as out:
                out.write(f"{peak}\n")
            os.replace(target + ".new", target)
        time.sleep(0.25)


main()
