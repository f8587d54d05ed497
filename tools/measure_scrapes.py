#!/usr/bin/env python3
"""What scraping /metrics costs a pair that trains, and whether anything leaks over many scrapes.

Starts both daemons and scrapes both at an interval while jobs run one after the other, so that series come and go. The cost is the processor
time of the threads that serve the page, a scrape; at one scrape a second that is the share of each second, and so of each step, that they take
of one core. Memory of its own (RssAnon), descriptors and threads of each daemon are read before each scrape: what leaks raises the least
of a window, whatever the calls under way hold. The tool ends with 1 where a limit is passed.

    tools/measure_scrapes.py --bin=build/cpu/bin --seconds=3600 --pause=20
    tools/measure_scrapes.py --bin=build/cpu/bin --seconds=180 --model=~/.cache/tandem/deps/models/SmolLM2-135M-Instruct.Q4_1.gguf
"""
import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from measure_restart import Pair, free_ports  # noqa: E402

DAEMONS = ("rollout_server", "trainer_server")
MOST_SHARE = 0.005  # of one core at one scrape a second
MOST_GROWTH_MIB = 4
MOST_MORE = 2  # descriptors, threads: of calls under way
WARM_SHARE = 0.3  # of the time: job after job brings the heap to its size
PAGE_THREADS = "civetweb"
JOB = """
name: "scraped" seed: 1 num_steps: {steps}
data {{ path: "rows.jsonl" }}
rollout {{ prompts_per_step: 4 group_size: 4 sampling {{ temperature: 1 max_tokens: 24 }} }}
rewards {{ name: "ended" weight: 1 ended_by_itself {{}} }}
rewards {{ name: "vowel" weight: 0.5 regular_expression {{ pattern: "[aeiou]" }} }}
loss {{ preset: LOSS_PRESET_DR_GRPO beta: 0.01 }}
adapter {{ rank: 4 alpha: 8 }}
optimizer {{ learning_rate: 1e-4 }}
"""


def page_cpu_seconds(pid):
    """Of the threads that serve /metrics, so far."""
    total, count, folder = 0, 0, f"/proc/{pid}/task"
    for task in os.listdir(folder):
        with open(f"{folder}/{task}/comm", encoding="utf-8") as file:
            if not file.read().startswith(PAGE_THREADS):
                continue
        with open(f"{folder}/{task}/schedstat", encoding="utf-8") as file:
            total += int(file.read().split()[0])
            count += 1
    if count == 0:
        sys.exit(f"process {pid} has no thread whose name begins with {PAGE_THREADS}")
    return total * 1e-9


def state_of(pid):
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {"rss_mib": int(fields["RssAnon"].split()[0]) / 1024, "threads": int(fields["Threads"]), "descriptors": len(os.listdir(f"/proc/{pid}/fd"))}


class Jobs(threading.Thread):
    """One job after the other, until told to stop."""

    def __init__(self, pair, path, pause):
        super().__init__()
        self.pair, self.path, self.pause = pair, path, pause
        self.stopping = threading.Event()
        self.ended, self.steps, self.step_seconds, self.fault = 0, 0, 0.0, None

    def run(self):
        while not self.stopping.is_set() and self.fault is None:
            words = self.pair.client("submit", self.path, "--watch", "--json")
            done = subprocess.run(words, capture_output=True, text=True, timeout=600)
            events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode != 0 or not events or events[-1].get("status", {}).get("state") != "JOB_STATE_SUCCEEDED":
                self.fault = f"{' '.join(words)}: {done.stdout[-500:]}{done.stderr}"
            for event in events:
                values = {value["name"]: value["value"] for value in event["step"]["values"]} if isinstance(event.get("step"), dict) else {}
                self.steps += "step_time" in values
                self.step_seconds += values.get("step_time", 0)
            self.ended += 1
            self.stopping.wait(self.pause)


