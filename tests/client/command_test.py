#!/usr/bin/env python3
"""The command line of `tandem` itself: its flags and what it says of them. Nothing is listened to.

  command_test.py TANDEM
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

TANDEM = pathlib.Path(sys.argv[1]).resolve()


class CommandTest(unittest.TestCase):
    # Exit code and both streams.
    def tandem(self, *words):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        done = subprocess.run([TANDEM, "--context=none", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              timeout=30, env=environment)
        return done.returncode, done.stdout

    def test_help_lists_the_flags_and_version_the_version(self):
        for words in (["--help"], ["completions", "--help"]):
            _, said = self.tandem(*words)
            for part in ("tandem submit JOB_FILE", "--min_reward", "--trainer", "--live_sequences"):
                self.assertIn(part, said)
            self.assertNotIn("No flags matched", said)
            self.assertNotIn("--flagfile", said, "only its own")
            for flag in ("timeout", "wait"):
                self.assertRegex(re.sub(r"\s+", " ", said), rf"--{flag} \([^-]*with a unit, as 60s or 10m")
        code, said = self.tandem("--version")
        self.assertEqual(code, 0)
        self.assertRegex(said, r"^tandem \d+\.\d+")

    # Whether a job file is read is told by what fails next: nobody is at the address.
    def plan(self, *flags):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "job.textproto"
            path.write_text('name: "addition"')
            return self.tandem("--trainer=127.0.0.1:1", "plan", str(path), *flags)[1]

    def test_each_set_is_one_text(self):
        for text in ("seed: 0,num_steps: 15", "seed: 0; num_steps: 15", 'name: "a,b"', "rollout { sampling { temperature: 1, max_tokens: 5 } }",
                     "adapter { targets: [LINEAR_KIND_Q_PROJ, LINEAR_KIND_K_PROJ] }"):
            self.assertIn("does not answer", self.plan(f"--set={text}"), text)
        # None is lost of several.
        self.assertIn("--set 'seed: x'", self.plan("--set=seed: x", "--set=num_steps: 3"))
        self.assertIn("--set 'num_steps: x'", self.plan("--set", "seed: 1", "--set", "num_steps: x"))

    def test_addresses_are_named_by_their_flag(self):
        self.assertEqual(self.tandem("--trainer=127.0.0.1", "jobs"),
                         (1, "tandem jobs: --trainer: '127.0.0.1'; must be HOST:PORT with a port of 1 to 65535, or unix:PATH\n"))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
