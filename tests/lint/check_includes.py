#!/usr/bin/env python3
"""Includes follow the direction of the house: proto -> common -> kernels -> {rollout_server, trainer_server}; the servers know nothing of each
other; LibTorch and gRPC stay in their rooms; project files are included by their path from the root."""

import os
import re
import sys

import project_files

# Folder -> folders whose files it may include. `tests` may include all.
MAY_INCLUDE = {
    "proto": {"proto"},
    "common": {"common", "proto"},
    "kernels": {"kernels", "common"},
    "rollout_server": {"rollout_server", "kernels", "common", "proto"},
    "trainer_server": {"trainer_server", "kernels", "common", "proto"},
    "client": {"client", "common", "proto"},
    "cmake": set(),
}
LIBTORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
LIBTORCH_ROOMS = ("common/torch/", "rollout_server/model/", "trainer_server/policy/", "trainer_server/loss/", "trainer_server/optim/",
                  "trainer_server/step/", "trainer_server/publish/", "trainer_server/checkpoint/", "tests/")
GRPC = re.compile(r"grpc(pp)?/|.*\.grpc\.pb\.h$")
GRPC_ROOMS = ("common/rpc/", "common/sharing/", "rollout_server/service/", "trainer_server/service/", "trainer_server/http/", "trainer_server/rollout/",
              "trainer_server/publish/", "trainer_server/reward/remote_reward.cc", "rollout_server/main.cc", "trainer_server/main.cc", "client/", "tests/")
INCLUDE = re.compile(r'^\s*#\s*include\s+(["<])([^">]+)[">]', re.MULTILINE)


def faults_of(name, text):
    faults = []
    top = name.split("/")[0]
    for quote, included in INCLUDE.findall(text):
        included_top = included.split("/")[0]
        if LIBTORCH.match(included):
            if not name.startswith(LIBTORCH_ROOMS):
                faults.append(f"{name}: includes LibTorch ({included}) outside of its rooms")
        elif GRPC.match(included):
            if not name.startswith(GRPC_ROOMS):
                faults.append(f"{name}: includes gRPC ({included}) outside of its rooms")
        if included_top == "tests" and top != "tests":
            faults.append(f"{name}: includes {included}: product code knows no tests")
        elif included_top in MAY_INCLUDE and top != "tests" and included_top not in MAY_INCLUDE.get(top, set()):
            faults.append(f"{name}: includes {included}: {top} comes before {included_top}")
        if quote == '"' and not included.endswith(".pb.h"):
            beside = os.path.join(os.path.dirname(name), included)
            if "/" not in included and os.path.exists(os.path.join(project_files.ROOT, beside)) and "/" in name:
                faults.append(f"{name}: includes {included}: write its path from the root, {beside}")
            if included.startswith("../") or "/../" in included:
                faults.append(f"{name}: includes {included}: write its path from the root")
    return faults


def self_check():
    """The rules themselves: a file that breaks each of them is reported, one that keeps them is not."""
    wrong = [("common/base/a.cc", '#include "kernels/rms_norm.h"'), ("kernels/a.cu", '#include "rollout_server/engine/engine.h"'),
             ("rollout_server/a.cc", '#include "trainer_server/loss/loss.h"'), ("trainer_server/a.cc", '#include "rollout_server/engine/engine.h"'),
             ("client/a.cc", '#include "kernels/rms_norm.h"'), ("trainer_server/reward/a.cc", "#include <torch/torch.h>"),
             ("rollout_server/engine/a.h", "#include <ATen/ATen.h>"), ("rollout_server/engine/a.h", '#include "proto/pool.grpc.pb.h"'),
             ("common/memory/a.cc", "#include <grpcpp/grpcpp.h>"), ("common/base/a.cc", '#include "tests/support/x.h"'),
             ("common/base/a.cc", '#include "../base/status.h"'), ("common/base/a.cc", '#include "status.h"')]
    right = [("rollout_server/engine/a.cc", '#include "common/base/status.h"\n#include <vector>\n#include "proto/pool.pb.h"'),
             ("rollout_server/model/a.cc", "#include <ATen/core/Tensor.h>"), ("common/rpc/a.h", "#include <grpcpp/grpcpp.h>"),
             ("common/base/a.cc", '#include "absl/status/status.h"\n#include "common/torch/matrix.h"'),
             ("tests/kernels/a.cc", '#include "rollout_server/engine/engine.h"')]
    for name, text in wrong:
        if len(faults_of(name, text)) != 1:
            sys.exit(f"a file {name} with {text} must be one fault, is {faults_of(name, text)}")
    for name, text in right:
        if faults_of(name, text):
            sys.exit(f"a file {name} with {text} must be no fault, is {faults_of(name, text)}")


self_check()
files = project_files.tracked(".h", ".cc", ".cu", ".inc")
project_files.finish([fault for name in files for fault in faults_of(name, project_files.read(name))], len(files), least=50)
