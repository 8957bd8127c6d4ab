"""A client that streams until it is killed; says so once the first token has come."""

import sys

from quire.client import Client
from quire.sampling import SamplingParams

for delta in Client(sys.argv[1]).stream_generate(
    [1, 2, 3, 4, 5, 6, 7], SamplingParams(temperature=0, max_tokens=88, ignore_eos=True)
):
    if delta.outputs:
        print("streaming", flush=True)
