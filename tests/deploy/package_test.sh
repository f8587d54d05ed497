#!/bin/bash
# The package of a build runs from a folder that is not its own, takes nothing but the host's own libraries and LibTorch from outside, and says
# what is wrong with a LibTorch that does not fit.
#
#   package_test.sh SOURCE_DIR BUILD_DIR DEPS_DIR
set -euo pipefail
source_dir=$1 build=$2 deps=$3
fail() { echo "FAILED: $*" >&2; exit 1; }

work=$(mktemp -d)
pids=()
finish() {
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2> /dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2> /dev/null || true; done
  rm -rf "$work"
}
trap finish EXIT

XZ_OPT=-0 "$source_dir/deploy/package.sh" --build="$build" --output="$work/package.tar.xz"
mkdir "$work/some where" "$work/elsewhere"
tar -C "$work/some where" -xJf "$work/package.tar.xz"
cd "$work/elsewhere"
package=("$work/some where"/tandem-*)
package=${package[0]}
clean=(env -i PATH=/usr/bin:/bin HOME="$work/elsewhere" TANDEM_TORCH="$deps/torch")

for file in "$package"/libexec/*; do
  if readelf -d "$file" | grep -E 'RPATH|RUNPATH'; then fail "$file names folders of the machine that built it"; fi
done
if grep -rlF "$source_dir/" "$package"/{bin,share,lib} "$package"/*.*; then fail "these files name the source folder"; fi

# Where each library comes from: the package, LibTorch and what it brings, CUDA's toolkit, or a library that every host has. The client has
# neither LibTorch nor CUDA.
for program in rollout_server trainer_server tandem; do
  outside=$("${clean[@]}" "$package/bin/tandem-env" ldd "$package/libexec/$program" | sed -n 's/^\t\([^ ]*\) => \(.*\) (0x.*/\1 \2/p; /not found/p' |
    grep -vF " $package/lib/" | { if [ $program = tandem ]; then cat; else
      grep -vF "$(realpath "$deps")/" | grep -vE '^lib(cu|nv|nccl)[^ ]* /usr/local/cuda'; fi } |
    grep -vE '^lib(c|m|dl|rt|pthread|util|resolv|stdc\+\+|gcc_s)\.so' || true)
  [ -z "$outside" ] || fail "$program takes from outside: $outside"
done

# The files of deploy that a node takes from the package, and all that docs/operations.md names of it.
for room in systemd prometheus grafana/dashboards grafana/provisioning; do
  diff -r -x make_flags.py -x __pycache__ "$source_dir/deploy/$room" "$package/share/$room" || fail "share/$room is not deploy/$room"
done
mapfile -t named < <(grep -oE '/opt/tandem/(bin|share)/[^ `,)]+' "$source_dir/docs/operations.md" | sed 's:^/opt/tandem/::' | sort -u)
[ ${#named[@]} -ge 10 ] || fail "docs/operations.md names ${#named[@]} files of the package"
for pattern in "${named[@]}"; do
  compgen -G "$package/$pattern" > /dev/null || fail "docs/operations.md names /opt/tandem/$pattern, which is not in the package"
done
/usr/bin/python3 -m pip install --quiet --root-user-action=ignore --no-deps --no-index --target=python "$package"/share/tandem-*.whl

expect_refusal() {
  local words=$1 output code=0
  shift
  output=$("$@" 2>&1) || code=$?
  [ $code = 2 ] && [[ $output == *$words* ]] || fail "'$*' ended with $code and said: $output"
}
mkdir -p old/lib
touch old/lib/libtorch_cpu.so old/lib/libtorch_cuda.so
printf "__version__ = '1.2.3+cu118'\ncuda: Optional[str] = '11.8'\n" > old/version.py
expect_refusal "old (TANDEM_TORCH): version 1.2.3+cu118" "${clean[@]}" TANDEM_TORCH="$PWD/old" "$package/bin/rollout_server"
expect_refusal "nothing (TANDEM_TORCH): no lib/libtorch_cpu.so" "${clean[@]}" TANDEM_TORCH="$PWD/nothing" "$package/bin/trainer_server"

# Abseil ends --help with code 1.
[[ $("${clean[@]}" "$package/bin/tandem" --help || true) == *"tandem submit"* ]] || fail "tandem --help"
for program in rollout_server trainer_server; do
  [[ $("${clean[@]}" "$package/bin/$program" --help || true) == *"--pool_bytes"* ]] || fail "$program --help"
done

mapfile -t ports < <(python3 -c '
import socket
sockets = [socket.socket() for _ in range(2)]
for s in sockets: s.bind(("127.0.0.1", 0))
for s in sockets: print(s.getsockname()[1])')
rollout=127.0.0.1:${ports[0]} trainer=127.0.0.1:${ports[1]}
common=(--device=cpu --metrics=off --run_dir="$work/pool" --model="$source_dir/tests/golden/families/llama3" --trainer_standing_bytes=64MiB)
mkdir -m 700 "$work/pool"
"${clean[@]}" "$package/bin/rollout_server" --listen=$rollout --peer=$trainer --data_dir="$work/rollout" "${common[@]}" 2> rollout.log &
pids+=($!)
"${clean[@]}" "$package/bin/trainer_server" --listen=$trainer --http_address=off --peer=$rollout --data_dir="$work/trainer" "${common[@]}" 2> trainer.log &
pids+=($!)
client() { "${clean[@]}" "$package/bin/tandem" --trainer=$trainer --rollout=$rollout "$@"; }
for _ in $(seq 300); do
  if client --timeout=2s status > status.txt 2>&1; then break; fi
  for pid in "${pids[@]}"; do kill -0 "$pid" 2> /dev/null || { cat ./*.log >&2; fail "a daemon stopped"; }; done
  sleep 0.1
done
grep -q weights status.txt || { cat status.txt ./*.log >&2; fail "tandem status"; }
[ "$("${clean[@]}" PYTHONPATH=python /usr/bin/python3 -c "import tandem; print(tandem.Client('$trainer').status().device)")" = cpu ] ||
  fail "the wheel's client"
client --raw --n=2 --max_tokens=4 generate "ab" > generated.txt || { cat ./*.log >&2; fail "tandem generate"; }
[ -s generated.txt ] || fail "tandem generate printed nothing"
for pid in "${pids[@]}"; do
  kill -TERM "$pid"
  wait "$pid" || fail "a daemon ended with $?"
done
pids=()
echo "OK"
