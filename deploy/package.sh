#!/bin/bash
# Makes build/tandem-VERSION-linux-x86_64.tar.xz: both daemons, the client and the libraries that a host lacks, for any x86-64 Linux with
# glibc 2.36 or later. LibTorch and CUDA's libraries are not in it: bin/tandem-env finds those of the host's torch package. Unpack it
# anywhere; the README in it says how to start.
#
#   deploy/package.sh [--build=DIR] [--output=FILE]
#     --build   a build folder that is there; default: installs dependencies and builds the preset release (GPUs of 80, 90a, 120)
#     --output  default build/tandem-VERSION-linux-x86_64.tar.xz; for a build without device code ...-x86_64-cpu.tar.xz
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

build= output=
for argument in "$@"; do
  case $argument in
    --build=*) build=${argument#*=} ;;
    --output=*) output=${argument#*=} ;;
    *) echo "package.sh: unknown argument '$argument'; known are --build=DIR, --output=FILE" >&2; exit 2 ;;
  esac
done
if [ -z "$build" ]; then
  deploy/install_dependencies.sh --cuda
  export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1
  cmake --preset release -Wno-dev > /dev/null
  cmake --build --preset release
  build=build/release
fi

cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
deps=$(cached TANDEM_DEPS)
version=$(cached CMAKE_PROJECT_VERSION)
torch=$(sed -n "s/^__version__ = '\([0-9.]*\).*/\1/p" "$deps/torch/version.py")
cuda=
if [ "$(cached TANDEM_CUDA)" = ON ]; then cuda=$(sed -n "s/^cuda:.*'\([0-9]*\)\..*/\1/p" "$deps/torch/version.py"); fi
name=tandem-$version-linux-x86_64
if [ -z "$cuda" ]; then name+=-cpu; fi
output=$(realpath -m "${output:-build/$name.tar.xz}")

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
top=$stage/$name
mkdir -p "$top"/{bin,lib,libexec,share/licenses}

# Without the folders of this machine in them: the launcher says where libraries are.
cmake --install "$build" --strip --prefix "$top" > /dev/null

# What a host has by itself or in its torch package.
is_of_host() {
  case $1 in
    linux-vdso.* | ld-linux* | libc.so.* | libm.so.* | libdl.* | librt.* | libpthread.* | libutil.* | libresolv.* | libmvec.* | libanl.*) ;;
    libstdc++.* | libgcc_s.* | libgomp.*) ;;
    libtorch* | libc10* | libshm* | libnv* | libnccl*) ;;
    libcublas* | libcudart* | libcudnn* | libcufft* | libcufile* | libcupti* | libcurand* | libcusolver* | libcusparse*) ;;
    *) return 1 ;;
  esac
}
packages=()
while read -r library path; do
  if is_of_host "$library"; then continue; fi
  if [ "$path" = not ]; then echo "package.sh: ldd does not find $library" >&2; exit 1; fi
  cp -L "$path" "$top/lib/$library"
  packages+=("$(dpkg-query -S "*/x86_64-linux-gnu/$(basename "$(realpath "$path")")" | sed 's/:.*//;q')")
done < <(ldd "$build"/bin/{rollout_server,trainer_server,tandem} | sed -n 's/^\t\([^ ]*\) => \([^ ]*\).*/\1 \2/p' | sort -u)
strip --strip-unneeded "$top"/lib/*
for package in $(printf '%s\n' "${packages[@]}" | sort -u); do cp -L "/usr/share/doc/$package/copyright" "$top/share/licenses/$package"; done

sed -e "s/@torch@/$torch/g; s/@cuda@/$cuda/" deploy/package/tandem-env > "$top/bin/tandem-env"
chmod 755 "$top/bin/tandem-env"
for program in rollout_server trainer_server tandem; do ln -s tandem-env "$top/bin/$program"; done
cp deploy/package/run_quickstart.sh "$top"
sed -e "s/@version@/$version/; s/@torch@/$torch/g" deploy/package/README.md > "$top/README.md"
cp deploy/has_gpu.sh tools/fetch_deps.py "$top/share"
cp -r deploy/quickstart "$top/share/quickstart"
mkdir "$top"/share/{systemd,prometheus,grafana}
cp deploy/systemd/{*.service,*.flags,environment,journald.conf,logrotate} "$top/share/systemd"
cp deploy/prometheus/*.yml "$top/share/prometheus"
cp -r deploy/grafana/{dashboards,provisioning} "$top/share/grafana"
cp -r client/python "$stage/python"
TANDEM_PROTO_ROOT=$root /usr/bin/python3 -m pip wheel --quiet --no-deps --no-index --no-build-isolation --wheel-dir="$top/share" "$stage/python"
cp proto/job.proto "$top/share"
chmod -R u+rwX,go+rX "$top"

mkdir -p "$(dirname "$output")"
tar -C "$stage" --owner=0 --group=0 --sort=name -cJf "$output.new" "$name"
mv "$output.new" "$output"
echo "$output: $(du -h "$output" | cut -f1), unpacked $(du -sh "$top" | cut -f1), LibTorch $torch, CUDA ${cuda:-none}"
