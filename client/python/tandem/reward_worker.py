"""A reward worker: runs inside the trainer's sandbox and answers calls on its standard input and output until they close.

A frame is its length, four bytes, the highest first, then JSON of at most MAX_FRAME bytes.
    in   {"file": path, "functions": [names]}                                                     once
    out  {} or {"error": text}
    in   {"function": name, "is_chat": bool, "num_completions": n, "cpu_seconds": s, "state": {..}}
         {"text": piece, "is_last": bool}.. together the JSON text of {"prompt": .., "columns": {..}}
         n times: {"ids": [..], "is_last": bool}.. then {"text": piece, "is_last": bool}..
    out  {"values": [number or null], "faults": {index: text}} or {"error": text}
What functions print goes to standard error.
"""

import json
import os
import resource
import struct
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import reward_function  # noqa: E402: it lies beside this file

MAX_FRAME = 1 << 20


class Channel:
    """Keeps the two streams for itself, so that nothing printed can get between frames."""

    def __init__(self):
        self._input = os.fdopen(os.dup(0), "rb")
        self._output = os.fdopen(os.dup(1), "wb")
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)

    def read(self):
        head = self._input.read(4)
        if len(head) < 4:
            sys.exit(0)  # the trainer closed its end
        (size,) = struct.unpack(">I", head)
        if size > MAX_FRAME:
            sys.exit(f"a frame of {size} bytes; the limit is {MAX_FRAME}")
        return json.loads(self._input.read(size))

    def write(self, message):
        frame = json.dumps(message, allow_nan=False).encode()
        self._output.write(struct.pack(">I", len(frame)) + frame)
        self._output.flush()


def read_pieces(channel, key, empty):
    whole = empty
    while True:
        piece = channel.read()
        whole += piece[key]
        if piece["is_last"]:
            return whole


def answer(channel, functions):
    call = channel.read()
    row = json.loads(read_pieces(channel, "text", ""))
    completions, ids = [], []
    for _ in range(call["num_completions"]):
        ids.append(read_pieces(channel, "ids", []))
        text = read_pieces(channel, "text", "")
        completions.append([{"role": "assistant", "content": text}] if call["is_chat"] else text)
    # The soft limit alone: the hard one, once lowered, would stay.
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime + call["cpu_seconds"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    prompts = [row["prompt"]] * len(completions)
    try:
        rewards = functions[call["function"]](prompts, completions, ids, row["columns"], call["state"])
    except reward_function.RewardError as error:
        return {"error": str(error)}
    return {"values": rewards.values, "faults": {str(index): text for index, text in rewards.faults.items()}}


def main():
    channel = Channel()
    request = channel.read()
    try:
        functions = reward_function.load(request["file"], request["functions"])
    except reward_function.RewardError as error:
        channel.write({"error": str(error)})
        return
    channel.write({})
    while True:
        reply = answer(channel, functions)
        sys.stdout.flush()
        channel.write(reply)


main()
