"""Maths answers judged by math-verify: pip install math-verify into the Python of --reward_python, then

    tandem submit JOB_FILE --rewards=client/examples/math_verify_rewards.py:equivalent
"""

from math_verify import parse, verify


def equivalent(completions, solution, **kwargs):
    """1 where the completion's last expression equals the row's `solution`; None where the solution cannot be parsed."""
    rewards = []
    for completion, right in zip(completions, solution):
        text = completion if isinstance(completion, str) else completion[0]["content"]
        # The worker has its own limit; math-verify's would need signals.
        gold = parse(right, parsing_timeout=None)
        answer = parse(text, parsing_timeout=None)
        rewards.append(float(verify(gold, answer, timeout_seconds=None)) if gold else None)
    return rewards