class Page:
    """/metrics of one daemon."""

    def __init__(self, name, pid, port):
        self.name, self.pid, self.port = name, pid, port
        self.states, self.seconds, self.bytes = [], [], 0
        self.cpu_begin = None

    def scrape(self):
        self.states.append(state_of(self.pid))
        begin = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "identity"})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        self.seconds.append(time.monotonic() - begin)
        if answer.status != 200 or b"tandem_" not in body:
            sys.exit(f"{self.name}: /metrics answers {answer.status}: {body[:200]}")
        self.bytes = max(self.bytes, len(body))
        if self.cpu_begin is None:  # the first makes what is made once
            self.cpu_begin = page_cpu_seconds(self.pid)

    def report(self):
        scrapes = len(self.seconds) - 1
        cpu_ms = (page_cpu_seconds(self.pid) - self.cpu_begin) / scrapes * 1e3
        warm = self.states[int(len(self.states) * WARM_SHARE):]
        third = len(warm) // 3
        figures = {"scrapes": scrapes, "page_bytes": self.bytes, "cpu_ms_a_scrape": round(cpu_ms, 3),
                   "share_at_one_a_second": round(cpu_ms / 1e3, 6), "median_ms": round(sorted(self.seconds)[scrapes // 2] * 1e3, 2)}
        for what in ("rss_mib", "descriptors", "threads"):
            figures[what] = [round(min(state[what] for state in part), 2) for part in (warm[:third], warm[third:-third], warm[-third:])]
        return figures

    def faults(self, figures):
        faults = []
        if figures["share_at_one_a_second"] >= MOST_SHARE:
            faults.append(f"a scrape takes {figures['cpu_ms_a_scrape']} ms of processor time; at most {MOST_SHARE * 1e3} ms")
        if figures["rss_mib"][2] - figures["rss_mib"][0] > MOST_GROWTH_MIB:
            faults.append(f"own memory grew from {figures['rss_mib'][0]} to {figures['rss_mib'][2]} MiB; at most by {MOST_GROWTH_MIB}")
        faults += [f"{what} grew from {figures[what][0]} to {figures[what][2]}" for what in ("descriptors", "threads")
                   if figures[what][2] > figures[what][0] + MOST_MORE]
        return [f"{self.name}: {fault}" for fault in faults]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", required=True, help="where the daemons, tandem and tandem_tiny_model lie")
    parser.add_argument("--model", help="default: a tiny random one")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--interval", type=float, default=1, help="seconds between scrapes")
    parser.add_argument("--pause", type=float, default=0, help="seconds between jobs")
    parser.add_argument("--steps", type=int, default=40, help="of a job")
    parser.add_argument("flags", nargs="*", help="of both daemons, behind --")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="tandem-scrapes-") as directory:
        model = args.model and os.path.expanduser(args.model)
        if not model:
            model = os.path.join(directory, "model")
            subprocess.run([os.path.join(args.bin, "tandem_tiny_model"), model], check=True, stdout=subprocess.DEVNULL)
        with open(os.path.join(directory, "rows.jsonl"), "w", encoding="utf-8") as rows:
            rows.writelines(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(64))
        job = os.path.join(directory, "job.textproto")
        with open(job, "w", encoding="utf-8") as file:
            file.write(JOB.format(steps=args.steps))
        pair = Pair(args.bin, directory, [])
        ports = dict(zip(DAEMONS, free_ports(2)))
        begins = {}
        jobs = None
        try:
            for name in DAEMONS:
                pair.flags = [f"--model={model}", "--device=cpu", f"--metrics=127.0.0.1:{ports[name]}", *args.flags]
                begins[name] = pair.start(name)
            for name in DAEMONS:
                pair.wait(name, begins[name], 120)
            pages = [Page(name, pair.processes[name].pid, ports[name]) for name in DAEMONS]
            jobs = Jobs(pair, job, args.pause)
            jobs.start()
            begin = next_scrape = time.monotonic()
            while time.monotonic() - begin < args.seconds and jobs.is_alive():
                for page in pages:
                    page.scrape()
                next_scrape = max(next_scrape + args.interval, time.monotonic())
                time.sleep(max(0, next_scrape - time.monotonic()))
            seconds = time.monotonic() - begin
            reports = {page.name: page.report() for page in pages}
            faults = [fault for page in pages for fault in page.faults(reports[page.name])]
        finally:
            if jobs is not None:
                jobs.stopping.set()
                jobs.join()
            pair.end()
    if jobs.fault:
        faults.append(jobs.fault)
    if jobs.steps == 0:
        faults.append("no step ended while the pages were scraped")
    mean_step = jobs.step_seconds / jobs.steps if jobs.steps else None
    print(json.dumps({"seconds": round(seconds), "jobs": jobs.ended, "steps": jobs.steps, "step_seconds": mean_step and round(mean_step, 4), **reports},
                     indent=2))
    sys.exit("\n".join(faults) if faults else 0)


main()
