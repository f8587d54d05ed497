#!/usr/bin/env python3
"""The tree names no registry host and no folder of one machine: where packages come from is the machine's configuration."""

import project_files

# In pieces, so that this file passes too.
FORBIDDEN = ["/wo" "rk/", "../sha" "red", "py" "pi.org", "python" "hosted.org", "deb.deb" "ian.org", "/ro" "ot/", "/ho" "me/", "index" "-url",
             "fa" "rm-no", "devpi" "/", "nexus" "/repository", "art" "ifactory"]

files = project_files.tracked()
faults = []
for name in files:
    for number, line in enumerate(project_files.read(name).splitlines(), start=1):
        faults += [f"{name}:{number}: holds '{word}'" for word in FORBIDDEN if word in line.lower()]
project_files.finish(faults, len(files), least=100)
