#!/usr/bin/env python3
"""Tasks of reasoning-gym by name: rows for a job, and the reward that asks the task's own scorer.

  python3 -m tandem.reasoning_gym leg_counting --rows=1000 --reward=reward.py > train.jsonl
  tandem submit job.textproto --rewards=reward.py:score

Rows are {"prompt", "answer", "entry"}. Needs reasoning-gym, here and in the trainer's --reward_python: pip install reasoning-gym.
"""
import argparse
import contextlib
import json
import sys

REWARD = '''"""The scorer of reasoning-gym's task {name}: what it gives the answer, 0 to 1. Written by tandem.reasoning_gym."""
import re

import reasoning_gym

_SCORE = reasoning_gym.get_score_answer_fn({name!r})


def _answer(completion):
    """The inside of the last <answer>, else the last line that is not empty."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    lines = [line for line in text.splitlines() if line.strip()]
    return (tagged[-1] if tagged else lines[-1] if lines else "").strip()


def score(completions, entry, **_):
    return [float(_SCORE(_answer(completion), row)) for completion, row in zip(completions, entry)]
'''


def fail(message):
    sys.exit(f"tandem.reasoning_gym: {message}")


def load():
    # Run as a script, this file's folder comes first on the path and would be found in place of the library.
    sys.path[:] = [folder for folder in sys.path if folder != __file__.rpartition("/")[0]]
    try:
        import reasoning_gym
    except ImportError:
        fail("needs reasoning-gym: pip install reasoning-gym")
    return reasoning_gym


def names_of(library):
    from importlib import import_module

    return sorted(import_module(library.__name__ + ".factory").DATASETS)


def rows_of(library, name, num_rows, seed, options):
    """Yields the rows. `options`: the task's own settings by name."""
    names = names_of(library)
    if name not in names:
        fail(f"no task '{name}'; there are: {', '.join(names)}")
    try:
        tasks = library.create_dataset(name, size=num_rows, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        fail(f"{name} with {json.dumps(options)}: {error}")
    score = library.get_score_answer_fn(name)
    for entry in tasks:
        try:
            stored = json.loads(json.dumps(entry, default=plain_value))
        except (TypeError, ValueError) as error:
            fail(f"{name}: a row cannot be written as JSON: {error}")
        if score(stored["answer"], stored) != score(entry["answer"], entry):
            fail(f"{name}: its scorer judges a row otherwise once that went through JSON; it cannot be used from a file")
        yield {"prompt": stored["question"], "answer": stored["answer"], "entry": stored}


def plain_value(value):
    """numpy's scalars and arrays as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the task; 'list' prints all")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", default="{}", help='settings of the task as JSON: \'{"max_animals": 5}\'')
    parser.add_argument("--reward", help="file that gets the reward function `score`")
    args = parser.parse_args(arguments)
    library = load()
    if args.name == "list":
        print("\n".join(names_of(library)))
        return
    if args.rows < 1:
        fail(f"--rows: {args.rows}; must be at least 1")
    try:
        options = json.loads(args.options)
    except ValueError as error:
        fail(f"--options: {error}")
    if not isinstance(options, dict):
        fail(f"--options: {args.options}; must be a JSON object")
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # some tasks print
        for row in rows_of(library, args.name, args.rows, args.seed, options):
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    if args.reward:
        with open(args.reward, "w") as file:
            file.write(REWARD.format(name=args.name))


if __name__ == "__main__":
    main()
