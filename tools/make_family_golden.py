"""Writes tests/golden/families/<name>/: a tiny random model of each family and what transformers computes with it.

Each folder is a Hugging Face directory (config.json, model.safetensors, tokenizer.json) with expected.json beside it. The
weights are bf16 numbers, so that a server that holds them in bf16 holds the same ones; transformers computes with them in fp32.
Equal versions give equal files.

Needs torch, transformers and tokenizers: python3 tools/make_family_golden.py
"""

import json
import pathlib

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

OUT = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden" / "families"
NUM_PROMPT_TOKENS = 23

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 0,
    "bos_token_id": None,
}
FAMILIES = {
    "llama3": ("Llama", {
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        # Wave lengths of 6 to 47,000 positions lie below 8, between 8 and 32, and above: all three cases within the prompt.
        "rope_scaling": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    }),
    "qwen2": ("Qwen2", {
        # Qwen 2 has no head_dim of its own: hidden_size / heads.
        "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64,
        "head_dim": None, "tie_word_embeddings": True, "rope_theta": 1000000.0,
    }),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "rope_theta": 1000000.0}),
}


def make_tokenizer():
    """Single bytes only, behind one control token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0} | {letter: i + 1 for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def randomize(model, generator):
    """Norms around 1, biases that matter, matrices that keep the size of what passes through them."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                value = 1 + 0.25 * noise
            elif name.endswith(".bias"):
                value = 0.5 * noise
            elif "embed" in name or "lm_head" in name:
                value = 0.3 * noise
            else:
                value = noise / parameter.shape[1] ** 0.5
            parameter.copy_(value.bfloat16().float())


def rounded(tensor):
    return [float(f"{value:.7g}") for value in tensor.flatten().tolist()]


def expected_of(model, token_ids):
    prompt = torch.tensor([token_ids[:-1]])
    with torch.no_grad():
        prefill = model(prompt, use_cache=True)
        decode = model(torch.tensor([token_ids[-1:]]), past_key_values=prefill.past_key_values, use_cache=True)
    logits = prefill.logits[0].float()
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    return {
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, fp32",
        "token_ids": token_ids,
        # Of every position but the last: what follows the prompt's tokens.
        "prefill_logits": [rounded(row) for row in logits],
        "prefill_logprobs": rounded(logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])),
        # The last token as one step over the cache of the others.
        "decode_logits": rounded(decode.logits[0, -1].float()),
    }


def main():
    tokenizer = make_tokenizer()
    for index, (name, (prefix, changes)) in enumerate(FAMILIES.items()):
        generator = torch.Generator().manual_seed(index + 1)
        fields = SIZES | {"vocab_size": tokenizer.get_vocab_size()} | changes
        fields = {key: value for key, value in fields.items() if value is not None or key == "bos_token_id"}
        config = getattr(transformers, prefix + "Config")(**fields)
        config._attn_implementation = "eager"
        model = getattr(transformers, prefix + "ForCausalLM")(config).float().eval()
        randomize(model, generator)
        token_ids = torch.randint(1, fields["vocab_size"], (NUM_PROMPT_TOKENS + 1,), generator=generator).tolist()
        expected = expected_of(model, token_ids)

        folder = OUT / name
        folder.mkdir(parents=True, exist_ok=True)
        model.bfloat16().save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "expected.json").write_text(json.dumps(expected) + "\n")
        print(name, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


if __name__ == "__main__":
    main()
