#!/usr/bin/env python3
"""Writes variants.json: one small byte-level vocabulary under the pre-tokenizers that models use, with ids by Hugging Face's tokenizers.

    pip install tokenizers==0.23.3 && python3 make_variants.py
"""
import json
import pathlib
import random

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = pathlib.Path(__file__).parent
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
CORPUS = ["The cat sat on the mat, and the dog didn't. She said: they'll, we've, I'm, he'd, it's 12345 or 3.14.",
          "def main(args):\n    return [x for x in args if x > 10]\n\n", "  <think> one, two  </think>\n1 + 1 = 2\n",
          "Größe Ångström naïve café \u4f60\u597d \u3053\u3093\u306b\u3061\u306f \U0001f600 \u0663\u0664\u0665 \u00bd"] * 3
FRAGMENTS = ["hello", "I'm", "DON'T", " they'LL", " 12", "34567", " ", "  ", "\n", "\r\n", "\t", "\n\n", "<|end|>", "<|start|>", "<think>",
             "<|en", "cafe\u0301", " \u212b", "  <|strip|> \n", "<|end", "!!", "...", "{}", "the ", "Word", "\u180e", "\u0085", "\u00a0",
             "\u3000", "\u017f", "\u4f60\u597d", "\U0001f44d\U0001f3fd", "\u200d", "\u0915\u093c", "\u00bd\u00b2\u2167", "\u0663\u0664", "\x00", "\x1f",
             "\u2028", "\ufdd0", "\u1e9b\u0323"]


def byte_level(**changes):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True} | changes


def split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


def added(token_id, content, special, **changes):
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": special} | changes


VARIANTS = {
    "gpt2": {"pre_tokenizer": byte_level()},
    "gpt2_prefix_space": {"pre_tokenizer": byte_level(add_prefix_space=True)},
    "smollm": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": True}, byte_level())},
    "digit_runs": {"pre_tokenizer": sequence({"type": "Digits", "individual_digits": False}, byte_level())},
    "llama3": {"pre_tokenizer": sequence(split(LLAMA3), byte_level(use_regex=False)), "ignore_merges": True},
    "qwen2": {"pre_tokenizer": sequence(split(LLAMA3.replace("{1,3}", "")), byte_level(use_regex=False)), "normalizer": {"type": "NFC"}},
    "three_splits": {"pre_tokenizer": sequence(split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u30ff]+"), split(r"\s+$|\S+"),
                                               byte_level(use_regex=False))},
}


def main():
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                                            show_progress=False))
    model = json.loads(trained.to_str())["model"]
    size = len(model["vocab"])
    base = {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [added(size, "<|start|>", True), added(size + 1, "<|end|>", True), added(size + 2, "<think>", False),
                             added(size + 3, "<|strip|>", True, lstrip=True, rstrip=True), added(size + 4, "<|en", False)],
            "normalizer": None, "post_processor": None, "decoder": byte_level(), "model": model}
    draw = random.Random(7)
    texts = ["", " ", *FRAGMENTS] + ["".join(draw.choices(FRAGMENTS, k=draw.randint(2, 12))) for _ in range(60)]
    variants = []
    for name, changes in VARIANTS.items():
        whole = base | {key: changes[key] for key in ("pre_tokenizer", "normalizer") if key in changes}
        whole["model"] = model | {"ignore_merges": changes.get("ignore_merges", False)}
        tokenizer = Tokenizer.from_str(json.dumps(whole))
        variants.append({"name": name, "changes": changes, "ids": [tokenizer.encode(text).ids for text in texts]})
    (HERE / "variants.json").write_text(json.dumps({"made_with": f"tokenizers {tokenizers.__version__}", "base": base, "texts": texts,
                                                    "variants": variants}, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
