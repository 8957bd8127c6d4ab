"""`python -m benchmarks.engines.types.make_gguf LLAMA MODEL FILE` converts a model for llama.cpp.

Runs the converter of llama.cpp's source, which is in its environment, on the torch and the
transformers of this process.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

# Which regular expression splits texts is looked up by the tokenizer's behaviour, and the random
# model's is not in the list. Prompts are token ids, so it does not matter.
_PRE_TOKENIZER = "qwen2"


def main(llama: Path, model: Path, file: Path) -> None:
    source = llama / "source/vendor/llama.cpp"
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    # What else it needs.
    sys.path += map(str, llama.glob("lib/python*/site-packages"))
    base: Any = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda *_: _PRE_TOKENIZER
    converter: Any = importlib.import_module("convert_hf_to_gguf")
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outfile", str(file), "--outtype", "bf16"]
    converter.main()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
