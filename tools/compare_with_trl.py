#!/usr/bin/env python3
"""What TRL computes for one tiny model, prompts, completions and rewards: advantages, loss and adapter gradient of each loss type and option.

  compare_with_trl.py --write             writes tests/golden/trl, which the test tandem_trl_test compares Tandem's own code with
  compare_with_trl.py --check             computes all anew and compares with what is there: within 1e-6 of the largest value of each case
  compare_with_trl.py --check --test BIN  and runs BIN (build/bin/tandem_trl_test) on it

TRL, transformers, peft and torch come from PyPI, each pinned by SHA-256 (trl_requirements.txt), into an environment of their own (--venv,
about 6 GB); CPython 3.11. Everything runs on the CPU in fp32. The model is tests/golden/families/qwen3. A case is a GRPOConfig by its
differences from a base; TRL's own GRPOTrainer scores, weighs and differentiates. Old log-probs are those of another adapter than the policy's,
so that ratios are not 1; rollout log-probs are the old ones with noise. RLOOTrainer's cases have the job's fields beside their
configuration. docs/trl.md says what differs, and why.
"""
import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "trl"
MODEL = ROOT / "tests" / "golden" / "families" / "qwen3"
REQUIREMENTS = pathlib.Path(__file__).resolve().parent / "trl_requirements.txt"

RANK, ALPHA = 1, 2.0
LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
GROUP, PROMPTS, END, MAX_TOKENS = 4, 2, 0, 9

# Of both sides, unless a case says otherwise. num_iterations 2: TRL scores old log-probs.
BASE = {"loss_type": "dapo", "max_completion_length": MAX_TOKENS, "num_generations": GROUP, "num_iterations": 2,
        "per_device_train_batch_size": GROUP * PROMPTS, "reward_weights": [1.0, 0.5]}
VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}
RLOO = {"trainer": "rloo"}
# name: differences from BASE; "rewards": the values of the two functions, "usual" or another set; "trainer": GRPOTrainer or another.
CASES = {
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "sapo_temperatures": {"loss_type": "sapo", "sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.0},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
    "vespo": {"loss_type": "vespo"},
    "vespo_constants": {"loss_type": "vespo", "vespo_k_pos": 1.5, "vespo_lambda_pos": 2.0, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0},
    "two_sided_clip": {"delta": 1.25},
    "scale_batch": {"scale_rewards": "batch"},
    "scale_none": {"scale_rewards": "none"},
    "normalize_then_sum": {"multi_objective_aggregation": "normalize_then_sum"},
    "null_rewards": {"rewards": "null"},
    "equal_rewards": {"rewards": "equal"},
    "kl": {"beta": 0.1, "use_bias_correction_kl": False},
    "kl_bias_correction": {"beta": 0.1, "use_bias_correction_kl": True},
    "kl_sequence_level": {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.1, "use_bias_correction_kl": False},
    "mask_truncated": {"mask_truncated_completions": True},
    "mask_truncated_grpo": {"loss_type": "grpo", "mask_truncated_completions": True},
    "top_entropy": {"top_entropy_quantile": 0.4},
    "entropy_bonus": {"entropy_coef": 0.05},
    "entropy_bonus_top": {"loss_type": "grpo", "entropy_coef": 0.05, "top_entropy_quantile": 0.4},
    "off_policy_mask": {"off_policy_mask_threshold": 0.02},
    "temperature": {"temperature": 0.7},
    "token_truncate": VLLM | {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2},
    "token_mask": VLLM | {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.2,
                          "vllm_importance_sampling_clip_min": 0.9},
    "sequence_truncate": VLLM | {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1.1},
    "sequence_mask": VLLM | {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 1.1},
    "vespo_token_truncate": VLLM | {"loss_type": "vespo", "vllm_importance_sampling_mode": "token_truncate",
                                    "vllm_importance_sampling_clip_max": 1.2},
    "off_policy_mask_rollout": VLLM | {"off_policy_mask_threshold": 0.02, "vllm_importance_sampling_mode": "token_truncate"},
    "accumulated_dapo": {"per_device_train_batch_size": GROUP, "gradient_accumulation_steps": PROMPTS},
    "accumulated_grpo": {"loss_type": "grpo", "per_device_train_batch_size": GROUP, "gradient_accumulation_steps": PROMPTS},
    "accumulated_bnpo": {"loss_type": "bnpo", "per_device_train_batch_size": GROUP, "gradient_accumulation_steps": PROMPTS},
    "everything": VLLM | {"loss_type": "grpo", "epsilon_high": 0.28, "delta": 1.5, "beta": 0.1, "use_bias_correction_kl": True,
                          "mask_truncated_completions": True, "top_entropy_quantile": 0.5, "entropy_coef": 0.01,
                          "off_policy_mask_threshold": 0.05, "temperature": 0.8, "scale_rewards": "batch",
                          "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.2,
                          "per_device_train_batch_size": GROUP * PROMPTS},
    "rloo": RLOO | {"beta": 0.05},
    "rloo_without_kl": RLOO | {"beta": 0.0, "epsilon": 0.1, "epsilon_high": 0.15},
    "rloo_null_rewards": RLOO | {"beta": 0.05, "rewards": "null"},
}
REWARDS = {
    "usual": [[1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0], [0.25, 0.5, 0.75, 0.1, 0.9, 0.35, 0.6, 0.2]],
    "null": [[1.0, None, 0.0, None, None, None, None, None], [0.25, None, 0.75, 0.1, None, None, None, None]],
    "equal": [[1.0, 0.0, 0.0, 1.0, 0.35, 0.35, 0.35, 0.35], [0.0] * 8],
}


class Draws:
    """Uniform numbers that every version of every library gives alike: SHA-256 of a name and a counter."""

    def __init__(self, name):
        self.name, self.count = name, 0

    def uniform(self):
        digest = hashlib.sha256(f"{self.name}/{self.count}".encode()).digest()
        self.count += 1
        return int.from_bytes(digest[:7], "big") / 2**56

    def below(self, bound):
        return int(self.uniform() * bound)


def make_rollouts():
    draws = Draws("rollouts")
    rollouts = []
    for group in range(PROMPTS):
        prompt = [1 + draws.below(256) for _ in range(3 + 4 * group)]
        for member in range(GROUP):
            length = 2 + draws.below(MAX_TOKENS - 2)
            is_truncated = member == 1
            completion = [1 + draws.below(256) for _ in range(MAX_TOKENS if is_truncated else length)]
            rollouts.append({"prompt": prompt, "completion": completion if is_truncated else completion + [END], "is_truncated": is_truncated})
    return rollouts


def adapter_values(name, size):
    """Factors of the policy and, near them, of the policy that sampled."""
    base, move = Draws("adapter"), Draws(name)
    return [0.12 * (2 * base.uniform() - 1) + 0.03 * (2 * move.uniform() - 1) for _ in range(size)]


def factors(model):
    """The trainable matrices in Tandem's order: layers, their linears, A then B."""
    by_name = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    ordered = []
    for layer in range(model.config.num_hidden_layers):
        for linear in LINEARS:
            for factor in ("lora_A", "lora_B"):
                ordered.append(by_name[f"base_model.model.model.layers.{layer}.{linear}.{factor}.default.weight"])
    assert len(ordered) == len(by_name), sorted(by_name)
    return ordered


def set_adapter(model, values):
    import torch

    begin = 0
    with torch.no_grad():
        for matrix in factors(model):
            matrix.copy_(torch.tensor(values[begin:begin + matrix.numel()], dtype=torch.float32).view_as(matrix))
            begin += matrix.numel()
    assert begin == len(values)


def make_trainer(config, rollouts, rollout_logprobs, rewards, folder):
    import datasets
    import peft
    import transformers
    import trl

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"), eos_token="<|endoftext|>",
                                                     pad_token="<|endoftext|>")
    fields = {key: value for key, value in config.items() if key != "trainer"}
    is_rloo = config.get("trainer") == "rloo"
    if is_rloo:
        fields.pop("loss_type")
    uses_vllm = fields.pop("use_vllm", False)
    args = (trl.RLOOConfig if is_rloo else trl.GRPOConfig)(output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", seed=1, **fields)

    def rollout_func(prompts, trainer):
        return {"prompt_ids": [r["prompt"] for r in rollouts], "completion_ids": [r["completion"] for r in rollouts],
                "logprobs": rollout_logprobs}

    def reward_function(values, name):
        def reward(completions, **columns):
            return list(values)
        reward.__name__ = name
        return reward

    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32", attn_implementation="eager")
    trainer = (trl.RLOOTrainer if is_rloo else trl.GRPOTrainer)(
        model=model, args=args, processing_class=tokenizer, **({} if is_rloo else {"rollout_func": rollout_func}),
        reward_funcs=[reward_function(values, f"reward_{k}") for k, values in enumerate(rewards)],
        train_dataset=datasets.Dataset.from_list([{"prompt": f"prompt {g}"} for g in range(PROMPTS)]),
        peft_config=peft.LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
                                    target_modules=[linear.split(".")[1] for linear in LINEARS]))
    # vLLM itself is not needed: rollout_func stands in for it, and what follows from use_vllm is TRL's own.
    trainer.use_vllm = uses_vllm
    if is_rloo:  # which has no rollout_func
        trainer._tokenize_prompts = lambda prompts: ([r["prompt"] for r in rollouts], None, {})
        trainer._generate_single_turn = lambda *arguments: [r["completion"] for r in rollouts]
    trainer._last_loaded_step = trainer.state.global_step
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    trainer.model.train()
    return trainer


