#!/bin/bash
# Installs what Tandem is built from, on Debian 12:
#   1. Debian packages by name: only those that dpkg does not know as installed, so nothing is asked for when all are there;
#   2. pinned PyPI packages (tools/fetch_deps.py) into a cache folder outside the tree: LibTorch, Jinja sources, the quickstart's model.
# A second run is a no-op that takes seconds. Runs as root, or as a user who may use sudo.
#
#   deploy/install_dependencies.sh [--cuda | --no-cuda] [--checks]
#     --cuda      with the CUDA libraries, and with the CUDA toolkit too if no nvcc is found (2.6 GB of download in all)
#     --no-cuda   without them, even if an nvcc is found; default: with the libraries exactly if an nvcc is found
#     --checks    also clang-14, clang-tidy-14 and clang-format-14, which the lint tests and the preset cpu-clang use
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
  libgtest-dev libgmock-dev libsqlite3-dev libpcre2-dev libicu-dev nlohmann-json3-dev libssl-dev gnuplot-nox
)
if [ $checks = yes ]; then packages+=(clang-14 clang-tidy-14 clang-format-14); fi

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

nvcc=
for candidate in "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
  if [ -x "$candidate" ]; then nvcc=$candidate; break; fi
done
sets=(--set cpu)
if [ $cuda = yes ] || { [ $cuda = auto ] && { [ -n "$nvcc" ] || [ -x "$deps/nvidia/cu13/bin/nvcc" ]; }; }; then
  sets=(--set cuda)
  if [ -z "$nvcc" ]; then sets+=(--set toolkit); fi
fi
/usr/bin/python3 "$root/tools/fetch_deps.py" --dest "$deps" "${sets[@]}"
echo "Dependencies are in $deps"
