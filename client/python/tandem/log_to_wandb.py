#!/usr/bin/env python3
"""A job's history into Weights & Biases.

  tandem history JOB | python3 -m tandem.log_to_wandb --project=PROJECT --name=JOB

Needs wandb: pip install wandb.
"""
import argparse
import json
import sys


def main(arguments=None, lines=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", required=True)
    parser.add_argument("--name", help="of the run (default: chosen by wandb)")
    args = parser.parse_args(arguments)
    try:
        import wandb
    except ImportError:
        sys.exit("tandem.log_to_wandb: needs wandb: pip install wandb")
    run = wandb.init(project=args.project, name=args.name)
    for number, line in enumerate(sys.stdin if lines is None else lines, 1):
        try:
            event = json.loads(line)
            kind, step = event.pop("kind"), event.pop("step")
        except (ValueError, KeyError, TypeError, AttributeError):
            sys.exit(f"tandem.log_to_wandb: line {number} is no line of `tandem history`: {line[:80]}")
        if kind == "data":
            run.config.update({"data/" + name: value for name, value in event.items()})
        else:
            prefix = "evaluation/" if kind == "evaluation" else ""
            run.log({prefix + name: value for name, value in event.items()}, step=step)
    run.finish()


if __name__ == "__main__":
    main()
