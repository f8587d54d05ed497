#!/usr/bin/env python3
"""How long a daemon needs from exec to serving when it attaches to weights that its peer keeps.

Starts both daemons, then for each of them, `--rounds` times: kill -9, start again, and time from exec until GetStatus answers.
GetStatus is asked over plain HTTP/2 (h2c): nothing but the standard library is needed.

    tools/measure_restart.py --bin build/bin -- --random_weights=llama-3.1-8b --device=cuda --pool_bytes=100GiB

What follows `--` goes to both daemons.
"""
import argparse
import json
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time

DAEMONS = {
    "rollout_server": "/tandem.v1.RolloutService/GetStatus",
    "trainer_server": "/tandem.v1.JobService/GetStatus",
}


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name, value):
    """HPACK: a literal that is not indexed, without Huffman coding. Names and values here are shorter than 127 bytes."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def is_serving(port, method, timeout):
    """Whether GetStatus answers with a message. An error has none: its status comes in trailers alone."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
            headers = b"".join(header(*pair) for pair in (
                (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", f"127.0.0.1:{port}"),
                ("content-type", "application/grpc"), ("te", "trailers")))
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, headers) +
                               frame(0, 1, 1, b"\x00\x00\x00\x00\x00"))
            stream = connection.makefile("rb")
            while True:
                head = stream.read(9)
                if len(head) < 9:
                    return False
                length, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
                payload = stream.read(length)
                if kind == 4 and not flags & 1:
                    connection.sendall(frame(4, 1, 0, b""))
                elif kind == 0 and length >= 5:
                    return payload[0] == 0
                elif kind == 3 or kind == 7 or (kind == 1 and flags & 1):
                    return False
    except OSError:
        return False


class Pair:
    def __init__(self, bin_directory, directory, flags):
        rollout, trainer = free_ports(2)
        self.bin, self.directory, self.flags = bin_directory, directory, flags
        self.ports = {"rollout_server": rollout, "trainer_server": trainer}
        self.processes = {}

    def start(self, name):
        """The moment of its exec."""
        (peer,) = (port for other, port in self.ports.items() if other != name)
        log = open(os.path.join(self.directory, name + ".log"), "ab")
        begin = time.monotonic()
        process = subprocess.Popen(
            [os.path.join(self.bin, name), f"--listen=127.0.0.1:{self.ports[name]}", f"--peer=127.0.0.1:{peer}",
             "--metrics=off", *(["--http_address=off"] if name == "trainer_server" else []), f"--run_dir={self.directory}/run",
             f"--data_dir={self.directory}/{name}", *self.flags],
            stdout=log, stderr=log)
        log.close()
        self.processes[name] = process
        return begin

    def wait(self, name, begin, limit):
        """Seconds from `begin` until it serves."""
        while time.monotonic() - begin < limit:
            if self.processes[name].poll() is not None:
                break
            if is_serving(self.ports[name], DAEMONS[name], 1):
                return time.monotonic() - begin
            time.sleep(0.005)
        sys.exit(f"{name} does not serve after {time.monotonic() - begin:.1f} s (exit code "
                 f"{self.processes[name].poll()}):\n{self.log(name)[-4000:]}")

    def client(self, *words):
        """The command line of `tandem` with these words, for these daemons."""
        return [os.path.join(self.bin, "tandem"), *words, f"--trainer=127.0.0.1:{self.ports['trainer_server']}",
                f"--rollout=127.0.0.1:{self.ports['rollout_server']}"]

    def ask(self, *words):
        """What `tandem` prints; ends the program where it fails."""
        answer = subprocess.run(self.client(*words), capture_output=True, text=True)
        if answer.returncode != 0:
            sys.exit(f"{' '.join(words)}: {answer.stderr or answer.stdout}")
        return answer.stdout

    def log(self, name):
        with open(os.path.join(self.directory, name + ".log"), encoding="utf-8", errors="replace") as log:
            return log.read()

    def kill(self, name):
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/bin", help="where rollout_server and trainer_server lie")
    parser.add_argument("--rounds", type=int, default=5, help="kills of each daemon")
    parser.add_argument("--start_limit", type=float, default=300, help="seconds for the first start, which loads the weights")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("flags", nargs="*", help="of both daemons")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="tandem-restart-") as directory:
        pair = Pair(arguments.bin, directory, arguments.flags)
        try:
            begins = {name: pair.start(name) for name in DAEMONS}
            first = max(pair.wait(name, begin, arguments.start_limit) for name, begin in begins.items())
            seconds = {name: [] for name in DAEMONS}
            for _ in range(arguments.rounds):
                for name in DAEMONS:
                    pair.kill(name)
                    seconds[name].append(pair.wait(name, pair.start(name), 60))
                    if "joined pool" not in pair.log(name).rsplit("sharing: made pool", 1)[-1]:
                        sys.exit(f"{name} did not attach to its peer's pool:\n{pair.log(name)[-4000:]}")
        finally:
            pair.end()

    result = {"first_start_seconds": round(first, 3), "flags": arguments.flags,
              "restart_seconds": {name: {"median": round(statistics.median(values), 3), "max": round(max(values), 3),
                                         "all": [round(value, 3) for value in values]}
                                  for name, values in seconds.items()}}
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"first start, both daemons, weights loaded: {first:.2f} s")
    for name, figures in result["restart_seconds"].items():
        print(f"{name}: from exec to serving after kill -9: median {figures['median']:.3f} s, slowest {figures['max']:.3f} s "
              f"({arguments.rounds} times)")


if __name__ == "__main__":
    main()
