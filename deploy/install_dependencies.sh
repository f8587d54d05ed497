#!/bin/bash
# Installs what Tandem is built from, on Debian 12:
#   1. Debian packages by name: only those that dpkg does not know as installed, so nothing is asked for when all are there;
#   2. pinned PyPI packages (tools/fetch_deps.py) into a cache folder outside the tree: LibTorch, Jinja sources, the quickstart's model.
# A second run is a no-op that takes seconds. Runs as root, or as a user who may use sudo.
#
#   deploy/install_dependencies.sh [--cuda | --no-cuda] [--checks]
#     --cuda      with the CUDA libraries, and with the toolkit too (2.6 GB of download in all) unless the machine has one that serves: CUDA 13
#                 with cuDNN and NCCL
#     --no-cuda   without them; default: as --cuda where a GPU or such a toolkit is found
#     --checks    also what tests alone use: clang-14, clang-tidy-14 and clang-format-14 (lint, the presets cpu-clang and cpu-fuzz), prometheus (alerts,
#                 dashboards), chromium (the live page), logrotate. Where systemd runs, Debian's prometheus comes as a service at port 9090, the
#                 trainer's /metrics: disable it
#   TANDEM_CACHE=DIR puts the cache elsewhere (default ~/.cache/tandem).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
deps=${TANDEM_CACHE:-$HOME/.cache/tandem}/deps

cuda=auto checks=no
for argument in "$@"; do
  case $argument in
    --cuda) cuda=yes ;;
    --no-cuda) cuda=no ;;
    --checks) checks=yes ;;
    *) echo "install_dependencies.sh: unknown argument '$argument'; known are --cuda, --no-cuda, --checks" >&2; exit 2 ;;
  esac
done

packages=(
  build-essential cmake ninja-build ccache mold pkg-config ca-certificates python3 python3-pip
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev prometheus-cpp-dev
  libgtest-dev libgmock-dev libsqlite3-dev libyaml-cpp-dev libpcre2-dev libicu-dev nlohmann-json3-dev libssl-dev libboost-dev
  gnuplot-nox
  bubblewrap openssl iproute2 python3-grpcio python3-protobuf    # the sandbox of rewards; what the Python package and its tests need
)
if [ $checks = yes ]; then packages+=(clang-14 clang-tidy-14 clang-format-14 libclang-rt-14-dev prometheus chromium fonts-dejavu-core logrotate); fi

installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "${packages[@]}" 2>/dev/null || true)
missing=()
for package in "${packages[@]}"; do
  case $'\n'$installed$'\n' in *$'\n'"installed $package"$'\n'*) ;; *) missing+=("$package") ;; esac
done
if [ ${#missing[@]} -gt 0 ]; then
  as_root=()
  if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "install_dependencies.sh: these Debian packages are missing and this is neither root nor is sudo there: ${missing[*]}" >&2
      exit 1
    fi
    as_root=(sudo)
  fi
  echo "Installing Debian packages: ${missing[*]}"
  "${as_root[@]}" apt-get update -q
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
fi

# Whether the machine's own toolkit serves, without anything from PyPI but what it never has.
has_toolkit() {
  local nvcc library_paths
  library_paths=$(ldconfig -p 2>/dev/null || /sbin/ldconfig -p)
  for nvcc in "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    [ -x "$nvcc" ] && "$nvcc" --version | grep -q 'release 13\.' || continue
    [ -e "$(dirname "$nvcc")/../include/cudnn.h" ] || [ -e /usr/include/cudnn.h ] || [ -e /usr/include/x86_64-linux-gnu/cudnn.h ] || continue
    [[ $library_paths == *libcudnn.so.9* && $library_paths == *libnccl.so.2* ]] && return 0
  done
  return 1
}
sets=(--set cpu)
if has_toolkit; then
  if [ $cuda != no ]; then sets=(--set cuda); fi
elif [ $cuda = yes ] || { [ $cuda = auto ] && { [ -x "$deps/nvidia/cu13/bin/nvcc" ] || "$root/deploy/has_gpu.sh"; }; }; then
  sets=(--set cuda --set toolkit)
fi
/usr/bin/python3 "$root/tools/fetch_deps.py" --dest "$deps" "${sets[@]}"
echo "Dependencies are in $deps"
