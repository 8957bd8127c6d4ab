"""`python -m gateway_svc`."""

import os
import sys

import structlog
import uvloop

from gateway_svc.access.keys_file import KeysFileError
from gateway_svc.server import serve
from gateway_svc.settings import GatewaySettings
from quire.service.lifecycle import end_at_interrupts, raise_file_limit
from quire.service.logs import configure_logging


def main() -> None:
    end_at_interrupts()
    raise_file_limit()
    settings = GatewaySettings.load()
    configure_logging("gateway", settings.log_level, settings.log_format)
    # `--tokenizer-threads` is the number of threads, not that of the library's own pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        uvloop.run(serve(settings))
    except (OSError, KeysFileError) as error:
        structlog.get_logger().error("cannot start", reason=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
