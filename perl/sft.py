"""accelerate launch … -m perl.sft --config.model.model_name_or_path M --config.dataset.dataset_name_or_path FILE …"""

from __future__ import annotations

import sys

from perl.base.errors import hear_signals, report_errors


def main() -> None:
    with hear_signals(), report_errors():
        from perl.finetuning.sft import fine_tune

        fine_tune(sys.argv[1:])


if __name__ == "__main__":
    main()
