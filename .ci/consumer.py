"""A user of the installed wheel: no checkout in sight, neither PyTorch nor CuPy installed, types visible to mypy."""

from importlib import resources

import numpy as np

import cupyfused

x = np.linspace(-2.0, 2.0, 5)
y = cupyfused.fused_scale_bias_clamp(x, 2.0, 0.5, min_val=-1.0, max_val=1.0)
assert y.tolist() == [-1.0, -1.0, 0.5, 1.0, 1.0], y

texts = {path.name for path in resources.files("cupyfused.cuda_src").iterdir()}
assert {"common.cuh", "elementwise.cuh", "sum_partials.cuh", "fused_scale_bias.cuh", "host_shim.h"} <= texts, texts
cupyfused.show_config()
