"""Logs record requests without their prompts and outputs."""

from pathlib import Path

import pytest
from tiny_models import FAMILIES, VOCAB_SIZE, save_model
from tiny_tokenizer import save_tokenizer

from quire.client.client import Client
from quire.client.errors import QuireError
from quire.client.sampling_params import SamplingParams
from quire.launcher.stack import LocalStack

PROMPT = "t71 t72 t73 t74 t75 t76 t77"
SERVICES = ("GATEWAY", "SCHEDULER", "WORKER")


@pytest.mark.slow
def test_prompts_and_outputs_stay_out_of_the_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(FAMILIES["llama"](), tmp_path)
    save_tokenizer(folder, VOCAB_SIZE)
    settings = {f"QUIRE_{service}_LOG_LEVEL": "debug" for service in SERVICES}
    with (
        LocalStack(str(folder), settings=settings, verbose=True) as stack,
        Client(stack.address) as client,
    ):
        params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
        output = client.generate(PROMPT, params, request_id="logged").outputs[0]
        with pytest.raises(QuireError):
            client.generate(PROMPT, SamplingParams(temperature=-1))
    logs = "".join(capfd.readouterr())
    assert "logged" in logs
    ids = [int(word[1:]) for word in PROMPT.split()]
    for secret in (PROMPT, output.text.strip(), str(ids), str(output.token_ids)):
        assert secret not in logs
