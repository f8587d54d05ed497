#!/usr/bin/env python3
"""Runs a job under a real Prometheus with the rules of deploy/prometheus, and executes every query of every panel of deploy/grafana over
Prometheus' HTTP API. An error, no data, or data without a number fails. Both daemons' pages are checked by promtool and against
docs/metrics.md while the job runs; when it has ended, no series of it is left.

  run_dashboards.py --source=DIR --tandem=FILE --trainer=ADDRESS --rollout=ADDRESS --trainer_metrics=ADDRESS --rollout_metrics=ADDRESS
                    --work=DIR --job=FILE [--gpu] [--seconds=N]

--work is emptied; it gets answers.json, from which deploy/grafana/draw_dashboards.py draws. --gpu: panels that need one are executed too.
"""

import argparse
import glob
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

NEEDS_GPU = "Needs a GPU"
RATE_INTERVAL = "5s"
SCRAPE_SECONDS = 1
# Values of labels that are ours to choose. `job`, `function`, `owner` and `k` are a job's.
CLOSED_LABELS = {
    "kind": {"total", "free", "outside_pool", "available", "resident", "shared", "used"},
    "region": {"weights", "model", "rollout_standing", "trainer_standing", "elastic"},
    "process": {"pair", "rollout_server", "trainer_server"},
    "holder": {"rollout_server", "trainer_server", "nobody"},
    "phase": {"rollout", "training", "idle"},
    "lane": {"unit", "shared"},
    "stage": {"schedule", "model", "sample", "finish"},
    "finished_reason": {"stop", "length", "abort", "error"},
}
MOST_SERIES = 600  # of one daemon, histograms' buckets included
MOST_PLAN_USE = 1.25  # of an owner's plan; who asks the model beside the job has KV of their own
MOST_APART_MIB = 32  # what is accounted for and what the driver calls used
EXPOSER = "exposer_"  # what the HTTP server tells of itself

faults = []


def fault(text):
    print("FAULT:", text, flush=True)
    faults.append(text)


def get(url, timeout=10):
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.read().decode()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Prometheus:
    def __init__(self, args):
        self.folder = os.path.join(args.work, "prometheus")
        shutil.copytree(os.path.join(args.source, "deploy/prometheus"), self.folder)
        path = os.path.join(self.folder, "prometheus.yml")
        with open(path, encoding="utf-8") as file:
            text = file.read()
        # Ours but for addresses and pace.
        for old, new in (("127.0.0.1:9091", args.rollout_metrics), ("127.0.0.1:9090", args.trainer_metrics),
                         ("scrape_interval: 5s", f"scrape_interval: {SCRAPE_SECONDS}s"), ("evaluation_interval: 15s", "evaluation_interval: 1s")):
            if text.count(old) != 1:
                sys.exit(f"deploy/prometheus/prometheus.yml does not hold '{old}' once")
            text = text.replace(old, new)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        self.address = f"127.0.0.1:{free_port()}"
        with open(os.path.join(args.work, "prometheus.log"), "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(["prometheus", "--config.file=prometheus.yml", f"--web.listen-address={self.address}",
                                             "--storage.tsdb.path=data", "--log.level=warn"], cwd=self.folder, stdout=log, stderr=log)

    def ask(self, path, **parameters):
        return json.loads(get(f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))

    def wait_until_up(self):
        deadline = time.time() + 30
        while time.time() < deadline:
            try:
                answer = self.ask("query", query='count(up{job="tandem"} == 1)')
                if answer["data"]["result"] and answer["data"]["result"][0]["value"][1] == "2":
                    return
            except (OSError, ValueError):
                pass
            if self.process.poll() is not None:
                sys.exit("prometheus ended: see prometheus.log")
            time.sleep(0.2)
        sys.exit("prometheus did not see both daemons in 30 s")

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def tandem(args, *words):
    result = subprocess.run([args.tandem, "--json", f"--trainer={args.trainer}", f"--rollout={args.rollout}", *words], capture_output=True,
                            text=True, timeout=60)
    if result.returncode != 0:
        sys.exit(f"tandem {' '.join(words)}: {result.stdout}{result.stderr}")
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def declared_metrics(source):
    """{name: (type, labels)} of docs/metrics.md."""
    declared = {}
    with open(os.path.join(source, "docs/metrics.md"), encoding="utf-8") as page:
        for line in page:
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if len(cells) < 3 or not line.startswith("| `"):
                continue
            of_history = not cells[0].startswith("`tandem_")
            signature = re.fullmatch(r"`(tandem_\w+)(?:\{([\w, ]+)\})?`", cells[1 if of_history else 0])
            if signature:
                declared[signature[1]] = ("gauge" if of_history else cells[1], set((signature[2] or "").split(", ")) - {""})
    return declared


