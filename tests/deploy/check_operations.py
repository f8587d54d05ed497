#!/usr/bin/env python3
"""docs/operations.md, followed: its flags, files and alerts are there; its commands make an authority, certificates and a token, with which
the pair speaks TLS and a laptop's configuration reaches it; the node's own commands and `tandem doctor` go over the sockets; logs that are
appended to a file are rotated without a loss.

  check_operations.py SOURCE_DIR BIN_DIR
"""
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

from checks import START_LIMIT, STOP_LIMIT, fail, free_ports, run

PROGRAMS = ("rollout_server", "trainer_server")


# The indented blocks below a heading, without their indentation.
def blocks_of(document, heading):
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", document, re.M | re.S)
    if found is None:
        fail(f"no heading '{heading}'")
    return [textwrap.dedent(block).strip() + "\n" for block in re.findall(r"(?:^ {4,}.*\n|^\n(?= {4}))+", found[1], re.M) if block.strip()]


# The one block with `words` in it, and each of `changes` made, which must have something to change.
def block_with(blocks, words, changes):
    fitting = [block for block in blocks if words in block]
    if len(fitting) != 1:
        fail(f"{len(fitting)} blocks with '{words}', expected one")
    text = fitting[0]
    for old, new in changes:
        if old not in text:
            fail(f"the block with '{words}' has no '{old}'")
        text = text.replace(old, new)
    return text


