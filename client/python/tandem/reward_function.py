"""Reward functions under TRL's calling convention: loaded from a file, called for one group, their answer checked.

A function gets keyword arguments, lists of one entry a completion: `prompts` and `completions` (text, or lists of messages), `completion_ids`
and every column of the data set's row; besides `trainer_state` (global_step, max_steps), `log_extra` and `log_metric`. It returns a number or
None for each completion, and may be async. One without `**kwargs` is given only what it names.

Standard library alone: the reward workers run this file with a Python that has nothing else.
"""

import asyncio
import importlib.machinery
import importlib.util
import inspect
import math
import os
import sys
import traceback
import types

MAX_TEXT = 2000  # characters of one message to a person


class RewardError(Exception):
    """What went wrong, in words that name no function: the caller knows which."""


class Rewards:
    """A checked answer: `values`, a float or None each; `faults`, index to why that value is none."""

    def __init__(self, values, faults):
        self.values = values
        self.faults = faults


class RewardFunction:
    """One function, ready to be called for groups. Not thread-safe."""

    def __init__(self, function):
        if not callable(function):
            raise RewardError(f"is a {type(function).__name__}, not a function")
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))
        self._loop = None
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # some callables of C have no signature: they get everything
            self._names = None
            return
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        self._names = None if takes_all else {p.name for p in parameters}

    def __call__(self, prompts, completions, completion_ids, columns, state=None):
        """`columns`: name to the row's value, the same for every completion. Raises RewardError."""
        count = len(completions)
        arguments = {name: [value] * count for name, value in columns.items() if name not in ("prompt", "completion", "completion_ids")}
        arguments["trainer_state"] = types.SimpleNamespace(**(state or {"global_step": 0, "max_steps": 0}))
        arguments["log_extra"] = lambda column, values: None
        arguments["log_metric"] = lambda name, value: None
        arguments.update(prompts=prompts, completions=completions, completion_ids=completion_ids)
        if self._names is not None:
            arguments = {name: value for name, value in arguments.items() if name in self._names}
        try:
            answer = self._function(**arguments)
            if self._is_async or inspect.isawaitable(answer):
                if self._loop is None:
                    self._loop = asyncio.new_event_loop()
                answer = self._loop.run_until_complete(answer)
            return check(answer, count)  # runs the function's code too, where that yields its values
        except RewardError:
            raise
        except BaseException as error:  # sys.exit() in a reward must not end the worker
            raise RewardError("raised " + describe(error)) from error


def check(answer, count):
    """The answer of a function as Rewards. Raises RewardError when it is no list of `count` entries."""
    if isinstance(answer, (str, bytes, dict)) or not hasattr(answer, "__iter__"):
        raise RewardError(f"returned a {type(answer).__name__}, must be a list of {count} numbers or None")
    answer = list(answer)
    if len(answer) != count:
        raise RewardError(f"returned {len(answer)} values for {count} completions")
    values, faults = [], {}
    for index, value in enumerate(answer):
        values.append(None)
        if value is None:
            continue
        try:
            if isinstance(value, (str, bytes)):
                raise TypeError
            number = float(value)
        except Exception:
            faults[index] = f"returned {show(value)}, must be a number or None"
            continue
        if math.isfinite(number):
            values[index] = number
        else:
            faults[index] = f"returned {number}, must be finite or None"
    return Rewards(values, faults)


def load(path, names):
    """The functions called `names` of the Python file at `path`. Raises RewardError."""
    file_name = os.path.basename(path)
    module_name = os.path.splitext(file_name)[0].replace(".", "_").replace("-", "_")
    spec = importlib.util.spec_from_loader(module_name, importlib.machinery.SourceFileLoader(module_name, path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise RewardError(f"{file_name} cannot be imported: {describe(error)}") from error
    functions = {}
    for name in names:
        if not hasattr(module, name):
            known = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module_name and not n.startswith("_")]
            raise RewardError(f"{file_name} has no '{name}'; its functions are {shorten(', '.join(known) or 'none', 400)}")
        try:
            functions[name] = RewardFunction(getattr(module, name))
        except RewardError as error:
            raise RewardError(f"{file_name}: '{name}' {error}") from error
    return functions


def describe(error):
    """An exception in one line, and the last places it passed through, but for those in this file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__ and "importlib" not in frame.filename]
    places = "".join(f"\n  {os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-3:])
    return shorten(f"{type(error).__name__}: {error}", MAX_TEXT - 800) + shorten(places, 800)


def show(value):
    try:
        return shorten(repr(value), 80)
    except Exception:  # as of an int of too many digits
        return f"a {type(value).__name__}"


def shorten(text, limit):
    return text if len(text) <= limit else text[: limit - 3] + "..."
