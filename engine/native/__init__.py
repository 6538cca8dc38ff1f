"""Native CPU kernels: one C++ source, compiled once on the user's machine and called through ctypes.

build.py     source -> shared object, in the user's cache
prune.py     what stays in that cache
machine.py   which cores this process may use, and how much of them
library.py   the shared object's functions; pools of threads; packed weights
kernels.py   what may be passed to a kernel, checked before an address leaves Python; one record per call
tape.py      recorded steps: records in a row, replayed by one native call
tensors.py   the model's tensors, packed in the type that they came in
packed_file.py, weights_cache.py   the same from a file that an earlier start left, mapped into memory
weights.py   all weights of a decoder
network.py   the decoder as a sequence of these kernels
"""
