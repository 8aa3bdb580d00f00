"""What every room uses: errors, types, reading of input, waiting, the machine."""

import logging


def _not_of_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


# What is taken of it, tokenizers, needs no PyTorch; it says when it is imported that models would.
logging.getLogger("transformers").addFilter(_not_of_torch)
