"""Build one engine: `... trtc_build CHECKPOINT OUTPUT DTYPE MAX_BATCH_SIZE [CALIBRATION | --dummy]`

As `trtc build` does, but without a probe: random weights have no accuracy worth measuring. With
--dummy not even the checkpoint's are read: calibration would take long, and no kernel's time
depends on a weight.
"""

import sys
from pathlib import Path

from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest

_DUMMY = "--dummy"


def main() -> None:
    model, output, dtype, max_batch_size, *calibration = sys.argv[1:]
    request = BuildRequest(
        model=model,
        output=Path(output),
        dtype=dtype,
        target="cpu",
        force=True,
        calib=Path(calibration[0]) if calibration and calibration != [_DUMMY] else None,
        dummy_weights=calibration == [_DUMMY],
        max_batch_size=int(max_batch_size),
    )
    result = build(request, progress=lambda message: print(message, flush=True))
    print(f"{dtype}: {result.seconds:.1f} s")


if __name__ == "__main__":
    main()
