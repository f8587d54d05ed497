"""The project's own files, for the lint tests: what git tracks, as paths relative to the root."""

import os
import subprocess
import sys

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))


def tracked(*suffixes):
    # safe.directory: a checkout that belongs to another user is only read.
    command = ["git", "-c", "safe.directory=*", "-C", ROOT, "ls-files", "-z"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    # A file deleted but not committed yet is still listed.
    return [n for n in names if n and n.endswith(suffixes or ("",)) and os.path.isfile(os.path.join(ROOT, n))]


def read(name):
    with open(os.path.join(ROOT, name), encoding="utf-8", errors="surrogateescape") as f:
        return f.read()


def finish(faults, num_checked, least):
    """Ends the test: prints the faults; a check that saw fewer than `least` files has lost its object and fails too."""
    for fault in faults:
        print(fault)
    print(f"{num_checked} files checked, {len(faults)} faults")
    if num_checked < least:
        print(f"expected at least {least} files in {ROOT}")
    sys.exit(1 if faults or num_checked < least else 0)
