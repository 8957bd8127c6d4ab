"""A client that streams until it is killed. Prints a line at the first token."""

import sys

from quire.client.client import Client
from quire.client.sampling_params import SamplingParams

for delta in Client(sys.argv[1]).stream_generate(
    [1, 2, 3, 4, 5, 6, 7], SamplingParams(temperature=0, max_tokens=88, ignore_eos=True)
):
    if delta.outputs:
        print("streaming", flush=True)
