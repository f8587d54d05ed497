"""Ten reward functions as people write them for TRL's GRPOTrainer: nothing here knows of Tandem."""

import asyncio
import re
from collections import Counter
from fractions import Fraction


def _answer_in_xml(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def correctness(prompts, completions, answer, **kwargs):
    replies = [completion[0]["content"] for completion in completions]
    question = prompts[0][-1]["content"]
    extracted = [_answer_in_xml(reply) for reply in replies]
    print("-" * 20, f"Question:\n{question}", f"\nAnswer:\n{answer[0]}", f"\nExtracted:\n{extracted[0]}")
    return [2.0 if guess == right else 0.0 for guess, right in zip(extracted, answer)]


def integer(completions, **kwargs):
    replies = [completion[0]["content"] for completion in completions]
    return [0.5 if _answer_in_xml(reply).isdigit() else 0.0 for reply in replies]


def strict_format(completions, **kwargs) -> list[float]:
    pattern = r"^<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?$"
    return [0.5 if re.match(pattern, completion[0]["content"], re.DOTALL) else 0.0 for completion in completions]


def xml_count(completions, **kwargs) -> list[float]:
    def score(text):
        tags = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
        total = sum(0.125 for tag in tags if text.count(tag) == 1)
        return total - len(text.split("</answer>")[-1]) * 0.001 if "</answer>" in text else total

    return [score(completion[0]["content"]) for completion in completions]


def length(completions, completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


async def judged(prompts, completions, **kwargs):
    async def judge(completion):
        await asyncio.sleep(0.001)
        return "because" in completion[0]["content"]

    return list(await asyncio.gather(*[judge(completion) for completion in completions]))


def only_maths(prompts, completions, task, **kwargs):
    rewards = []
    for completion, kind in zip(completions, task):
        if kind != "math":
            rewards.append(None)
        else:
            rewards.append(1.0 if "=" in completion[0]["content"] else -1.0)
    return rewards


def exact_value(completions, solution, log_metric=None, **kwargs):
    rewards = []
    for completion, right in zip(completions, solution):
        found = re.findall(r"-?\d+(?:/\d+)?", completion[0]["content"])
        rewards.append(float(bool(found) and Fraction(found[-1]) == Fraction(right)))
    if log_metric:
        log_metric("exact_share", sum(rewards) / len(rewards))
    return rewards


class RepetitionPenalty:
    def __init__(self, n=2, scale=-1.0):
        self.n, self.scale, self.__name__ = n, scale, "repetition_penalty"

    def __call__(self, completions, **kwargs):
        rewards = []
        for completion in completions:
            words = completion[0]["content"].lower().split()
            grams = Counter(zip(*[words[i:] for i in range(self.n)]))
            total = sum(grams.values())
            rewards.append(self.scale * (1 - len(grams) / total) if total else 0.0)
        return rewards


repetition_penalty = RepetitionPenalty()


def curriculum(completions, trainer_state, **kwargs):
    share = min(1.0, trainer_state.global_step / max(1, trainer_state.max_steps))
    return [share * (1.0 if completion[0]["content"].endswith(".") else 0.0) for completion in completions]