def make_rollout_logprobs(rollouts, folder):
    """The old policy's log-probs at temperature 1, moved a little; TRL scores the old policy itself."""
    import torch

    trainer = make_trainer(BASE, rollouts, [[0.0] * len(r["completion"]) for r in rollouts], REWARDS["usual"], folder)
    size = sum(matrix.numel() for matrix in factors(trainer.model))
    set_adapter(trainer.model, adapter_values("old", size))
    noise = Draws("rollout noise")
    logprobs = []
    for rollout in rollouts:
        ids = torch.tensor([rollout["prompt"] + rollout["completion"]])
        with torch.no_grad():
            scores = torch.log_softmax(trainer.model(ids).logits[0].double(), dim=-1)
        first = len(rollout["prompt"])
        logprobs.append([round(scores[first + t - 1, token].item() + 0.3 * (noise.uniform() - 0.5) ** 3 * 8, 6)
                         for t, token in enumerate(rollout["completion"])])
    return size, logprobs


def run_case(config, rollouts, rollout_logprobs, rewards, size, folder):
    """Advantages, loss and gradient, and the log-probs that they were computed from."""
    import torch

    trainer = make_trainer(config, rollouts, rollout_logprobs, rewards, folder)
    set_adapter(trainer.model, adapter_values("old", size))
    inputs = trainer._generate_and_score_completions([{"prompt": f"prompt {i // GROUP}"} for i in range(len(rollouts))])
    set_adapter(trainer.model, adapter_values("policy", size))
    trainer.model.zero_grad()
    loss = 0.0
    each = config["per_device_train_batch_size"]
    for begin in range(0, len(rollouts), each):
        part = {key: value[begin:begin + each] if torch.is_tensor(value) and value.dim() > 0 and value.size(0) == len(rollouts) else value
                for key, value in inputs.items()}
        micro_batch_loss = trainer.compute_loss(trainer.model, part)
        micro_batch_loss.backward()
        loss += micro_batch_loss.item()
    gradient = torch.cat([matrix.grad.flatten() for matrix in factors(trainer.model)])
    return {"advantages": inputs["advantages"].tolist(), "loss": loss}, gradient


