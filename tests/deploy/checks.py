"""What the checks of this folder have in common."""
import socket
import subprocess
import sys

START_LIMIT, STOP_LIMIT = 120, 30  # seconds, of a daemon


def fail(what):
    sys.exit(f"FAILED: {what}")


def run(words, **more):
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, **more)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
