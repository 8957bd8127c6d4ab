"""Evaluates the demo model's texts for fifty fixed prompts: `python -m demo.evaluate`.

Measures the share of words that occur in the corpus, the share of texts that end by EOS, and the
longest copy of the corpus. Exits with 1 if a value is out of its bound.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.corpus import collect_documents

TEMPERATURE = 0.8
MAX_NEW_TOKENS = 256
MIN_KNOWN_WORDS = 0.9
MIN_ENDED = 0.8
MAX_COPY = 50

PROMPTS = (
    *("Return the", "Return a list of", "Return True if", "Return a new", "Return the name of"),
    *("Return a string", "Returns a tuple", "Returns the number of", "Raise an exception if"),
    *("Raised when", "If the file", "If the value is", "If the argument", "If no"),
    *("Create a new", "Create a socket", "Open the file", "Read at most", "Write the"),
    *("Close the connection", "Send a message to", "Wait until", "Get the current", "Set the"),
    *("Add a", "Remove all", "Find the first", "Parse the", "Convert a"),
    *("Compare two", "Compute the", "Check whether", "Call the function", "Initialize the"),
    *("Delete the", "Copy the", "Print the", "Split the string", "Format the"),
    *("Load the module", "This method", "This function", "This class", "This is"),
    *("A subclass of", "An object that", "The default", "The optional argument", "When the"),
    *("Note that",),
)


@dataclass(frozen=True)
class Evaluation:
    known_words: float  # share of the written words that occur in the corpus
    ended: float  # share of the texts that end by EOS within MAX_NEW_TOKENS
    longest_copy: int  # tokens of the longest run that also occurs in the corpus
    words: int
    tokens: int

    def passes(self) -> bool:
        return (
            self.known_words >= MIN_KNOWN_WORDS
            and self.ended >= MIN_ENDED
            and self.longest_copy < MAX_COPY
        )


@dataclass(frozen=True)
class Continuation:
    prompt: str
    text: str  # without the prompt
    ended: bool  # by EOS


def evaluate(folder: Path, documents: list[str]) -> Evaluation:
    """Continue all prompts with the model in `folder` and compare the texts with the corpus."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return measure(generate(folder), documents, tokenizer)


def generate(folder: Path, seed: int = 0) -> list[Continuation]:
    """Sample one text per prompt at TEMPERATURE from the whole vocabulary."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(seed)
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True, padding_side="left")
    outputs = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    written = outputs[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(written, skip_special_tokens=True)
    ended = (written == tokenizer.eos_token_id).any(dim=1).tolist()
    return [Continuation(*each) for each in zip(PROMPTS, texts, ended, strict=True)]


def measure(
    continuations: list[Continuation], documents: list[str], tokenizer: Tokenizer
) -> Evaluation:
    """Evaluate texts. Copies are searched in prompt and text together."""
    known = {word for document in documents for word in words_of(document)}
    written = [word for each in continuations for word in words_of(each.text)]
    texts = [each.prompt + each.text for each in continuations]
    return Evaluation(
        known_words=sum(word in known for word in written) / max(1, len(written)),
        ended=sum(each.ended for each in continuations) / len(continuations),
        longest_copy=longest_copy(token_lists(tokenizer, texts), token_lists(tokenizer, documents)),
        words=len(written),
        tokens=sum(map(len, token_lists(tokenizer, [each.text for each in continuations]))),
    )


def words_of(text: str) -> list[str]:
    """Runs of letters, case-sensitive: `readLine` and `readline` are two words."""
    return re.findall("[A-Za-z]+", text)


def token_lists(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]


def longest_copy(texts: list[list[int]], corpus: list[list[int]]) -> int:
    """Length of the longest run of tokens that occurs in a text and in a document."""
    length = 1
    while not set(ngrams(corpus, length)).isdisjoint(ngrams(texts, length)):
        length += 1
    return length - 1


def ngrams(token_lists: list[list[int]], length: int) -> Iterator[tuple[int, ...]]:
    for tokens in token_lists:
        for start in range(len(tokens) - length + 1):
            yield tuple(tokens[start : start + length])


def report(evaluation: Evaluation) -> str:
    """The evaluation as a table."""
    rows = (
        ("", "measured", "bound"),
        ("words in the corpus", f"{evaluation.known_words:.1%}", f">= {MIN_KNOWN_WORDS:.0%}"),
        ("texts ended by EOS", f"{evaluation.ended:.0%}", f">= {MIN_ENDED:.0%}"),
        ("longest copy, tokens", str(evaluation.longest_copy), f"< {MAX_COPY}"),
    )
    return "\n".join(f"{name:<24}{figure:>10}{bound:>10}" for name, figure, bound in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(__file__).with_name("model"))
    evaluation = evaluate(parser.parse_args().folder, collect_documents())
    print(report(evaluation))
    sys.exit(0 if evaluation.passes() else 1)


if __name__ == "__main__":
    main()
