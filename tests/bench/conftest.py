from collections.abc import Iterator

import pytest
from scripted_openai import WITH_IDS, Handler, openai_server


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that streams three tokens per request."""
    for name, value in (("chunks", WITH_IDS), ("bodies", []), ("authorizations", [])):
        monkeypatch.setattr(Handler, name, value)
    with openai_server() as address:
        yield address
