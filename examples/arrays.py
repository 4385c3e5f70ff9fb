"""The same function on NumPy arrays and, where there is a GPU, on CuPy arrays: the same array kind comes back.

    python examples/arrays.py

Scales video frames to normalised channels: uint8 in, float32 out, one kernel and no float copy of the frames on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyfused import fused_scale_bias_clamp

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)  # of ImageNet


def normalise(frames: Any, namespace: Any) -> Any:
    """Return frames (..., height, width, 3) of uint8 as float32 with mean 0 and deviation 1 per channel, within 3 deviations."""
    scale = namespace.asarray(1 / (255 * DEVIATION))
    bias = namespace.asarray(-MEAN / DEVIATION)
    return fused_scale_bias_clamp(frames, scale, bias, -3.0, 3.0)


def main() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (8, 270, 480, 3), dtype=np.uint8)
    on_cpu = normalise(frames, np)
    expected = np.clip((frames / 255 - MEAN) / DEVIATION, -3.0, 3.0)
    print(f"NumPy: {type(on_cpu).__name__} {on_cpu.dtype} {on_cpu.shape}, error {abs(on_cpu - expected).max():.1e}")
    try:
        import cupy

        on_gpu = normalise(cupy.asarray(frames), cupy)
    except Exception as error:  # CuPy is missing, or the driver
        print(f"CuPy: not here ({type(error).__name__})")
        return
    print(f"CuPy: {type(on_gpu).__name__} {on_gpu.dtype} {on_gpu.shape}, error {abs(cupy.asnumpy(on_gpu) - expected).max():.1e}")


if __name__ == "__main__":
    main()
