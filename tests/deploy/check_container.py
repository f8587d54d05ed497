#!/usr/bin/env python3
"""deploy/container/Containerfile fits the tree: what it copies is there, with all that CMake wants; stages are named before they are used; it
ends as a user who is not root.

  check_container.py SOURCE_DIR
"""
import pathlib
import re
import sys

FILE = "deploy/container/Containerfile"


def instructions(text):
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(words[0], words[1:]) for words in (line.split() for line in "\n".join(lines).replace("\\\n", " ").splitlines())]


def faults_of(text, source):
    faults, stages, final, copied = [], [], {}, set()
    cmake = (source / "CMakeLists.txt").read_text()
    version = re.search(r"project\(tandem VERSION ([\d.]+)", cmake)[1]
    for name, words in instructions(text):
        if name == "FROM":
            base = words[0]
            for choice in ("source", "made") if "${PACKAGE}" in base else (None,):
                wanted = base.replace("${PACKAGE}", choice or "")
                if not wanted.startswith("debian:12") and wanted not in stages:
                    faults.append(f"FROM {wanted}: no such stage before it")
            stages.append(words[2] if len(words) == 3 else "")
            final = {}
        elif name == "COPY" and words[0].startswith("--from="):
            if words[0].removeprefix("--from=") not in stages:
                faults.append(f"COPY {words[0]}: no such stage before it")
        elif name == "COPY":
            for word in words[:-1]:
                copied.add(word)
                if word.startswith("build/"):  # of deploy/package.sh
                    if word != f"build/tandem-{version}-linux-x86_64.tar.xz":
                        faults.append(f"COPY {word}: the package's version is {version}")
                elif not (source / word).exists():
                    faults.append(f"COPY {word}: no such file")
        elif name not in ("ARG", "CMD", "ENV", "RUN", "STOPSIGNAL", "USER", "WORKDIR"):
            faults.append(f"{name}: not an instruction that is known here")
        final[name] = words
    for folder in re.findall(r"add_subdirectory\((\w+)\)", cmake):
        if folder not in copied:
            faults.append(f"{folder}: CMake's folder is not copied")
    if final.get("USER", ["root"])[0] in ("root", "0"):
        faults.append("USER: the container runs as root")
    if "CMD" not in final:
        faults.append("CMD: absent")
    return faults


def main():
    source = pathlib.Path(sys.argv[1])
    text = (source / FILE).read_text()
    faults = faults_of(text, source)
    # Each kind of fault is found when it is made.
    for old, new, wanted in (("COPY cmake ", "COPY cmakes ", "COPY cmakes: no such file"), ("COPY proto proto/\n", "", "proto: CMake's folder"),
                             ("USER tandem\n", "", "runs as root"), ("--from=unpacked", "--from=packed", "--from=packed: no such stage"),
                             ("-0.1.0-", "-0.0.9-", "the package's version"), ("FROM debian:12 AS package-from-made", "FROM debian:12 AS made",
                                                                               "FROM package-from-made: no such stage")):
        if old not in text or not any(wanted in fault for fault in faults_of(text.replace(old, new), source)):
            faults.append(f"this check does not find '{wanted}'")
    if faults:
        sys.exit("\n".join(f"{FILE}: {fault}" for fault in faults))
    print("ok")


if __name__ == "__main__":
    main()
