#!/usr/bin/env python3
"""Do Python's peft with an exported adapter, or transformers with a merged model, compute what the rollout server computes with the slot?
Prints the largest difference.

  tandem export JOB DIR && tandem --json --job=JOB --max_tokens=32 generate "What is the capital of France?" > answer.jsonl
  check_peft_export.py --gguf FILE --adapter DIR --answer answer.jsonl --prompt "What is the capital of France?" [--limit 1e-3]
  check_peft_export.py --gguf FILE --merged DIR --answer answer.jsonl --prompt "..." --limit 0.5    # of tandem export --merged: bf16 moves that much

Choose a prompt without digits: transformers forgets the digit split of this GGUF's tokenizer.
"""
import argparse
import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--adapter")
    what.add_argument("--merged")
    parser.add_argument("--answer", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--limit", type=float, default=1e-3)
    args = parser.parse_args()

    folder, name = os.path.split(os.path.abspath(args.gguf))
    tokenizer = AutoTokenizer.from_pretrained(args.merged) if args.merged else AutoTokenizer.from_pretrained(folder, gguf_file=name)
    base = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": args.prompt}], tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]

    ids, given, prompt_tokens = [], [], None
    with open(args.answer) as answer:
        for line in answer:
            message = json.loads(line)
            if "prompt" in message:
                prompt_tokens = message["prompt"]["prompt_tokens"]
            ids += message.get("tokens", {}).get("ids", [])
            given += message.get("tokens", {}).get("raw_logprobs", [])
    if prompt_tokens != len(prompt_ids):
        sys.exit(f"the server saw a prompt of {prompt_tokens} tokens, transformers makes {len(prompt_ids)}")

    def logprobs(model):
        with torch.no_grad():
            logits = model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1:-1].double()
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)

    without = logprobs(base)
    if args.merged:
        adapted = logprobs(AutoModelForCausalLM.from_pretrained(args.merged, dtype=torch.float32))
    else:
        adapted = logprobs(PeftModel.from_pretrained(base, args.adapter))
    difference = (adapted - torch.tensor(given, dtype=torch.float64)).abs().max().item()
    print(f"{len(ids)} tokens: largest difference of log-probs {difference:.2e} (limit {args.limit:g}); "
          f"the adapter moves them by up to {(adapted - without).abs().max().item():.3f}")
    sys.exit(0 if difference <= args.limit else 1)


main()
