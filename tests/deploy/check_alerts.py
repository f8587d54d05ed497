#!/usr/bin/env python3
"""Prometheus' files as promtool sees them: configuration, rules, and each alert's cases. Every alert has a case and a line of
docs/operations.md.

  check_alerts.py SOURCE_DIR
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile

(source,) = sys.argv[1:]
rules = os.path.join(source, "deploy/prometheus")
cases = os.path.join(source, "tests/deploy/alerts_test.yml")


def promtool(*arguments, folder):
    result = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    print("promtool", *arguments, "\n" + result.stdout + result.stderr)
    return result.returncode


def names_in(path, pattern):
    with open(path, encoding="utf-8") as file:
        return re.findall(pattern, file.read(), re.MULTILINE)


faults = []
with tempfile.TemporaryDirectory() as folder:
    for name in os.listdir(rules):
        shutil.copy(os.path.join(rules, name), folder)
    shutil.copy(cases, folder)
    for arguments in (["check", "config", "prometheus.yml"], ["check", "rules", "recording_rules.yml", "alert_rules.yml"],
                      ["test", "rules", "alerts_test.yml"]):
        if promtool(*arguments, folder=folder) != 0:
            faults.append(f"promtool {' '.join(arguments)} failed")

    # An alert whose condition can never hold fails its case: the cases do notice.
    path = os.path.join(folder, "alert_rules.yml")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(text.replace("tandem_train_kl > 0.5", "tandem_train_kl > 5"))
    if promtool("test", "rules", "alerts_test.yml", folder=folder) == 0:
        faults.append("promtool test rules passed with a rule that never fires")

alerts = names_in(os.path.join(rules, "alert_rules.yml"), r"^ *- alert: (\w+)$")
tested = names_in(cases, r"^ *alertname: (\w+)$")
written = names_in(os.path.join(source, "docs/operations.md"), r"^\| `(Tandem\w+)` \|")
if len(alerts) < 10:
    faults.append(f"{len(alerts)} alerts, expected 10 at least")
for alert in alerts:
    if alert not in tested:
        faults.append(f"{alert}: no case of tests/deploy/alerts_test.yml has it firing")
    if alert not in written:
        faults.append(f"{alert}: no line of docs/operations.md")
for alert in written:
    if alert not in alerts:
        faults.append(f"{alert}: docs/operations.md tells of it, and there is no such alert")
sys.exit("\n".join(faults) if faults else 0)
