"""An interpreter of Mosaic GPU kernels on simulated devices, with a race detector across devices.

Test tool only. It evaluates the kernel that Pallas traced, operation by operation, on every
warpgroup of every CTA of every device at once, and looks for unordered accesses. It replaces JAX's
own interpreter of such kernels, which knows neither peers' memory nor counters in GMEM and runs one
CTA after another. ``docs/checks.md`` says what it sees and what it cannot.

Read ``run.py`` first, then ``machine.py``; the model of memory is in ``views.py``.
"""
