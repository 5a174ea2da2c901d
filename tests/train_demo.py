"""A drafter from nothing: `python -m tests.train_demo FOLDER` (`make train-demo`), a few minutes on two cores.

Makes a two-layer target of random weights with a tokenizer, then runs the commands of the README on it: `dspark prepare` and
`dspark train`; the drafter must accept more than its untrained self, load for serving, and be exactly what the run says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from drafter.checkpoint import load_checkpoint
from services.cli import main as dspark

VOCABULARY = 256


def make_target(folder: Path) -> None:
    """Random weights by which the newest token says most of the next one, and a chat template of one word per token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.4)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")
    tokenizer.chat_template = "{% for m in messages %} w2 {{ m['content'] }} w3 {% endfor %}"
    tokenizer.save_pretrained(folder)


def make_prompts(path: Path, count: int) -> None:
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(4, VOCABULARY, (4,), generator=random).tolist() for _ in range(count)]
    path.write_text("\n".join(json.dumps({"turns": [" ".join(f"w{i}" for i in row)]}) for row in rows))


def say(step: str) -> None:
    print(step, flush=True)


def run(folder: Path, *, count: int = 1200, steps: int = 150) -> tuple[float, float]:
    """Expected accepted length at T 1 on held-out prompts after the first and the last step."""
    target, data, prompts = folder / "target", folder / "data", folder / "prompts.jsonl"
    say("[1/4] a target with two layers and random weights")
    make_target(target)
    make_prompts(prompts, count)
    # products this small are slower on two threads
    shared = ["--target", str(target), "--data", str(data), "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    prepare = ["prepare", *shared, "--prompts", str(prompts), "--shares", "none", "--max-tokens", "48"]
    say(f"[2/4] the target answers {count} prompts")
    assert dspark(prepare) == 0
    shape = ["--layers", "0", "--mask-token-id", "0", "--markov-rank", "64", "--draft-vocabulary", "200"]
    training = [
        "train",
        *shared,
        *shape,
        "--run",
        str(folder / "run"),
        "--max-len",
        "128",
        "--positions-per-step",
        "1500",
    ]
    training += ["--held-out-every", "10", "--cache", str(folder / "cache"), "--muon-lr", "0.01"]
    say(f"[3/4] training begins, and is stopped and saved before its {steps} steps are done")
    assert dspark([*training, "--steps", str(steps), "--minutes", "0.001", "--evaluate-every", "25"]) == 0
    say("[4/4] training goes on where it was saved")
    assert dspark([*training, "--steps", str(steps), "--out", str(folder / "drafter")]) == 0
    checkpoint = load_checkpoint(folder / "drafter", target, torch.float32, torch.device("cpu"))
    assert checkpoint.arch.kind == "dspark-vanilla"
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    measured = [row["held_out"]["tau_sampled"] for row in rows if "held_out" in row]
    return measured[0], measured[-1]


if __name__ == "__main__":
    first, last = run(Path(sys.argv[1]))
    print(json.dumps({"tau_sampled_first": first, "tau_sampled_last": last}))
    sys.exit(0 if last > first + 0.1 else "the drafter has not learnt")
