"""Where a trainer_server is and what it is shown: arguments, environment, configuration file, as the command `tandem` has them."""

import json
import os
import re
import stat
from dataclasses import dataclass, field

import grpc

try:
    import pwd
except ImportError:  # not of this system
    pwd = None

FIELDS = ("trainer", "rollout", "ca", "cert", "key", "token_file")
PATHS = FIELDS[2:]
MAX_FILE_BYTES = 1 << 20


class TandemError(Exception):
    """`code` is gRPC's name for what went wrong ("INVALID_ARGUMENT"); the text says it in words, a fault a line."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Connection:
    trainer: str
    ca: bytes = b""  # PEM; set: TLS
    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    token: str = field(default="", repr=False)

    def is_over_tls(self):
        return bool(self.ca) and not self.trainer.startswith("unix:")

    def metadata(self):
        """Within the node a call names the user; over TLS the server knows who calls."""
        if pwd is None or self.is_over_tls():
            return []
        uid = os.geteuid()
        try:
            login = pwd.getpwuid(uid).pw_name
        except KeyError:
            login = ""
        return [("tandem-user", user_name_of(login, uid))]

    def channel(self):
        options = [
            ("grpc.max_receive_message_length", 4 << 20),
            ("grpc.keepalive_time_ms", 10000),
            ("grpc.keepalive_timeout_ms", 10000),
            ("grpc.http2.max_pings_without_data", 0),  # no bound: a stream may be silent for hours
        ]
        if not self.is_over_tls():
            return grpc.insecure_channel(self.trainer, options=options)
        credentials = grpc.ssl_channel_credentials(self.ca, self.key or None, self.cert or None)
        if self.token:
            credentials = grpc.composite_channel_credentials(credentials, grpc.access_token_call_credentials(self.token))
        return grpc.secure_channel(self.trainer, credentials, options=options)


def check_address(address, setting):
    """HOST:PORT, of IPv6 with HOST in brackets, or unix:PATH. `setting` names it in errors. Raises TandemError."""
    found = re.fullmatch(r"(?:\[[^\[\]/\s]*:[^\[\]/\s]*\]|[^\[\]:/\s]+):([0-9]{1,5})", address)
    if not (found and 1 <= int(found[1]) <= 65535 or address.startswith("unix:") and address != "unix:"):
        raise TandemError("INVALID_ARGUMENT",
                          f"{setting}: '{address}'; must be HOST:PORT with a port of 1 to 65535, or unix:PATH")


def error_of(code, words, address):
    """A call to trainer_server that failed with gRPC's `code` and `words`, as the command's CallStatus (client/connection.cc)
    tells it: a TandemError."""
    where = f"trainer_server at {address}"
    if code == "UNIMPLEMENTED" and (not words or words.startswith("Method not found") or "http2 header with status" in words):
        words = f"{where}: what answers there is none (is it the rollout_server, or another version?)"
    elif code == "UNAVAILABLE":
        words = where + _unavailable(words)
    return TandemError(code, words)


def _unavailable(words):
    """What follows the address."""
    if words.startswith("DNS resolution failed"):
        return ": no address is known for its host"
    if "failed to connect" not in words:
        return f": {words}"
    # gRPC's own words are of attempts and addresses.
    if peer := re.search("Peer name (.*) is not in peer certificate", words):
        return f": the server's certificate does not name {peer[1]}: reach it at an address that it names, or give it one of this name"
    if "Failed parsing HTTP/2" in words:
        return ": what answers there does not speak gRPC (is it the port of --metrics or --http_address?)"
    # One that someone answered and hung up on is about TLS.
    if "andshak" in words or "Socket closed" in words:
        return (": no agreement on TLS: either only one side speaks it (this one does with `ca`), or ca, cert or key do not fit: "
                + words)
    return " does not answer: it is not running there, or still starting; tandem status --wait=60s waits for it"


def user_name_of(login, uid):
    """What a user within the node is called: "ada"; "uid-1000" where the login is none that a server takes, as "svc$" or ""."""
    return login if re.fullmatch("[A-Za-z0-9._@-]{1,64}", login) else f"uid-{uid}"


def resolve(context="", token="", environment=os.environ, **given):
    """A Connection. What is given (paths, addresses, the token) goes before the environment (TANDEM_TRAINER, _CA, _CERT, _KEY, _TOKEN_FILE, and _TOKEN, the token
    itself), that before the context of the configuration file (TANDEM_CONFIG, else ~/.config/tandem/config.json), that before
    127.0.0.1:7070. The context "none" is that of no file. An address is HOST:PORT or unix:PATH. Raises TandemError."""
    unknown = sorted(set(given) - set(FIELDS))
    if unknown:
        raise TypeError(f"tandem.Client has no setting '{unknown[0]}'; there are context, token, {', '.join(FIELDS)}")
    context = context or environment.get("TANDEM_CONTEXT", "")
    settings = {}
    if context != "none":
        path = environment.get("TANDEM_CONFIG", "")
        is_named = bool(path or context)
        if not path:
            home = environment.get("XDG_CONFIG_HOME") or os.path.join(environment.get("HOME", ""), ".config")
            path = os.path.join(home, "tandem", "config.json")
        if is_named or os.path.exists(path):
            settings = _read_context(path, context)
    for name in FIELDS:
        setting, value = name, given.get(name)
        if not value:
            setting = "TANDEM_" + name.upper()
            value = environment.get(setting)
        if not value:
            continue
        settings[name] = os.fspath(value)
        if name not in PATHS:
            check_address(settings[name], setting)
    if not token and not given.get("token_file"):
        token = environment.get("TANDEM_TOKEN", "")
    return _read_files(settings, token)


def _read_files(settings, token):
    if bool(settings.get("cert")) != bool(settings.get("key")):
        raise TandemError("INVALID_ARGUMENT", "cert and key are given together or not at all")
    if not token and settings.get("token_file"):
        token = _read(settings["token_file"], "token_file", is_private=True).decode("utf-8", "replace").strip()
    trainer = settings.get("trainer") or "127.0.0.1:7070"
    if not settings.get("ca"):
        if token or settings.get("cert"):
            raise TandemError("INVALID_ARGUMENT", "a token or a client certificate is shown over TLS only: give ca, the server's CA")
        return Connection(trainer)
    if not all("!" <= letter <= "~" for letter in token):
        raise TandemError("INVALID_ARGUMENT", "the token has characters other than visible ASCII, or is more than one word")
    ca = _read(settings["ca"], "ca")
    if b"-----BEGIN CERTIFICATE-----" not in ca:
        raise TandemError("INVALID_ARGUMENT", f"ca: {settings['ca']} has no PEM certificate")
    if not settings.get("cert"):
        return Connection(trainer, ca, token=token)
    return Connection(trainer, ca, _read(settings["cert"], "cert"), _read(settings["key"], "key", is_private=True), token)


def _read(path, what, is_private=False):
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
            raise TandemError("INVALID_ARGUMENT", f"{what}: {path} is not a regular file of at most {MAX_FILE_BYTES} bytes")
        if is_private and found.st_mode & 0o077:
            raise TandemError("PERMISSION_DENIED", f"{what}: others may read {path}: chmod 600 it, and take a new one if they have")
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        code = "PERMISSION_DENIED" if isinstance(error, PermissionError) else "NOT_FOUND"
        raise TandemError(code, f"{what}: cannot read {path}: {error.strerror}") from None


def _read_context(path, name):
    """The settings of the context `name`, else of the one that the file chooses."""

    def fault(text):
        return TandemError("INVALID_ARGUMENT", f"{path}: {text}")

    try:
        file = json.loads(_read(path, "configuration file"))
    except ValueError:
        file = None
    if not isinstance(file, dict):
        raise fault("not a JSON object")
    for key, value in file.items():
        if not (key == "context" and isinstance(value, str) or key == "contexts" and isinstance(value, dict)):
            raise fault(f"'{key}' is not \"context\" with a name or \"contexts\" with an object")
    name = name or file.get("context", "")
    if not name:
        return {}
    contexts = file.get("contexts", {})
    if name not in contexts:
        raise TandemError("NOT_FOUND", f"{path}: no context '{name}'; there are: {', '.join(sorted(contexts)) or 'none'}")
    if not isinstance(contexts[name], dict):
        raise fault(f"context '{name}' is not an object")
    for key, value in contexts[name].items():
        if key not in FIELDS or not isinstance(value, str) or not value:
            raise fault(f"context '{name}': '{key}' is none of {', '.join(FIELDS)} with a text")
        if key not in PATHS:
            check_address(value, f"{path}: context '{name}': {key}")
    folder = os.path.dirname(path)
    return {key: os.path.join(folder, value) if key in PATHS else value for key, value in contexts[name].items()}
