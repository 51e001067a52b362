"""accelerate launch … -m perl.train --recipe recipes/dapo_lora.yaml --config.…"""

from __future__ import annotations

import sys

from perl.base.errors import hear_signals, report_errors


def main() -> None:
    with hear_signals(), report_errors():
        from perl.training.grpo import train

        train(sys.argv[1:])


if __name__ == "__main__":
    main()
