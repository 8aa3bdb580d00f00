"""A tokenizer of bytes with a few merges, so that tokens depend on what stands beside them."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>")
MERGES = [("a", "b"), ("!", "Ċ"), ("Ċ", "Ċ"), ("c", "Ċ"), ("1", "2"), ("s", "e")]  # Ċ: a new line


def tokenizer(template=None):
    """Bytes, a few merges, and special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *map("".join, MERGES)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL[:3]])
    backend.add_tokens([AddedToken(word, special=False) for word in SPECIAL[3:]])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    made.chat_template = template
    return made
