#!/usr/bin/env python3
"""Runs clang-tidy (.clang-tidy) over the C++ files that include neither LibTorch nor gRPC, which would take half a minute each.

  check_tidy.py CLANG_TIDY BUILD_DIR CACHE_DIR SECONDS

A file that passed is not looked at again until it, something of the project that it includes, or .clang-tidy changes. After SECONDS no new file is
begun: on a slow machine the first run leaves some files to the next one, and says how many.
"""

import concurrent.futures
import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import time

import project_files

tidy, build, cache, seconds = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
deadline = time.monotonic() + seconds
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
SLOW = re.compile(r"(torch|ATen|c10|grpc|grpcpp)/|.*\.grpc\.pb\.h$")


@functools.cache
def includes_of(name):
    return INCLUDE.findall(project_files.read(name))


def closure(name):
    """The project's files that `name` reaches, itself included; None when one of them includes LibTorch or gRPC."""
    reached, queue = {name}, [name]
    while queue:
        for included in includes_of(queue.pop()):
            if SLOW.match(included):
                return None
            proto = included.removesuffix(".pb.h") + ".proto"
            for path in (included, proto):
                if path not in reached and os.path.isfile(os.path.join(project_files.ROOT, path)):
                    reached.add(path)
                    if not path.endswith(".proto"):
                        queue.append(path)
    return reached


def key_of(files):
    digest = hashlib.sha256()
    for name in [".clang-tidy", "tests/lint/check_tidy.py", *sorted(files)]:
        digest.update(name.encode() + b"\0" + project_files.read(name).encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()


def check(name, key):
    """Returns (was it checked, what is wrong)."""
    if time.monotonic() > deadline:
        return False, ""
    result = subprocess.run([tidy, "--quiet", "-p", build, os.path.join(project_files.ROOT, name)], capture_output=True, text=True)
    if result.returncode != 0:
        return True, result.stdout or result.stderr
    open(os.path.join(cache, key), "w").close()
    return True, ""


os.makedirs(cache, exist_ok=True)
with open(os.path.join(build, "compile_commands.json")) as f:
    compiled = {os.path.relpath(os.path.realpath(entry["file"]), project_files.ROOT) for entry in json.load(f)}
reached = {name: closure(name) for name in project_files.tracked(".cc") if name in compiled}
files = sorted((name for name in reached if reached[name]), key=lambda name: len(reached[name]))
keys = {name: key_of(reached[name]) for name in files}
todo = [name for name in files if not os.path.exists(os.path.join(cache, keys[name]))]
with concurrent.futures.ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
    results = list(pool.map(lambda name: check(name, keys[name]), todo))
print(f"{len(files) - len(todo)} files passed before, {sum(done for done, _ in results)} looked at now, "
      f"{sum(not done for done, _ in results)} left for the next run")
project_files.finish([fault for _, fault in results if fault], len(files), least=20)