def rloo_job(config):
    low = config.get("epsilon", 0.2)
    return (f'loss {{ preset: LOSS_PRESET_RLOO epsilon_low: {low} epsilon_high: {config.get("epsilon_high", low)} '
            f'rollout_correction {{ mode: ROLLOUT_CORRECTION_MODE_NONE }} }} '
            f'advantage {{ kl_in_reward: {config["beta"]} }} rollout {{ sampling {{ temperature: 1 max_tokens: {MAX_TOKENS} }} }}')


def compute():
    import torch
    import transformers
    import trl

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rollouts = make_rollouts()
    tensors, cases = {}, []
    with tempfile.TemporaryDirectory() as folder:
        size, rollout_logprobs = make_rollout_logprobs(rollouts, folder)
        for name in ("old", "policy"):
            tensors[f"adapter/{name}"] = torch.tensor(adapter_values(name, size), dtype=torch.float32)
        for name, differences in CASES.items():
            differences = dict(differences)
            rewards = REWARDS[differences.pop("rewards", "usual")]
            config = BASE | differences
            case, gradient = run_case(config, rollouts, rollout_logprobs, rewards, size, folder)
            tensors[f"gradient/{name}"] = gradient
            if config.get("trainer") == "rloo":
                case["job"] = rloo_job(config)
            cases.append({"name": name, "config": config, "rewards": rewards} | case)
            print(f"{name}: loss {case['loss']:.6f}, largest gradient {gradient.abs().max():.3e}", flush=True)
    document = {"made_with": f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, fp32",
                "model": "qwen3", "rank": RANK, "alpha": ALPHA, "group_size": GROUP, "rollouts": rollouts,
                "rollout_logprobs": rollout_logprobs, "cases": cases}
    return document, tensors


def compare(found, expected, what):
    """Largest difference over the largest value."""
    import torch

    found, expected = torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    scale = max(expected.abs().max().item(), 1e-12)
    error = (found - expected).abs().max().item() / scale
    if error > 1e-6:
        sys.exit(f"{what}: differs by {error:.2e} of its largest value")


def check(document, tensors):
    from safetensors.torch import load_file

    stored = json.loads((GOLDEN / "cases.json").read_text())
    stored_tensors = load_file(GOLDEN / "tensors.safetensors")
    if [c["name"] for c in stored["cases"]] != [c["name"] for c in document["cases"]]:
        sys.exit("other cases are stored; --write")
    for old, new in zip(stored["cases"], document["cases"]):
        if old["config"] != new["config"]:
            sys.exit(f"{old['name']}: another config is stored; --write")
        compare(new["advantages"], old["advantages"], f"{old['name']} advantages")
        compare([new["loss"]], [old["loss"]], f"{old['name']} loss")
    for name, value in tensors.items():
        compare(value, stored_tensors[name], name)
    print(f"{len(document['cases'])} cases as stored")


def enter_environment(venv):
    """Runs this program again with the environment's Python, which is made when it is not there yet."""
    python = venv / "bin" / "python"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    stamp = venv / "requirements.sha256"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "-r", REQUIREMENTS], check=True)
        stamp.write_text(wanted)
    environment = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
    os.execve(python, [str(python), os.path.abspath(__file__), *sys.argv[1:], "--inside"], environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--test", help="a tandem_trl_test to run")
    parser.add_argument("--venv", type=pathlib.Path, default=pathlib.Path(os.environ.get("TANDEM_CACHE", pathlib.Path.home() / ".cache/tandem")) / "trl")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.write and not args.check:
        parser.error("one of --write and --check")
    if not args.inside:
        enter_environment(args.venv.absolute())
    document, tensors = compute()
    if args.write:
        from safetensors.torch import save_file

        GOLDEN.mkdir(parents=True, exist_ok=True)
        (GOLDEN / "cases.json").write_text(json.dumps(document, indent=1) + "\n")
        save_file(tensors, GOLDEN / "tensors.safetensors")
        os.chmod(GOLDEN / "tensors.safetensors", 0o644)
    if args.check:
        check(document, tensors)
    if args.test:
        sys.exit(subprocess.run([args.test]).returncode)


if __name__ == "__main__":
    main()
