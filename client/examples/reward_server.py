"""A remote reward in Python: pip install ./client/python, then python3 client/examples/reward_server.py [host:port].

In the job: rewards { weight: 1 remote { address: "127.0.0.1:7080" function: "brevity" } }
"""

import sys

import tandem


def brevity(completions, **kwargs):
    """1 for an empty completion, falling to 0 at 200 bytes."""
    return [max(0.0, 1 - len(completion.encode()) / 200) for completion in completions]


tandem.serve_rewards([brevity], *sys.argv[1:2])
