"""Compiles the contracts in proto/ into tandem/contracts.binpb, which the package reads at run time: no generated Python, so that any
protobuf from 3.20 on serves."""

import os
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.environ.get("TANDEM_PROTO_ROOT", os.path.join(HERE, "..", ".."))
CONTRACTS = ["proto/job.proto", "proto/reward.proto", "proto/rollout.proto"]


def compiler():
    """The machine's protoc, or that of grpcio-tools, which pip brings where it builds in isolation."""
    found = shutil.which("protoc")
    if found:
        return [found]
    try:
        import grpc_tools  # noqa: F401
    except ImportError:
        sys.exit("tandem: no protoc on PATH and no grpcio-tools: install protobuf-compiler, or let pip build in isolation")
    return [sys.executable, "-m", "grpc_tools.protoc"]


class BuildWithContracts(build_py):
    def run(self):
        super().run()
        if not os.path.exists(os.path.join(ROOT, CONTRACTS[0])):
            sys.exit(f"tandem: no {CONTRACTS[0]} in {ROOT}: install from the source tree, pip install ./client/python")
        output = os.path.join(self.build_lib, "tandem", "contracts.binpb")
        subprocess.run(compiler() + [f"--proto_path={ROOT}", "--include_imports", f"--descriptor_set_out={output}"] + CONTRACTS,
                       check=True)


setup(cmdclass={"build_py": BuildWithContracts})
