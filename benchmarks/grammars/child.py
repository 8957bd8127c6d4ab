"""`python -m benchmarks.grammars.child LIBRARY WORK`: measures one library in its own process.

WORK is a JSON file: {"tokenizer": path, "schemas": [...], "groups": [...]}. Prints one JSON object.
Times are those of the processor, of all threads together. Both libraries may be installed in
different environments, so this module imports few packages.
"""

import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from jsonschema.validators import validator_for
from numpy.typing import NDArray

_NUM_ROWS = 32
_NUM_STEPS = 48
_MAX_TOKENS = 400
_END_SHARE = 0.3

Bits = NDArray[np.int32]


def measure(library: str, work: Mapping[str, Any]) -> dict[str, object]:
    before_s = time.process_time()
    library_module = __import__(f"benchmarks.grammars.{library}_library", fromlist=["Library"])
    imported_s = time.process_time() - before_s
    with_torch = "torch" in sys.modules
    before_s = time.process_time()
    used = library_module.Library(Path(work["tokenizer"]))
    vocabulary_s = time.process_time() - before_s
    compiled, compile_ms, refusals = [], [], []
    for at, schema in enumerate(work["schemas"]):
        before_s = time.process_time()
        try:
            compiled.append((at, used.compile(schema)))
        except Exception as error:
            refusals.append([at, str(error).partition("\n")[0][:120]])
            continue
        compile_ms.append(1000 * (time.process_time() - before_s))
    return {
        "version": used.version,
        "import_s": imported_s,
        "imports_torch": with_torch,
        "vocabulary_s": vocabulary_s,
        "compile_ms": compile_ms,
        "refusals": refusals,
        **_random_outputs(used, compiled, work["schemas"]),
        **_mask_times(used, compiled),
        "suite": _suite(used, work["groups"]),
        "peak_mb": _peak_mb(),
    }


def _random_outputs(
    used: Any, compiled: Sequence[tuple[int, Any]], schemas: Sequence[Any]
) -> dict[str, object]:
    """One document per schema of tokens drawn from the masks, each checked by `jsonschema`."""
    wrong, unfinished, valid = [], 0, 0
    for at, grammar in compiled:
        text = _document(used, used.matcher(grammar), random.Random(at))
        if text is None:
            unfinished += 1
        elif _follows(text, schemas[at]):
            valid += 1
        else:
            wrong.append([at, text[:200]])
    return {"valid": valid, "unfinished": unfinished, "wrong": wrong}


def _document(used: Any, matcher: Any, generator: random.Random) -> str | None:
    """None if it is not finished within _MAX_TOKENS."""
    bitmask = used.bitmask(1)
    token_ids: list[int] = []
    while len(token_ids) < _MAX_TOKENS:
        used.fill([matcher], bitmask)
        possible = _possible(bitmask[0], used.end_token_id)
        tokens = possible[possible != used.end_token_id]
        may_end = len(tokens) < len(possible)
        if may_end and (not len(tokens) or generator.random() < _END_SHARE):
            return str(used.decode(token_ids))
        if not len(tokens):
            return None
        token_ids.append(int(tokens[generator.randrange(len(tokens))]))
        used.consume(matcher, token_ids[-1])
    return None


def _mask_times(used: Any, compiled: Sequence[tuple[int, Any]]) -> dict[str, object]:
    """Milliseconds of the masks of 32 rows of different schemas, from their second token on."""
    generator = random.Random(0)
    chosen = [grammar for _, grammar in generator.sample(list(compiled), _NUM_ROWS)]
    times_ms = []
    for _ in range(3):
        matchers = [used.matcher(grammar) for grammar in chosen]
        bitmask = used.bitmask(_NUM_ROWS)
        for _ in range(_NUM_STEPS):
            before_s = time.process_time()
            used.fill(matchers, bitmask)
            times_ms.append(1000 * (time.process_time() - before_s))
            for row, matcher in enumerate(matchers):
                tokens = _possible(bitmask[row], used.end_token_id)
                tokens = tokens[tokens != used.end_token_id]
                if len(tokens):
                    used.consume(matcher, int(tokens[generator.randrange(len(tokens))]))
                else:
                    matchers[row] = used.matcher(chosen[row])
    first, later = times_ms[:_NUM_STEPS], times_ms[_NUM_STEPS:]
    return {
        "mask_ms_first": median(first),
        "mask_ms": median(later),
        "mask_ms_p99": float(np.percentile(later, 99)),
        "mask_ms_max": max(times_ms),
    }


def _suite(used: Any, groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Instances of JSON-Schema-Test-Suite: whether the grammar takes the valid ones alone."""
    counts = dict.fromkeys(("groups", "served", "tests", "accepted_wrongly", "refused_wrongly"), 0)
    for group in groups:
        counts["groups"] += 1
        try:
            grammar = used.compile(group["schema"])
        except Exception:
            continue
        counts["served"] += 1
        for test in group["tests"]:
            counts["tests"] += 1
            accepted = used.accepts(grammar, json.dumps(test["data"], ensure_ascii=False))
            counts["accepted_wrongly"] += accepted and not test["valid"]
            counts["refused_wrongly"] += test["valid"] and not accepted
    return counts


def _peak_mb() -> float:
    """The peak resident size; `ru_maxrss` would include that of the parent."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1000


def _possible(bits: Bits, last_token_id: int) -> NDArray[np.int64]:
    unpacked = np.unpackbits(bits.view(np.uint8), bitorder="little")
    return unpacked[: last_token_id + 1].nonzero()[0]


def _follows(text: str, schema: Any) -> bool:
    try:
        return bool(validator_for(schema)(schema).is_valid(json.loads(text)))
    except ValueError:
        return False


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))))