def check_page(name, text, declared, jobs):
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30)
    if result.returncode != 0 or result.stdout or result.stderr:
        fault(f"promtool check metrics, {name}: {result.stdout}{result.stderr}")
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    series = [line for line in text.splitlines() if line and not line.startswith("#")]
    if len(series) > MOST_SERIES:
        fault(f"{name}: {len(series)} series, at most {MOST_SERIES}")
    for metric, kind in types.items():
        if metric.startswith(EXPOSER):
            continue
        if metric not in declared:
            fault(f"{name}: {metric} is not in docs/metrics.md")
        elif declared[metric][0] != kind:
            fault(f"{name}: {metric} is a {kind}, docs/metrics.md says {declared[metric][0]}")
    for line in series:
        metric = re.match(r"\w+", line)[0]
        family = metric if metric in types else re.sub(r"_(bucket|count|sum)$", "", metric)
        for label, value in re.findall(r'(\w+)="([^"]*)"', line):
            if label != "le" and family in declared and label not in declared[family][1]:
                fault(f"{name}: {line}: docs/metrics.md has no label {label}")
            if label in CLOSED_LABELS and value not in CLOSED_LABELS[label]:
                fault(f"{name}: {line}: '{value}' is no known {label}")
            if label == "job" and value not in jobs:
                fault(f"{name}: {line}: no such active job")
    print(f"{name}: {len(types)} families, {len(series)} series", flush=True)
    return set(types)


def page_of(address):
    return get(f"http://{address}/metrics")


def watch(args, job, declared):
    """Checks both pages in the middle of the job, and asks the model meanwhile, as people do; the job's last status."""
    pages = {}
    deadline = time.time() + args.seconds
    while time.time() < deadline:
        (status,) = [s for s in tandem(args, "jobs") if s.get("job") == job]
        step = int(status.get("step", 0))
        if not pages and step * 2 >= int(status["num_steps"]):
            pages = {"rollout_server": page_of(args.rollout_metrics), "trainer_server": page_of(args.trainer_metrics)}
        if status["state"] not in ("JOB_STATE_QUEUED", "JOB_STATE_RUNNING"):
            for name, text in pages.items():
                check_page(name, text, declared, {job})
            uses = dict(re.findall(r'^tandem_plan_use_ratio\{[^}]*owner="(\w+)"[^}]*\} (\S+)$', pages.get("trainer_server", ""), re.MULTILINE))
            for owner, ratio in uses.items():
                if float(ratio) > MOST_PLAN_USE:
                    fault(f"{owner} uses {ratio} of what was planned for it")
            if "kv_cache" not in uses:
                fault("no plan against use of the KV cache")
            if not pages:
                fault("the job ended before its pages were looked at")
            return status
        # One prompt again and again, longer than a KV block: the prefix cache has it.
        tandem(args, "--max_tokens=4", "--raw", "generate", 2 * "Say it once more, and then no more of it: thank you very much. ")
        time.sleep(0.3)
    sys.exit(f"job {job} has not ended in {args.seconds} s: {status}")


def points_of(result):
    return [[float(t), float(v)] for t, v in result["values"] if not math.isnan(float(v))]


def legend_of(template, labels):
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda m: labels.get(m[1], ""), template)


def run_query(prometheus, expression, begin, end):
    """(curves, what is wrong with them or None)."""
    for name, value in (("$__rate_interval", RATE_INTERVAL), ("$pair", "local"), ("$job", ".*")):
        expression = expression.replace(name, value)
    answer = prometheus.ask("query_range", query=expression, start=begin, end=end, step=max((end - begin) / 300, SCRAPE_SECONDS))
    if answer["status"] != "success":
        return [], f"{answer.get('errorType')}: {answer.get('error')}"
    results = [(result["metric"], points_of(result)) for result in answer["data"]["result"]]
    results = [(labels, points) for labels, points in results if points]
    return results, None if results else "no data"


def run_panels(args, prometheus, begin, end):
    answers, num_run = [], 0
    for path in sorted(glob.glob(os.path.join(args.source, "deploy/grafana/dashboards/*.json"))):
        with open(path, encoding="utf-8") as file:
            dashboard = json.load(file)
        panels = []
        for panel in dashboard["panels"]:
            if panel["type"] == "row":
                continue
            about = panel.get("description", "")
            answer = {"title": panel["title"], "unit": panel["fieldConfig"]["defaults"].get("unit", ""),
                      "stacked": "stacking" in panel["fieldConfig"]["defaults"]["custom"], "curves": []}
            panels.append(answer)
            if about.startswith(NEEDS_GPU) and not args.gpu:
                print(f"skipped: {dashboard['title']}: {panel['title']}: {about.split('.')[0]}", flush=True)
                answer["skipped"] = about.split(".")[0]
                continue
            for target in panel["targets"]:
                results, wrong = run_query(prometheus, target["expr"], begin, end)
                if wrong and about.startswith(NEEDS_GPU + " whose"):
                    print(f"skipped: {dashboard['title']}: {panel['title']}: {about.split('.')[0]}", flush=True)
                    answer["skipped"] = about.split(".")[0]
                    continue
                num_run += 1
                if wrong:
                    fault(f"{dashboard['title']}: {panel['title']}: {target['expr']}: {wrong}")
                answer["curves"] += [{"legend": legend_of(target["legendFormat"], labels), "points": points} for labels, points in results]
        answers.append({"name": os.path.splitext(os.path.basename(path))[0], "title": dashboard["title"], "panels": panels})
    if len(answers) != 3 or num_run < 60:
        fault(f"{num_run} queries of {len(answers)} dashboards: three dashboards have 60 at least")
    print(f"{num_run} queries of {len(answers)} dashboards", flush=True)
    return answers


