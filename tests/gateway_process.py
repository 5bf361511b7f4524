"""A gateway as a process, for tests that stop and kill it: ``python -m tests.gateway_process FOLDER [slow]``."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from casemate.gateway.server import serve
from casemate.protocols import Generator
from tests.gateways import HideNamed, make


@dataclass
class Slow(Generator):
    """Answers within two seconds."""

    async def stream(self, prompt):
        for number in range(20):
            yield f"{number} "
            await asyncio.sleep(0.1)


def main() -> None:
    """Prints the address, and serves until a signal."""
    generator = Slow() if "slow" in sys.argv else None
    app = make(Path(sys.argv[1]), generator, (HideNamed("d3"),), requests_per_minute=1_000_000, shutdown_grace_s=10)
    serve(app, lambda address: print(address, flush=True))
    print("ended", flush=True)


if __name__ == "__main__":
    main()
