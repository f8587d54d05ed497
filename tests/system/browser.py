"""A headless Chromium, driven over its DevTools protocol through a pipe: no port is opened and nothing but the standard library is needed."""
import base64
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time

# All that a browser does of its own accord is off, and no name but this machine's is resolved.
FLAGS = ("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-background-networking",
         "--disable-component-update", "--disable-default-apps", "--disable-extensions", "--disable-sync", "--disable-gpu", "--disable-dev-shm-usage",
         "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
ANSWER_SECONDS = 30


def find_browser():
    """The program's path, or None."""
    return next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)


class Browser:
    """One window. What it asked of the network and what went wrong in it are kept in `requests` and `faults`."""

    def __init__(self, program, *flags):
        self.requests, self.faults = [], []
        self.profile = tempfile.TemporaryDirectory(prefix="tandem-browser-", ignore_cleanup_errors=True)
        to_browser, self.writing = os.pipe()
        self.reading, from_browser = os.pipe()
        command = [program, *FLAGS, *flags, f"--user-data-dir={self.profile.name}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]

        def lay_pipes():  # the browser reads from 3 and writes to 4
            read_end, write_end = os.dup(to_browser), os.dup(from_browser)
            os.dup2(read_end, 3)
            os.dup2(write_end, 4)

        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        pass_fds=(3, 4), preexec_fn=lay_pipes)
        os.close(to_browser)
        os.close(from_browser)
        self.answers, self.next_id, self.session = {}, 1, None
        self.heard = threading.Condition()
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def listen(self):
        pending = b""
        while True:
            piece = os.read(self.reading, 1 << 16)
            if not piece:
                break
            *messages, pending = (pending + piece).split(b"\0")
            for message in map(json.loads, messages):
                self.take(message)
        with self.heard:
            self.answers = None
            self.heard.notify_all()

    def take(self, message):
        if "id" in message:
            with self.heard:
                self.answers[message["id"]] = message
                self.heard.notify_all()
        method, given = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.faults.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.faults.append(f"{given['entry']['text']} ({given['entry'].get('url', '')})")

    def send(self, method, **params):
        number, self.next_id = self.next_id, self.next_id + 1
        message = {"id": number, "method": method, "params": params, **({"sessionId": self.session} if self.session else {})}
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        with self.heard:
            while self.answers is not None and number not in self.answers:
                if not self.heard.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"the browser does not answer {method} within {ANSWER_SECONDS} s")
            if self.answers is None:
                raise ConnectionError(f"the browser ended before it answered {method}")
            answer = self.answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def look_like(self, width, height, scheme, is_phone=False):
        """The window's size in CSS pixels and the colours that the reader prefers: 'light' or 'dark'."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if is_phone else 1, mobile=is_phone)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url):
        """Returns when the document is there."""
        gone_to = self.send("Page.navigate", url=url)
        if "errorText" in gone_to:
            raise ConnectionError(f"{url}: {gone_to['errorText']}")
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def evaluate(self, expression):
        """The value of a JavaScript expression, a promise's when it is one."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression, seconds=30):
        """Until the expression is true; its value."""
        deadline = time.monotonic() + seconds
        while True:
            value = self.evaluate(expression)
            if value:
                return value
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText")
                raise AssertionError(f"not within {seconds} s: {expression}\nthe page says:\n{text}\nfaults: {self.faults}")
            time.sleep(0.1)

    def take_picture(self, path, whole_page=False):
        picture = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)
        with open(path, "wb") as file:
            file.write(base64.b64decode(picture["data"]))

    def close(self):
        try:
            self.session = None
            self.send("Browser.close")
            self.process.wait(ANSWER_SECONDS)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.listener.join()
        os.close(self.writing)
        os.close(self.reading)
        self.profile.cleanup()
