#!/usr/bin/env python3
"""The page of --http_address in a headless Chromium, over real daemons and a short job: what it shows, on a phone and in both colour schemes,
that what a model wrote is never run, what it asks of the network, and what the server refuses.

  live_page_test.py BIN [--pictures=DIR]

Needs chromium for the tests of the page itself; says so where it is not there. --pictures keeps what the page looked like.
"""
import http.client
import json
import os
import pathlib
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from measure_restart import Pair, free_ports  # noqa: E402
from browser import Browser, find_browser  # noqa: E402

BIN = pathlib.Path(sys.argv[1]).resolve()
PICTURES = next((pathlib.Path(word.split("=", 1)[1]) for word in sys.argv[2:] if word.startswith("--pictures=")), None)
PROGRAM = find_browser()
NEEDS_BROWSER = unittest.skipIf(PROGRAM is None, "no chromium on this machine: apt-get install chromium")
START_SECONDS = 60
NUM_STEPS = 150
JOB = f"""
name: "watched" seed: 1 num_steps: {NUM_STEPS}
data {{ path: "rows.jsonl" }}
rollout {{ prompts_per_step: 4 group_size: 8 sampling {{ temperature: 1 max_tokens: 32 }} }}
rewards {{ name: "ended" weight: 1 ended_by_itself {{}} }}
rewards {{ name: "vowel" weight: 0.5 regular_expression {{ pattern: "[aeiou]" }} }}
loss {{ preset: LOSS_PRESET_DR_GRPO beta: 0.01 }}
adapter {{ rank: 4 alpha: 8 }}
optimizer {{ learning_rate: 1e-3 }}
evaluation {{ path: "rows.jsonl" interval_steps: 50 }}
"""
# All that would run, or leave a mark in the document, where text was taken for HTML.
HOSTILE = ("<script>window.ran = 1</script><img src=x onerror='window.ran = 1'><svg onload='window.ran = 1'></svg>"
           "<a href='javascript:window.ran = 1'>x</a>\" onmouseover=\"window.ran = 1")
SHOWS_JOB = "document.querySelectorAll('#chart path[data-function]').length === 3 && document.querySelectorAll('.completion').length === 8"
NUM_POINTS = "(document.querySelector('#chart path[data-function=reward]')?.getAttribute('d').match(/[ML]/g) ?? []).length"
# The least contrast of words with what is behind them, as WCAG 2 has it; of 4.5 to 1 ordinary text is readable.
LEAST_CONTRAST = """(() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
                        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = channels(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  let least = [99, ""];
  for (const node of document.querySelectorAll("body *")) {
    if (!node.checkVisibility() || node.disabled || ![...node.childNodes].some((c) => c.nodeType === 3 && c.data.trim())) continue;
    const style = getComputedStyle(node), svg = node instanceof SVGElement;
    const pair = [light(channels(svg ? style.fill : style.color)), light(behind(node))].sort((a, b) => b - a);
    const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (contrast < least[0]) least = [contrast, node.textContent.slice(0, 40)];
  }
  return least;
})()"""


EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def make_certificate(folder, name, days="2"):
    openssl(folder, "req", *EC_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:TRUE\n")
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-signkey", f"{name}.key", "-days", days, "-extfile", f"{name}.ext", "-out", f"{name}.pem")
    (folder / f"{name}.key").chmod(0o600)


class Node:
    """A pair with the page, in a folder of its own."""

    def __init__(self, *trainer_flags):
        self.folder = tempfile.TemporaryDirectory(prefix="tandem-page-")
        self.work = pathlib.Path(self.folder.name)
        subprocess.run([BIN / "tandem_tiny_model", self.work / "model"], check=True, stdout=subprocess.DEVNULL)
        (self.work / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {i} <b>{HOSTILE}"}) + "\n" for i in range(32)))
        (self.work / "job.textproto").write_text(JOB)
        (self.port,) = free_ports(1)
        self.pair = Pair(str(BIN), self.folder.name, [])
        self.trainer_flags = [f"--http_address=127.0.0.1:{self.port}", *trainer_flags]
        self.start("rollout_server")
        self.start("trainer_server")

    def start(self, name):
        other = "rollout_server" if name == "trainer_server" else "trainer_server"
        self.pair.flags = [f"--model={self.work / 'model'}", "--device=cpu", f"--peer=unix:{self.work}/run/{other}.grpc",
                           *(self.trainer_flags if name == "trainer_server" else [])]
        lines = self.log(name).count(" daemon: listening ")
        self.pair.start(name)
        deadline = time.monotonic() + START_SECONDS
        while self.log(name).count(" daemon: listening ") == lines:
            if time.monotonic() > deadline or self.pair.processes[name].poll() is not None:
                raise AssertionError(f"{name} does not serve:\n{self.log(name)}")
            time.sleep(0.05)

    def log(self, name):
        return self.pair.log(name) if (self.work / f"{name}.log").exists() else ""

    def tandem(self, *words):
        """What the command prints as JSON lines, over the trainer's own socket."""
        done = subprocess.run([BIN / "tandem", "--json", "--context=none", f"--trainer=unix:{self.work}/run/trainer_server.grpc",
                               f"--rollout=unix:{self.work}/run/rollout_server.grpc", *map(str, words)], capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise AssertionError(f"tandem {words}: {done.stderr or done.stdout}")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def submit(self):
        return self.tandem("submit", self.work / "job.textproto")[0]["job"]

    def wait_for_end(self, job):
        last = self.tandem("watch", job)[-1]["status"]
        if last["state"] != "JOB_STATE_SUCCEEDED":
            raise AssertionError(f"{last}\n{self.log('trainer_server')}")

    def get(self, target, method="GET", body=None, host=None, **headers):
        """Status, headers, text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        if host:
            headers["Host"] = host
        connection.request(method, target, body=body, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, answer.headers, text

    def close(self):
        self.pair.end()
        self.folder.cleanup()


class PageTest(unittest.TestCase):
    """One pair, one job, one window at a time."""

    @classmethod
    def setUpClass(cls):
        cls.node = Node()
        cls.addClassCleanup(cls.node.close)
        cls.url = f"http://127.0.0.1:{cls.node.port}/"

    def window(self, *flags):
        browser = Browser(PROGRAM, *flags)
        self.addCleanup(browser.close)
        return browser

    def picture(self, browser, name):
        if PICTURES:
            PICTURES.mkdir(parents=True, exist_ok=True)
            browser.take_picture(PICTURES / f"{name}.png", whole_page=True)

    def check_fits(self, browser):
        width, window = browser.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        self.assertLessEqual(width, window, "scrolls sideways")

    def check_quiet(self, browser, faults=()):
        """Nothing went wrong in the page but `faults`, and it asked this server alone."""
        self.assertEqual([fault for fault in browser.faults if not any(part in fault for part in faults)], [])
        self.assertGreater(len(browser.requests), 3)
        self.assertEqual([url for url in browser.requests if not url.startswith((self.url, "data:image/svg+xml,", "about:"))], [])

    @NEEDS_BROWSER
    def test_1_without_jobs_it_says_how_to_begin(self):
        browser = self.window()
        browser.look_like(390, 844, "light", is_phone=True)
        browser.open(self.url)
        browser.wait_for("document.body.innerText.includes('No job yet. Submit one: tandem submit')")
        self.assertTrue(browser.evaluate("document.getElementById('reward_card').hidden"))
        self.check_fits(browser)
        self.check_quiet(browser)
        self.picture(browser, "empty")

    @NEEDS_BROWSER
    def test_2_a_job_appears_grows_and_ends(self):
        browser = self.window()
        browser.look_like(1280, 900, "light")
        browser.open(self.url)
        browser.wait_for("!document.getElementById('main').hidden")
        job = self.node.submit()
        browser.wait_for(f"document.querySelector('.job[data-job=\"{job}\"][aria-current=true]') !== null")
        few = browser.wait_for(f"document.getElementById('job_state').textContent === 'running' && {NUM_POINTS}", 60)
        browser.wait_for(f"{NUM_POINTS} > {few}", 60)  # without being loaded again
        self.node.wait_for_end(job)
        browser.wait_for(f"document.getElementById('job_state').textContent === 'succeeded' && {NUM_POINTS} === {NUM_STEPS} && {SHOWS_JOB}", 60)

        events = self.node.tandem("watch", job)
        evaluations = [event["evaluation"] for event in events if isinstance(event.get("evaluation"), dict)]
        self.assertEqual(browser.evaluate("document.querySelectorAll('.held-out').length"), len(evaluations))
        legend = browser.evaluate("[...document.querySelectorAll('#legend li')].map((item) => [...item.children].map((c) => c.textContent))")
        last = {value["name"]: value["value"] for value in events[-3]["step"]["values"]}
        for name, shown in (("vowel", "rewards/vowel/mean"), ("ended", "rewards/ended/mean"), ("reward (weighted sum)", "reward")):
            (figure,) = [float(value) for _, text, value in legend if text == name]
            self.assertAlmostEqual(figure, last[shown], delta=abs(last[shown]) * 0.01)

        stages = browser.evaluate("document.getElementById('stages').innerText")
        for stage in ("rollout", "forward", "backward"):
            self.assertIn(stage, stages)
        status = self.node.tandem("status")
        browser.wait_for("document.getElementById('memory').innerText.includes('kv cache')")
        memory = browser.evaluate("[...document.querySelectorAll('#memory .parts li')].map((item) => item.innerText)")
        for owner in ("weights", "kv cache", "rollout standing", "adapter slots"):
            self.assertTrue(any(line.startswith(owner) for line in memory), memory)
        (weights,) = [entry["bytes"] for entry in status[1]["trainer_server"]["ledger"] if entry["owner"] == "weights"]
        self.assertTrue(any(line.startswith("weights") and f"{int(weights) / 2**20:.1f} MiB" in line for line in memory), memory)
        self.assertEqual(browser.evaluate("document.querySelectorAll('#memory .bar > div').length"), len(memory))

        records = self.node.tandem("completions", job, "--group=0")
        browser.wait_for(f"document.getElementById('completions_step').textContent === 'step {NUM_STEPS}, prompt 1'")
        shown = browser.evaluate("[...document.querySelectorAll('.completion')].map((c) => [c.querySelector('.text').textContent, "
                                 "c.querySelector('strong').textContent])")
        self.assertEqual([text for text, _ in shown], [record["completion"] for record in records])
        for (_, words), record in zip(shown, records):
            self.assertAlmostEqual(float(words.removeprefix("reward ")), record["reward"], delta=0.01)
        self.assertEqual(browser.evaluate("document.getElementById('prompt').textContent"), records[0]["prompt"])
        browser.evaluate("document.getElementById('group_next').click()")
        other = self.node.tandem("completions", job, "--group=1")[0]
        browser.wait_for(f"document.getElementById('prompt').textContent === {json.dumps(other['prompt'])}")

        for scheme in ("light", "dark"):
            browser.look_like(1280, 900, scheme)
            browser.wait_for("document.querySelector('#chart svg') !== null")
            self.check_fits(browser)
            contrast, where = browser.evaluate(LEAST_CONTRAST)
            self.assertGreaterEqual(contrast, 4.5, f"{scheme}: {where}")
            self.picture(browser, f"desk-{scheme}")
        dark = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.look_like(390, 844, "light", is_phone=True)
        self.assertNotEqual(browser.evaluate("getComputedStyle(document.body).backgroundColor"), dark)
        for width in (390, 320):
            browser.look_like(width, 844, "dark", is_phone=True)
            browser.wait_for(f"document.querySelector('#chart svg').viewBox.baseVal.width < {width}")
            self.check_fits(browser)
        self.picture(browser, "phone-dark")
        self.check_quiet(browser)

    @NEEDS_BROWSER
    def test_3_what_a_model_wrote_is_text(self):
        job = self.node.tandem("jobs")[0]["job"]
        path = self.node.work / "trainer_server/jobs" / job / f"completions/step-{NUM_STEPS:06}.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record["completion"] = HOSTILE
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        browser = self.window()
        browser.look_like(390, 844, "dark", is_phone=True)
        browser.open(self.url)
        browser.wait_for(SHOWS_JOB)
        self.assertEqual(browser.evaluate("document.querySelector('.completion .text').textContent"), HOSTILE)
        self.assertIn(HOSTILE, browser.evaluate("document.getElementById('prompt').textContent"))
        self.assertEqual(browser.evaluate("document.querySelectorAll('main img, main script, main a, .text *').length"), 0)
        self.assertIsNone(browser.evaluate("window.ran ?? null"))
        self.check_fits(browser)
        self.check_quiet(browser)
        # Even where the page had a hole, the policy would not run it.
        self.assertEqual(browser.evaluate("(() => { try { document.body.innerHTML = '<b>x</b>'; return 'done'; } catch (e) { return e.name; } })()"),
                         "TypeError")

    @NEEDS_BROWSER
    def test_4_it_says_when_a_daemon_is_away_and_goes_on(self):
        browser = self.window()
        browser.look_like(1280, 900, "dark")
        browser.open(self.url)
        browser.wait_for(SHOWS_JOB)
        self.node.pair.kill("rollout_server")
        browser.wait_for("document.getElementById('phase').textContent === 'rollout_server is away'")
        self.node.start("rollout_server")
        browser.wait_for("document.getElementById('phase').textContent === 'idle'")
        self.node.pair.kill("trainer_server")
        browser.wait_for("document.getElementById('notice').textContent.startsWith('trainer_server cannot be reached. What is shown is as of ')")
        self.assertTrue(browser.evaluate(SHOWS_JOB), "what was known stays")
        self.picture(browser, "gone")
        self.node.start("trainer_server")
        browser.wait_for("document.getElementById('notice').hidden && !document.body.classList.contains('stale')")
        self.check_quiet(browser, faults=("ERR_CONNECTION_REFUSED", "503 (Service Unavailable)", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE"))

    def test_5_the_server_serves_the_page_and_nothing_else(self):
        status, headers, text = self.node.get("/")
        self.assertEqual((status, headers["Content-Type"]), (200, "text/html; charset=utf-8"))
        self.assertEqual(text, (ROOT / "trainer_server/http/live_page.html").read_text())
        policy = headers["Content-Security-Policy"]
        for part in ("default-src 'none'", "script-src 'sha256-", "style-src 'sha256-", "connect-src 'self'", "frame-ancestors 'none'"):
            self.assertIn(part, policy)
        self.assertNotIn("unsafe", policy)
        self.assertNotIn("Access-Control-Allow-Origin", headers)
        self.assertEqual(headers["X-Content-Type-Options"], "nosniff")
        self.assertEqual(headers["Cross-Origin-Resource-Policy"], "same-origin")
        status, headers, text = self.node.get("/", method="HEAD")
        self.assertEqual((status, text), (200, ""))
        self.assertEqual(int(headers["Content-Length"]), (ROOT / "trainer_server/http/live_page.html").stat().st_size)

        self.assertEqual(json.loads(self.node.get("/api/status")[2]), self.node.tandem("status")[1]["trainer_server"])
        jobs = json.loads(self.node.get("/api/jobs?page_size=10")[2])["jobs"]
        self.assertEqual([job["job"] for job in jobs], [job["job"] for job in self.node.tandem("jobs")])
        for target, wanted, part in (
                ("/nothing", 404, "there is nothing here"), ("/api/", 404, ""), ("/api/jobs/", 404, ""), ("/api/jobs/none/history", 404, "none"),
                ("/../../etc/passwd", 404, ""), ("/api/jobs/../../../etc/history", 404, ""), ("/api/jobs/..%2f..%2f/completions", 404, ""),
                ("/api/jobs?page_size=x", 400, "page_size: must be a whole number"), ("/api/jobs?states=1", 400, "'states' is no parameter here"),
                ("/api/jobs/none/history?until_now=0", 400, "'until_now' is no parameter here"), ("/?" + "x" * 3000, 414, "2048")):
            status, _, text = self.node.get(target)
            self.assertEqual(status, wanted, (target, text))
            self.assertIn(part, text)
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            self.assertEqual(self.node.get("/api/jobs", method=method)[0], 405, method)
        self.assertEqual(self.node.get("/", method="POST", body="x" * 100)[0], 413)
        self.assertEqual(self.node.get("/", **{"X-Long": "x" * 20000})[0], 431)
        # No other site's page reads this one through a name of its own.
        for host, wanted in (("localhost:9999", 200), ("[::1]", 200), ("127.0.0.1", 200), ("evil.example", 421), ("127.0.0.1.evil.example:7072", 421),
                             ("10.0.0.5:7072", 421)):
            self.assertEqual(self.node.get("/api/status", host=host)[0], wanted, host)

    def test_6_the_server_is_bounded(self):
        page = ("127.0.0.1", self.node.port)
        idle = [socket.create_connection(page, timeout=5) for _ in range(64)]
        try:
            begin = time.monotonic()
            with socket.create_connection(page, timeout=5) as further:
                further.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                self.assertTrue(further.recv(15).startswith(b"HTTP/1.1 200"), "the 65th gets a place")
                self.assertEqual(idle[0].recv(1), b"", "that of the one that was silent longest")
            idle[1].sendall(b"no HTTP at all\r\n\r\n")
            self.assertTrue(idle[1].recv(15).startswith(b"HTTP/1.1 400"))
            # One that never ends its request is let go, however often it sends something.
            while time.monotonic() - begin < 30:
                try:
                    idle[2].sendall(b"GET / HTTP/1.1\r\nX-Slow: " if time.monotonic() - begin < 1 else b"x")
                    idle[2].settimeout(1)
                    if idle[2].recv(1) == b"":
                        break
                except socket.timeout:
                    continue
                except OSError:
                    break
            seconds = time.monotonic() - begin
            self.assertTrue(10 < seconds < 25, f"let go after {seconds:.0f} s")
        finally:
            for connection in idle:
                connection.close()
        deadline = time.monotonic() + 10
        while True:  # room again
            try:
                self.assertEqual(self.node.get("/api/status")[0], 200)
                break
            except OSError:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.1)

    @NEEDS_BROWSER
    def test_7_what_runs_and_what_is_asked_for_are_shown_behind_many_newer_jobs(self):
        old = self.node.tandem("jobs", "--limit=0")[-1]["job"]
        running = self.node.tandem("submit", self.node.work / "job.textproto", "--set=num_steps: 100000")[0]["job"]
        queued = [self.node.submit() for _ in range(101)]
        self.assertEqual(json.loads(self.node.get(f"/api/jobs/{old}")[2])["job"], old)
        self.assertEqual(self.node.get("/api/jobs/nobody-knows")[0], 404)
        browser = self.window()
        browser.look_like(1280, 900, "dark")
        browser.open(self.url)
        browser.wait_for(f"document.getElementById('job_title').textContent === '{running}' && {NUM_POINTS} > 1", 60)
        browser.evaluate("document.getElementById('older').click()")
        browser.wait_for("document.querySelectorAll('.job').length === 101")  # two pages of the newest, and the one that runs
        browser.evaluate("document.getElementById('older').click()")
        browser.wait_for(f"document.querySelectorAll('.job').length >= 103 && document.querySelector('.job[data-job=\"{old}\"]') !== null")
        browser.open(f"{self.url}#{old}")
        browser.wait_for(f"document.getElementById('job_title').textContent === '{old}' && {SHOWS_JOB}")
        self.check_quiet(browser)
        for job in [*queued, running]:
            self.node.tandem("cancel", job)


class TokenTest(unittest.TestCase):
    """Over TLS with a tokens file, as the gRPC listener."""

    @classmethod
    def setUpClass(cls):
        cls.keys = tempfile.TemporaryDirectory(prefix="tandem-keys-")
        cls.addClassCleanup(cls.keys.cleanup)
        folder = pathlib.Path(cls.keys.name)
        make_certificate(folder, "server")
        hashed = subprocess.run(["sha256sum"], input=b"a-token", stdout=subprocess.PIPE, check=True).stdout.split()[0].decode()
        (folder / "tokens").write_text(f"{hashed} view ada\n")
        (folder / "tokens").chmod(0o600)
        cls.flags = [f"--tls_cert={folder / 'server.pem'}", f"--tls_key={folder / 'server.key'}", f"--tokens_file={folder / 'tokens'}"]
        cls.node = Node(*cls.flags)
        cls.addClassCleanup(cls.node.close)
        cls.folder = folder

    def get(self, target, **headers):
        connection = http.client.HTTPSConnection("127.0.0.1", self.node.port, timeout=20, context=ssl.create_default_context(
            cafile=str(self.folder / "server.pem")))
        connection.request("GET", target, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def test_data_needs_a_token_and_tls(self):
        self.assertEqual(self.get("/")[0], 200)
        for target in ("/api/status", "/api/rollout", "/api/jobs", "/api/jobs/x/history", "/api/jobs/x/completions"):
            self.assertEqual(self.get(target)[0], 401, target)
            self.assertEqual(self.get(target, Authorization="Bearer wrong")[0], 401, target)
            self.assertEqual(self.get(target, Authorization="Basic YTpi")[0], 401, target)
        self.assertEqual(self.get("/api/jobs", Authorization="Bearer a-token")[0], 200)
        self.assertEqual(self.get("/api/rollout", Authorization="Bearer a-token")[0], 200)
        with self.assertRaises((http.client.HTTPException, OSError)):
            self.node.get("/api/status", Authorization="Bearer a-token")
        log = self.node.log("trainer_server")
        self.assertRegex(log, r"audit: name=ada role=view certificate='' peer=127\.0\.0\.1:\d+ rpc=LivePage result=OK")
        self.assertEqual(log.count("rpc=LivePage"), 1, "one line for a reader, not for each call")
        self.assertIn("audit: refused name=(nobody) role=none certificate='' rpc=JobService.GetStatus result=UNAUTHENTICATED", log)
        self.assertNotIn("a-token", log)

    @NEEDS_BROWSER
    def test_the_page_asks_for_the_token(self):
        browser = Browser(PROGRAM, "--ignore-certificate-errors")
        self.addCleanup(browser.close)
        browser.look_like(390, 844, "light", is_phone=True)
        browser.open(f"https://127.0.0.1:{self.node.port}/")
        type_in = "document.getElementById('token').value = '{}'; document.querySelector('#token_form button').click()"
        browser.wait_for("!document.getElementById('token_card').hidden && document.getElementById('main').hidden")
        browser.evaluate(type_in.format("wrong"))
        browser.wait_for("document.getElementById('token_fault').textContent.startsWith('Not accepted: ')")
        self.assertTrue(browser.evaluate("document.getElementById('main').hidden"))
        self.assertLessEqual(*browser.evaluate("[document.documentElement.scrollWidth, innerWidth]"))
        if PICTURES:
            PICTURES.mkdir(parents=True, exist_ok=True)
            browser.take_picture(PICTURES / "token.png")
        browser.evaluate(type_in.format("a-token"))
        browser.wait_for("!document.getElementById('main').hidden && document.getElementById('token_card').hidden")
        self.assertEqual(browser.evaluate("[sessionStorage.length, localStorage.length, document.cookie, location.href.includes('a-token')]"),
                         [1, 0, "", False])
        browser.evaluate("document.getElementById('forget').click()")
        browser.wait_for("!document.getElementById('token_card')?.hidden && sessionStorage.length === 0")

    def test_certificates_are_read_again(self):
        before = ssl.get_server_certificate(("127.0.0.1", self.node.port))
        make_certificate(self.folder, "new")
        for name in ("server.key", "server.pem"):
            os.replace(self.folder / name.replace("server", "new"), self.folder / name)
        deadline = time.monotonic() + 10
        while ssl.get_server_certificate(("127.0.0.1", self.node.port)) == before:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.2)
        self.assertEqual(self.get("/")[0], 200)
        renewed = ssl.get_server_certificate(("127.0.0.1", self.node.port))
        for name in ("server.key", "server.pem"):  # the tests that follow trust it
            self.addCleanup((self.folder / name).write_bytes, (self.folder / name).read_bytes())
        make_certificate(self.folder, "server", "-1")
        while "the certificate has expired" not in self.node.log("trainer_server"):
            self.assertLess(time.monotonic(), deadline)
            self.assertEqual(ssl.get_server_certificate(("127.0.0.1", self.node.port)), renewed)
            time.sleep(0.2)
        self.assertEqual(ssl.get_server_certificate(("127.0.0.1", self.node.port)), renewed)


class CertificateTest(unittest.TestCase):
    def test_without_tokens_a_certificate_of_the_client_authority_is_demanded(self):
        with tempfile.TemporaryDirectory(prefix="tandem-keys-") as name:
            folder = pathlib.Path(name)
            make_certificate(folder, "server")
            make_certificate(folder, "ada")
            node = Node(f"--tls_cert={folder / 'server.pem'}", f"--tls_key={folder / 'server.key'}", f"--tls_client_ca={folder / 'ada.pem'}")
            self.addCleanup(node.close)

            def status_of(certificate):
                context = ssl.create_default_context(cafile=str(folder / "server.pem"))
                if certificate:
                    context.load_cert_chain(folder / f"{certificate}.pem", folder / f"{certificate}.key")
                connection = http.client.HTTPSConnection("127.0.0.1", node.port, timeout=20, context=context)
                self.addCleanup(connection.close)
                connection.request("GET", "/api/status")
                return connection.getresponse().status

            for certificate in (None, "server"):
                with self.assertRaises((http.client.HTTPException, OSError), msg=certificate):
                    status_of(certificate)
            self.assertEqual(status_of("ada"), 200)
            self.assertIn("audit: name=ada role=administer certificate='ada'", node.log("trainer_server"))


class AddressTest(unittest.TestCase):
    def test_what_others_can_reach_is_refused_without_tls(self):
        with tempfile.TemporaryDirectory() as folder:
            for address, part in (("0.0.0.0:0", "can be reached from other machines: give --tls_cert, --tls_key"),
                                  ("[::]:0", "can be reached from other machines"), ("10.213.77.1:7072", "can be reached from other machines"),
                                  ("7072", "is no ADDRESS:PORT"), ("node-1:7072", "is no ADDRESS:PORT"), ("127.0.0.1:70000", "is no ADDRESS:PORT"),
                                  ("127.0.0.1", "is no ADDRESS:PORT")):
                done = subprocess.run([BIN / "trainer_server", f"--http_address={address}", f"--run_dir={folder}/run", f"--data_dir={folder}/data",
                                       "--metrics=off", "--listen=127.0.0.1:0"], capture_output=True, text=True, timeout=60)
                self.assertEqual(done.returncode, 1, (address, done.stderr))
                self.assertIn("--http_address", done.stderr)
                self.assertIn(part, done.stderr)

    def test_a_socket_for_listen_means_no_page(self):
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.Popen([BIN / "trainer_server", "--random_weights=smollm2-135m", "--device=cpu", f"--run_dir={folder}/run",
                                        f"--data_dir={folder}/data", "--metrics=off", f"--listen=unix:{folder}/listen"],
                                       stderr=subprocess.PIPE, text=True)
            said = ""
            for line in process.stderr:
                said += line
                if "listening" in line:
                    process.terminate()
            self.assertEqual(process.wait(60), 0, said)
            self.assertIn("listening", said)
            self.assertNotIn("live page", said)

    def test_a_port_in_use_is_named(self):
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            done = subprocess.run([BIN / "trainer_server", f"--http_address={address}", f"--run_dir={folder}/run", f"--data_dir={folder}/data",
                                   "--metrics=off", "--listen=127.0.0.1:0"], capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(f"serving the page at '{address}'", done.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    unittest.main(argv=sys.argv[:1], verbosity=2)
