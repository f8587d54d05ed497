#!/usr/bin/env python3
"""The package's command-line tools, with stand-ins in place of the libraries that are optional."""
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import sys
import tempfile
import types
import unittest

TOOLS = sys.argv.pop(1)


def load(name):
    spec = importlib.util.spec_from_file_location(name, os.path.join(TOOLS, name + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def library(**modules):
    """Modules that `import` finds (None: that it does not)."""
    saved = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in saved.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def run(main, arguments):
    """What it printed, or what it said when it gave up."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            main(arguments)
        except SystemExit as ended:
            return str(ended.code)
    return out.getvalue()


def fake_pyarrow(rows):
    class Batch:
        def __init__(self, part):
            self.part = part

        def to_pylist(self):
            return self.part

    class ParquetFile:
        def __init__(self, path):
            if not os.path.exists(path):
                raise OSError("no such file")
            self.schema_arrow = types.SimpleNamespace(names=list(rows[0]))

        def iter_batches(self, batch_size, columns):
            for row in rows:
                yield Batch([{name: row[name] for name in columns or row}])

    parquet = types.ModuleType("pyarrow.parquet")
    parquet.ParquetFile = ParquetFile
    pyarrow = types.ModuleType("pyarrow")
    pyarrow.parquet, pyarrow.ArrowInvalid = parquet, ValueError
    return {"pyarrow": pyarrow, "pyarrow.parquet": parquet}


class ConvertTest(unittest.TestCase):
    def test_rows_become_json_lines_of_the_split(self):
        convert = load("convert")
        rows = [{"q": "ä", "n": float("nan"), "b": b"x", "l": [1, {"k": None}]}]
        with tempfile.TemporaryDirectory() as folder, library(**fake_pyarrow(rows)):
            for path in ("data/train-00001-of-00002.parquet", "data/train-00000-of-00002.parquet", "test/0.parquet", "data/notes.txt"):
                os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
                open(os.path.join(folder, path), "w").close()
            lines = run(convert.main, [folder]).splitlines()
            self.assertEqual(len(lines), 2)
            self.assertEqual(json.loads(lines[0]), {"q": "ä", "n": None, "b": "eA==", "l": [1, {"k": None}]})
            self.assertEqual(len(run(convert.main, [folder, "--split=test"]).splitlines()), 1)
            self.assertEqual(json.loads(run(convert.main, [folder, "--split=test", "--columns=q"])), {"q": "ä"})
            self.assertIn("no Parquet file of the split 'dev'", run(convert.main, [folder, "--split=dev"]))
            self.assertIn("no column 'z'; it has: q, n, b, l", run(convert.main, [folder, "--columns=q,z"]))
            self.assertIn("cannot read /nowhere.parquet", run(convert.main, ["/nowhere.parquet"]))

    def test_missing_library_is_named(self):
        with library(pyarrow=None):
            self.assertIn("pip install pyarrow", run(load("convert").main, ["x.parquet"]))


class ReasoningGymTest(unittest.TestCase):
    def fake(self):
        gym = types.ModuleType("reasoning_gym")
        factory = types.ModuleType("reasoning_gym.factory")
        factory.DATASETS = {"legs": None, "chains": None}

        def create_dataset(name, size, seed, **options):
            if options:
                raise TypeError("no such option")
            return [{"question": f"{name} {seed} {i}?", "answer": str(i), "metadata": {"i": i}} for i in range(size)]

        def get_score_answer_fn(name):
            return lambda answer, entry: 1.0 if answer == entry["answer"] and isinstance(entry["metadata"]["i"], int) else 0.01

        gym.create_dataset, gym.get_score_answer_fn = create_dataset, get_score_answer_fn
        return {"reasoning_gym": gym, "reasoning_gym.factory": factory}

    def test_rows_and_reward_of_a_task(self):
        tool = load("reasoning_gym")
        with tempfile.TemporaryDirectory() as folder, library(**self.fake()):
            reward_file = os.path.join(folder, "reward.py")
            rows = [json.loads(line) for line in run(tool.main, ["legs", "--rows=3", "--seed=5", "--reward=" + reward_file]).splitlines()]
            self.assertEqual([row["prompt"] for row in rows], ["legs 5 0?", "legs 5 1?", "legs 5 2?"])
            scope = {}
            with open(reward_file) as file:
                exec(file.read(), scope)  # noqa: S102
            entries = [row["entry"] for row in rows]
            completions = ["<answer>7</answer> no: <answer> 0\n</answer>", "thus\n1\n\n", [{"role": "assistant", "content": ""}]]
            self.assertEqual(scope["score"](prompts=None, completions=completions, entry=entries), [1.0, 1.0, 0.01])
            self.assertEqual(run(tool.main, ["list"]), "chains\nlegs\n")

    def test_faults_are_named(self):
        tool = load("reasoning_gym")
        with library(**self.fake()):
            self.assertIn("no task 'leg'; there are: chains, legs", run(tool.main, ["leg"]))
            self.assertIn("--rows: 0; must be at least 1", run(tool.main, ["legs", "--rows=0"]))
            self.assertIn("no such option", run(tool.main, ["legs", '--options={"a": 1}']))
            gym = sys.modules["reasoning_gym"]
            gym.create_dataset = lambda name, size, seed: [{"question": "", "answer": "", "metadata": {"i": object()}}]
            self.assertIn("a row cannot be written as JSON: a object", run(tool.main, ["legs"]))

            class Array:
                def tolist(self):
                    return "1"

            gym.create_dataset = lambda name, size, seed: [
                {"question": "", "answer": "", "metadata": {"i": Array()}}]
            self.assertEqual(json.loads(run(tool.main, ["legs"]))["entry"]["metadata"]["i"], "1")
            self.assertIn("must be a JSON object", run(tool.main, ["legs", "--options=[]"]))
        with library(reasoning_gym=None):
            self.assertIn("pip install reasoning-gym", run(tool.main, ["legs"]))


class WandbTest(unittest.TestCase):
    def test_history_is_logged_by_step(self):
        logged, config = [], {}
        run_of = types.SimpleNamespace(
            log=lambda values, step: logged.append((step, values)), config=config, finish=lambda: logged.append("finished"))
        wandb = types.ModuleType("wandb")
        wandb.init = lambda project, name: run_of
        tool = load("log_to_wandb")
        lines = ['{"kind":"data","step":0,"rows":4}', '{"kind":"evaluation","step":0,"reward":0.5}', '{"kind":"step","step":1,"kl":0.1}']
        with library(wandb=wandb):
            tool.main(["--project=p"], lines)
            with self.assertRaisesRegex(SystemExit, "line 1 is no line of `tandem history`"):
                tool.main(["--project=p"], ["[]"])
        self.assertEqual(config, {"data/rows": 4})
        self.assertEqual(logged[:3], [(0, {"evaluation/reward": 0.5}), (1, {"kl": 0.1}), "finished"])
        with library(wandb=None), self.assertRaisesRegex(SystemExit, "pip install wandb"):
            tool.main(["--project=p"], [])


class ConnectionTest(unittest.TestCase):
    """As the command's: tests/client/connection_test.cc."""

    def setUp(self):
        with library(grpc=types.ModuleType("grpc")):
            self.connection = load("connection")
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        self.write("ca.pem", "-----BEGIN CERTIFICATE-----\n")
        self.write("cert.pem", "c")
        self.write("key.pem", "k")
        self.write("token", " secret\n")
        self.config = self.write("config.json", json.dumps({"context": "one", "contexts": {
            "one": {"trainer": "one:7070", "ca": "ca.pem", "cert": "cert.pem", "key": "key.pem", "token_file": "token"},
            "two": {"trainer": "two:7070"}}}))

    def write(self, name, text, mode=0o600):
        path = os.path.join(self.folder, name)
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, mode)
        return path

    def resolve(self, environment=None, **given):
        return self.connection.resolve(environment={"TANDEM_CONFIG": self.config, **(environment or {})}, **given)

    def fails(self, code, words, environment=None, **given):
        with self.assertRaisesRegex(self.connection.TandemError, words) as caught:
            self.resolve(environment, **given)
        self.assertEqual(caught.exception.code, code)

    def test_arguments_go_before_environment_before_file_before_defaults(self):
        found = self.resolve()
        self.assertEqual((found.trainer, found.ca, found.cert, found.key, found.token),
                         ("one:7070", b"-----BEGIN CERTIFICATE-----\n", b"c", b"k", "secret"))
        self.assertNotIn("secret", repr(found))
        found = self.resolve({"TANDEM_TRAINER": "three:7070", "TANDEM_TOKEN": "other"})
        self.assertEqual((found.trainer, found.token), ("three:7070", "other"))
        found = self.resolve({"TANDEM_TRAINER": "three:7070", "TANDEM_TOKEN": "other"}, trainer="four:7070",
                             token_file=os.path.join(self.folder, "token"))
        self.assertEqual((found.trainer, found.token), ("four:7070", "secret"))
        self.assertEqual(self.resolve(token="given").token, "given")
        self.assertEqual(self.resolve({"TANDEM_CONTEXT": "two"}).trainer, "two:7070")
        self.assertEqual(self.resolve({"TANDEM_CONTEXT": "two"}, context="one").trainer, "one:7070")
        self.assertEqual(self.resolve(context="none").trainer, "127.0.0.1:7070")
        self.assertEqual(self.connection.resolve(environment={"HOME": self.folder}).trainer, "127.0.0.1:7070")

    def test_faults_name_file_key_and_what_to_do(self):
        self.fails("NOT_FOUND", "no context 'three'; there are: one, two", context="three")
        for text, words in (("[1]", "not a JSON object"), ("{", "not a JSON object"), ('{"contextz": {}}', "'contextz' is not"),
                            ('{"context": "a", "contexts": {"a": {"tokenfile": "x"}}}', "'tokenfile' is none of trainer")):
            self.write("config.json", text)
            self.fails("INVALID_ARGUMENT", words)
        self.fails("NOT_FOUND", "cannot read /absent.json", {"TANDEM_CONFIG": "/absent.json"})
        self.fails("INVALID_ARGUMENT", "over TLS only: give ca", context="none", token="x")
        ca = os.path.join(self.folder, "ca.pem")
        self.fails("INVALID_ARGUMENT", "cert and key are given together", context="none", ca=ca, cert=ca)
        self.fails("INVALID_ARGUMENT", "more than one word", context="none", ca=ca, token="a b")
        shown = self.write("shown", "x", 0o640)
        self.fails("PERMISSION_DENIED", "others may read .*/shown: chmod 600", context="none", ca=ca, token_file=shown)
        with self.assertRaisesRegex(TypeError, "no setting 'tls'"):
            self.resolve(tls=True)

    def test_addresses_are_host_and_port_or_a_socket(self):
        for address in ("127.0.0.1:7070", "node-1:1", "node-1.example.org:65535", "[::1]:7070", "[fe80::1%eth0]:7070",
                        "unix:/run/trainer.grpc", "unix:trainer.grpc"):
            self.assertEqual(self.resolve(context="none", trainer=address).trainer, address)
        for address in ("127.0.0.1", "node-1", ":7070", ":99999", "node-1:0", "node-1:65536", "node-1:99999999999", "node-1:", "node-1:x",
                        "node-1:-1", "node-1:+1", "node-1: 1", "::1:7070", "[::1]", "[]:7070", "[node-1]:7070",
                        "http://127.0.0.1:27070", "http://node-1", "two words:7070", "unix:", "node-1:7070\n"):
            words = re.escape(f": '{address}'; must be HOST:PORT with a port of 1 to 65535, or unix:PATH")
            self.fails("INVALID_ARGUMENT", "^trainer" + words, context="none", trainer=address)
            self.fails("INVALID_ARGUMENT", "^TANDEM_TRAINER" + words, {"TANDEM_TRAINER": address}, context="none")
        self.write("config.json", '{"context": "x", "contexts": {"x": {"trainer": "node-1"}}}')
        self.fails("INVALID_ARGUMENT", "config.json: context 'x': trainer: 'node-1'; must be HOST:PORT")

    def told(self, code, words):
        error = self.connection.error_of(code, words, "node-1:7070")
        self.assertEqual(error.code, code)
        return str(error)

    def test_grpcs_words_are_told_as_a_person_would(self):
        for words in ("", "Method not found!", "Received http2 header with status: 404"):
            self.assertEqual(self.told("UNIMPLEMENTED", words),
                             "trainer_server at node-1:7070: what answers there is none (is it the rollout_server, or another version?)")
        self.assertEqual(self.told("UNIMPLEMENTED", "target_modules is not a list"), "target_modules is not a list")
        failed = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:7070: "
        self.assertEqual(self.told("UNAVAILABLE", failed + "Failed to connect to remote host: Connection refused"),
                         "trainer_server at node-1:7070 does not answer: it is not running there, or still starting; "
                         "tandem status --wait=60s waits for it")
        self.assertEqual(self.told("UNAVAILABLE", failed + "Peer name node-1 is not in peer certificate"),
                         "trainer_server at node-1:7070: the server's certificate does not name node-1: reach it at an address that it "
                         "names, or give it one of this name")
        self.assertIn("no agreement on TLS", self.told("UNAVAILABLE", failed + "Ssl handshake failed: SSL_ERROR_SSL"))
        self.assertIn("no agreement on TLS", self.told("UNAVAILABLE", failed + "Socket closed"))
        self.assertIn("what answers there does not speak gRPC", self.told("UNAVAILABLE", failed + "Failed parsing HTTP/2"))
        self.assertEqual(self.told("UNAVAILABLE", "DNS resolution failed for node-1:7070: C-ares status"),
                         "trainer_server at node-1:7070: no address is known for its host")
        self.assertEqual(self.told("UNAVAILABLE", "stopping"), "trainer_server at node-1:7070: stopping")
        self.assertEqual(self.told("NOT_FOUND", "no job 'x'"), "no job 'x'")


class ClientTest(unittest.TestCase):
    """Without a server; tests/system/python_client.py has one."""

    def setUp(self):
        class RpcError(Exception):
            code = staticmethod(lambda: types.SimpleNamespace(name="UNAVAILABLE"))
            details = staticmethod(lambda: "failed to connect to all addresses; last error: UNKNOWN: refused")

        class ParseError(Exception):
            pass

        def parse(text, spec):
            raise ParseError(text)

        grpc, package, contracts = (types.ModuleType(name) for name in ("grpc", "tandem", "tandem.contracts"))
        google, protobuf = types.ModuleType("google"), types.ModuleType("google.protobuf")
        grpc.RpcError, package.__path__, package.contracts = RpcError, [TOOLS], contracts
        contracts.JobSpec, contracts.enum_values = lambda: None, lambda name: [f"{name}_A", f"{name}_B"]
        protobuf.text_format = types.SimpleNamespace(Parse=parse, ParseError=ParseError)
        stand_ins = library(**{"grpc": grpc, "tandem": package, "tandem.contracts": contracts, "google": google, "google.protobuf": protobuf,
                               "tandem.connection": None, "tandem.client": None})
        stand_ins.__enter__()
        self.addCleanup(stand_ins.__exit__, None, None, None)
        del sys.modules["tandem.connection"], sys.modules["tandem.client"]
        self.rpc_error = RpcError
        self.client = importlib.import_module("tandem.client")

    def test_absent_daemon_is_told_as_the_command_tells_it(self):
        client = object.__new__(self.client.Client)
        client.trainer = "node-1:7070"

        def call():
            raise self.rpc_error()

        with self.assertRaisesRegex(self.client.TandemError, "^uploading x: trainer_server at node-1:7070 does not answer: it is not running"):
            client._guard(call, "uploading x: ")

    def test_one_reward_function_needs_no_list(self):
        wanted = [(os.path.abspath("rw.py"), "correct")]
        self.assertEqual(self.client.sources_of("rw.py:correct"), wanted)
        self.assertEqual(self.client.sources_of(["rw.py:correct"]), wanted)
        self.assertEqual(self.client.sources_of(("rw.py:correct", "rw.py:other")), [*wanted, (wanted[0][0], "other")])
        self.assertEqual(self.client.sources_of(()), [])
        self.assertEqual(self.client.sources_of(inspect.getmodule), [(inspect.__file__, "getmodule")])
        with self.assertRaisesRegex(self.client.TandemError, "rewards: 'correct'; must be FILE:FUNCTION or a function"):
            self.client.sources_of("correct")

    def test_unknown_enumeration_value_is_told_with_those_allowed(self):
        for fault, told in (('1:9 : Enum type "e.E" has no value named DR_GRPO.', 'has no value named DR_GRPO; must be e.E_A, e.E_B$'),
                            ("1:1 : no field {", "^job:1:1 : no field {$")):
            with self.assertRaisesRegex(self.client.TandemError, told):
                self.client.read_job(fault + "\n" if fault.endswith("{") else fault)


unittest.main()
