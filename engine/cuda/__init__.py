"""The decoder on Triton kernels, for a GPU; on a CPU the same kernels run in Triton's interpreter, for tests.

    programs.py   what runs on the device: one Triton program per kernel
    kernels.py    what may be passed to it: shapes, grids, launch options
    weights.py    tensors as those kernels want them
    network.py    the decoder as a ``Network``
    runner.py     the network behind ``Runner``
    device.py     which device there is, what it has to spare, and how torch must compute on it

Nothing here is imported unless the settings or the device ask for it, and without Triton torch's kernels serve instead.
"""
