#!/usr/bin/env python3
"""The package's command-line tools, with stand-ins in place of the libraries that are optional."""
import contextlib
import importlib.util
import io
import json
import os
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


unittest.main()
