"""Jobs from Python: what the command `tandem` does, as functions."""

import hashlib
import inspect
import os
import re
import time

import grpc
from google.protobuf import text_format

from . import connection, contracts
from .connection import TandemError

PIECE_BYTES = 1 << 18  # the server waits 20 s for one
JOBS_PER_PAGE = 100
MAX_JOB_FILE_BYTES = 256 << 10
UPLOAD_PATIENCE_SECONDS = 120  # without a byte more
UPLOAD_RETRY_SECONDS = 1.0
AWAY = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
CHECK_SECONDS = 600  # of submit and plan at least: every row is read, every file of rewards imported
PATIENCE_SECONDS = 600  # of watch, since the connection broke
_ENDED = ("succeeded", "failed", "cancelled")


class Client:
    """A trainer_server at `trainer` ("host:port" or "unix:path"), else that of the configuration file. Thread-safe."""

    def __init__(self, trainer=None, timeout=30.0, **settings):
        """`timeout`: seconds of one call; streams are not bound by it, and submit and plan may take longer.

        `settings`: context, ca, cert, key, token_file as the command's flags of these names, and token, the token itself. What is not
        given comes from the environment, then from the configuration file (connection.resolve). Raises TandemError.
        """
        found = connection.resolve(trainer=trainer, **settings)
        self.trainer = found.trainer
        self.timeout = timeout
        self._channel = found.channel()
        self._metadata = found.metadata()

    def close(self):
        self._channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def submit(self, job, rewards=(), **fields):
        """Checks, uploads what the job names, queues; the job's id.

        `job`: path of a job file, text of one, or a contracts.JobSpec. `rewards`: further reward functions of weight 1, each a function
        that stands in a file, or "file.py:function"; one alone needs no list. `fields`: top-level fields put over the job's, as
        num_steps=5. Warnings go to `warnings` of the returned id. Raises TandemError, FileNotFoundError.
        """
        request = contracts.SubmitRequest(job_text=text_format.MessageToString(self._complete(job, rewards, fields)))
        response = self._call("Submit", request, max(self.timeout, CHECK_SECONDS))
        return JobId(response.job, list(response.warnings))

    def plan(self, job, rewards=(), **fields):
        """The job as it would run: a contracts.PlanResponse, whose `faults` say why this node does not hold it."""
        request = contracts.PlanRequest(job_text=text_format.MessageToString(self._complete(job, rewards, fields)))
        return self._call("Plan", request, max(self.timeout, CHECK_SECONDS))

    def jobs(self, states=(), limit=0):
        """All jobs, newest first: a list of contracts.JobStatus. `states`: only those in any of them, as ["queued", "running"]. `limit`:
        so many at most; 0: all."""
        numbers = [contracts.enum_number("JobState", state, "JOB_STATE_") for state in states]
        jobs, token = [], ""
        while not limit or len(jobs) < limit:
            size = min(limit - len(jobs), JOBS_PER_PAGE) if limit else JOBS_PER_PAGE
            page = self._call("ListJobs", contracts.ListJobsRequest(page_size=size, page_token=token, states=numbers))
            jobs += page.jobs
            token = page.next_page_token
            if not token:
                break
        return jobs

    def job(self, job):
        return self._call("GetJob", contracts.GetJobRequest(job=str(job)))

    def show(self, job):
        """The job with its file as it was stored: a contracts.JobDescription."""
        return self._call("Describe", contracts.GetJobRequest(job=str(job)))

    def pause(self, job):
        return self._call("Pause", contracts.PauseRequest(job=str(job)))

    def resume(self, job):
        return self._call("Resume", contracts.ResumeRequest(job=str(job)))

    def cancel(self, job):
        return self._call("Cancel", contracts.CancelRequest(job=str(job)))

    def set_priority(self, job, priority):
        """Of a job that is queued or paused, -100 to 100: the highest goes first."""
        return self._call("SetPriority", contracts.SetPriorityRequest(job=str(job), priority=priority))

    def watch(self, job, from_step=0):
        """Yields contracts.WatchResponse until the job ends; a trainer that restarts is waited for. Raises TandemError, of code
        ABORTED when the job failed or was cancelled."""
        broken = time.monotonic()
        evaluated_step = -1  # its evaluation is told again where the stream is taken up
        while True:
            ended, is_answered = None, False
            try:
                for event in self._stream("Watch", contracts.WatchRequest(job=str(job), from_step=from_step), timeout=None):
                    is_answered = True
                    if event.HasField("step"):
                        from_step = event.step.step + 1
                    elif event.HasField("evaluation"):
                        if event.evaluation.step <= evaluated_step:
                            continue
                        evaluated_step = event.evaluation.step
                    elif event.HasField("status") and state_of(event.status) in _ENDED:
                        ended = event.status
                    yield event
            except TandemError as error:
                if is_answered:
                    broken = time.monotonic()
                if error.code not in ("UNAVAILABLE", "CANCELLED") or time.monotonic() - broken > PATIENCE_SECONDS:
                    raise
            if ended is not None:
                if state_of(ended) != "succeeded":
                    raise TandemError("ABORTED", f"job {job} {state_of(ended)}{': ' if ended.error else ''}{ended.error}")
                return
            time.sleep(0.5)

    def wait(self, job):
        """Until the job has succeeded: its figures by step, {name: [value or None of each step]}. Raises as watch."""
        steps = [event.step for event in self.watch(job) if event.HasField("step")]
        names = dict.fromkeys(value.name for step in steps for value in step.values)
        rows = [{value.name: value.value for value in step.values} for step in steps]
        return {"step": [step.step for step in steps], **{name: [row.get(name) for row in rows] for name in names}}

    def completions(self, job, **filters):
        """What the model wrote and what it earned: yields contracts.CompletionRecord. `filters`: fields of CompletionsRequest, as
        step=12, limit=8."""
        yield from self._stream("Completions", contracts.CompletionsRequest(job=str(job), **filters))

    def export(self, job, directory, **options):
        """Writes a PEFT adapter directory, which must be empty or absent; its path. `options`: fields of ExportRequest."""
        if os.path.exists(directory) and os.listdir(directory):
            raise TandemError("ALREADY_EXISTS", f"{directory} exists and is not empty")
        os.makedirs(directory, exist_ok=True)
        names = set()
        for piece in self._stream("Export", contracts.ExportRequest(job=str(job), **options), timeout=1800):
            # A bare name only: the server must not choose where on this machine it writes.
            if not piece.file or piece.file.startswith(".") or "/" in piece.file or os.sep in piece.file:
                raise TandemError("INVALID_ARGUMENT", f"the server named a file '{piece.file}', which is not a bare name")
            with open(os.path.join(directory, piece.file), "ab" if piece.file in names else "wb") as file:
                file.write(piece.piece)
            names.add(piece.file)
        return directory

    def status(self):
        """contracts.TrainerStatus: what runs, and memory by owner."""
        return self._call("GetStatus", contracts.TrainerStatusRequest())

    # ---- The job file --------------------------------------------------------------------------------------------------------

    def _complete(self, job, rewards, fields):
        spec, folder = read_job(job)
        for name, value in fields.items():
            if name not in spec.DESCRIPTOR.fields_by_name:
                raise TandemError("INVALID_ARGUMENT", f"JobSpec has no field '{name}'")
            spec.MergeFrom(contracts.JobSpec(**{name: value}))
        for path, function in sources_of(rewards):
            added = spec.rewards.add(weight=1)
            added.python_function.path, added.python_function.function = path, function
        self._replace_files(spec, folder)
        return spec

    def _replace_files(self, spec, folder):
        """Uploads each file that the job names, and puts its content address in place of the path."""
        for part, path in ((spec.data, spec.data.path), (spec.evaluation, spec.evaluation.path)):
            if path:
                part.content = self.upload(os.path.join(folder, path))
                part.path = ""
        if spec.adapter.start_path:
            start = os.path.join(folder, spec.adapter.start_path)
            spec.adapter.start_config_content = self.upload(os.path.join(start, "adapter_config.json"))
            spec.adapter.start_weights_content = self.upload(os.path.join(start, "adapter_model.safetensors"))
            spec.adapter.start_path = ""
        for reward in spec.rewards:
            if reward.python_function.path:
                python = reward.python_function
                python.content = self.upload(os.path.join(folder, python.path))
                python.file_name = python.file_name or os.path.basename(python.path)
                python.path = ""

    def upload(self, path):
        """Sends a file that the store lacks, in pieces, and goes on where it stopped when the connection breaks; its SHA-256."""
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while piece := file.read(PIECE_BYTES):
                digest.update(piece)
        sha256 = digest.hexdigest()
        furthest, error, progress = 0, None, time.monotonic()
        while error is None or time.monotonic() - progress < UPLOAD_PATIENCE_SECONDS:
            if error is not None:
                time.sleep(UPLOAD_RETRY_SECONDS)
            try:
                answer = self._call("HasContent", contracts.HasContentRequest(sha256=sha256), waits=error is not None)
            except TandemError as asked:
                if error is None or asked.code not in AWAY:  # no upload has begun
                    raise
                continue
            if answer.present:
                return sha256
            if answer.partial_bytes > furthest:
                furthest, progress = answer.partial_bytes, time.monotonic()
            try:
                self._send(path, sha256, answer.partial_bytes)
                return sha256
            except TandemError as sent:
                error = sent
                # What was there may have been other bytes: the store has dropped it then.
                if sent.code not in (*AWAY, "ABORTED") and not (sent.code == "INVALID_ARGUMENT" and answer.partial_bytes):
                    break
        raise error

    def _send(self, path, sha256, offset):
        size = os.path.getsize(path)

        def pieces():
            header = contracts.UploadHeader(sha256=sha256, size_bytes=size, name=os.path.basename(path), offset_bytes=offset)
            yield contracts.UploadRequest(header=header)
            with open(path, "rb") as file:
                file.seek(offset)
                while piece := file.read(PIECE_BYTES):
                    yield contracts.UploadRequest(piece=piece)

        where, request, response = contracts.method("JobService", "Upload")
        call = self._channel.stream_unary(where, request.SerializeToString, response.FromString)
        self._guard(lambda: call(pieces(), timeout=60 + size / (1 << 20), metadata=self._metadata), f"uploading {path}: ")

    # ---- Calls ---------------------------------------------------------------------------------------------------------------

    def _call(self, name, request, timeout=None, waits=False):
        path, request_class, response_class = contracts.method("JobService", name)
        call = self._channel.unary_unary(path, request_class.SerializeToString, response_class.FromString)
        return self._guard(
            lambda: call(request, timeout=timeout or self.timeout, metadata=self._metadata, wait_for_ready=waits)
        )

    def _stream(self, name, request, timeout=600):
        path, request_class, response_class = contracts.method("JobService", name)
        call = self._channel.unary_stream(path, request_class.SerializeToString, response_class.FromString)
        stream = call(request, timeout=timeout, metadata=self._metadata)
        try:
            while True:
                try:
                    response = self._guard(lambda: next(stream))
                except StopIteration:
                    return
                yield response
        finally:
            stream.cancel()

    def _guard(self, call, context=""):
        try:
            return call()
        except grpc.RpcError as error:
            told = connection.error_of(error.code().name, error.details() or "", self.trainer)
            raise TandemError(told.code, f"{context}{told}") from None


