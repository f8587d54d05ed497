#!/usr/bin/env python3
"""The units of deploy/systemd are what they claim: flags files say what --help says, systemd finds no fault in the units, and what they
start by hand, over a tiny model, becomes a pair that `tandem doctor` approves and SIGTERM ends.

  check_systemd.py SOURCE_DIR BIN_DIR
"""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from checks import START_LIMIT, STOP_LIMIT, fail, free_ports, run

UNITS = {"tandem-rollout.service": "rollout_server", "tandem-trainer.service": "trainer_server"}
MOST_EXPOSURE = {"tandem-rollout.service": 30, "tandem-trainer.service": 55}  # tenths of what systemd-analyze security says


def setting(unit, name):
    values = [line.partition("=")[2] for line in unit.splitlines() if line.startswith(name + "=")]
    return values[-1] if values else fail(f"no {name}= in the unit")


def check_flags(source, bin_dir):
    for program in UNITS.values():
        checked = run([sys.executable, source / "deploy/systemd/make_flags.py", "--check", bin_dir / program])
        if checked.returncode != 0:
            fail(checked.stdout)


def check_units(source, bin_dir, work):
    if shutil.which("systemd-analyze") is None:
        print("skipped: units by systemd-analyze: systemd is not installed")
        return
    for name, program in UNITS.items():
        unit = (source / "deploy/systemd" / name).read_text()
        copy = work / name
        copy.write_text(unit.replace(f"/opt/tandem/bin/{program}", str(bin_dir / program)))
        verified = run(["systemd-analyze", "verify", "--man=no", copy])
        faults = [line for line in verified.stdout.splitlines() if name in line]
        if faults:
            fail("systemd-analyze verify: " + "\n".join(faults))
        rated = run(["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSURE[name]}", copy])
        print(f"{name}: {rated.stdout.strip().splitlines()[-1]}")
        if rated.returncode != 0:
            fail(f"{name} is more exposed than {MOST_EXPOSURE[name] / 10}")


# The unit's command with its flags file, both taken from the system's folders into `work`.
def command_of(source, bin_dir, work, name, more):
    words = setting((source / "deploy/systemd" / name).read_text(), "ExecStart").split()
    program = UNITS[name]
    installed = f"/etc/tandem/{program}.flags"
    if words != [f"/opt/tandem/bin/{program}", f"--flagfile={installed}"]:
        fail(f"{name}: ExecStart is {words}")
    flags = (source / f"deploy/systemd/{program}.flags").read_text()
    for system, own in (("/var/lib/tandem", work / "state"), ("/run/tandem", work / "run")):
        flags = flags.replace(f"={system}", f"={own}")
    copy = work / f"{program}.flags"
    copy.write_text(flags + "".join(f"--{flag}\n" for flag in more))
    return [bin_dir / program, f"--flagfile={copy}"]


def doctor(bin_dir, work, ports):
    rollout, trainer, rollout_metrics, trainer_metrics, page = (f"127.0.0.1:{port}" for port in ports)
    done = run([bin_dir / "tandem", "doctor", "--json", "--context=none", f"--rollout={rollout}", f"--trainer={trainer}",
                f"--rollout_metrics={rollout_metrics}", f"--trainer_metrics={trainer_metrics}", f"--http_address={page}",
                f"--run_dir={work / 'run'}", f"--data_dir={work / 'state'}"])
    return {line["check"]: line for line in map(json.loads, (t for t in done.stdout.splitlines() if t.startswith("{")))}


def check_commands(source, bin_dir, work):
    ports = free_ports(5)
    made = run([bin_dir / "tandem_tiny_model", work / "state/model"])
    if made.returncode != 0:
        fail(made.stdout)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    daemons, logs = {}, {}
    try:
        for i, (name, program) in enumerate(UNITS.items()):
            more = ["device=cpu", f"listen=127.0.0.1:{ports[i]}", f"metrics=127.0.0.1:{ports[i + 2]}",
                    *([f"http_address=127.0.0.1:{ports[4]}"] if program == "trainer_server" else [])]
            logs[program] = work / f"{program}.log"
            with open(logs[program], "wb") as log:
                daemons[program] = subprocess.Popen(command_of(source, bin_dir, work, name, more), stderr=log, env=environment)
        deadline = time.monotonic() + START_LIMIT
        while True:
            found = doctor(bin_dir, work, ports)
            if all("answers at" in found.get(program, {}).get("found", "") for program in daemons):
                break
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in daemons.values()):
                fail(f"{found}\n" + "".join(log.read_text() for log in logs.values()))
            time.sleep(0.2)
        version = run([bin_dir / "rollout_server", "--version"]).stdout.split()[-1]
        for program in daemons:
            if found[program]["grade"] != "ok" or f"version {version}, " not in found[program]["found"]:
                fail(found[program])
        for check in ("run_dir", "data_dir", "rollout_metrics", "trainer_metrics", "live_page", "libtorch"):
            if found[check]["grade"] != "ok":
                fail(found[check])
        for program, daemon in daemons.items():
            daemon.send_signal(signal.SIGTERM)
            if daemon.wait(STOP_LIMIT) != 0:
                fail(f"{program} ended with {daemon.returncode} on SIGTERM:\n{logs[program].read_text()}")
        stopped = doctor(bin_dir, work, ports)
        for program in daemons:
            if "is free" not in stopped[program]["found"]:
                fail(stopped[program])
    finally:
        for daemon in daemons.values():
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()


def main():
    source, bin_dir = (pathlib.Path(word).resolve() for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        work = pathlib.Path(name)
        (work / "state").mkdir()
        check_flags(source, bin_dir)
        check_units(source, bin_dir, work)
        check_commands(source, bin_dir, work)
    print("ok")


if __name__ == "__main__":
    main()
