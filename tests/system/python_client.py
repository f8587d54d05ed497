"""The Python package against a real pair: python_client.py TRAINER FOLDER. `tandem` must be importable. Prints ok, or fails."""

import concurrent.futures
import os
import subprocess
import sys

import grpc

import tandem
from tandem import contracts
from tandem.client import read_job, state_of
from tandem.connection import user_name_of

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
trainer, folder = sys.argv[1:3]
client = tandem.Client(trainer, timeout=60)


def raises(code, words, call):
    try:
        call()
    except tandem.TandemError as error:
        assert error.code == code and words in str(error), (error.code, str(error))
    else:
        raise AssertionError(f"no {code}")


with open(os.path.join(folder, "mine.py"), "w") as file:
    file.write("def ended(completions, **kwargs):\n    return [float(len(text) < 8) for text in completions]\n"
               "def broken(completions, **kwargs):\n    return [0.0] * (len(completions) - 1)\n")
sys.path.insert(0, folder)
import mine  # noqa: E402

job = os.path.join(folder, "job.textproto")
submitted = client.submit(job, rewards=[mine.ended], num_steps=3)
assert submitted.startswith("tiny-"), submitted
events = list(client.watch(submitted))
assert [event.step.step for event in events if event.HasField("step")] == [1, 2, 3]
assert "rewards/ended/mean" in {value.name for event in events for value in event.step.values}
figures = client.wait(submitted)
assert figures["step"] == [1, 2, 3] and len(figures["reward"]) == 3
assert state_of(client.job(submitted)) == "succeeded"
assert submitted in [status.job for status in client.jobs()]
records = list(client.completions(submitted, step=2))
assert len(records) == 32 and all(record.step == 2 for record in records)
for record in records:
    assert {reward.name: reward.value for reward in record.rewards} == {"ended": float(len(record.completion) < 8)}, record
directory = client.export(submitted, os.path.join(folder, "adapter"))
assert sorted(os.listdir(directory)) == ["adapter_config.json", "adapter_model.safetensors"], os.listdir(directory)
raises("ALREADY_EXISTS", "is not empty", lambda: client.export(submitted, directory))
assert client.status().model
plan = client.plan(job, rewards=[f"{mine.__file__}:ended"])
assert 'function: "ended"' in plan.job_text and not plan.faults

# The queue.
assert [user_name_of(login, 1000) for login in ("ada", "a.b-c_9@x", "j\u00f6rg", "DOM\\joe", "svc$", "a\n", "", "x" * 65)] == ["ada", "a.b-c_9@x"] + ["uid-1000"] * 6
running = client.submit(job, rewards=[mine.ended], num_steps=100000)
first = client.submit(job, rewards=[mine.ended], num_steps=1, name="first", priority=3)
second = client.submit(job, rewards=[mine.ended], num_steps=1, name="second", after=["first"], adapter=contracts.AdapterConfig(start_job=first))
assert client.job(second).waiting_for == f"job {first} (queued)" and list(client.job(second).after) == [first]
assert client.job(first).queue_position == 1 and client.job(first).submitter == client.job(running).submitter != ""
client.set_priority(first, 7)
shown = client.show(first)
assert shown.status.priority == 7 and "priority: 3" in shown.job_text
assert [status.job for status in client.jobs(states=["queued"])] == [second, first]
assert [status.job for status in client.jobs(states=["queued", "running"], limit=1)] == [second]
assert len(client.jobs(limit=0)) == len(client.jobs()) == 4
for state in ("unspecified", "waiting", "JOB_STATE_QUEUED"):
    try:
        client.jobs(states=[state])
    except ValueError as error:
        assert str(error) == f"'{state}' is none of queued, running, paused, succeeded, failed, cancelled", error
    else:
        raise AssertionError(f"no ValueError for {state}")
raises("INVALID_ARGUMENT", "priority: 101; must be -100 to 100", lambda: client.set_priority(first, 101))
raises("INVALID_ARGUMENT", "after: 'third' is the name of the job itself", lambda: client.submit(job, rewards=[mine.ended], name="third", after=["third"]))
client.cancel(running)
assert client.wait(second)["step"] == [1]
assert state_of(client.job(running)) == "cancelled"