def follow(script, home, path):
    done = run(["bash", "-euo", "pipefail", "-c", script], cwd=home, env={"HOME": str(home), "PATH": f"{path}:/usr/bin:/bin:/usr/sbin:/sbin"})
    if done.returncode != 0:
        fail(f"{script}\nended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def check_names(document, source, bin_dir):
    known = set()
    for program in (*PROGRAMS, "tandem"):
        known |= set(re.findall(r"--(\w+)", run([bin_dir / program, "--help"]).stdout))
    # With an underscore a flag is ours; one without is where the document speaks of a daemon's or the client's.
    for flag in set(re.findall(r"--([a-z]+(?:_[a-z0-9]+)+)", document)) - known:
        fail(f"no program has --{flag}")
    for flag in re.findall(r"^\| `--(\w+)`", document, re.M):
        if flag not in known:
            fail(f"no program has --{flag}")
    for unit in set(re.findall(r"\btandem-(?:rollout|trainer)\b", document)):
        if not (source / f"deploy/systemd/{unit}.service").exists():
            fail(f"there is no unit {unit}")
    for pattern in set(re.findall(r"/opt/tandem/share/([^\s`,)]+)", document)):
        room = pattern if pattern.startswith("fetch_deps") else f"deploy/{pattern}"
        if not list(source.glob(room)) and not (source / "tools" / pattern).exists():
            fail(f"there is no {room}, of which /opt/tandem/share/{pattern} would be made")
    anchors = {re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
               for line in document.splitlines() if line.startswith("#")}
    for anchor in re.findall(r"\]\(#([\w-]+)\)", document):
        if anchor not in anchors:
            fail(f"no heading for #{anchor}")


class Pair:
    def __init__(self, source, bin_dir, work):
        self.bin_dir, self.work, self.daemons = bin_dir, work, {}
        self.ports = dict(zip((*PROGRAMS, "rollout_metrics", "trainer_metrics"), free_ports(4)))
        for folder in ("etc", "state", "run", "log", "node", "laptop"):
            (work / folder).mkdir(mode=0o700)
        for program in PROGRAMS:
            flags = (source / f"deploy/systemd/{program}.flags").read_text()
            for system, own in (("/var/lib/tandem", work / "state"), ("/run/tandem", work / "run")):
                flags = flags.replace(f"={system}", f"={own}")
            metrics = self.ports[f"{program.partition('_')[0]}_metrics"]
            more = ["--device=cpu", f"--metrics=127.0.0.1:{metrics}", *(["--http_address=off"] if program == "trainer_server" else [])]
            (work / f"etc/{program}.flags").write_text(flags + "".join(f"{line}\n" for line in more))

    def log_of(self, program):
        return self.work / f"log/{program}.log"

    def start(self):
        for program in PROGRAMS:
            with open(self.log_of(program), "ab") as log:
                self.daemons[program] = subprocess.Popen([self.bin_dir / program, f"--flagfile={self.work}/etc/{program}.flags"], stderr=log,
                                                         env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + START_LIMIT
        while any(" listening " not in self.log_of(program).read_text() for program in PROGRAMS):
            if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self.daemons.values()):
                fail("the pair does not start:\n" + "".join(self.log_of(program).read_text() for program in PROGRAMS))
            time.sleep(0.1)

    def stop(self):
        for daemon in self.daemons.values():
            daemon.send_signal(signal.SIGTERM)
        for program, daemon in self.daemons.items():
            if daemon.wait(STOP_LIMIT) != 0:
                fail(f"{program} ended with {daemon.returncode}:\n{self.log_of(program).read_text()}")

    def kill(self):
        for daemon in self.daemons.values():
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()


def check_tls(document, pair):
    blocks = blocks_of(document, "From your laptop")
    node, laptop, path = pair.work / "node", pair.work / "laptop", pair.bin_dir
    follow(block_with(blocks, "openssl req -x509", [("DNS:node-1", "DNS:localhost")]), node, path)
    follow("cd ~/tandem-ca\n" + block_with(blocks, "-m 600 -o tandem", [
        ("-o tandem -g tandem ", ""), ("/etc/tandem", f"{pair.work}/etc"), ("systemctl restart tandem-rollout tandem-trainer\n", ""),
        ("0.0.0.0:7070", f"127.0.0.1:{pair.ports['trainer_server']}"), ("0.0.0.0:7071", f"127.0.0.1:{pair.ports['rollout_server']}"),
    ]), node, path)
    pair.start()
    # Over the sockets, by the configuration that the document gives the node.
    shown = follow(block_with(blocks, '"context": "local"', [("/run/tandem/", f"{pair.work}/run/")]), node, path)
    if "rollout_server  model" not in shown or "trainer_server  model" not in shown:
        fail(f"tandem status on the node: {shown}")
    shown = follow(block_with(blocks, "scp root@node-1", [
        ("scp root@node-1:", f"cp {node}/"), ("node-1:7070", f"localhost:{pair.ports['trainer_server']}"),
        ("node-1:7071", f"localhost:{pair.ports['rollout_server']}"),
    ]), laptop, path)
    if "rollout_server  model" not in shown or "trainer_server  model" not in shown:
        fail(f"tandem status on the laptop: {shown}")
    audit = "audit: name=ada role=submit certificate='adas-laptop'"
    if audit not in pair.log_of("trainer_server").read_text():
        fail("the trainer's log has no audit line of the laptop's call")
    (laptop / ".config/tandem/token").write_text("0" * 64)
    refused = run([path / "tandem", "status"], env={"HOME": str(laptop), "PATH": "/usr/bin:/bin"})
    if refused.returncode == 0 or "token" not in refused.stdout:
        fail(f"tandem status with another token: {refused.stdout}")
    # Doctor has no token either, and asks over the sockets of --run_dir.
    addresses = [f"--{flag}=127.0.0.1:{pair.ports[name]}" for flag, name in (("rollout", "rollout_server"), ("trainer", "trainer_server"), (
        "rollout_metrics", "rollout_metrics"), ("trainer_metrics", "trainer_metrics"))]
    found = run([path / "tandem", "doctor", "--context=none", *addresses, f"--run_dir={pair.work}/run", f"--data_dir={pair.work}/state"])
    for program in PROGRAMS:
        if not re.search(rf"^ok +{program} +answers at unix:{pair.work}/run/{program}.grpc, version ", found.stdout, re.M):
            fail(f"tandem doctor: {found.stdout}")


def check_rotation(source, pair):
    rules = (source / "deploy/systemd/logrotate").read_text()
    if "/var/log/tandem/*.log" not in rules or "su tandem tandem\n" not in rules:
        fail("deploy/systemd/logrotate: not understood")
    config = pair.work / "logrotate"
    config.write_text(rules.replace("/var/log/tandem/", f"{pair.work}/log/").replace("su tandem tandem\n", ""))
    config.chmod(0o600)
    log = pair.log_of("trainer_server")
    rotated = log.with_name(log.name + ".1")
    before = log.read_bytes()
    done = run(["/usr/sbin/logrotate", f"--state={pair.work}/rotated", "--force", config])
    if done.returncode != 0:
        fail(f"logrotate: {done.stdout}")
    pair.stop()
    after = log.read_bytes()
    if not rotated.read_bytes().startswith(before) or b" listening " not in before:
        fail("logrotate lost lines")
    if not re.match(rb"\d{4}-\d\d-\d\dT", after) or b"stopped" not in after or b" listening " in after:
        fail(f"after logrotate the daemon writes: {after[:200]}")


def main():
    source, bin_dir = (pathlib.Path(word).resolve() for word in sys.argv[1:])
    document = (source / "docs/operations.md").read_text()
    check_names(document, source, bin_dir)
    with tempfile.TemporaryDirectory() as name:
        pair = Pair(source, bin_dir, pathlib.Path(name))
        made = run([bin_dir / "tandem_tiny_model", pair.work / "state/model"])
        if made.returncode != 0:
            fail(made.stdout)
        try:
            check_tls(document, pair)
            check_rotation(source, pair)
        finally:
            pair.kill()
    print("ok")


if __name__ == "__main__":
    main()