class JobId(str):
    """The id of a job, with what the trainer warned of when it was submitted."""

    def __new__(cls, job, warnings):
        made = super().__new__(cls, job)
        made.warnings = warnings
        return made


def state_of(status):
    """A JobStatus's state in one word: "running"."""
    return contracts.enum_name("JobState", status.state, "JOB_STATE_")


def read_job(job):
    """A JobSpec from a path, a text or a JobSpec, and the folder that its paths are relative to."""
    if not isinstance(job, (str, os.PathLike)):
        spec = contracts.JobSpec()
        spec.CopyFrom(job)
        return spec, os.getcwd()
    # A job file has fields; a path has none.
    is_text = isinstance(job, str) and ("\n" in job or "{" in job or ":" in job and not os.path.exists(job))
    name, folder, text = ("job", os.getcwd(), job) if is_text else (os.fspath(job), os.path.dirname(os.path.abspath(job)), None)
    if text is None:
        size = os.path.getsize(name)
        if size > MAX_JOB_FILE_BYTES:
            raise TandemError("INVALID_ARGUMENT", f"job file {name} has {size} bytes; the limit is {MAX_JOB_FILE_BYTES}")
        with open(name, encoding="utf-8") as file:
            text = file.read()
    try:
        return text_format.Parse(text, contracts.JobSpec()), folder
    except text_format.ParseError as error:
        raise TandemError("INVALID_ARGUMENT", f"{name}:{_with_allowed_values(str(error))}") from None


def _with_allowed_values(fault):
    """The parser's words, with what the field may hold where they are about an enumeration."""
    enum = re.search(r'Enum type "([\w.]+)" has no value named', fault)
    return f"{fault.rstrip('.')}; must be {', '.join(contracts.enum_values(enum[1]))}" if enum else fault


def sources_of(rewards):
    """Of each of `rewards`, or of the one that it is: source_of."""
    return [source_of(reward) for reward in ([rewards] if isinstance(rewards, str) or callable(rewards) else rewards)]


def source_of(reward):
    """File and name of a reward function, given as "file.py:function" or as the function itself."""
    if isinstance(reward, str):
        path, colon, function = reward.rpartition(":")
        if not colon or not path or not function:
            raise TandemError("INVALID_ARGUMENT", f"rewards: '{reward}'; must be FILE:FUNCTION or a function")
        return os.path.abspath(path), function
    function = getattr(reward, "__name__", None)
    module = inspect.getmodule(reward)
    if function is None or module is None or getattr(module, function, None) is not reward or not getattr(module, "__file__", None):
        raise TandemError("INVALID_ARGUMENT",
                          f"rewards: {reward!r} is no function at the top of a Python file, which alone can travel to the trainer")
    return os.path.abspath(module.__file__), function