# The same errors as the command's.
raises("INVALID_ARGUMENT", "mine.py has no 'absent'; its functions are ended, broken", lambda: client.submit(job, rewards=[f"{mine.__file__}:absent"]))
raises("INVALID_ARGUMENT", "rewards: 'absent'; must be FILE:FUNCTION", lambda: client.submit(job, rewards=["absent"]))
raises("INVALID_ARGUMENT", "no function at the top of a Python file", lambda: client.submit(job, rewards=[lambda completions: []]))
raises("INVALID_ARGUMENT", "has no field 'steps'", lambda: client.submit(job, steps=3))
raises("INVALID_ARGUMENT", "num_stepz", lambda: client.submit("num_stepz: 3"))
raises("INVALID_ARGUMENT", "optimizer.learning_rate", lambda: client.submit(job, rewards=[mine.ended], optimizer=contracts.OptimizerConfig(learning_rate=-1)))
raises("NOT_FOUND", "absent-1", lambda: client.job("absent-1"))
raises("UNAVAILABLE", "trainer_server at 127.0.0.1:1 does not answer", lambda: tandem.Client("127.0.0.1:1", timeout=5).jobs())
failed = client.submit(job, rewards=[mine.broken], num_steps=2)
raises("ABORTED", "reward function 'broken': mine.py:broken: returned 7 values for 8 completions", lambda: client.wait(failed))
assert "data set row" in client.job(failed).error, client.job(failed).error


# Reward functions served from here.
async def judged(prompts, completions, answer, **kwargs):
    return [None if text == "skip" else float(number) for text, number in zip(completions, answer)]


def wrong(completions, **kwargs):
    return [float("nan")] * len(completions)


def score(server, function, texts, row='{"prompt": "say", "answer": 4}'):
    path, request, response = contracts.method("RewardService", "Score")
    requests = [contracts.ScoreRequest(header=contracts.ScoreHeader(function=function, num_completions=len(texts), row_json=row))]
    requests += [contracts.ScoreRequest(completion=contracts.CompletionPiece(index=i, text=text, is_last=True)) for i, text in enumerate(texts)]
    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_stream(path, request.SerializeToString, response.FromString)
        return [None if score.not_applicable else score.reward for score in call(iter(requests), timeout=10)]


def raises_rpc(code, words, call):
    try:
        call()
    except grpc.RpcError as error:
        assert error.code().name == code and words in error.details(), (error.code(), error.details())
    else:
        raise AssertionError(words)


with tandem.RewardServer([judged, wrong], "127.0.0.1:0") as server:
    assert score(server, "judged", ["a", "skip"]) == [4.0, None]
    raises_rpc("NOT_FOUND", "no function 'absent' here; there are judged, wrong", lambda: score(server, "absent", ["a"]))
    raises_rpc("INVALID_ARGUMENT", "completion 0: returned nan", lambda: score(server, "wrong", ["a"]))
    for row, words in (("{", "the row is no JSON"), ("[1]", "the row is a list, must be an object"), ("[" * 100000, "the row is no JSON")):
        raises_rpc("INVALID_ARGUMENT", words, lambda row=row: score(server, "judged", ["a"], row))
    tandem.reward_server.MAX_CALL_CHARACTERS = 1000
    raises_rpc("INVALID_ARGUMENT", "more than 1000 characters in one call", lambda: score(server, "judged", ["a" * 600, "b" * 600]))

# Over TLS, with a token.
subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext",
                "subjectAltName=IP:127.0.0.1", "-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem"], check=True, capture_output=True)


def list_jobs(request, context):
    if dict(context.invocation_metadata()).get("authorization") != "Bearer secret":
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such token")
    return contracts.ListJobsResponse(jobs=[contracts.JobStatus(job="tls-1")])


path, request_class, response_class = contracts.method("JobService", "ListJobs")
secure = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=1))
secure.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tandem.v1.JobService", {"ListJobs": grpc.unary_unary_rpc_method_handler(
    list_jobs, request_class.FromString, response_class.SerializeToString)}),))
with open(f"{folder}/key.pem", "rb") as key, open(f"{folder}/cert.pem", "rb") as cert:
    port = secure.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key.read(), cert.read())]))
secure.start()
with tandem.Client(f"127.0.0.1:{port}", timeout=10, ca=f"{folder}/cert.pem", token="secret") as trusted:
    assert [status.job for status in trusted.jobs()] == ["tls-1"]
raises("UNAUTHENTICATED", "no such token", lambda: tandem.Client(f"127.0.0.1:{port}", timeout=10, ca=f"{folder}/cert.pem", token="other").jobs())
raises("UNAVAILABLE", f"trainer_server at 127.0.0.1:{port}", lambda: tandem.Client(f"127.0.0.1:{port}", timeout=5).jobs())
secure.stop(0).wait()

# A job as text and as a message.
spec, _ = read_job(job)
assert spec.name == "tiny" and read_job("name: 'x' seed: 3")[0].seed == 3
print("ok")