def check_ended(args, prometheus, job, declared):
    # The last values are served until they have been scraped, then nothing of the job.
    deadline = time.time() + 30
    while f'job="{job}"' in page_of(args.trainer_metrics) and time.time() < deadline:
        time.sleep(0.5)
    for metric, value in (("tandem_train_step", "tandem_train_num_steps"), ("tandem_train_running", "0")):
        last = prometheus.ask("query", query=f'last_over_time({metric}{{job="{job}"}}[5m])')["data"]["result"]
        wanted = value if value.isdigit() else prometheus.ask("query", query=f'last_over_time({value}{{job="{job}"}}[5m])')["data"]["result"][0]["value"][1]
        if not last or last[0]["value"][1] != wanted:
            fault(f"{metric}: the last that Prometheus saw of it is {last}, not {wanted}")
    # The rollout server still serves the last job's adapter: one version, no more.
    check_page("trainer_server, idle", page_of(args.trainer_metrics), declared, set())
    left = [line for line in page_of(args.rollout_metrics).splitlines() if f'job="{job}"' in line]
    if len(left) != 1 or not left[0].startswith("tandem_rollout_weight_version{"):
        fault(f"rollout_server after the job: {left}")
    deadline = time.time() + 10
    while time.time() < deadline:
        left = prometheus.ask("query", query=f'{{job="{job}", __name__=~"tandem_train_.*"}}')["data"]["result"]
        if not left:
            return
        time.sleep(0.5)
    fault(f"Prometheus still has {len(left)} series of the ended job: {left[:2]}")


def check_rules(prometheus):
    rules = [rule for group in prometheus.ask("rules")["data"]["groups"] for rule in group["rules"]]
    for rule in rules:
        if rule["health"] != "ok":
            fault(f"rule {rule['name']}: {rule['health']} {rule.get('lastError', '')}")
    firing = [rule["name"] for rule in rules if rule.get("state") == "firing"]
    # What a machine of any size may have.
    for name in set(firing) - {"TandemDiskLow"}:
        fault(f"{name} fires under a sound job")
    print(f"{len(rules)} rules", flush=True)


def check_vram(prometheus, begin, end):
    """Pool, captured decode steps and what else lay outside of the pool after the first step, against the driver's figure from then on."""
    steps, wrong = run_query(prometheus, 'min(tandem_train_step{pair="$pair"})', begin, end)
    if wrong:
        return fault(f"tandem_train_step: {wrong}")
    first = next((t for t, step in steps[0][1] if step >= 1), end)
    outside, wrong = run_query(prometheus, 'max(tandem_device_memory_bytes{pair="$pair", kind="outside_pool"})'
                               ' - max(tandem_rollout_captured_steps_bytes{pair="$pair"})', first, end)
    if wrong:
        return fault(f"memory outside the pool: {wrong}")
    values = [value for _, value in outside[0][1]]
    apart_mib = max(abs(value - values[0]) for value in values) / 2**20
    print(f"VRAM: pool, captured steps and the first figure of what else is outside follow the driver's within {apart_mib:.1f} MiB over {len(values)} looks", flush=True)
    if apart_mib > MOST_APART_MIB:
        fault(f"at most {MOST_APART_MIB} MiB")


def check_judge(prometheus, begin, end):
    """The judge of panels itself: no such metric, and what cannot be parsed."""
    for expression in ("tandem_no_such_metric", "tandem_train_reward{"):
        if run_query(prometheus, expression, begin, end)[1] is None:
            fault(f"the query {expression} passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("source", "tandem", "trainer", "rollout", "trainer_metrics", "rollout_metrics", "work", "job"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--seconds", type=int, default=120, help="how long the job may take")
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    os.makedirs(args.work)

    declared = declared_metrics(args.source)
    prometheus = Prometheus(args)
    try:
        prometheus.wait_until_up()
        begin = time.time()
        job = tandem(args, "submit", args.job)[0]["job"]
        status = watch(args, job, declared)
        print(f"job {job}: {status['state']} in {time.time() - begin:.1f} s", flush=True)
        if status["state"] != "JOB_STATE_SUCCEEDED":
            fault(f"job {job}: {status}")
        check_ended(args, prometheus, job, declared)
        end = time.time()
        answers = run_panels(args, prometheus, begin, end)
        if args.gpu:
            check_vram(prometheus, begin, end)
        check_rules(prometheus)
        check_judge(prometheus, begin, end)
        with open(os.path.join(args.work, "answers.json"), "w", encoding="utf-8") as file:
            json.dump({"job": job, "begin": begin, "end": end, "dashboards": answers}, file)
    finally:
        prometheus.stop()
    sys.exit(f"{len(faults)} faults" if faults else 0)


main()
