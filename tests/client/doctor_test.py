#!/usr/bin/env python3
"""`tandem doctor` names what is wrong with a node, by conditions that are made here for real.

  doctor_test.py TANDEM FAKE_NVML
"""
import json
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

TANDEM, FAKE_NVML = (pathlib.Path(word).resolve() for word in sys.argv[1:3])


class DoctorTest(unittest.TestCase):
    def setUp(self):
        self.work = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.work)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(5)]
        self.ports = dict(zip(("rollout", "trainer", "rollout_metrics", "trainer_metrics", "http_address"),
                              (each.getsockname()[1] for each in sockets)))
        for each in sockets:
            each.close()

    # Exit code, and the findings by check.
    def doctor(self, *flags, before=(), environment=None, limits=None):
        words = [*before, str(TANDEM), "doctor", "--json", "--context=none", f"--run_dir={self.work / 'run'}",
                 f"--data_dir={self.work / 'data'}", *(f"--{name}=127.0.0.1:{port}" for name, port in self.ports.items()), *flags]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60,
                              env={**os.environ, **(environment or {})}, preexec_fn=limits)
        findings = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertTrue(findings, done.stderr)
        for finding in findings:
            self.assertEqual(finding["advice"] == "", finding["grade"] == "ok", finding)
        faults = sum(finding["grade"] == "fault" for finding in findings)
        self.assertEqual(done.returncode, 1 if faults else 0, done.stderr)
        if faults:
            self.assertIn(f"{faults} fault", done.stderr)
        return {finding["check"]: finding for finding in findings}

    def expect(self, findings, check, grade, *parts):
        self.assertEqual(findings[check]["grade"], grade, findings[check])
        for part in parts:
            self.assertIn(part, findings[check]["found"] + findings[check]["advice"])

    def in_namespace(self, script):
        before = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", f'{script}; exec "$@"', "sh"]
        tried = subprocess.run([*before, "true"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        if tried.returncode != 0:
            self.skipTest(f"no mount namespace here: {tried.stdout.strip()}")
        return before

    def test_stopped_pair(self):
        findings = self.doctor()
        for check in ("rollout_server", "trainer_server", "rollout_metrics", "trainer_metrics", "live_page"):
            self.expect(findings, check, "ok", "is free")
        self.expect(findings, "run_dir", "ok", "is made at the first start")
        self.expect(findings, "data_dir", "ok", "is made at the first start")
        self.expect(findings, "libtorch", "ok", "rollout_server ")
        self.assertFalse((self.work / "run").exists(), "doctor changes nothing")

    def test_used_port_is_named_with_its_owner(self):
        with socket.create_server(("127.0.0.1", self.ports["trainer"])), \
                socket.create_server(("127.0.0.1", self.ports["rollout_metrics"])), \
                socket.create_server(("127.0.0.1", self.ports["http_address"])):
            findings = self.doctor("--timeout=1s")
        self.expect(findings, "trainer_server", "fault", f"(pid {os.getpid()})", "--listen")
        self.expect(findings, "rollout_metrics", "fault", f"(pid {os.getpid()})", "--metrics")
        self.expect(findings, "live_page", "fault", f"(pid {os.getpid()})", "--http_address")
        self.expect(findings, "rollout_server", "ok")

    def test_folders(self):
        (self.work / "run").mkdir()
        (self.work / "run").chmod(0o777)
        (self.work / "data").write_text("a file")
        findings = self.doctor()
        self.expect(findings, "run_dir", "fault", "mode 777", "chmod 700")
        self.expect(findings, "data_dir", "fault", "is no folder")
        (self.work / "run").chmod(0o700)
        self.expect(self.doctor(), "run_dir", "ok", "is writable")

    def test_full_disk(self):
        (self.work / "data").mkdir()
        findings = self.doctor(before=self.in_namespace(f"mount -t tmpfs -o size=1m tmpfs {self.work / 'data'}"))
        self.expect(findings, "disk", "fault", "1.0 MiB available", str(self.work / "data"))

    def test_no_bubblewrap(self):
        places = [f"/{folder}/bwrap" for folder in ("usr/bin", "usr/local/bin", "usr/sbin") if os.path.exists(f"/{folder}/bwrap")]
        self.assertTrue(places, "bubblewrap is not installed")
        findings = self.doctor(before=self.in_namespace("; ".join(f"mount --bind /dev/null {place}" for place in places)))
        self.expect(findings, "bubblewrap", "warning", "no bwrap", "apt-get install bubblewrap")

    def test_bubblewrap_without_namespaces(self):
        with open("/proc/sys/user/max_user_namespaces") as file:
            self.assertGreater(int(file.read()), 0)
        before = self.in_namespace("echo 0 > /proc/sys/user/max_user_namespaces")
        self.expect(self.doctor(before=before), "bubblewrap", "warning", "Allow user namespaces")

    def test_python(self):
        self.expect(self.doctor(), "reward_python", "ok", "/usr/bin/python3, 3.")
        self.expect(self.doctor("--reward_python=/nowhere/python3"), "reward_python", "warning", "'/nowhere/python3'")
        old = self.work / "python3"
        old.write_text("#!/bin/sh\necho 3.6.9\nexit 1\n")
        old.chmod(0o755)
        self.expect(self.doctor(f"--reward_python={old}"), "reward_python", "warning", "3.6.9", "3.9 or later")

    def test_driver_and_page_lock(self):
        (self.work / "libnvidia-ml.so.1").symlink_to(FAKE_NVML)
        fake = {"LD_LIBRARY_PATH": str(self.work)}
        limits = lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
        findings = self.doctor(environment=fake, limits=limits)
        self.expect(findings, "driver", "ok", "580.95.05, CUDA 13.0, GPUs: 1")
        self.expect(findings, "gpu_memory", "warning", "60.0 GiB of 80.0 GiB free", "nvidia-smi")
        self.expect(findings, "page_lock", "warning", "RLIMIT_MEMLOCK 1.0 MiB", "LimitMEMLOCK=infinity")
        old = self.doctor(environment={**fake, "TANDEM_FAKE_NVML_CUDA": "12080"})
        self.expect(old, "driver", "fault", "CUDA 12.8", "driver 580")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
