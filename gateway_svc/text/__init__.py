"""Text of the served model: tokenizer, chat template, detokenization and stop strings.

Used by `generation`, by both APIs and by `server`. A served model also has its formats of output
(`output_formats`) and its compiler of grammars (`structured`).
"""
