#!/usr/bin/env python3
"""Every C++ and CUDA file is as clang-format writes it.  check_format.py CLANG_FORMAT"""

import subprocess
import sys

import project_files

files = project_files.tracked(".h", ".cc", ".cu", ".inc")
result = subprocess.run([sys.argv[1], "--dry-run", *files], cwd=project_files.ROOT, capture_output=True, text=True)
if result.returncode != 0:
    sys.exit(f"{sys.argv[1]} failed: {result.stderr}")
faults = sorted({line.split(":")[0] for line in result.stderr.splitlines() if "[-Wclang-format-violations]" in line})
project_files.finish([f"{name}: run {sys.argv[1]} -i on it" for name in faults], len(files), least=50)
