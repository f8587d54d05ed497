#!/usr/bin/env python3
"""One GRPO step of a GGUF model in PyTorch + transformers + peft, on the CPU in fp32: the work that tools/compare_with_transformers.py
compares Tandem with. Prints one JSON object.

  torch_baseline.py --gguf FILE --prompts 8 --group_size 8 --new_tokens 64 [--micro_batch 8] [--checkpointing] [--threads 2]
"""
import argparse
import json
import os
import resource
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group_size", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    folder, name = os.path.split(os.path.abspath(args.gguf))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    if args.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4, betas=(0.9, 0.99), weight_decay=0.0)

    texts = []
    for i in range(args.prompts):
        messages = [{"role": "system", "content": "You are a calculator."}, {"role": "user", "content": f"{i + 2} + {i + 5} = ?"}]
        texts += [tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)] * args.group_size
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    width = inputs["input_ids"].shape[1]
    n = len(texts)

    generation, training = [], []
    for _ in range(args.steps):
        model.eval()
        begin = time.perf_counter()
        with torch.no_grad():
            ids = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=args.new_tokens,
                                 min_new_tokens=args.new_tokens, pad_token_id=tokenizer.pad_token_id)
        generation.append(time.perf_counter() - begin)

        model.train()
        begin = time.perf_counter()
        mask = torch.cat([inputs["attention_mask"], torch.ones(n, ids.shape[1] - width, dtype=torch.long)], 1)
        advantages = torch.randn(n)
        tokens = n * (ids.shape[1] - width)
        optimizer.zero_grad(set_to_none=True)
        for at in range(0, n, args.micro_batch):
            rows = slice(at, at + args.micro_batch)
            # Logits of the completion only, as TRL asks for them.
            logits = model(input_ids=ids[rows], attention_mask=mask[rows], logits_to_keep=args.new_tokens + 1).logits[:, :-1]
            logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[rows, width:].unsqueeze(-1)).squeeze(-1)
            ratio = torch.exp(logprobs - logprobs.detach())
            loss = -(torch.min(ratio, ratio.clamp(0.8, 1.28)) * advantages[rows, None]).sum() / tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        training.append(time.perf_counter() - begin)

    generated = n * args.new_tokens
    print(json.dumps({
        "torch": torch.__version__, "threads": args.threads, "sequences": n, "prompt_tokens": width, "new_tokens": args.new_tokens,
        "micro_batch": args.micro_batch, "checkpointing": args.checkpointing,
        "generation_seconds": min(generation), "generation_tokens_per_second": generated / min(generation),
        "training_seconds": min(training), "training_tokens_per_second": generated / min(training),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }))


main()
