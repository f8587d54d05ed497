"""A RewardService: reward functions that a trainer calls over gRPC, on any machine, with whatever Python and packages they need."""

import concurrent.futures
import json
import threading

import grpc

from . import contracts
from .reward_function import RewardError, RewardFunction

MAX_COMPLETIONS = 1024
MAX_CALL_CHARACTERS = 256 << 20  # of the row and all completions


class _Call:
    """One group, as it arrives."""

    def __init__(self):
        self.header = None
        self.row = ""
        self.texts = []
        self.size = 0

    def take(self, request, context):
        self.size += len(request.header.row_json) + len(request.row_piece) + len(request.completion.text)
        if self.size > MAX_CALL_CHARACTERS:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"more than {MAX_CALL_CHARACTERS} characters in one call")
        if request.HasField("header"):
            if self.header is not None or request.header.num_completions > MAX_COMPLETIONS:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT,
                              f"one header a call, of at most {MAX_COMPLETIONS} completions; got {request.header.num_completions}")
            self.header = request.header
            self.row = request.header.row_json
            self.texts = [""] * request.header.num_completions
            return
        if request.HasField("row_piece"):
            self.row += request.row_piece
            return
        piece = request.completion
        if piece.index >= len(self.texts):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"completion {piece.index} of {len(self.texts)}")
        self.texts[piece.index] += piece.text


class RewardServer:
    """Serves functions of TRL's calling convention. A function is called for one group at a time; several groups run in threads."""

    def __init__(self, functions, address="127.0.0.1:0", prompt_field="prompt", max_workers=8):
        """`functions`: a list, called by their __name__, or {name: function}. `address`: "host:port", port 0 picks one. `prompt_field`: of
        the data set's rows, as in the job. Raises OSError when the address cannot be had."""
        self._functions = functions if isinstance(functions, dict) else {function.__name__: function for function in functions}
        self._prompt_field = prompt_field
        self._threads = threading.local()
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=max_workers), maximum_concurrent_rpcs=4 * max_workers)
        path, request, response = contracts.method("RewardService", "Score")
        handler = grpc.stream_stream_rpc_method_handler(self._score, request.FromString, response.SerializeToString)
        service, name = path.strip("/").split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from None
        if port == 0:
            raise OSError(f"cannot listen on {address}")
        self.address = f"{address.rpartition(':')[0]}:{port}"
        self._server.start()

    def wait(self):
        self._server.wait_for_termination()

    def stop(self, grace=1.0):
        self._server.stop(grace).wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def _of_this_thread(self, name):
        """A RewardFunction has an event loop, which belongs to one thread."""
        made = self._threads.__dict__.setdefault("functions", {})
        if name not in made:
            made[name] = RewardFunction(self._functions[name])
        return made[name]

    def _score(self, requests, context):
        call = _Call()
        for request in requests:
            call.take(request, context)
        if call.header is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call begins with a header")
        if call.header.function not in self._functions:
            known = ", ".join(sorted(self._functions))
            context.abort(grpc.StatusCode.NOT_FOUND, f"no function '{call.header.function}' here; there are {known}")
        try:
            row = json.loads(call.row)
        except (ValueError, RecursionError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the row is no JSON: {error}")
        if not isinstance(row, dict):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the row is a {type(row).__name__}, must be an object")
        prompt = row.get(self._prompt_field)
        completions = call.texts
        if isinstance(prompt, list):
            completions = [[{"role": "assistant", "content": text}] for text in call.texts]
        try:
            rewards = self._of_this_thread(call.header.function)([prompt] * len(completions), completions, [None] * len(completions), row)
        except RewardError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if rewards.faults:
            index = min(rewards.faults)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"completion {index}: {rewards.faults[index]}")
        for index, value in enumerate(rewards.values):
            if value is None:
                yield contracts.ScoreResponse(index=index, not_applicable=True)
            else:
                yield contracts.ScoreResponse(index=index, reward=value)


def serve_rewards(functions, address="127.0.0.1:7080", **options):
    """Serves until the process ends."""
    with RewardServer(functions, address, **options) as server:
        print(f"reward functions at {server.address}", flush=True)
        server.wait()
